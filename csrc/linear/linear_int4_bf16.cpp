// SPDX-License-Identifier: Apache-2.0
#include <iterator>

#include "linear/linear_int4_table.h"
#include "linear/linear_int4_tiles.h"

namespace vllm_arm {
namespace {

constexpr std::int64_t kHalfPanel = 4;  // outputs that are computed together

// 2 x 2 products each: of pairs of rows and pairs of outputs.
template <int kBlocks>
struct Sums {
  int32x4_t pairs[2 * kBlocks][2];
};

// The products of 4 * kBlocks rows and four outputs over `size` inputs, times 16.
template <int kBlocks>
Sums<kBlocks> multiply_codes(const std::int8_t* activations, std::int64_t block_bytes, const std::int8_t* codes,
                             std::int64_t size) {
  Sums<kBlocks> sums;
  for (auto& pair : sums.pairs) pair[0] = pair[1] = vdupq_n_s32(0);
  const int8x16_t high_half = vdupq_n_s8(static_cast<std::int8_t>(0xf0));
  const auto add = [&](const std::int8_t* rows, int8x16_t first, int8x16_t second) {
#pragma GCC unroll 8
    for (int pair = 0; pair < 2 * kBlocks; ++pair) {
      const int8x16_t two_rows = vld1q_s8(rows + pair / 2 * block_bytes + pair % 2 * 16);
      sums.pairs[pair][0] = vmmlaq_s32(sums.pairs[pair][0], two_rows, first);
      sums.pairs[pair][1] = vmmlaq_s32(sums.pairs[pair][1], two_rows, second);
    }
  };
  constexpr std::int64_t kChunk = kInterleavedRows * kInterleave;
  for (std::int64_t i = 0; i < size; i += kInt4Block) {
#pragma GCC unroll 2
    for (int segment = 0; segment < 2; ++segment) {
      const int8x16_t first = vld1q_s8(codes + segment * kPanelBlockBytes / 2);
      const int8x16_t second = vld1q_s8(codes + segment * kPanelBlockBytes / 2 + 16);
      add(activations + segment * kChunk, vshlq_n_s8(first, 4), vshlq_n_s8(second, 4));
      add(activations + (segment + 2) * kChunk, vandq_s8(first, high_half), vandq_s8(second, high_half));
    }
    activations += 4 * kChunk;
    codes += kPanelBlockBytes;
  }
  return sums;
}

// Row `row` of 4 * kBlocks, from the pairs.
template <int kBlocks>
int32x4_t row_of(const int32x4_t (&pairs)[2 * kBlocks][2], int row) {
  const int64x2_t first = vreinterpretq_s64_s32(pairs[row / 2][0]);
  const int64x2_t second = vreinterpretq_s64_s32(pairs[row / 2][1]);
  return vreinterpretq_s32_s64(row % 2 == 0 ? vuzp1q_s64(first, second) : vuzp2q_s64(first, second));
}

// Four outputs of 4 * kBlocks rows.
template <int kBlocks>
struct HalfPanel {
  const Tile& tile;
  std::int64_t block_bytes;
  const std::int8_t* activations;
  const std::byte* panel;
  const std::int8_t* codes;  // of the first of the four outputs
  const std::byte* trailer;  // what follows the groups, of the first of the four outputs
  float* values;

  HalfPanel(const Tile& of, std::int64_t row, std::int64_t output)
      : tile(of),
        block_bytes(of.block_bytes),
        activations(reinterpret_cast<const std::int8_t*>(of.block(row))),
        panel(of.panel(output)),
        codes(reinterpret_cast<const std::int8_t*>(panel) + output % kInt4PanelRows * kInterleave),
        trailer(panel + of.shape.groups() * of.shape.group_bytes() + output % kInt4PanelRows * 4),
        values(of.values + row * of.outputs + output) {}

  // finish(row of 4 * kBlocks, its number in a block, negated zero points, scales) gives the outputs of a row.
  template <typename Finish>
  void write(Finish finish) const {
    float* row_values = values;
    const auto* numbers = reinterpret_cast<const std::int32_t*>(activations + kInterleavedRows * tile.shape.k);
#pragma GCC unroll 4
    for (int block = 0; block < kBlocks; ++block) {
      const int32x4_t zero_points = vld1q_s32(numbers);
      const float32x4_t scales = vld1q_f32(reinterpret_cast<const float*>(numbers + kInterleavedRows));
      const int row = block * kInterleavedRows;
      vst1q_f32(row_values, finish.template operator()<0>(row, zero_points, scales));
      vst1q_f32(row_values + tile.outputs, finish.template operator()<1>(row + 1, zero_points, scales));
      vst1q_f32(row_values + 2 * tile.outputs, finish.template operator()<2>(row + 2, zero_points, scales));
      vst1q_f32(row_values + 3 * tile.outputs, finish.template operator()<3>(row + 3, zero_points, scales));
      row_values += kInterleavedRows * tile.outputs;
      numbers += block_bytes / 4;
    }
  }

  // With one scale for each output.
  void multiply_whole() const {
    const auto sums = multiply_codes<kBlocks>(activations, block_bytes, codes, tile.shape.k);
    const int32x4_t code_sums = vld1q_s32(reinterpret_cast<const std::int32_t*>(trailer));
    const float32x4_t output_scales = vld1q_f32(reinterpret_cast<const float*>(trailer) + kInt4PanelRows);
    write([&]<int kLane>(int row, int32x4_t zero_points, float32x4_t scales) {
      const int32x4_t sum = vmlaq_laneq_s32(row_of<kBlocks>(sums.pairs, row), code_sums, zero_points, kLane);
      return vmulq_f32(vmulq_laneq_f32(vcvtq_f32_s32(sum), scales, kLane), output_scales);
    });
  }

  // With scales for groups, which are applied to the pairs.
  void multiply_groups() const {
    const Int4Shape& shape = tile.shape;
    float32x4_t scaled[2 * kBlocks][2];
    for (auto& pair : scaled) pair[0] = pair[1] = vdupq_n_f32(0);
    const std::int8_t *group_activations = activations, *group_codes = codes;
    const std::byte* group_scales =
        panel + shape.code_bytes() + (codes - reinterpret_cast<const std::int8_t*>(panel)) / 4;
    for (std::int64_t group = 0; group < shape.groups(); ++group) {
      const auto sums = multiply_codes<kBlocks>(group_activations, block_bytes, group_codes, shape.group_size);
      const uint16x4_t stored = vld1_u16(reinterpret_cast<const std::uint16_t*>(group_scales));
      const uint64x2_t two_pairs = vreinterpretq_u64_u32(vshll_n_u16(stored, 16));
      const float32x4_t first = vreinterpretq_f32_u64(vdupq_laneq_u64(two_pairs, 0));
      const float32x4_t second = vreinterpretq_f32_u64(vdupq_laneq_u64(two_pairs, 1));
#pragma GCC unroll 8
      for (int pair = 0; pair < 2 * kBlocks; ++pair) {
        // The sums are those of 16 * code.
        scaled[pair][0] = vfmaq_f32(scaled[pair][0], vcvtq_n_f32_s32(sums.pairs[pair][0], 4), first);
        scaled[pair][1] = vfmaq_f32(scaled[pair][1], vcvtq_n_f32_s32(sums.pairs[pair][1], 4), second);
      }
      group_activations += shape.group_size * kInterleavedRows;
      group_codes += shape.group_bytes();
      group_scales += shape.group_bytes();
    }
    const float32x4_t code_sums = vld1q_f32(reinterpret_cast<const float*>(trailer));
    int32x4_t bits[2 * kBlocks][2];
    for (int pair = 0; pair < 2 * kBlocks; ++pair) {
      for (int i = 0; i < 2; ++i) bits[pair][i] = vreinterpretq_s32_f32(scaled[pair][i]);
    }
    write([&]<int kLane>(int row, int32x4_t zero_points, float32x4_t scales) {
      const float32x4_t sum = vreinterpretq_f32_s32(row_of<kBlocks>(bits, row));
      return vmulq_laneq_f32(vfmaq_laneq_f32(sum, code_sums, vcvtq_f32_s32(zero_points), kLane), scales, kLane);
    });
  }
};

template <int kBlocks>
void multiply_whole(const Tile& tile, std::int64_t row) {
  for (std::int64_t output = 0; output < tile.outputs; output += kHalfPanel) {
    HalfPanel<kBlocks>(tile, row, output).multiply_whole();
  }
}

template <int kBlocks>
void multiply_groups(const Tile& tile, std::int64_t row) {
  for (std::int64_t output = 0; output < tile.outputs; output += kHalfPanel) {
    HalfPanel<kBlocks>(tile, row, output).multiply_groups();
  }
}

// By SMMLA: for as many rows at a time as leave their sums in registers.
void multiply_by_matrix_product(const Tile& tile) {
  constexpr void (*kWhole[])(const Tile&, std::int64_t) = {multiply_whole<1>, multiply_whole<2>, multiply_whole<3>,
                                                           multiply_whole<4>};
  constexpr void (*kGroups[])(const Tile&, std::int64_t) = {multiply_groups<1>, multiply_groups<2>};
  const std::int64_t most = tile.shape.has_groups() ? std::size(kGroups) : std::size(kWhole);
  for (std::int64_t row = 0; row < tile.rows;) {
    const std::int64_t blocks = std::min(most, (tile.rows - row + kInterleavedRows - 1) / kInterleavedRows);
    (tile.shape.has_groups() ? kGroups : kWhole)[blocks - 1](tile, row);
    row += blocks * kInterleavedRows;
  }
}

// A single row and one scale for each output. A register holds two chunks of eight inputs as if they were two rows:
// each is multiplied with the codes of both, and the half that means something is taken at the end.
void multiply_whole_row(const Tile& tile) {
  const std::int64_t k = tile.shape.k;
  const auto* numbers = reinterpret_cast<const std::int32_t*>(tile.activations + k);
  const float scale = reinterpret_cast<const float*>(numbers)[1];
  const int8x16_t high_half = vdupq_n_s8(static_cast<std::int8_t>(0xf0));
  for (std::int64_t output = 0; output < tile.outputs; output += kInt4PanelRows) {
    const auto* activations = reinterpret_cast<const std::int8_t*>(tile.activations);
    const auto* codes = reinterpret_cast<const std::int8_t*>(tile.panel(output));
    int32x4_t even[4], odd[4];  // chunks; pairs of outputs
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) even[i] = odd[i] = vdupq_n_s32(0);
    for (std::int64_t j = 0; j < k; j += kInt4Block) {
      const int8x16_t low_inputs = vld1q_s8(activations + j), high_inputs = vld1q_s8(activations + j + 16);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int8x16_t first = vld1q_s8(codes + i * 16);
        const int8x16_t second = vld1q_s8(codes + kPanelBlockBytes / 2 + i * 16);
        even[i] = vmmlaq_s32(even[i], low_inputs, vshlq_n_s8(first, 4));
        odd[i] = vmmlaq_s32(odd[i], low_inputs, vshlq_n_s8(second, 4));
        even[i] = vmmlaq_s32(even[i], high_inputs, vandq_s8(first, high_half));
        odd[i] = vmmlaq_s32(odd[i], high_inputs, vandq_s8(second, high_half));
      }
      codes += kPanelBlockBytes;
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const auto as_pairs = [](int32x4_t sum) { return vreinterpretq_s64_s32(sum); };
      const int64x2_t of_even = vuzp1q_s64(as_pairs(even[2 * half]), as_pairs(even[2 * half + 1]));
      const int64x2_t of_odd = vuzp2q_s64(as_pairs(odd[2 * half]), as_pairs(odd[2 * half + 1]));
      const int32x4_t sum = vaddq_s32(vreinterpretq_s32_s64(of_even), vreinterpretq_s32_s64(of_odd));
      vst1q_f32(tile.values + output + 4 * half, vreinterpretq_f32_s32(sum));
    }
  }

  const std::byte* trailer = tile.panels + tile.shape.code_bytes();
  for (std::int64_t output = 0; output < tile.outputs; output += kInt4PanelRows, trailer += tile.panel_bytes) {
    const auto* code_sums = reinterpret_cast<const std::int32_t*>(trailer);
    const auto* scales = reinterpret_cast<const float*>(code_sums + kInt4PanelRows);
    float* values = tile.values + output;
#pragma GCC unroll 2
    for (int half = 0; half < 8; half += 4) {
      const int32x4_t products = vreinterpretq_s32_f32(vld1q_f32(values + half));
      const int32x4_t sum = vmlaq_n_s32(products, vld1q_s32(code_sums + half), *numbers);
      vst1q_f32(values + half, vmulq_f32(vmulq_n_f32(vcvtq_f32_s32(sum), scale), vld1q_f32(scales + half)));
    }
  }
}

void multiply_row(const Tile& tile) {
  if (tile.shape.has_groups()) {
    multiply_row_by_kleidiai(tile);
  } else {
    multiply_whole_row(tile);
  }
}

void multiply(const LinearInt4Arguments& arguments, std::int64_t block_begin, std::int64_t block_end,
              std::int64_t panel_begin, std::int64_t panel_end) {
  multiply_tiles(arguments, block_begin, block_end, panel_begin, panel_end, multiply_row, multiply_by_matrix_product);
}

}  // namespace

const LinearInt4Kernel linear_int4_bf16{block_rows, quantise, multiply};

}  // namespace vllm_arm
