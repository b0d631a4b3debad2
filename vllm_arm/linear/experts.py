# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts with int8 or int4 weights: each expert's two linear layers by the ops of the dense ones.

Activations are quantised to int8 for each token. Experts that tokens have chosen are computed one after the other.
"""

import functools
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.nn import functional

from vllm_arm import ops
from vllm_arm.linear import engines, int4, requantise
from vllm_arm.linear.int4_formats import IntegerWeight
from vllm_arm.logs import get_logger, info_once

logger = get_logger(__name__)

GATE_FIRST = ("silu", "gelu", "gelu_tanh")
"""Activations of the gate, as vLLM names them, where all of the gate comes before the rest."""
INTERLEAVED = "swigluoai"
"""gpt-oss's: gate and rest are every other output, and clamped."""
ACTIVATIONS = (*GATE_FIRST, INTERLEAVED)
"""Those of experts that can be run."""

# Of INTERLEAVED, the same in every model that has it.
_SLOPE, _LIMIT = 1.702, 7.0


class ExpertWeights:
    """A weight ``[n, k]`` of each of several experts. ``packed`` has a row for each, as the op for them takes it.

    Int8 where there are fp32 ``scales`` (``[experts, n]``), else int4 in groups of ``group_size``.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        packed: torch.Tensor,
        scales: torch.Tensor | None = None,
        group_size: int = 0,
        has_zero_points: bool = False,
    ) -> None:
        self.n, self.k = shape
        self.packed = packed
        self.scales = scales
        self.group_size = group_size
        self.has_zero_points = has_zero_points

    @classmethod
    def int4(cls, weights: Iterable[IntegerWeight], count: int, group_size: int) -> "ExpertWeights":
        """From ``count`` weights, taken one by one, for groups of the size that :func:`int4.groups_of` gave."""
        packed: torch.Tensor | None = None
        for expert, weight in enumerate(weights):
            row = int4.pack(weight, group_size)
            packed = torch.empty(count, *row.shape, dtype=row.dtype) if packed is None else packed
            packed[expert] = row
            shape, has_zero_points = weight.codes.shape, weight.zero_points is not None
        assert packed is not None, "no experts"
        return cls((shape[0], shape[1]), packed, group_size=group_size, has_zero_points=has_zero_points)

    @classmethod
    def int8(cls, codes: Iterable[torch.Tensor], scales: torch.Tensor) -> "ExpertWeights":
        """From int8 ``codes`` (``[n, k]`` each), taken one by one, with a scale for each output."""
        packed: torch.Tensor | None = None
        for expert, each in enumerate(codes):
            n, k = each.shape
            choice = engines.choose("int8", n, k)
            row = engines.PACKED[choice.engine].pack(each) if choice.engine in engines.PACKED else each
            packed = torch.empty(len(scales), *row.shape, dtype=torch.int8) if packed is None else packed
            packed[expert] = row
        assert packed is not None, "no experts"
        info_once(logger, f"experts in int8: {choice.engine}, {choice.implementation} ({choice.reason})")
        return cls((n, k), packed, scales)

    def multiply(self, expert: int, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The output of that expert's layer for ``x`` (``[tokens, k]``)."""
        packed = self.packed[expert]
        if self.scales is None:
            return ops.linear_int4(x, packed, self.n, self.group_size, self.has_zero_points, bias)
        engine = engines.PACKED.get(engines.choose("int8", self.n, self.k).engine)
        if engine is None:
            return functional.linear(x, packed.to(x.dtype) * self.scales[expert, :, None].to(x.dtype), bias)
        return engine.linear_int8(x, packed, self.scales[expert], None, bias)


def from_integers(name: str, weights: Iterable[IntegerWeight], count: int, bits: int, group_size: int) -> ExpertWeights:
    """``count`` weights, taken one by one, of ``bits`` bits (4 or 8) in groups of ``group_size`` (-1: all inputs).

    Where int4 cannot take them they become int8, and a warning names the layer.
    """
    weights = iter(weights)
    first = next(weights)
    n, k = first.codes.shape

    def all_of_them() -> Iterable[IntegerWeight]:
        yield first
        yield from weights

    if bits == 4 and (size := int4.size_or_warning(name, k, group_size)):
        return ExpertWeights.int4(all_of_them(), count, size)
    scales = torch.empty(count, n, dtype=torch.float32)

    def codes() -> Iterable[torch.Tensor]:
        for expert, weight in enumerate(all_of_them()):
            if weight.zero_points is None and weight.scales.shape[1] == 1:
                scales[expert] = weight.scales[:, 0]
                yield weight.codes
            else:
                quantised, scales[expert] = requantise.quantise(n, k, weight.dequantise)
                yield quantised

    return ExpertWeights.int8(codes(), scales)


def run(
    x: torch.Tensor,
    experts: tuple[ExpertWeights, ExpertWeights],
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """The sum of what the experts give for ``x`` (``[tokens, k]``), in fp32.

    ``experts`` are those of gate and rest, as ``activation``, one of :data:`ACTIVATIONS`, has them, and of the layer
    back to ``k``; ``ids`` and ``weights`` (``[tokens, chosen]``) are each token's experts and their shares, an id below
    0 none; ``biases`` have a row for each expert.
    """
    gate_up, down = experts
    total = torch.zeros(x.shape[0], down.n, dtype=torch.float32)
    flat = ids.flatten()
    chosen, counts = torch.unique(flat, return_counts=True)
    for expert, positions in zip(chosen.tolist(), flat.argsort().split(counts.tolist()), strict=True):
        if expert < 0:
            continue
        tokens = positions // ids.shape[1]
        bias, bias_down = (None if each is None else each[expert] for each in biases)
        inner = _activate(gate_up.multiply(expert, x[tokens], bias), activation)
        output = down.multiply(expert, inner, bias_down)
        total.index_add_(0, tokens, output.float() * weights.flatten()[positions, None].float())
    return total


def _activate(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == INTERLEAVED:
        gate, rest = gate_up[:, ::2].clamp(max=_LIMIT), gate_up[:, 1::2].clamp(-_LIMIT, _LIMIT)
        return gate * torch.sigmoid(_SLOPE * gate) * (rest + 1)
    gate, rest = gate_up.chunk(2, -1)
    if activation == "silu":
        return functional.silu(gate) * rest
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * rest


# By the layer's name, of which vLLM has no two.
_layers: "WeakValueDictionary[str, Any]" = WeakValueDictionary()


def _use(experts: Any, layer: str, weights: tuple[ExpertWeights, ExpertWeights]) -> None:
    experts.weights, experts.layer = weights, layer
    _layers[layer] = experts


# An op, for torch.compile cannot look into what depends on the choice of experts.
@torch.library.custom_op("vllm_arm::run_experts", mutates_args=("output",))  # type: ignore[untyped-decorator]
def _run_layer(
    output: torch.Tensor, x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor, layer: str, activation: str
) -> None:
    experts = _layers[layer]
    output.copy_(run(x, experts.weights, shares, ids, activation, (experts.w1_bias, experts.w2_bias)))


@_run_layer.register_fake  # type: ignore[untyped-decorator]
def _(*_: Any) -> None:
    return None


@functools.cache
def _experts_class() -> type:
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    class ArmQuantisedExperts(modular_kernel.FusedMoEExpertsModular):  # type: ignore[misc]  # vLLM is not typed for mypy
        """:func:`run` as vLLM's modular kernel takes it; :func:`_use` gives it the weights."""

        weights: tuple[ExpertWeights, ExpertWeights]
        layer: str

        @property
        def expects_unquantized_inputs(self) -> bool:
            return True

        @staticmethod
        def activation_format() -> Any:
            return modular_kernel.FusedMoEActivationFormat.Standard

        @staticmethod
        def _supports_current_device() -> bool:
            return True

        @staticmethod
        def _supports_no_act_and_mul() -> bool:
            return False

        @staticmethod
        def _supports_quant_scheme(*_: Any) -> bool:
            return True

        @staticmethod
        def _supports_activation(activation: Any) -> bool:
            return activation.value in ACTIVATIONS

        @staticmethod
        def _supports_parallel_config(_: Any) -> bool:
            return True

        def moe_problem_size(self, a1: Any, w1: Any, w2: Any, topk_ids: Any) -> tuple[int, int, int, int, int]:
            return w1.shape[0], a1.shape[0], self.weights[0].n, a1.shape[-1], topk_ids.shape[1]

        def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> tuple[tuple[int, ...], ...]:
            return (0,), (0,), (M, K)

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def apply(
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            activation: Any,
            global_num_experts: int,
            expert_map: torch.Tensor | None,
            *_: Any,
            apply_router_weight_on_input: bool,
            **__: Any,
        ) -> None:
            ids = topk_ids if expert_map is None else expert_map[topk_ids]
            # Before, the only expert's share went into the input.
            shares = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
            _run_layer(output, hidden_states, shares, ids, self.layer, activation.value)

    return ArmQuantisedExperts


def objection(moe_config: Any, activations: tuple[str, ...] = ACTIVATIONS) -> str | None:
    """Why experts of such a configuration cannot be quantised; None where they can."""
    if not moe_config.is_act_and_mul or moe_config.activation.value not in activations:
        return (
            f"their activation is {moe_config.activation.value}: expected one of {', '.join(activations)}, with a gate"
        )
    if moe_config.swiglu_limit is not None and moe_config.activation.value in GATE_FIRST:
        return f"they limit gate and rest to {moe_config.swiglu_limit}: expected no swiglu_limit"
    if moe_config.moe_parallel_config.use_batched_activation_format:
        return "tokens reach them in batches of a fixed size"
    return None


class QuantisedExpertsMixin:
    """For vLLM's methods of experts: what they do after a layer is loaded, and how they run it.

    ``read_experts`` makes the weights of gate and rest, and of the layer back, from the parameters of the layer.
    """

    moe: Any
    moe_kernel: Any
    moe_quant_config: Any

    @property
    def supports_eplb(self) -> bool:
        """Whether experts may move between ranks while they are served."""
        return False

    def read_experts(self, layer: Any) -> tuple[ExpertWeights, ExpertWeights]:
        """The weights of the layer's experts, whose parameters are dropped after it."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weights of the layer's experts in place of its parameters, and make the kernel that runs them."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        weights = self.read_experts(layer)
        biases = {name: layer._parameters.get(name) for name in ("w13_bias", "w2_bias")}
        for name in [name for name in layer._parameters if name.startswith(("w13_", "w2_")) and name not in biases]:
            delattr(layer, name)
        if not self.moe.has_bias:
            # Some checkpoints have biases though the model declares none.
            for name in biases.keys() - layer._loaded_expert_biases:
                biases[name] = None
        for name, each in zip(("w13", "w2"), weights, strict=True):
            layer.register_parameter(f"{name}_weight", torch.nn.Parameter(each.packed, requires_grad=False))
        self._make_kernel(layer, weights, biases)
        layer._already_called_process_weights_after_loading = True

    def _make_kernel(self, layer: Any, weights: tuple[ExpertWeights, ExpertWeights], biases: dict[str, Any]) -> None:
        from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig, biased_moe_quant_config
        from vllm.model_executor.layers.fused_moe.oracle import unquantized

        has_bias = any(bias is not None for bias in biases.values())
        self.moe_quant_config = (
            biased_moe_quant_config(biases["w13_bias"], biases["w2_bias"]) if has_bias else FusedMoEQuantConfig.make()
        )
        self.moe_kernel = unquantized.make_unquantized_moe_kernel(
            quant_config=self.moe_quant_config,
            moe_config=self.moe,
            backend=unquantized.UnquantizedMoeBackend.CPU,
            experts_cls=_experts_class(),
            routing_tables=layer._expert_routing_tables(),
        )
        _use(self.moe_kernel.fused_experts, layer.layer_name, weights)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """vLLM's description of the weights, which says nothing but that their inputs are not quantised before."""
        return self.moe_quant_config

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """The output of the layer's experts for ``x`` (``[tokens, hidden]``)."""
        output: torch.Tensor = self.moe_kernel.apply(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
        return output
