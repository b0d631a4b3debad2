# SPDX-License-Identifier: Apache-2.0
"""``--quantization arm_int8``: any bf16, fp16 or fp32 checkpoint to int8, each weight as it arrives.

Weights get one scale for each output, activations one for each token. The LM head, embeddings and the routers of
mixtures of experts stay as they are, and so do the layers that ``VLLM_ARM_QUANTISE_IGNORE`` names, or ``ignore`` in a
``quantization_config`` of the model's.
"""

import functools
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_arm import envs, ops

NAME = "arm_int8"
# By what vLLM's models call them.
ROUTERS = ("*.gate", "*.router", "*.shared_expert_gate")


class ArmInt8Config(QuantizationConfig):  # type: ignore[misc]  # vLLM is not typed for mypy
    """What is quantised to int8 while it is loaded: every linear layer but those that ``ignore`` names."""

    def __init__(self, ignore: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.ignore = [*ROUTERS, *ignore, *envs.VLLM_ARM_QUANTISE_IGNORE]

    @classmethod
    def get_name(cls) -> str:
        """The name that ``--quantization`` takes."""
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """The dtypes of models that can be quantised."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Of a GPU, which this is not for."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the checkpoint knows nothing of it."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ArmInt8Config":
        """From the model's ``quantization_config``, where it has one of ours."""
        return cls(tuple(config.get("ignore") or ()))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """How the layer of that name is loaded and run; None for what is no linear layer."""
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

        if isinstance(layer, RoutedExperts):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        if not isinstance(layer, LinearBase):
            return None
        fused = self.packed_modules_mapping
        if should_ignore_layer(prefix, ignore=self.ignore, fused_mapping=fused, use_fnmatch=True):
            return UnquantizedLinearMethod()
        return _linear_method()()


@functools.cache
def _linear_method() -> type:
    from vllm.model_executor.kernels.linear import init_int8_linear_kernel
    from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
    from vllm.model_executor.utils import replace_parameter

    class ArmInt8LinearMethod(OnlineLinearBase):  # type: ignore[misc]  # vLLM is not typed for mypy
        """Quantises a layer's weight when all of it has arrived, and multiplies by the first of vLLM's int8 kernels."""

        def create_weights(self, layer: Any, *arguments: Any, **attributes: Any) -> None:
            super().create_weights(layer, *arguments, **attributes)
            self.kernel = init_int8_linear_kernel(
                is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name=NAME
            )

        def process_weights_after_loading(self, layer: Any) -> None:
            if getattr(layer, "_already_called_process_weights_after_loading", False):
                return
            quantised, scales, _ = ops.quantise(layer.weight.detach())
            replace_parameter(layer, "weight", quantised)
            replace_parameter(layer, "weight_scale", scales[:, None])
            for name in ("input_scale", "input_zero_point", "azp_adj"):
                layer.register_parameter(name, None)
            self.kernel.process_weights_after_loading(layer)
            layer._already_called_process_weights_after_loading = True

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return self.kernel.apply_weights(layer, x, bias)

    return ArmInt8LinearMethod


def register() -> None:
    """Make ``--quantization arm_int8`` known to vLLM. Does nothing the second time."""
    from vllm.model_executor.layers import quantization

    if NAME not in quantization.QUANTIZATION_METHODS:
        quantization.register_quantization_config(NAME)(ArmInt8Config)
