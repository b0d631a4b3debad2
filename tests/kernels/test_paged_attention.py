# SPDX-License-Identifier: Apache-2.0
"""The ops of paged attention from Python: against float64, compiled, on strided tensors and on several threads.

The variants of the kernels, and what attention does at its limits, are tested in tests/cpp.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_arm import ops

# Units in the last place of the largest magnitude of a row.
UNITS = {torch.bfloat16: 2, torch.float16: 4}
RELATIVE_ERROR = 1e-5
INT8 = "int8_per_token_head"


@dataclass(frozen=True)
class Batch:
    """Sequences of (query tokens, keys), and tensors as vLLM has them. Blocks are given out backwards."""

    sequences: tuple[tuple[int, int], ...]
    query_heads: int
    kv_heads: int
    head_size: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_cache_dtype: str = "auto"

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    def random(self, tokens: int, heads: int) -> torch.Tensor:
        """The middle of wider rows, as of a fused projection."""
        wide = torch.randn(tokens, heads + 2, self.head_size).to(self.dtype)
        return wide[:, 1 : heads + 1]

    def new_cache(self) -> torch.Tensor:
        """Blocks as views of a larger tensor, all NaN."""
        blocks = sum(-(-keys // self.block_size) for _, keys in self.sequences) + 1
        content = 2 * self.head_size + (0 if self.kv_cache_dtype == "auto" else 8)
        dtype = self.dtype if self.kv_cache_dtype == "auto" else torch.uint8
        storage = torch.empty(blocks, 2, self.kv_heads, self.block_size, content, dtype=dtype)
        storage.view(torch.uint8).fill_(0xFF)
        return storage[:, 1]

    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query starts, lengths, block table and slots."""
        counts = [-(-keys // self.block_size) for _, keys in self.sequences]
        table = torch.full((len(counts), max(counts, default=0) + 1), -1, dtype=torch.int32)
        first, slots = sum(counts), [torch.empty(0, dtype=torch.int64)]
        for row, ((_, keys), count) in enumerate(zip(self.sequences, counts, strict=True)):
            table[row, :count] = torch.arange(first, first - count, -1)
            first -= count
            position = torch.arange(keys)
            slots.append(table[row, position // self.block_size].long() * self.block_size + position % self.block_size)
        starts = torch.tensor([0, *(queries for queries, _ in self.sequences)]).cumsum(0).int()
        return starts, torch.tensor([keys for _, keys in self.sequences]).int(), table, torch.cat(slots)


def attend(batch: Batch, options: dict[str, Any], causal: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """What the ops make of random inputs, and the same in float64."""
    starts, lengths, table, slots = batch.tables()
    query = batch.random(int(starts[-1]), batch.query_heads)
    key, value = (batch.random(len(slots), batch.kv_heads) for _ in range(2))
    cache, output = batch.new_cache(), batch.random(len(query), batch.query_heads)
    scales = {"kv_cache_dtype": batch.kv_cache_dtype, "key_scale": 0.25, "value_scale": 0.5}
    ops.write_kv_cache(key, value, cache, slots, **scales)
    heads = (batch.query_heads, batch.kv_heads)
    window = {name: options[name] for name in ("sliding_window", "dynamic_causal") if name in options}
    schedule = ops.schedule_attention(starts, lengths, *heads, causal, **window)
    ops.paged_attention(
        output, query, cache, schedule, starts, lengths, table, batch.scale, causal, **options, **scales
    )
    key, value = (dequantised(x, batch.kv_cache_dtype, scale) for x, scale in ((key, 0.25), (value, 0.5)))
    return output, reference(batch, query.double(), key, value, options, causal)


def dequantised(heads: torch.Tensor, kv_cache_dtype: str, scale: float) -> torch.Tensor:
    if kv_cache_dtype == INT8:
        scales = heads.float().abs().amax(-1, keepdim=True) / 127
        return ((heads.float() * (1 / scales)).round() * scales).double()
    if kv_cache_dtype != "auto":
        fp8 = torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
        return (heads.float() / scale).to(fp8).double() * scale
    return heads.double()


def reference(
    batch: Batch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any], causal: bool
) -> torch.Tensor:
    group = batch.query_heads // batch.kv_heads
    output = torch.zeros_like(query)
    first_query = first_key = 0
    for sequence, (queries, keys) in enumerate(batch.sequences):
        mine = slice(first_query, first_query + queries)
        k, v = (x[first_key : first_key + keys].repeat_interleave(group, 1) for x in (key, value))
        logits = torch.einsum("qhd,khd->hqk", query[mine], k) * batch.scale
        if cap := options.get("softcap"):
            logits = cap * (logits / cap).tanh()
        distance = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
        if (slopes := options.get("alibi_slopes")) is not None:
            logits = logits + slopes.double()[:, None, None] * distance
        dynamic = options.get("dynamic_causal")
        is_causal = causal if dynamic is None else bool(dynamic[sequence])
        window = options.get("sliding_window", -1)
        hidden = (distance > 0) & is_causal | (distance.abs() >= (window if window >= 0 else math.inf))
        logits = logits.masked_fill(hidden, -math.inf)
        sinks = options.get("sinks", torch.full((batch.query_heads,), -math.inf)).double()
        columns = torch.cat([logits, sinks[:, None, None].expand(-1, queries, 1)], -1)
        weights = columns.softmax(-1)[..., :-1].masked_fill(hidden, 0)
        output[mine] = torch.einsum("hqk,khd->qhd", weights.nan_to_num(), v)
        first_query, first_key = first_query + queries, first_key + keys
    return output


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    magnitude = expected.abs().amax(-1, keepdim=True)
    if actual.dtype in UNITS:
        unit = torch.finfo(actual.dtype).eps * magnitude.log2().floor().exp2()
        allowed = UNITS[actual.dtype] * unit
    else:
        allowed = RELATIVE_ERROR * magnitude
    error = (actual.double() - expected).abs()
    assert bool((error <= allowed).all()), f"largest excess {(error - allowed).max():g}"


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    sequence = st.tuples(st.sampled_from([0, 1, 1, 3, 20]), st.integers(0, 90)).map(lambda pair: (pair[0], sum(pair)))
    kv_heads = draw(st.integers(1, 3))
    return Batch(
        tuple(draw(st.lists(sequence, max_size=4))),
        kv_heads * draw(st.sampled_from([1, 2, 3, 5, 8])),
        kv_heads,
        16 * draw(st.integers(1, 9)),
        draw(st.sampled_from([16, 32, 48])),
        draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        draw(st.sampled_from(["auto", "auto", "fp8", "fp8_e5m2", INT8])),
    )


@settings(max_examples=60, deadline=None)
@given(batch=batches(), data=st.data(), causal=st.booleans())
def test_attention_agrees_with_float64(batch: Batch, data: st.DataObject, causal: bool) -> None:
    options: dict[str, Any] = {}
    if data.draw(st.booleans(), "window"):
        options["sliding_window"] = data.draw(st.sampled_from([1, 2, 16, 33]))
    if data.draw(st.booleans(), "soft cap"):
        options["softcap"] = 5.0
    if data.draw(st.booleans(), "alibi"):
        options["alibi_slopes"] = torch.rand(batch.query_heads) / 4
    if data.draw(st.booleans(), "sinks"):
        options["sinks"] = torch.randn(batch.query_heads)
    if data.draw(st.booleans(), "causal for each"):
        options["dynamic_causal"] = torch.randint(0, 2, (len(batch.sequences),), dtype=torch.int32)
    assert_close(*attend(batch, options, causal))


def test_a_wider_schedule_serves_layers_with_a_window() -> None:
    batch = Batch(((1, 700), (30, 90)), 4, 2, 32)
    starts, lengths, table, slots = batch.tables()
    query, output = batch.random(31, 4), torch.empty(31, 4, 32, dtype=batch.dtype)
    key, value = (batch.random(len(slots), 2) for _ in range(2))
    cache = batch.new_cache()
    ops.write_kv_cache(key, value, cache, slots)
    schedule = ops.schedule_attention(starts, lengths, 4, 2, True, threads=5)
    ops.paged_attention(output, query, cache, schedule, starts, lengths, table, batch.scale, True, sliding_window=50)
    expected = reference(batch, query.double(), key.double(), value.double(), {"sliding_window": 50}, True)
    assert_close(output, expected)


@pytest.fixture
def several_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("several_threads")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", INT8])
@pytest.mark.parametrize("order", ["runs", "shuffled", "one each"])
def test_threads_write_what_one_would(kv_cache_dtype: str, order: str) -> None:
    batch = Batch(((0, 1000), (0, 1500)), 3, 3, 64, 48, kv_cache_dtype=kv_cache_dtype)
    slots = batch.tables()[-1]
    if order == "shuffled":
        slots = slots[torch.randperm(len(slots))]
    if order == "one each":
        slots = slots[::48].contiguous()
    slots[7] = -1
    key, value = (batch.random(len(slots), 3) for _ in range(2))
    shared, alone = batch.new_cache(), batch.new_cache()
    for _ in range(3):
        ops.write_kv_cache(key, value, shared, slots, kv_cache_dtype)
    torch.set_num_threads(1)
    ops.write_kv_cache(key, value, alone, slots, kv_cache_dtype)
    assert torch.equal(shared.view(torch.uint8), alone.view(torch.uint8))


@pytest.mark.usefixtures("several_threads")
def test_threads_attend_as_one_would() -> None:
    batch = Batch(((1, 1500), (70, 300), (4, 40)), 8, 2, 64)
    assert_close(*attend(batch, {}))


def arguments() -> dict[str, dict[str, Any]]:
    """Valid arguments of each op, of one small batch."""
    batch = Batch(((2, 20), (1, 17)), 4, 2, 32)
    starts, lengths, table, slots = batch.tables()
    key, value = (torch.randn(len(slots), 2, 32).bfloat16() for _ in range(2))
    cache = torch.zeros(5, 2, 16, 64, dtype=torch.bfloat16)
    schedule = ops.schedule_attention(starts, lengths, 4, 2, True, -1, None, 3)
    query = torch.randn(3, 4, 32).bfloat16()
    common = {"query_start_loc": starts, "seq_lens": lengths}
    return {
        "write_kv_cache": {"key": key, "value": value, "kv_cache": cache, "slot_mapping": slots},
        "schedule_attention": {**common, "num_heads": 4, "num_kv_heads": 2, "causal": True},
        "paged_attention": {
            **{"output": torch.empty_like(query), "query": query, "kv_cache": cache, "schedule": schedule},
            **common,
            **{"block_table": table, "scale": 0.2, "causal": True},
        },
    }


BFLOAT16 = torch.bfloat16
BAD_ARGUMENTS = [
    ("write_kv_cache", {"key": torch.zeros(37, 64)}, "key has 2 dimensions"),
    ("write_kv_cache", {"value": torch.zeros(37, 32, 2).mT}, "value has stride 2 in its last dimension"),
    ("write_kv_cache", {"value": torch.zeros(37, 2, 32)}, "value must have key's shape and dtype"),
    ("write_kv_cache", {"value": torch.zeros(36, 2, 32, dtype=BFLOAT16)}, "value must have key's shape and dtype"),
    ("write_kv_cache", {"kv_cache_dtype": "fp4"}, "kv_cache_dtype is 'fp4', expected auto"),
    ("write_kv_cache", {"kv_cache": torch.zeros(5, 2, 16, dtype=BFLOAT16)}, "kv_cache has 3 dimensions"),
    ("write_kv_cache", {"kv_cache": torch.zeros(5, 3, 16, 64, dtype=BFLOAT16)}, "kv_cache has 3 heads, expected 2"),
    ("write_kv_cache", {"kv_cache": torch.zeros(5, 2, 24, 64, dtype=BFLOAT16)}, "kv_cache has blocks of 24 tokens"),
    ("write_kv_cache", {"kv_cache": torch.zeros(5, 2, 16, 64)}, "kv_cache has dtype Float, expected BFloat16"),
    ("write_kv_cache", {"kv_cache": torch.zeros(5, 2, 16, 80, dtype=BFLOAT16)}, r"with shape \[16, 64\]"),
    ("write_kv_cache", {"kv_cache": torch.zeros(5, 2, 64, 16, dtype=BFLOAT16).mT}, "kv_cache must be contiguous"),
    ("write_kv_cache", {"kv_cache_dtype": "fp8"}, "kv_cache has elements of 2 bytes, expected 1 for fp8"),
    (
        "write_kv_cache",
        {"kv_cache": torch.zeros(5, 2, 16, 72, dtype=torch.uint8), "kv_cache_dtype": "fp8", "key_scale": 0.0},
        "key_scale and value_scale must be positive",
    ),
    ("write_kv_cache", {"slot_mapping": torch.zeros(37, dtype=torch.int32)}, "slot_mapping has dtype Int"),
    ("write_kv_cache", {"slot_mapping": torch.zeros(2, 2, dtype=torch.int64)}, "slot_mapping must be contiguous"),
    ("write_kv_cache", {"slot_mapping": torch.tensor(1)}, "slot_mapping must be contiguous"),
    ("write_kv_cache", {"slot_mapping": torch.tensor([79, 80])}, r"slot_mapping\[1\] is 80, expected less than 80"),
    ("schedule_attention", {"num_heads": 5}, "num_heads is 5, expected a multiple of num_kv_heads, 2"),
    ("schedule_attention", {"num_heads": -4}, "num_heads is -4"),
    ("schedule_attention", {"num_kv_heads": 0}, "expected a multiple of num_kv_heads, 0"),
    ("schedule_attention", {"seq_lens": torch.ones(1, 2).int()}, "seq_lens has 2 dimensions, expected 1"),
    ("schedule_attention", {"seq_lens": torch.ones(2)}, "seq_lens has dtype Float, expected Int"),
    ("schedule_attention", {"seq_lens": torch.tensor([20, -1]).int()}, "sequence 1 has 1 query tokens and -1 keys"),
    ("schedule_attention", {"query_start_loc": torch.tensor([0, 2]).int()}, r"query_start_loc .* with shape \[3\]"),
    ("schedule_attention", {"query_start_loc": torch.tensor([1, 2, 3]).int()}, "query_start_loc begins with 1"),
    ("schedule_attention", {"query_start_loc": torch.tensor([0, 2, 1]).int()}, "sequence 1 has -1 query tokens"),
    ("schedule_attention", {"dynamic_causal": torch.ones(2)}, "dynamic_causal has dtype Float"),
    ("paged_attention", {"query": torch.zeros(3, 128).bfloat16()}, "query has 2 dimensions"),
    ("paged_attention", {"output": torch.zeros(3, 4, 32)}, "output must have query's shape and dtype"),
    ("paged_attention", {"kv_cache": torch.zeros(5, 16, 64).bfloat16()}, "kv_cache has 3 dimensions"),
    ("paged_attention", {"kv_cache": torch.zeros(5, 3, 16, 64).bfloat16()}, "query has 4 heads, expected a multiple"),
    ("paged_attention", {"schedule": torch.zeros(4).int()}, "schedule is not one of schedule_attention's"),
    ("paged_attention", {"schedule": torch.zeros(64).int()}, "schedule was made for another batch"),
    ("paged_attention", {"seq_lens": torch.tensor([20, 16]).int()}, "schedule was made for another batch"),
    ("paged_attention", {"query_start_loc": torch.tensor([0, 1, 3]).int()}, "schedule was made for another batch"),
    (
        "paged_attention",
        {"block_table": torch.zeros(1, 2).int()},
        r"int32 with shape \[2, blocks\]",
    ),
    ("paged_attention", {"block_table": torch.zeros(2, 2)}, "block_table must be int32"),
    ("paged_attention", {"block_table": torch.zeros(2, 1).int()}, "20 keys in 2 blocks, but block_table has 1 columns"),
    (
        "paged_attention",
        {"block_table": torch.tensor([[0, 1], [2, 5]]).int()},
        r"block_table\[1, 1\] is 5, expected 0 to 4",
    ),
    ("paged_attention", {"alibi_slopes": torch.zeros(3)}, r"alibi_slopes must be contiguous with shape \[4\]"),
    ("paged_attention", {"sinks": torch.zeros(4).bfloat16()}, "sinks has dtype BFloat16, expected Float"),
    ("paged_attention", {"sinks": torch.zeros(8)[::2]}, r"sinks must be contiguous with shape \[4\]"),
]


@pytest.mark.parametrize(
    ("operation", "changes", "message"), BAD_ARGUMENTS, ids=[f"{case[0]}-{case[2][:40]}" for case in BAD_ARGUMENTS]
)
def test_a_bad_argument_is_named(operation: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"{operation}: .*{message}"):
        getattr(ops, operation)(**{**arguments()[operation], **changes})


@pytest.mark.parametrize("head_size", [0, 24, 528])
def test_a_bad_head_size_is_named(head_size: int) -> None:
    heads = torch.zeros(1, 2, head_size)
    with pytest.raises(RuntimeError, match=f"the head size is {head_size}, expected a multiple of 16 up to 512"):
        ops.write_kv_cache(heads, heads, torch.zeros(5, 2, 16, 2 * head_size), torch.zeros(1, dtype=torch.int64))


def test_another_dtype_is_named() -> None:
    heads = torch.zeros(1, 2, 32).double()
    with pytest.raises(RuntimeError, match="has dtype Double, expected bfloat16, float16 or float32"):
        ops.write_kv_cache(heads, heads, torch.zeros(5, 2, 16, 64).double(), torch.zeros(1, dtype=torch.int64))


def test_fewer_query_tokens_than_the_batch_has_are_named() -> None:
    query = torch.zeros(2, 4, 32).bfloat16()
    changes = {"query": query, "output": torch.empty_like(query)}
    with pytest.raises(RuntimeError, match="query has 2 tokens, query_start_loc ends with 3"):
        ops.paged_attention(**{**arguments()["paged_attention"], **changes})


@pytest.mark.parametrize("operation", ["write_kv_cache", "schedule_attention", "paged_attention"])
def test_the_schema_and_the_fake_fit_the_op(operation: str) -> None:
    positional = list(arguments()[operation].values())
    defaults = {
        "write_kv_cache": ["auto", 1.0, 1.0],
        "schedule_attention": [-1, None, 3],
        "paged_attention": [-1, None, None, 0.0, None, "auto", 1.0, 1.0],
    }
    overload = getattr(torch.ops.vllm_arm, operation).default
    torch.library.opcheck(overload, (*positional, *defaults[operation]))


def test_torch_compile_traces_the_ops() -> None:
    given = arguments()
    write, attention = given["write_kv_cache"], given["paged_attention"]

    def layer(key: torch.Tensor, query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        ops.write_kv_cache(key * 2, write["value"], cache, write["slot_mapping"])
        output = torch.empty_like(query)
        schedule = ops.schedule_attention(attention["query_start_loc"], attention["seq_lens"], 4, 2, True)
        tables = (attention["query_start_loc"], attention["seq_lens"], attention["block_table"])
        ops.paged_attention(output, query + 1, cache, schedule, *tables, 0.2, True)
        return output * 2

    caches = [torch.zeros_like(write["kv_cache"]) for _ in range(2)]
    expected = layer(write["key"], attention["query"], caches[0])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(write["key"], attention["query"], caches[1]), expected)
    assert torch.equal(*caches)
    assert bool(caches[0].any())
