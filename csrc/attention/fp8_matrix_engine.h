// SPDX-License-Identifier: Apache-2.0
// Attention on an fp8 cache by BFMMLA: what is stored, as in fp8_code.h, becomes bf16 in registers where few rows share
// it, and in scratch memory, once for a tile of keys, where many do. A stored unit of 16 bytes makes two units of
// matrix_engine.h, of its first and of its second elements:
//   keys of a panel     [8 pairs of keys][head_size / 8] of [2 keys][4 dims], the second elements four dims further
//   values of a panel   [4 groups of keys][head_size / 4] of [2 dims][4 keys], the second elements two dims further
//   all else            as in matrix_engine.h
#pragma once

#include "attention/fp8_code.h"
#include "attention/matrix_engine.h"

namespace vllm_arm {
namespace {

// A Decoder turns a stored unit into two of bf16. Their exponents are so small that products with them could vanish:
// what meets them is multiplied by kFp8Factor.
constexpr float kFp8Factor = 0x1p64F;
constexpr float kFp8Rest = 0x1p56F;  // of 2^-kFp8ExponentOffset

struct NeonFp8Decoder {
  static void decode(const std::uint8_t* unit, bfloat16x8_t& first, bfloat16x8_t& second) {
    const uint8x16_t stored = vld1q_u8(unit);
    const uint8x16_t mask = vreinterpretq_u8_u16(vdupq_n_u16(kFp8First));
    first = vreinterpretq_bf16_u8(vandq_u8(stored, mask));
    second = vreinterpretq_bf16_u8(vandq_u8(swap_halves(stored), mask));
  }
};

template <typename Decode>
struct Fp8Engine : MatrixEngine {
  using Decoder = Decode;
  static constexpr bool kTokenScales = true;

  static CacheScales scales(const KvCache& cache) { return {kFp8Rest * cache.key_scale, kFp8Rest * cache.value_scale}; }

  static void pack_query(char* destination, const char* const* sources, std::int64_t rows, std::int64_t head_size) {
    MatrixEngine::pack_query(destination, sources, rows, head_size, [](bfloat16x8_t unit) {
      const bfloat16x8_t low = vcvtq_low_bf16_f32(vmulq_n_f32(vcvtq_low_f32_bf16(unit), kFp8Factor));
      return vcvtq_high_bf16_f32(low, vmulq_n_f32(vcvtq_high_f32_bf16(unit), kFp8Factor));
    });
  }

  // Times the scales of the values.
  static void weights(char* destination, float* sums, const float* logits, std::int64_t rows, const Panels& panels,
                      float scale, const float* subtracted) {
    auto* result = reinterpret_cast<bfloat16_t*>(destination);
    const float32x4_t factor = vdupq_n_f32(scale);
    for (std::int64_t row = 0; row < rows; row += 2) {
      const float32x4_t offset = vsubq_f32(vdupq_n_f32(kExponentBias), pair_of(subtracted + row));
      float32x4_t sum = vdupq_n_f32(0), other_sum = vdupq_n_f32(0);
      const float* value_scales = panels.value_scales;
      for (std::int64_t i = 0; i < panels.count * kPanelGroups; ++i, logits += 8, value_scales += 4, result += kUnit) {
        const float64x2_t pairs = vreinterpretq_f64_f32(vmulq_n_f32(vld1q_f32(value_scales), kFp8Factor));
        const float32x4_t first = exp2_biased(vfmaq_f32(offset, vld1q_f32(logits), factor));
        const float32x4_t second = exp2_biased(vfmaq_f32(offset, vld1q_f32(logits + 4), factor));
        sum = vaddq_f32(sum, first);
        other_sum = vaddq_f32(other_sum, second);
        vst1q_bf16(result, weights_unit(vmulq_f32(first, vreinterpretq_f32_f64(vdupq_laneq_f64(pairs, 0))),
                                        vmulq_f32(second, vreinterpretq_f32_f64(vdupq_laneq_f64(pairs, 1)))));
      }
      sum = vaddq_f32(sum, other_sum);
      vst1_f32(sums + row, vpadd_f32(vget_low_f32(sum), vget_high_f32(sum)));
    }
  }

  // No stored bits stand for NaN or infinity, and the tokens that are not valid have no weight.
  static void copy_values(char* destination, const char* panel, std::int64_t, std::int64_t head_size) {
    std::memcpy(destination, panel, kPanelTokens * head_size);
  }

 protected:
  // Of a group of four keys, for the logits of each of its pairs.
  static float32x4x2_t key_scales(const float* scales) {
    const float64x2_t pairs = vreinterpretq_f64_f32(vld1q_f32(scales));
    return {vreinterpretq_f32_f64(vdupq_laneq_f64(pairs, 0)), vreinterpretq_f32_f64(vdupq_laneq_f64(pairs, 1))};
  }
};

// For items with many rows.
template <typename Engine>
struct Fp8WidenedEngine : Engine {
  static constexpr std::int64_t kWideTileElements = kTileElements;

  static bool widens(std::int64_t) { return true; }

  // Both planes of a tile of keys as those of a bf16 cache.
  static void widen(char* destination, const char** keys, const char** values, std::int64_t count,
                    std::int64_t head_size) {
    const std::int64_t bytes = kPanelTokens * head_size;
    for (std::int64_t panel = 0; panel < count; ++panel) {
      for (const char** plane : {keys, values}) {
        widen_units(destination, plane[panel], bytes);
        plane[panel] = destination;
        destination += 2 * bytes;
      }
    }
  }

  static void scores(float* logits, float* largest, const char* packed_query, std::int64_t rows, const Panels& panels,
                     const KvCache& cache) {
    MatrixEngine::scores(logits, largest, packed_query, rows, panels, cache);
    float32x4_t maxima[kMaximumGroupRows / 2];
    for (std::int64_t row_pair = 0; 2 * row_pair < rows; ++row_pair) {
      maxima[row_pair] = vdupq_n_f32(-kInfinity);
      for (std::int64_t group = 0; group < panels.count * kPanelGroups; ++group, logits += 8) {
        const float32x4x2_t scales = Engine::key_scales(panels.key_scales + 4 * group);
        const float32x4_t first = vmulq_f32(vld1q_f32(logits), scales.val[0]);
        const float32x4_t second = vmulq_f32(vld1q_f32(logits + 4), scales.val[1]);
        vst1q_f32(logits, first);
        vst1q_f32(logits + 4, second);
        maxima[row_pair] = vmaxq_f32(maxima[row_pair], vmaxq_f32(first, second));
      }
    }
    MatrixEngine::store_maxima(largest, maxima, rows);
  }

 private:
  static void widen_units(char* destination, const char* stored, std::int64_t bytes) {
    auto* unit = reinterpret_cast<bfloat16_t*>(destination);
    for (std::int64_t i = 0; i < bytes; i += 16, unit += 2 * kUnit) {
      bfloat16x8_t first, second;
      Engine::Decoder::decode(reinterpret_cast<const std::uint8_t*>(stored + i), first, second);
      vst1q_bf16(unit, first);
      vst1q_bf16(unit + kUnit, second);
    }
  }
};

// For items with one group of rows.
template <typename Engine>
struct Fp8RegisterEngine : Engine {
  static void scores(float* logits, float* largest, const char* packed_query, std::int64_t rows, const Panels& panels,
                     const KvCache& cache) {
    const auto* query = reinterpret_cast<const bfloat16_t*>(packed_query);
    float32x4_t maxima[kMaximumGroupRows / 2];
    for (float32x4_t& maximum : maxima) maximum = vdupq_n_f32(-kInfinity);
    switch ((rows + 1) / 2) {
      case 1: scores_of<1, 8>(logits, maxima, query, panels, cache.head_size); break;
      case 2: scores_of<2, 8>(logits, maxima, query, panels, cache.head_size); break;
      case 3: scores_of<3, 4>(logits, maxima, query, panels, cache.head_size); break;
      default: scores_of<4, 4>(logits, maxima, query, panels, cache.head_size); break;
    }
    MatrixEngine::store_maxima(largest, maxima, rows);
  }

  static void accumulate(float* outputs, const char* packed_weights, std::int64_t rows, const Panels& panels,
                         const KvCache& cache, Accumulate mode, const float* factors) {
    const auto* weights = reinterpret_cast<const bfloat16_t*>(packed_weights);
    const std::int64_t size = cache.head_size;
    switch ((rows + 1) / 2) {
      case 1: return accumulate_of<1, 8>(outputs, weights, panels, size, 0, mode, factors);
      case 2: return accumulate_of<2, 4>(outputs, weights, panels, size, 0, mode, factors);
      case 3: return accumulate_of<3, 2>(outputs, weights, panels, size, 0, mode, factors);
      default: return accumulate_of<4, 2>(outputs, weights, panels, size, 0, mode, factors);
    }
  }

 private:
  template <int kRowPairs, int kKeyPairs>
  [[gnu::noinline]] static void scores_of(float* logits, float32x4_t* maxima, const bfloat16_t* query,
                                          const Panels& panels, std::int64_t head_size) {
    const std::int64_t pair_elements = 2 * head_size, pairs = panels.count * kPanelPairs, logits_stride = pairs * 4;
    for (std::int64_t pair = 0; pair < pairs; pair += kKeyPairs) {
      const auto* keys =
          reinterpret_cast<const std::uint8_t*>(panels.keys[pair / kPanelPairs]) + pair % kPanelPairs * pair_elements;
      float32x4_t sums[kRowPairs][kKeyPairs];
      for (auto& row : sums) {
        for (float32x4_t& sum : row) sum = vdupq_n_f32(0);
      }
      for (std::int64_t i = 0; i < pair_elements; i += 2 * kUnit) {
        bfloat16x8_t rows[kRowPairs][2];
        for (int r = 0; r < kRowPairs; ++r) {
          rows[r][0] = load_unit(query + r * pair_elements + i);
          rows[r][1] = load_unit(query + r * pair_elements + i + kUnit);
        }
        for (int k = 0; k < kKeyPairs; ++k) {
          bfloat16x8_t first, second;
          Engine::Decoder::decode(keys + k * pair_elements + i, first, second);
          for (int r = 0; r < kRowPairs; ++r) sums[r][k] = vbfmmlaq_f32(sums[r][k], rows[r][0], first);
          for (int r = 0; r < kRowPairs; ++r) sums[r][k] = vbfmmlaq_f32(sums[r][k], rows[r][1], second);
        }
      }
      const float* key_scales = panels.key_scales + 2 * pair;
      float* result = logits + pair * 4;
      float32x4_t largest[kRowPairs];
      std::copy_n(maxima, kRowPairs, largest);
      for (int k = 0; k < kKeyPairs; k += 2) {
        const float32x4x2_t scales = Engine::key_scales(key_scales + 2 * k);
        for (int r = 0; r < kRowPairs; ++r) {
          const float32x4_t first = vmulq_f32(sums[r][k], scales.val[0]);
          const float32x4_t second = vmulq_f32(sums[r][k + 1], scales.val[1]);
          vst1q_f32(result + r * logits_stride + 4 * k, first);
          vst1q_f32(result + r * logits_stride + 4 * k + 4, second);
          largest[r] = vmaxq_f32(largest[r], vmaxq_f32(first, second));
        }
      }
      std::copy_n(largest, kRowPairs, maxima);
    }
  }

  // Stored units of four dimensions, from `first_unit`; kUnits together.
  template <int kRowPairs, int kUnits>
  static void accumulate_of(float* outputs, const bfloat16_t* weights, const Panels& panels, std::int64_t head_size,
                            std::int64_t first_unit, Accumulate mode, const float* factors) {
    std::int64_t unit = first_unit;
    for (; unit + kUnits <= head_size / 4; unit += kUnits) {
      accumulate_tile<kRowPairs, kUnits>(outputs, weights, panels, head_size, unit, mode, factors);
    }
    if constexpr (kUnits > 4) accumulate_of<kRowPairs, 4>(outputs, weights, panels, head_size, unit, mode, factors);
  }

  template <int kRowPairs, int kUnits>
  [[gnu::noinline]] static void accumulate_tile(float* outputs, const bfloat16_t* weights, const Panels& panels,
                                                std::int64_t head_size, std::int64_t first_unit, Accumulate mode,
                                                const float* factors) {
    constexpr int kDimPairs = 2 * kUnits;
    const std::int64_t weights_stride = panels.count * kPanelGroups * kUnit;
    float* tile = outputs + first_unit * 8;
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
    for (std::int64_t panel = 0; panel < panels.count; ++panel) {
      const auto* values = reinterpret_cast<const std::uint8_t*>(panels.values[panel]) + first_unit * 16;
      for (int group = 0; group < kPanelGroups; ++group, values += 4 * head_size, weights += kUnit) {
        bfloat16x8_t rows[kRowPairs];
        for (int r = 0; r < kRowPairs; ++r) rows[r] = load_unit(weights + r * weights_stride);
        for (int u = 0; u < kUnits; ++u) {
          bfloat16x8_t first, second;
          Engine::Decoder::decode(values + 16 * u, first, second);
          for (int r = 0; r < kRowPairs; ++r) {
            sums[r][2 * u] = vbfmmlaq_f32(sums[r][2 * u], rows[r], first);
            sums[r][2 * u + 1] = vbfmmlaq_f32(sums[r][2 * u + 1], rows[r], second);
          }
        }
      }
    }
    for (int r = 0; r < kRowPairs; ++r) {
      for (int d = 0; d < kDimPairs; ++d) vst1q_f32(tile + r * 2 * head_size + 4 * d, sums[r][d]);
    }
  }
};

template <typename Engine>
void run_fp8_items(const PagedAttentionArguments& arguments, const WorkItem* items, std::int64_t count, char* scratch) {
  ItemRunner<Fp8RegisterEngine<Engine>> in_registers(arguments, scratch);
  ItemRunner<Fp8WidenedEngine<Engine>> widened(arguments, scratch);
  for (std::int64_t i = 0; i < count; ++i) {
    if (items[i].row_end - items[i].row_begin <= kMaximumGroupRows) {
      in_registers.run(items[i]);
    } else {
      widened.run(items[i]);
    }
  }
}

}  // namespace
}  // namespace vllm_arm
