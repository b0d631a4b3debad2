// SPDX-License-Identifier: Apache-2.0
// What every variant of quantise shares: the walk over rows, and the scale and zero point of each.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "linear/quantise.h"

namespace vllm_arm {

// In an anonymous namespace: each variant keeps its own copy, compiled for its own instruction set.
namespace {

// Of a row. Either is infinite or NaN where any element is.
struct Range {
  float smallest, largest;
};

struct Mapping {
  float scale;
  float inverse;
  std::int32_t zero_point;
};

// Magnitudes below this have no reciprocal in fp32 (127 / x is infinite).
constexpr float kTooSmall = 1e-36F;

// A scale and a zero point for a range of finite numbers, extended so that it takes in 0.
Mapping map_asymmetric(Range range) {
  const float smallest = std::fmin(range.smallest, 0.0F);
  const float width = std::fmax(range.largest, 0.0F) - smallest;
  if (width < kTooSmall) return {0.0F, 0.0F, 0};
  if (!std::isfinite(width)) return {std::numeric_limits<float>::quiet_NaN(), 0.0F, 0};
  const float inverse = 255.0F / width;
  return {width / 255.0F, inverse, static_cast<std::int32_t>(std::nearbyint(-128.0F - smallest * inverse))};
}

[[maybe_unused]] Mapping map_range(const QuantiseArguments& arguments, Range range) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  if (!std::isfinite(range.smallest) || !std::isfinite(range.largest)) return {kNan, 0.0F, 0};
  if (arguments.static_scale != nullptr) {
    const float scale = *arguments.static_scale;
    return {scale, 1.0F / scale, arguments.zero_points != nullptr ? *arguments.static_zero_point : 0};
  }
  if (arguments.zero_points == nullptr) {
    const float magnitude = std::fmax(-range.smallest, range.largest);
    if (magnitude < kTooSmall) return {0.0F, 0.0F, 0};
    return {magnitude / 127.0F, 127.0F / magnitude, 0};
  }
  return map_asymmetric(range);
}

// find_range(row, size) gives a Range; convert(row, size, mapping, output) writes a row of finite elements.
template <typename Element, typename FindRange, typename Convert>
void quantise_rows(const QuantiseArguments& arguments, std::int64_t row_begin, std::int64_t row_end,
                   FindRange find_range, Convert convert) {
  const std::int64_t size = arguments.size;
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const Element* input = static_cast<const Element*>(arguments.input) + row * size;
    std::int8_t* output = arguments.output + row * size;
    const Mapping mapping = map_range(arguments, find_range(input, size));
    if (std::isnan(mapping.scale)) {
      std::memset(output, 0, static_cast<std::size_t>(size));
    } else {
      convert(input, size, mapping, output);
    }
    arguments.scales[row] = mapping.scale;
    if (arguments.zero_points != nullptr) arguments.zero_points[row] = mapping.zero_point;
  }
}

template <typename FindRange, typename Convert>
void quantise_rows(const QuantiseArguments& arguments, std::int64_t row_begin, std::int64_t row_end,
                   FindRange find_range, Convert convert) {
  switch (arguments.type) {
    case ScalarType::bfloat16: return quantise_rows<BFloat16>(arguments, row_begin, row_end, find_range, convert);
    case ScalarType::float16: return quantise_rows<Float16>(arguments, row_begin, row_end, find_range, convert);
    case ScalarType::float32: return quantise_rows<float>(arguments, row_begin, row_end, find_range, convert);
  }
}

}  // namespace
}  // namespace vllm_arm
