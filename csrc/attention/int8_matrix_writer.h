// SPDX-License-Identifier: Apache-2.0
// Writes bf16 keys and values, quantised to int8, in the order that int8_matrix_engine.h reads: a panel of keys is
// [8 pairs of keys][head_size / 8] of [2 keys][8 dims], one of values [2 groups of keys][head_size / 2] of
// [2 dims][8 keys].
#pragma once

#include <arm_neon.h>

#include "attention/write_tokens.h"

namespace vllm_arm {
namespace {

class Int8MatrixWriter {
 public:
  explicit Int8MatrixWriter(const WriteKvCacheArguments& arguments)
      : arguments_(arguments), cache_(arguments.cache), head_size_(arguments.cache.head_size) {}

  // Tokens [token_begin, token_end) of one head.
  void write(std::int64_t token_begin, std::int64_t token_end, std::int64_t head) const {
    const std::int64_t* slots = arguments_.slot_mapping;
    for (std::int64_t token = token_begin; token < token_end;) {
      if (slots[token] < 0) {
        ++token;
        continue;
      }
      const Slot slot(slots[token], cache_);
      std::int64_t count = 1;
      while (count < 8 && token + count < token_end && slots[token + count] == slots[token] + count) ++count;
      if (slot.token % 8 != 0 || count < 8) count = 1;
      write_some(token, count, slot, head);
      token += count;
    }
  }

 private:
  // A token, or the eight of a group.
  void write_some(std::int64_t token, std::int64_t count, const Slot& slot, std::int64_t head) const {
    char* interior = cache_.interior(slot.block, head);
    const std::int64_t panel = slot.token / kPanelTokens * cache_.panel_bytes(), in_panel = slot.token % kPanelTokens;
    auto* keys = reinterpret_cast<std::uint8_t*>(interior + panel);
    auto* values = reinterpret_cast<std::uint8_t*>(interior + cache_.plane_bytes() + panel);
    auto* scales = reinterpret_cast<float*>(interior + 2 * cache_.plane_bytes()) + slot.token;
    std::uint8_t bytes[8][kMaximumHeadSize];
    for (std::int64_t i = 0; i < count; ++i) {
      quantise(bytes[i], row(arguments_.key, token + i, arguments_.key_token_stride, head * arguments_.key_head_stride),
               scales + i);
      write_key(keys, in_panel + i, bytes[i]);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      quantise(bytes[i],
               row(arguments_.value, token + i, arguments_.value_token_stride, head * arguments_.value_head_stride),
               scales + cache_.block_size + i);
    }
    if (count == 8) {
      write_value_group(values, in_panel / 8, bytes);
    } else {
      write_value(values, in_panel, bytes[0]);
    }
  }

  static const bfloat16_t* row(const void* tensor, std::int64_t token, std::int64_t token_stride, std::int64_t head) {
    return reinterpret_cast<const bfloat16_t*>(static_cast<const char*>(tensor) + token * token_stride + head);
  }

  void quantise(std::uint8_t* bytes, const bfloat16_t* source, float* token_scale) const {
    *token_scale = largest_magnitude(source) / 127;
    const float factor = inverse_scale(*token_scale);
    for (std::int64_t i = 0; i < head_size_; i += 8) {
      const bfloat16x8_t eight = vld1q_bf16(source + i);
      const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(vcvtq_low_f32_bf16(eight), factor));
      const int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(vcvtq_high_f32_bf16(eight), factor));
      vst1_u8(bytes + i, vreinterpret_u8_s8(vmovn_s16(vmovn_high_s32(vmovn_s32(low), high))));
    }
  }

  // NaN and infinity stay visible.
  float largest_magnitude(const bfloat16_t* source) const {
    uint16x8_t largest = vdupq_n_u16(0);
    for (std::int64_t i = 0; i < head_size_; i += 8) {
      largest = vmaxq_u16(largest, vandq_u16(vreinterpretq_u16_bf16(vld1q_bf16(source + i)), vdupq_n_u16(0x7fff)));
    }
    return to_float(BFloat16{vmaxvq_u16(largest)});
  }

  void write_key(std::uint8_t* panel, std::int64_t token, const std::uint8_t* bytes) const {
    std::uint8_t* destination = panel + token / 2 * 2 * head_size_ + token % 2 * 8;
    for (std::int64_t i = 0; i < head_size_; i += 8, destination += 16) {
      vst1_u8(destination, vld1_u8(bytes + i));
    }
  }

  // The eight values of a group.
  void write_value_group(std::uint8_t* panel, std::int64_t group,
                         const std::uint8_t (&bytes)[8][kMaximumHeadSize]) const {
    std::uint8_t* destination = panel + group * 8 * head_size_;
    for (std::int64_t i = 0; i < head_size_; i += 16, destination += 128) {
      uint8x16_t rows[8], zipped[8];
      for (int k = 0; k < 8; ++k) rows[k] = vld1q_u8(bytes[k] + i);
      // After three times, the keys of each dim lie together.
      for (int step = 0; step < 3; ++step) {
        for (int k = 0; k < 4; ++k) {
          zipped[2 * k] = vzip1q_u8(rows[k], rows[k + 4]);
          zipped[2 * k + 1] = vzip2q_u8(rows[k], rows[k + 4]);
        }
        std::copy(zipped, zipped + 8, rows);
      }
      for (int k = 0; k < 8; ++k) vst1q_u8(destination + 16 * k, rows[k]);
    }
  }

  // One value of a group: the others' bytes between its own are kept.
  void write_value(std::uint8_t* panel, std::int64_t token, const std::uint8_t* bytes) const {
    std::uint8_t* destination = panel + token / 8 * 8 * head_size_;
    const uint8x16_t own = vreinterpretq_u8_u64(vdupq_n_u64(std::uint64_t{0xff} << (token % 8 * 8)));
    for (std::int64_t i = 0; i < head_size_; i += 16) {
      const uint8x16_t dims = vld1q_u8(bytes + i);
      const uint16x8_t twice[] = {vreinterpretq_u16_u8(vzip1q_u8(dims, dims)),
                                  vreinterpretq_u16_u8(vzip2q_u8(dims, dims))};
      for (const uint16x8_t two : twice) {
        const uint32x4_t four_times[] = {vreinterpretq_u32_u16(vzip1q_u16(two, two)),
                                         vreinterpretq_u32_u16(vzip2q_u16(two, two))};
        for (const uint32x4_t four : four_times) {
          const uint32x4_t units[] = {vzip1q_u32(four, four), vzip2q_u32(four, four)};
          for (const uint32x4_t unit : units) {
            vst1q_u8(destination, vbslq_u8(own, vreinterpretq_u8_u32(unit), vld1q_u8(destination)));
            destination += 16;
          }
        }
      }
    }
  }

  const WriteKvCacheArguments& arguments_;
  const KvCache& cache_;
  const std::int64_t head_size_;
};

// All tokens and heads.
[[maybe_unused]] void write_int8_matrices(const WriteKvCacheArguments& arguments, std::int64_t token_begin,
                                          std::int64_t token_end, std::int64_t head_begin, std::int64_t head_end) {
  const Int8MatrixWriter writer(arguments);
  for (std::int64_t head = head_begin; head < head_end; ++head) writer.write(token_begin, token_end, head);
}

}  // namespace
}  // namespace vllm_arm
