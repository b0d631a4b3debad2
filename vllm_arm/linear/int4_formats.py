# SPDX-License-Identifier: Apache-2.0
"""Integer weights as checkpoints hold them (AWQ, GPTQ, compressed-tensors), brought into one form."""

from typing import Any, NamedTuple

import torch

# Where in a word AWQ has the eight numbers, from the first.
_AWQ_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)


class IntegerWeight(NamedTuple):
    """A weight ``[n, k]``: ``scales * (codes - zero_points)``, where groups of inputs share a scale.

    ``codes`` is int8 ``[n, k]``, ``scales`` fp32 ``[n, groups]``, ``zero_points`` int8 ``[n, groups]`` or None for 0.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None

    def dequantise(self, rows: slice = slice(None)) -> torch.Tensor:
        """``rows`` of the weight in fp32, ``[n, k]``."""
        scales = self.scales[rows]
        values = self.codes[rows].unflatten(1, (scales.shape[1], -1)).to(torch.float32)
        if self.zero_points is not None:
            values -= self.zero_points[rows, :, None]
        return values.mul_(scales[:, :, None]).flatten(1)


def unpack(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The numbers of 4 or 8 ``bits`` that int32 words hold along ``dim``, the lowest bits first, as uint8."""
    # The bytes of a word are in that order on the little-endian machines that this runs on.
    parts = packed.movedim(dim, -1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 4:
        parts = torch.stack((parts & 15, parts >> 4), -1).flatten(-2)
    return parts.movedim(-1, dim)


def unpack_awq(packed: torch.Tensor) -> torch.Tensor:
    """The numbers of four bits that int32 words hold along the last dimension in AWQ's order, as uint8."""
    in_order = unpack(packed, 4, -1).unflatten(-1, (-1, len(_AWQ_POSITIONS)))
    return in_order[..., list(_AWQ_POSITIONS)].flatten(-2)


def from_words(codes: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, bits: int) -> IntegerWeight:
    """A weight of unsigned ``codes`` ``[n, k]``, ``scales`` and ``zero_points`` ``[n, groups]``; ``bits`` is 4 or 8.

    Without ``zero_points`` the middle of the range stands for 0.
    """
    middle = 1 << (bits - 1)
    points = None if zero_points is None else _signed(zero_points, middle).contiguous()
    return IntegerWeight(_signed(codes, middle).contiguous(), scales.float().contiguous(), points)


def read(
    weight: Any, scales: Any, zero_points: Any, bits: int, shape: tuple[int, int], *, points_less_one: bool = False
) -> IntegerWeight:
    """The weight of ``shape`` ``(k, n)`` that vLLM's parameters hold; ``bits`` is 4 or 8.

    ``weight`` is int8 codes ``[n, k]``, or words of unsigned numbers packed along its ``packed_dim``; so are
    ``zero_points``, None where the middle of the range stands for 0. Which of their dimensions are outputs is told by
    ``output_dim``, as vLLM's parameters do. ``points_less_one``: the zero points are stored so, as GPTQ does.
    """
    k, n = shape
    middle = 1 << (bits - 1)
    if weight.dtype == torch.int8:
        codes = weight.detach()
    else:
        codes = _signed(_by_output(unpack(weight.detach(), bits, weight.packed_dim), weight)[:n, :k], middle)
    points = None
    if zero_points is not None:
        unpacked = unpack(zero_points.detach(), bits, zero_points.packed_dim)
        if points_less_one:
            unpacked = (unpacked + 1) & (2 * middle - 1)
        points = _signed(_by_output(unpacked, zero_points)[:n], middle)
    return IntegerWeight(codes.contiguous(), _by_output(scales.detach(), scales).float().contiguous(), points)


def _by_output(values: torch.Tensor, parameter: Any) -> torch.Tensor:
    return values.t() if parameter.output_dim == 1 else values


def _signed(values: torch.Tensor, middle: int) -> torch.Tensor:
    # Flipping the highest bit subtracts the middle; 4-bit numbers then want their sign extended.
    return values.to(torch.int8).sub_(middle) if middle < 128 else (values ^ middle).view(torch.int8)
