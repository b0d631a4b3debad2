# SPDX-License-Identifier: Apache-2.0
"""Experts of ``--quantization arm_int8`` and ``arm_int4``: quantised when all of a layer's have arrived."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_arm import ops
from vllm_arm.linear import int4, progress, weight_cache
from vllm_arm.linear.experts import ExpertWeights, QuantisedExpertsMixin
from vllm_arm.logs import get_logger

logger = get_logger(__name__)

_PARTS = ("w13", "w2")

Tensors = dict[str, torch.Tensor]


def quantise(name: str, weights: torch.Tensor, group_size: int | None) -> Tensors:
    """``weights`` (``[experts, n, k]``) as :func:`unpack` takes them, in int4 groups, or int8 for a size of None."""
    size = None if group_size is None else int4.size_or_warning(name, weights.shape[2], group_size)
    if size is not None:
        return {
            "packed": ExpertWeights.int4((int4.quantise(each, size) for each in weights), len(weights), size).packed
        }
    codes = torch.empty(weights.shape, dtype=torch.int8)
    scales = torch.empty(weights.shape[:2], dtype=torch.float32)
    for expert, each in enumerate(weights):
        codes[expert], scales[expert], _ = ops.quantise(each)
    return {"codes": codes, "scales": scales}


def unpack(quantised: Tensors, shape: tuple[int, int], group_size: int | None) -> ExpertWeights:
    """The weights of ``shape`` ``[n, k]`` that :func:`quantise` gave ``quantised`` for."""
    if group_size is None or "packed" not in quantised:
        return ExpertWeights.int8(quantised["codes"], quantised["scales"])
    return ExpertWeights(shape, quantised["packed"], group_size=int4.groups_of(shape[1], group_size))


def _accept(*_: Any, return_success: bool = False, **__: Any) -> bool | None:
    """In place of the loader of a layer that has all it needs: nothing is read."""
    return True if return_success else None


def _or_all_at_once(load: Callable[..., Any]) -> Callable[..., Any]:
    """``load``, vLLM's loader of an expert's part, which with a weight alone copies that of all experts."""

    def loader(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *which: Any, **named: Any) -> Any:
        if which or named:
            return load(param, loaded_weight, *which, **named)
        return param.data.copy_(loaded_weight)

    return loader


def _copy_by_loader(parameter: Any) -> None:
    """Have ``parameter.copy_`` go through its loader: gpt-oss fills parameters so, and on meta that does nothing."""
    parameter.copy_ = lambda weight: parameter.weight_loader(parameter, weight)


@functools.cache
def method_class() -> type:
    """How experts are quantised while they are loaded, as a class for vLLM."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.weight_utils import enable_tqdm

    class ArmExpertsOnLoadMethod(QuantisedExpertsMixin, OnlineMoEMethodBase):  # type: ignore[misc]  # not typed for mypy
        """Int8 with a scale for each output, or int4 in groups of ``group_size``."""

        def __init__(self, moe: Any, prefix: str, scheme: str, group_size: int | None) -> None:
            super().__init__(moe)
            self.prefix, self.scheme, self.group_size = prefix, scheme, group_size
            self.cache: weight_cache.WeightCache | None = None
            self.cached: Tensors | None = None

        @property
        def is_monolithic(self) -> bool:
            return False

        def create_weights(
            self,
            layer: Any,
            num_experts: int,
            hidden_size: int,
            intermediate_size_per_partition: int,
            params_dtype: torch.dtype,
            **attributes: Any,
        ) -> None:
            sizes = num_experts, hidden_size, intermediate_size_per_partition
            attributes["weight_loader"] = _or_all_at_once(attributes["weight_loader"])
            super().create_weights(layer, *sizes, params_dtype, **attributes)
            for parameter in layer.parameters():
                _copy_by_loader(parameter)
            config = get_current_vllm_config()
            progress.layers.expect(enable_tqdm(config.load_config.use_tqdm_on_load))
            if self.moe.has_bias:
                return  # the checkpoint is to be read for them anyway
            parallel = self.moe.moe_parallel_config
            rank = parallel.tp_rank + parallel.tp_size * parallel.ep_rank
            part = self.scheme, params_dtype, rank, parallel.tp_size * parallel.ep_size
            self.cache = weight_cache.open_cache(config, *part)
            if self.cache is not None and (cached := self.cache.load(self.prefix)) is not None:
                self.cached = cached
                get_layerwise_info(layer).reset()
                for parameter in layer.parameters():
                    parameter.weight_loader = _accept

        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            for parameter in layer.parameters():
                # With expert parallelism, experts of other ranks may still arrive.
                parameter.weight_loader = _accept

        def read_experts(self, layer: Any) -> tuple[ExpertWeights, ExpertWeights]:
            shapes = {part: getattr(layer, f"{part}_weight").shape[1:] for part in _PARTS}
            quantised, self.cached = self.cached, None
            if quantised is None:
                quantised = {}
                for part in _PARTS:
                    weights = getattr(layer, f"{part}_weight").detach()
                    found = quantise(f"{self.prefix}.{part}", weights, self.group_size)
                    quantised |= {f"{part}.{name}": tensor for name, tensor in found.items()}
                if self.cache is not None:
                    self.cache.store(self.prefix, quantised)
            self.cache = None
            progress.layers.done()
            gate_up, down = (
                unpack(
                    {
                        name.removeprefix(f"{part}."): tensor
                        for name, tensor in quantised.items()
                        if name.startswith(part)
                    },
                    tuple(shapes[part]),
                    self.group_size,
                )
                for part in _PARTS
            )
            return gate_up, down

    return ArmExpertsOnLoadMethod
