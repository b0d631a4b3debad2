# SPDX-License-Identifier: Apache-2.0
"""Linear layers with int4 weights and activations quantised to int8 on the way.

Activations and results are bf16; of vLLM's op also fp32, as in the reference figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases.case import Call, Case, Implementation, Work

# Activations are rounded to 8 bits: half a step of 1/127 of the largest in each product, averaged over the sum.
TOLERANCE = 0.03


@dataclass(frozen=True)
class Inputs:
    """``x`` is bf16 or fp32 ``[tokens, k]``, ``codes`` int8 ``[n, k]``, -8 to 7, ``scales`` fp32 ``[n, groups]``."""

    x: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def group_size(self) -> int:
        """How many inputs share a scale."""
        return int(self.codes.shape[1] // self.scales.shape[1])


def reference(inputs: Inputs) -> torch.Tensor:
    """The product with the weights as they are stored, in float64."""
    weight = inputs.codes.double().unflatten(1, (inputs.scales.shape[1], -1)) * inputs.scales.double()[:, :, None]
    return inputs.x.double() @ weight.flatten(1).t()


def ours(inputs: Inputs) -> Call:
    """``torch.ops.vllm_arm.linear_int4``, weights packed once."""
    from vllm_arm import ops

    packed = ops.pack_int4(inputs.codes, inputs.scales)
    output = torch.empty(inputs.x.shape[0], inputs.codes.shape[0], dtype=torch.bfloat16)
    group_size = inputs.group_size
    return Call(
        run=lambda: torch.ops.vllm_arm.linear_int4(output, inputs.x, packed, group_size, False, None),
        output=lambda: output,
    )


def upstream(inputs: Inputs) -> Call:
    """torch's int4 product (KleidiAI on Arm) as vLLM calls it: with groups, between conversions to fp32 and back."""
    n, k = inputs.codes.shape
    group_size = inputs.group_size
    has_groups = group_size < k
    nibbles = (inputs.codes + 8).to(torch.uint8)
    pairs = nibbles[:, 1::2] << 4 | nibbles[:, ::2]
    scales = inputs.scales.bfloat16() if has_groups else inputs.scales
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, scales, None, group_size, k, n)
    results: list[torch.Tensor] = []

    def run() -> None:
        x = inputs.x.float() if has_groups else inputs.x
        output = torch.ops.aten._dyn_quant_matmul_4bit(x, packed, group_size, k, n)
        results[:] = [output.bfloat16() if has_groups else output]

    return Call(run=run, output=lambda: results[0])


_BOTH = (Implementation("vllm_arm", ours, operation="linear_int4"), Implementation("upstream", upstream))


def _case(
    name: str,
    words: str,
    tokens: int,
    n: int,
    k: int,
    group_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    implementations: tuple[Implementation, ...] = _BOTH,
) -> Case:
    groups = k // group_size if group_size else 1

    def inputs() -> Inputs:
        codes = torch.randint(-8, 8, (n, k), dtype=torch.int8)
        return Inputs(torch.randn(tokens, k).to(dtype), codes, torch.rand(n, groups).add(0.5).bfloat16().float())

    read = dtype.itemsize * tokens * k + n * k // 2 + n * groups * (2 if group_size else 4)
    work = Work(read, dtype.itemsize * tokens * n, tokens * n * k, "int8")
    of_groups = f", groups of {group_size}" if group_size else ""
    return Case("linear", f"int4_{name}", words + of_groups, work, TOLERANCE, inputs, reference, implementations)


_SQUARE = "a square of 512, an eighth of Llama-3.1-8B's o_proj each way, {} tokens"

CASES = (
    *(_case(f"512_m{m}", _SQUARE.format(m), m, 512, 512) for m in (1, 16, 128)),
    *(_case(f"g32_512_m{m}", _SQUARE.format(m), m, 512, 512, 32) for m in (1, 16, 128)),
    *(
        _case(f"fp32_512_m{m}", _SQUARE.format(m), m, 512, 512, dtype=torch.float32, implementations=_BOTH[1:])
        for m in (1, 16, 128)
    ),
    _case("qwen_kv_m4", "Qwen2.5-7B's k_proj (512 x 3584), 4 tokens", 4, 512, 3584),
)
