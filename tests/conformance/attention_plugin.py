# SPDX-License-Identifier: Apache-2.0
"""Becomes the ``conftest.py`` beside vLLM's ``test_cpu_attn.py``: points its ops at ours and shrinks its batches.

It runs in a folder of its own, so it imports nothing of this project's tests. Of each test it runs just enough cases to
have every value of every parameter; all of them where VLLM_ARM_CONFORMANCE=all.
"""

from typing import Any

import pytest
import torch
import vllm._custom_ops
from sampling import calls, count_calls, leave_out_repetitions  # noqa: F401  # a fixture
from torch.utils.weak import WeakTensorKeyDictionary

from vllm_arm import ops

# The shapes of the test's own batches, in fewer tokens: decode, prefill, mixed; a window of 256 is still passed.
SMALLER: dict[str, list[Any]] = {
    "SEQ_LENS": [
        [(1, 213), (1, 1), (1, 312), (1, 7), (1, 781)],
        [(134, 134), (5, 5), (3, 16), (34, 513)],
        [(92, 345), (1, 134), (38, 145), (1, 416), (133, 133)],
    ],
    "ENCODER_SEQ_LENS": [[1, 67, 236, 15, 300, 36]],
    "NUM_BLOCKS": [32],
}
# One case with nothing to shrink: minutes with portable kernels.
ONLY_IN_FULL = "test_varlen_with_paged_kv_fp8_large_prefill_amx"

# The test's reference for fp8 has a cache of keys and one of values, where it and vLLM otherwise have them in one.
_joined_caches: Any = WeakTensorKeyDictionary()


def _join(key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
    """``[blocks, kv_heads, block_size, content]`` that our ops take: where the caches are its halves, those."""
    blocks, heads, block_size, head_size = key_cache.shape
    # Ours holds scales beside elements of 8 bits.
    scales = 8 if key_cache.element_size() == 1 else 0
    halves = value_cache.data_ptr() - key_cache.data_ptr() == block_size * head_size * key_cache.element_size()
    if not scales and halves and key_cache.stride(1) == 2 * block_size * head_size:
        strides = (key_cache.stride(0), key_cache.stride(1), 2 * head_size, 1)
        return key_cache.as_strided((blocks, heads, block_size, 2 * head_size), strides)
    if key_cache not in _joined_caches:
        _joined_caches[key_cache] = key_cache.new_zeros(blocks, heads, block_size, 2 * head_size + scales)
    joined: torch.Tensor = _joined_caches[key_cache]
    return joined


def cpu_attn_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    isa: str,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """vLLM's op, done by ours. ``isa`` names a kernel of vLLM's, and means nothing here."""
    calls["write_kv_cache"] += 1
    ops.write_kv_cache(key, value, _join(key_cache, value_cache), slot_mapping, kv_cache_dtype, k_scale, v_scale)


def cpu_attn_get_scheduler_metadata(
    *,
    num_reqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    seq_lens: torch.Tensor,
    dtype: torch.dtype,
    query_start_loc: torch.Tensor,
    causal: bool,
    sliding_window_size: int,
    isa: str,
    enable_kv_split: bool,
    dynamic_causal: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> torch.Tensor:
    """vLLM's op, done by ours. Whether to split contexts is our schedule's own choice: made for one thread or three."""
    calls["schedule_attention"] += 1
    threads = 3 if enable_kv_split else 1
    return ops.schedule_attention(
        query_start_loc, seq_lens, num_heads, num_kv_heads, causal, sliding_window_size, dynamic_causal, threads
    )


def cpu_attention_with_kv_cache(
    *,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int,
    block_table: torch.Tensor,
    softcap: float,
    scheduler_metadata: torch.Tensor,
    s_aux: torch.Tensor | None,
    dynamic_causal: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """vLLM's op, done by ours."""
    calls["paged_attention"] += 1
    ops.paged_attention(
        *(output, query, _join(key_cache, value_cache), scheduler_metadata, query_start_loc, seq_lens, block_table),
        *(scale, causal, sliding_window, dynamic_causal, alibi_slopes, softcap),
        *(None if s_aux is None else s_aux.float(), kv_cache_dtype, k_scale, v_scale),
    )


for function in (cpu_attn_reshape_and_cache, cpu_attn_get_scheduler_metadata, cpu_attention_with_kv_cache):
    assert hasattr(vllm._custom_ops, function.__name__), f"vLLM has no {function.__name__}"
    setattr(vllm._custom_ops, function.__name__, function)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Shrink the lists that the test's decorators refer to, before they are read."""
    for name, values in SMALLER.items():
        getattr(metafunc.module, name)[:] = values


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Run what vLLM's kernels need some CPU for, and leave out repetitions unless all is asked for."""
    for item in items:
        # These call an op that we have no part in.
        if "zentorch" not in item.originalname:
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "skipif"]
    leave_out_repetitions(config, items, ONLY_IN_FULL)
