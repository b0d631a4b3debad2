# SPDX-License-Identifier: Apache-2.0
"""Causal attention in bf16 over a paged cache of 128-token blocks: decode, prefill, chunked prefill and mixtures."""

from __future__ import annotations

import functools

from benchmarks.cases.case import Call, Case, Work
from benchmarks.cases.paged_cache import OurCache, Shape, UpstreamCache, implementations, make_inputs, reference

# The logits' scale and the softmax's weights are rounded to bf16.
TOLERANCE = 2**-6


def _prepare(cache: OurCache | UpstreamCache) -> Call:
    """Attention over a cache that the implementation's own op has written; schedules are made before."""
    cache.write()
    return Call(run=cache.attend, output=cache.checked_output)


def _case(name: str, words: str, shape: Shape) -> Case:
    query_bytes = 2 * shape.query_tokens * shape.query_heads * shape.head_size
    cache_bytes = shape.cached_bytes(shape.keys_in_use())
    work = Work(query_bytes + cache_bytes, query_bytes, shape.multiply_accumulates())
    inputs = functools.partial(make_inputs, shape)
    return Case(
        "attention",
        name,
        words,
        work,
        TOLERANCE,
        inputs,
        reference,
        implementations(shape, "paged_attention", _prepare),
    )


# Heads are a quarter of the models': one tensor-parallel rank of four, and emulated matrix instructions are slow.
CASES = (
    _case(
        "decode_2k",
        "Llama-3.1-8B at a quarter of its heads, 2 sequences of 2048 tokens",
        Shape(((1, 2048),) * 2, 8, 2, 128),
    ),
    _case(
        "decode_2k_fp8",
        "decode_2k over a cache in fp8 (e4m3)",
        Shape(((1, 2048),) * 2, 8, 2, 128, kv_cache_dtype="fp8_e4m3"),
    ),
    _case(
        "decode_2k_int8",
        "decode_2k over a cache in int8, a scale for each token and head",
        Shape(((1, 2048),) * 2, 8, 2, 128, kv_cache_dtype="int8_per_token_head"),
    ),
    _case(
        "decode_mha",
        "as many key heads as query heads (4 of 128), 2 sequences of 1024 tokens",
        Shape(((1, 1024),) * 2, 4, 4, 128),
    ),
    _case(
        "decode_d64",
        "gpt-oss-20b's global layers at an eighth of their heads, 2 sequences of 1024 tokens",
        Shape(((1, 1024),) * 2, 8, 1, 64),
    ),
    _case(
        "decode_window_sinks",
        "gpt-oss-20b's window of 128 with sinks at an eighth of its heads, 2 sequences of 1024 tokens",
        Shape(((1, 1024),) * 2, 8, 1, 64, window=128, sinks=True),
    ),
    _case("prefill_512", "Llama-3.1-8B at a quarter of its heads, one prompt of 512", Shape(((512, 512),), 8, 2, 128)),
    _case(
        "prefill_window_d256",
        "Gemma-3-4B's local layers (head size 256) at a quarter of their heads, prompt and window an eighth of 1024",
        Shape(((256, 256),), 2, 1, 256, window=128),
    ),
    _case(
        "chunk_64_of_1024",
        "Llama-3.1-8B at a quarter of its heads, the last 64 of 1024 prompt tokens",
        Shape(((64, 1024),), 8, 2, 128),
    ),
    _case(
        "mixed",
        "Llama-3.1-8B at a quarter of its heads, a prompt of 96 beside decodes at 512 and 300 tokens",
        Shape(((96, 96), (1, 512), (1, 300)), 8, 2, 128),
    ),
)
