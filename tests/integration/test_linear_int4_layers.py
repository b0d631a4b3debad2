# SPDX-License-Identifier: Apache-2.0
"""vLLM's layers of int4 and FP8 checkpoints on our kernels."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from tests.integration.layers import assert_close, make_layer, parameter
from tests.models.quantised import pack_words, round_to_groups
from vllm_arm import ops
from vllm_arm.linear import fp8, int4, requantise

pytestmark = pytest.mark.usefixtures("patched_vllm")


def run(
    weight_type: str, group_size: int, n: int, k: int, inputs_of_rank: int | None = None, prefix: str = "layer"
) -> tuple[Any, Any, torch.Tensor]:
    """A layer of such a checkpoint after loading, its kernel, and the weight that it stands for."""
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    has_points = weight_type in ("uint4", "uint8")
    bits = 8 if weight_type.startswith("uint8") else 4
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k))
    group = k if group_size == -1 else group_size
    codes, scales, points = round_to_groups(weight, bits, group, symmetric=not has_points)
    dequantised = ((codes - points.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)).float()
    if weight_type == "int4":
        stored = parameter((codes - 8).to(torch.int8), input_dim=1, output_dim=0)
        layer = make_layer(prefix, weight=stored, packed=stored, scales=parameter(scales, output_dim=0))
    else:
        words = parameter(pack_words(codes.t(), bits, 0), input_dim=0, output_dim=1, packed_dim=0)
        layer = make_layer(prefix, packed=words, scales=parameter(scales.t().contiguous(), output_dim=1))
        layer.register_parameter("points", parameter(pack_words(points, bits, 0), output_dim=0, packed_dim=0))
    kernel_type = int4.kernel_class()
    config = MPLinearLayerConfig(
        (k, n), (inputs_of_rank or k, n), getattr(scalar_types, weight_type), torch.bfloat16, group_size, has_points
    )
    assert kernel_type.can_implement(config) == (True, None)  # type: ignore[attr-defined]
    kernel = kernel_type(config, "packed", "scales", "points")
    kernel.process_weights_after_loading(layer)
    return layer, kernel, dequantised


@pytest.mark.parametrize("weight_type", ["int4", "uint4", "uint4b8", "uint8b128", "uint8"])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
def test_weights_of_every_type_and_group(weight_type: str, group_size: int) -> None:
    layer, kernel, weight = run(weight_type, group_size, 48, 512)
    x, bias = torch.randn(2, 3, 512), torch.randn(48)
    assert_close(kernel.apply_weights(layer, x, bias), linear(x, weight, bias))
    assert_close(kernel.apply_weights(layer, x[0].bfloat16()), linear(x[0], weight))


def test_only_the_packed_weight_is_left() -> None:
    layer, _, _ = run("uint4", 64, 128, 512)
    assert [name for name, _ in layer.named_parameters()] == ["packed"]
    assert layer.packed.nbytes <= 1.25 * 128 * 512 // 2, "codes, and what groups have"


@pytest.mark.parametrize(
    ("group_size", "k", "reason"),
    [(-1, 80, "the number of its inputs, 80, is no multiple of 32"), (16, 64, "the size of its groups, 16, is no")],
)
def test_what_does_not_fit_runs_in_int8_and_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, group_size: int, k: int, reason: str
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    name = f"model.layers.{k}.mlp.down_proj"
    layer, kernel, weight = run("uint4b8", group_size, 48, k, prefix=name)
    x = torch.randn(5, k)
    assert_close(kernel.apply_weights(layer, x), linear(x, weight))
    assert f"{name}: int8 in place of int4, for {reason}" in caplog.text


def test_groups_that_ranks_would_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="48 outputs: groups of 64 do not divide the 96 inputs that each rank has"):
        run("uint4b8", 64, 48, 192, inputs_of_rank=96)


def test_other_bits_are_refused_with_what_there_is() -> None:
    from vllm.scalar_type import scalar_types

    config = SimpleNamespace(weight_type=scalar_types.uint3b4)
    supported, reason = int4.kernel_class().can_implement(config)  # type: ignore[attr-defined]
    assert not supported
    assert "expected one of int4, uint4, uint4b8, uint8, uint8b128" in reason


def test_our_kernels_are_first_once_and_obey_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.kernels import linear as kernels
    from vllm.model_executor.layers.quantization.utils import w8a8_utils
    from vllm.platforms import PlatformEnum

    lists = ("_POSSIBLE_KERNELS", "_POSSIBLE_FP8_KERNELS", "_POSSIBLE_FP8_BLOCK_KERNELS", "_POSSIBLE_WFP8A16_KERNELS")
    monkeypatch.setattr(w8a8_utils, "requantize_with_max_scale", None)
    for name in lists:
        monkeypatch.setitem(getattr(kernels, name), PlatformEnum.CPU, [object])

    def installed(value: str) -> list[list[type]]:
        monkeypatch.setenv("VLLM_ARM_LINEAR", value)
        for module in (int4, fp8, int4, fp8):
            module.install()
        return [getattr(kernels, name)[PlatformEnum.CPU] for name in lists]

    assert installed("0") == [[object]] * 4
    assert w8a8_utils.requantize_with_max_scale is None
    assert installed("1") == [[int4.kernel_class(), object]] + [[fp8.kernel_class(), object]] * 3


def test_scales_are_exact_while_models_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the default dtype that vLLM sets then."""
    monkeypatch.setattr(requantise, "use_int8", lambda _, codes, scales: (codes, scales))
    weight = torch.randn(40, 64)
    torch.set_default_dtype(torch.bfloat16)
    try:
        codes, scales = requantise.to_int8(None, 40, 64, lambda rows: weight[rows])
        quantised = int4.quantise(weight, 32)
    finally:
        torch.set_default_dtype(torch.float32)
    expected = ops.quantise(weight)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scales, expected[1])
    assert torch.equal(quantised.scales, ops.quantise_int4(weight, 32)[1])
    assert quantised.scales.dtype == torch.float32


def to_fp8(weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    stored = (weight / scales).to(torch.float8_e4m3fn)
    return stored, stored.float() * scales


@pytest.mark.parametrize("kind", ["tensor", "channel", "block", "inverse block"])
def test_fp8_weights_become_int8(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requantise, "_BLOCK_ELEMENTS", 100 * 192)
    weight = torch.randn(160, 192, generator=torch.Generator().manual_seed(0))
    blocks = torch.rand(2, 2, generator=torch.Generator().manual_seed(1)) / 50 + 0.01
    scales = {"tensor": torch.tensor(0.02), "channel": torch.linspace(0.01, 0.02, 160)[:, None]}.get(
        kind, blocks.repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)[:, :192]
    )
    stored, dequantised = to_fp8(weight, scales)
    in_blocks = "block" in kind
    name = "weight_scale_inv" if kind == "inverse block" else "weight_scale"
    layer = make_layer(weight=parameter(stored if in_blocks else stored.t()))
    layer.register_parameter(name, parameter(blocks if in_blocks else scales))
    layer.weight_block_size = [128, 128] if in_blocks else None
    layer.input_scale = None
    kernel = fp8.kernel_class()(None, ["weight", "weight_scale", "input_scale", "input_scale_ub"])
    kernel.process_weights_after_loading(layer)
    x, bias = torch.randn(2, 3, 192), torch.randn(160)
    assert_close(kernel.apply_weights(layer, x, bias), linear(x, dequantised, bias))
    assert torch.float8_e4m3fn not in {each.dtype for each in layer.parameters()}


def test_fp8_weights_that_latent_attention_reads_stay() -> None:
    stored, dequantised = to_fp8(torch.randn(64, 96), torch.tensor(0.02))
    layer = make_layer(weight=parameter(stored.t()), weight_scale=parameter(torch.tensor(0.02)))
    layer._cpu_skip_gemm_dispatch = True
    kernel = fp8.kernel_class()(None, [])
    kernel.process_weights_after_loading(layer)
    x = torch.randn(3, 96)
    torch.testing.assert_close(kernel.apply_weights(layer, x), linear(x, dequantised))


@pytest.mark.parametrize(
    ("scales", "widths", "expected"),
    [
        ([0.5, 2.0], [1, 2], [0.5, 2.0, 2.0]),
        ([0.5], [3], 0.5),
        ([0.5, torch.finfo(torch.float32).min], [1, 2], 0.5),
    ],
)
def test_each_part_of_a_layer_keeps_its_scale(scales: list[float], widths: list[int], expected: object) -> None:
    weight = torch.zeros(3, 4)
    kept, same = fp8.keep_scales(weight, torch.tensor(scales), widths)
    assert kept.tolist() == expected
    assert same is weight


def test_shards_that_cut_groups_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="o_proj: groups of 128 do not divide the 192 inputs that each rank has"):
        int4.check_shard("model.layers.0.self_attn.o_proj", 384, 192, 128)
    int4.check_shard("a layer that no groups of 128 divide runs in int8", 320, 160, 128)
