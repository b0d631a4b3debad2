# SPDX-License-Identifier: Apache-2.0
"""Linear layers by weight type: bf16, and int8 with dynamically quantised activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases.case import Arithmetic, Call, Case, Implementation, Work
from benchmarks.cases.upstream import operators

PRIMITIVE_CACHE_SIZE = 32  # of oneDNN, as vLLM's CPU backend leaves it small
TOLERANCE_BF16 = 2**-7
# Activations are rounded to 8 bits: half a step of 1/127 of the largest in each product, averaged over the sum.
TOLERANCE_INT8 = 0.03


@dataclass(frozen=True)
class Inputs:
    """``x`` is ``[tokens, k]``; ``weight`` (bf16 or int8) is ``[n, k]``, ``scale`` ``[n, 1]``."""

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None = None


def reference(inputs: Inputs) -> torch.Tensor:
    """The product with the weights as they are stored, in float64."""
    weight = inputs.weight.double()
    if inputs.scale is not None:
        weight *= inputs.scale.double()
    result = inputs.x.double() @ weight.t()
    return result if inputs.bias is None else result + inputs.bias.double()


def onednn_bf16(inputs: Inputs) -> Call:
    """oneDNN (with the Compute Library on Arm), weights packed once."""
    vllm = operators()
    handler = torch.tensor(vllm.create_onednn_mm_handler(inputs.weight.t(), PRIMITIVE_CACHE_SIZE), dtype=torch.int64)
    output = torch.empty(inputs.x.shape[0], inputs.weight.shape[0], dtype=torch.bfloat16)
    return Call(run=lambda: vllm.onednn_mm(output, inputs.x, inputs.bias, handler), output=lambda: output)


def panels_bf16(inputs: Inputs) -> Call:
    """``torch.ops.vllm_arm.panel_linear``, weights packed once."""
    from vllm_arm import ops

    packed = ops.pack_panels(inputs.weight)
    output = torch.empty(inputs.x.shape[0], inputs.weight.shape[0], dtype=torch.bfloat16)
    ours = torch.ops.vllm_arm
    return Call(run=lambda: ours.panel_linear(output, inputs.x, packed, inputs.bias), output=lambda: output)


def torch_bf16(inputs: Inputs) -> Call:
    """``F.linear``, what a layer runs that vLLM has not packed."""
    results: list[torch.Tensor] = []

    def run() -> None:
        results[:] = [torch.nn.functional.linear(inputs.x, inputs.weight, inputs.bias)]

    return Call(run=run, output=lambda: results[0])


def onednn_int8(inputs: Inputs) -> Call:
    """vLLM's quantisation of the activations and oneDNN's int8 product."""
    vllm = operators()
    tokens, k = inputs.x.shape
    handler = torch.tensor(
        vllm.create_onednn_scaled_mm_handler(
            inputs.weight.t(), inputs.scale, torch.bfloat16, True, False, PRIMITIVE_CACHE_SIZE
        ),
        dtype=torch.int64,
    )
    output = torch.empty(tokens, inputs.weight.shape[0], dtype=torch.bfloat16)

    def run() -> None:
        quantised = torch.empty(tokens, k, dtype=torch.int8)
        scale = torch.empty(tokens, 1)
        vllm.dynamic_scaled_int8_quant(quantised, inputs.x, scale, None)
        vllm.onednn_scaled_mm(output, quantised, scale, None, None, None, handler)

    return Call(run=run, output=lambda: output)


def panels_int8(inputs: Inputs) -> Call:
    """``torch.ops.vllm_arm.panel_linear_int8``, weights packed once; it quantises the activations itself."""
    from vllm_arm import ops

    assert inputs.scale is not None
    packed, scales = ops.pack_panels(inputs.weight), inputs.scale.flatten()
    output = torch.empty(inputs.x.shape[0], inputs.weight.shape[0], dtype=torch.bfloat16)
    ours = torch.ops.vllm_arm
    return Call(
        run=lambda: ours.panel_linear_int8(output, inputs.x, packed, scales, None, inputs.bias, None, None),
        output=lambda: output,
    )


def _bf16(name: str, words: str, tokens: int, n: int, k: int, bias: bool = False) -> Case:
    def inputs() -> Inputs:
        x, weight = torch.randn(tokens, k).bfloat16(), torch.randn(n, k).bfloat16()
        return Inputs(x, weight, None, torch.randn(n).bfloat16() if bias else None)

    implementations = (
        Implementation("vllm_arm", panels_bf16, operation="panel_linear"),
        Implementation("upstream", onednn_bf16),
        Implementation("torch", torch_bf16),
    )
    work = Work(2 * (tokens * k + n * k + (n if bias else 0)), 2 * tokens * n, tokens * n * k)
    return Case("linear", f"bf16_{name}", words, work, TOLERANCE_BF16, inputs, reference, implementations)


def _int8(name: str, words: str, tokens: int, n: int, k: int) -> Case:
    def inputs() -> Inputs:
        weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        return Inputs(torch.randn(tokens, k).bfloat16(), weight, torch.rand(n, 1).add(0.5))

    work = _quantised_work(tokens, n, k, weight_bytes=n * k, element_bytes=2)
    implementations = (
        Implementation("vllm_arm", panels_int8, operation="panel_linear"),
        Implementation("upstream", onednn_int8),
    )
    return Case("linear", f"int8_{name}", words, work, TOLERANCE_INT8, inputs, reference, implementations)


def _quantised_work(tokens: int, n: int, k: int, weight_bytes: int, element_bytes: int) -> Work:
    read = element_bytes * tokens * k + weight_bytes + 4 * n
    arithmetic: Arithmetic = "int8"
    return Work(read, element_bytes * tokens * n, tokens * n * k, arithmetic)


_SQUARE = "a square of 512, an eighth of Llama-3.1-8B's o_proj each way, {} tokens"

CASES = (
    *(_bf16(f"512_m{m}", _SQUARE.format(m), m, 512, 512) for m in (1, 16, 128)),
    *(_int8(f"512_m{m}", _SQUARE.format(m), m, 512, 512) for m in (1, 16, 128)),
    _bf16("qwen_kv_m4", "Qwen2.5-7B's k_proj (512 x 3584, bias), 4 tokens", 4, 512, 3584, bias=True),
    _int8("qwen_kv_m4", "Qwen2.5-7B's k_proj (512 x 3584), 4 tokens", 4, 512, 3584),
    _bf16("gpt_oss_router_m16", "gpt-oss-20b's router (32 x 2880, bias), 16 tokens", 16, 32, 2880, bias=True),
    _bf16("2048_m1", "a square of 2048, 1 token", 1, 2048, 2048),
    _int8("2048_m1", "a square of 2048, 1 token", 1, 2048, 2048),
    _bf16("llama_kv_m1", "Llama-3.1-8B's k_proj (1024 x 4096), 1 token", 1, 1024, 4096),
)
