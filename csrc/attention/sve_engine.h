// SPDX-License-Identifier: Apache-2.0
// Attention's arithmetic in bf16 by SVE, for any vector of 1, 2 or 4 units of 16 bytes. Orders are those of
// matrix_engine.h except the keys': a vector holds as many pairs of keys as it has units, at the same four dimensions,
//   keys of a panel     [8 / units][head_size / 4][units] of [2 keys][4 dims]
// so that a product of a pair of rows, repeated in each unit, and a vector of keys is contiguous in the logits. Keys 0
// and 2 of each group of four are a pair of one vector, 1 and 3 that of the next: rounding two vectors of fp32 to one
// of bf16, whose elements then take turns, gives weights in the order of the keys.
#pragma once

#include <arm_sve.h>

#include <array>
#include <utility>

#include "attention/matrix_engine.h"
#include "attention/sve_key_order.h"

namespace vllm_arm {
namespace {

constexpr std::int64_t kMaximumUnits = 4;

// Units of a vector, or 0 if it has a length that the engine does not know.
inline std::int64_t vector_units() {
  const std::int64_t units = svcntd() / 2;
  return units == 1 || units == 2 || units == 4 ? units : 0;
}

// A constant that stays in its register throughout a loop: the compiler does not see that it could make it again.
inline svfloat32_t in_register(float value) {
  svfloat32_t result = svdup_f32(value);
  asm("" : "+w"(result));
  return result;
}

// 2^(x + kExponentOffset) to 4e-5 of its value; x is at most about 0, and less than -126 counts as -126. NaN stays.
// FEXPA looks up 2^(i / 64) and takes the exponent n. For the rest r of x, at most 1/128, 2^r is c + r over c but for
// r's square where c is 1 / ln(2); c is rounded to a multiple of 1/64, and left out of the offset.
constexpr float kLinearOffset = 1.4375F;
constexpr float kExponentOffset = 0.52356195605701F;  // the logarithm of kLinearOffset in base 2

inline svfloat32_t exp2_lookup(svbool_t all, svfloat32_t x) {
  // Adding this leaves the nearest multiple of 1/64 in the lowest bits: i, and above it n with its bias.
  constexpr float kShift = 0x1.803f8p17F;
  x = svmax_x(all, x, in_register(-126));
  const svfloat32_t shifted = svadd_x(all, x, in_register(kShift));
  const svfloat32_t linear = svsub_x(all, x, svsub_x(all, shifted, in_register(kShift + kLinearOffset)));
  return svmul_x(all, svexpa(svreinterpret_u32(shifted)), linear);
}

// Of vectors of 1, 2 and 4 units: where each element of a row is when two vectors of pairs of dimensions take turns, in
// each half of the row.
constexpr auto kOutputOrders = [] {
  std::array<std::array<std::uint16_t, 8 * kMaximumUnits>, 3> orders{};
  for (std::size_t i = 0; i < orders.size(); ++i) {
    const int dims = 2 << i;  // of a vector
    for (int element = 0; element < 4 * dims; ++element) {
      const int in_vector = element % dims, vector = element / dims;
      orders[i][element] = static_cast<std::uint16_t>(vector / 2 * 2 * dims + 2 * in_vector + vector % 2);
    }
  }
  return orders;
}();

// What `join` makes of the units of a vector in memory.
template <typename Join>
inline float32x4_t join_units(const float* lanes, Join join) {
  float32x4_t result = vld1q_f32(lanes);
  for (std::int64_t unit = 1; unit < vector_units(); ++unit) result = join(result, vld1q_f32(lanes + 4 * unit));
  return result;
}

// A pair of rows, the same for each unit of a vector.
inline svbfloat16_t load_rows(const bfloat16_t* source) { return svld1rq(svptrue_b16(), source); }

// SVE's types have no size for the compiler, so that there are no arrays of them: the sums of a tile are function
// parameters, for each pair of rows a pack.
template <std::size_t>
using Sum = svfloat32_t;

// kRowPairs pairs of rows against a vector for each of kVector. Sums of absent rows are unused.
template <int kRowPairs, typename Vectors>
struct SveTile;

template <int kRowPairs, std::size_t... kVector>
struct SveTile<kRowPairs, std::index_sequence<kVector...>> {
  static constexpr std::int64_t kVectors = sizeof...(kVector);

  // Products of rows with all dimensions of the keys at `keys`, and the largest of each row in `maxima`, a vector each.
  [[gnu::always_inline]] static inline void scores(float* logits, std::int64_t logits_stride, float* maxima,
                                                   const bfloat16_t* query, std::int64_t head_size,
                                                   const bfloat16_t* const* keys) {
    scores(logits, logits_stride, maxima, query, head_size, keys, zero<kVector>()..., zero<kVector>()...,
           zero<kVector>()..., zero<kVector>()...);
  }

  // Adds products of weights with the dimensions of values that begin at pair `first_pair`.
  [[gnu::always_inline]] static inline void accumulate(float* outputs, const bfloat16_t* weights, const Panels& panels,
                                                       std::int64_t head_size, std::int64_t first_pair, Accumulate mode,
                                                       const float* factors, const FinalRows* final) {
    float* tile = outputs + first_pair * 4;
    const std::int64_t stride = 2 * head_size;
    const svbool_t present = mode == Accumulate::first ? svpfalse() : svptrue_b32();
    accumulate(tile, weights, panels, head_size, first_pair, mode, factors, final,
               load<0, kVector>(present, tile, stride)..., load<1, kVector>(present, tile, stride)...,
               load<2, kVector>(present, tile, stride)..., load<3, kVector>(present, tile, stride)...);
  }

 private:
  template <std::size_t>
  static svfloat32_t zero() {
    return svdup_f32(0);
  }

  template <int kRowPair, std::size_t kIndex>
  static svfloat32_t load(svbool_t present, const float* tile, std::int64_t stride) {
    if constexpr (kRowPair >= kRowPairs) return svdup_f32(0);
    return svld1(present, tile + kRowPair * stride + kIndex * svcntw());
  }

  [[gnu::always_inline]] static inline void multiply(svfloat32_t& sum0, svfloat32_t& sum1, svfloat32_t& sum2,
                                                     svfloat32_t& sum3, svbfloat16_t rows0, svbfloat16_t rows1,
                                                     svbfloat16_t rows2, svbfloat16_t rows3, svbfloat16_t vector) {
    sum0 = svbfmmla(sum0, rows0, vector);
    if constexpr (kRowPairs > 1) sum1 = svbfmmla(sum1, rows1, vector);
    if constexpr (kRowPairs > 2) sum2 = svbfmmla(sum2, rows2, vector);
    if constexpr (kRowPairs > 3) sum3 = svbfmmla(sum3, rows3, vector);
  }

  // Rows `kRowPair`, or any that are loaded already if absent.
  template <int kRowPair>
  [[gnu::always_inline]] static inline svbfloat16_t rows_of(const bfloat16_t* rows, std::int64_t stride) {
    return load_rows(rows + (kRowPair < kRowPairs ? kRowPair : 0) * stride);
  }

  template <int kRowPair>
  [[gnu::always_inline]] static inline void store(float* destination, std::int64_t stride, Sum<kVector>... sums) {
    if constexpr (kRowPair < kRowPairs) {
      float* row = destination + kRowPair * stride;
      (svst1(svptrue_b32(), row + kVector * svcntw(), sums), ...);
    }
  }

  // Two vectors of sums as bf16, in the order that kOutputOrders undoes.
  static svuint64_t rounded(svfloat32_t first, svfloat32_t second, svfloat32_t factors) {
    const svbool_t all = svptrue_b32();
    const svbfloat16_t even = svcvt_bf16_x(all, svmul_x(all, first, factors));
    return svreinterpret_u64(svcvtnt_bf16_x(even, all, svmul_x(all, second, factors)));
  }

  // Final sums of a pair of rows, from dimension `dim` on, times their factors, as the output.
  template <int kRowPair, typename... Rest>
  [[gnu::always_inline]] static inline void finish(const FinalRows& final, std::int64_t dim, svfloat32_t a,
                                                   svfloat32_t b, svfloat32_t c, svfloat32_t d, Rest... rest) {
    if constexpr (kRowPair < kRowPairs) {
      const svfloat32_t factors = final_factors<kRowPair>(final);
      const svuint64_t low = rounded(a, b, factors), high = rounded(c, d, factors);
      write<kRowPair>(final, dim, svptrue_b16(), svuzp1(low, high), svuzp2(low, high));
      if constexpr (sizeof...(rest) > 0) finish<kRowPair>(final, dim + svcnth(), rest...);
    }
  }

  template <int kRowPair>
  [[gnu::always_inline]] static inline void finish(const FinalRows& final, std::int64_t dim, svfloat32_t a,
                                                   svfloat32_t b) {
    if constexpr (kRowPair < kRowPairs) {
      const svuint64_t both = rounded(a, b, final_factors<kRowPair>(final));
      write<kRowPair>(final, dim, svwhilelt_b16(std::uint64_t{0}, svcnth() / 2), svuzp1(both, both),
                      svuzp2(both, both));
    }
  }

  template <int kRowPair>
  static svfloat32_t final_factors(const FinalRows& final) {
    const float first = final.factors[2 * kRowPair], second = final.factors[2 * kRowPair + 1];
    return svdupq_f32(first, first, second, second);
  }

  template <int kRowPair>
  static void write(const FinalRows& final, std::int64_t dim, svbool_t present, svuint64_t first, svuint64_t second) {
    const svuint16_t order = svld1(svptrue_b16(), kOutputOrders[vector_units() / 2].data());
    svst1(present, final.rows[2 * kRowPair] + dim, svtbl(svreinterpret_u16(first), order));
    svst1(present, final.rows[2 * kRowPair + 1] + dim, svtbl(svreinterpret_u16(second), order));
  }

  template <int kRowPair>
  [[gnu::always_inline]] static inline void keep_largest(float* maxima, Sum<kVector>... sums) {
    if constexpr (kRowPair < kRowPairs) {
      const svbool_t all = svptrue_b32();
      float* row = maxima + kRowPair * svcntw();
      svfloat32_t largest = svld1(all, row);
      ((largest = svmax_x(all, largest, sums)), ...);
      svst1(all, row, largest);
    }
  }

  template <int kRowPair>
  [[gnu::always_inline]] static inline void rescale(const float* factors, svfloat32_t& sum) {
    if constexpr (kRowPair < kRowPairs) {
      const float first = factors[2 * kRowPair], second = factors[2 * kRowPair + 1];
      sum = svmul_x(svptrue_b32(), sum, svdupq_f32(first, first, second, second));
    }
  }

  [[gnu::always_inline]] static inline void scores(float* logits, std::int64_t logits_stride, float* maxima,
                                                   const bfloat16_t* query, std::int64_t head_size,
                                                   const bfloat16_t* const* keys, Sum<kVector>... sums0,
                                                   Sum<kVector>... sums1, Sum<kVector>... sums2,
                                                   Sum<kVector>... sums3) {
    const svbool_t all = svptrue_b16();
    const std::int64_t stride = 2 * head_size, step = svcnth();
    std::int64_t i = 0, in_keys = 0;
    do {
      const svbfloat16_t rows0 = rows_of<0>(query + i, stride), rows1 = rows_of<1>(query + i, stride);
      const svbfloat16_t rows2 = rows_of<2>(query + i, stride), rows3 = rows_of<3>(query + i, stride);
      (multiply(sums0, sums1, sums2, sums3, rows0, rows1, rows2, rows3, svld1(all, keys[kVector] + in_keys)), ...);
      i += kUnit;
      in_keys += step;
    } while (i < stride);
    store<0>(logits, logits_stride, sums0...);
    store<1>(logits, logits_stride, sums1...);
    store<2>(logits, logits_stride, sums2...);
    store<3>(logits, logits_stride, sums3...);
    keep_largest<0>(maxima, sums0...);
    keep_largest<1>(maxima, sums1...);
    keep_largest<2>(maxima, sums2...);
    keep_largest<3>(maxima, sums3...);
  }

  // Weights of four keys times their values.
  [[gnu::always_inline]] static inline void add_group(const bfloat16_t* weights, std::int64_t stride,
                                                      const bfloat16_t* values, Sum<kVector>&... sums0,
                                                      Sum<kVector>&... sums1, Sum<kVector>&... sums2,
                                                      Sum<kVector>&... sums3) {
    const svbool_t all = svptrue_b16();
    const svbfloat16_t rows0 = rows_of<0>(weights, stride), rows1 = rows_of<1>(weights, stride);
    const svbfloat16_t rows2 = rows_of<2>(weights, stride), rows3 = rows_of<3>(weights, stride);
    (multiply(sums0, sums1, sums2, sums3, rows0, rows1, rows2, rows3, svld1_vnum(all, values, kVector)), ...);
  }

  [[gnu::always_inline]] static inline void accumulate(float* tile, const bfloat16_t* weights, const Panels& panels,
                                                       std::int64_t head_size, std::int64_t first_pair, Accumulate mode,
                                                       const float* factors, const FinalRows* final,
                                                       Sum<kVector>... sums0, Sum<kVector>... sums1,
                                                       Sum<kVector>... sums2, Sum<kVector>... sums3) {
    if (mode == Accumulate::rescale) {
      (rescale<0>(factors, sums0), ...);
      (rescale<1>(factors, sums1), ...);
      (rescale<2>(factors, sums2), ...);
      (rescale<3>(factors, sums3), ...);
    }
    const std::int64_t stride = panels.count * kPanelGroups * kUnit, group_elements = 4 * head_size;
    std::int64_t groups = panels.seen_groups();
    for (std::int64_t panel = 0; groups > 0; ++panel) {
      const bfloat16_t* values = reinterpret_cast<const bfloat16_t*>(panels.values[panel]) + first_pair * kUnit;
      if (groups >= kPanelGroups) {
        for (int group = 0; group < kPanelGroups; ++group, values += group_elements, weights += kUnit) {
          add_group(weights, stride, values, sums0..., sums1..., sums2..., sums3...);
        }
        groups -= kPanelGroups;
        continue;
      }
#pragma GCC unroll 1
      for (; groups > 0; --groups, values += group_elements, weights += kUnit) {
        add_group(weights, stride, values, sums0..., sums1..., sums2..., sums3...);
      }
    }
    if (final != nullptr) {
      finish<0>(*final, 2 * first_pair, sums0...);
      finish<1>(*final, 2 * first_pair, sums1...);
      finish<2>(*final, 2 * first_pair, sums2...);
      finish<3>(*final, 2 * first_pair, sums3...);
      return;
    }
    store<0>(tile, 2 * head_size, sums0...);
    store<1>(tile, 2 * head_size, sums1...);
    store<2>(tile, 2 * head_size, sums2...);
    store<3>(tile, 2 * head_size, sums3...);
  }
};

template <int kRowPairs, int kVectors>
using SveTileOf = SveTile<kRowPairs, std::make_index_sequence<kVectors>>;

struct SveEngine : MatrixEngine {
  static float& logit(float* logits, std::int64_t row, std::int64_t key, std::int64_t panels) {
    const std::int64_t pair =
        key / kPanelTokens * kPanelPairs + sve_pair(key % kPanelTokens, static_cast<int>(vector_units() / 2));
    return logits[(row / 2 * panels * kPanelPairs + pair) * 4 + row % 2 * 2 + key % 4 / 2];
  }

  static void pack_query(char* destination, const char* const* sources, std::int64_t rows, std::int64_t head_size) {
    auto* packed = reinterpret_cast<bfloat16_t*>(destination);
    const auto step = static_cast<std::int64_t>(svcnth());
    const svbool_t all = svptrue_b16();
    for (std::int64_t row = 0; row < rows; row += 2, packed += 2 * head_size) {
      const bool has_second = row + 1 < rows;
      const auto* first = reinterpret_cast<const bfloat16_t*>(sources[row]);
      const auto* second = reinterpret_cast<const bfloat16_t*>(sources[has_second ? row + 1 : row]);
      const svbool_t both = has_second ? all : svpfalse();
      std::int64_t i = 0;
      for (; i + step <= head_size; i += step) {
        const svuint64_t a = svreinterpret_u64(svld1(all, first + i));
        const svuint64_t b = svreinterpret_u64(svld1(both, second + i));
        svst1(all, packed + 2 * i, svreinterpret_bf16(svzip1(a, b)));
        svst1(all, packed + 2 * i + step, svreinterpret_bf16(svzip2(a, b)));
      }
      // Half a vector, as head sizes are multiples of 16.
      if (i == head_size) continue;
      const svbool_t within = svwhilelt_b16(i, head_size);
      const svuint64_t a = svreinterpret_u64(svld1(within, first + i));
      const svuint64_t b = svreinterpret_u64(svld1(svand_z(all, within, both), second + i));
      svst1(all, packed + 2 * i, svreinterpret_bf16(svzip1(a, b)));
    }
  }

  static void scores(float* logits, float* largest, const char* packed_query, std::int64_t rows, const Panels& panels,
                     const KvCache& cache) {
    const auto* query = reinterpret_cast<const bfloat16_t*>(packed_query);
    float maxima[kMaximumGroupRows / 2 * kMaximumUnits * 4];
    std::fill(std::begin(maxima), std::end(maxima), -kInfinity);
    const auto scores_of_pairs = [&]<int kRowPairs>() {
      switch (vector_units()) {
        case 1: return scores_of<kRowPairs, 1>(logits, maxima, query, panels, cache.head_size);
        case 2: return scores_of<kRowPairs, 2>(logits, maxima, query, panels, cache.head_size);
        default: return scores_of<kRowPairs, 4>(logits, maxima, query, panels, cache.head_size);
      }
    };
    switch ((rows + 1) / 2) {
      case 1: scores_of_pairs.template operator()<1>(); break;
      case 2: scores_of_pairs.template operator()<2>(); break;
      case 3: scores_of_pairs.template operator()<3>(); break;
      default: scores_of_pairs.template operator()<4>(); break;
    }
    float32x4_t units[kMaximumGroupRows / 2];
    for (std::int64_t pair = 0; 2 * pair < rows; ++pair) {
      units[pair] = join_units(maxima + pair * svcntw(), [](float32x4_t a, float32x4_t b) { return vmaxq_f32(a, b); });
    }
    store_maxima(largest, units, rows);
  }

  static void weights(char* destination, float* sums, const float* logits, std::int64_t rows, const Panels& panels,
                      float scale, const float* subtracted) {
    auto* result = reinterpret_cast<bfloat16_t*>(destination);
    const svbool_t all = svptrue_b32();
    const svfloat32_t factor = svdup_f32(scale);
    const svbfloat16_t ones = svdup_bf16(vcvth_bf16_f32(1.0F));
    const auto lanes = static_cast<std::int64_t>(svcntw());
    const std::int64_t row_elements = panels.count * kPanelGroups * kUnit, seen = panels.seen_groups() * kUnit;
    for (std::int64_t row = 0; row < rows; row += 2) {
      float pair[4];
      vst1q_f32(pair, vaddq_f32(pair_of(subtracted + row), vdupq_n_f32(kExponentOffset)));
      const svfloat32_t maximum = svld1rq(all, pair);
      svfloat32_t sum = svdup_f32(0);
      for (std::int64_t i = 0; i < seen; i += 2 * lanes) {
        const svfloat32_t first = exp2_lookup(all, svnmls_x(all, maximum, svld1(all, logits + i), factor));
        const svfloat32_t second = exp2_lookup(all, svnmls_x(all, maximum, svld1(all, logits + i + lanes), factor));
        const svbfloat16_t rounded = svcvtnt_bf16_x(svcvt_bf16_x(all, first), all, second);
        sum = svbfmmla(sum, rounded, ones);
        svst1(svptrue_b16(), result + i, rounded);
      }
      logits += row_elements;
      result += row_elements;
      float units[kMaximumUnits * 4];
      svst1(all, units, sum);
      const float32x4_t both = join_units(units, [](float32x4_t a, float32x4_t b) { return vaddq_f32(a, b); });
      sums[row] = vgetq_lane_f32(both, 0);
      sums[row + 1] = vgetq_lane_f32(both, 2);
    }
  }

  static void accumulate(float* outputs, const char* packed_weights, std::int64_t rows, const Panels& panels,
                         const KvCache& cache, Accumulate mode, const float* factors, const FinalRows* final) {
    const auto* weights = reinterpret_cast<const bfloat16_t*>(packed_weights);
    switch ((rows + 1) / 2) {
      case 1: return accumulate_of<1>(outputs, weights, panels, cache.head_size, mode, factors, final);
      case 2: return accumulate_of<2>(outputs, weights, panels, cache.head_size, mode, factors, final);
      case 3: return accumulate_of<3>(outputs, weights, panels, cache.head_size, mode, factors, final);
      default: return accumulate_of<4>(outputs, weights, panels, cache.head_size, mode, factors, final);
    }
  }

 private:
  // Vectors of keys or values in work together: as many as leave registers for the operands, and enough to hide
  // latency.
  static constexpr int tile_vectors(int row_pairs) { return row_pairs == 1 ? 16 : row_pairs == 4 ? 4 : 8; }

  // The vectors of keys of all panels that are seen, or somewhat more, numbered one after another.
  template <int kRowPairs, int kUnits>
  [[gnu::noinline]] static void scores_of(float* logits, float* maxima, const bfloat16_t* query, const Panels& panels,
                                          std::int64_t head_size) {
    constexpr int kPanelVectors = kPanelPairs / kUnits;
    const std::int64_t vector_elements = head_size / 4 * svcnth();
    const std::int64_t logits_stride = panels.count * kPanelVectors * svcntw();
    constexpr int kFewest = std::min(kPanelVectors, 4);
    const std::int64_t seen = 2 * ((panels.seen_groups() + kUnits - 1) / kUnits);
    const std::int64_t count = (seen + kFewest - 1) / kFewest * kFewest;
    std::int64_t first = 0;
    const auto take = [&]<int kVectors>() {
      for (; first + kVectors <= count; first += kVectors) {
        const std::int64_t in_panel = kVectors < kPanelVectors ? first % kPanelVectors : 0;
        const bfloat16_t* keys[kVectors];
        for (int i = 0; i < kVectors; ++i) {
          keys[i] = reinterpret_cast<const bfloat16_t*>(panels.keys[first / kPanelVectors + i / kPanelVectors]) +
                    (in_panel + i % kPanelVectors) * vector_elements;
        }
        SveTileOf<kRowPairs, kVectors>::scores(logits + first * svcntw(), logits_stride, maxima, query, head_size,
                                               keys);
      }
    };
    take.template operator()<tile_vectors(kRowPairs)>();
    if constexpr (tile_vectors(kRowPairs) > kPanelVectors) take.template operator()<kPanelVectors>();
    if constexpr (std::min(tile_vectors(kRowPairs), kPanelVectors) > kFewest) take.template operator()<kFewest>();
  }

  template <int kRowPairs>
  [[gnu::noinline]] static void accumulate_of(float* outputs, const bfloat16_t* weights, const Panels& panels,
                                              std::int64_t head_size, Accumulate mode, const float* factors,
                                              const FinalRows* final) {
    const std::int64_t units = vector_units(), count = head_size / 2 / units;
    std::int64_t first = 0;
    const auto take = [&]<int kVectors>() {
      for (; first + kVectors <= count; first += kVectors) {
        SveTileOf<kRowPairs, kVectors>::accumulate(outputs, weights, panels, head_size, first * units, mode, factors,
                                                   final);
      }
    };
    take.template operator()<tile_vectors(kRowPairs)>();
    if constexpr (tile_vectors(kRowPairs) > 4) take.template operator()<4>();
    take.template operator()<2>();
  }
};

}  // namespace
}  // namespace vllm_arm
