# SPDX-License-Identifier: Apache-2.0
"""Integer weights as checkpoints pack them, against references that take one number after the other."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.quantised import pack_words, round_to_groups
from vllm_arm.linear import int4_formats


def parameter(tensor: torch.Tensor, output_dim: int, packed_dim: int | None = None) -> Any:
    """A tensor with what vLLM's parameters say of themselves."""
    tensor.output_dim = output_dim  # type: ignore[attr-defined]
    tensor.packed_dim = packed_dim  # type: ignore[attr-defined]
    return tensor


def reference_value(codes: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, row: int, k: int) -> float:
    group = k // (codes.shape[1] // scales.shape[1])
    return float(scales[row, group]) * (int(codes[row, k]) - int(zero_points[row, group]))


@given(st.sampled_from([4, 8]), st.integers(0, 1), st.integers(1, 3), st.integers(0, 2**31 - 1))
def test_words_hold_the_lowest_bits_first(bits: int, dim: int, words: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(-(2**31), 2**31, (3, words) if dim else (words, 3), generator=generator).int()
    unpacked = int4_formats.unpack(packed, bits, dim)
    per_word = 32 // bits
    for first in range(unpacked.shape[0]):
        for second in range(unpacked.shape[1]):
            position = (first, second)[dim]
            word = packed[(first // per_word, second) if dim == 0 else (first, second // per_word)]
            expected = (int(word) >> bits * (position % per_word)) & ((1 << bits) - 1)
            assert int(unpacked[first, second]) == expected


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("inputs_first", [True, False])
def test_every_layout_gives_the_same_weight(bits: int, symmetric: bool, inputs_first: bool) -> None:
    """GPTQ's has inputs first; compressed-tensors' has outputs first. Zero points come with outputs first in both."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(bits))
    codes, scales, zero_points = round_to_groups(weight, bits, 32, symmetric)
    if inputs_first:
        words = parameter(pack_words(codes.t(), bits, 0), output_dim=1, packed_dim=0)
        factors = parameter(scales.t().contiguous(), output_dim=1)
    else:
        words = parameter(pack_words(codes, bits, 1), output_dim=0, packed_dim=1)
        factors = parameter(scales.clone(), output_dim=0)
    points = None if symmetric else parameter(pack_words(zero_points, bits, 0), output_dim=0, packed_dim=0)
    read = int4_formats.read(words, factors, points, bits, (64, 16))
    assert read.codes.dtype == torch.int8
    assert read.scales.dtype == torch.float32
    assert (read.zero_points is None) == symmetric
    dequantised = read.dequantise()
    for row in range(16):
        for k in range(64):
            assert float(dequantised[row, k]) == pytest.approx(reference_value(codes, scales, zero_points, row, k))
    assert (dequantised - weight).abs().max() <= scales.max()


def test_codes_that_are_not_packed() -> None:
    codes = torch.randint(-8, 8, (5, 64), dtype=torch.int8)
    scales = torch.rand(5, 1)
    read = int4_formats.read(parameter(codes, 0), parameter(scales, 0), None, 4, (64, 5))
    torch.testing.assert_close(read.dequantise(), codes * scales)


def test_what_pads_the_last_word_is_left_out() -> None:
    codes = torch.randint(0, 16, (16, 40))
    words = parameter(pack_words(codes, 4, 1), output_dim=0, packed_dim=1)
    points = parameter(pack_words(torch.full((16, 1), 3), 4, 0), output_dim=0, packed_dim=0)
    read = int4_formats.read(words, parameter(torch.ones(10, 1), 0), points, 4, (36, 10))
    assert read.codes.tolist() == (codes[:10, :36] - 8).tolist()
    assert read.zero_points is not None
    assert read.zero_points.tolist() == [[-5]] * 10


def test_gptq_stores_zero_points_less_one() -> None:
    """With inputs first, and 0 as the largest number."""
    points = torch.randint(0, 16, (16, 2), generator=torch.Generator().manual_seed(0))
    points[0] = 0
    stored = parameter(pack_words((points.t() - 1) & 15, 4, 1), output_dim=1, packed_dim=1)
    codes = parameter(torch.zeros(16, 64, dtype=torch.int8), output_dim=0)
    read = int4_formats.read(codes, parameter(torch.ones(16, 2), 0), stored, 4, (64, 16), points_less_one=True)
    assert read.zero_points is not None
    assert read.zero_points.tolist() == (points - 8).tolist()
