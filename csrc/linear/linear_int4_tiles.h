// SPDX-License-Identifier: Apache-2.0
// What the variants of linear_int4 for Arm share: tiles in fp32, without bias and without the zero points of the
// weight, which follow with the output's type. A tile of one row is KleidiAI's where there are groups.
#pragma once

#include <kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi4c32p/kai_matmul_clamp_f32_qai8dxp1x8_qsi4c32p8x8_1x8x32_neon_dotprod.h>

#include <algorithm>
#include <limits>

#include "linear/linear_int4_rows.h"
#include "linear/quantise_neon_rows.h"

namespace vllm_arm {
namespace {

static_assert(kLanes == kInterleave && kLanes == kInt4PanelRows);

constexpr std::int64_t kInterleavedRows = 4;  // where there are several
constexpr std::int64_t kPanelBlockBytes = kInt4PanelRows * kInt4Block / 2;

std::int64_t block_rows(std::int64_t rows) { return rows == 1 ? 1 : kInterleavedRows; }

// From every second chunk of eight inputs, which meets low halves.
void find_corrections(const std::int8_t* codes, std::int64_t k, std::int64_t rows, std::int32_t* corrections) {
  const int8x16_t factors = vdupq_n_s8(-8);
  int32x4_t first = vdupq_n_s32(0), second = first;
  if (rows == 1) {
    // The chunk beside it meets high halves.
    const int8x16_t low_chunk = vcombine_s8(vdup_n_s8(-8), vdup_n_s8(0));
    for (std::int64_t i = 0; i < k; i += kInt4Block, codes += kInt4Block) {
      first = vdotq_s32(first, vld1q_s8(codes), low_chunk);
      second = vdotq_s32(second, vld1q_s8(codes + 16), low_chunk);
    }
    *corrections = vaddvq_s32(vaddq_s32(first, second));
    return;
  }
  for (std::int64_t i = 0; i < k; i += 2 * kInterleave, codes += 2 * kInterleavedRows * kInterleave) {
    first = vdotq_s32(first, vld1q_s8(codes), factors);
    second = vdotq_s32(second, vld1q_s8(codes + 16), factors);
  }
  vst1q_s32(corrections, vpaddq_s32(first, second));
}

void quantise(const LinearInt4Arguments& arguments, std::int64_t block_begin, std::int64_t block_end) {
  quantise_blocks(
      arguments, block_rows(arguments.rows), block_begin, block_end,
      [](const auto* input, std::int64_t size) { return find_range(input, size); },
      [](const auto* input, std::int64_t size, const Mapping& mapping, std::int8_t* codes, std::int64_t stride) {
        convert<true>(input, size, mapping, codes, stride);
      },
      find_corrections);
}

// `rows` quantised rows, from the first of a block, and `outputs`, a multiple of 8, of the weight.
struct Tile {
  const Int4Shape& shape;
  std::int64_t rows, outputs;
  std::int64_t block_bytes, panel_bytes;  // of interleaved rows, and of the weight
  const std::byte* activations;
  const std::byte* panels;
  float* values;  // [rows][outputs], with room for whole blocks of rows

  const std::byte* panel(std::int64_t output) const { return panels + output / kInt4PanelRows * panel_bytes; }
  // Where the codes of the block with `row` begin, of interleaved rows.
  const std::byte* block(std::int64_t row) const { return activations + row / kInterleavedRows * block_bytes; }
  // The negated zero points of the rows of the block with `row`, and their scales.
  const std::int32_t* negated_zero_points(std::int64_t row) const {
    return reinterpret_cast<const std::int32_t*>(block(row) + kInterleavedRows * shape.k);
  }
  const float* scales(std::int64_t row) const {
    return reinterpret_cast<const float*>(negated_zero_points(row) + kInterleavedRows);
  }
  // What is added to their sums where there are no groups.
  const std::int32_t* corrections(std::int64_t row) const { return negated_zero_points(row) + 2 * kInterleavedRows; }
};

// One row and a weight with groups, by KleidiAI.
void multiply_row_by_kleidiai(const Tile& tile) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();  // nothing is clamped
  const auto rows = static_cast<std::size_t>(tile.rows), outputs = static_cast<std::size_t>(tile.outputs);
  const auto k = static_cast<std::size_t>(tile.shape.k);
  kai_run_matmul_clamp_f32_qai8dxp1x8_qsi4c32p8x8_1x8x32_neon_dotprod(
      rows, outputs, k, static_cast<std::size_t>(tile.shape.group_size), tile.activations, tile.panels, tile.values,
      outputs * sizeof(float), sizeof(float), -kInfinity, kInfinity);
}

// values -= sum over groups of the row's sum * offset.
Float8 without_zero_points(Float8 values, const float* sums, const float* offsets, std::int64_t groups) {
  for (std::int64_t group = 0; group < groups; ++group, offsets += kInt4PanelRows) {
    values.low = vfmsq_n_f32(values.low, vld1q_f32(offsets), sums[group]);
    values.high = vfmsq_n_f32(values.high, vld1q_f32(offsets + 4), sums[group]);
  }
  return values;
}

template <typename Element>
void finish_row(const LinearInt4Arguments& arguments, std::int64_t row, std::int64_t panel_begin,
                std::int64_t panel_end, const float* values, const float* sums) {
  const Int4Shape& shape = arguments.shape;
  const std::int64_t groups = shape.groups(), whole_end = std::min(panel_end, shape.n / kInt4PanelRows);
  const auto* offsets = reinterpret_cast<const float*>(arguments.packed + shape.offsets_begin());
  const auto* bias = static_cast<const Element*>(arguments.bias);
  Element* output = static_cast<Element*>(arguments.output) + row * shape.n;
  const auto finish = [&](std::int64_t panel, const Element* eight_of_bias, Element* eight_of_output) {
    Float8 result = load(values + (panel - panel_begin) * kInt4PanelRows);
    if (sums != nullptr) result = without_zero_points(result, sums, offsets + panel * groups * kInt4PanelRows, groups);
    if (bias != nullptr) {
      const Float8 added = load(eight_of_bias);
      result = {vaddq_f32(result.low, added.low), vaddq_f32(result.high, added.high)};
    }
    store(eight_of_output, result);
  };
  std::int64_t panel = panel_begin;
  for (; panel < whole_end; ++panel) {
    const std::int64_t first = panel * kInt4PanelRows;
    finish(panel, bias == nullptr ? nullptr : bias + first, output + first);
  }
  if (panel < panel_end) {
    const std::int64_t first = panel * kInt4PanelRows;
    const auto bytes = static_cast<std::size_t>(shape.n - first) * sizeof(Element);
    Element bias_tail[kInt4PanelRows] = {}, output_tail[kInt4PanelRows];
    if (bias != nullptr) std::memcpy(bias_tail, bias + first, bytes);
    finish(panel, bias_tail, output_tail);
    std::memcpy(output + first, output_tail, bytes);
  }
}

// multiply_tile(tile) computes a tile: of one row, or of interleaved rows.
template <typename MultiplyTile>
void multiply_tiles(const LinearInt4Arguments& arguments, std::int64_t block_begin, std::int64_t block_end,
                    std::int64_t panel_begin, std::int64_t panel_end, MultiplyTile multiply_tile) {
  constexpr std::int64_t kTileRows = 32, kTileValues = 4096;
  alignas(64) float values[kTileValues];
  const Int4Shape& shape = arguments.shape;
  const std::int64_t interleaved = block_rows(arguments.rows), panel_bytes = shape.panel_bytes();
  const std::int64_t block_bytes = activation_block_bytes(shape, interleaved);
  const std::int64_t row_end = std::min(block_end * interleaved, arguments.rows);
  for (std::int64_t row = block_begin * interleaved; row < row_end; row += kTileRows) {
    const std::int64_t rows = std::min(kTileRows, row_end - row);
    const std::int64_t rows_of_blocks = (rows + interleaved - 1) / interleaved * interleaved;
    const std::int64_t panels_at_a_time = kTileValues / kInt4PanelRows / rows_of_blocks;
    const std::byte* activations = arguments.activations + row / interleaved * block_bytes;
    for (std::int64_t panel = panel_begin; panel < panel_end; panel += panels_at_a_time) {
      const std::int64_t last = std::min(panel + panels_at_a_time, panel_end);
      const std::int64_t outputs = (last - panel) * kInt4PanelRows;
      const Tile tile{
          shape, rows, outputs, block_bytes, panel_bytes, activations, arguments.packed + panel * panel_bytes, values};
      multiply_tile(tile);
      for (std::int64_t i = 0; i < rows; ++i) {
        const float* sums = shape.has_zero_points ? group_sums(arguments, interleaved, row + i) : nullptr;
        const float* row_values = values + i * outputs;
        switch (arguments.type) {
          case ScalarType::bfloat16: finish_row<BFloat16>(arguments, row + i, panel, last, row_values, sums); break;
          case ScalarType::float16: finish_row<Float16>(arguments, row + i, panel, last, row_values, sums); break;
          case ScalarType::float32: finish_row<float>(arguments, row + i, panel, last, row_values, sums); break;
        }
      }
    }
  }
}

}  // namespace
}  // namespace vllm_arm
