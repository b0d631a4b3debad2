# SPDX-License-Identifier: Apache-2.0
"""Writing new keys and values into the paged cache, in the layout that the attention kernels read."""

from __future__ import annotations

import functools

import torch

from benchmarks.cases.case import Call, Case, Implementation, Work
from benchmarks.cases.paged_cache import Inputs, OurCache, Shape, UpstreamCache, make_inputs, reference

# Seen through attention, for the layout is the implementation's own affair.
TOLERANCE = 2**-6


def ours(inputs: Inputs) -> Call:
    """``write_kv_cache``; the result is what ``paged_attention`` makes of the cache."""
    return _prepare(OurCache(inputs))


def upstream(inputs: Inputs) -> Call:
    """vLLM's op; the result is what vLLM's attention makes of the cache."""
    return _prepare(UpstreamCache(inputs))


def _prepare(cache: OurCache | UpstreamCache) -> Call:
    def output() -> torch.Tensor:
        cache.attend()
        return cache.checked_output()

    return Call(run=cache.write, output=output)


def _case(name: str, words: str, shape: Shape) -> Case:
    tokens = 2 * 2 * shape.key_tokens * shape.kv_heads * shape.head_size
    work = Work(bytes_read=tokens, bytes_written=shape.cached_bytes(shape.key_tokens))
    implementations = [Implementation("vllm_arm", ours, operation="write_kv_cache")]
    # vLLM has no quantised cache on Arm.
    if shape.kv_cache_dtype == "auto":
        implementations.append(Implementation("upstream", upstream))
    inputs = functools.partial(make_inputs, shape)
    return Case("cache_write", name, words, work, TOLERANCE, inputs, reference, tuple(implementations))


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
