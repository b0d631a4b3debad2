// SPDX-License-Identifier: Apache-2.0
// From the integer products of quantised activations and weights to the layer's output.
#pragma once

#include <cstdint>

#include "isa/scalar_types.h"

namespace vllm_arm {

// output[m, n] = (accumulators[m, n] - zero_points[m] * weight_sums[n]) * (scales[m] * weight_scales[n]) + bias[n],
// rounded once, to nearest even. The difference is exact where the accumulators are int32.
struct DequantiseArguments {
  const void* accumulators;         // [rows, size], int32, or fp32 that holds whole numbers
  const float* scales;              // one for each row
  const std::int32_t* zero_points;  // one for each row; null: all 0
  const float* weight_scales;       // [size]
  const std::int32_t* weight_sums;  // [size], the sum of each row of the weight; read where zero_points is given
  const void* bias;                 // [size] of `type`; null: none
  void* output;                     // [rows, size] of `type`
  std::int64_t size;
  ScalarType type;
  bool accumulators_are_float;
};

// Computes rows [row_begin, row_end).
using DequantiseKernel = void (*)(const DequantiseArguments&, std::int64_t row_begin, std::int64_t row_end);

}  // namespace vllm_arm
