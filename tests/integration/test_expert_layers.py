# SPDX-License-Identifier: Apache-2.0
"""Quantised experts without a model: every token has those that it chose, and shapes that fit badly are right too."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.integration.layers import assert_close
from tests.models.quantised import round_to_groups
from vllm_arm.linear import experts
from vllm_arm.linear.int4_formats import IntegerWeight

EXPERTS, HIDDEN, INNER, TOKENS, CHOSEN = 5, 128, 64, 40, 2


def make(n: int, k: int, bits: int, group_size: int, symmetric: bool = True) -> tuple[Any, torch.Tensor]:
    """The experts' weights ``[n, k]`` of a checkpoint, and what they stand for."""
    generator = torch.Generator().manual_seed(n * k)
    weights = torch.randn(EXPERTS, n, k, generator=generator) / k**0.5
    stored, plain = [], []
    for weight in weights:
        codes, scales, points = round_to_groups(weight, bits, group_size, symmetric)
        middle = 1 << (bits - 1)
        zero_points = None if symmetric else (points - middle).to(torch.int8)
        stored.append(IntegerWeight((codes - middle).to(torch.int8), scales, zero_points))
        plain.append(stored[-1].dequantise())
    packed = experts.from_integers("experts", iter(stored), EXPERTS, bits, group_size)
    return packed, torch.stack(plain)


def reference(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor, bias: Any
) -> torch.Tensor:
    total = torch.zeros(len(x), down.shape[1])
    for token, (its_shares, its_ids) in enumerate(zip(shares, ids.tolist(), strict=True)):
        for share, expert in zip(its_shares, its_ids, strict=True):
            if expert >= 0:
                gate, rest = functional.linear(x[token], gate_up[expert], bias[0][expert]).chunk(2)
                output = functional.linear(functional.silu(gate) * rest, down[expert], bias[1][expert])
                total[token] += share * output
    return total


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False)])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_each_token_has_its_experts(bits: int, symmetric: bool, elsewhere: bool) -> None:
    gate_up, plain_gate_up = make(2 * INNER, HIDDEN, bits, 32, symmetric)
    down, plain_down = make(HIDDEN, INNER, bits, 32, symmetric)
    assert (gate_up.scales is None) == (bits == 4)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    shares = torch.rand(TOKENS, CHOSEN, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(TOKENS)]).int()
    if elsewhere:
        ids[ids == 3] = -1
    bias = torch.randn(EXPERTS, 2 * INNER, generator=generator), torch.randn(EXPERTS, HIDDEN, generator=generator)
    actual = experts.run(x, (gate_up, down), shares, ids, "silu", bias)
    assert_close(actual, reference(x, plain_gate_up, plain_down, shares, ids, bias))


@pytest.mark.parametrize("activation", experts.ACTIVATIONS)
def test_activations(activation: str) -> None:
    from vllm.model_executor.layers.activation import SwigluOAIAndMul

    weights, plain = make(2 * HIDDEN, HIDDEN, 8, HIDDEN)
    down, plain_down = make(HIDDEN, HIDDEN, 8, HIDDEN)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    gate_up = functional.linear(x, plain[0])
    if activation == "swigluoai":
        gate_up *= 4
        weights.scales *= 4
        assert gate_up.abs().max() > 7, "some are clamped"
    gate, rest = gate_up.chunk(2, -1)
    inner = {
        "silu": lambda: functional.silu(gate) * rest,
        "gelu": lambda: functional.gelu(gate) * rest,
        "gelu_tanh": lambda: functional.gelu(gate, approximate="tanh") * rest,
        "swigluoai": lambda: SwigluOAIAndMul.forward_native(SimpleNamespace(alpha=1.702, limit=7.0), gate_up),
    }[activation]()
    expected = functional.linear(inner, plain_down[0])
    actual = experts.run(x, (weights, down), torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32), activation)
    assert_close(actual, expected)


def test_inputs_that_int4_cannot_take_run_in_int8() -> None:
    weights, plain = make(48, 80, 4, 80)
    assert weights.scales is not None
    x = torch.randn(7, 80)
    assert_close(weights.multiply(2, x, None), functional.linear(x, plain[2]))


@pytest.mark.parametrize(
    "shape",
    [
        (2 * 192, 256),  # the gate has a block and a half
        (2 * 128, 320),
    ],
)
def test_blocks_of_fp8_that_the_weight_does_not_fill(shape: tuple[int, int]) -> None:
    from vllm_arm.linear import expert_checkpoints

    n, k = shape
    generator = torch.Generator().manual_seed(n)
    halves, scales = [], []
    plain = torch.empty(n, k)
    for half in range(2):
        grid = -(-n // 2 // 128), -(-k // 128)
        factors = torch.rand(grid, generator=generator) + 0.5
        weight = torch.randn(n // 2, k, generator=generator).to(torch.float8_e4m3fn)
        spread = factors.repeat_interleave(128, 0)[: n // 2].repeat_interleave(128, 1)[:, :k]
        plain[half * n // 2 : (half + 1) * n // 2] = weight.float() * spread
        halves.append(weight)
        scales.append(factors)
    layer = SimpleNamespace(w13_weight=torch.cat(halves)[None], w13_weight_scale_inv=torch.cat(scales)[None])
    method = SimpleNamespace(weight_block_size=[128, 128], weight_scale_name="weight_scale_inv")
    read = next(each.read for each in expert_checkpoints.FORMATS if each.method == "Fp8MoEMethod")
    assert_close(read(method, layer, "w13", 0).dequantise(), plain)


def test_what_cannot_be_quantised_is_said() -> None:
    def config(activation: str, batched: bool = False, gated: bool = True, limit: float | None = None) -> Any:
        parallel = SimpleNamespace(use_batched_activation_format=batched)
        activation_of = SimpleNamespace(value=activation)
        return SimpleNamespace(
            is_act_and_mul=gated, activation=activation_of, moe_parallel_config=parallel, swiglu_limit=limit
        )

    assert experts.objection(config("silu")) is None
    assert experts.objection(config("swigluoai")) is None
    assert "their activation is relu2: expected one of silu, gelu, gelu_tanh, swigluoai" in str(
        experts.objection(config("relu2"))
    )
    assert experts.objection(config("silu", gated=False)) is not None
    assert "batches of a fixed size" in str(experts.objection(config("silu", batched=True)))
    assert "expected no swiglu_limit" in str(experts.objection(config("silu", limit=7.0)))
    assert experts.objection(config("swigluoai", limit=7.0)) is None


@pytest.mark.usefixtures("patched_vllm")
@pytest.mark.parametrize(
    ("intermediate", "desc_act", "activation", "reason"),
    [
        (96, False, "silu", "of 256 and, on each rank, 96 inputs cannot be cut into groups of 64"),
        (128, True, "silu", "with desc_act"),
        (128, False, "swigluoai", "their activation is swigluoai: expected one of silu, gelu, gelu_tanh, with a gate"),
    ],
)
def test_checkpoints_that_would_be_wrong_are_refused(
    intermediate: int, desc_act: bool, activation: str, reason: str
) -> None:
    from vllm.model_executor.layers.quantization import auto_gptq

    from vllm_arm.linear import expert_checkpoints

    expert_checkpoints.install()
    quantisation = SimpleNamespace(
        quant_type=SimpleNamespace(size_bits=4), is_sym=True, group_size=64, desc_act=desc_act
    )
    moe = SimpleNamespace(
        is_act_and_mul=True,
        activation=SimpleNamespace(value=activation),
        swiglu_limit=None,
        moe_parallel_config=SimpleNamespace(use_batched_activation_format=False),
        hidden_dim=256,
        intermediate_size_per_partition=intermediate,
    )
    with pytest.raises(ValueError, match=reason):
        auto_gptq.AutoGPTQMoEMethod(quantisation, moe)
