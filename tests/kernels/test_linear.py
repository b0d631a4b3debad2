# SPDX-License-Identifier: Apache-2.0
"""Linear layers with packed weights, against float64."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_arm import ops

ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}


def supported(dtype: torch.dtype) -> bool:
    try:
        ops.linear_implementation(64, 64, dtype, 1)
    except ValueError:
        return False
    return True


DTYPES = [dtype for dtype in ULP if supported(dtype)]
pytestmark = pytest.mark.skipif(not DTYPES, reason="oneDNN has no optimised product for this CPU")


def assert_product(
    actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Within half a unit in the last place of the result, and fp32 sums of k products."""
    expected = x.double() @ weight.double().t()
    if bias is not None:
        expected += bias.double()
    assert actual.shape == expected.shape
    assert actual.dtype == x.dtype
    error = (actual.double() - expected).abs()
    magnitude = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    allowed = ULP[x.dtype] * expected.abs() + 2**-23 * math.sqrt(x.shape[-1]) * magnitude + 1e-30
    assert bool((error <= allowed).all()), f"largest excess {(error - allowed).max():g}"


@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(0, 20), st.integers(60, 300)),
    n=st.one_of(st.integers(1, 40), st.sampled_from([64, 97])),
    k=st.one_of(st.integers(1, 40), st.sampled_from([64, 129])),
    dtype=st.sampled_from(DTYPES or [torch.float32]),
    has_bias=st.booleans(),
)
@example(rows=0, n=8, k=8, dtype=torch.float32, has_bias=True)
@example(rows=5, n=1, k=7, dtype=torch.float32, has_bias=True)
def test_linear_agrees_with_float64(rows: int, n: int, k: int, dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype)
    bias = torch.randn(n).to(dtype) if has_bias else None
    packed = ops.pack_linear(weight)
    assert_product(ops.linear(x, packed, n, bias), x, weight, bias)


@pytest.mark.parametrize("rows", [64, 65, 100, 127, 128, 250, 1000, 2048, 2049, 5000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_are_computed_in_blocks(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 33).to(dtype), torch.randn(24, 33).to(dtype)
    assert_product(ops.linear(x, ops.pack_linear(weight), 24), x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_tensors_and_more_dimensions(dtype: torch.dtype) -> None:
    wide = torch.randn(6, 100).to(dtype)
    weight = torch.randn(80, 70).to(dtype)[:, :40]
    packed = ops.pack_linear(weight)
    assert_product(ops.linear(wide[:, 10:50], packed, 80), wide[:, 10:50], weight)
    assert_product(ops.linear(wide[:, ::2][:, :40], packed, 80), wide[:, ::2][:, :40], weight)
    cube = torch.randn(2, 3, 40).to(dtype)
    assert ops.linear(cube, packed, 80).shape == (2, 3, 80)
    assert torch.equal(ops.linear(cube, packed, 80).flatten(0, 1), ops.linear(cube.flatten(0, 1), packed, 80))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_visible(dtype: torch.dtype, value: float) -> None:
    x, weight = torch.randn(9, 64).to(dtype), torch.randn(32, 64).to(dtype)
    x[4, 7] = value
    output = ops.linear(x, ops.pack_linear(weight), 32)
    assert not output[4].isfinite().any()
    assert output[:4].isfinite().all()
    assert output[5:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_costs_no_memory_beyond_padding(dtype: torch.dtype) -> None:
    weight = torch.randn(1536, 768).to(dtype)
    assert ops.pack_linear(weight).nbytes <= 1.05 * weight.nbytes


def test_torch_compile_traces_the_op() -> None:
    dtype = DTYPES[0]
    weight = torch.randn(48, 32).to(dtype)
    packed = ops.pack_linear(weight)

    def layer(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return ops.linear(x * 2, packed, 48) + 1

    x = torch.randn(7, 32).to(dtype)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (7, 3):
        torch.testing.assert_close(compiled(x[:rows], packed), layer(x[:rows], packed))


def test_threads_share_what_a_shape_needs() -> None:
    dtype = DTYPES[0]
    x, weight = torch.randn(60, 61).to(dtype), torch.randn(43, 61).to(dtype)
    packed = ops.pack_linear(weight)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda rows: ops.linear(x[:rows], packed, 43), [1, 2, 3, 17, 40, 60] * 4))
    for output in outputs:
        assert_product(output, x[: len(output)], weight)


def test_preparing_changes_no_result() -> None:
    dtype = DTYPES[0]
    x, weight = torch.randn(70, 56).to(dtype), torch.randn(40, 56).to(dtype)
    packed = ops.pack_linear(weight)
    before = ops.linear(x, packed, 40)
    ops.prepare_linear(40, 56, dtype, False)
    assert torch.equal(ops.linear(x, packed, 40), before)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bias": torch.zeros(47)}, "linear: bias has 47 elements, expected 48"),
        ({"bias": torch.zeros(48).double()}, "linear: bias has dtype Double, expected that of input, Float"),
        (
            {"packed": torch.zeros(3, dtype=torch.uint8)},
            "linear: packed has 3 bytes, expected [0-9]+ for a weight of 48 x 32",
        ),
        ({"input": torch.zeros(2, 32).int()}, "linear: input has dtype Int"),
    ],
)
@pytest.mark.skipif(torch.float32 not in DTYPES, reason="oneDNN has no optimised fp32 product for this CPU")
def test_a_bad_argument_is_named(changed: dict[str, torch.Tensor], message: str) -> None:
    packed = ops.pack_linear(torch.randn(48, 32))
    with pytest.raises(RuntimeError, match=message):
        ops.linear(**{"input": torch.zeros(2, 32), "packed": packed, "n": 48, **changed})  # type: ignore[arg-type]


def test_a_weight_that_is_none_is_refused() -> None:
    with pytest.raises(RuntimeError, match="weight has 1 dimensions, expected 2"):
        ops.pack_linear(torch.zeros(4))
    with pytest.raises(RuntimeError, match="weight is empty"):
        ops.pack_linear(torch.zeros(0, 4))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 200), k=st.integers(1, 200), dtype=st.sampled_from(DTYPES or [torch.float32]))
def test_rows_are_read_from_the_packed_weight(n: int, k: int, dtype: torch.dtype) -> None:
    weight = torch.randn(n, k).to(dtype)
    indices = torch.randint(0, n, (3, 5))
    assert torch.equal(ops.unpack_rows(ops.pack_linear(weight), indices, n, k), weight[indices])


@pytest.mark.parametrize("index", [-1, 48])
def test_a_row_that_there_is_not_is_refused(index: int) -> None:
    packed = ops.pack_linear(torch.randn(48, 32).to(DTYPES[0]))
    with pytest.raises(RuntimeError, match=f"unpack_rows: index {index} is not below 48"):
        ops.unpack_rows(packed, torch.tensor([0, index]), 48, 32)
