// SPDX-License-Identifier: Apache-2.0
// Quantisation of activations to int8, one scale for each row.
#pragma once

#include <cstdint>

#include "isa/scalar_types.h"

namespace vllm_arm {

// output = round(input / scale) + zero_point, to nearest even and saturated to int8, so that
// input = scale * (output - zero_point).
//
// Without `static_scale` the scale of a row is its largest magnitude / 127, or where `zero_points` is given its range,
// which takes in 0, / 255. A row with a NaN or an infinity has the scale NaN, so that it shows in what is computed from
// it; a row of zeros (or of values too small for fp32 to divide by) has the scale 0.
struct QuantiseArguments {
  const void* input;                      // rows of `size` elements of `type`, one after another
  std::int8_t* output;                    // likewise
  float* scales;                          // one for each row
  std::int32_t* zero_points;              // one for each row; null: symmetric
  const float* static_scale;              // one for all; null: from each row
  const std::int32_t* static_zero_point;  // one for all, where static_scale and zero_points are given
  std::int64_t size;
  ScalarType type;
};

// Quantises rows [row_begin, row_end).
using QuantiseKernel = void (*)(const QuantiseArguments&, std::int64_t row_begin, std::int64_t row_end);

}  // namespace vllm_arm
