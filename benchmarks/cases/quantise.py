# SPDX-License-Identifier: Apache-2.0
"""Dynamic quantisation of activations to int8 with one scale per token."""

from __future__ import annotations

import torch

from benchmarks.cases.case import Call, Case, Implementation, Work
from benchmarks.cases.upstream import operators

# Half a step of 127, and what bf16 inputs and fp32 scales leave.
TOLERANCE = 0.5 / 127 * 1.02
# On Arm vLLM's op rounds towards zero: up to a whole step.
TOLERANCE_UPSTREAM = 1 / 127 * 1.02


def reference(x: torch.Tensor) -> torch.Tensor:
    """The values themselves, which quantised ones times their scale should be near to."""
    return x.double()


def ours(x: torch.Tensor) -> Call:
    """``torch.ops.vllm_arm.quantise``, symmetric."""
    from vllm_arm import ops

    quantised, scale, _ = ops.quantise(x)
    return Call(
        run=lambda: torch.ops.vllm_arm.quantise(quantised, scale, None, x, None, None),
        output=lambda: quantised.double() * scale.double()[:, None],
    )


def upstream(x: torch.Tensor) -> Call:
    """vLLM's C++ op, symmetric."""
    quantised = torch.empty(x.shape, dtype=torch.int8)
    scale = torch.empty(x.shape[0], 1)
    vllm = operators()
    return Call(
        run=lambda: vllm.dynamic_scaled_int8_quant(quantised, x, scale, None),
        output=lambda: quantised.double() * scale.double(),
    )


def _case(name: str, words: str, tokens: int, hidden_size: int) -> Case:
    work = Work(bytes_read=2 * tokens * hidden_size, bytes_written=tokens * hidden_size + 4 * tokens)
    return Case(
        "quantise",
        name,
        words,
        work,
        TOLERANCE,
        lambda: torch.randn(tokens, hidden_size).bfloat16(),
        reference,
        (
            Implementation("vllm_arm", ours, operation="quantise"),
            Implementation("upstream", upstream, tolerance=TOLERANCE_UPSTREAM),
        ),
    )


CASES = (
    _case("llama_decode_16", "Llama-3.1-8B, 16 tokens of 4096", 16, 4096),
    _case("llama_down_1", "Llama-3.1-8B before down_proj, 1 token of 14336", 1, 14336),
    _case("qwen_decode_16", "Qwen2.5-7B, 16 tokens of 3584", 16, 3584),
)
