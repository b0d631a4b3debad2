# SPDX-License-Identifier: Apache-2.0
"""Sequences in a paged key and value cache, as our attention and cache-write ops and vLLM's take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from benchmarks.cases.case import Call, Implementation
from benchmarks.cases.upstream import attention_isa, operators

BLOCK_SIZE = 128
MAXIMUM_CHECKED_QUERIES = 64
# Of an fp8 cache; powers of two, so that the scale itself rounds nothing.
KEY_SCALE, VALUE_SCALE = 0.5, 0.25
# Of every token and head of an int8 cache: what makes the largest magnitude 127.
INT8_SCALE = 2.0**-5


@dataclass(frozen=True)
class Shape:
    """``sequences`` holds (query tokens, key tokens) of each; ``window`` counts the keys seen, -1 for all.

    ``kv_cache_dtype`` is ``auto`` (bf16), ``fp8_e4m3`` or ``int8_per_token_head``.
    """

    sequences: tuple[tuple[int, int], ...]
    query_heads: int
    kv_heads: int
    head_size: int
    window: int = -1
    sinks: bool = False
    kv_cache_dtype: str = "auto"

    @property
    def query_tokens(self) -> int:
        """Query tokens of all sequences."""
        return sum(queries for queries, _ in self.sequences)

    @property
    def key_tokens(self) -> int:
        """Key tokens of all sequences."""
        return sum(keys for _, keys in self.sequences)

    def seen(self, position: int) -> int:
        """How many keys the query at ``position`` of its sequence sees."""
        return position + 1 if self.window < 0 else min(position + 1, self.window)

    def multiply_accumulates(self) -> int:
        """Of both products, over the keys that each query sees."""
        pairs = sum(self.seen(keys - queries + i) for queries, keys in self.sequences for i in range(queries))
        return 2 * self.query_heads * self.head_size * pairs

    def keys_in_use(self) -> int:
        """Key tokens that some query sees."""
        return sum(min(keys, self.seen(keys - queries) + queries - 1) for queries, keys in self.sequences)

    def cached_bytes(self, tokens: int) -> int:
        """What keys and values of ``tokens`` take in the cache, the fp32 scales of a quantised one included."""
        scales, element = (0, 2) if self.kv_cache_dtype == "auto" else (4, 1)
        return 2 * tokens * self.kv_heads * (element * self.head_size + scales)


@dataclass(frozen=True)
class Inputs:
    """Tokens of all sequences one after another; ``[tokens, heads, head_size]``, bf16."""

    shape: Shape
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None


def make_inputs(shape: Shape) -> Inputs:
    """Random queries, keys, values and, where the shape has them, one sink logit per query head.

    Keys and values are such that the cache holds them exactly: the reference then says what attention loses.
    """

    def heads(tokens: int, count: int) -> torch.Tensor:
        return torch.randn(tokens, count, shape.head_size).bfloat16()

    sinks = torch.randn(shape.query_heads).bfloat16() if shape.sinks else None
    return Inputs(
        shape,
        heads(shape.query_tokens, shape.query_heads),
        _representable(heads(shape.key_tokens, shape.kv_heads), shape.kv_cache_dtype, KEY_SCALE),
        _representable(heads(shape.key_tokens, shape.kv_heads), shape.kv_cache_dtype, VALUE_SCALE),
        sinks,
    )


def _representable(heads: torch.Tensor, kv_cache_dtype: str, scale: float) -> torch.Tensor:
    if kv_cache_dtype == "fp8_e4m3":
        return (heads.float() / scale).to(torch.float8_e4m3fn).float().mul(scale).bfloat16()
    if kv_cache_dtype == "int8_per_token_head":
        steps = heads.float().div(INT8_SCALE).round().clamp(-127, 127)
        largest = steps.abs().argmax(-1, keepdim=True)
        signs = steps.gather(-1, largest).sign()
        return steps.scatter(-1, largest, 127 * signs).mul(INT8_SCALE).bfloat16()
    return heads


def checked_queries(shape: Shape) -> torch.Tensor:
    """The query tokens whose results are compared: all, or evenly spread ones, for float64 is slow under emulation."""
    count = min(shape.query_tokens, MAXIMUM_CHECKED_QUERIES)
    return torch.linspace(0, shape.query_tokens - 1, count).round().long()


def reference(inputs: Inputs) -> torch.Tensor:
    """Causal attention in float64 at ``checked_queries``: ``[queries, query_heads, head_size]``."""
    shape = inputs.shape
    query_begins = [0, *torch.tensor([queries for queries, _ in shape.sequences]).cumsum(0).tolist()]
    key_begins = [0, *torch.tensor([keys for _, keys in shape.sequences]).cumsum(0).tolist()]
    checked = checked_queries(shape)
    parts = []
    for index, (begin, end) in enumerate(pairwise(query_begins)):
        rows = checked[(checked >= begin) & (checked < end)]
        positions = rows - begin + shape.sequences[index][1] - (end - begin)
        tokens = slice(key_begins[index], key_begins[index + 1])
        parts.append(_attend(inputs, rows, positions, tokens))
    return torch.cat(parts)


def _attend(inputs: Inputs, rows: torch.Tensor, positions: torch.Tensor, tokens: slice) -> torch.Tensor:
    shape = inputs.shape
    group = shape.query_heads // shape.kv_heads
    query = inputs.query[rows].double().unflatten(1, (shape.kv_heads, group))
    key, value = inputs.key[tokens].double(), inputs.value[tokens].double()
    logits = torch.einsum("qhgd,khd->hgqk", query, key) * shape.head_size**-0.5
    distance = positions[:, None] - torch.arange(key.shape[0])
    hidden = distance < 0
    if shape.window >= 0:
        hidden |= distance >= shape.window
    logits.masked_fill_(hidden, float("-inf"))
    if inputs.sinks is not None:
        sinks = inputs.sinks.double().view(shape.kv_heads, group, 1, 1).expand(-1, -1, len(rows), 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, value).flatten(1, 2)


class Pages:
    """Where the sequences lie in a cache. Blocks are given out in order, the first is not used."""

    def __init__(self, shape: Shape) -> None:
        lengths = [keys for _, keys in shape.sequences]
        blocks = [-(-keys // BLOCK_SIZE) for keys in lengths]
        self.blocks = 1 + sum(blocks)
        self.block_table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        first, slots = 1, []
        for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
            self.block_table[row, :count] = torch.arange(first, first + count)
            slots.append(first * BLOCK_SIZE + torch.arange(length))
            first += count
        self.slots = torch.cat(slots)
        begins = [0, *(queries for queries, _ in shape.sequences)]
        self.query_starts = torch.tensor(begins, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)


class UpstreamCache:
    """vLLM's paged cache, and its ops on it."""

    def __init__(self, inputs: Inputs) -> None:
        shape = inputs.shape
        self.inputs, self.pages = inputs, Pages(shape)
        both = torch.zeros(self.pages.blocks, shape.kv_heads, 2 * BLOCK_SIZE, shape.head_size, dtype=torch.bfloat16)
        self.keys, self.values = both.chunk(2, dim=2)
        self.isa = attention_isa()
        self.output = torch.empty_like(inputs.query)
        self.metadata = operators().get_scheduler_metadata(
            *(len(shape.sequences), shape.query_heads, shape.kv_heads, shape.head_size),
            *(self.pages.lengths, torch.bfloat16, self.pages.query_starts, True, shape.window, self.isa, True, None),
        )

    def write(self) -> None:
        """Put all keys and values into the cache."""
        inputs = self.inputs
        operators().cpu_attn_reshape_and_cache(
            inputs.key, inputs.value, self.keys, self.values, self.pages.slots, self.isa, 1.0, 1.0, "auto"
        )

    def attend(self) -> None:
        """Attention of all queries into ``output``."""
        shape, pages = self.inputs.shape, self.pages
        operators().cpu_attention_with_kv_cache(
            *(self.inputs.query, self.keys, self.values, self.output, pages.query_starts, pages.lengths),
            *(shape.head_size**-0.5, True, None, shape.window, pages.block_table, 0.0, self.metadata),
            *(self.inputs.sinks, None, 1.0, 1.0, "auto"),
        )

    def checked_output(self) -> torch.Tensor:
        """The rows of ``output`` that ``reference`` gives."""
        return self.output[checked_queries(self.inputs.shape)]


class OurCache:
    """The paged cache of vllm_arm, and its ops on it."""

    def __init__(self, inputs: Inputs) -> None:
        from vllm_arm.ops import library

        library.load()
        self._operators = torch.ops.vllm_arm
        shape = inputs.shape
        self.inputs, self.pages = inputs, Pages(shape)
        quantised = shape.kv_cache_dtype != "auto"
        content = shape.cached_bytes(1) // shape.kv_heads // (1 if quantised else 2)
        dtype = torch.uint8 if quantised else torch.bfloat16
        self.cache = torch.zeros(self.pages.blocks, shape.kv_heads, BLOCK_SIZE, content, dtype=dtype)
        self.sinks = None if inputs.sinks is None else inputs.sinks.float()
        self.output = torch.empty_like(inputs.query)
        self.schedule = self._operators.schedule_attention(
            *(self.pages.query_starts, self.pages.lengths, shape.query_heads, shape.kv_heads),
            *(True, shape.window, None, 0),
        )

    def write(self) -> None:
        """Put all keys and values into the cache."""
        inputs = self.inputs
        self._operators.write_kv_cache(
            *(inputs.key, inputs.value, self.cache, self.pages.slots),
            *(inputs.shape.kv_cache_dtype, KEY_SCALE, VALUE_SCALE),
        )

    def attend(self) -> None:
        """Attention of all queries into ``output``."""
        shape, pages = self.inputs.shape, self.pages
        self._operators.paged_attention(
            *(self.output, self.inputs.query, self.cache, self.schedule, pages.query_starts, pages.lengths),
            *(pages.block_table, shape.head_size**-0.5, True, shape.window, None, None, 0.0, self.sinks),
            *(shape.kv_cache_dtype, KEY_SCALE, VALUE_SCALE),
        )

    def checked_output(self) -> torch.Tensor:
        """The rows of ``output`` that ``reference`` gives."""
        return self.output[checked_queries(self.inputs.shape)]


def implementations(
    shape: Shape, operation: str, prepare: Callable[[OurCache | UpstreamCache], Call]
) -> tuple[Implementation, ...]:
    """Ours, the row ``operation`` of our table of kernels, and vLLM's, each as ``prepare`` calls it."""
    ours = Implementation("vllm_arm", lambda inputs: prepare(OurCache(inputs)), operation=operation)
    # vLLM has no quantised cache on Arm.
    if shape.kv_cache_dtype != "auto":
        return (ours,)
    return ours, Implementation("upstream", lambda inputs: prepare(UpstreamCache(inputs)))
