# SPDX-License-Identifier: Apache-2.0
"""Blocks of the key-value cache that another engine computed."""

import torch

from vllm_arm import ops


def pack_kv_cache(kv_cache: torch.Tensor, indices: torch.Tensor) -> None:
    """Bring received blocks into the layout of our kernels, in place.

    ``kv_cache`` is ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``; in the blocks ``indices`` each token's
    row holds its key, then its value. Raises ``NotImplementedError`` on a quantised cache.
    """
    if not kv_cache.dtype.is_floating_point:
        raise NotImplementedError(f"KV transfer: expected a cache of floating-point numbers, got {kv_cache.dtype}")
    block_size = kv_cache.shape[2]
    received = kv_cache.index_select(0, indices).transpose(1, 2).flatten(0, 1)
    key, value = received.chunk(2, dim=-1)
    slots = indices.long()[:, None] * block_size + torch.arange(block_size)
    ops.write_kv_cache(key, value, kv_cache, slots.flatten())
