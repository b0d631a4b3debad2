// SPDX-License-Identifier: Apache-2.0
// Root mean square normalisation over the last dimension, with an optional residual addition before it.
#pragma once

#include <cstdint>

#include "isa/scalar_types.h"

namespace vllm_arm {

// Rows laid out as [groups, rows_per_group, hidden_size], so that a [tokens, heads, head_size] view of a wider tensor
// needs no copy.
struct RowLayout {
  std::int64_t group_stride;  // bytes from a group to the next
  std::int64_t row_stride;    // bytes from a row to the next within a group
};

// output = x / sqrt(mean(x^2) + epsilon) * weight, where x = input + residual if `residual` is given. Sums and products
// are in fp32 and rounded once, to nearest even. `residual` receives x, rounded. `output` may be `input`.
struct RmsNormArguments {
  const void* input;
  void* output;
  void* residual;      // null: no addition
  const void* weight;  // null: all ones
  RowLayout input_layout;
  RowLayout output_layout;
  RowLayout residual_layout;
  std::int64_t rows_per_group;
  std::int64_t hidden_size;
  float epsilon;
  ScalarType type;         // of input, output and residual
  ScalarType weight_type;  // `type`, or float32
};

// Normalises rows [row_begin, row_end).
using RmsNormKernel = void (*)(const RmsNormArguments&, std::int64_t row_begin, std::int64_t row_end);

}  // namespace vllm_arm
