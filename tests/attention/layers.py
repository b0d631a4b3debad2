# SPDX-License-Identifier: Apache-2.0
"""Layers of attention without a model around them, and what they should compute."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend, AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, get_kv_quant_mode

from vllm_arm.attention.backend import ArmAttentionBackend

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 32, 16
STORED = {"fp8": torch.uint8, "fp8_e4m3": torch.uint8, "fp8_e5m2": torch.uint8, "int8_per_token_head": torch.int8}


def make_layer(
    dtype: torch.dtype = torch.bfloat16,
    *,
    kv_cache_dtype: str = "auto",
    sliding_window: int | None = None,
    attn_type: str = AttentionType.DECODER,
    backend: type[AttentionBackend] = ArmAttentionBackend,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    **features: Any,
) -> Attention:
    """An attention layer with our implementation; ``features`` are alibi_slopes, logits_soft_cap and sinks."""
    layer = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    layer._k_scale_float, layer._v_scale_float = key_scale, value_scale
    layer.kv_sharing_target_layer_name = None
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype), parallel_config=SimpleNamespace(decode_context_parallel_size=1)
    )
    with set_current_vllm_config(config):
        layer.impl = backend.get_impl_cls()(
            num_heads=HEADS,
            head_size=HEAD_SIZE,
            scale=HEAD_SIZE**-0.5,
            num_kv_heads=KV_HEADS,
            alibi_slopes=features.pop("alibi_slopes", None),
            sliding_window=sliding_window,
            kv_cache_dtype=kv_cache_dtype,
            attn_type=attn_type,
            **features,
        )
    return layer


def make_builder(
    layers: Sequence[Attention],
    dtype: torch.dtype = torch.bfloat16,
    *,
    spec_type: type[AttentionSpec] = FullAttentionSpec,
    backend: type[AttentionBackend] = ArmAttentionBackend,
    **spec: Any,
) -> Any:
    """The metadata builder of the group that ``layers`` form."""
    named = {f"layers.{index}": layer for index, layer in enumerate(layers)}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=named),
        model_config=SimpleNamespace(dtype=dtype),
        parallel_config=SimpleNamespace(),
    )
    description = {"block_size": BLOCK_SIZE, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "dtype": dtype}
    return backend.get_builder_cls()(spec_type(**(description | spec)), list(named), config, torch.device("cpu"))


class Batch:
    """Requests of ``lengths`` (new tokens, all tokens) with random queries, keys and values, in scattered blocks."""

    def __init__(self, lengths: Sequence[tuple[int, int]], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        self.dtype = dtype
        self.tokens = sum(new for new, _ in lengths)
        self.query = torch.randn(self.tokens, HEADS, HEAD_SIZE, generator=generator).to(dtype)
        self.keys = [torch.randn(total, KV_HEADS, HEAD_SIZE, generator=generator).to(dtype) for _, total in lengths]
        self.values = [torch.randn(total, KV_HEADS, HEAD_SIZE, generator=generator).to(dtype) for _, total in lengths]
        blocks = [-(-total // BLOCK_SIZE) for _, total in lengths]
        self.block_count = sum(blocks) + 1
        order = (torch.randperm(sum(blocks), generator=generator) + 1).to(torch.int32)
        self.block_table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for row, own in zip(self.block_table, order.split(blocks), strict=True):
            row[: len(own)] = own

    def cache(self, kv_cache_dtype: str = "auto") -> torch.Tensor:
        """An empty cache as vLLM lays it out for our backend."""
        stored = STORED.get(kv_cache_dtype, self.dtype)
        spec = ArmAttentionBackend.customize_spec(
            FullAttentionSpec(
                block_size=BLOCK_SIZE,
                num_kv_heads=KV_HEADS,
                head_size=HEAD_SIZE,
                dtype=stored,
                kv_quant_mode=get_kv_quant_mode(kv_cache_dtype),
            )
        )
        content = spec.state_content_size_bytes // stored.itemsize
        return torch.zeros(self.block_count, KV_HEADS, BLOCK_SIZE, content, dtype=stored)

    def slots(self) -> torch.Tensor:
        """The slot of every token of every request."""
        slots = []
        for row, (_, total) in zip(self.block_table.long(), self.lengths, strict=True):
            positions = torch.arange(total)
            slots.append(row[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
        return torch.cat(slots)

    def metadata(self, causal: bool | torch.Tensor = True) -> CommonAttentionMetadata:
        """The batch as vLLM describes it."""
        new = torch.tensor([new for new, _ in self.lengths], dtype=torch.int32)
        query_start_loc = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
        totals = torch.tensor([total for _, total in self.lengths], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=totals,
            seq_lens_cpu_upper_bound=totals,
            num_reqs=len(self.lengths),
            num_actual_tokens=self.tokens,
            max_query_len=int(new.max()),
            max_seq_len=int(totals.max()),
            block_table_tensor=self.block_table,
            slot_mapping=torch.full((self.tokens,), -1, dtype=torch.int64),
            causal=causal,
        )

    def expected(
        self,
        *,
        causal: bool | Sequence[bool] = True,
        window: int | None = None,
        soft_cap: float = 0.0,
        slopes: Sequence[float] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The attention of every new token in float64, ``[tokens, HEADS, HEAD_SIZE]``."""
        flags = [causal] * len(self.lengths) if isinstance(causal, bool) else causal
        answers = []
        begin = 0
        for (new, total), keys, values, is_causal in zip(self.lengths, self.keys, self.values, flags, strict=True):
            query = self.query[begin : begin + new].double()
            begin += new
            key, value = (each.double().repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values))
            logits = torch.einsum("qhd,khd->hqk", query, key) * HEAD_SIZE**-0.5
            if soft_cap:
                logits = soft_cap * (logits / soft_cap).tanh()
            distance = torch.arange(total)[None] - torch.arange(total - new, total)[:, None]
            if slopes is not None:
                logits = logits + torch.tensor(slopes).double()[:, None, None] * distance
            hidden = (distance > 0) & is_causal
            if window is not None:
                hidden |= distance.abs() >= window
            logits = logits.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                logits = torch.cat([sinks.double()[:, None, None].expand(-1, new, 1), logits], -1)
            weights = logits.softmax(-1)[..., -total:]
            answers.append(torch.einsum("hqk,khd->qhd", weights, value))
        return torch.cat(answers)


def attend(layer: Attention, builder: Any, batch: Batch, causal: bool | torch.Tensor = True) -> torch.Tensor:
    """Write the batch's keys and values and attend, as vLLM's attention layer does."""
    cache = batch.cache(layer.impl.kv_cache_dtype)
    layer.impl.do_kv_cache_update(layer, torch.cat(batch.keys), torch.cat(batch.values), cache, batch.slots())
    output = torch.full_like(batch.query, float("nan"))
    metadata = builder.build(0, batch.metadata(causal))
    returned = layer.impl.forward(layer, batch.query, None, None, cache, metadata, output)
    assert returned is output
    return output


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.01) -> None:
    """``tolerance`` is relative to the largest number expected."""
    difference = (actual.double() - expected).abs().max().item()
    assert difference <= tolerance * expected.abs().max().item(), difference
