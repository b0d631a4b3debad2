# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with FP8 weights, which no Neoverse multiplies: int8 with a scale for each output as they are loaded."""

import functools
from typing import Any

import torch
from torch.nn import functional

from vllm_arm import envs
from vllm_arm.linear import requantise
from vllm_arm.logs import get_logger, info_once

logger = get_logger(__name__)


def install() -> None:
    """Put our kernel first in vLLM's lists for FP8. Does nothing the second time, or with ``VLLM_ARM_LINEAR=0``."""
    if not envs.VLLM_ARM_LINEAR:
        return
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.utils import w8a8_utils
    from vllm.platforms import PlatformEnum

    for kernels in (linear._POSSIBLE_FP8_KERNELS, linear._POSSIBLE_FP8_BLOCK_KERNELS, linear._POSSIBLE_WFP8A16_KERNELS):
        if kernel_class() not in kernels[PlatformEnum.CPU]:
            kernels[PlatformEnum.CPU].insert(0, kernel_class())
    w8a8_utils.requantize_with_max_scale = keep_scales


def keep_scales(
    weight: torch.Tensor, weight_scale: torch.Tensor, logical_widths: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales ``[n]`` for each output of layers that are computed as one, and ``weight`` (``[n, k]``) as it is.

    In place of vLLM's way to a single scale for all of them, by an op that CPUs do not have. A single scale stays one:
    scales that the checkpoint has not, for it holds the layers as one, are negative.
    """
    scales = weight_scale.flatten()
    if len(logical_widths) == 1 or scales.numel() != len(logical_widths) or scales.min() < 0:
        return scales.max(), weight
    return scales.repeat_interleave(torch.tensor(logical_widths)), weight


def dequantise(
    weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None, rows: slice = slice(None)
) -> torch.Tensor:
    """``rows`` of ``weight`` (``[n, k]``, FP8) times ``scales``, in fp32.

    ``scales`` has one for each ``block`` of outputs and inputs, or, where there are no blocks, for each output or all.
    """
    n, k = weight.shape
    values, factors = weight[rows].to(torch.float32), scales.to(torch.float32)
    if block is None:
        return values.mul_(factors.reshape(-1, 1).expand(n, 1)[rows])
    outputs, inputs = block
    return values.mul_(factors.repeat_interleave(outputs, 0)[:n][rows].repeat_interleave(inputs, 1)[:, :k])


@functools.cache
def kernel_class() -> type:
    """Our kernel, as a class for vLLM's lists."""
    from vllm.model_executor.kernels.linear import FP8ScaledMMLinearKernel

    class ArmFp8ScaledMMLinearKernel(FP8ScaledMMLinearKernel):  # type: ignore[misc]  # vLLM is not typed for mypy
        """FP8 weights with scales for tensors, channels or blocks, requantised; activations in int8 per token."""

        def __init__(self, c: Any, layer_param_names: list[str]) -> None:
            # Not vLLM's: it prepares the quantisation of activations to FP8.
            self.config = c
            self.layer_param_names = layer_param_names

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            self.int8_kernel = None
            if getattr(layer, "_cpu_skip_gemm_dispatch", False):
                # Latent attention reads the plain weight.
                return
            info_once(logger, "FP8 weights: requantised to int8 with a scale for each output")
            weight, scales, block = self._weight_of(layer)
            n, k = weight.shape
            requantise.drop(layer, "weight", "weight_scale", "weight_scale_inv", "input_scale", "input_scale_ub")
            self.int8_kernel = requantise.to_int8(layer, n, k, lambda rows: dequantise(weight, scales, block, rows))

        @staticmethod
        def _weight_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int] | None]:
            block = getattr(layer, "weight_block_size", None)
            scales = getattr(layer, "weight_scale_inv", None)
            # Without blocks vLLM has turned the weight, for torch's product.
            weight = layer.weight.detach() if block is not None else layer.weight.detach().t()
            return weight, (layer.weight_scale if scales is None else scales).detach(), block

        def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if self.int8_kernel is None:
                return functional.linear(x, dequantise(*self._weight_of(layer)).to(x.dtype), bias)
            return self.int8_kernel.apply_weights(layer, x, bias)

        def apply_scaled_mm(self, **_: Any) -> torch.Tensor:
            raise NotImplementedError("activations are never FP8 here")

    return ArmFp8ScaledMMLinearKernel
