# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are quantised while they load: which layers, how, and from the cache."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from tests.integration.layers import assert_close, make_layer, parameter
from vllm_arm import ops
from vllm_arm.linear import requantise

pytestmark = pytest.mark.usefixtures("patched_vllm")


@pytest.mark.parametrize("name", ["arm_int8", "arm_int4"])
def test_every_linear_layer_is_quantised_but_those_to_be_ignored(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from vllm_arm.linear import quantise_on_load

    quantise_on_load.register()
    quantise_on_load.register()
    config_class = get_quantization_config(name)
    assert config_class.get_name() == name
    monkeypatch.setattr(config_class, "linear_method", lambda *_: "quantised")
    monkeypatch.setenv("VLLM_ARM_QUANTISE_IGNORE", "model.layers.0.*, *.o_proj")
    monkeypatch.setenv("VLLM_ARM_QUANTISE_INCLUDE", "model.layers.0.mlp.down_proj")
    config = config_class.from_config({"ignore": ["model.layers.7.mlp.down_proj"], "include": ["model.layers.5.*"]})
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    layer, head = LinearBase.__new__(LinearBase), ParallelLMHead.__new__(ParallelLMHead)
    for prefix in (
        "model.layers.1.self_attn.qkv_proj",
        "model.layers.1.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.5.mlp.gate",
    ):
        assert config.get_quant_method(layer, prefix) == "quantised", prefix
    for prefix in (
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.7.mlp.down_proj",
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.shared_expert_gate",
        "model.layers.1.mlp.router",
    ):
        assert isinstance(config.get_quant_method(layer, prefix), UnquantizedLinearMethod), prefix
    assert config.get_quant_method(head, "lm_head") is None


@pytest.mark.parametrize("name", ["arm_int8", "arm_int4"])
def test_experts_are_quantised_unless_they_cannot_be_or_are_to_be_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    from vllm.model_executor.layers.fused_moe import RoutedExperts, unquantized_fused_moe_method
    from vllm.model_executor.layers.quantization import get_quantization_config

    from vllm_arm.linear import experts, quantise_on_load

    quantise_on_load.register()
    config = get_quantization_config(name).from_config({"ignore": ["model.layers.7.*"]})
    layer = RoutedExperts.__new__(RoutedExperts)
    layer.__dict__["moe_config"] = SimpleNamespace(in_dtype=torch.bfloat16)
    monkeypatch.setattr(type(config), "experts_method", lambda *_: "quantised")
    monkeypatch.setattr(unquantized_fused_moe_method, "UnquantizedFusedMoEMethod", lambda _: "plain")
    monkeypatch.setattr(experts, "objection", lambda _: None)
    assert config.get_quant_method(layer, "model.layers.0.mlp.experts") == "quantised"
    assert config.get_quant_method(layer, "model.layers.7.mlp.experts") == "plain"
    monkeypatch.setattr(experts, "objection", lambda _: "a reason")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    assert config.get_quant_method(layer, "model.layers.0.mlp.experts") == "plain"
    assert f"{name}: experts stay in torch.bfloat16, for a reason" in caplog.text


def test_the_lm_head_is_quantised_where_it_is_asked_for_and_shares_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from vllm_arm.linear import quantise_on_load

    monkeypatch.setenv("VLLM_ARM_QUANTISE_INCLUDE", "*lm_head")
    monkeypatch.setattr(quantise_on_load.ArmInt4Config, "linear_method", lambda *_: "quantised")
    text_config = SimpleNamespace(tie_word_embeddings=False)
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text_config))
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: vllm_config)
    config, head = quantise_on_load.ArmInt4Config(), ParallelLMHead.__new__(ParallelLMHead)
    assert config.get_quant_method(head, "language_model.lm_head") == "quantised"
    text_config.tie_word_embeddings = True
    assert config.get_quant_method(head, "language_model.lm_head") is None


class _Loaded:
    """A linear layer whose weight has arrived, and its method."""

    def __init__(self, scheme: str, n: int, k: int, group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase

        from vllm_arm.linear import quantise_on_load

        monkeypatch.setattr(OnlineLinearBase, "__init__", lambda _: None)
        self.weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))
        self.layer = make_layer(weight=parameter(self.weight.clone()))
        self.layer.output_size_per_partition, self.layer.input_size_per_partition = n, k
        config = (
            quantise_on_load.ArmInt8Config()
            if scheme == "int8"
            else quantise_on_load.ArmInt4Config(group_size=group_size)
        )
        self.method = config.linear_method("model.layers.3.mlp.up_proj")
        self.method.process_weights_after_loading(self.layer)


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_int4_quantises_what_arrives(monkeypatch: pytest.MonkeyPatch, group_size: int) -> None:
    monkeypatch.setattr(requantise, "_BLOCK_ELEMENTS", 17 * 256)
    loaded = _Loaded("int4", 40, 256, group_size, monkeypatch)
    codes, scales = ops.quantise_int4(loaded.weight, 256 if group_size == -1 else group_size)
    group = 256 // scales.shape[1]
    dequantised = codes * scales.repeat_interleave(group, 1)
    x, bias = torch.randn(3, 256), torch.randn(40)
    assert_close(loaded.method.apply(loaded.layer, x, bias), linear(x, dequantised, bias))
    packed = loaded.layer.weight
    loaded.method.process_weights_after_loading(loaded.layer)
    assert loaded.layer.weight is packed, "vLLM calls it twice"


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_int8_quantises_what_arrives_and_what_int4_cannot_take(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    loaded = _Loaded(scheme, 40, 80, 32, monkeypatch)
    x, bias = torch.randn(3, 80), torch.randn(40)
    assert_close(loaded.method.apply(loaded.layer, x, bias), linear(x, loaded.weight, bias))


def test_sizes_of_groups() -> None:
    from vllm_arm.linear import quantise_on_load

    with pytest.raises(ValueError, match=r"group_size: expected 32, 64, 128 or -1 .*, got 48"):
        quantise_on_load.ArmInt4Config.from_config({"group_size": 48})
    assert quantise_on_load.ArmInt4Config.from_config({"group_size": -1, "include": ["lm_head"]}).group_size == -1


def load(scheme: str, arriving: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A layer that ``arriving`` was loaded into in two pieces, and its method."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter as parameters
    from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase

    from vllm_arm.linear import quantise_on_load

    monkeypatch.setattr(OnlineLinearBase, "__init__", lambda self: setattr(self, "requantization_source", None))
    monkeypatch.setattr(parameters, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameters, "get_tensor_model_parallel_world_size", lambda: 1)

    def copy(param: torch.Tensor, loaded: torch.Tensor, shard: int) -> None:
        param.data[shard * 24 : (shard + 1) * 24].copy_(loaded)

    config = quantise_on_load.ArmInt8Config() if scheme == "int8" else quantise_on_load.ArmInt4Config()
    layer = make_layer()
    layer.tp_rank, layer.tp_size, layer.quant_config = 0, 1, config
    layer.quant_method = method = config.linear_method("model.layers.0.mlp.gate_up_proj")
    with set_current_vllm_config(VllmConfig()):
        k = arriving.shape[1]
        method.create_weights(layer, k, [24, 24], k, 48, torch.float32, weight_loader=copy)
        for shard in range(2):
            layer.weight.weight_loader(layer.weight, arriving[shard * 24 : (shard + 1) * 24], shard)
        method.process_weights_after_loading(layer)
    return layer, method


@pytest.mark.parametrize(("scheme", "k"), [("int8", 64), ("int4", 64), ("int4", 80)])
def test_a_cached_layer_waits_for_no_weight(
    scheme: str, k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_arm.linear import weight_cache

    opened: list[tuple[Any, ...]] = []

    def open_cache(_: Any, *part: Any) -> weight_cache.WeightCache:
        opened.append(part)
        return weight_cache.WeightCache(tmp_path / "cache", {})

    weight, x = torch.randn(48, k), torch.randn(3, k)
    monkeypatch.setattr(weight_cache, "open_cache", lambda *_: None)
    layer, method = load(scheme, weight, monkeypatch)
    expected = method.apply(layer, x)
    monkeypatch.setattr(weight_cache, "open_cache", open_cache)
    for arriving in (weight, torch.full_like(weight, torch.nan)):
        layer, method = load(scheme, arriving, monkeypatch)
        assert torch.equal(method.apply(layer, x), expected)
    assert set(opened) == {("int8" if scheme == "int8" else "int4-groups-of-32", torch.float32, 0, 1)}
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(b"damaged")
    layer, method = load(scheme, weight, monkeypatch)
    assert torch.equal(method.apply(layer, x), expected)
    assert file.stat().st_size > 1000, "it is written again"
