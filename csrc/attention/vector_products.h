// SPDX-License-Identifier: Apache-2.0
// The products of attention by FMLA: queries times keys, and weights times values. kRows, a template's parameter, is
// the rows in work together; all sums of a tile stay in registers.
//   keys, values        [16 tokens][head_size] in a panel
//   queries             [head_size / 4][kRows][4]
//   logits              [kRows][keys]
//   weights             [keys / 4] of kRows vectors, see WeightOrder
//   outputs             [kRows][head_size]
#pragma once

#include <arm_neon.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "attention/item_runner.h"
#include "attention/vector_formats.h"

namespace vllm_arm {
namespace {

// Calls body(0) to body(kCount - 1), with constants.
template <int kCount, typename Body>
[[gnu::always_inline]] inline void unroll(Body body) {
  [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, kIndices>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

inline float32x4_t add_pairs(float32x4_t a, float32x4_t b) { return vpaddq_f32(a, b); }

// Logits of kRows rows and kTokens tokens that follow each other in a panel.
template <typename Stored, int kRows>
struct ScoresTile {
  // Tokens are as many as leave registers for the elements, which are widened once for all rows.
  static constexpr int kTokens = kRows < 4 ? 8 : kRows == 6 && sizeof(Stored) == 1 ? 2 : 4;
  static constexpr int kStep = kRows < 6 ? 8 : Format<Stored>::kStep;
  static constexpr int kVectors = kStep / 4;
  // One row has too few sums to hide the latency of FMLA: it gets one for each vector of a step.
  static constexpr int kSplit = kRows == 1 ? kVectors : 1;

  static void run(float* logits, std::int64_t stride, const float* query, const Stored* keys, std::int64_t head_size) {
    float32x4_t sums[kSplit][kRows][kTokens];
    unroll<kSplit>([&](auto split) {
      unroll<kRows>([&](auto row) { unroll<kTokens>([&](auto token) { sums[split][row][token] = vdupq_n_f32(0); }); });
    });
    const Stored* end = keys + head_size;
    for (; keys != end; keys += kStep, query += kStep * kRows) {
      if constexpr (kRows < 4) {
        float32x4_t factors[kVectors][kRows];
        unroll<kVectors>([&](auto vector) {
          unroll<kRows>([&](auto row) { factors[vector][row] = vld1q_f32(query + 4 * (vector * kRows + row)); });
        });
        unroll<kTokens>([&](auto token) {
          float32x4_t key[kVectors];
          Format<Stored>::load(keys + token * head_size, key);
          unroll<kVectors>([&](auto vector) {
            unroll<kRows>([&](auto row) {
              float32x4_t& sum = sums[vector % kSplit][row][token];
              sum = vfmaq_f32(sum, factors[vector][row], key[vector]);
            });
          });
        });
      } else {
        float32x4_t key[kTokens][kVectors];
        unroll<kTokens>([&](auto token) { Format<Stored>::load(keys + token * head_size, key[token]); });
        unroll<kVectors>([&](auto vector) {
          unroll<kRows>([&](auto row) {
            const float32x4_t factor = vld1q_f32(query + 4 * (vector * kRows + row));
            unroll<kTokens>(
                [&](auto token) { sums[0][row][token] = vfmaq_f32(sums[0][row][token], factor, key[token][vector]); });
          });
        });
      }
    }
    if constexpr (kSplit == 2) {
      unroll<kTokens>([&](auto token) { sums[0][0][token] = vaddq_f32(sums[0][0][token], sums[1][0][token]); });
    }
    if constexpr (kTokens == 2) {
      unroll<kRows / 2>([&](auto pair) {
        constexpr int kRow = 2 * pair;
        const float32x4_t both = add_pairs(add_pairs(sums[0][kRow][0], sums[0][kRow][1]),
                                           add_pairs(sums[0][kRow + 1][0], sums[0][kRow + 1][1]));
        vst1_f32(logits + kRow * stride, vget_low_f32(both));
        vst1_f32(logits + (kRow + 1) * stride, vget_high_f32(both));
      });
    } else {
      unroll<kRows>([&](auto row) {
        unroll<kTokens / 4>([&](auto four) {
          const float32x4_t* sum = &sums[0][row][4 * four];
          vst1q_f32(logits + row * stride + 4 * four, add_pairs(add_pairs(sum[0], sum[1]), add_pairs(sum[2], sum[3])));
        });
      });
    }
  }
};

template <typename Stored, int kRows>
[[gnu::noinline]] void compute_scores(float* logits, const float* query, const Panels& panels, std::int64_t head_size) {
  using Tile = ScoresTile<Stored, kRows>;
  const std::int64_t stride = panels.count * kPanelTokens;
  for (std::int64_t panel = 0; panel < panels.count; ++panel) {
    const auto* keys = reinterpret_cast<const Stored*>(panels.keys[panel]);
    for (std::int64_t token = 0; token < kPanelTokens; token += Tile::kTokens) {
      Tile::run(logits + panel * kPanelTokens + token, stride, query, keys + token * head_size, head_size);
    }
  }
}

// Weights of four keys are kRows vectors. Up to four rows, each vector is a row. Six rows: vector k is rows 0 to 3 of
// key k, and the last two are [row 4, row 5] of two keys each, so that few registers hold what a key needs.
template <int kRows>
struct WeightOrder {
  static constexpr int vector(int row, int key) { return kRows < 6 ? row : row < 4 ? key : 4 + key / 2; }
  static constexpr int lane(int row, int key) { return kRows < 6 ? key : row < 4 ? row : key % 2 * 2 + row - 4; }

  static void store(float* destination, const float32x4_t (&rows)[kRows]) {
    if constexpr (kRows < 6) {
      unroll<kRows>([&](auto row) { vst1q_f32(destination + 4 * row, rows[row]); });
    } else {
      float64x2_t low[3], high[3];  // [two rows] of keys 0 and 1, and of keys 2 and 3
      unroll<3>([&](auto pair) {
        low[pair] = vreinterpretq_f64_f32(vzip1q_f32(rows[2 * pair], rows[2 * pair + 1]));
        high[pair] = vreinterpretq_f64_f32(vzip2q_f32(rows[2 * pair], rows[2 * pair + 1]));
      });
      const auto put = [&](int vector, float64x2_t value) {
        vst1q_f32(destination + 4 * vector, vreinterpretq_f32_f64(value));
      };
      put(0, vzip1q_f64(low[0], low[1]));
      put(1, vzip2q_f64(low[0], low[1]));
      put(2, vzip1q_f64(high[0], high[1]));
      put(3, vzip2q_f64(high[0], high[1]));
      put(4, low[2]);
      put(5, high[2]);
    }
  }
};

// The sums of weights times values of some columns of a few panels, added to the outputs.
template <typename Stored, int kRows, int kColumns>
struct OutputTile {
  static constexpr int kVectors = kColumns / 4;
  // Columns whose values are in registers at a time: six rows leave few.
  static constexpr int kPart = kRows == 6 ? 8 : 16;
  using Order = WeightOrder<kRows>;

  static void run(float* outputs, const float* weights, const Panels& panels, std::int64_t column,
                  std::int64_t head_size, float scale, Accumulate mode, const float* factors) {
    float32x4_t sums[kRows][kVectors];
    unroll<kRows>([&](auto row) { unroll<kVectors>([&](auto vector) { sums[row][vector] = vdupq_n_f32(0); }); });
    for (std::int64_t panel = 0; panel < panels.count; ++panel) {
      const auto* values = reinterpret_cast<const Stored*>(panels.values[panel]) + column;
      for (int four = 0; four < kPanelTokens / 4; ++four, weights += 4 * kRows) {
        unroll<4>([&](auto key) {
          float32x4_t factor[kRows];
          unroll<kRows>([&](auto row) { factor[row] = vld1q_f32(weights + 4 * Order::vector(row, key)); });
          unroll<kColumns / kPart>([&](auto part) {
            float32x4_t value[kPart / 4];
            Format<Stored>::load(values + kPart * part, value);
            unroll<kRows>([&](auto row) {
              unroll<kPart / 4>([&](auto vector) {
                float32x4_t& sum = sums[row][kPart / 4 * part + vector];
                sum = vfmaq_laneq_f32(sum, value[vector], factor[row], Order::lane(row, key));
              });
            });
          });
          values += head_size;
        });
      }
    }
    unroll<kRows>([&](auto row) {
      float* output = outputs + row * head_size + column;
      unroll<kVectors>([&](auto vector) {
        const float32x4_t sum = sums[row][vector];
        float* four = output + 4 * vector;
        switch (mode) {
          case Accumulate::first: return vst1q_f32(four, vmulq_n_f32(sum, scale));
          case Accumulate::keep: return vst1q_f32(four, vfmaq_n_f32(vld1q_f32(four), sum, scale));
          case Accumulate::rescale:
            return vst1q_f32(four, vfmaq_n_f32(vmulq_n_f32(vld1q_f32(four), factors[row]), sum, scale));
        }
      });
    });
  }
};

template <typename Stored, int kRows>
[[gnu::noinline]] void add_products(float* outputs, const float* weights, const Panels& panels, std::int64_t head_size,
                                    float scale, Accumulate mode, const float* factors) {
  // Values are read once for each tile of columns, so these should stay in the first-level cache.
  constexpr std::int64_t kBlockElements = 32 * 1024 / sizeof(Stored);
  const std::int64_t block = std::max<std::int64_t>(1, kBlockElements / (kPanelTokens * head_size));
  for (std::int64_t first = 0; first < panels.count; first += block) {
    const Panels some = panels.from(first, std::min(block, panels.count - first));
    const float* some_weights = weights + first * kPanelTokens * kRows;
    std::int64_t column = 0;
    const auto take = [&]<int kColumns>() {
      for (; column + kColumns <= head_size; column += kColumns) {
        OutputTile<Stored, kRows, kColumns>::run(outputs, some_weights, some, column, head_size, scale, mode, factors);
      }
    };
    if constexpr (kRows == 1) take.template operator()<64>();
    if constexpr (kRows <= 2) take.template operator()<32>();
    take.template operator()<16>();
    mode = Accumulate::keep;
  }
}

}  // namespace
}  // namespace vllm_arm
