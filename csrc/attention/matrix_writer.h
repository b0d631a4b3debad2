// SPDX-License-Identifier: Apache-2.0
// Writes bf16 keys and values in the order that the matrix engines read; see matrix_engine.h.
#pragma once

#include <arm_neon.h>

#include "attention/write_tokens.h"

namespace vllm_arm {
namespace {

class MatrixWriter {
 public:
  // `together` pairs of keys lie together for each four dimensions: 1 for NEON, as many as a vector has units for SVE.
  MatrixWriter(std::int64_t together, std::int64_t head_size) : together_(together), head_size_(head_size) {}

  // Tokens [token_begin, token_end) of heads [head_begin, head_end).
  void write(const WriteKvCacheArguments& arguments, std::int64_t token_begin, std::int64_t token_end,
             std::int64_t head_begin, std::int64_t head_end) const {
    const KvCache& cache = arguments.cache;
    const std::int64_t* slots = arguments.slot_mapping;
    for (std::int64_t token = token_begin, count; token < token_end; token += count) {
      count = 1;
      if (slots[token] < 0) continue;
      const Slot slot(slots[token], cache);
      const std::int64_t panel = slot.token / kPanelTokens * cache.panel_bytes(), in_panel = slot.token % kPanelTokens;
      const bool is_group = in_panel % 4 == 0 && token + 4 <= token_end && slots[token + 1] == slots[token] + 1 &&
                            slots[token + 2] == slots[token] + 2 && slots[token + 3] == slots[token] + 3;
      if (is_group) count = 4;
      for (std::int64_t head = head_begin; head < head_end; ++head) {
        char* interior = cache.interior(slot.block, head);
        auto* keys = reinterpret_cast<bfloat16_t*>(interior + panel);
        auto* values = reinterpret_cast<bfloat16_t*>(interior + cache.plane_bytes() + panel);
        const bfloat16_t *key[4], *value[4];
        for (int k = 0; k < count; ++k) {
          key[k] = row(arguments.key, arguments.key_token_stride, arguments.key_head_stride, token + k, head);
          value[k] = row(arguments.value, arguments.value_token_stride, arguments.value_head_stride, token + k, head);
        }
        if (is_group) {
          write_key_pair(keys, in_panel / 2, key[0], key[1]);
          write_key_pair(keys, in_panel / 2 + 1, key[2], key[3]);
          write_value_group(values, in_panel / 4, value);
        } else {
          write_key(keys, in_panel, key[0]);
          write_value(values, in_panel, value[0]);
        }
      }
    }
  }

  // Both keys of a pair.
  void write_key_pair(bfloat16_t* panel, std::int64_t pair, const bfloat16_t* first, const bfloat16_t* second) const {
    bfloat16_t* destination = panel + pair_begin(pair);
    for (std::int64_t i = 0; i < head_size_; i += 8, destination += 2 * step()) {
      const uint64x2_t a = vreinterpretq_u64_bf16(vld1q_bf16(first + i));
      const uint64x2_t b = vreinterpretq_u64_bf16(vld1q_bf16(second + i));
      vst1q_bf16(destination, vreinterpretq_bf16_u64(vzip1q_u64(a, b)));
      vst1q_bf16(destination + step(), vreinterpretq_bf16_u64(vzip2q_u64(a, b)));
    }
  }

  void write_key(bfloat16_t* panel, std::int64_t token, const bfloat16_t* key) const {
    bfloat16_t* destination = panel + pair_begin(token / 2) + token % 2 * 4;
    for (std::int64_t i = 0; i < head_size_; i += 8, destination += 2 * step()) {
      const bfloat16x8_t eight = vld1q_bf16(key + i);
      vst1_bf16(destination, vget_low_bf16(eight));
      vst1_bf16(destination + step(), vget_high_bf16(eight));
    }
  }

  // The four values of a group.
  void write_value_group(bfloat16_t* panel, std::int64_t group, const bfloat16_t* const* values) const {
    auto* destination = reinterpret_cast<std::uint16_t*>(panel + group * 4 * head_size_);
    for (std::int64_t i = 0; i < head_size_; i += 8, destination += 32) {
      uint16x8_t rows[4];
      for (int k = 0; k < 4; ++k) rows[k] = vreinterpretq_u16_bf16(vld1q_bf16(values[k] + i));
      const uint32x4_t low01 = vreinterpretq_u32_u16(vzip1q_u16(rows[0], rows[1]));
      const uint32x4_t low23 = vreinterpretq_u32_u16(vzip1q_u16(rows[2], rows[3]));
      const uint32x4_t high01 = vreinterpretq_u32_u16(vzip2q_u16(rows[0], rows[1]));
      const uint32x4_t high23 = vreinterpretq_u32_u16(vzip2q_u16(rows[2], rows[3]));
      vst1q_u16(destination, vreinterpretq_u16_u32(vzip1q_u32(low01, low23)));
      vst1q_u16(destination + 8, vreinterpretq_u16_u32(vzip2q_u32(low01, low23)));
      vst1q_u16(destination + 16, vreinterpretq_u16_u32(vzip1q_u32(high01, high23)));
      vst1q_u16(destination + 24, vreinterpretq_u16_u32(vzip2q_u32(high01, high23)));
    }
  }

  // One value of a group: the others' elements between its own are kept.
  void write_value(bfloat16_t* panel, std::int64_t token, const bfloat16_t* value) const {
    auto* destination = reinterpret_cast<std::uint16_t*>(panel + token / 4 * 4 * head_size_);
    const uint16x8_t own = vreinterpretq_u16_u64(vdupq_n_u64(std::uint64_t{0xffff} << (16 * (token % 4))));
    for (std::int64_t i = 0; i < head_size_; i += 8, destination += 32) {
      const uint16x8_t eight = vreinterpretq_u16_bf16(vld1q_bf16(value + i));
      const uint32x4_t low = vreinterpretq_u32_u16(vzip1q_u16(eight, eight));
      const uint32x4_t high = vreinterpretq_u32_u16(vzip2q_u16(eight, eight));
      const uint32x4_t units[] = {vzip1q_u32(low, low), vzip2q_u32(low, low), vzip1q_u32(high, high),
                                  vzip2q_u32(high, high)};
      for (int k = 0; k < 4; ++k) {
        std::uint16_t* unit = destination + 8 * k;
        vst1q_u16(unit, vbslq_u16(own, vreinterpretq_u16_u32(units[k]), vld1q_u16(unit)));
      }
    }
  }

 private:
  // Elements from four dimensions of a pair of keys to its next four, and to where a pair begins.
  std::int64_t step() const { return together_ * 8; }
  std::int64_t pair_begin(std::int64_t pair) const {
    return pair / together_ * together_ * 2 * head_size_ + pair % together_ * 8;
  }

  static const bfloat16_t* row(const void* tensor, std::int64_t token_stride, std::int64_t head_stride,
                               std::int64_t token, std::int64_t head) {
    return reinterpret_cast<const bfloat16_t*>(static_cast<const char*>(tensor) + token * token_stride +
                                               head * head_stride);
  }

  std::int64_t together_, head_size_;
};

}  // namespace
}  // namespace vllm_arm
