// SPDX-License-Identifier: Apache-2.0
// The range of a row and its conversion to int8, in portable code.
#pragma once

#include <algorithm>

#include "linear/quantise_rows.h"

namespace vllm_arm {
namespace {

// Integers that are ordered as the floats are, with NaN beyond the infinities: the compiler can keep their smallest and
// largest in vectors, which for floats the rules for NaN forbid. Its own inverse.
std::int32_t ordered(std::int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

template <typename Element>
Range find_range(const Element* input, std::int64_t size) {
  std::int32_t smallest = 0, largest = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    const std::int32_t key = ordered(static_cast<std::int32_t>(float_to_bits(to_float(input[i]))));
    smallest = std::min(smallest, key);
    largest = std::max(largest, key);
  }
  return {bits_to_float(static_cast<std::uint32_t>(ordered(smallest))),
          bits_to_float(static_cast<std::uint32_t>(ordered(largest)))};
}

template <typename Element>
void convert(const Element* input, std::int64_t size, const Mapping& mapping, std::int8_t* output) {
  // 1.5 * 2^23: adding it leaves the nearest whole number, ties to even, in the low bits.
  constexpr float kAlign = 12582912.0F;
  const float lowest = static_cast<float>(-128 - mapping.zero_point);
  const float highest = static_cast<float>(127 - mapping.zero_point);
  const float inverse = mapping.inverse;
  const std::uint32_t bias = float_to_bits(kAlign) - static_cast<std::uint32_t>(mapping.zero_point);
  for (std::int64_t i = 0; i < size; ++i) {
    const float scaled = to_float(input[i]) * inverse;
    const float clamped = std::min(std::max(scaled, lowest), highest);
    output[i] = static_cast<std::int8_t>(float_to_bits(clamped + kAlign) - bias);
  }
}

}  // namespace
}  // namespace vllm_arm
