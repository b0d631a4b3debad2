// SPDX-License-Identifier: Apache-2.0
// Products of rows and panels by BFMMLA and SMMLA, which multiply 2 rows by 2 outputs over a run of 8 bytes of inputs:
// 4 of bf16, 8 of int8. One row alone is kept as it is, [k]; more are in pairs, the last one filled up with zeros.
#pragma once

#include "linear/panel_output.h"

namespace vllm_arm {
namespace {

constexpr std::int64_t kRunBytes = 8;
constexpr std::int64_t kStepBytes = kPanelOutputs * kRunBytes;  // of a panel, for one run
constexpr int kOutputPairs = kPanelOutputs / 2;

struct BFloat16Matrix {
  using Unit = bfloat16x8_t;
  using Sum = float32x4_t;
  static Unit load(const char* source) {
    return vreinterpretq_bf16_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(source)));
  }
  static Sum zero() { return vdupq_n_f32(0); }
  static Sum multiply_add(Sum sum, Unit rows, Unit outputs) { return vbfmmlaq_f32(sum, rows, outputs); }
  static Sum add(Sum a, Sum b) { return vaddq_f32(a, b); }
  // [2 rows][2 outputs] twice: the four outputs of one row.
  static Sum first_row(Sum a, Sum b) {
    return vreinterpretq_f32_f64(vzip1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
  }
  static Sum second_row(Sum a, Sum b) {
    return vreinterpretq_f32_f64(vzip2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
  }
};

struct Int8Matrix {
  using Unit = int8x16_t;
  using Sum = int32x4_t;
  static Unit load(const char* source) { return vld1q_s8(reinterpret_cast<const int8_t*>(source)); }
  static Sum zero() { return vdupq_n_s32(0); }
  static Sum multiply_add(Sum sum, Unit rows, Unit outputs) { return vmmlaq_s32(sum, rows, outputs); }
  static Sum add(Sum a, Sum b) { return vaddq_s32(a, b); }
  static Sum first_row(Sum a, Sum b) {
    return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
  }
  static Sum second_row(Sum a, Sum b) {
    return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
  }
};

// One row, by one panel or by two that follow each other, so that it is loaded less often: a vector of it is two runs,
// which go to the first and the second row of sums. Each is multiplied by its own step of the panel, and what its
// neighbour makes of that step is not looked at.
template <typename Matrix, int kPanels, typename Output>
[[gnu::noinline]] void row_by_matrix(const Output (&outputs)[kPanels], const char* row, const char* panels,
                                     std::int64_t steps, std::int64_t row_index) {
  using Sum = typename Matrix::Sum;
  Sum even[kPanels][kOutputPairs], odd[kPanels][kOutputPairs];
  unrolled<kPanels>([&](auto p) {
    for (int j = 0; j < kOutputPairs; ++j) even[p][j] = odd[p][j] = Matrix::zero();
  });
  const std::int64_t panel_bytes = steps * kStepBytes;
  for (std::int64_t step = 0; step < steps; step += 2, row += 2 * kRunBytes, panels += 2 * kStepBytes) {
    const auto inputs = Matrix::load(row);
    unrolled<kPanels>([&](auto p) {
      const char* panel = panels + p * panel_bytes;
      for (int j = 0; j < kOutputPairs; ++j) {
        even[p][j] = Matrix::multiply_add(even[p][j], inputs, Matrix::load(panel + 16 * j));
        odd[p][j] = Matrix::multiply_add(odd[p][j], inputs, Matrix::load(panel + kStepBytes + 16 * j));
      }
    });
  }
  unrolled<kPanels>([&](auto p) {
    Sum sums[kPanelVectors];
    for (int i = 0; i < kPanelVectors; ++i) {
      sums[i] = Matrix::add(Matrix::first_row(even[p][2 * i], even[p][2 * i + 1]),
                            Matrix::second_row(odd[p][2 * i], odd[p][2 * i + 1]));
    }
    typename Output::Buffer buffer;
    BlockOutput block(outputs[p], row_index, buffer);
    block.store(0, sums);
    block.finish(1);
  });
}

// Rows [row_begin, row_end) in blocks of kPairs pairs. Few pairs have two sets of sums, so that no product waits for
// the one before it.
template <typename Matrix, int kPairs, typename Output>
[[gnu::noinline]] void pairs_by_matrix(const Output& output, const char* rows, const char* panel_begin,
                                       std::int64_t steps, std::int64_t row_begin, std::int64_t row_end) {
  using Sum = typename Matrix::Sum;
  constexpr int kSets = kPairs <= 2 ? 2 : 1;
  for (std::int64_t row = row_begin; row < row_end; row += 2 * kPairs) {
    const char* panel = panel_begin;
    Sum sums[kSets][kPairs][kOutputPairs];
    for (auto& set : sums) {
      for (auto& pair : set) {
        for (Sum& sum : pair) sum = Matrix::zero();
      }
    }
    // padded_inputs() makes the number of steps even.
    for (std::int64_t step = 0; step < steps; step += 2) {
      for (int half = 0; half < 2; ++half, rows += 16 * kPairs, panel += kStepBytes) {
        typename Matrix::Unit inputs[kPairs];
        for (int i = 0; i < kPairs; ++i) inputs[i] = Matrix::load(rows + 16 * i);
        for (int j = 0; j < kOutputPairs; ++j) {
          const auto outputs = Matrix::load(panel + 16 * j);
          for (int i = 0; i < kPairs; ++i) {
            Sum& sum = sums[half % kSets][i][j];
            sum = Matrix::multiply_add(sum, inputs[i], outputs);
          }
        }
      }
    }
    typename Output::Buffer buffer;
    BlockOutput block(output, row, buffer);
    const std::int64_t count = std::min<std::int64_t>(2 * kPairs, row_end - row);
    unrolled<kPairs>([&](auto i) {
      Sum first[kPanelVectors], second[kPanelVectors];
      unrolled<kPanelVectors>([&](auto v) {
        Sum a = sums[0][i][2 * v], b = sums[0][i][2 * v + 1];
        if constexpr (kSets == 2) {
          a = Matrix::add(a, sums[1][i][2 * v]);
          b = Matrix::add(b, sums[1][i][2 * v + 1]);
        }
        first[v] = Matrix::first_row(a, b);
        second[v] = Matrix::second_row(a, b);
      });
      // Every pair but the last is whole. Where that is not, its first row is written over what the second came to.
      block.store(i + 1 < kPairs ? 2 * i + 1 : count - 1, second);
      block.store(2 * i, first);
    });
    block.finish(count);
  }
}

template <typename Matrix, typename Element>
void multiply_matrix(const PanelProduct& product, std::int64_t block_begin, std::int64_t block_end,
                     std::int64_t panel_begin, std::int64_t panel_end) {
  const std::int64_t row_bytes = padded_inputs(product.type, product.k) * element_bytes(product.type);
  const std::int64_t steps = row_bytes / kRunBytes;
  const std::int64_t begin = block_begin * kBlockRows, end = std::min(block_end * kBlockRows, product.row_count);
  const std::int64_t rest = (end - begin) % kBlockRows;
  const std::int64_t whole_end = rest == kBlockRows - 1 ? end : end - rest;
  const char* rows = product.rows + begin * row_bytes;
  const char* rest_rows = product.rows + whole_end * row_bytes;
  constexpr bool kIsInt8 = std::is_same_v<Matrix, Int8Matrix>;
  if (end - begin == 1) {
    const auto multiply_row = [&](const auto& outputs, const char* panels) {
      row_by_matrix<Matrix>(outputs, rows, panels, steps, begin);
    };
    const std::int64_t pairs_end = panel_end - (panel_end - panel_begin) % 2;
    for_each_panel<Element, kIsInt8, 2>(product, panel_begin, pairs_end, multiply_row);
    return for_each_panel<Element, kIsInt8, 1>(product, pairs_end, panel_end, multiply_row);
  }
  for_each_panel<Element, kIsInt8, 1>(product, panel_begin, panel_end, [&](const auto& outputs, const char* panel) {
    const auto& output = outputs[0];
    if (whole_end > begin) pairs_by_matrix<Matrix, 4>(output, rows, panel, steps, begin, whole_end);
    if (whole_end == end) return;
    if (rest == 1) return row_by_matrix<Matrix>(outputs, rest_rows, panel, steps, whole_end);
    switch ((rest + 1) / 2) {
      case 1: return pairs_by_matrix<Matrix, 1>(output, rest_rows, panel, steps, whole_end, end);
      case 2: return pairs_by_matrix<Matrix, 2>(output, rest_rows, panel, steps, whole_end, end);
      default: return pairs_by_matrix<Matrix, 3>(output, rest_rows, panel, steps, whole_end, end);
    }
  });
}

// The last, partial vector of a row of `bytes`, filled up with zeros.
inline uint64x2_t load_rest(const char* source, std::int64_t bytes) {
  std::uint64_t rest[2] = {};
  std::memcpy(rest, source, static_cast<std::size_t>(bytes));
  return vld1q_u64(rest);
}

inline uint64x2_t load_runs(const char* source) {
  return vreinterpretq_u64_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(source)));
}

inline void store_runs(char* destination, uint64x2_t runs) {
  vst1q_u8(reinterpret_cast<uint8_t*>(destination), vreinterpretq_u8_u64(runs));
}

// Packs a pair of rows of `bytes`, the second of which may be null, among `pairs`.
inline void pack_pair(const char* first, const char* second, std::int64_t bytes, std::int64_t pairs,
                      char* destination) {
  const auto store_both = [&](uint64x2_t a, uint64x2_t b) {
    store_runs(destination, vzip1q_u64(a, b));
    store_runs(destination + 16 * pairs, vzip2q_u64(a, b));
    destination += 2 * 16 * pairs;
  };
  const uint64x2_t zero = vdupq_n_u64(0);
  std::int64_t at = 0;
  for (; at + 16 <= bytes; at += 16) {
    store_both(load_runs(first + at), second != nullptr ? load_runs(second + at) : zero);
  }
  if (at == bytes) return;
  store_both(load_rest(first + at, bytes - at), second != nullptr ? load_rest(second + at, bytes - at) : zero);
}

inline void pack_matrix_rows(const PanelRows& arguments, std::int64_t block_begin, std::int64_t block_end) {
  const std::int64_t bytes = arguments.k * element_bytes(arguments.type);
  const std::int64_t padded = padded_inputs(arguments.type, arguments.k) * element_bytes(arguments.type);
  for (std::int64_t block = block_begin; block < block_end; ++block) {
    const std::int64_t row = block * kBlockRows;
    const std::int64_t count = std::min(kBlockRows, arguments.rows - row);
    const char* input = static_cast<const char*>(arguments.input) + row * bytes;
    char* packed = arguments.packed + row * padded;
    if (count == 1) {
      std::memcpy(packed, input, static_cast<std::size_t>(bytes));
      std::memset(packed + bytes, 0, static_cast<std::size_t>(padded - bytes));
      continue;
    }
    for (std::int64_t m = 0; m < count; m += 2) {
      pack_pair(input + m * bytes, m + 1 < count ? input + (m + 1) * bytes : nullptr, bytes, (count + 1) / 2,
                packed + 8 * m);
    }
  }
}

}  // namespace
}  // namespace vllm_arm
