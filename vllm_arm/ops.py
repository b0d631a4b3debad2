# SPDX-License-Identifier: Apache-2.0
"""The only door to the kernels: loads the library, documents each op, and gives torch.compile what it needs.

Importing this module loads the library into torch, and raises ``ImportError`` where it is missing.

Each function here allocates its outputs and calls the op of the same name in ``torch.ops.vllm_arm``, which runs the
kernel variant that ``_host.select_isa`` picks for this CPU (see ``VLLM_ARM_ISA``).
"""

from pathlib import Path

import torch

_LIBRARY = Path(__file__).with_name("_C.so")
MAXIMUM_DIMENSIONS = 3
"""The most that the kernels take without a copy; see RowLayout in csrc/norm/rms_norm.h."""


def _load() -> None:
    if not _LIBRARY.exists():
        raise ImportError(f"{_LIBRARY} is missing: this vllm-arm was installed without its extension")
    torch.ops.load_library(str(_LIBRARY))
    # Ops that write into their arguments and return nothing have nothing to compute on fake tensors.
    for name in ("rms_norm", "fused_add_rms_norm"):
        torch.library.register_fake(f"vllm_arm::{name}", lambda *_: None)


_load()


def active_isa(operation: str) -> str:
    """The kernel variant that ``operation`` runs on this CPU, for instance ``"neon"``.

    Raises ``RuntimeError`` on an unknown op, and where ``VLLM_ARM_ISA`` names a variant that this CPU cannot run.
    """
    return str(torch.ops.vllm_arm.active_isa(operation))


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
