// SPDX-License-Identifier: Apache-2.0
// Attention on an int8 cache by SMMLA, which multiplies 2 x 8 by 8 x 2 matrices of bytes into 2 x 2 of int32: the cache
// is multiplied as it is stored. What meets it has 16 bits, a signed high and an unsigned low byte, and costs two
// products. Sums are exact: 2^15 * 127 times kMaximumHeadSize or kMaximumTileKeys is less than 2^31.
//   keys of a panel     [8 pairs of keys][head_size / 8] of [2 keys][8 dims]
//   values of a panel   [2 groups of keys][head_size / 2] of [2 dims][8 keys]
//   queries             a scale for each row, then [pairs of rows][head_size / 8][high, low] of [2 rows][8 dims]
//   weights             [pairs of rows][groups of 8 keys][high, low] of [2 rows][8 keys], times the scales of the
//   values,
//                       both bytes unsigned; their scales of each row at kWeightScales
//   logits and outputs  as in matrix_engine.h
#pragma once

#include "attention/matrix_engine.h"

namespace vllm_arm {
namespace {

struct Int8MatrixEngine : MatrixEngine {
  static void pack_query(char* destination, const char* const* sources, std::int64_t rows, std::int64_t head_size) {
    auto* scales = reinterpret_cast<float*>(destination);
    auto* packed = reinterpret_cast<std::int8_t*>(destination) + kQueryScaleBytes;
    for (std::int64_t row = 0; row < rows; row += 2, packed += 4 * head_size) {
      for (std::int64_t i = 0; i < 2; ++i) {
        const bool exists = row + i < rows;
        const auto* source = exists ? reinterpret_cast<const bfloat16_t*>(sources[row + i]) : nullptr;
        scales[row + i] = pack_row(packed + 8 * i, source, head_size);
      }
    }
  }

  static void scores(float* logits, float* largest, const char* packed_query, std::int64_t rows, const Panels& panels,
                     const KvCache& cache) {
    float32x4_t maxima[kMaximumGroupRows / 2];
    for (float32x4_t& maximum : maxima) maximum = vdupq_n_f32(-kInfinity);
    switch ((rows + 1) / 2) {
      case 1: scores_of<1, 8>(logits, maxima, packed_query, panels, cache.head_size); break;
      case 2: scores_of<2, 4>(logits, maxima, packed_query, panels, cache.head_size); break;
      case 3: scores_of<3, 4>(logits, maxima, packed_query, panels, cache.head_size); break;
      default: scores_of<4, 2>(logits, maxima, packed_query, panels, cache.head_size); break;
    }
    store_maxima(largest, maxima, rows);
  }

  static void weights(char* destination, float* sums, const float* logits, std::int64_t rows, const Panels& panels,
                      float scale, const float* subtracted) {
    auto* result = reinterpret_cast<std::uint8_t*>(destination);
    auto* weight_scales = reinterpret_cast<float*>(destination + kWeightScales);
    // Weights of a pair of rows before they are rounded.
    auto* exact = weight_scales + kMaximumGroupRows;
    const float32x4_t factor = vdupq_n_f32(scale);
    for (std::int64_t row = 0; row < rows; row += 2) {
      const float32x4_t offset = vsubq_f32(vdupq_n_f32(kExponentBias), pair_of(subtracted + row));
      float32x4_t sum = vdupq_n_f32(0), other_sum = vdupq_n_f32(0);
      float32x4_t largest = vdupq_n_f32(kSmallestWeight), other_largest = largest;
      const std::int64_t count = panels.count * kPanelPairs * 4;
      for (std::int64_t i = 0; i < count; i += 8, logits += 8) {
        const float32x4_t value_scales = vld1q_f32(panels.value_scales + i / 2);
        const float64x2_t pairs = vreinterpretq_f64_f32(value_scales);
        const float32x4_t first = exp2_biased(vfmaq_f32(offset, vld1q_f32(logits), factor));
        const float32x4_t second = exp2_biased(vfmaq_f32(offset, vld1q_f32(logits + 4), factor));
        sum = vaddq_f32(sum, first);
        other_sum = vaddq_f32(other_sum, second);
        const float32x4_t first_scaled = vmulq_f32(first, vreinterpretq_f32_f64(vdupq_laneq_f64(pairs, 0)));
        const float32x4_t second_scaled = vmulq_f32(second, vreinterpretq_f32_f64(vdupq_laneq_f64(pairs, 1)));
        largest = vmaxq_f32(largest, first_scaled);
        other_largest = vmaxq_f32(other_largest, second_scaled);
        vst1q_f32(exact + i, first_scaled);
        vst1q_f32(exact + i + 4, second_scaled);
      }
      sum = vaddq_f32(sum, other_sum);
      vst1_f32(sums + row, vpadd_f32(vget_low_f32(sum), vget_high_f32(sum)));
      largest = vmaxq_f32(largest, other_largest);
      const float32x2_t of_rows = vpmax_f32(vget_low_f32(largest), vget_high_f32(largest));
      vst1_f32(weight_scales + row, vmul_n_f32(of_rows, 1 / kLargestWeight));
      float inverses[2];
      vst1_f32(inverses, vdiv_f32(vdup_n_f32(kLargestWeight), of_rows));
      result = round_weights(result, exact, count, pair_of(inverses));
    }
  }

  static void accumulate(float* outputs, const char* packed_weights, std::int64_t rows, const Panels& panels,
                         const KvCache& cache, Accumulate mode, const float* factors) {
    switch ((rows + 1) / 2) {
      case 1: return accumulate_of<1, 8>(outputs, packed_weights, panels, cache.head_size, mode, factors);
      case 2: return accumulate_of<2, 4>(outputs, packed_weights, panels, cache.head_size, mode, factors);
      case 3: return accumulate_of<3, 4>(outputs, packed_weights, panels, cache.head_size, mode, factors);
      default: return accumulate_of<4, 2>(outputs, packed_weights, panels, cache.head_size, mode, factors);
    }
  }

  static void copy_values(char* destination, const char* panel, std::int64_t valid, std::int64_t head_size) {
    for (std::int64_t group = 0; group < 2; ++group) {
      const std::int64_t keys = std::clamp<std::int64_t>(valid - 8 * group, 0, 8);
      const std::uint64_t mask = keys == 8 ? ~std::uint64_t{0} : (std::uint64_t{1} << (8 * keys)) - 1;
      const auto* source = reinterpret_cast<const std::uint64_t*>(panel) + group * head_size;
      auto* result = reinterpret_cast<std::uint64_t*>(destination) + group * head_size;
      for (std::int64_t i = 0; i < head_size; i += 2) {
        vst1q_u64(result + i, vandq_u64(vld1q_u64(source + i), vdupq_n_u64(mask)));
      }
    }
  }

 private:
  static constexpr std::int64_t kUnitBytes = 16;
  static constexpr std::int64_t kQueryScaleBytes = kMaximumGroupRows * 4;
  // After the bytes of the weights of a group of rows.
  static constexpr std::int64_t kWeightScales = kMaximumGroupRows * kMaximumTileKeys * 2;
  static constexpr float kLargestWeight = 65535;
  // Keeps the inverse of a row's largest weight finite.
  static constexpr float kSmallestWeight = 0x1p-100F;

  // Fixed point, with a power of two as the scale: elements within 2^-7 of the row's largest are exact. The scale of a
  // row with infinity or NaN is NaN.
  static float pack_row(std::int8_t* destination, const bfloat16_t* source, std::int64_t head_size) {
    uint16x8_t largest = vdupq_n_u16(0);
    for (std::int64_t i = 0; i < head_size && source != nullptr; i += 8) {
      largest = vmaxq_u16(largest, vandq_u16(vreinterpretq_u16_bf16(load_unit(source + i)), vdupq_n_u16(0x7fff)));
    }
    // The largest element becomes at least 2^14 and less than 2^15; a scale is a normal number.
    const std::uint32_t exponent = std::max(vmaxvq_u16(largest) >> 7, 16);
    const float32x4_t inverse = vdupq_n_f32(bits_to_float((268 - exponent) << 23));
    for (std::int64_t i = 0; i < head_size; i += 8, destination += 2 * kUnitBytes) {
      const bfloat16x8_t eight = source != nullptr ? load_unit(source + i) : vreinterpretq_bf16_u16(vdupq_n_u16(0));
      const int32x4_t low = vcvtnq_s32_f32(vmulq_f32(vcvtq_low_f32_bf16(eight), inverse));
      const int32x4_t high = vcvtnq_s32_f32(vmulq_f32(vcvtq_high_f32_bf16(eight), inverse));
      const int8x16_t both = vreinterpretq_s8_s16(vqmovn_high_s32(vqmovn_s32(low), high));
      vst1_s8(destination, vget_low_s8(vuzp2q_s8(both, both)));
      vst1_s8(destination + kUnitBytes, vget_low_s8(vuzp1q_s8(both, both)));
    }
    return exponent == 255 ? std::numeric_limits<float>::quiet_NaN() : bits_to_float((exponent - 14) << 23);
  }

  static float32x4_t combine(int32x4_t high, int32x4_t low) { return vcvtq_f32_s32(vmlaq_n_s32(low, high, 256)); }

  // Loops are of units of dimensions, so that the products of all pairs of rows and keys are independent.
  template <int kRowPairs, int kKeyPairs>
  static void scores_of(float* logits, float32x4_t* maxima, const char* packed_query, const Panels& panels,
                        std::int64_t head_size) {
    const auto* scales = reinterpret_cast<const float*>(packed_query);
    const std::int64_t logits_stride = panels.count * kPanelPairs * 4;
    for (std::int64_t pair = 0; pair < panels.count * kPanelPairs; pair += kKeyPairs) {
      const auto* keys =
          reinterpret_cast<const std::int8_t*>(panels.keys[pair / kPanelPairs]) + pair % kPanelPairs * 2 * head_size;
      int32x4_t high[kRowPairs][kKeyPairs], low[kRowPairs][kKeyPairs];
      for (int r = 0; r < kRowPairs; ++r) {
        for (int k = 0; k < kKeyPairs; ++k) high[r][k] = low[r][k] = vdupq_n_s32(0);
      }
      const auto* query = reinterpret_cast<const std::int8_t*>(packed_query) + kQueryScaleBytes;
      for (std::int64_t i = 0; i < 2 * head_size; i += kUnitBytes, query += 2 * kUnitBytes) {
        int8x16_t high_rows[kRowPairs];
        uint8x16_t low_rows[kRowPairs];
        for (int r = 0; r < kRowPairs; ++r) {
          high_rows[r] = vld1q_s8(query + r * 4 * head_size);
          low_rows[r] = vreinterpretq_u8_s8(vld1q_s8(query + r * 4 * head_size + kUnitBytes));
        }
        for (int k = 0; k < kKeyPairs; ++k) {
          const int8x16_t key = vld1q_s8(keys + k * 2 * head_size + i);
          for (int r = 0; r < kRowPairs; ++r) {
            high[r][k] = vmmlaq_s32(high[r][k], high_rows[r], key);
            low[r][k] = vusmmlaq_s32(low[r][k], low_rows[r], key);
          }
        }
      }
      for (int k = 0; k < kKeyPairs; ++k) {
        const float32x2_t of_keys = vld1_f32(panels.key_scales + (pair + k) * 2);
        const float32x4_t key_scale = vcombine_f32(of_keys, of_keys);
        for (int r = 0; r < kRowPairs; ++r) {
          const float32x4_t scale = vmulq_f32(pair_of(scales + 2 * r), key_scale);
          const float32x4_t four = vmulq_f32(combine(high[r][k], low[r][k]), scale);
          vst1q_f32(logits + r * logits_stride + (pair + k) * 4, four);
          maxima[r] = vmaxq_f32(maxima[r], four);
        }
      }
    }
  }

  // `count` weights of a pair of rows: [2 rows][2 keys] of fp32 become [2 rows][8 keys] of bytes. `count` is a multiple
  // of 16.
  static std::uint8_t* round_weights(std::uint8_t* result, const float* exact, std::int64_t count,
                                     float32x4_t inverse) {
    static constexpr std::uint8_t kByRows[16] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
    const uint8x16_t by_rows = vld1q_u8(kByRows);
    for (std::int64_t i = 0; i < count; i += 16, result += 2 * kUnitBytes) {
      // Adding 2^23 leaves the nearest integer in the lowest bits.
      uint8x16_t rounded[4];
      for (int k = 0; k < 4; ++k) {
        rounded[k] = vreinterpretq_u8_f32(vfmaq_f32(vdupq_n_f32(0x1p23F), vld1q_f32(exact + i + 4 * k), inverse));
      }
      const auto halves = [&](int k) {
        return vreinterpretq_u8_u16(vuzp1q_u16(vreinterpretq_u16_u8(rounded[k]), vreinterpretq_u16_u8(rounded[k + 1])));
      };
      vst1q_u8(result, vqtbl1q_u8(vuzp2q_u8(halves(0), halves(2)), by_rows));
      vst1q_u8(result + kUnitBytes, vqtbl1q_u8(vuzp1q_u8(halves(0), halves(2)), by_rows));
    }
    return result;
  }

  template <int kRowPairs, int kDimPairs>
  static void accumulate_of(float* outputs, const char* packed_weights, const Panels& panels, std::int64_t head_size,
                            Accumulate mode, const float* factors) {
    const auto* scales = reinterpret_cast<const float*>(packed_weights + kWeightScales);
    const std::int64_t weights_stride = panels.count * 2 * 2 * kUnitBytes;
    for (std::int64_t pair = 0; pair < head_size / 2; pair += kDimPairs) {
      int32x4_t high[kRowPairs][kDimPairs], low[kRowPairs][kDimPairs];
      for (int r = 0; r < kRowPairs; ++r) {
        for (int d = 0; d < kDimPairs; ++d) high[r][d] = low[r][d] = vdupq_n_s32(0);
      }
      const auto* weights = reinterpret_cast<const std::uint8_t*>(packed_weights);
      for (std::int64_t panel = 0; panel < panels.count; ++panel) {
        const auto* values = reinterpret_cast<const std::int8_t*>(panels.values[panel]) + pair * kUnitBytes;
        for (int group = 0; group < 2; ++group, values += 8 * head_size, weights += 2 * kUnitBytes) {
          uint8x16_t high_rows[kRowPairs], low_rows[kRowPairs];
          for (int r = 0; r < kRowPairs; ++r) {
            high_rows[r] = vld1q_u8(weights + r * weights_stride);
            low_rows[r] = vld1q_u8(weights + r * weights_stride + kUnitBytes);
          }
          for (int d = 0; d < kDimPairs; ++d) {
            const int8x16_t value = vld1q_s8(values + d * kUnitBytes);
            for (int r = 0; r < kRowPairs; ++r) {
              high[r][d] = vusmmlaq_s32(high[r][d], high_rows[r], value);
              low[r][d] = vusmmlaq_s32(low[r][d], low_rows[r], value);
            }
          }
        }
      }
      for (int r = 0; r < kRowPairs; ++r) {
        const float32x4_t scale = pair_of(scales + 2 * r);
        const float32x4_t factor = mode == Accumulate::rescale ? pair_of(factors + 2 * r) : vdupq_n_f32(1);
        float* tile = outputs + r * 2 * head_size + pair * 4;
        for (int d = 0; d < kDimPairs; ++d, tile += 4) {
          const float32x4_t old = mode == Accumulate::first ? vdupq_n_f32(0) : vmulq_f32(vld1q_f32(tile), factor);
          vst1q_f32(tile, vfmaq_f32(old, combine(high[r][d], low[r][d]), scale));
        }
      }
    }
  }
};

}  // namespace
}  // namespace vllm_arm
