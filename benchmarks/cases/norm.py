# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone and with the residual addition before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases.case import Call, Case, Implementation, Work
from benchmarks.cases.upstream import operators

EPSILON = 1e-5
# Half a unit in the last place of bf16, and the weight times the rounded value where that is rounded twice.
TOLERANCE = 2**-7


@dataclass(frozen=True)
class Inputs:
    """``x`` and ``residual`` (None: no addition) are ``[..., hidden_size]``; ``x`` may be a strided view."""

    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor


def reference(inputs: Inputs) -> torch.Tensor:
    """The normalised rows in float64."""
    x = inputs.x.double()
    if inputs.residual is not None:
        x = x + inputs.residual.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * inputs.weight.double()


def ours(inputs: Inputs) -> Call:
    """``torch.ops.vllm_arm.rms_norm`` or ``fused_add_rms_norm``."""
    from vllm_arm import ops

    if inputs.residual is not None:
        return _in_place(inputs, inputs.residual, ops.fused_add_rms_norm)
    output = torch.empty(inputs.x.shape, dtype=inputs.x.dtype)
    return Call(
        run=lambda: torch.ops.vllm_arm.rms_norm(output, inputs.x, inputs.weight, EPSILON), output=lambda: output
    )


def upstream(inputs: Inputs) -> Call:
    """vLLM's C++ op."""
    vllm = operators()
    if inputs.residual is not None:
        return _in_place(inputs, inputs.residual, vllm.fused_add_rms_norm)
    output = torch.empty(inputs.x.shape, dtype=inputs.x.dtype)
    # The op takes no account of strides on CPU, so that its caller must copy a view.
    return Call(run=lambda: vllm.rms_norm(output, inputs.x.contiguous(), inputs.weight, EPSILON), output=lambda: output)


def eager(inputs: Inputs) -> Call:
    """The sequence of torch ops that vLLM's native implementation runs, not compiled."""
    results: list[torch.Tensor] = []

    def run() -> None:
        x = inputs.x.to(torch.float32)
        if inputs.residual is not None:
            x = x + inputs.residual.to(torch.float32)
            x.to(torch.bfloat16)
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPSILON)
        results[:] = [(x.to(torch.bfloat16) * inputs.weight).to(torch.bfloat16)]

    return Call(run=run, output=lambda: results[0])


def _in_place(inputs: Inputs, residual: torch.Tensor, operation: object) -> Call:
    x, total = inputs.x.clone(), residual.clone()

    def reset() -> None:
        x.copy_(inputs.x)
        total.copy_(residual)

    return Call(
        run=lambda: operation(x, total, inputs.weight, EPSILON),  # type: ignore[operator]
        output=lambda: x,
        reset=reset,
    )


IMPLEMENTATIONS = (
    Implementation("vllm_arm", ours, operation="rms_norm"),
    Implementation("upstream", upstream),
    Implementation("torch", eager),
)


def _rows(name: str, shape: str, tokens: int, hidden_size: int, add: bool) -> Case:
    def inputs() -> Inputs:
        x = torch.randn(tokens, hidden_size).bfloat16()
        residual = torch.randn(tokens, hidden_size).bfloat16() if add else None
        return Inputs(x, residual, torch.rand(hidden_size).add(0.5).bfloat16())

    tensor = 2 * tokens * hidden_size
    work = Work(bytes_read=(2 if add else 1) * tensor + 2 * hidden_size, bytes_written=(2 if add else 1) * tensor)
    return Case("norm", name, shape, work, TOLERANCE, inputs, reference, IMPLEMENTATIONS)


def _heads(name: str, shape: str, tokens: int, heads: int, head_size: int, qkv_width: int) -> Case:
    def inputs() -> Inputs:
        qkv = torch.randn(tokens, qkv_width).bfloat16()
        heads_of_qkv = qkv[:, : heads * head_size].unflatten(1, (heads, head_size))
        return Inputs(heads_of_qkv, None, torch.rand(head_size).add(0.5).bfloat16())

    tensor = 2 * tokens * heads * head_size
    work = Work(bytes_read=tensor + 2 * head_size, bytes_written=tensor)
    return Case("norm", name, shape, work, TOLERANCE, inputs, reference, IMPLEMENTATIONS)


CASES = (
    _rows("llama_decode_1", "Llama-3.1-8B, 1 token of 4096", 1, 4096, False),
    _rows("llama_add_decode_16", "Llama-3.1-8B with residual, 16 tokens of 4096", 16, 4096, True),
    _rows("qwen_add_decode_16", "Qwen2.5-7B with residual, 16 tokens of 3584", 16, 3584, True),
    _rows("gpt_oss_prefill_64", "gpt-oss-20b, 64 tokens of 2880 (more tokens repeat the same loop)", 64, 2880, False),
    _heads(
        "gemma3_query_heads_16", "Gemma-3-4B, 16 tokens x 8 query heads of 256, strided in qkv", 16, 8, 256, 16 * 256
    ),
)
