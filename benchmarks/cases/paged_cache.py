# SPDX-License-Identifier: Apache-2.0
"""Sequences in a paged key and value cache, as vLLM's attention and cache-write ops take them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from benchmarks.cases.upstream import attention_isa, operators

BLOCK_SIZE = 128
MAXIMUM_CHECKED_QUERIES = 64


@dataclass(frozen=True)
class Shape:
    """``sequences`` holds (query tokens, key tokens) of each; ``window`` counts the keys seen, -1 for all."""

    sequences: tuple[tuple[int, int], ...]
    query_heads: int
    kv_heads: int
    head_size: int
    window: int = -1
    sinks: bool = False

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


@dataclass(frozen=True)
class Inputs:
    """Tokens of all sequences one after another; ``[tokens, heads, head_size]``, bf16."""

    shape: Shape
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None


def make_inputs(shape: Shape) -> Inputs:
    """Random queries, keys, values and, where the shape has them, one sink logit per query head."""

    def heads(tokens: int, count: int) -> torch.Tensor:
        return torch.randn(tokens, count, shape.head_size).bfloat16()

    sinks = torch.randn(shape.query_heads).bfloat16() if shape.sinks else None
    return Inputs(
        shape,
        heads(shape.query_tokens, shape.query_heads),
        heads(shape.key_tokens, shape.kv_heads),
        heads(shape.key_tokens, shape.kv_heads),
        sinks,
    )


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


class UpstreamCache:
    """vLLM's paged cache and the arguments that its ops take. Blocks are given out in order, the first is not used."""

    def __init__(self, inputs: Inputs) -> None:
        shape = inputs.shape
        self.inputs = inputs
        lengths = [keys for _, keys in shape.sequences]
        blocks = [-(-keys // BLOCK_SIZE) for keys in lengths]
        both = torch.zeros(1 + sum(blocks), shape.kv_heads, 2 * BLOCK_SIZE, shape.head_size, dtype=torch.bfloat16)
        self.keys, self.values = both.chunk(2, dim=2)
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
        self.isa = attention_isa()
        self.output = torch.empty_like(inputs.query)
        self.metadata = operators().get_scheduler_metadata(
            *(len(lengths), shape.query_heads, shape.kv_heads, shape.head_size, self.lengths, torch.bfloat16),
            *(self.query_starts, True, shape.window, self.isa, True, None),
        )

    def write(self) -> None:
        """Put all keys and values into the cache."""
        inputs = self.inputs
        operators().cpu_attn_reshape_and_cache(
            inputs.key, inputs.value, self.keys, self.values, self.slots, self.isa, 1.0, 1.0, "auto"
        )

    def attend(self) -> None:
        """Attention of all queries into ``output``."""
        shape = self.inputs.shape
        operators().cpu_attention_with_kv_cache(
            *(self.inputs.query, self.keys, self.values, self.output, self.query_starts, self.lengths),
            *(shape.head_size**-0.5, True, None, shape.window, self.block_table, 0.0, self.metadata),
            *(self.inputs.sinks, None, 1.0, 1.0, "auto"),
        )

    def checked_output(self) -> torch.Tensor:
        """The rows of ``output`` that ``reference`` gives."""
        return self.output[checked_queries(self.inputs.shape)]
