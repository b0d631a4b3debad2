# SPDX-License-Identifier: Apache-2.0
"""Writing new keys and values into the paged cache, in the layout that the attention kernels read."""

from __future__ import annotations

import functools

import torch

from benchmarks.cases.case import Call, Case, Work
from benchmarks.cases.paged_cache import OurCache, Shape, UpstreamCache, implementations, make_inputs, reference

# Seen through attention, for the layout is the implementation's own affair.
TOLERANCE = 2**-6


def _prepare(cache: OurCache | UpstreamCache) -> Call:
    """The write; its result is what the implementation's own attention makes of the cache."""

    def output() -> torch.Tensor:
        cache.attend()
        return cache.checked_output()

    return Call(run=cache.write, output=output)


def _case(name: str, words: str, shape: Shape) -> Case:
    tokens = 2 * 2 * shape.key_tokens * shape.kv_heads * shape.head_size
    work = Work(bytes_read=tokens, bytes_written=shape.cached_bytes(shape.key_tokens))
    inputs = functools.partial(make_inputs, shape)
    return Case(
        "cache_write",
        name,
        words,
        work,
        TOLERANCE,
        inputs,
        reference,
        implementations(shape, "write_kv_cache", _prepare),
    )


CASES = (
    _case(
        "prefill_4096",
        "Llama-3.1-8B at a quarter of its heads: 4096 tokens of 2 key heads of 128",
        Shape(((1, 2048),) * 2, 8, 2, 128),
    ),
    _case(
        "prefill_1024_fp8",
        "Llama-3.1-8B at a quarter of its heads: 1024 tokens into a cache in fp8 (e4m3)",
        Shape(((1, 512),) * 2, 8, 2, 128, kv_cache_dtype="fp8_e4m3"),
    ),
    _case(
        "prefill_1024_int8",
        "Llama-3.1-8B at a quarter of its heads: 1024 tokens into a cache in int8, a scale for each token and head",
        Shape(((1, 512),) * 2, 8, 2, 128, kv_cache_dtype="int8_per_token_head"),
    ),
    # Two tokens rather than one, for with a single key attention does not show what was written of it.
    _case("decode_64", "Llama-3.1-8B: two tokens of each of 32 sequences", Shape(((1, 2),) * 32, 32, 8, 128)),
    _case("decode_d256_16", "Gemma-3-4B: two tokens of each of 8 sequences", Shape(((1, 2),) * 8, 8, 4, 256)),
)
