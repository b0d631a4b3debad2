# SPDX-License-Identifier: Apache-2.0
"""Linear layers with weights of four bits and activations quantised to int8 on the way, with KleidiAI's help on Arm."""

import torch

from vllm_arm.ops.library import register_mutating_fakes

INT4_GROUP_SIZES = (32, 64, 128)
"""How many inputs may share a scale; besides, all ``k`` of them may, which is one scale for each output."""
LARGEST_INT4_INPUTS = 65536
"""More inputs might overflow the exact sums."""

register_mutating_fakes("pack_int4", "linear_int4")


def int4_group_sizes(k: int) -> tuple[int, ...]:
    """The group sizes that a weight with ``k`` inputs can have, from the smallest; none where it cannot be packed."""
    if k <= 0 or k % INT4_GROUP_SIZES[0] or k > LARGEST_INT4_INPUTS:
        return ()
    return (*(size for size in INT4_GROUP_SIZES if size < k and k % size == 0), k)


def _check_sizes(k: int, group_size: int) -> None:
    sizes = int4_group_sizes(k)
    if not sizes:
        raise ValueError(
            f"k is {k}: expected a multiple of {INT4_GROUP_SIZES[0]}, at most {LARGEST_INT4_INPUTS}, for int4 weights"
        )
    if group_size not in sizes:
        raise ValueError(f"group_size is {group_size}: expected one of {', '.join(map(str, sizes))} for k = {k}")


def quantise_int4(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` (``[n, k]``, floating point) as int8 codes from -8 to 7 and fp32 scales ``[n, k // group_size]``.

    The value of largest magnitude in a group becomes -8, so that a scale may be negative, and the others are rounded to
    the nearest step, ties to even. Scales of groups smaller than ``k`` are rounded to bfloat16, as :func:`pack_int4`
    keeps them. A group that is not finite has the scale NaN. Raises ``ValueError`` on a shape or a group size that
    cannot be packed.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"weight is {weight.dtype} {list(weight.shape)}: expected floating point [n, k]")
    n, k = weight.shape
    _check_sizes(k, group_size)
    groups = weight.detach().float().reshape(n, k // group_size, group_size)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = largest / -8
    if group_size < k:
        scales = scales.bfloat16().float()
    is_usable = scales.isfinite() & (scales != 0)
    codes = (groups / torch.where(is_usable, scales, torch.ones_like(scales))).round_().clamp_(-8, 7)
    codes = torch.where(is_usable, codes, torch.zeros_like(codes)).to(torch.int8)
    scales = torch.where(largest.isfinite(), scales, torch.full_like(scales, torch.nan))
    return codes.view(n, k), scales.squeeze(2)


def pack_int4(codes: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None = None) -> torch.Tensor:
    """The weight ``scale * (code - zero_point)``, packed for :func:`linear_int4`, as a flat uint8 tensor.

    ``codes`` is int8 ``[n, k]`` from -8 to 7, ``scales`` fp32 and ``zero_points`` int8 ``[n, k // group_size]``. Scales
    of groups smaller than ``k`` are kept in bfloat16. Raises ``ValueError`` naming the argument on anything else.
    """
    if codes.dtype != torch.int8 or codes.dim() != 2 or not codes.shape[0]:
        raise ValueError(f"codes is {codes.dtype} {list(codes.shape)}: expected int8 [n, k]")
    n, k = codes.shape
    if scales.dtype != torch.float32 or scales.dim() != 2 or scales.shape[0] != n or not scales.shape[1]:
        raise ValueError(f"scales is {scales.dtype} {list(scales.shape)}: expected float32 [{n}, k // group_size]")
    groups = scales.shape[1]
    if k % groups:
        raise ValueError(f"scales is {list(scales.shape)}: expected a number of groups that divides k = {k}")
    _check_sizes(k, k // groups)
    if zero_points is not None and (zero_points.dtype != torch.int8 or zero_points.shape != scales.shape):
        raise ValueError(f"zero_points is {zero_points.dtype} {list(zero_points.shape)}: expected int8 [{n}, {groups}]")
    if bool(((codes < -8) | (codes > 7)).any()):
        raise ValueError("codes has values outside -8 to 7")
    size = torch.ops.vllm_arm.packed_int4_size(n, k, k // groups, zero_points is not None)
    packed = torch.empty(size, dtype=torch.uint8)
    offsets = None if zero_points is None else zero_points.contiguous()
    torch.ops.vllm_arm.pack_int4(packed, codes.contiguous(), scales.contiguous(), offsets)
    return packed


def linear_int4(
    input: torch.Tensor,
    packed: torch.Tensor,
    n: int,
    group_size: int,
    has_zero_points: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``input @ weight.T + bias`` for the weight ``[n, k]`` that :func:`pack_int4` gave ``packed`` for.

    ``input`` is ``[..., k]`` in bfloat16, float16 or float32, copied if it is not contiguous; ``bias`` is ``[n]`` in
    the same dtype. Each row of ``input`` is quantised to int8 with a scale and a zero point of its own, rounded to
    nearest even. The products within a group are summed exactly, the groups in fp32; the result is rounded once. A row
    that is not finite gives NaN. Returns a contiguous ``[..., n]``. Raises ``RuntimeError`` naming the argument on
    anything else.
    """
    rows = input.reshape(-1, input.shape[-1]).contiguous()
    output = torch.empty(rows.shape[0], n, dtype=input.dtype)
    torch.ops.vllm_arm.linear_int4(output, rows, packed, group_size, has_zero_points, bias)
    return output.view(*input.shape[:-1], n)
