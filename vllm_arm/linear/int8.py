# SPDX-License-Identifier: Apache-2.0
"""Linear layers with int8 weights and activations (W8A8): our kernel before vLLM's in its list."""

import functools
from typing import Any

import torch

from vllm_arm import envs
from vllm_arm.linear import engines
from vllm_arm.logs import get_logger, info_once, warning_once

logger = get_logger(__name__)


def install() -> None:
    """Put our kernel first among those that vLLM tries. Does nothing the second time, or with ``VLLM_ARM_LINEAR=0``."""
    if not envs.VLLM_ARM_LINEAR:
        return
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    kernels = linear._POSSIBLE_INT8_KERNELS[PlatformEnum.CPU]
    if kernel_class() not in kernels:
        # vLLM's own way to add one appends it, after a kernel that takes everything.
        kernels.insert(0, kernel_class())


def available() -> tuple[bool, str | None]:
    """Whether an engine of ours multiplies int8 on this machine; if not, why."""
    choice = engines.choose("int8", 4096, 4096)
    return (True, None) if choice.engine in engines.PACKED else (False, choice.reason)


def merge_input_scales(scales: torch.Tensor, zero_points: torch.Tensor | None) -> tuple[float, int]:
    """One static scale and zero point for layers that were quantised apart and are computed as one.

    Symmetric (``zero_points`` None): the largest scale. Otherwise the range that holds all of theirs.
    """
    if zero_points is None:
        return float(scales.max()), 0
    points = zero_points.to(torch.float32)
    largest = float((scales * (127 - points)).max())
    smallest = float((scales * (-128 - points)).min())
    scale = (largest - smallest) / 255
    return scale, round(-128 - smallest / scale)


def pack(layer: Any, weight: torch.Tensor, scales: torch.Tensor, symmetric: bool) -> None:
    """Give ``layer`` the int8 ``weight`` (``[n, k]``), packed, with one of ``scales`` (``[n]``) for each output.

    Sets ``weight``, ``weight_scale`` and, for asymmetric activations, ``weight_sums`` in place of what there was, and
    ``linear_int8``, the op of the engine that it was packed for.
    """
    n, k = weight.shape
    choice = engines.choose("int8", n, k)
    engine = engines.PACKED[choice.engine]
    layer.linear_int8 = engine.linear_int8
    _set(layer, "weight", engine.pack(weight))
    _set(layer, "weight_scale", scales.to(torch.float32).contiguous())
    _set(layer, "weight_sums", None if symmetric else weight.sum(1, dtype=torch.int32))
    engine.prepare(n, k, torch.int8, False)
    info_once(logger, f"linear layers in int8: {choice.engine}, {choice.implementation} ({choice.reason})")


def multiply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The output of a layer that :func:`pack` has packed, for ``x`` of shape ``[..., k]``."""
    return layer.linear_int8(
        x, layer.weight, layer.weight_scale, layer.weight_sums, bias, layer.input_scale, layer.input_zero_point
    )


def _set(layer: Any, name: str, value: torch.Tensor | None) -> None:
    # Deleted first, for vLLM may have set a plain attribute of that name.
    if hasattr(layer, name):
        delattr(layer, name)
    parameter = None if value is None else torch.nn.Parameter(value, requires_grad=False)
    layer.register_parameter(name, parameter)


@functools.cache
def kernel_class() -> type:
    """Our kernel, as a class for vLLM's list."""
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearKernel

    class ArmInt8ScaledMMLinearKernel(Int8ScaledMMLinearKernel):  # type: ignore[misc]  # vLLM is not typed for mypy
        """W8A8 with weight scales per channel or tensor, and static or dynamic per-token activations."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            supported, reason = available()
            if not supported:
                warning_once(logger, f"linear layers in int8: vLLM's own: {reason}")
            return supported, reason

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            names = self.layer_param_names
            if list(names[:4]) != ["weight", "weight_scale", "input_scale", "input_zero_point"]:
                raise ValueError(f"int8 layer: expected parameters weight, weight_scale, ..., got {', '.join(names)}")
            weight, scales = layer.weight.detach(), layer.weight_scale.detach().flatten()
            if not self.config.is_channelwise:
                # One scale for each of the layers that are computed as one.
                scales = scales.repeat_interleave(torch.tensor(layer.logical_widths))
            static_scale = static_zero_point = None
            if self.config.is_static_input_scheme:
                points = None if self.config.input_symmetric else layer.input_zero_point.detach()
                scale, zero_point = merge_input_scales(layer.input_scale.detach(), points)
                static_scale = torch.tensor([scale], dtype=torch.float32)
                static_zero_point = torch.tensor([zero_point], dtype=torch.int32)
            _set(layer, "input_scale", static_scale)
            _set(layer, "input_zero_point", static_zero_point)
            pack(layer, weight, scales, self.config.input_symmetric)

        def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return multiply(layer, x, bias)

    return ArmInt8ScaledMMLinearKernel
