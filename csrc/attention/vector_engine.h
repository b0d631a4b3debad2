// SPDX-License-Identifier: Apache-2.0
// Attention's arithmetic by NEON in fp32, for any type of element: what a CPU without BFMMLA runs, and what others run
// for the types that BFMMLA does not take. Vectors are in the orders of vector_products.h.
#pragma once

#include <arm_neon.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention/item_runner.h"
#include "attention/neon_math.h"
#include "attention/vector_formats.h"
#include "attention/vector_products.h"

namespace vllm_arm {
namespace {

// Calls `use<kRows>()` with the number of rows that the products have a tile for; the last of them may be padding.
template <typename Use>
void with_tile_rows(std::int64_t rows, Use use) {
  if (rows > 4) return use.template operator()<6>();
  if (rows > 2) return use.template operator()<4>();
  if (rows > 1) return use.template operator()<2>();
  use.template operator()<1>();
}

template <typename Stored>
constexpr bool kIsFloat8 = std::is_same_v<Stored, Float8E4M3> || std::is_same_v<Stored, Float8E5M2>;

// What logits still lack: the scales of the cache, and NaN that was not loaded as such.
template <typename Stored>
void finish_scores(float* logits, std::int64_t rows, const Panels& panels, const KvCache& cache) {
  const std::int64_t keys = panels.count * kPanelTokens;
  if constexpr (std::is_same_v<Stored, Int8> || kIsFloat8<Stored>) {
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t key = 0; key < keys; key += 4) {
        const float32x4_t scale = std::is_same_v<Stored, Int8> ? vld1q_f32(panels.key_scales + key)
                                                               : vdupq_n_f32(kProductScale<Stored> * cache.key_scale);
        vst1q_f32(logits + row * keys + key, vmulq_f32(vld1q_f32(logits + row * keys + key), scale));
      }
    }
  }
  if constexpr (Format<Stored>::kMayHideNan) {
    if (panels.wide) return;
    for (std::int64_t key = 0; key < keys; ++key) {
      const auto* panel = reinterpret_cast<const Stored*>(panels.keys[key / kPanelTokens]);
      if (key % kPanelTokens == 0 && !has_nan(panel, kPanelTokens * cache.head_size)) {
        key += kPanelTokens - 1;
      } else if (has_nan(panel + key % kPanelTokens * cache.head_size, cache.head_size)) {
        for (std::int64_t row = 0; row < rows; ++row)
          logits[row * keys + key] = std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
}

// NaN among values that was not loaded as such.
template <typename Stored>
void show_nan(float* outputs, std::int64_t rows, const Panels& panels, std::int64_t head_size) {
  if (panels.wide) return;
  for (std::int64_t panel = 0; panel < panels.count; ++panel) {
    const auto* values = reinterpret_cast<const Stored*>(panels.values[panel]);
    if (!has_nan(values, kPanelTokens * head_size)) continue;
    for (std::int64_t i = 0; i < kPanelTokens * head_size; ++i) {
      const float value = to_float(values[i]);
      if (value == value) continue;
      for (std::int64_t row = 0; row < rows; ++row) outputs[row * head_size + i % head_size] = value;
    }
  }
}

template <typename ElementType, typename Stored>
struct VectorEngine {
  using Element = ElementType;

  static std::int64_t group_rows(std::int64_t rows) {
    if (rows <= 2) return rows;
    return rows <= 4 || rows == 7 || rows == 8 ? 4 : 6;
  }

  static void pack_query(char* destination, const char* const* sources, std::int64_t rows, std::int64_t head_size) {
    auto* query = reinterpret_cast<float*>(destination);
    with_tile_rows(rows, [&]<int kRows>() {
      for (std::int64_t row = 0; row < kRows; ++row) {
        const auto* source = reinterpret_cast<const Element*>(sources[std::min(row, rows - 1)]);
        for (std::int64_t i = 0; i < head_size; i += kLanes) {
          const Float8 values = load(source + i);
          float* vectors = query + i * kRows + 4 * row;
          vst1q_f32(vectors, vmulq_n_f32(values.low, kPrescale<Stored>));
          vst1q_f32(vectors + 4 * kRows, vmulq_n_f32(values.high, kPrescale<Stored>));
        }
      }
    });
  }

  static float& logit(float* logits, std::int64_t row, std::int64_t key, std::int64_t panels) {
    return logits[row * panels * kPanelTokens + key];
  }

  static void scores(float* logits, float* largest, const char* packed_query, std::int64_t rows, const Panels& panels,
                     const KvCache& cache) {
    const auto* query = reinterpret_cast<const float*>(packed_query);
    with_tile_rows(rows, [&]<int kRows>() {
      if (panels.wide) return compute_scores<float, kRows>(logits, query, panels, cache.head_size);
      compute_scores<Stored, kRows>(logits, query, panels, cache.head_size);
    });
    finish_scores<Stored>(logits, rows, panels, cache);
    maxima(largest, logits, rows, panels.count);
  }

  static void transform(float* logits, std::int64_t rows, std::int64_t panels, float scale, float softcap) {
    const float inner = softcap == 0 ? scale : scale / softcap;
    for (std::int64_t i = 0; i < rows * panels * kPanelTokens; i += 4) {
      const float32x4_t scaled = vmulq_n_f32(vld1q_f32(logits + i), inner);
      vst1q_f32(logits + i, softcap == 0 ? scaled : vmulq_n_f32(tanh(scaled), softcap));
    }
  }

  static void maxima(float* largest, const float* logits, std::int64_t rows, std::int64_t panels) {
    for (std::int64_t row = 0; row < rows; ++row) {
      const float* begin = logits + row * panels * kPanelTokens;
      float32x4_t maximum[4];
      for (int i = 0; i < 4; ++i) maximum[i] = vld1q_f32(begin + 4 * i);
      for (const float* panel = begin + kPanelTokens; panel != begin + panels * kPanelTokens; panel += kPanelTokens) {
        for (int i = 0; i < 4; ++i) maximum[i] = vmaxq_f32(maximum[i], vld1q_f32(panel + 4 * i));
      }
      largest[row] = vmaxvq_f32(vmaxq_f32(vmaxq_f32(maximum[0], maximum[1]), vmaxq_f32(maximum[2], maximum[3])));
    }
  }

  static void exp2(float (&values)[kMaximumGroupRows]) {
    for (std::int64_t i = 0; i < kMaximumGroupRows; i += 4) {
      vst1q_f32(values + i, exp2_accurate(vld1q_f32(values + i)));
    }
  }

  static void weights(char* destination, float* sums, const float* logits, std::int64_t rows, const Panels& panels,
                      float scale, const float* subtracted) {
    with_tile_rows(rows, [&]<int kRows>() {
      compute_weights<kRows>(reinterpret_cast<float*>(destination), sums, logits, panels, scale, subtracted);
    });
  }

  static void accumulate(float* outputs, const char* packed_weights, std::int64_t rows, const Panels& panels,
                         const KvCache& cache, Accumulate mode, const float* factors) {
    const auto* weights = reinterpret_cast<const float*>(packed_weights);
    const float scale = kIsFloat8<Stored> ? kProductScale<Stored> * cache.value_scale : 1.0F;
    with_tile_rows(rows, [&]<int kRows>() {
      if (panels.wide) {
        return add_products<float, kRows>(outputs, weights, panels, cache.head_size, scale, mode, factors);
      }
      add_products<Stored, kRows>(outputs, weights, panels, cache.head_size, scale, mode, factors);
    });
    if constexpr (Format<Stored>::kMayHideNan) show_nan<Stored>(outputs, rows, panels, cache.head_size);
  }

  // In fp32 as many bytes as others' in bf16.
  static constexpr std::int64_t kWideTileElements = kTileElements / 2;

  static bool widens(std::int64_t rows) { return !std::is_same_v<Stored, float> && rows > 2 * group_rows(rows); }

  static void widen(char* destination, const char** keys, const char** values, std::int64_t count,
                    std::int64_t head_size) {
    auto* wide = reinterpret_cast<float*>(destination);
    for (const char** panels : {keys, values}) {
      for (std::int64_t i = 0; i < count; ++i, wide += kPanelTokens * head_size) {
        widen_elements(wide, reinterpret_cast<const Stored*>(panels[i]), kPanelTokens * head_size);
        panels[i] = reinterpret_cast<const char*>(wide);
      }
    }
  }

  static void copy_values(char* destination, const char* panel, std::int64_t valid, std::int64_t head_size) {
    const std::int64_t token_bytes = head_size * sizeof(Stored);
    std::memcpy(destination, panel, valid * token_bytes);
    std::memset(destination + valid * token_bytes, 0, (kPanelTokens - valid) * token_bytes);
  }

  template <typename Destination>
  static void write_row(Destination* destination, const float* outputs, std::int64_t row, std::int64_t head_size,
                        float factor) {
    const float* output = outputs + row * head_size;
    for (std::int64_t i = 0; i < head_size; i += kLanes) {
      const Float8 values = load(output + i);
      store<true>(destination + i, {vmulq_n_f32(values.low, factor), vmulq_n_f32(values.high, factor)});
    }
  }

  // Stores a token of a panel.
  static void write_key(Stored* panel, std::int64_t token, const Element* key, std::int64_t head_size, float inverse) {
    store_elements(panel + token * head_size, key, head_size, inverse);
  }
  static void write_value(Stored* panel, std::int64_t token, const Element* value, std::int64_t head_size,
                          float inverse) {
    store_elements(panel + token * head_size, value, head_size, inverse);
  }

 private:
  template <int kRows>
  [[gnu::noinline]] static void compute_weights(float* destination, float* sums, const float* logits,
                                                const Panels& panels, float scale, const float* subtracted) {
    const std::int64_t keys = panels.count * kPanelTokens;
    float32x4_t row_sums[kRows];
    unroll<kRows>([&](auto row) { row_sums[row] = vdupq_n_f32(0); });
    for (std::int64_t key = 0; key < keys; key += 4, destination += 4 * kRows) {
      float32x4_t weight[kRows];
      unroll<kRows>([&](auto row) {
        const float32x4_t offset = vdupq_n_f32(-subtracted[row]);
        weight[row] = power_of_two(vfmaq_n_f32(offset, vld1q_f32(logits + row * keys + key), scale));
        row_sums[row] = vaddq_f32(row_sums[row], weight[row]);
        if constexpr (std::is_same_v<Stored, Int8>) {
          weight[row] = vmulq_f32(weight[row], vld1q_f32(panels.value_scales + key));
        } else if constexpr (kPrescale<Stored> != 1) {
          weight[row] = vmulq_n_f32(weight[row], kPrescale<Stored>);
        }
      });
      WeightOrder<kRows>::store(destination, weight);
    }
    unroll<kRows>([&](auto row) { sums[row] = vaddvq_f32(row_sums[row]); });
  }

  static float32x4_t power_of_two(float32x4_t x) {
    if constexpr (std::is_same_v<Element, float>) return exp2_accurate(x);
    return exp2_approximate(x);
  }
};

}  // namespace
}  // namespace vllm_arm
