# SPDX-License-Identifier: Apache-2.0
"""The attention backend as vLLM drives it: cache, metadata and attention against float64."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)

from tests.attention.layers import (
    HEADS,
    STORED,
    Batch,
    assert_close,
    attend,
    make_builder,
    make_layer,
)
from vllm_arm.attention.backend import ArmAttentionBackend

MIXED = [(1, 70), (5, 5), (3, 40), (33, 100)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 20}, {"window": 20}),
    "soft cap": ({"logits_soft_cap": 2.0}, {"soft_cap": 2.0}),
    "alibi": ({"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}, {"slopes": [0.5, 0.25, 0.125, 0.0625]}),
    "sinks": (
        {"sinks": torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.bfloat16)},
        {"sinks": torch.tensor([0.0, 1.0, 2.0, 3.0])},
    ),
}
"""Arguments of a layer, and of the reference."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mixed_batch(dtype: torch.dtype) -> None:
    layer = make_layer(dtype)
    batch = Batch(MIXED, dtype)
    assert_close(attend(layer, make_builder([layer], dtype), batch), batch.expected())


@pytest.mark.parametrize("feature", FEATURES)
def test_features_of_a_layer(feature: str) -> None:
    arguments, expected = FEATURES[feature]
    layer = make_layer(**arguments)
    batch = Batch(MIXED)
    assert_close(attend(layer, make_builder([layer]), batch), batch.expected(**expected))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 20])
def test_causal_or_not(causal: bool, window: int | None) -> None:
    layer = make_layer(sliding_window=window)
    batch = Batch(MIXED)
    assert_close(attend(layer, make_builder([layer]), batch, causal), batch.expected(causal=causal, window=window))


def test_causal_for_some_requests() -> None:
    layer = make_layer()
    batch = Batch(MIXED)
    flags = [True, False, False, True]
    actual = attend(layer, make_builder([layer]), batch, torch.tensor(flags, dtype=torch.int32))
    assert_close(actual, batch.expected(causal=flags))


def test_a_group_of_layers_with_different_windows() -> None:
    layers = [make_layer(sliding_window=window) for window in (20, None)]
    builder = make_builder(layers)
    assert builder.sliding_window == -1, "what all of them have"
    assert make_builder(layers[:1]).sliding_window == 20
    batch = Batch(MIXED)
    assert_close(attend(layers[0], builder, batch), batch.expected(window=20))
    assert_close(attend(layers[1], builder, batch), batch.expected())


# fp8 keeps 3 or 2 bits of the fraction.
TOLERANCES = {"fp8": 0.05, "fp8_e4m3": 0.05, "fp8_e5m2": 0.1, "int8_per_token_head": 0.02}


@pytest.mark.parametrize("kv_cache_dtype", TOLERANCES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantised_cache(dtype: torch.dtype, kv_cache_dtype: str) -> None:
    # The scales of a checkpoint: one that is wrong by a factor shows at once.
    scales = {} if kv_cache_dtype.startswith("int8") else {"key_scale": 0.5, "value_scale": 0.25}
    layer = make_layer(dtype, kv_cache_dtype=kv_cache_dtype, **scales)
    batch = Batch(MIXED, dtype)
    assert_close(attend(layer, make_builder([layer], dtype), batch), batch.expected(), TOLERANCES[kv_cache_dtype])


@pytest.mark.parametrize("feature", FEATURES)
def test_an_encoder(feature: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments, expected = FEATURES[feature]
    with caplog.at_level(logging.WARNING):
        # A quantised cache is not for encoders, whose cache lives for a step.
        layer = make_layer(attn_type=AttentionType.ENCODER_ONLY, kv_cache_dtype="fp8", **arguments)
    assert not caplog.records
    batch = Batch([(37, 37), (1, 1), (16, 16), (65, 65)])
    builder = make_builder([layer], spec_type=EncoderOnlyAttentionSpec)
    metadata = builder.build(0, batch.metadata(causal=False))
    key, value = torch.cat(batch.keys), torch.cat(batch.values)
    nothing = torch.empty(0)
    layer.impl.do_kv_cache_update(layer, key, value, nothing, metadata.slot_mapping)
    output = torch.full_like(batch.query, float("nan"))
    layer.impl.forward(layer, batch.query, key, value, nothing, metadata, output)
    assert_close(output, batch.expected(causal=False, **expected))


def test_cross_attention() -> None:
    """Decoders' tokens attend to all of an encoder's, whose keys a step writes for its new requests alone."""
    backend = create_cross_attention_backend(ArmAttentionBackend)
    layer = make_layer(attn_type=AttentionType.ENCODER_DECODER, backend=backend)
    builder = make_builder([layer], spec_type=CrossAttentionSpec, backend=backend)
    encoded = [50, 21]
    batch = Batch([(4, 50), (3, 21)])
    cache = batch.cache()

    def step(new: list[int], computed: list[int], keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
        common = batch.metadata()
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        common.query_start_loc = common.query_start_loc_cpu = torch.from_numpy(starts)
        common.num_actual_tokens = sum(new)
        common.seq_lens = common.seq_lens_cpu_upper_bound = torch.tensor(new, dtype=torch.int32) + torch.tensor(
            computed, dtype=torch.int32
        )
        common.encoder_seq_lens = torch.tensor(encoded, dtype=torch.int32)
        common.encoder_seq_lens_cpu = np.array(encoded, dtype=np.int32)
        metadata = builder.build(0, common)
        query = torch.cat([batch.query[:4][: new[0]], batch.query[4:][: new[1]]])
        output = torch.full_like(query, float("nan"))
        key, value = (torch.cat(each) if each else None for each in (keys, values))
        layer.impl.forward(layer, query, key, value, cache, metadata, output)
        return output

    assert_close(step([4, 3], [0, 0], batch.keys, batch.values), batch.expected(causal=False))
    later = step([1, 1], [4, 3], [], [])
    assert_close(later, batch.expected(causal=False)[[0, 4]])


def test_a_layer_that_shares_the_cache_of_another() -> None:
    writer, reader = make_layer(), make_layer(kv_sharing_target_layer_name="layers.0")
    batch = Batch(MIXED)
    cache = batch.cache()
    writer.impl.do_kv_cache_update(writer, torch.cat(batch.keys), torch.cat(batch.values), cache, batch.slots())
    metadata = make_builder([writer, reader]).build(0, batch.metadata())
    output = torch.full_like(batch.query, float("nan"))
    reader.impl.forward(reader, batch.query, None, None, cache, metadata, output)
    assert_close(output, batch.expected())


def test_padding_is_left_alone() -> None:
    layer = make_layer()
    batch = Batch(MIXED)
    cache = batch.cache()
    layer.impl.do_kv_cache_update(layer, torch.cat(batch.keys), torch.cat(batch.values), cache, batch.slots())
    metadata = make_builder([layer]).build(0, batch.metadata())
    padded = torch.cat([batch.query, batch.query[:3]])
    output = torch.full_like(padded, 7.0)
    layer.impl.forward(layer, padded, None, None, cache, metadata, output)
    assert_close(output[: batch.tokens], batch.expected())
    assert (output[batch.tokens :] == 7.0).all()


def test_a_warm_up_without_metadata_computes_nothing() -> None:
    layer = make_layer()
    output = torch.full((3, HEADS, 32), 7.0)
    nothing = torch.empty(0)
    assert layer.impl.forward(layer, nothing, nothing, nothing, nothing, None, output) is output
    assert (output == 7.0).all()


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_output_is_not_quantised_within(name: str) -> None:
    layer = make_layer()
    nothing = torch.empty(0)
    with pytest.raises(NotImplementedError, match="the output cannot be quantised"):
        layer.impl.forward(layer, nothing, nothing, nothing, nothing, None, nothing, **{name: torch.ones(1)})


def test_values_of_another_size_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"values of size 16, keys of size 32: expected the same in layers\.0"):
        make_builder([make_layer()], head_size_v=16)


@pytest.mark.parametrize("spec_type", [FullAttentionSpec, SlidingWindowSpec])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2", "int8_per_token_head"])
def test_only_a_quantised_cache_has_room_for_scales(spec_type: Any, kv_cache_dtype: str) -> None:
    window = {"sliding_window": 64} if spec_type is SlidingWindowSpec else {}
    plain = spec_type(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, **window)
    assert ArmAttentionBackend.customize_spec(plain) is plain
    quantised = spec_type(
        block_size=32,
        num_kv_heads=2,
        head_size=64,
        dtype=STORED[kv_cache_dtype],
        kv_quant_mode=get_kv_quant_mode(kv_cache_dtype),
        **window,
    )
    customized = ArmAttentionBackend.customize_spec(quantised)
    assert customized.page_size_bytes == 2 * 32 * (2 * 64 + 2 * 4)
    assert ArmAttentionBackend.customize_spec(customized) is customized


def test_what_vllm_asks_of_the_class() -> None:
    assert issubclass(ArmAttentionBackend, CPUAttentionBackend)
    assert ArmAttentionBackend.get_name() == "CPU_ATTN"
    assert ArmAttentionBackend.supports_block_size(48)
    assert not ArmAttentionBackend.supports_block_size(24)
    sizes = ArmAttentionBackend.get_supported_head_sizes()
    assert set(CPUAttentionBackend.get_supported_head_sizes()) <= set(sizes)
    assert {48, 144, 240} <= set(sizes)
    for attn_type in AttentionType:
        assert ArmAttentionBackend.supports_attn_type(attn_type)


def test_the_scales_of_a_cache_that_is_not_quantised_do_nothing() -> None:
    layer = make_layer(key_scale=3.0, value_scale=5.0)
    batch = Batch(MIXED)
    assert_close(attend(layer, make_builder([layer]), batch), batch.expected())


def test_one_schedule_serves_all_layers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_arm.attention import backend

    calls = []
    real = backend.ops.schedule_attention
    counted = SimpleNamespace(**vars(backend.ops))
    counted.schedule_attention = lambda *arguments: calls.append(arguments) or real(*arguments)
    monkeypatch.setattr(backend, "ops", counted)
    layers = [make_layer() for _ in range(3)]
    batch = Batch(MIXED)
    metadata = make_builder(layers).build(0, batch.metadata())
    cache = batch.cache()
    for layer in layers:
        layer.impl.forward(layer, batch.query, None, None, cache, metadata, torch.empty_like(batch.query))
    assert len(calls) == 1
