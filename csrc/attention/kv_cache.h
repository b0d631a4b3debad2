// SPDX-License-Identifier: Apache-2.0
// The paged key-value cache: what a block holds, and where.
#pragma once

#include <cstdint>

#include "isa/scalar_types.h"

namespace vllm_arm {

// How keys and values are stored. `same`: in the type of the tensors that are written. fp8: one scale per tensor.
// int8: one fp32 scale per token and head.
enum class KvCacheType : std::uint8_t { same, fp8_e4m3, fp8_e5m2, int8 };

// Tokens are stored in panels of this many, each contiguous; block sizes are multiples of it. How a variant orders the
// elements within a panel is its own affair.
inline constexpr std::int64_t kPanelTokens = 16;

// Head sizes are multiples of this.
inline constexpr std::int64_t kHeadSizeStep = 16;
inline constexpr std::int64_t kMaximumHeadSize = 512;

// [blocks, kv_heads] of interiors. An interior holds a plane of keys, block_size * head_size elements, then a plane of
// values, and unless its type is `same` an fp32 scale of each of the block's keys, then of each of its values. For fp8
// these are powers of two by which a variant may have divided the elements of a token to store them.
struct KvCache {
  char* data;
  std::int64_t blocks;
  std::int64_t kv_heads;
  std::int64_t block_size;
  std::int64_t head_size;
  std::int64_t block_stride;  // bytes from a block to the next
  std::int64_t head_stride;   // bytes from a head to the next within a block
  KvCacheType type;
  ScalarType scalar_type;  // of keys and values before they are stored
  float key_scale;         // fp8: a key is its stored value times this
  float value_scale;

  std::int64_t element_size() const { return type == KvCacheType::same ? scalar_size(scalar_type) : 1; }
  std::int64_t panel_bytes() const { return kPanelTokens * head_size * element_size(); }
  std::int64_t plane_bytes() const { return block_size * head_size * element_size(); }
  bool has_token_scales() const { return type != KvCacheType::same; }
  std::int64_t interior_bytes() const { return 2 * plane_bytes() + (has_token_scales() ? 8 * block_size : 0); }

  char* interior(std::int64_t block, std::int64_t head) const {
    return data + block * block_stride + head * head_stride;
  }
};

// Writes tokens into their slots. A slot is block * block_size + token within it; a negative one is skipped.
struct WriteKvCacheArguments {
  KvCache cache;
  const void* key;    // [tokens, kv_heads, head_size] of scalar_type, unit stride in the last dimension
  const void* value;  // likewise
  std::int64_t key_token_stride, key_head_stride;  // bytes
  std::int64_t value_token_stride, value_head_stride;
  const std::int64_t* slot_mapping;  // [tokens]
};

// Writes tokens [token_begin, token_end) of heads [head_begin, head_end). Calls that run at the same time must not
// share a panel: neighbouring slots may be written together.
using WriteKvCacheKernel = void (*)(const WriteKvCacheArguments&, std::int64_t token_begin, std::int64_t token_end,
                                    std::int64_t head_begin, std::int64_t head_end);

}  // namespace vllm_arm
