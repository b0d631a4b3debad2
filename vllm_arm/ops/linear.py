# SPDX-License-Identifier: Apache-2.0
"""Linear layers by oneDNN, with weights packed once.

A packed weight is a flat tensor in the format that oneDNN picks for the weight's shape and dtype on this CPU: it means
nothing elsewhere. It has the weight's dtype, and a few more elements where the format has padding. Errors are
``RuntimeError`` naming the op and the argument.
"""

import torch

from vllm_arm.ops.library import register_mutating_fakes

register_mutating_fakes("pack_linear", "prepare_linear", "linear", "linear_int8", "quantise", "unpack_rows")


def onednn_version() -> str:
    """The version of oneDNN that the ops use, for instance ``"3.12.1"``."""
    return str(torch.ops.vllm_arm.onednn_version())


def linear_implementation(n: int, k: int, dtype: torch.dtype, rows: int) -> str:
    """The name that oneDNN gives to what multiplies ``rows`` rows by a weight ``[n, k]`` of ``dtype``.

    ``dtype`` is bfloat16, float16, float32 or int8. Raises ``ValueError`` as :func:`pack_linear`.
    """
    return str(torch.ops.vllm_arm.linear_implementation(_shape_only(n, k, dtype), rows))


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` (``[n, k]`` in bfloat16, float16, float32 or int8), packed for :func:`linear`.

    Raises ``ValueError`` with the reason where oneDNN has no optimised implementation for this CPU.
    """
    size = torch.ops.vllm_arm.packed_linear_size(weight)
    packed = torch.empty(size // weight.element_size(), dtype=weight.dtype)
    torch.ops.vllm_arm.pack_linear(packed, weight)
    return packed


def prepare_linear(n: int, k: int, dtype: torch.dtype, has_bias: bool) -> None:
    """Make all that :func:`linear` needs for such a weight, which otherwise the first call of each size makes."""
    torch.ops.vllm_arm.prepare_linear(_shape_only(n, k, dtype), has_bias)


def _shape_only(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    # One element that stands for them all: the ops look at shape and dtype.
    return torch.empty(1, dtype=dtype).expand(n, k)


def linear(input: torch.Tensor, packed: torch.Tensor, n: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``input @ weight.T + bias`` for the weight ``[n, k]`` that :func:`pack_linear` gave ``packed`` for.

    ``input`` is ``[..., k]`` in the weight's dtype, copied if it is not contiguous; ``bias`` is ``[n]`` in the same.
    Returns a contiguous ``[..., n]``.
    """
    if input.dim() != 2:
        return linear(input.reshape(-1, input.shape[-1]), packed, n, bias).view(*input.shape[:-1], n)
    output = torch.empty(input.shape[0], n, dtype=input.dtype)
    torch.ops.vllm_arm.linear(output, input.contiguous(), packed, bias)
    return output


def unpack_rows(packed: torch.Tensor, indices: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """``weight[indices]`` (``[..., k]``) for the floating-point weight ``[n, k]`` that ``packed`` was made from.

    ``indices`` is an int64 tensor of rows. Raises ``RuntimeError`` on an index that is none.
    """
    output = torch.empty(indices.numel(), k, dtype=packed.dtype)
    torch.ops.vllm_arm.unpack_rows(output, packed, indices.reshape(-1).contiguous(), n)
    return output.view(*indices.shape, k)


def quantise(
    input: torch.Tensor,
    symmetric: bool = True,
    static_scale: torch.Tensor | None = None,
    static_zero_point: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``input`` (``[rows, size]``) in int8, with ``input = scale * (output - zero_point)`` for each row.

    Rounds to nearest even. The scale is the row's largest magnitude / 127, or its range with 0 in it / 255 where
    ``symmetric`` is false, or ``static_scale`` (fp32 ``[1]``, with int32 ``static_zero_point`` ``[1]``). Returns the
    int8 tensor, fp32 scales ``[rows]``, and int32 zero points ``[rows]``, None where ``symmetric``. A row that is not
    finite has the scale NaN.
    """
    output = torch.empty(input.shape, dtype=torch.int8)
    scales = torch.empty(input.shape[0], dtype=torch.float32)
    zero_points = None if symmetric else torch.empty(input.shape[0], dtype=torch.int32)
    torch.ops.vllm_arm.quantise(output, scales, zero_points, input.contiguous(), static_scale, static_zero_point)
    return output, scales, zero_points


def linear_int8(
    input: torch.Tensor,
    packed: torch.Tensor,
    weight_scales: torch.Tensor,
    weight_sums: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    static_scale: torch.Tensor | None = None,
    static_zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """``input @ (weight * weight_scales).T + bias`` with ``input`` quantised as by :func:`quantise`.

    ``packed`` is :func:`pack_linear`'s of the int8 weight ``[n, k]``; ``weight_scales`` is fp32 ``[n]``. With
    ``weight_sums``, the int32 sums of the weight's rows (``[n]``), the quantisation is asymmetric. ``input`` is
    ``[..., k]`` in bfloat16, float16 or float32, ``bias`` is ``[n]`` in the same dtype. The products are summed
    exactly; the result is rounded once.
    """
    n = weight_scales.shape[0]
    rows = input.reshape(-1, input.shape[-1]).contiguous()
    output = torch.empty(rows.shape[0], n, dtype=input.dtype)
    torch.ops.vllm_arm.linear_int8(
        output, rows, packed, weight_scales, weight_sums, bias, static_scale, static_zero_point
    )
    return output.view(*input.shape[:-1], n)
