# SPDX-License-Identifier: Apache-2.0
"""Gated activations of the MLP: SiLU, tanh-approximated GELU, and gpt-oss's clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from benchmarks.cases.case import Call, Case, Implementation, Work
from benchmarks.cases.upstream import operators

# The eager sequence of ops rounds to bf16 after each.
TOLERANCE = 2**-6
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0

Function = Callable[[torch.Tensor], torch.Tensor]


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, gate and up side by side in ``x`` (``[tokens, 2 * width]``)."""
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``gelu_tanh(gate) * up``, gate and up side by side in ``x``."""
    gate, up = x.chunk(2, -1)
    return functional.gelu(gate, approximate="tanh") * up


def swiglu_oai(x: torch.Tensor) -> torch.Tensor:
    """gpt-oss's gate: clamped, scaled sigmoid, ``up + 1``; gate and up interleaved in ``x``."""
    gate, up = x[..., ::2], x[..., 1::2]
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(min=-SWIGLU_LIMIT, max=SWIGLU_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SWIGLU_ALPHA))


def upstream(operation: str) -> Callable[[torch.Tensor], Call]:
    """vLLM's C++ op of that name."""

    def prepare(x: torch.Tensor) -> Call:
        output = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
        call = getattr(operators(), operation)
        return Call(run=lambda: call(output, x), output=lambda: output)

    return prepare


def eager(function: Function) -> Callable[[torch.Tensor], Call]:
    """The sequence of torch ops that vLLM's native implementation runs, not compiled."""

    def prepare(x: torch.Tensor) -> Call:
        results: list[torch.Tensor] = []

        def run() -> None:
            results[:] = [function(x)]

        return Call(run=run, output=lambda: results[0])

    return prepare


def _case(name: str, words: str, tokens: int, width: int, function: Function, operation: str | None) -> Case:
    implementations = [Implementation("torch", eager(function))]
    if operation:
        implementations.insert(0, Implementation("upstream", upstream(operation)))
    return Case(
        "activation",
        name,
        words,
        Work(bytes_read=4 * tokens * width, bytes_written=2 * tokens * width),
        TOLERANCE,
        lambda: torch.randn(tokens, 2 * width).bfloat16(),
        lambda x: function(x.double()),
        tuple(implementations),
    )


CASES = (
    _case("llama_silu_1", "Llama-3.1-8B, 1 token of 14336", 1, 14336, silu_and_mul, "silu_and_mul"),
    _case("qwen_silu_4", "Qwen2.5-7B, 4 tokens of 18944", 4, 18944, silu_and_mul, "silu_and_mul"),
    _case("gemma3_gelu_4", "Gemma-3-4B, 4 tokens of 10240", 4, 10240, gelu_tanh_and_mul, "gelu_tanh_and_mul"),
    _case("gpt_oss_swiglu_4", "gpt-oss-20b, 4 tokens of 2880; vLLM has no op on CPU", 4, 2880, swiglu_oai, None),
)
