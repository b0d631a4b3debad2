// SPDX-License-Identifier: Apache-2.0
// Attention on an fp8 cache by BFMMLA: what is stored, as in fp8_code.h, becomes bf16 in registers where few rows share
// it, and in scratch memory, once for a tile of keys, where many do. A stored unit of 16 bytes makes two units of
// matrix_engine.h, of its even and of its odd bytes:
//   keys of a panel     [8 pairs of keys][head_size / 8] of [2 keys][8 dims: 0 4 1 5 2 6 3 7]
//   values of a panel   [2 groups of keys][head_size / 2] of [2 dims][8 keys: 0 4 1 5 2 6 3 7]
//   all else            as in matrix_engine.h
#pragma once

#include "attention/fp8_code.h"
#include "attention/matrix_engine.h"

namespace vllm_arm {
namespace {

template <typename Stored>
class Fp8Decoder {
 public:
  Fp8Decoder() {
    constexpr const Fp8Tables& tables = kFp8Tables<Stored>;
    high_ = {{vld1q_u8(tables.high.data()), vld1q_u8(tables.high.data() + 16)}};
    special_high_ = vld1q_u8(tables.special_high.data());
    special_low_ = vld1q_u8(tables.special_low.data());
  }

  void operator()(const std::uint8_t* unit, bfloat16x8_t& even, bfloat16x8_t& odd) const {
    const uint8x16_t codes = vld1q_u8(unit);
    uint8x16_t high = vqtbl2q_u8(high_, vshrq_n_u8(codes, 3));
    const uint8x16_t special = veorq_u8(high, codes);
    high = vqtbx1q_u8(high, special_high_, special);
    const uint8x16_t low = vqtbx1q_u8(vshlq_n_u8(codes, kFp8Shift<Stored>), special_low_, special);
    even = vreinterpretq_bf16_u8(vtrn1q_u8(low, high));
    odd = vreinterpretq_bf16_u8(vtrn2q_u8(low, high));
  }

 private:
  uint8x16x2_t high_;
  uint8x16_t special_high_, special_low_;
};

template <typename Stored>
struct Fp8Engine : MatrixEngine {
  static CacheScales scales(const KvCache& cache) { return {cache.key_scale, cache.value_scale}; }

  static void copy_values(char* destination, const char* panel, std::int64_t valid, std::int64_t head_size) {
    constexpr std::uint64_t kZeros = kFp8Inverted * 0x0101010101010101;
    for (std::int64_t group = 0; group < 2; ++group) {
      std::uint64_t mask = 0;
      for (std::int64_t key = 0; key < std::min<std::int64_t>(valid - 8 * group, 8); ++key) {
        mask |= std::uint64_t{0xff} << (8 * (key % 4 * 2 + key / 4));
      }
      const auto* source = reinterpret_cast<const std::uint64_t*>(panel) + group * head_size;
      auto* result = reinterpret_cast<std::uint64_t*>(destination) + group * head_size;
      for (std::int64_t i = 0; i < head_size; i += 2) {
        vst1q_u64(result + i, vbslq_u64(vdupq_n_u64(mask), vld1q_u64(source + i), vdupq_n_u64(kZeros)));
      }
    }
  }
};

// For items with many rows.
template <typename Stored>
struct Fp8WidenedEngine : Fp8Engine<Stored> {
  static constexpr std::int64_t kWideTileElements = kTileElements;

  static bool widens(std::int64_t) { return true; }

  // Both planes of a tile of keys as those of a bf16 cache.
  static void widen(char* destination, const char** keys, const char** values, std::int64_t count,
                    std::int64_t head_size) {
    const Fp8Decoder<Stored> decode;
    const std::int64_t bytes = kPanelTokens * head_size;
    for (std::int64_t panel = 0; panel < count; ++panel) {
      // A pair of keys: four dims after four dims. A group of values: all dims of four keys, then of the other four.
      widen_units(destination, keys[panel], bytes, 2 * kUnit, kUnit, decode);
      keys[panel] = destination;
      destination += 2 * bytes;
      widen_units(destination, values[panel], bytes / 2, kUnit, 4 * head_size, decode);
      widen_units(destination + bytes, values[panel] + bytes / 2, bytes / 2, kUnit, 4 * head_size, decode);
      values[panel] = destination;
      destination += 2 * bytes;
    }
  }

 private:
  // Of each stored unit the even bytes go `step` elements after those of the one before, and the odd ones `odd` after
  // the even ones.
  static void widen_units(char* destination, const char* stored, std::int64_t bytes, std::int64_t step,
                          std::int64_t odd, const Fp8Decoder<Stored>& decode) {
    auto* unit = reinterpret_cast<bfloat16_t*>(destination);
    for (std::int64_t i = 0; i < bytes; i += 16, unit += step) {
      bfloat16x8_t even_unit, odd_unit;
      decode(reinterpret_cast<const std::uint8_t*>(stored + i), even_unit, odd_unit);
      vst1q_bf16(unit, even_unit);
      vst1q_bf16(unit + odd, odd_unit);
    }
  }
};

// For items with one group of rows.
template <typename Stored>
struct Fp8RegisterEngine : Fp8Engine<Stored> {
  static void scores(float* logits, float* largest, const char* packed_query, std::int64_t rows, const Panels& panels,
                     const KvCache& cache) {
    const auto* query = reinterpret_cast<const bfloat16_t*>(packed_query);
    float32x4_t maxima[kMaximumGroupRows / 2];
    for (float32x4_t& maximum : maxima) maximum = vdupq_n_f32(-kInfinity);
    switch ((rows + 1) / 2) {
      case 1: scores_of<1, 8>(logits, maxima, query, panels, cache.head_size); break;
      case 2: scores_of<2, 4>(logits, maxima, query, panels, cache.head_size); break;
      case 3: scores_of<3, 4>(logits, maxima, query, panels, cache.head_size); break;
      default: scores_of<4, 4>(logits, maxima, query, panels, cache.head_size); break;
    }
    MatrixEngine::store_maxima(largest, maxima, rows);
  }

  static void accumulate(float* outputs, const char* packed_weights, std::int64_t rows, const Panels& panels,
                         const KvCache& cache, Accumulate mode, const float* factors) {
    const auto* weights = reinterpret_cast<const bfloat16_t*>(packed_weights);
    switch ((rows + 1) / 2) {
      case 1: return accumulate_of<1, 8>(outputs, weights, panels, cache.head_size, mode, factors);
      case 2: return accumulate_of<2, 4>(outputs, weights, panels, cache.head_size, mode, factors);
      case 3: return accumulate_of<3, 4>(outputs, weights, panels, cache.head_size, mode, factors);
      default: return accumulate_of<4, 4>(outputs, weights, panels, cache.head_size, mode, factors);
    }
  }

 private:
  template <int kRowPairs, int kKeyPairs>
  static void scores_of(float* logits, float32x4_t* maxima, const bfloat16_t* query, const Panels& panels,
                        std::int64_t head_size) {
    const Fp8Decoder<Stored> decode;
    const std::int64_t pair_elements = 2 * head_size;
    const std::int64_t logits_stride = panels.count * kPanelPairs * 4;
    for (std::int64_t pair = 0; pair < panels.count * kPanelPairs; pair += kKeyPairs) {
      const auto* keys =
          reinterpret_cast<const std::uint8_t*>(panels.keys[pair / kPanelPairs]) + pair % kPanelPairs * pair_elements;
      float32x4_t sums[kRowPairs][kKeyPairs];
      for (auto& row : sums) {
        for (float32x4_t& sum : row) sum = vdupq_n_f32(0);
      }
      for (std::int64_t i = 0; i < pair_elements; i += 2 * kUnit) {
        for (int k = 0; k < kKeyPairs; ++k) {
          bfloat16x8_t even, odd;
          decode(keys + k * pair_elements + i, even, odd);
          for (int r = 0; r < kRowPairs; ++r) {
            const bfloat16_t* row = query + r * pair_elements + i;
            sums[r][k] = vbfmmlaq_f32(sums[r][k], load_unit(row), even);
            sums[r][k] = vbfmmlaq_f32(sums[r][k], load_unit(row + kUnit), odd);
          }
        }
      }
      for (int r = 0; r < kRowPairs; ++r) {
        for (int k = 0; k < kKeyPairs; ++k) {
          vst1q_f32(logits + r * logits_stride + (pair + k) * 4, sums[r][k]);
          maxima[r] = vmaxq_f32(maxima[r], sums[r][k]);
        }
      }
    }
  }

  template <int kRowPairs, int kDimPairs>
  static void accumulate_of(float* outputs, const bfloat16_t* weights, const Panels& panels, std::int64_t head_size,
                            Accumulate mode, const float* factors) {
    const Fp8Decoder<Stored> decode;
    const std::int64_t weights_stride = panels.count * kPanelGroups * kUnit;
    for (std::int64_t pair = 0; pair < head_size / 2; pair += kDimPairs) {
      float* tile = outputs + pair * 4;
      float32x4_t sums[kRowPairs][kDimPairs];
      for (int r = 0; r < kRowPairs; ++r) {
        const float32x4_t factor = mode == Accumulate::rescale ? pair_of(factors + 2 * r) : vdupq_n_f32(1);
        for (int d = 0; d < kDimPairs; ++d) {
          sums[r][d] = mode == Accumulate::first ? vdupq_n_f32(0)
                                                 : vmulq_f32(vld1q_f32(tile + r * 2 * head_size + 4 * d), factor);
        }
      }
      const bfloat16_t* group_weights = weights;
      for (std::int64_t panel = 0; panel < panels.count; ++panel) {
        const auto* values = reinterpret_cast<const std::uint8_t*>(panels.values[panel]) + pair * 16;
#pragma GCC unroll 1
        for (int group = 0; group < 2; ++group, values += 8 * head_size, group_weights += 2 * kUnit) {
          for (int d = 0; d < kDimPairs; ++d) {
            bfloat16x8_t even, odd;
            decode(values + d * 16, even, odd);
            for (int r = 0; r < kRowPairs; ++r) {
              const bfloat16_t* row = group_weights + r * weights_stride;
              sums[r][d] = vbfmmlaq_f32(sums[r][d], load_unit(row), even);
              sums[r][d] = vbfmmlaq_f32(sums[r][d], load_unit(row + kUnit), odd);
            }
          }
        }
      }
      for (int r = 0; r < kRowPairs; ++r) {
        for (int d = 0; d < kDimPairs; ++d) vst1q_f32(tile + r * 2 * head_size + 4 * d, sums[r][d]);
      }
    }
  }
};

template <typename Stored>
void run_fp8_items(const PagedAttentionArguments& arguments, const WorkItem* items, std::int64_t count, char* scratch) {
  ItemRunner<Fp8RegisterEngine<Stored>> in_registers(arguments, scratch);
  ItemRunner<Fp8WidenedEngine<Stored>> widened(arguments, scratch);
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
