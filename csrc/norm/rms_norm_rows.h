// SPDX-License-Identifier: Apache-2.0
// What every variant of rms_norm shares: the walk over rows, and the choice of element types.
#pragma once

#include "norm/rms_norm.h"

namespace vllm_arm {

// In an anonymous namespace: each variant keeps its own copy, compiled for its own instruction set.
namespace {

// Calls normalise_row(input, output, residual, weight, hidden_size, epsilon) for each row, typed.
template <typename Element, typename Weight, typename NormaliseRow>
void for_each_row(const RmsNormArguments& arguments, std::int64_t row_begin, std::int64_t row_end,
                  NormaliseRow normalise_row) {
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const std::int64_t group = row / arguments.rows_per_group;
    const std::int64_t within = row % arguments.rows_per_group;
    const auto offset = [&](const RowLayout& layout) {
      return group * layout.group_stride + within * layout.row_stride;
    };
    const char* input = static_cast<const char*>(arguments.input) + offset(arguments.input_layout);
    char* output = static_cast<char*>(arguments.output) + offset(arguments.output_layout);
    char* residual = static_cast<char*>(arguments.residual);
    if (residual != nullptr) residual += offset(arguments.residual_layout);
    normalise_row(reinterpret_cast<const Element*>(input), reinterpret_cast<Element*>(output),
                  reinterpret_cast<Element*>(residual), static_cast<const Weight*>(arguments.weight),
                  arguments.hidden_size, arguments.epsilon);
  }
}

template <typename Element, typename NormaliseRow>
void for_each_row(const RmsNormArguments& arguments, std::int64_t row_begin, std::int64_t row_end,
                  NormaliseRow normalise_row) {
  if (arguments.weight_type == ScalarType::float32) {
    for_each_row<Element, float>(arguments, row_begin, row_end, normalise_row);
  } else {
    for_each_row<Element, Element>(arguments, row_begin, row_end, normalise_row);
  }
}

template <typename NormaliseRow>
void for_each_row(const RmsNormArguments& arguments, std::int64_t row_begin, std::int64_t row_end,
                  NormaliseRow normalise_row) {
  switch (arguments.type) {
    case ScalarType::bfloat16: return for_each_row<BFloat16>(arguments, row_begin, row_end, normalise_row);
    case ScalarType::float16: return for_each_row<Float16>(arguments, row_begin, row_end, normalise_row);
    case ScalarType::float32: return for_each_row<float>(arguments, row_begin, row_end, normalise_row);
  }
}

}  // namespace
}  // namespace vllm_arm
