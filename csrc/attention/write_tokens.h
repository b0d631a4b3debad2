// SPDX-License-Identifier: Apache-2.0
// Writes tokens into the cache one after another, by an engine's write_key and write_value.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention/kv_cache.h"
#include "isa/scalar_types.h"

namespace vllm_arm {
namespace {

// A token's place in the cache.
struct Slot {
  std::int64_t block, token;

  Slot(std::int64_t slot, const KvCache& cache) : block(slot / cache.block_size), token(slot % cache.block_size) {}
};

// 0 where a scale has no finite inverse: the stored elements are then 0, and the scale shows NaN or infinity.
[[maybe_unused]] float inverse_scale(float scale) { return scale >= 0x1p-126F && scale <= 0x1p126F ? 1 / scale : 0.0F; }

// int8: a scale that makes the largest magnitude 127, and its inverse. NaN and infinity stay visible in the scale.
template <typename Element>
float largest_magnitude(const Element* values, std::int64_t count) {
  float largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(to_float(values[i]));
    if (magnitude > largest || magnitude != magnitude) largest = magnitude;
  }
  return largest;
}

template <typename Engine, typename Stored>
void write_tokens(const WriteKvCacheArguments& arguments, std::int64_t token_begin, std::int64_t token_end,
                  std::int64_t head_begin, std::int64_t head_end) {
  using Element = typename Engine::Element;
  const KvCache& cache = arguments.cache;
  for (std::int64_t token = token_begin; token < token_end; ++token) {
    if (arguments.slot_mapping[token] < 0) continue;
    const Slot slot(arguments.slot_mapping[token], cache);
    const std::int64_t panel = slot.token / kPanelTokens * cache.panel_bytes(), in_panel = slot.token % kPanelTokens;
    for (std::int64_t head = head_begin; head < head_end; ++head) {
      const auto* key =
          reinterpret_cast<const Element*>(static_cast<const char*>(arguments.key) +
                                           token * arguments.key_token_stride + head * arguments.key_head_stride);
      const auto* value =
          reinterpret_cast<const Element*>(static_cast<const char*>(arguments.value) +
                                           token * arguments.value_token_stride + head * arguments.value_head_stride);
      char* interior = cache.interior(slot.block, head);
      float key_scale = cache.key_scale, value_scale = cache.value_scale;
      if (cache.has_token_scales()) {
        float scales[] = {1, 1};
        if (cache.type == KvCacheType::int8) {
          scales[0] = key_scale = largest_magnitude(key, cache.head_size) / 127;
          scales[1] = value_scale = largest_magnitude(value, cache.head_size) / 127;
        }
        auto* stored = reinterpret_cast<float*>(interior + 2 * cache.plane_bytes()) + slot.token;
        stored[0] = scales[0];
        stored[cache.block_size] = scales[1];
      }
      Engine::write_key(reinterpret_cast<Stored*>(interior + panel), in_panel, key, cache.head_size,
                        inverse_scale(key_scale));
      Engine::write_value(reinterpret_cast<Stored*>(interior + cache.plane_bytes() + panel), in_panel, value,
                          cache.head_size, inverse_scale(value_scale));
    }
  }
}

}  // namespace
}  // namespace vllm_arm
