// SPDX-License-Identifier: Apache-2.0
// Writes bf16 keys and values in the order that the matrix engines read; see matrix_engine.h.
#pragma once

#include <arm_neon.h>

#include <algorithm>
#include <cstring>

#include "attention/sve_key_order.h"
#include "attention/write_tokens.h"

namespace vllm_arm {
namespace {

class MatrixWriter {
 public:
  // In the order of NEON where `units` is 0, or in that of SVE for vectors of that many: 1, 2 or 4.
  MatrixWriter(std::int64_t units, std::int64_t head_size)
      : is_sve_(units != 0), log_together_(static_cast<int>(units / 2)), head_size_(head_size) {}

  // Tokens [token_begin, token_end) of heads [head_begin, head_end).
  void write(const WriteKvCacheArguments& arguments, std::int64_t token_begin, std::int64_t token_end,
             std::int64_t head_begin, std::int64_t head_end) const {
    const KvCache& cache = arguments.cache;
    const std::int64_t* slots = arguments.slot_mapping;
    for (std::int64_t token = token_begin, count; token < token_end; token += count) {
      count = 1;
      if (slots[token] < 0) continue;
      // Tokens whose slots follow each other in a panel.
      const Slot slot(slots[token], cache);
      const std::int64_t panel = slot.token / kPanelTokens * cache.panel_bytes(), in_panel = slot.token % kPanelTokens;
      const std::int64_t most = std::min(kPanelTokens - in_panel, token_end - token);
      while (count < most && slots[token + count] == slots[token] + count) ++count;
      for (std::int64_t head = head_begin; head < head_end; ++head) {
        char* interior = cache.interior(slot.block, head);
        auto* keys = reinterpret_cast<bfloat16_t*>(interior + panel);
        auto* values = reinterpret_cast<bfloat16_t*>(interior + cache.plane_bytes() + panel);
        const char* key = row(arguments.key, arguments.key_token_stride, arguments.key_head_stride, token, head);
        const char* value =
            row(arguments.value, arguments.value_token_stride, arguments.value_head_stride, token, head);
        for (std::int64_t i = 0, step; i < count; i += step) {
          const bool is_group = (in_panel + i) % 4 == 0 && i + 4 <= count;
          step = is_group ? 4 : 1;
          if (is_group) {
            write_group(keys, values, (in_panel + i) / 4, key, arguments.key_token_stride, value,
                        arguments.value_token_stride);
          } else {
            write_token(keys, values, in_panel + i, key, value);
          }
          key += step * arguments.key_token_stride;
          value += step * arguments.value_token_stride;
        }
      }
    }
  }

  // Keys and values of a group of four tokens, strides in bytes. Keys, whose units are two halves of 8 bytes, go
  // through general registers, which leaves the vector instructions to the values.
  void write_group(bfloat16_t* keys, bfloat16_t* values, std::int64_t group, const char* key, std::int64_t key_stride,
                   const char* value, std::int64_t value_stride) const {
    const std::int64_t apart = is_sve_ ? 2 : 1, other = 3 - apart;  // keys of a pair, and the two pairs
    auto* first_pair = reinterpret_cast<char*>(keys + pair_begin(4 * group));
    auto* second_pair = reinterpret_cast<char*>(keys + pair_begin(4 * group + other));
    const char* other_key = key + other * key_stride;
    auto* destination = reinterpret_cast<std::uint16_t*>(values + group * 4 * head_size_);
    const std::int64_t second_key = apart * key_stride, pair_step = 2 * step();
    for (std::int64_t i = 0; i < 2 * head_size_; i += 16, destination += 32) {
      uint16x8_t rows[4];
      for (int k = 0; k < 4; ++k) {
        rows[k] = vld1q_u16(reinterpret_cast<const std::uint16_t*>(value + k * value_stride + i));
      }
      const uint32x4_t low01 = vreinterpretq_u32_u16(vzip1q_u16(rows[0], rows[1]));
      const uint32x4_t low23 = vreinterpretq_u32_u16(vzip1q_u16(rows[2], rows[3]));
      const uint32x4_t high01 = vreinterpretq_u32_u16(vzip2q_u16(rows[0], rows[1]));
      const uint32x4_t high23 = vreinterpretq_u32_u16(vzip2q_u16(rows[2], rows[3]));
      vst1q_u16(destination, vreinterpretq_u16_u32(vzip1q_u32(low01, low23)));
      vst1q_u16(destination + 8, vreinterpretq_u16_u32(vzip2q_u32(low01, low23)));
      vst1q_u16(destination + 16, vreinterpretq_u16_u32(vzip1q_u32(high01, high23)));
      vst1q_u16(destination + 24, vreinterpretq_u16_u32(vzip2q_u32(high01, high23)));
      write_units(first_pair, pair_step, key + i, key + second_key + i);
      write_units(second_pair, pair_step, other_key + i, other_key + second_key + i);
      first_pair += 2 * pair_step;
      second_pair += 2 * pair_step;
    }
  }

  // One token, eight dimensions at a time by general registers: a vector would have to read what lies between.
  void write_token(bfloat16_t* keys, bfloat16_t* values, std::int64_t token, const char* key, const char* value) const {
    auto* of_key = reinterpret_cast<char*>(keys + pair_begin(token) + (is_sve_ ? token % 4 / 2 : token % 2) * 4);
    auto* of_value = reinterpret_cast<char*>(values + token / 4 * 4 * head_size_ + token % 4);
    const std::int64_t unit_step = 2 * step();
    for (std::int64_t i = 0; i < 2 * head_size_; i += 16) {
      for (int half = 0; half < 2; ++half, of_key += unit_step) {
        std::uint64_t four_keys, four_values;
        std::memcpy(&four_keys, key + i + 8 * half, 8);
        std::memcpy(&four_values, value + i + 8 * half, 8);
        asm("" : "+r"(four_keys), "+r"(four_values));
        std::memcpy(of_key, &four_keys, 8);
        for (int k = 0; k < 4; ++k, of_value += 8, four_values >>= 16) std::memcpy(of_value, &four_values, 2);
      }
    }
  }

 private:
  // Elements from four dimensions of a pair of keys to its next four, and to where a key's pair begins.
  std::int64_t step() const { return std::int64_t{8} << log_together_; }
  std::int64_t pair_begin(std::int64_t token) const {
    const std::int64_t pair = is_sve_ ? sve_pair(token, log_together_) : token / 2;
    const std::int64_t in_vector = pair & ((1 << log_together_) - 1);
    return (pair - in_vector) * 2 * head_size_ + in_vector * 8;
  }

  // Eight dimensions of a pair of keys: two units, `unit_step` bytes from one to the next.
  static void write_units(char* destination, std::int64_t unit_step, const char* first, const char* second) {
    std::uint64_t from_first[2], from_second[2];
    std::memcpy(from_first, first, 16);
    std::memcpy(from_second, second, 16);
    for (int i = 0; i < 2; ++i, destination += unit_step) {
      // Otherwise the compiler makes vectors of them.
      asm("" : "+r"(from_first[i]), "+r"(from_second[i]));
      std::memcpy(destination, &from_first[i], 8);
      std::memcpy(destination + 8, &from_second[i], 8);
    }
  }

  static const char* row(const void* tensor, std::int64_t token_stride, std::int64_t head_stride, std::int64_t token,
                         std::int64_t head) {
    return static_cast<const char*>(tensor) + token * token_stride + head * head_stride;
  }

  bool is_sve_;
  int log_together_;  // the logarithm, in base 2, of how many pairs of keys lie together for each four dimensions
  std::int64_t head_size_;
};

}  // namespace
}  // namespace vllm_arm
