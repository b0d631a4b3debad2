# SPDX-License-Identifier: Apache-2.0
"""Blocks of another engine become blocks of ours."""

import pytest
import torch

from tests.attention.layers import BLOCK_SIZE, HEAD_SIZE, KV_HEADS
from vllm_arm import ops
from vllm_arm.attention.transfer import pack_kv_cache

BLOCKS = 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_received_blocks_hold_what_a_write_would_have_put_there(dtype: torch.dtype) -> None:
    key, value = (torch.randn(BLOCKS * BLOCK_SIZE, KV_HEADS, HEAD_SIZE).to(dtype) for _ in range(2))
    written = torch.zeros(BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=dtype)
    ops.write_kv_cache(key, value, written, torch.arange(BLOCKS * BLOCK_SIZE))

    received = torch.tensor([4, 1, 2])
    rows = torch.cat([key, value], -1).unflatten(0, (BLOCKS, BLOCK_SIZE)).transpose(1, 2)
    cache = torch.full_like(written, 7.0)
    cache[received] = rows[received]
    pack_kv_cache(cache, received)
    assert torch.equal(cache[received], written[received])
    others = [block for block in range(BLOCKS) if block not in received]
    assert (cache[others] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_a_quantised_cache_is_refused(dtype: torch.dtype) -> None:
    cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=dtype)
    with pytest.raises(NotImplementedError, match=f"expected a cache of floating-point numbers, got {dtype}"):
        pack_kv_cache(cache, torch.tensor([0]))
