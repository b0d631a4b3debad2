# SPDX-License-Identifier: Apache-2.0
"""RMSNorm for vLLM: our kernels as a provider of its IR ops ``rms_norm`` and ``fused_add_rms_norm``."""

from typing import TYPE_CHECKING

import torch

from vllm_arm import _host, envs, ops

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PROVIDER = "vllm_arm"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _supports(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    return (
        variance_size is None
        and x.dtype in _DTYPES
        and x.dim() <= ops.MAXIMUM_DIMENSIONS
        and x.stride(-1) == 1
        and (weight is None or weight.dtype in (x.dtype, torch.float32))
    )


def register() -> None:
    """Register the provider with vLLM's IR ops. Does nothing the second time."""
    from vllm import ir

    if PROVIDER in ir.ops.rms_norm.impls:
        return

    def rms_norm(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> torch.Tensor:
        return ops.rms_norm(x, weight, epsilon)

    def fused_add_rms_norm(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.fused_add_rms_norm(x, x_residual, weight, epsilon)

    # vLLM checks that both functions of a provider have the signature of its own implementation.
    ir.ops.rms_norm.register_impl(
        PROVIDER, supports_args=lambda x, weight, epsilon, variance_size=None: _supports(x, weight, variance_size)
    )(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(
        PROVIDER,
        supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: (
            _supports(x, weight, variance_size) and x_residual.stride(-1) == 1
        ),
        inplace=True,
    )(fused_add_rms_norm)


def choice(compiles: bool) -> tuple[bool, str]:
    """Whether RMSNorm runs on our kernels, and why. ``compiles``: the model runs through torch.compile's inductor."""
    if not envs.VLLM_ARM_NORM:
        return False, "VLLM_ARM_NORM=0"
    isa = _host.select_isa(_host.operations()["rms_norm"], _host.host_features(), envs.VLLM_ARM_ISA)
    if compiles and isa == "portable":
        return (
            False,
            "inductor's generated code is vectorised for this CPU, the portable kernel is not",
        )
    return True, f"{isa} kernel"


def providers(vllm_config: "VllmConfig") -> list[str]:
    """The providers of the norm ops in order of preference, for ``vllm_config``."""
    from vllm.config.compilation import CompilationMode

    compilation = vllm_config.compilation_config
    compiles = compilation.mode != CompilationMode.NONE and compilation.backend == "inductor"
    return [PROVIDER, "native"] if choice(compiles)[0] else ["native"]
