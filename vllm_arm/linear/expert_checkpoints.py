# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of mixtures of experts in AWQ, GPTQ, compressed-tensors' integers and FP8: experts in int4 or int8.

vLLM's methods create and load the parameters, ours take their place to read and run them.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from vllm_arm import envs
from vllm_arm.linear import fp8, int4_formats, requantise
from vllm_arm.linear.experts import GATE_FIRST, ExpertWeights, QuantisedExpertsMixin, from_integers, objection
from vllm_arm.linear.int4_formats import IntegerWeight
from vllm_arm.logs import get_logger, info_once

logger = get_logger(__name__)

_QUANTIZATION = "vllm.model_executor.layers.quantization"
_COMPRESSED = f"{_QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"

Read = Callable[[Any, Any, str, int], IntegerWeight]


class _Format(NamedTuple):
    """A method of vLLM's, which ``module`` has by the name ``method``, and how to read what it has loaded.

    ``read(method, layer, part, expert)`` gives the weight of an expert, ``part`` being ``w13`` or ``w2``, of
    ``numbers(method)``: how many bits, in groups of how many inputs.
    """

    module: str
    method: str
    selection: str
    read: Read
    numbers: Callable[[Any], tuple[int, int]]


def _awq(_: Any, layer: Any, part: str, expert: int) -> IntegerWeight:
    codes, scales, points = (getattr(layer, f"{part}_{name}")[expert] for name in ("qweight", "scales", "qzeros"))
    return int4_formats.from_words(
        int4_formats.unpack_awq(codes).t(), scales.t(), int4_formats.unpack_awq(points).t(), 4
    )


def _gptq(method: Any, layer: Any, part: str, expert: int) -> IntegerWeight:
    codes, scales, points = (getattr(layer, f"{part}_{name}")[expert] for name in ("qweight", "scales", "qzeros"))
    bits = method.quant_config.quant_type.size_bits
    unpacked = None
    if not method.quant_config.is_sym:
        unpacked = int4_formats.unpack(points, bits, 1)
        if method.quant_config.full_config.get("checkpoint_format") != "gptq_v2":
            unpacked = (unpacked + 1) & ((1 << bits) - 1)
        unpacked = unpacked.t()
    return int4_formats.from_words(int4_formats.unpack(codes, bits, 0).t(), scales.t(), unpacked, bits)


def _packed(method: Any, layer: Any, part: str, expert: int) -> IntegerWeight:
    bits = method.num_bits
    codes = int4_formats.unpack(getattr(layer, f"{part}_weight_packed")[expert], bits, 1)
    points = None
    if not method.symmetric:
        points = int4_formats.unpack(getattr(layer, f"{part}_weight_zero_point")[expert], bits, 0)
    return int4_formats.from_words(codes, getattr(layer, f"{part}_weight_scale")[expert], points, bits)


def _integers(_: Any, layer: Any, part: str, expert: int) -> IntegerWeight:
    codes, scales = getattr(layer, f"{part}_weight")[expert], getattr(layer, f"{part}_weight_scale")[expert]
    return IntegerWeight(codes, scales.float().contiguous(), None)


def _fp8(method: Any, layer: Any, part: str, expert: int) -> IntegerWeight:
    weight = getattr(layer, f"{part}_weight")[expert]
    scales = getattr(layer, f"{part}_{getattr(method, 'weight_scale_name', 'weight_scale')}")[expert]
    # Gate and rest were quantised apart.
    shards = 2 if part == "w13" else 1
    parts = zip(weight.chunk(shards), scales.view(shards, -1), strict=True)
    found = [
        _from_fp8(rows, factors, (method.weight_block_size, getattr(method, "moe_block_shape", None)))
        for rows, factors in parts
    ]
    return IntegerWeight(
        torch.cat([codes for codes, _ in found]), torch.cat([scale for _, scale in found])[:, None], None
    )


def _from_fp8(weight: torch.Tensor, scales: torch.Tensor, blocks: tuple[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Int8 codes and a scale for each output of an FP8 ``weight`` with as many ``scales`` as it has of the blocks."""
    n, k = weight.shape
    block = None
    for outputs, inputs in filter(None, blocks):
        grid = math.ceil(n / outputs), math.ceil(k / inputs)
        if grid[0] * grid[1] == scales.numel():
            block, scales = (outputs, inputs), scales.view(grid)
            break
    return requantise.quantise(n, k, lambda rows: fp8.dequantise(weight, scales, block, rows))


FORMATS = (
    _Format(
        *(f"{_QUANTIZATION}.auto_awq", "AutoAWQMoEMethod", "select_wna16_moe_backend", _awq),
        lambda method: (4, method.quant_config.group_size),
    ),
    _Format(
        *(f"{_QUANTIZATION}.auto_gptq", "AutoGPTQMoEMethod", "select_wna16_moe_backend", _gptq),
        lambda method: (method.quant_config.quant_type.size_bits, method.quant_config.group_size),
    ),
    _Format(
        *(f"{_COMPRESSED}_wna16", "CompressedTensorsWNA16MoEMethod", "select_wna16_moe_backend", _packed),
        lambda method: (method.num_bits, method.group_size),
    ),
    _Format(
        *(f"{_COMPRESSED}_w4a8_int8", "CompressedTensorsW4A8Int8MoEMethod", "select_w4a8_int8_moe_backend", _integers),
        lambda method: (4, method.group_size),
    ),
    _Format(
        *(f"{_COMPRESSED}_w8a8_int8", "CompressedTensorsW8A8Int8MoEMethod", "select_int8_moe_backend", _integers),
        lambda _: (8, -1),
    ),
    _Format(
        *(f"{_COMPRESSED}_w8a8_fp8", "CompressedTensorsW8A8Fp8MoEMethod", "select_fp8_moe_backend", _fp8),
        lambda _: (8, -1),
    ),
    _Format(f"{_QUANTIZATION}.fp8", "Fp8MoEMethod", "select_fp8_moe_backend", _fp8, lambda _: (8, -1)),
)


def install() -> None:
    """Put our methods in the place of vLLM's. Does nothing the second time, or with ``VLLM_ARM_LINEAR=0``."""
    if not envs.VLLM_ARM_LINEAR:
        return
    for each in FORMATS:
        module = importlib.import_module(each.module)
        if not issubclass(getattr(module, each.method), QuantisedExpertsMixin):
            setattr(module, each.method, _method_class(module, each))


def _method_class(module: Any, form: _Format) -> type:
    original = getattr(module, form.method)
    # vLLM looks for a backend of its own when a method is made. It has none on Arm for most of these; the one that is
    # named here changes nothing but which objections are raised: none.
    backend = getattr(module, "WNA16MoEBackend", None)
    setattr(module, form.selection, lambda *_, **__: (backend and backend.MARLIN, None))
    for name in ("check_moe_marlin_supports_layer", "check_moe_marlin_supports_config"):
        if hasattr(module, name):
            setattr(module, name, lambda *_, **__: True)

    class ArmExpertsMethod(QuantisedExpertsMixin, original):  # type: ignore[misc, valid-type]  # vLLM is not typed
        """vLLM's method until the experts are loaded, then ours."""

        def __init__(self, quant_config: Any, *arguments: Any, **named: Any) -> None:
            super().__init__(quant_config, *arguments, **named)
            # Where gate and rest are interleaved, not every checkpoint stores them so.
            if (reason := objection(self.moe, GATE_FIRST)) is not None:
                raise ValueError(f"experts of a quantised checkpoint cannot be run, for {reason}")
            if getattr(quant_config, "desc_act", False):
                raise ValueError("experts of a GPTQ checkpoint with desc_act cannot be run: expected desc_act=False")
            _, group_size = form.numbers(self)
            inputs = self.moe.hidden_dim, self.moe.intermediate_size_per_partition
            if group_size > 0 and any(each % group_size for each in inputs):
                raise ValueError(
                    f"experts of {inputs[0]} and, on each rank, {inputs[1]} inputs cannot be cut into groups of "
                    f"{group_size}: expected a tensor parallel size that cuts no group, or expert parallelism"
                )

        @property
        def is_monolithic(self) -> bool:
            return False

        def read_experts(self, layer: Any) -> tuple[ExpertWeights, ExpertWeights]:
            bits, group_size = form.numbers(self)
            info_once(logger, f"experts loaded by {form.method}: int{bits}, activations in int8")
            parts = []
            for part in ("w13", "w2"):
                weights: Iterator[IntegerWeight] = (
                    form.read(self, layer, part, expert) for expert in range(layer.local_num_experts)
                )
                name = f"{layer.layer_name}.{part}"
                parts.append(from_integers(name, weights, layer.local_num_experts, bits, group_size))
            return parts[0], parts[1]

    # vLLM's loader looks at the name.
    ArmExpertsMethod.__name__ = original.__name__
    return ArmExpertsMethod
