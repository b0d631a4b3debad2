// SPDX-License-Identifier: Apache-2.0
#include "linear/linear_int4_row.h"
#include "linear/linear_int4_table.h"

namespace vllm_arm {
namespace {

// For each row, four outputs and four more.
template <int kRows>
struct Sums {
  int32x4_t halves[kRows][2];
};

// Four inputs of each of four outputs, and the four inputs that follow; of both halves of a panel.
struct Weights {
  int8x16_t halves[2][2];
};

Weights load_weights(const std::int8_t* codes) {
  Weights weights;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const int32x4_t first = vreinterpretq_s32_s8(vld1q_s8(codes + half * 32));
    const int32x4_t second = vreinterpretq_s32_s8(vld1q_s8(codes + half * 32 + 16));
    weights.halves[half][0] = vreinterpretq_s8_s32(vuzp1q_s32(first, second));
    weights.halves[half][1] = vreinterpretq_s8_s32(vuzp2q_s32(first, second));
  }
  return weights;
}

template <typename Operation>
Weights each(const Weights& weights, Operation operation) {
  const auto& from = weights.halves;
  return {{{operation(from[0][0]), operation(from[0][1])}, {operation(from[1][0]), operation(from[1][1])}}};
}

// Adds the products of eight inputs of kRows rows.
template <int kRows>
void add_products(Sums<kRows>& sums, const std::int8_t* activations, std::int64_t block_bytes, const Weights& weights) {
#pragma GCC unroll 4
  for (int row = 0; row < kRows; row += 2) {
    const int8x16_t two = vld1q_s8(activations + row / 4 * block_bytes + row % 4 * kInterleave);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const auto& [low, high] = weights.halves[half];
      int32x4_t& sum = sums.halves[row][half];
      sum = vdotq_laneq_s32(vdotq_laneq_s32(sum, low, two, 0), high, two, 1);
      if constexpr (kRows > 1) {
        if (row + 1 == kRows) continue;
        int32x4_t& next = sums.halves[row + 1][half];
        next = vdotq_laneq_s32(vdotq_laneq_s32(next, low, two, 2), high, two, 3);
      }
    }
  }
}

// The products of kRows rows and a panel over `size` inputs: times 16 with groups, else without the rows' corrections.
template <bool kHasGroups, int kRows>
Sums<kRows> multiply_codes(const std::int8_t* activations, std::int64_t block_bytes, const std::int8_t* codes,
                           std::int64_t size) {
  constexpr std::int64_t kChunk = kInterleavedRows * kInterleave;
  const int8x16_t half = vdupq_n_s8(static_cast<std::int8_t>(kHasGroups ? 0xf0 : 0x0f));
  Sums<kRows> sums;
  for (auto& row : sums.halves) row[0] = row[1] = vdupq_n_s32(0);
  for (std::int64_t i = 0; i < size; i += kInt4Block) {
#pragma GCC unroll 2
    for (int segment = 0; segment < 2; ++segment) {
      const Weights packed = load_weights(codes + segment * kPanelBlockBytes / 2);
      if constexpr (kHasGroups) {
        add_products(sums, activations + segment * kChunk, block_bytes,
                     each(packed, [](int8x16_t pairs) { return vshlq_n_s8(pairs, 4); }));
        add_products(sums, activations + (segment + 2) * kChunk, block_bytes,
                     each(packed, [&](int8x16_t pairs) { return vandq_s8(pairs, half); }));
      } else {
        add_products(sums, activations + 2 * segment * kChunk, block_bytes,
                     each(packed, [&](int8x16_t pairs) { return vandq_s8(pairs, half); }));
        add_products(sums, activations + (2 * segment + 1) * kChunk, block_bytes,
                     each(packed, [](int8x16_t pairs) { return vshrq_n_s8(pairs, 4); }));
      }
    }
    activations += 4 * kChunk;
    codes += kPanelBlockBytes;
  }
  return sums;
}

template <int kRows>
void multiply_whole(const Tile& tile, std::int64_t row_begin, std::int64_t output) {
  const Int4Shape& shape = tile.shape;
  const std::byte* panel = tile.panel(output);
  const auto sums =
      multiply_codes<false, kRows>(reinterpret_cast<const std::int8_t*>(tile.block(row_begin)), tile.block_bytes,
                                   reinterpret_cast<const std::int8_t*>(panel), shape.k);
  const auto* code_sums = reinterpret_cast<const std::int32_t*>(panel + shape.code_bytes());
  const auto* scales = reinterpret_cast<const float*>(code_sums + kInt4PanelRows);
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    const std::int32_t zero_point = tile.negated_zero_points(row_begin + row)[row % 4];
    const float scale = tile.scales(row_begin + row)[row % 4];
    const int32x4_t correction = vdupq_n_s32(tile.corrections(row_begin + row)[row % 4]);
    float* values = tile.values + (row_begin + row) * tile.outputs + output;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int32x4_t products = vaddq_s32(sums.halves[row][half], correction);
      const int32x4_t sum = vmlaq_n_s32(products, vld1q_s32(code_sums + 4 * half), zero_point);
      vst1q_f32(values + 4 * half, vmulq_f32(vmulq_n_f32(vcvtq_f32_s32(sum), scale), vld1q_f32(scales + 4 * half)));
    }
  }
}

template <int kRows>
void multiply_groups(const Tile& tile, std::int64_t row_begin, std::int64_t output) {
  const Int4Shape& shape = tile.shape;
  const std::byte* panel = tile.panel(output);
  const auto* activations = reinterpret_cast<const std::int8_t*>(tile.block(row_begin));
  float32x4_t scaled[kRows][2];
  for (auto& row : scaled) row[0] = row[1] = vdupq_n_f32(0);
  for (std::int64_t group = 0; group < shape.groups(); ++group) {
    const auto sums = multiply_codes<true, kRows>(activations, tile.block_bytes,
                                                  reinterpret_cast<const std::int8_t*>(panel), shape.group_size);
    const Float8 scales = load(reinterpret_cast<const BFloat16*>(panel + shape.code_bytes()));
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      // The sums are those of 16 * code.
      scaled[row][0] = vfmaq_f32(scaled[row][0], vcvtq_n_f32_s32(sums.halves[row][0], 4), scales.low);
      scaled[row][1] = vfmaq_f32(scaled[row][1], vcvtq_n_f32_s32(sums.halves[row][1], 4), scales.high);
    }
    activations += shape.group_size * kInterleavedRows;
    panel += shape.group_bytes();
  }
  const Float8 code_sums = load(reinterpret_cast<const float*>(panel));
  for (int row = 0; row < kRows; ++row) {
    const auto zero_point = static_cast<float>(tile.negated_zero_points(row_begin + row)[row % 4]);
    const float scale = tile.scales(row_begin + row)[row % 4];
    store(tile.values + (row_begin + row) * tile.outputs + output,
          Float8{vmulq_n_f32(vfmaq_n_f32(scaled[row][0], code_sums.low, zero_point), scale),
                 vmulq_n_f32(vfmaq_n_f32(scaled[row][1], code_sums.high, zero_point), scale)});
  }
}

// By SDOT: for as many rows at a time as leave their sums in registers.
void multiply_rows_by_dot_product(const Tile& tile) {
  constexpr void (*kWhole[])(const Tile&, std::int64_t, std::int64_t) = {
      multiply_whole<1>, multiply_whole<2>, multiply_whole<3>, multiply_whole<4>, multiply_whole<8>};
  constexpr void (*kGroups[])(const Tile&, std::int64_t, std::int64_t) = {multiply_groups<1>, multiply_groups<2>,
                                                                          multiply_groups<3>, multiply_groups<4>};
  const bool has_groups = tile.shape.has_groups();
  for (std::int64_t row = 0; row < tile.rows;) {
    const std::int64_t left = tile.rows - row;
    const std::int64_t rows = left >= 8 && !has_groups ? 8 : std::min<std::int64_t>(left, 4);
    const auto run = has_groups ? kGroups[rows - 1] : kWhole[std::min<std::int64_t>(rows, 5) - 1];
    for (std::int64_t output = 0; output < tile.outputs; output += kInt4PanelRows) run(tile, row, output);
    row += rows;
  }
}

// The products of a single row with a panel: sums of two outputs, for four inputs and four more of each.
void multiply_row_codes(const std::int8_t* activations, const std::int8_t* codes, std::int64_t k,
                        std::int32_t correction, std::int32_t* sums) {
  const int8x16_t low_half = vdupq_n_s8(0x0f);
  int32x4_t pairs[4];
#pragma GCC unroll 4
  for (auto& pair : pairs) pair = vdupq_n_s32(0);
  for (std::int64_t i = 0; i < k; i += 16, codes += kPanelBlockBytes / 2) {
    const int64x2_t both = vreinterpretq_s64_s8(vld1q_s8(activations + i));
    const int8x16_t low_inputs = vreinterpretq_s8_s64(vdupq_laneq_s64(both, 0));
    const int8x16_t high_inputs = vreinterpretq_s8_s64(vdupq_laneq_s64(both, 1));
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int8x16_t packed = vld1q_s8(codes + j * 16);
      pairs[j] = vdotq_s32(pairs[j], vandq_s8(packed, low_half), low_inputs);
      pairs[j] = vdotq_s32(pairs[j], vshrq_n_s8(packed, 4), high_inputs);
    }
  }
  const int32x4_t added = vdupq_n_s32(correction);
  vst1q_s32(sums, vaddq_s32(vpaddq_s32(pairs[0], pairs[1]), added));
  vst1q_s32(sums + 4, vaddq_s32(vpaddq_s32(pairs[2], pairs[3]), added));
}

void multiply(const LinearInt4Arguments& arguments, std::int64_t block_begin, std::int64_t block_end,
              std::int64_t panel_begin, std::int64_t panel_end) {
  if (arguments.rows == 1) return multiply_row(arguments, panel_begin, panel_end, multiply_row_codes);
  multiply_tiles(arguments, block_begin, block_end, panel_begin, panel_end, multiply_rows_by_dot_product);
}

}  // namespace

const LinearInt4Kernel linear_int4_neon{block_rows, quantise, multiply};

}  // namespace vllm_arm
