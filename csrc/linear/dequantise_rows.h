// SPDX-License-Identifier: Apache-2.0
// What every variant of dequantise shares: the walk over rows, and the choice of types.
#pragma once

#include "linear/dequantise.h"

namespace vllm_arm {

// In an anonymous namespace: each variant keeps its own copy, compiled for its own instruction set.
namespace {

// One row: what is constant in it.
template <typename Accumulator, typename Element>
struct DequantiseRow {
  const Accumulator* accumulators;
  const float* weight_scales;
  const std::int32_t* weight_sums;  // null: no zero point
  const Element* bias;              // null: none
  Element* output;
  std::int64_t size;
  float scale;
  std::int32_t zero_point;
};

template <typename Accumulator, typename Element, typename Dequantise>
void dequantise_rows(const DequantiseArguments& arguments, std::int64_t row_begin, std::int64_t row_end,
                     Dequantise dequantise) {
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const bool has_zero_point = arguments.zero_points != nullptr;
    dequantise(DequantiseRow<Accumulator, Element>{
        static_cast<const Accumulator*>(arguments.accumulators) + row * arguments.size, arguments.weight_scales,
        has_zero_point ? arguments.weight_sums : nullptr, static_cast<const Element*>(arguments.bias),
        static_cast<Element*>(arguments.output) + row * arguments.size, arguments.size, arguments.scales[row],
        has_zero_point ? arguments.zero_points[row] : 0});
  }
}

template <typename Element, typename Dequantise>
void dequantise_rows(const DequantiseArguments& arguments, std::int64_t row_begin, std::int64_t row_end,
                     Dequantise dequantise) {
  if (arguments.accumulators_are_float) {
    dequantise_rows<float, Element>(arguments, row_begin, row_end, dequantise);
  } else {
    dequantise_rows<std::int32_t, Element>(arguments, row_begin, row_end, dequantise);
  }
}

template <typename Dequantise>
void dequantise_rows(const DequantiseArguments& arguments, std::int64_t row_begin, std::int64_t row_end,
                     Dequantise dequantise) {
  switch (arguments.type) {
    case ScalarType::bfloat16: return dequantise_rows<BFloat16>(arguments, row_begin, row_end, dequantise);
    case ScalarType::float16: return dequantise_rows<Float16>(arguments, row_begin, row_end, dequantise);
    case ScalarType::float32: return dequantise_rows<float>(arguments, row_begin, row_end, dequantise);
  }
}

}  // namespace
}  // namespace vllm_arm
