# SPDX-License-Identifier: Apache-2.0
"""Linear layers with int4 weights, against float64 products of activations quantised in the same way."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_arm import ops

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HALF_ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}


def random_weight(n: int, k: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales that bf16 holds, and zero points."""
    groups = k // group_size
    codes = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    scales = (torch.rand(n, groups) * 0.05 + 0.001).bfloat16().float()
    return codes, scales, torch.randint(-8, 8, (n, groups), dtype=torch.int8)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None) -> torch.Tensor:
    """scale * (code - zero point), in float64."""
    values = codes.double().unflatten(1, (scales.shape[1], -1))
    if zero_points is not None:
        values = values - zero_points.double()[:, :, None]
    return (values * scales.double()[:, :, None]).flatten(1)


def quantised(x: torch.Tensor) -> torch.Tensor:
    """The activations that the product uses, in float64."""
    codes, scales, zero_points = ops.quantise(x, symmetric=False)
    assert zero_points is not None
    return (codes.double() - zero_points.double()[:, None]) * scales.double()[:, None]


def assert_product(
    actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Within half a unit in the last place of the exact product, and what fp32 loses in summing groups."""
    activations = quantised(x)
    expected = activations @ weight.t()
    magnitude = (activations.abs() + activations.abs().amax(1, keepdim=True)) @ weight.abs().t()
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
    assert actual.shape == expected.shape
    assert actual.dtype == x.dtype
    error = (actual.double() - expected).abs()
    allowed = HALF_ULP[x.dtype] * expected.abs() + 1e-6 * magnitude + 2**-25
    assert bool((error <= allowed).all()), f"largest excess {(error - allowed).max():g}"


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int]:
    """k and a group size."""
    k = 32 * draw(st.one_of(st.integers(1, 12), st.just(48)))
    return k, draw(st.sampled_from(ops.int4_group_sizes(k)))


@settings(max_examples=80, deadline=None)
@given(
    rows=st.one_of(st.integers(0, 20), st.integers(60, 300)),
    n=st.one_of(st.integers(1, 40), st.sampled_from([64, 97])),
    shape=shapes(),
    dtype=st.sampled_from(DTYPES),
    has_zero_points=st.booleans(),
    has_bias=st.booleans(),
)
@example(rows=0, n=8, shape=(32, 32), dtype=torch.bfloat16, has_zero_points=True, has_bias=True)
@example(rows=1, n=1, shape=(96, 32), dtype=torch.bfloat16, has_zero_points=True, has_bias=True)
@example(rows=1300, n=9, shape=(64, 64), dtype=torch.bfloat16, has_zero_points=False, has_bias=True)
def test_linear_int4_agrees_with_float64(
    rows: int, n: int, shape: tuple[int, int], dtype: torch.dtype, has_zero_points: bool, has_bias: bool
) -> None:
    k, group_size = shape
    codes, scales, zero_points = random_weight(n, k, group_size)
    offsets = zero_points if has_zero_points else None
    x = (torch.randn(rows, k) + 0.3).to(dtype)
    bias = torch.randn(n).to(dtype) if has_bias else None
    packed = ops.pack_int4(codes, scales, offsets)
    output = ops.linear_int4(x, packed, n, group_size, has_zero_points, bias)
    assert_product(output, x, dequantise(codes, scales, offsets), bias)


def test_scales_of_groups_are_kept_in_bfloat16_and_those_of_outputs_in_float32() -> None:
    x, codes = torch.eye(64)[:1].contiguous(), torch.full((8, 64), 4, dtype=torch.int8)
    scale = 1 + 2**-10
    for group_size, kept in ((32, 1.0), (64, scale)):
        scales = torch.full((8, 64 // group_size), scale)
        output = ops.linear_int4(x, ops.pack_int4(codes, scales), 8, group_size)
        torch.testing.assert_close(output, torch.full((1, 8), 4 * kept), rtol=1e-6, atol=0)


def test_inputs_of_any_number_of_dimensions_and_strided_ones() -> None:
    codes, scales, _ = random_weight(24, 64, 32)
    packed, weight = ops.pack_int4(codes, scales), dequantise(codes, scales, None)
    x = torch.randn(2, 3, 128)[:, :, ::2]
    output = ops.linear_int4(x, packed, 24, 32)
    assert output.shape == (2, 3, 24)
    assert_product(output.flatten(0, 1), x.flatten(0, 1).contiguous(), weight)
    assert_product(ops.linear_int4(x[0, 0], packed, 24, 32)[None], x[0, :1].contiguous(), weight)
    assert ops.linear_int4(x[:0], packed, 24, 32).shape == (0, 3, 24)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [1, 5])
def test_what_is_not_finite_stays_visible(dtype: torch.dtype, value: float, rows: int) -> None:
    codes, scales, zero_points = random_weight(17, 64, 32)
    x = torch.randn(rows, 64).to(dtype)
    x[rows // 2, 9] = value
    output = ops.linear_int4(x, ops.pack_int4(codes, scales, zero_points), 17, 32, True)
    assert output[rows // 2].isnan().all()
    others = [row for row in range(rows) if row != rows // 2]
    assert output[others].isfinite().all()


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 9), shape=shapes(), magnitude=st.sampled_from([1e-3, 1.0, 30.0]))
def test_quantise_int4_rounds_to_the_nearest_step(n: int, shape: tuple[int, int], magnitude: float) -> None:
    k, group_size = shape
    weight = torch.randn(n, k) * magnitude
    codes, scales = ops.quantise_int4(weight, group_size)
    assert codes.dtype == torch.int8
    assert scales.dtype == torch.float32
    assert scales.shape == (n, k // group_size)
    if group_size < k:
        assert torch.equal(scales, scales.bfloat16().float())
    steps = scales.repeat_interleave(group_size, 1)
    exact = (weight.double() / steps.double()).clamp(-8, 7)
    assert bool(((codes.double() - exact).abs() <= 0.5 + 1e-5).all())
    # No value is so far that a smaller scale would clip it: at most one step, where the sign is the other.
    assert bool(((dequantise(codes, scales, None) - weight).abs() <= steps.abs() * 1.04).all())


def test_quantise_int4_of_zeros_ties_and_of_what_is_not_finite() -> None:
    weight = torch.zeros(4, 32)
    weight[1, :6] = torch.tensor([-8.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    weight[2, 3] = math.inf
    weight[3, 3] = math.nan
    codes, scales = ops.quantise_int4(weight, 32)
    assert not codes[0].any()
    assert scales[0] == 0
    assert codes[1, :6].tolist() == [-8, 0, 2, 2, 0, -2]
    assert scales[1] == 1
    assert scales[2:].isnan().all()
    output = ops.linear_int4(torch.randn(2, 32), ops.pack_int4(codes, scales), 4, 32)
    assert output[:, :2].isfinite().all()
    assert output[:, 2:].isnan().all()


@pytest.mark.parametrize(
    ("k", "expected"), [(32, (32,)), (96, (32, 96)), (4096, (32, 64, 128, 4096)), (40, ()), (0, ()), (131072, ())]
)
def test_group_sizes_that_a_weight_can_have(k: int, expected: tuple[int, ...]) -> None:
    assert ops.int4_group_sizes(k) == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"codes": torch.zeros(4, 40, dtype=torch.int8), "scales": torch.ones(4, 1)}, "k is 40: expected a multiple"),
        ({"codes": torch.zeros(4, 96)}, "codes is torch.float32"),
        ({"codes": torch.full((4, 96), 8, dtype=torch.int8)}, "codes has values outside -8 to 7"),
        ({"scales": torch.ones(4, 2)}, "group_size is 48: expected one of 32, 96 for k = 96"),
        ({"scales": torch.ones(4, 5)}, "scales is .*divides k = 96"),
        ({"scales": torch.ones(3, 3)}, "scales is torch.float32"),
        ({"scales": torch.ones(4, 3).double()}, "scales is torch.float64"),
        ({"zero_points": torch.zeros(4, 2, dtype=torch.int8)}, "zero_points is torch.int8"),
    ],
)
def test_what_cannot_be_packed_is_refused(changed: dict[str, torch.Tensor], message: str) -> None:
    arguments = {"codes": torch.zeros(4, 96, dtype=torch.int8), "scales": torch.ones(4, 3), **changed}
    with pytest.raises(ValueError, match=message):
        ops.pack_int4(**arguments)


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight is torch\.int8"):
        ops.quantise_int4(torch.zeros(4, 32, dtype=torch.int8), 32)
    with pytest.raises(ValueError, match="group_size is 16: expected one of 32, 64 for k = 64"):
        ops.quantise_int4(torch.zeros(4, 64), 16)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"input": torch.zeros(2, 64).double()}, "input has dtype Double"),
        ({"input": torch.zeros(2, 40)}, "k is 40, expected a multiple of 32"),
        ({"n": 25}, "packed is not"),
        ({"n": 0}, "n is 0, expected at least 1"),
        ({"group_size": 48}, "group_size is 48"),
        ({"has_zero_points": True}, "packed is not"),
        ({"bias": torch.zeros(24).bfloat16()}, "bias has dtype BFloat16, expected Float"),
        ({"bias": torch.zeros(23)}, "bias is not"),
    ],
)
def test_a_bad_argument_is_named(changed: dict[str, object], message: str) -> None:
    packed = ops.pack_int4(torch.zeros(24, 64, dtype=torch.int8), torch.ones(24, 2))
    arguments = {"input": torch.zeros(2, 64), "packed": packed, "n": 24, "group_size": 32, **changed}
    with pytest.raises(RuntimeError, match=f"linear_int4: {message}"):
        ops.linear_int4(**arguments)


def test_torch_compile_traces_the_op() -> None:
    codes, scales, _ = random_weight(24, 64, 32)
    packed = ops.pack_int4(codes, scales)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return ops.linear_int4(x * 2, packed, 24, 32) + 1

    x = torch.randn(3, 64)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
