# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of queries and keys, in place, halves rotated against each other (GPT-NeoX style)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases.case import Call, Case, Implementation, Work
from benchmarks.cases.upstream import operators

# Results are rounded to bf16; upstream's products are bf16 too before they are added.
TOLERANCE = 2**-6
POSITIONS = 4096


@dataclass(frozen=True)
class Inputs:
    """``query`` and ``key`` are ``[tokens, heads * head_size]``; ``cos_sin`` is ``[POSITIONS, head_size]``."""

    positions: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    cos_sin: torch.Tensor
    head_size: int


def reference(inputs: Inputs) -> torch.Tensor:
    """The rotated queries and keys side by side, in float64."""
    return torch.cat([rotate(x.double(), inputs, torch.float64) for x in (inputs.query, inputs.key)], -1)


def rotate(x: torch.Tensor, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """``x`` rotated by its positions, computed in ``dtype`` op by op."""
    cos, sin = inputs.cos_sin[inputs.positions].to(dtype).unsqueeze(1).chunk(2, -1)
    first, second = x.unflatten(1, (-1, inputs.head_size)).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).flatten(1)


def upstream(inputs: Inputs) -> Call:
    """vLLM's C++ op."""
    vllm = operators()
    query, key = inputs.query.clone(), inputs.key.clone()

    def reset() -> None:
        query.copy_(inputs.query)
        key.copy_(inputs.key)

    return Call(
        run=lambda: vllm.rotary_embedding(inputs.positions, query, key, inputs.head_size, inputs.cos_sin, True),
        output=lambda: torch.cat([query, key], -1),
        reset=reset,
    )


def eager(inputs: Inputs) -> Call:
    """The sequence of torch ops that vLLM's native implementation runs, not compiled."""
    results: list[torch.Tensor] = []

    def run() -> None:
        results[:] = [rotate(x, inputs, torch.bfloat16) for x in (inputs.query, inputs.key)]

    return Call(run=run, output=lambda: torch.cat(results, -1))


def _case(name: str, words: str, tokens: int, query_heads: int, kv_heads: int, head_size: int, base: float) -> Case:
    def inputs() -> Inputs:
        frequencies = base ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        angles = torch.arange(POSITIONS)[:, None] * frequencies
        return Inputs(
            torch.randint(0, POSITIONS, (tokens,)),
            torch.randn(tokens, query_heads * head_size).bfloat16(),
            torch.randn(tokens, kv_heads * head_size).bfloat16(),
            torch.cat([angles.cos(), angles.sin()], -1).bfloat16(),
            head_size,
        )

    heads = 2 * tokens * (query_heads + kv_heads) * head_size
    work = Work(bytes_read=heads + 2 * tokens * head_size + 8 * tokens, bytes_written=heads)
    implementations = (Implementation("upstream", upstream), Implementation("torch", eager))
    return Case("rope", name, words, work, TOLERANCE, inputs, reference, implementations)


CASES = (
    _case("llama_decode_16", "Llama-3.1-8B, 16 tokens of 32 + 8 heads of 128", 16, 32, 8, 128, 5e5),
    _case("qwen_decode_16", "Qwen2.5-7B, 16 tokens of 28 + 4 heads of 128", 16, 28, 4, 128, 1e6),
    _case("gpt_oss_decode_16", "gpt-oss-20b, 16 tokens of 64 + 8 heads of 64", 16, 64, 8, 64, 1.5e5),
    _case("gemma3_decode_16", "Gemma-3-4B's local layers, 16 tokens of 8 + 4 heads of 256", 16, 8, 4, 256, 1e4),
)
