// SPDX-License-Identifier: Apache-2.0
// Writes bf16 keys and values as fp8, as fp8_code.h has it, in the order that the fp8 engines read.
#pragma once

#include "attention/fp8_code.h"
#include "attention/matrix_writer.h"

namespace vllm_arm {
namespace {

// The pairs of elements of a token lie as the elements of a bf16 one do that has half as many.
template <typename Stored>
class Fp8MatrixWriter {
 public:
  // `units` is MatrixWriter's.
  Fp8MatrixWriter(const WriteKvCacheArguments& arguments, std::int64_t units)
      : arguments_(arguments), cache_(arguments.cache), pairs_(units, arguments.cache.head_size / 2) {}

  // Tokens [token_begin, token_end) of a head.
  void write(std::int64_t token_begin, std::int64_t token_end, std::int64_t head) const {
    const std::int64_t* slots = arguments_.slot_mapping;
    const float key_factor = inverse_scale(cache_.key_scale), value_factor = inverse_scale(cache_.value_scale);
    for (std::int64_t token = token_begin, count; token < token_end; token += count) {
      count = 1;
      if (slots[token] < 0) continue;
      const Slot slot(slots[token], cache_);
      const std::int64_t panel = slot.token / kPanelTokens * cache_.panel_bytes(), in_panel = slot.token % kPanelTokens;
      while (count < 4 && token + count < token_end && slots[token + count] == slots[token] + count) ++count;
      if (in_panel % 4 != 0 || count < 4) count = 1;
      char* interior = cache_.interior(slot.block, head);
      auto* keys = reinterpret_cast<bfloat16_t*>(interior + panel);
      auto* values = reinterpret_cast<bfloat16_t*>(interior + cache_.plane_bytes() + panel);
      auto* scales = reinterpret_cast<float*>(interior + 2 * cache_.plane_bytes()) + slot.token;
      bfloat16_t key_pairs[4][kMaximumHeadSize / 2], value_pairs[4][kMaximumHeadSize / 2];
      for (std::int64_t i = 0; i < count; ++i) {
        scales[i] = encode_key(
            key_pairs[i],
            row(arguments_.key, token + i, arguments_.key_token_stride, head * arguments_.key_head_stride), key_factor);
        scales[cache_.block_size + i] = encode_value(
            value_pairs[i],
            row(arguments_.value, token + i, arguments_.value_token_stride, head * arguments_.value_head_stride),
            value_factor);
      }
      if (count == 4) {
        pairs_.write_group(keys, values, in_panel / 4, reinterpret_cast<const char*>(key_pairs), sizeof key_pairs[0],
                           reinterpret_cast<const char*>(value_pairs), sizeof value_pairs[0]);
      } else {
        pairs_.write_token(keys, values, in_panel, reinterpret_cast<const char*>(key_pairs),
                           reinterpret_cast<const char*>(value_pairs));
      }
    }
  }

 private:
  static const bfloat16_t* row(const void* tensor, std::int64_t token, std::int64_t token_stride, std::int64_t head) {
    return reinterpret_cast<const bfloat16_t*>(static_cast<const char*>(tensor) + token * token_stride + head);
  }

  // Each dimension and the fourth after it.
  float encode_key(bfloat16_t* pairs, const bfloat16_t* key, float factor) const {
    return encode_fp8<Stored>(key, cache_.head_size, factor, [&](std::int64_t i, const Fp8Sixteen& sixteen) {
      const uint64x2_t low = vreinterpretq_u64_u16(sixteen.low), high = vreinterpretq_u64_u16(sixteen.high);
      store(pairs + i / 2, vreinterpretq_u8_u64(vzip1q_u64(low, high)), vreinterpretq_u8_u64(vzip2q_u64(low, high)));
    });
  }

  // Each dimension and the second after it.
  float encode_value(bfloat16_t* pairs, const bfloat16_t* value, float factor) const {
    return encode_fp8<Stored>(value, cache_.head_size, factor, [&](std::int64_t i, const Fp8Sixteen& sixteen) {
      const uint32x4_t low = vreinterpretq_u32_u16(sixteen.low), high = vreinterpretq_u32_u16(sixteen.high);
      store(pairs + i / 2, vreinterpretq_u8_u32(vuzp1q_u32(low, high)), vreinterpretq_u8_u32(vuzp2q_u32(low, high)));
    });
  }

  static void store(bfloat16_t* pairs, uint8x16_t first, uint8x16_t second) {
    vst1q_bf16(pairs, vreinterpretq_bf16_u8(vorrq_u8(first, swap_halves(second))));
  }

  const WriteKvCacheArguments& arguments_;
  const KvCache& cache_;
  const MatrixWriter pairs_;
};

// All tokens and heads.
template <typename Stored>
void write_fp8_matrices(const WriteKvCacheArguments& arguments, std::int64_t units, std::int64_t token_begin,
                        std::int64_t token_end, std::int64_t head_begin, std::int64_t head_end) {
  const Fp8MatrixWriter<Stored> writer(arguments, units);
  for (std::int64_t head = head_begin; head < head_end; ++head) writer.write(token_begin, token_end, head);
}

}  // namespace
}  // namespace vllm_arm
