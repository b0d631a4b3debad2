// SPDX-License-Identifier: Apache-2.0
// Attention's arithmetic in bf16 by BFMMLA, which multiplies 2 x 4 by 4 x 2 matrices into 2 x 2 of fp32. Everything
// that it reads is stored as it takes it, in units of 16 bytes:
//   keys of a panel     [8 pairs of keys][head_size / 4] of [2 keys][4 dims]
//   values of a panel   [4 groups of keys][head_size / 2] of [2 dims][4 keys]
//   queries             [pairs of rows][head_size / 4] of [2 rows][4 dims]
//   logits              [pairs of rows][pairs of keys] of [2 rows][2 keys], fp32
//   weights             [pairs of rows][groups of 4 keys] of [2 rows][4 keys]
//   outputs             [pairs of rows][head_size / 2] of [2 rows][2 dims], fp32
#pragma once

#include <arm_neon.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "attention/item_runner.h"
#include "attention/neon_math.h"

namespace vllm_arm {
namespace {

constexpr std::int64_t kPanelPairs = kPanelTokens / 2;
constexpr std::int64_t kPanelGroups = kPanelTokens / 4;
constexpr std::int64_t kUnit = 8;  // bf16 elements of a unit

inline bfloat16x8_t load_unit(const bfloat16_t* source) { return vld1q_bf16(source); }

// 2^(x - 127) to 6.7e-4 of its value, a third of half a bf16 ulp, for x from 0 to 255; less than 0 and NaN count as 0,
// which gives 0. As a fixed-point number with 23 binary places x has the bits of the fp32 (1 + f) * 2^(n - 127), where
// n and f are its integer and its fraction. A polynomial in 1 + f makes up for the difference from 2^f: the minimax one
// of 2^(g - 1) / g on [1, 2].
inline float32x4_t exp2_biased(float32x4_t x) {
  const uint32x4_t bits = vcvtq_n_u32_f32(x, 23);
  const uint32x4_t mantissa = vandq_u32(bits, vdupq_n_u32(0x7fffff));
  const float32x4_t g = vreinterpretq_f32_u32(vorrq_u32(mantissa, vdupq_n_u32(0x3f800000)));
  float32x4_t factor = vfmaq_f32(vdupq_n_f32(0x1.6a3a46p-1F), g, vdupq_n_f32(-0x1.b40068p-4F));
  factor = vfmaq_f32(vdupq_n_f32(-0x1.60973ap+0F), g, factor);
  factor = vfmaq_f32(vdupq_n_f32(0x1.c68eb0p+0F), g, factor);
  return vmulq_f32(vreinterpretq_f32_u32(bits), factor);
}

constexpr float kExponentBias = 127;

// Two values as [a, a, b, b]: one of each row of a pair.
inline float32x4_t pair_of(const float* values) {
  const float32x2_t both = vld1_f32(values);
  return vzip1q_f32(vcombine_f32(both, both), vcombine_f32(both, both));
}

// Two units of logits, rounded to a unit of weights: [2 rows][2 keys] twice becomes [2 rows][4 keys].
inline bfloat16x8_t weights_unit(float32x4_t first, float32x4_t second) {
  const bfloat16x8_t rounded = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first), second);
  const uint8x16_t order = {0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15};
  return vreinterpretq_bf16_u8(vqtbl1q_u8(vreinterpretq_u8_bf16(rounded), order));
}

struct MatrixEngine {
  using Element = BFloat16;

  // Six rows and 16 keys keep 24 of the 32 registers as sums.
  static std::int64_t group_rows(std::int64_t rows) { return rows <= 8 ? 8 : 6; }

  static void pack_query(char* destination, const char* const* sources, std::int64_t rows, std::int64_t head_size) {
    pack_query(destination, sources, rows, head_size, [](bfloat16x8_t unit) { return unit; });
  }

  static float& logit(float* logits, std::int64_t row, std::int64_t key, std::int64_t panels) {
    return logits[(row / 2 * panels * kPanelPairs + key / 2) * 4 + row % 2 * 2 + key % 2];
  }

  static void scores(float* logits, float* largest, const char* packed_query, std::int64_t rows, const Panels& panels,
                     const KvCache& cache) {
    const auto* query = reinterpret_cast<const bfloat16_t*>(packed_query);
    float32x4_t maxima[kMaximumGroupRows / 2];
    for (float32x4_t& maximum : maxima) maximum = vdupq_n_f32(-kInfinity);
    switch ((rows + 1) / 2) {
      case 1: scores_of<1>(logits, maxima, query, panels, cache.head_size); break;
      case 2: scores_of<2>(logits, maxima, query, panels, cache.head_size); break;
      case 3: scores_of<3>(logits, maxima, query, panels, cache.head_size); break;
      default: scores_of<4>(logits, maxima, query, panels, cache.head_size); break;
    }
    store_maxima(largest, maxima, rows);
  }

  static void transform(float* logits, std::int64_t rows, std::int64_t panels, float scale, float softcap) {
    const std::int64_t count = (rows + 1) / 2 * panels * kPanelPairs * 4;
    const float inner = softcap == 0 ? scale : scale / softcap;
    for (std::int64_t i = 0; i < count; i += 4) {
      const float32x4_t scaled = vmulq_n_f32(vld1q_f32(logits + i), inner);
      vst1q_f32(logits + i, softcap == 0 ? scaled : vmulq_n_f32(tanh(scaled), softcap));
    }
  }

  static void maxima(float* largest, const float* logits, std::int64_t rows, std::int64_t panels) {
    float32x4_t maxima[kMaximumGroupRows / 2];
    for (std::int64_t pair = 0; 2 * pair < rows; ++pair) {
      float32x4_t partial[4];
      for (float32x4_t& maximum : partial) maximum = vdupq_n_f32(-kInfinity);
      for (std::int64_t i = 0; i < panels * kPanelPairs; i += 4, logits += 16) {
        for (int k = 0; k < 4; ++k) partial[k] = vmaxq_f32(partial[k], vld1q_f32(logits + 4 * k));
      }
      maxima[pair] = vmaxq_f32(vmaxq_f32(partial[0], partial[1]), vmaxq_f32(partial[2], partial[3]));
    }
    store_maxima(largest, maxima, rows);
  }

  static void exp2(float (&values)[kMaximumGroupRows]) {
    for (std::int64_t i = 0; i < kMaximumGroupRows; i += 4) {
      vst1q_f32(values + i, exp2_biased(vaddq_f32(vld1q_f32(values + i), vdupq_n_f32(kExponentBias))));
    }
  }

  static void weights(char* destination, float* sums, const float* logits, std::int64_t rows, const Panels& panels,
                      float scale, const float* subtracted) {
    auto* result = reinterpret_cast<bfloat16_t*>(destination);
    const float32x4_t factor = vdupq_n_f32(scale);
    for (std::int64_t row = 0; row < rows; row += 2) {
      const float32x4_t offset = vsubq_f32(vdupq_n_f32(kExponentBias), pair_of(subtracted + row));
      float32x4_t first_sum = vdupq_n_f32(0), second_sum = vdupq_n_f32(0);
      for (std::int64_t i = 0; i < panels.count * kPanelGroups; i += 2, logits += 16, result += 2 * kUnit) {
        float32x4_t powers[4];
        for (int k = 0; k < 4; ++k) {
          powers[k] = exp2_biased(vfmaq_f32(offset, vld1q_f32(logits + 4 * k), factor));
        }
        first_sum = vaddq_f32(first_sum, vaddq_f32(powers[0], powers[2]));
        second_sum = vaddq_f32(second_sum, vaddq_f32(powers[1], powers[3]));
        vst1q_bf16(result, weights_unit(powers[0], powers[1]));
        vst1q_bf16(result + kUnit, weights_unit(powers[2], powers[3]));
      }
      const float32x4_t sum = vaddq_f32(first_sum, second_sum);
      vst1_f32(sums + row, vpadd_f32(vget_low_f32(sum), vget_high_f32(sum)));
    }
  }

  static void accumulate(float* outputs, const char* packed_weights, std::int64_t rows, const Panels& panels,
                         const KvCache& cache, Accumulate mode, const float* factors) {
    const auto* weights = reinterpret_cast<const bfloat16_t*>(packed_weights);
    switch ((rows + 1) / 2) {
      case 1: return accumulate_of<1>(outputs, weights, panels, cache.head_size, mode, factors);
      case 2: return accumulate_of<2>(outputs, weights, panels, cache.head_size, mode, factors);
      case 3: return accumulate_of<3>(outputs, weights, panels, cache.head_size, mode, factors);
      default: return accumulate_of<4>(outputs, weights, panels, cache.head_size, mode, factors);
    }
  }

  static void copy_values(char* destination, const char* panel, std::int64_t valid, std::int64_t head_size) {
    const std::int64_t group_bytes = 4 * head_size * 2;
    std::memset(destination, 0, kPanelGroups * group_bytes);
    std::memcpy(destination, panel, valid / 4 * group_bytes);
    if (valid % 4 == 0) return;
    // Of the last group only the first keys of each unit's halves.
    const uint64_t mask = (std::uint64_t{1} << (16 * (valid % 4))) - 1;
    const auto* source = reinterpret_cast<const uint64_t*>(panel + valid / 4 * group_bytes);
    auto* result = reinterpret_cast<uint64_t*>(destination + valid / 4 * group_bytes);
    for (std::int64_t i = 0; i < head_size; i += 2)
      vst1q_u64(result + i, vandq_u64(vld1q_u64(source + i), vdupq_n_u64(mask)));
  }

  static void write_row(BFloat16* destination, const float* outputs, std::int64_t row, std::int64_t head_size,
                        float factor) {
    for_each_eight(outputs, row, head_size, [&](std::int64_t i, float32x4_t low, float32x4_t high) {
      const bfloat16x8_t rounded =
          vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(vmulq_n_f32(low, factor)), vmulq_n_f32(high, factor));
      vst1q_bf16(reinterpret_cast<bfloat16_t*>(destination + i), rounded);
    });
  }

  // Both rows of a pair, as write_row writes one.
  static void write_rows(BFloat16* first, BFloat16* second, const float* outputs, std::int64_t row,
                         std::int64_t head_size, const float (&row_factors)[2]) {
    const float* units = outputs + row * head_size;
    const float32x4_t factors = pair_of(row_factors);
    for (std::int64_t i = 0; i < head_size; i += 8, units += 16) {
      // Two dimensions of the first row and two of the second take turns.
      uint32x4_t turns[2];
      for (int k = 0; k < 2; ++k) {
        const bfloat16x8_t low = vcvtq_low_bf16_f32(vmulq_f32(vld1q_f32(units + 8 * k), factors));
        const float32x4_t high = vmulq_f32(vld1q_f32(units + 8 * k + 4), factors);
        turns[k] = vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(low, high));
      }
      vst1q_u32(reinterpret_cast<std::uint32_t*>(first + i), vuzp1q_u32(turns[0], turns[1]));
      vst1q_u32(reinterpret_cast<std::uint32_t*>(second + i), vuzp2q_u32(turns[0], turns[1]));
    }
  }

  static void write_row(float* destination, const float* outputs, std::int64_t row, std::int64_t head_size,
                        float factor) {
    for_each_eight(outputs, row, head_size, [&](std::int64_t i, float32x4_t low, float32x4_t high) {
      vst1q_f32(destination + i, vmulq_n_f32(low, factor));
      vst1q_f32(destination + i + 4, vmulq_n_f32(high, factor));
    });
  }

 protected:
  // `convert` turns eight elements of a row into what is packed.
  template <typename Convert>
  static void pack_query(char* destination, const char* const* sources, std::int64_t rows, std::int64_t head_size,
                         Convert convert) {
    auto* packed = reinterpret_cast<bfloat16_t*>(destination);
    for (std::int64_t row = 0; row < rows; row += 2, packed += 2 * head_size) {
      const auto* first = reinterpret_cast<const bfloat16_t*>(sources[row]);
      const auto* second = row + 1 < rows ? reinterpret_cast<const bfloat16_t*>(sources[row + 1]) : nullptr;
      for (std::int64_t i = 0; i < head_size; i += kUnit) {
        const uint64x2_t a = vreinterpretq_u64_bf16(convert(load_unit(first + i)));
        const uint64x2_t b =
            second != nullptr ? vreinterpretq_u64_bf16(convert(load_unit(second + i))) : vdupq_n_u64(0);
        vst1q_bf16(packed + 2 * i, vreinterpretq_bf16_u64(vzip1q_u64(a, b)));
        vst1q_bf16(packed + 2 * i + kUnit, vreinterpretq_bf16_u64(vzip2q_u64(a, b)));
      }
    }
  }

  static void store_maxima(float* largest, const float32x4_t* maxima, std::int64_t rows) {
    for (std::int64_t row = 0; row < rows; row += 2) {
      const float32x4_t maximum = maxima[row / 2];
      const float32x2_t both = vpmax_f32(vget_low_f32(maximum), vget_high_f32(maximum));
      largest[row] = vget_lane_f32(both, 0);
      if (row + 1 < rows) largest[row + 1] = vget_lane_f32(both, 1);
    }
  }

  // Eight output dimensions of a row at a time.
  template <typename Use>
  static void for_each_eight(const float* outputs, std::int64_t row, std::int64_t head_size, Use use) {
    const auto* units = reinterpret_cast<const double*>(outputs + row / 2 * 2 * head_size);
    const auto four = [](float64x2_t a, float64x2_t b, bool second) {
      return vreinterpretq_f32_f64(second ? vzip2q_f64(a, b) : vzip1q_f64(a, b));
    };
    const bool second = row % 2 != 0;
    for (std::int64_t i = 0; i < head_size; i += 8, units += 8) {
      float64x2_t unit[4];
      for (int k = 0; k < 4; ++k) unit[k] = vld1q_f64(units + 2 * k);
      use(i, four(unit[0], unit[1], second), four(unit[2], unit[3], second));
    }
  }

  template <int kRowPairs>
  static void scores_of(float* logits, float32x4_t* maxima, const bfloat16_t* query, const Panels& panels,
                        std::int64_t head_size) {
    const std::int64_t logits_stride = panels.count * kPanelPairs * 4;
    // Pairs of keys in work together: as many as leave registers for the operands, and enough to hide latency.
    if constexpr (kRowPairs == 1) {
      const std::int64_t even = panels.count / 2 * 2;
      scores_tiles<1, 2 * kPanelPairs>(logits, logits_stride, maxima, query, head_size, panels.keys, even);
      scores_tiles<1, kPanelPairs>(logits + even * kPanelPairs * 4, logits_stride, maxima, query, head_size,
                                   panels.keys + even, panels.count - even);
    } else {
      constexpr int kKeyPairs = kRowPairs == 4 ? 4 : kPanelPairs;
      scores_tiles<kRowPairs, kKeyPairs>(logits, logits_stride, maxima, query, head_size, panels.keys, panels.count);
    }
  }

  // Not inlined, so that the sums have the registers to themselves.
  template <int kRowPairs, int kKeyPairs>
  [[gnu::noinline]] static void scores_tiles(float* logits, std::int64_t logits_stride, float32x4_t* maxima,
                                             const bfloat16_t* query, std::int64_t head_size, const char* const* panels,
                                             std::int64_t count) {
    const std::int64_t pair_elements = 2 * head_size;
    for (std::int64_t pair = 0; pair < count * kPanelPairs; pair += kKeyPairs, logits += kKeyPairs * 4) {
      const bfloat16_t* keys[kKeyPairs];
      for (int k = 0; k < kKeyPairs; ++k) {
        keys[k] = reinterpret_cast<const bfloat16_t*>(panels[(pair + k) / kPanelPairs]) +
                  (pair + k) % kPanelPairs * pair_elements;
      }
      float32x4_t sums[kRowPairs][kKeyPairs];
      for (auto& row : sums) {
        for (float32x4_t& sum : row) sum = vdupq_n_f32(0);
      }
      for (std::int64_t i = 0; i < pair_elements; i += kUnit) {
        bfloat16x8_t rows[kRowPairs];
        for (int r = 0; r < kRowPairs; ++r) rows[r] = load_unit(query + r * pair_elements + i);
        for (int k = 0; k < kKeyPairs; ++k) {
          const bfloat16x8_t key = load_unit(keys[k] + i);
          for (int r = 0; r < kRowPairs; ++r) sums[r][k] = vbfmmlaq_f32(sums[r][k], rows[r], key);
        }
      }
      for (int r = 0; r < kRowPairs; ++r) {
        for (int k = 0; k < kKeyPairs; ++k) {
          vst1q_f32(logits + r * logits_stride + 4 * k, sums[r][k]);
          maxima[r] = vmaxq_f32(maxima[r], sums[r][k]);
        }
      }
    }
  }

  template <int kRowPairs>
  static void accumulate_of(float* outputs, const bfloat16_t* weights, const Panels& panels, std::int64_t head_size,
                            Accumulate mode, const float* factors) {
    constexpr int kDimPairs = kRowPairs == 4 ? 4 : 8;
    std::int64_t pair = 0;
    if constexpr (kRowPairs == 1) {
      for (; pair + 16 <= head_size / 2; pair += 16) {
        accumulate_tile<1, 16>(outputs, weights, panels, head_size, pair, mode, factors);
      }
    }
    for (; pair < head_size / 2; pair += kDimPairs) {
      accumulate_tile<kRowPairs, kDimPairs>(outputs, weights, panels, head_size, pair, mode, factors);
    }
  }

  template <int kRowPairs, int kDimPairs>
  [[gnu::noinline]] static void accumulate_tile(float* outputs, const bfloat16_t* weights, const Panels& panels,
                                                std::int64_t head_size, std::int64_t first_pair, Accumulate mode,
                                                const float* factors) {
    float* tile = outputs + first_pair * 4;
    float32x4_t sums[kRowPairs][kDimPairs];
    for (int r = 0; r < kRowPairs; ++r) {
      for (int d = 0; d < kDimPairs; ++d) {
        sums[r][d] = mode == Accumulate::first ? vdupq_n_f32(0) : vld1q_f32(tile + r * 2 * head_size + 4 * d);
      }
    }
    if (mode == Accumulate::rescale) {
      for (int r = 0; r < kRowPairs; ++r) {
        const float32x4_t factor = pair_of(factors + 2 * r);
        for (int d = 0; d < kDimPairs; ++d) sums[r][d] = vmulq_f32(sums[r][d], factor);
      }
    }
    const std::int64_t weights_stride = panels.count * kPanelGroups * kUnit;
    for (std::int64_t panel = 0; panel < panels.count; ++panel) {
      const bfloat16_t* values = reinterpret_cast<const bfloat16_t*>(panels.values[panel]) + first_pair * kUnit;
      for (int group = 0; group < kPanelGroups; ++group, values += 4 * head_size, weights += kUnit) {
        bfloat16x8_t rows[kRowPairs];
        for (int r = 0; r < kRowPairs; ++r) rows[r] = load_unit(weights + r * weights_stride);
        for (int d = 0; d < kDimPairs; ++d) {
          const bfloat16x8_t value = load_unit(values + d * kUnit);
          for (int r = 0; r < kRowPairs; ++r) sums[r][d] = vbfmmlaq_f32(sums[r][d], rows[r], value);
        }
      }
    }
    for (int r = 0; r < kRowPairs; ++r) {
      for (int d = 0; d < kDimPairs; ++d) vst1q_f32(tile + r * 2 * head_size + 4 * d, sums[r][d]);
    }
  }
};

}  // namespace
}  // namespace vllm_arm
