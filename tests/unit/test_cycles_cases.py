# SPDX-License-Identifier: Apache-2.0
"""The benchmark cases: what they claim to do, and that implementations do it on this machine too."""

from __future__ import annotations

import platform
from importlib.util import find_spec

import pytest
import torch

from benchmarks.cases import CASES, Case, Implementation, max_error, select
from benchmarks.cases.paged_cache import KEY_SCALE, VALUE_SCALE, Shape, make_inputs, reference
from benchmarks.neoverse.selection import kernel_variants

EACH = [(case, implementation) for case in CASES for implementation in case.implementations]


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm, whose operators are the reference, is not installed")
@pytest.mark.parametrize(("case", "implementation"), EACH, ids=[f"{c.label}-{i.name}" for c, i in EACH])
def test_each_implementation_agrees_with_float64(case: Case, implementation: Implementation) -> None:
    torch.manual_seed(0)
    inputs = case.inputs()
    expected = case.reference(inputs)
    with torch.no_grad():
        call = implementation.prepare(inputs)
        call.reset()
        call.run()
        call.reset()
        call.run()
        error = max_error(call.output(), expected)
    assert error <= (implementation.tolerance or case.tolerance)
    if platform.machine() == "x86_64":
        assert error > 0, "a reference that is the result itself checks nothing"


def test_names_are_unique_and_ours_are_in_the_kernel_table() -> None:
    assert len({case.label for case in CASES}) == len(CASES)
    for _, implementation in EACH:
        assert (implementation.name == "vllm_arm") == (implementation.operation is not None)
        if implementation.operation:
            assert implementation.operation in kernel_variants()


def test_every_family_and_model_is_there() -> None:
    assert {case.op for case in CASES} == {
        *("attention", "cache_write", "linear", "quantise", "norm", "rope", "activation", "all_reduce"),
    }
    words = " ".join(case.shape for case in CASES)
    for model in ("Llama-3.1-8B", "Qwen2.5-7B", "gpt-oss-20b", "Gemma-3"):
        assert model in words


@pytest.mark.parametrize("window", [-1, 1, 3, 5, 100])
def test_attention_counts_the_pairs_that_the_mask_leaves(window: int) -> None:
    shape = Shape(((1, 7), (5, 5), (3, 9)), query_heads=4, kv_heads=2, head_size=8, window=window)
    pairs, used = 0, 0
    for queries, keys in shape.sequences:
        position = torch.arange(keys - queries, keys)[:, None]
        key = torch.arange(keys)
        seen = (key <= position) & ((key > position - window) if window >= 0 else True)
        pairs += int(seen.sum())
        used += int(seen.any(0).sum())
    assert shape.multiply_accumulates() == 2 * 4 * 8 * pairs
    assert shape.keys_in_use() == used


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8_per_token_head"])
def test_a_quantised_cache_is_smaller_and_holds_its_inputs_exactly(kv_cache_dtype: str) -> None:
    torch.manual_seed(0)
    shape = Shape(((1, 40),), query_heads=4, kv_heads=2, head_size=128, kv_cache_dtype=kv_cache_dtype)
    plain = Shape(shape.sequences, shape.query_heads, shape.kv_heads, shape.head_size)
    assert shape.cached_bytes(40) <= 0.55 * plain.cached_bytes(40)
    inputs = make_inputs(shape)
    for heads, scale in ((inputs.key.float(), KEY_SCALE), (inputs.value.float(), VALUE_SCALE)):
        if kv_cache_dtype == "fp8_e4m3":
            stored = (heads / scale).to(torch.float8_e4m3fn).float() * scale
        else:
            token_scale = heads.abs().amax(-1, keepdim=True) / 127
            stored = (heads / token_scale).round() * token_scale
        assert torch.equal(stored, heads)
        assert len(heads.unique()) > 50


def test_the_attention_reference_is_softmax_attention() -> None:
    torch.manual_seed(0)
    shape = Shape(((2, 4), (3, 3)), query_heads=2, kv_heads=1, head_size=8, window=2, sinks=True)
    inputs = make_inputs(shape)
    assert inputs.sinks is not None
    rows = []
    query_row, key_row = 0, 0
    for queries, keys in shape.sequences:
        for i in range(queries):
            position = keys - queries + i
            first = max(0, position - 1)
            key = inputs.key[key_row + first : key_row + position + 1, 0].double()
            value = inputs.value[key_row + first : key_row + position + 1, 0].double()
            for head in range(2):
                weights = (key @ inputs.query[query_row + i, head].double() / 8**0.5).exp()
                rows.append(weights @ value / (weights.sum() + inputs.sinks[head].double().exp()))
        query_row, key_row = query_row + queries, key_row + keys
    assert max_error(torch.stack(rows).view(5, 2, 8), reference(inputs)) < 1e-12


def test_a_result_that_is_not_finite_is_infinitely_wrong() -> None:
    assert max_error(torch.tensor([1.0, float("nan")]), torch.ones(2).double()) == float("inf")
    assert max_error(torch.tensor([2.0, 1.5]), torch.tensor([2.0, 1.0]).double()) == 0.25
    with pytest.raises(ValueError, match="shape"):
        max_error(torch.ones(2), torch.ones(3).double())


def test_an_unknown_case_says_what_there_is() -> None:
    with pytest.raises(ValueError, match="expected one of decode_2k"):
        select("attention", "decode_3k")
