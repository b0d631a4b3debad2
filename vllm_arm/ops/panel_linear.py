# SPDX-License-Identifier: Apache-2.0
"""Linear layers by kernels of our own, on weights in panels.

A weight in panels is a flat tensor of the weight's dtype, a few elements larger, in the order that the kernel variant
reads it: it means nothing to another variant. Errors are ``RuntimeError`` naming the op and the argument.
"""

import torch

from vllm_arm.ops.library import register_mutating_fakes

register_mutating_fakes("pack_panels", "panel_linear", "panel_linear_int8", "unpack_panel_rows")


def pack_panels(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` (``[n, k]`` in bfloat16, float16 or int8, with unit stride in its last dimension), in panels."""
    size = torch.ops.vllm_arm.panels_size(weight)
    packed = torch.empty(size // weight.element_size(), dtype=weight.dtype)
    torch.ops.vllm_arm.pack_panels(packed, weight)
    return packed


def panel_linear(input: torch.Tensor, packed: torch.Tensor, n: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``input @ weight.T + bias`` for the weight ``[n, k]`` that :func:`pack_panels` gave ``packed`` for.

    ``input`` is ``[..., k]`` in the weight's dtype, bfloat16 or float16, copied if it is not contiguous; ``bias`` is
    ``[n]`` in the same. Sums are in fp32 and rounded once. Returns a contiguous ``[..., n]``.
    """
    if input.dim() != 2:
        return panel_linear(input.reshape(-1, input.shape[-1]), packed, n, bias).view(*input.shape[:-1], n)
    output = torch.empty(input.shape[0], n, dtype=input.dtype)
    torch.ops.vllm_arm.panel_linear(output, input.contiguous(), packed, bias)
    return output


def panel_linear_int8(
    input: torch.Tensor,
    packed: torch.Tensor,
    weight_scales: torch.Tensor,
    weight_sums: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    static_scale: torch.Tensor | None = None,
    static_zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`vllm_arm.ops.linear_int8`, with ``packed`` from :func:`pack_panels`."""
    n = weight_scales.shape[0]
    rows = input.reshape(-1, input.shape[-1]).contiguous()
    output = torch.empty(rows.shape[0], n, dtype=input.dtype)
    torch.ops.vllm_arm.panel_linear_int8(
        output, rows, packed, weight_scales, weight_sums, bias, static_scale, static_zero_point
    )
    return output.view(*input.shape[:-1], n)


def unpack_panel_rows(packed: torch.Tensor, indices: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """``weight[indices]`` (``[..., k]``) for the weight ``[n, k]`` that ``packed`` was made from.

    ``indices`` is an int64 tensor of rows. Raises ``RuntimeError`` on an index that is none.
    """
    output = torch.empty(indices.numel(), k, dtype=packed.dtype)
    torch.ops.vllm_arm.unpack_panel_rows(output, packed, indices.reshape(-1).contiguous(), n)
    return output.view(*indices.shape, k)
