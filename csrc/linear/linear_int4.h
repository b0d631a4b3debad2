// SPDX-License-Identifier: Apache-2.0
// The product of weights of four bits with activations that are quantised to int8 on the way, a scale and a zero point
// for each token.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa/scalar_types.h"
#include "linear/int4_weight.h"

namespace vllm_arm {

// output[rows, n] = input[rows, k] * weight^T + bias[n]; all contiguous.
//
// Each row of the input becomes scale * (code - zero point) with codes of int8, rounded to nearest even; the range of a
// row takes in 0. The products of a group are summed exactly, the sums of groups and what zero points add in fp32. A
// row with a NaN or an infinity gives NaN everywhere.
struct LinearInt4Arguments {
  Int4Shape shape;
  const std::byte* packed;  // pack_int4's
  const void* input;        // of `type`
  const void* bias;         // of `type`; may be null
  void* output;             // of `type`
  std::byte* activations;   // workspace of activation_bytes(), aligned to 4
  std::int64_t rows;
  ScalarType type;
};

// Quantised rows are interleaved in blocks of `block_rows`, by eight inputs; after the codes of a block come its rows'
// negated zero points in int32 and scales in fp32: KleidiAI's qai8dxp. Where the weight has one scale for each output,
// they are followed in int32 by what the offset of its low halves adds to each row's sums, negated. Where it has zero
// points, the sums of a row's values over each group follow all blocks in fp32: [rows][groups].
constexpr std::int64_t activation_block_bytes(const Int4Shape& shape, std::int64_t block_rows) {
  return block_rows * (shape.k + (shape.has_groups() ? 8 : 12));
}

constexpr std::int64_t activation_bytes(const Int4Shape& shape, std::int64_t rows, std::int64_t block_rows) {
  const std::int64_t blocks = (rows + block_rows - 1) / block_rows;
  return blocks * activation_block_bytes(shape, block_rows) + (shape.has_zero_points ? rows * shape.groups() * 4 : 0);
}

struct LinearInt4Kernel {
  // How many rows are interleaved where there are `rows`.
  std::int64_t (*block_rows)(std::int64_t rows);
  // Quantises blocks [block_begin, block_end) into the workspace.
  void (*quantise)(const LinearInt4Arguments&, std::int64_t block_begin, std::int64_t block_end);
  // Computes the outputs of panels [panel_begin, panel_end) for the rows of blocks [block_begin, block_end).
  void (*multiply)(const LinearInt4Arguments&, std::int64_t block_begin, std::int64_t block_end,
                   std::int64_t panel_begin, std::int64_t panel_end);
};

}  // namespace vllm_arm
