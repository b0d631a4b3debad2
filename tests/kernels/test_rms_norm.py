# SPDX-License-Identifier: Apache-2.0
"""The op rms_norm, every variant that this CPU can run, against float64; and its place in vLLM's IR."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_arm import _host, ops

EPSILON = 1e-5
# Half a unit in the last place, relative, plus what fp32 sums and products lose.
RELATIVE_ERROR = {torch.bfloat16: 2**-8 + 1e-5, torch.float16: 2**-11 + 1e-5, torch.float32: 1e-5}
DTYPES = list(RELATIVE_ERROR)


def reference(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """In float64, from the values that the op was given."""
    x = x.double()
    normalised = x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()
    return normalised if weight is None else normalised * weight.double()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.double() - expected).abs()
    allowed = RELATIVE_ERROR[actual.dtype] * expected.abs() + 1e-6
    assert bool((error <= allowed).all()), f"largest excess {(error - allowed).max():g}"


shapes = st.one_of(
    st.tuples(st.integers(1, 300)),
    st.tuples(st.integers(0, 9), st.integers(1, 300)),
    st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(1, 300)),
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 40)),
)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), weight_kind=st.sampled_from(["same", "float32", "none"]))
def test_rms_norm_agrees_with_float64(shape: tuple[int, ...], dtype: torch.dtype, weight_kind: str) -> None:
    x = torch.randn(shape).mul(3).to(dtype)
    weights = {"same": dtype, "float32": torch.float32}
    weight = torch.randn(shape[-1]).to(weights[weight_kind]) if weight_kind in weights else None
    output = ops.rms_norm(x, weight, EPSILON)
    assert output.shape == x.shape
    assert output.dtype == dtype
    assert_close(output, reference(x, weight))


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 9),
    size=st.integers(1, 300),
    padding=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
)
def test_fused_add_works_in_place_on_strided_rows(tokens: int, size: int, padding: int, dtype: torch.dtype) -> None:
    wide = torch.randn(tokens, size + padding).to(dtype)
    x, rest = wide[:, :size], wide[:, size:].clone()
    residual = torch.randn(tokens, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    total = x.double() + residual.double()
    output, new_residual = ops.fused_add_rms_norm(x, residual, weight, EPSILON)
    assert output is x
    assert new_residual is residual
    assert_close(output, reference(total, weight))
    assert_close(new_residual, total)
    assert torch.equal(wide[:, size:], rest), "what lies between the rows is not touched"


def test_heads_of_a_wider_tensor_need_no_copy() -> None:
    qkv = torch.randn(5, 8 * 64 + 2 * 64).bfloat16()
    heads = qkv[:, 64 : 64 + 6 * 64].unflatten(1, (6, 64))
    assert not heads.is_contiguous()
    weight = torch.randn(64).bfloat16()
    assert_close(ops.rms_norm(heads, weight, EPSILON), reference(heads, weight))


def test_many_rows_are_shared_between_threads() -> None:
    x = torch.randn(4096, 128).bfloat16()
    weight = torch.randn(128).bfloat16()
    expected = ops.rms_norm(x, weight, EPSILON)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(ops.rms_norm(x, weight, EPSILON), expected), "the same bits for any number of threads"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(2, 8, dtype=torch.int32), None, "rms_norm: input has dtype Int"),
        (torch.zeros(2, 8), torch.zeros(7), r"weight must be contiguous with shape \[8\]"),
        (torch.zeros(2, 8), torch.zeros(8).bfloat16(), "weight has dtype BFloat16, expected float32 or that of input"),
        (torch.zeros(8, 2).t(), None, "input has stride 2 in its last dimension, expected 1"),
    ],
)
def test_a_bad_argument_is_named(x: torch.Tensor, weight: torch.Tensor | None, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.rms_norm(x, weight, EPSILON)


def test_a_residual_of_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match="residual has another shape than input"):
        ops.fused_add_rms_norm(torch.zeros(2, 8), torch.zeros(3, 8), None, EPSILON)


def test_torch_compile_traces_the_ops() -> None:
    def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = ops.fused_add_rms_norm(x * 2, residual, weight, EPSILON)
        return ops.rms_norm(x + 1, weight, EPSILON), residual

    x, residual, weight = torch.randn(6, 64), torch.randn(6, 64), torch.randn(64)
    expected = block(x.clone(), residual.clone(), weight)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(x.clone(), residual.clone(), weight)
    for actual, wanted in zip(compiled, expected, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf, of binutils, is not installed")
def test_the_library_needs_no_python_and_no_aten() -> None:
    library = Path(ops.__file__).parent.with_name("_C.so")
    dynamic = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in dynamic
    assert "python" not in dynamic
    symbols = subprocess.run(
        ["readelf", "--dyn-syms", "-W", library], capture_output=True, text=True, check=True
    ).stdout
    undefined = [line.split()[-1] for line in symbols.splitlines() if " UND " in line]
    assert any(name.startswith("aoti_torch_") for name in undefined)
    assert not [name for name in undefined if name.startswith(("_ZN2at", "_ZNK2at", "_ZN3c10", "Py"))]


def active_isa_under(forced: str) -> subprocess.CompletedProcess[str]:
    code = "from vllm_arm import ops; print(ops.active_isa('rms_norm'))"
    environment = {**os.environ, "VLLM_ARM_ISA": forced}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("isa", ["portable", *_host.operations()["rms_norm"][-1:]])
def test_the_forced_variant_is_the_active_one(isa: str) -> None:
    missing = _host.missing_features(isa, _host.host_features())
    result = active_isa_under(isa)
    assert result.stdout.strip() == isa, f"{missing}{result.stderr}"


def test_forcing_what_the_cpu_lacks_is_an_error() -> None:
    features = _host.host_features()
    lacking = [isa for isa in ("neon", "bf16", "sve") if _host.missing_features(isa, features)]
    if not lacking:
        pytest.skip("this CPU runs every variant")
    result = active_isa_under(lacking[0])
    assert result.returncode != 0
    assert f"VLLM_ARM_ISA={lacking[0]}: this CPU lacks" in result.stderr
