# SPDX-License-Identifier: Apache-2.0
"""``--quantization arm_int8`` and ``arm_int4``: any bf16, fp16 or fp32 checkpoint, each weight quantised as it arrives.

Int8 weights have one scale for each output, int4 weights one for every 32 inputs of it; activations are int8, with one
scale for each token. Embeddings stay as they are, and so do the LM head, the routers of mixtures of experts and the
layers that ``VLLM_ARM_QUANTISE_IGNORE`` names, unless ``VLLM_ARM_QUANTISE_INCLUDE`` does. A
``quantization_config`` of the model's may have ``ignore``, ``include`` and, for int4, ``group_size``.
"""

import functools
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_arm import envs, ops
from vllm_arm.linear import experts, experts_on_load, int4, progress, requantise, weight_cache
from vllm_arm.logs import get_logger, warning_once

logger = get_logger(__name__)

# By what vLLM's models call them.
LM_HEADS = ("lm_head", "*.lm_head")
ROUTERS = ("*.gate", "*.router", "*.shared_expert_gate")
DEFAULT_GROUP_SIZE = 32


class _QuantiseOnLoad(QuantizationConfig):  # type: ignore[misc]  # vLLM is not typed for mypy
    """Quantises linear layers and experts while they load, but for those that ``ignore`` names and ``include`` not."""

    name: ClassVar[str]

    def __init__(self, ignore: tuple[str, ...] = (), include: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.ignore = [*LM_HEADS, *ROUTERS, *ignore, *envs.VLLM_ARM_QUANTISE_IGNORE]
        self.include = [*include, *envs.VLLM_ARM_QUANTISE_INCLUDE]

    @classmethod
    def get_name(cls) -> str:
        """The name that ``--quantization`` takes."""
        return cls.name

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
    def from_config(cls, config: dict[str, Any]) -> "_QuantiseOnLoad":
        """From the model's ``quantization_config``, where it has one of ours."""
        return cls(tuple(config.get("ignore") or ()), tuple(config.get("include") or ()))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """How the layer of that name is loaded and run; None for what has no weights to multiply by."""
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        if isinstance(layer, RoutedExperts):
            if not self._is_ignored(prefix):
                if (reason := experts.objection(layer.moe_config)) is None:
                    return self.experts_method(prefix, layer.moe_config)
                warning_once(logger, f"{self.name}: experts stay in {layer.moe_config.in_dtype}, for {reason}")
            return UnquantizedFusedMoEMethod(layer.moe_config)
        if isinstance(layer, ParallelLMHead):
            return None if self._is_ignored(prefix) or self._is_tied(prefix) else self.linear_method(prefix)
        if not isinstance(layer, LinearBase):
            return None
        return UnquantizedLinearMethod() if self._is_ignored(prefix) else self.linear_method(prefix)

    def linear_method(self, prefix: str) -> Any:
        """How the layer of that name is quantised."""
        raise NotImplementedError

    def experts_method(self, prefix: str, moe_config: Any) -> Any:
        """How the experts of that name are quantised."""
        raise NotImplementedError

    def _is_ignored(self, prefix: str) -> bool:
        from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

        if any(fnmatch(prefix, pattern) for pattern in self.include):
            return False
        fused = self.packed_modules_mapping
        return bool(should_ignore_layer(prefix, ignore=self.ignore, fused_mapping=fused, use_fnmatch=True))

    def _is_tied(self, prefix: str) -> bool:
        from vllm.config import get_current_vllm_config

        model_config = get_current_vllm_config().model_config
        is_tied = bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))
        if is_tied:
            warning_once(logger, f"{prefix}: not quantised, for it shares its weight with the embeddings")
        return is_tied


class ArmInt8Config(_QuantiseOnLoad):
    """``arm_int8``."""

    name = "arm_int8"

    def linear_method(self, prefix: str) -> Any:
        """Int8 with a scale for each output."""
        return _methods()[0](prefix)

    def experts_method(self, prefix: str, moe_config: Any) -> Any:
        """Int8 with a scale for each output."""
        return experts_on_load.method_class()(moe_config, prefix, "int8", None)


class ArmInt4Config(_QuantiseOnLoad):
    """``arm_int4``: weights in groups of ``group_size`` inputs, -1 for all of them.

    Raises ``ValueError`` on a size that the op does not have.
    """

    name = "arm_int4"

    def __init__(
        self, ignore: tuple[str, ...] = (), include: tuple[str, ...] = (), group_size: int = DEFAULT_GROUP_SIZE
    ) -> None:
        super().__init__(ignore, include)
        if group_size not in (*ops.INT4_GROUP_SIZES, -1):
            raise ValueError(f"arm_int4: group_size: expected 32, 64, 128 or -1 (all inputs), got {group_size}")
        self.group_size = group_size

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ArmInt4Config":
        """From the model's ``quantization_config``, where it has one of ours."""
        ignore, include = tuple(config.get("ignore") or ()), tuple(config.get("include") or ())
        return cls(ignore, include, config.get("group_size", DEFAULT_GROUP_SIZE))

    def linear_method(self, prefix: str) -> Any:
        """Int4 in groups, or int8 where that does not fit."""
        return _methods()[1](prefix, self.group_size)

    def experts_method(self, prefix: str, moe_config: Any) -> Any:
        """Int4 in groups, or int8 where that does not fit."""
        return experts_on_load.method_class()(moe_config, prefix, _int4_scheme(self.group_size), self.group_size)


def _int4_scheme(group_size: int) -> str:
    return f"int4-groups-of-{'all' if group_size == -1 else group_size}"


def _no_cache() -> None:
    return None


@functools.cache
def _methods() -> tuple[type, type]:
    """The methods of linear layers for int8 and for int4."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.weight_utils import enable_tqdm

    class ArmInt8LinearMethod(OnlineLinearBase):  # type: ignore[misc]  # vLLM is not typed for mypy
        """Quantises a layer's weight when all of it has arrived, and multiplies by the first of vLLM's int8 kernels."""

        scheme = "int8"

        def __init__(self, prefix: str) -> None:
            super().__init__()
            self.prefix = prefix
            self.int8_kernel: Any = None
            self.cached: dict[str, torch.Tensor] | None = None
            self.open_cache: Callable[[], weight_cache.WeightCache | None] = _no_cache

        def create_weights(
            self,
            layer: Any,
            input_size_per_partition: int,
            output_partition_sizes: list[int],
            input_size: int,
            output_size: int,
            params_dtype: torch.dtype,
            **attributes: Any,
        ) -> None:
            sizes = input_size_per_partition, output_partition_sizes, input_size, output_size
            super().create_weights(layer, *sizes, params_dtype, **attributes)
            config = get_current_vllm_config()
            part = self.scheme, params_dtype, layer.tp_rank, layer.tp_size
            progress.layers.expect(enable_tqdm(config.load_config.use_tqdm_on_load))
            self.open_cache = functools.partial(weight_cache.open_cache, config, *part)
            if (cache := self.open_cache()) is not None and (cached := cache.load(self.prefix)) is not None:
                self.cached = cached
                # As for a layer that has all it needs: what arrives of the checkpoint is not read.
                get_layerwise_info(layer).reset()

        def process_weights_after_loading(self, layer: Any) -> None:
            if getattr(layer, "_already_called_process_weights_after_loading", False):
                return
            quantised, self.cached = self.cached, None
            if quantised is None:
                quantised = self.quantise(layer.weight.detach())
                if (cache := self.open_cache()) is not None:
                    cache.store(self.prefix, quantised)
            self.open_cache = _no_cache
            requantise.drop(layer, "weight")
            self.use(layer, quantised)
            progress.layers.done()
            layer._already_called_process_weights_after_loading = True

        def quantise(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
            """What :meth:`use` takes for ``weight``, and the cache keeps."""
            codes, scales, _ = ops.quantise(weight)
            return {"codes": codes, "scales": scales}

        def use(self, layer: Any, quantised: dict[str, torch.Tensor]) -> None:
            """Give the layer its quantised weight."""
            self.int8_kernel = requantise.use_int8(layer, quantised["codes"], quantised["scales"])

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return self.int8_kernel.apply_weights(layer, x, bias)

    class ArmInt4LinearMethod(ArmInt8LinearMethod):
        """The same in int4, and in int8 where the op for int4 cannot take the layer."""

        def __init__(self, prefix: str, group_size: int) -> None:
            super().__init__(prefix)
            self.group_size = group_size
            self.scheme = _int4_scheme(group_size)

        def create_weights(
            self,
            layer: Any,
            input_size_per_partition: int,
            output_partition_sizes: list[int],
            input_size: int,
            *rest: Any,
            **attributes: Any,
        ) -> None:
            int4.check_shard(self.prefix, input_size, input_size_per_partition, self.group_size)
            sizes = input_size_per_partition, output_partition_sizes, input_size
            super().create_weights(layer, *sizes, *rest, **attributes)

        def quantise(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
            group_size = int4.size_or_warning(self.prefix, weight.shape[1], self.group_size)
            if group_size is None:
                return super().quantise(weight)
            return {"packed": int4.pack(int4.quantise(weight, group_size), group_size)}

        def use(self, layer: Any, quantised: dict[str, torch.Tensor]) -> None:
            if "packed" not in quantised:
                super().use(layer, quantised)
                return
            self.outputs = layer.output_size_per_partition
            self.group_size = int4.groups_of(layer.input_size_per_partition, self.group_size)
            layer.register_parameter("weight", torch.nn.Parameter(quantised["packed"], requires_grad=False))

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if self.int8_kernel is not None:
                return super().apply(layer, x, bias)
            return ops.linear_int4(x, layer.weight, self.outputs, self.group_size, bias=bias)

    return ArmInt8LinearMethod, ArmInt4LinearMethod


def register() -> None:
    """Make ``--quantization arm_int8`` and ``arm_int4`` known to vLLM. Does nothing the second time."""
    from vllm.model_executor.layers import quantization

    for config in (ArmInt8Config, ArmInt4Config):
        if config.name not in quantization.QUANTIZATION_METHODS:
            quantization.register_quantization_config(config.name)(config)
