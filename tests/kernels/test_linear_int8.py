# SPDX-License-Identifier: Apache-2.0
"""Quantised activations, and linear layers with int8 weights, against exact integer products."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_arm import ops

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HALF_ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}


def has_product() -> bool:
    try:
        ops.linear_implementation(64, 64, torch.int8, 1)
    except ValueError:
        return False
    return True


needs_product = pytest.mark.skipif(not has_product(), reason="oneDNN has no optimised int8 product for this CPU")


def assert_rounded(quantised: torch.Tensor, exact: torch.Tensor) -> None:
    """To nearest, ties to even, where a tie is within what fp32 loses in the division."""
    is_tie = ((exact.abs() % 1) - 0.5).abs() < 1e-4
    difference = quantised.double() - exact.round()
    assert bool((difference[~is_tie] == 0).all())
    assert bool(((quantised.double() - exact)[is_tie].abs() < 0.5001).all())


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 5),
    size=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    offset=st.sampled_from([0.0, 2.0, -30.0]),
    magnitude=st.sampled_from([1e-4, 1.0, 100.0]),
)
def test_quantise_rounds_to_nearest_even(
    rows: int, size: int, dtype: torch.dtype, offset: float, magnitude: float
) -> None:
    x = ((torch.randn(rows, size) + offset) * magnitude).to(dtype)
    quantised, scales, none = ops.quantise(x)
    assert none is None
    torch.testing.assert_close(scales, x.float().abs().amax(1) / 127)
    assert_rounded(quantised, x.double() / scales.double()[:, None].clamp(min=1e-45))

    quantised, scales, zero_points = ops.quantise(x, symmetric=False)
    assert zero_points is not None
    torch.testing.assert_close(scales, (x.float().amax(1).clamp(min=0) - x.float().amin(1).clamp(max=0)) / 255)
    exact = x.double() / scales.double()[:, None].clamp(min=1e-45) + zero_points.double()[:, None]
    assert_rounded(quantised, exact.clamp(-128, 127))


def test_ties_go_to_the_even_neighbour() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]])
    assert ops.quantise(x)[0].tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


def test_a_static_scale_saturates() -> None:
    x = torch.tensor([[1.0, -1.0, 300.0, -300.0]])
    scale, zero_point = torch.tensor([0.5]), torch.tensor([10], dtype=torch.int32)
    assert ops.quantise(x, static_scale=scale)[0].tolist() == [[2, -2, 127, -128]]
    shifted = ops.quantise(x, symmetric=False, static_scale=scale, static_zero_point=zero_point)
    assert shifted[0].tolist() == [[12, 8, 127, -128]]
    assert shifted[2] is not None
    assert shifted[2].tolist() == [10]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_of_zeros_and_rows_that_are_not_finite(dtype: torch.dtype, symmetric: bool) -> None:
    x = torch.randn(5, 37).to(dtype)
    x[0] = 0
    x[1, 36], x[2, 0], x[3, 5] = math.nan, math.inf, -math.inf
    quantised, scales, _ = ops.quantise(x, symmetric)
    assert scales[0] == 0
    assert scales[1:4].isnan().all()
    assert scales[4].isfinite()
    assert not quantised[:4].any()


def reference(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, symmetric: bool
) -> torch.Tensor:
    """The integer product, exact, scaled in float64."""
    quantised, x_scales, zero_points = ops.quantise(x, symmetric)
    shifted = quantised.int() if zero_points is None else quantised.int() - zero_points[:, None]
    product = (shifted.double() @ weight.double().t()) * x_scales.double()[:, None] * scales.double()
    return product if bias is None else product + bias.double()


@needs_product
@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(0, 20), st.integers(60, 300)),
    n=st.one_of(st.integers(1, 40), st.sampled_from([64, 97])),
    k=st.one_of(st.integers(1, 40), st.sampled_from([64, 129])),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    symmetric=st.booleans(),
)
def test_linear_int8_sums_exactly(
    rows: int, n: int, k: int, dtype: torch.dtype, has_bias: bool, symmetric: bool
) -> None:
    x = torch.randn(rows, k).to(dtype)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scales, bias = torch.rand(n) + 0.1, torch.randn(n).to(dtype) if has_bias else None
    sums = None if symmetric else weight.sum(1, dtype=torch.int32)
    output = ops.linear_int8(x, ops.pack_linear(weight), scales, sums, bias)
    expected = reference(x, weight, scales, bias, symmetric)
    assert output.dtype == dtype
    allowed = HALF_ULP[dtype] * expected.abs() + 4e-7 * (expected.abs() + (0 if bias is None else bias.double().abs()))
    # fp16 has no more digits below its smallest normal number.
    assert bool(((output.double() - expected).abs() <= allowed + 2**-25).all())


@needs_product
def test_many_rows_and_many_outputs_are_computed_in_blocks() -> None:
    x, weight = torch.randn(70, 32), torch.randint(-127, 128, (70000, 32), dtype=torch.int8)
    scales = torch.rand(70000)
    output = ops.linear_int8(x, ops.pack_linear(weight), scales)
    expected = reference(x, weight, scales, None, True)
    torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=1e-6)


@needs_product
def test_a_static_scale_is_used_for_every_row() -> None:
    x, weight = torch.randn(6, 40), torch.randint(-127, 128, (24, 40), dtype=torch.int8)
    scales, static = torch.rand(24), torch.tensor([0.02])
    output = ops.linear_int8(x, ops.pack_linear(weight), scales, static_scale=static)
    quantised = (x / 0.02).round().clamp(-128, 127)
    expected = quantised.double() @ weight.double().t() * 0.02 * scales.double()
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@needs_product
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_visible(value: float) -> None:
    x, weight = torch.randn(4, 64).bfloat16(), torch.randint(-127, 128, (16, 64), dtype=torch.int8)
    x[2, 9] = value
    output = ops.linear_int8(x, ops.pack_linear(weight), torch.rand(16))
    assert not output[2].isfinite().any()
    assert output[[0, 1, 3]].isfinite().all()


@needs_product
def test_torch_compile_traces_the_op() -> None:
    weight = torch.randint(-127, 128, (24, 40), dtype=torch.int8)
    packed, scales = ops.pack_linear(weight), torch.rand(24)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return ops.linear_int8(x * 2, packed, scales) + 1

    x = torch.randn(3, 40)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


@needs_product
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight_scales": torch.zeros(24).double()}, "weight_scales has dtype Double, expected Float"),
        ({"weight_sums": torch.zeros(23, dtype=torch.int32)}, "weight_sums has 23 elements, expected 24"),
        ({"bias": torch.zeros(24).bfloat16()}, "bias has dtype BFloat16, expected Float"),
    ],
)
def test_a_bad_argument_is_named(changed: dict[str, torch.Tensor], message: str) -> None:
    packed = ops.pack_linear(torch.zeros(24, 40, dtype=torch.int8))
    arguments = {"input": torch.zeros(2, 40), "packed": packed, "weight_scales": torch.zeros(24), **changed}
    with pytest.raises(RuntimeError, match=f"linear_int8: {message}"):
        ops.linear_int8(**arguments)
