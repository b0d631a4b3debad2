# SPDX-License-Identifier: Apache-2.0
"""Linear layers on weights in panels, against float64 and exact integer products."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_arm import ops

DTYPES = [torch.bfloat16, torch.float16]
HALF_ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
ROWS = st.one_of(st.integers(0, 20), st.integers(60, 300))
OUTPUTS = st.one_of(st.integers(1, 40), st.sampled_from([96, 97]))
INPUTS = st.one_of(st.integers(1, 40), st.sampled_from([64, 129]))


def assert_product(
    actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Within half a unit in the last place of the result, and fp32 sums of k products."""
    expected = x.double() @ weight.double().t()
    magnitude = x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        expected += bias.double()
        magnitude += bias.double().abs()
    assert actual.dtype == x.dtype
    allowed = HALF_ULP[x.dtype] * expected.abs() + 2**-22 * math.sqrt(x.shape[-1]) * magnitude + 1e-7
    error = (actual.double() - expected).abs()
    assert bool((error <= allowed).all()), f"largest excess {(error - allowed).max():g}"


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, n=OUTPUTS, k=INPUTS, dtype=st.sampled_from(DTYPES), has_bias=st.booleans())
@example(rows=0, n=8, k=8, dtype=torch.bfloat16, has_bias=True)
@example(rows=5, n=1, k=1, dtype=torch.bfloat16, has_bias=True)
def test_the_product_agrees_with_float64(rows: int, n: int, k: int, dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype)
    bias = torch.randn(n).to(dtype) if has_bias else None
    output = ops.panel_linear(x, ops.pack_panels(weight), n, bias)
    assert output.shape == (rows, n)
    assert_product(output, x, weight, bias)


@settings(max_examples=60, deadline=None)
@given(
    rows=ROWS,
    n=OUTPUTS,
    k=INPUTS,
    dtype=st.sampled_from([*DTYPES, torch.float32]),
    has_bias=st.booleans(),
    symmetric=st.booleans(),
)
def test_int8_is_summed_exactly(rows: int, n: int, k: int, dtype: torch.dtype, has_bias: bool, symmetric: bool) -> None:
    x, weight = torch.randn(rows, k).to(dtype), torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scales, bias = torch.rand(n) + 0.1, torch.randn(n).to(dtype) if has_bias else None
    sums = None if symmetric else weight.sum(1, dtype=torch.int32)
    output = ops.panel_linear_int8(x, ops.pack_panels(weight), scales, sums, bias)
    quantised, x_scales, zero_points = ops.quantise(x, symmetric)
    shifted = quantised.int() if zero_points is None else quantised.int() - zero_points[:, None]
    expected = (shifted.double() @ weight.double().t()) * x_scales.double()[:, None] * scales.double()
    if bias is not None:
        expected += bias.double()
    assert output.dtype == dtype
    allowed = HALF_ULP[dtype] * expected.abs() + 4e-7 * (expected.abs() + (0 if bias is None else bias.double().abs()))
    # fp16 has no more digits below its smallest normal number.
    assert bool(((output.double() - expected).abs() <= allowed + 2**-25).all())


def test_a_static_scale_is_used_for_every_row() -> None:
    x, weight = torch.randn(11, 40), torch.randint(-127, 128, (24, 40), dtype=torch.int8)
    scales, static, point = torch.rand(24), torch.tensor([0.02]), torch.tensor([7], dtype=torch.int32)
    packed = ops.pack_panels(weight)
    quantised = (x / 0.02).round().clamp(-128, 127).double()
    expected = quantised @ weight.double().t() * 0.02 * scales.double()
    output = ops.panel_linear_int8(x, packed, scales, static_scale=static)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    shifted = ((x / 0.02).round() + 7).clamp(-128, 127).double() - 7
    expected = shifted @ weight.double().t() * 0.02 * scales.double()
    sums = weight.sum(1, dtype=torch.int32)
    output = ops.panel_linear_int8(x, packed, scales, sums, static_scale=static, static_zero_point=point)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_that_fit_no_scratch_are_computed_in_parts() -> None:
    x = torch.randn(32000).bfloat16().repeat(1100, 1)
    x[:, 0] += 1000 * torch.arange(1100)
    weight = torch.randn(3, 32000).bfloat16()
    output = ops.panel_linear(x, ops.pack_panels(weight), 3)
    some = torch.tensor([0, 7, 8, 255, 256, 511, 512, 1023, 1024, 1095, 1096, 1099])
    assert_product(output[some], x[some], weight)


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("rows", [1, 3, 70, 600])
def test_threads_change_no_result(rows: int) -> None:
    weight = torch.randn(250, 2048)
    x = torch.randn(rows, 2048).bfloat16()
    floats, bytes_ = ops.pack_panels(weight.bfloat16()), ops.pack_panels(weight.mul(20).to(torch.int8))
    scales = torch.rand(250)
    several = ops.panel_linear(x, floats, 250), ops.panel_linear_int8(x, bytes_, scales)
    torch.set_num_threads(1)
    assert torch.equal(floats, ops.pack_panels(weight.bfloat16()))
    one = ops.panel_linear(x, floats, 250), ops.panel_linear_int8(x, bytes_, scales)
    assert torch.equal(several[0], one[0])
    assert torch.equal(several[1], one[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_tensors_and_more_dimensions(dtype: torch.dtype) -> None:
    wide = torch.randn(6, 100).to(dtype)
    weight = torch.randn(80, 70).to(dtype)[:, :40]
    packed = ops.pack_panels(weight)
    assert_product(ops.panel_linear(wide[:, 10:50], packed, 80), wide[:, 10:50], weight)
    cube = torch.randn(2, 3, 40).to(dtype)
    assert torch.equal(
        ops.panel_linear(cube, packed, 80).flatten(0, 1), ops.panel_linear(cube.flatten(0, 1), packed, 80)
    )
    eights = torch.randint(-127, 128, (80, 40), dtype=torch.int8)
    assert ops.panel_linear_int8(cube, ops.pack_panels(eights), torch.rand(80)).shape == (2, 3, 80)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_visible(value: float) -> None:
    x, weight = torch.randn(9, 64).bfloat16(), torch.randint(-100, 100, (32, 64), dtype=torch.int8)
    x[4, 7] = value
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    for output in (
        ops.panel_linear(x, ops.pack_panels(weight.bfloat16()), 32),
        ops.panel_linear_int8(x, ops.pack_panels(weight), torch.rand(32)),
    ):
        assert not output[4].isfinite().any()
        assert output[others].isfinite().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_packing_costs_no_memory_beyond_padding(dtype: torch.dtype) -> None:
    weight = torch.randn(1536, 768).to(dtype)
    assert ops.pack_panels(weight).nbytes <= 1.05 * weight.nbytes


def test_torch_compile_traces_the_ops() -> None:
    weight, eights = torch.randn(48, 32).bfloat16(), torch.randint(-127, 128, (48, 32), dtype=torch.int8)
    packed, packed_eights, scales = ops.pack_panels(weight), ops.pack_panels(eights), torch.rand(48)

    def layer(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return ops.panel_linear(x * 2, packed, 48) + ops.panel_linear_int8(x, packed_eights, scales)

    x = torch.randn(7, 32).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (7, 3):
        torch.testing.assert_close(compiled(x[:rows], packed), layer(x[:rows], packed))


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 100), k=st.integers(1, 200), dtype=st.sampled_from(DTYPES))
def test_rows_are_read_from_the_panels(n: int, k: int, dtype: torch.dtype) -> None:
    weight = torch.randn(n, k).to(dtype)
    indices = torch.randint(0, n, (3, 5))
    assert torch.equal(ops.unpack_panel_rows(ops.pack_panels(weight), indices, n, k), weight[indices])


@pytest.mark.parametrize("index", [-1, 48])
def test_a_row_that_there_is_not_is_refused(index: int) -> None:
    packed = ops.pack_panels(torch.randn(48, 32).bfloat16())
    with pytest.raises(RuntimeError, match=f"unpack_panel_rows: index {index} is not below 48"):
        ops.unpack_panel_rows(packed, torch.tensor([0, index]), 48, 32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bias": torch.zeros(47).bfloat16()}, "panel_linear: bias has 47 elements, expected 48"),
        ({"bias": torch.zeros(48)}, "panel_linear: bias has dtype Float, expected that of input, BFloat16"),
        ({"packed": torch.zeros(3)}, "panel_linear: packed has 12 bytes, expected 3072 for a weight of 48 x 32"),
        ({"input": torch.zeros(2, 32)}, "panel_linear: input has dtype Float, expected bfloat16, float16"),
        ({"input": torch.zeros(2, 32).to(torch.int8)}, "panel_linear: input has dtype int8"),
    ],
)
def test_a_bad_argument_is_named(changed: dict[str, torch.Tensor], message: str) -> None:
    arguments = {"input": torch.zeros(2, 32).bfloat16(), "packed": ops.pack_panels(torch.randn(48, 32).bfloat16())}
    with pytest.raises(RuntimeError, match=message):
        ops.panel_linear(**{**arguments, "n": 48, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight_scales": torch.zeros(24).double()}, "weight_scales has dtype Double, expected Float"),
        ({"weight_sums": torch.zeros(23, dtype=torch.int32)}, "weight_sums has 23 elements, expected 24"),
        ({"bias": torch.zeros(24).bfloat16()}, "bias has dtype BFloat16, expected that of input, Float"),
    ],
)
def test_a_bad_argument_of_int8_is_named(changed: dict[str, torch.Tensor], message: str) -> None:
    packed = ops.pack_panels(torch.zeros(24, 40, dtype=torch.int8))
    arguments = {"input": torch.zeros(2, 40), "packed": packed, "weight_scales": torch.zeros(24), **changed}
    with pytest.raises(RuntimeError, match=f"panel_linear_int8: {message}"):
        ops.panel_linear_int8(**arguments)


def test_a_weight_that_is_none_is_refused() -> None:
    with pytest.raises(RuntimeError, match="weight has 1 dimensions, expected 2"):
        ops.pack_panels(torch.zeros(4).bfloat16())
    with pytest.raises(RuntimeError, match="weight is empty"):
        ops.pack_panels(torch.zeros(0, 4).bfloat16())
    with pytest.raises(RuntimeError, match="weight has dtype Float, expected bfloat16, float16 or int8"):
        ops.pack_panels(torch.zeros(4, 4))
    with pytest.raises(RuntimeError, match="weight has stride 6 in its last dimension, expected 1"):
        ops.pack_panels(torch.zeros(4, 6).bfloat16().t()[:, :4])
