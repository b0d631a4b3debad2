// SPDX-License-Identifier: Apache-2.0
// The range of a row and its conversion to int8, by NEON.
#pragma once

#include "linear/neon_elements.h"
#include "linear/quantise_rows.h"

namespace vllm_arm {
namespace {

template <typename Element>
Range find_range(const Element* input, std::int64_t size) {
  // FMIN and FMAX give NaN where either operand is one.
  Float8 smallest{vdupq_n_f32(0), vdupq_n_f32(0)}, largest = smallest;
  std::int64_t i = 0;
  const auto take = [&](Float8 x) {
    smallest = {vminq_f32(smallest.low, x.low), vminq_f32(smallest.high, x.high)};
    largest = {vmaxq_f32(largest.low, x.low), vmaxq_f32(largest.high, x.high)};
  };
  for (; i + kLanes <= size; i += kLanes) take(load(input + i));
  if (i < size) {
    Element tail[kLanes] = {};
    std::memcpy(tail, input + i, static_cast<std::size_t>(size - i) * sizeof(Element));
    take(load(tail));
  }
  return {vminvq_f32(vminq_f32(smallest.low, smallest.high)), vmaxvq_f32(vmaxq_f32(largest.low, largest.high))};
}

int16x4_t to_integers(float32x4_t value, float inverse, int32x4_t zero_point) {
  return vqmovn_s32(vqaddq_s32(vcvtnq_s32_f32(vmulq_n_f32(value, inverse)), zero_point));
}

// Eight codes lie together; the next eight begin `stride` bytes further.
template <typename Element>
void convert(const Element* input, std::int64_t size, const Mapping& mapping, std::int8_t* output,
             std::int64_t stride = kLanes) {
  const int32x4_t zero_point = vdupq_n_s32(mapping.zero_point);
  const auto convert_lanes = [&](Float8 x) {
    return vqmovn_s16(vcombine_s16(to_integers(x.low, mapping.inverse, zero_point),
                                   to_integers(x.high, mapping.inverse, zero_point)));
  };
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes, output += stride) vst1_s8(output, convert_lanes(load(input + i)));
  if (i < size) {
    Element tail[kLanes] = {};
    std::int8_t converted[kLanes];
    std::memcpy(tail, input + i, static_cast<std::size_t>(size - i) * sizeof(Element));
    vst1_s8(converted, convert_lanes(load(tail)));
    std::memcpy(output, converted, static_cast<std::size_t>(size - i));
  }
}

}  // namespace
}  // namespace vllm_arm
