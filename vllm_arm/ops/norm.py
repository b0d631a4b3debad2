# SPDX-License-Identifier: Apache-2.0
"""RMSNorm."""

import torch

from vllm_arm.ops.library import register_mutating_fakes

MAXIMUM_DIMENSIONS = 3
"""The most that the kernels take without a copy; see RowLayout in csrc/norm/rms_norm.h."""

register_mutating_fakes("rms_norm", "fused_add_rms_norm")


def rms_norm(input: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """``input / sqrt(mean(input^2) + epsilon) * weight`` over the last dimension (Zhang and Sennrich, 2019).

    ``input`` is ``[..., hidden_size]`` in bfloat16, float16 or float32, with unit stride in its last dimension;
    ``weight`` is ``[hidden_size]`` in the same dtype or float32, None for ones. The sum and the products are in fp32
    and rounded once. Returns a contiguous tensor of ``input``'s shape and dtype. Raises ``RuntimeError`` naming the
    argument on anything else.
    """
    flat = input if input.dim() <= MAXIMUM_DIMENSIONS else input.flatten(0, -2)
    output = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device)
    torch.ops.vllm_arm.rms_norm(output, flat, weight, epsilon)
    return output.view(input.shape)


def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual += input``, then ``input = rms_norm(residual, weight, epsilon)``, in place and in one pass.

    The mean is taken over the sum before it is rounded to ``residual``'s dtype. ``input`` and ``residual`` are
    ``[..., hidden_size]``, of up to 3 dimensions, of one shape and dtype and may be strided except in their last
    dimension; the rest is as in :func:`rms_norm`. Returns both.
    """
    torch.ops.vllm_arm.fused_add_rms_norm(input, residual, weight, epsilon)
    return input, residual
