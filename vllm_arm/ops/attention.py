# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged key-value cache.

How elements are ordered within a block is the affair of the kernel variant: a cache is written by ``write_kv_cache``
and read by ``paged_attention`` of the same process.
"""

import torch

from vllm_arm.ops.library import register_mutating_fakes

PANEL_TOKENS = 16
"""Block sizes are multiples of this; see csrc/attention/kv_cache.h."""
HEAD_SIZE_STEP = 16
"""Head sizes are multiples of this."""
MAXIMUM_HEAD_SIZE = 512

register_mutating_fakes("write_kv_cache", "paged_attention")


def _schedule_attention_fake(query_start_loc: torch.Tensor, seq_lens: torch.Tensor, *_: object) -> torch.Tensor:
    return seq_lens.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.int32)


torch.library.register_fake("vllm_arm::schedule_attention", _schedule_attention_fake)


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str = "auto",
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Store keys and values of new tokens in their slots.

    ``key`` and ``value`` are ``[tokens, kv_heads, head_size]`` in bfloat16, float16 or float32, with unit stride in
    the last dimension. ``slot_mapping`` is int64 ``[at most tokens]``: ``block * block_size + token within the
    block``, negative to skip a token. ``kv_cache`` is ``[blocks, kv_heads, block_size, content]``, contiguous in its
    last two dimensions; by ``kv_cache_dtype`` it holds

    - ``auto``, ``bfloat16``, ``float16``: the dtype of ``key``, content is ``2 * head_size``;
    - ``fp8`` and ``fp8_e4m3``, ``fp8_e5m2``: elements of one byte that stand for their value times ``key_scale`` or
      ``value_scale``, and a float32 for each token and head, content is ``2 * head_size + 8``; what is too large
      becomes the largest;
    - ``int8_per_token_head``: int8 and a float32 scale for each token and head, chosen here; content is
      ``2 * head_size + 8``.

    Raises ``RuntimeError`` naming the argument on anything else, and on a slot that the cache does not have.
    """
    torch.ops.vllm_arm.write_kv_cache(key, value, kv_cache, slot_mapping, kv_cache_dtype, key_scale, value_scale)


def schedule_attention(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    causal: bool,
    sliding_window: int = -1,
    dynamic_causal: torch.Tensor | None = None,
    threads: int = 0,
) -> torch.Tensor:
    """Divide a batch's attention among ``threads`` (0: torch's number); the same for all layers of these heads.

    ``query_start_loc`` is int32 ``[requests + 1]``, ``seq_lens`` int32 ``[requests]``: the keys of each request, its
    new tokens included. ``sliding_window`` counts the keys that a query sees, -1 for all; the op may be given a smaller
    one than the schedule. ``dynamic_causal``, int32 ``[requests]``, overrides ``causal`` for each request. Returns an
    int32 tensor for ``paged_attention``. Raises ``RuntimeError`` naming the argument on anything else.
    """
    return torch.ops.vllm_arm.schedule_attention(
        query_start_loc, seq_lens, num_heads, num_kv_heads, causal, sliding_window, dynamic_causal, threads
    )


def paged_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    schedule: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    causal: bool,
    sliding_window: int = -1,
    dynamic_causal: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """``output = softmax(scale * query . key) . value`` of each request over the keys that its queries see.

    ``query`` and ``output`` are ``[tokens, num_heads, head_size]``, the queries of a request being its last tokens;
    ``kv_cache`` is as ``write_kv_cache`` has it, ``block_table`` int32 ``[requests, blocks]``, and ``schedule`` comes
    from ``schedule_attention`` with the same lengths and heads. Where not causal, a query sees keys on both sides,
    less than ``sliding_window`` away. Logits become ``softcap * tanh(logit / softcap)`` unless it is 0;
    ``alibi_slopes``, float32 ``[num_heads]``, times the distance from query to key (negative backwards) are added
    (Press et al., 2021); ``sinks``, float32 ``[num_heads]``, are logits that take part in the sum alone. A query
    that sees no key gives zeros. Raises ``RuntimeError`` naming the argument on anything else.
    """
    torch.ops.vllm_arm.paged_attention(
        *(output, query, kv_cache, schedule, query_start_loc, seq_lens, block_table, scale, causal, sliding_window),
        *(dynamic_causal, alibi_slopes, softcap, sinks, kv_cache_dtype, key_scale, value_scale),
    )
