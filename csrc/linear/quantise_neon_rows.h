// SPDX-License-Identifier: Apache-2.0
// The range of a row and its conversion to int8, by NEON.
#pragma once

#include <type_traits>

#include "isa/neon_convert.h"
#include "linear/quantise_rows.h"

namespace vllm_arm {
namespace {

// Bits of floating-point numbers are ordered as the numbers are where these are positive, read as signed integers, and
// the other way round where they are negative, read as unsigned ones. NaN is beyond infinity.
struct BitRange16 {
  int16x8_t largest = vdupq_n_s16(0);
  uint16x8_t smallest = vdupq_n_u16(0);

  void take(const std::uint16_t* bits) {
    const uint16x8_t eight = vld1q_u16(bits);
    largest = vmaxq_s16(largest, vreinterpretq_s16_u16(eight));
    smallest = vmaxq_u16(smallest, eight);
  }
  void join(const BitRange16& other) {
    largest = vmaxq_s16(largest, other.largest);
    smallest = vmaxq_u16(smallest, other.smallest);
  }
  template <typename Element>
  Range as(Element) const {
    const std::uint16_t negative = vmaxvq_u16(smallest);
    return {negative < 0x8000 ? 0.0F : to_float(Element{negative}),
            to_float(Element{static_cast<std::uint16_t>(vmaxvq_s16(largest))})};
  }
};

struct BitRange32 {
  int32x4_t largest = vdupq_n_s32(0);
  uint32x4_t smallest = vdupq_n_u32(0);

  void take(const float* values) {
    for (int i = 0; i < kLanes; i += 4) {
      const uint32x4_t four = vreinterpretq_u32_f32(vld1q_f32(values + i));
      largest = vmaxq_s32(largest, vreinterpretq_s32_u32(four));
      smallest = vmaxq_u32(smallest, four);
    }
  }
  void join(const BitRange32& other) {
    largest = vmaxq_s32(largest, other.largest);
    smallest = vmaxq_u32(smallest, other.smallest);
  }
  Range as(float) const {
    const std::uint32_t negative = vmaxvq_u32(smallest);
    return {negative < 0x80000000 ? 0.0F : bits_to_float(negative),
            bits_to_float(static_cast<std::uint32_t>(vmaxvq_s32(largest)))};
  }
};

[[maybe_unused]] const float* bits_of(const float* values) { return values; }
[[maybe_unused]] const std::uint16_t* bits_of(const BFloat16* values) { return &values->bits; }
[[maybe_unused]] const std::uint16_t* bits_of(const Float16* values) { return &values->bits; }

template <typename Element>
Range find_range(const Element* input, std::int64_t size) {
  using BitRange = std::conditional_t<sizeof(Element) == 2, BitRange16, BitRange32>;
  constexpr int kRanges = 4;  // several, for each waits for itself
  BitRange ranges[kRanges];
  std::int64_t i = 0;
  for (; i + kRanges * kLanes <= size; i += kRanges * kLanes) {
    for (int j = 0; j < kRanges; ++j) ranges[j].take(bits_of(input + i + j * kLanes));
  }
  ranges[2].join(ranges[3]);
  ranges[0].join(ranges[1]);
  ranges[0].join(ranges[2]);
  BitRange& range = ranges[0];
  for (; i + kLanes <= size; i += kLanes) range.take(bits_of(input + i));
  if (i < size) {
    Element tail[kLanes] = {};
    std::memcpy(tail, input + i, static_cast<std::size_t>(size - i) * sizeof(Element));
    range.take(bits_of(tail));
  }
  return range.as(Element{});
}

// Four values times `inverse`, magnitudes below 2^15, rounded to nearest even in the lower half of each lane: added to
// 1.5 * 2^23 they leave the integer in the lowest bits, at twice the speed of FCVTNS.
[[maybe_unused]] int16x8_t round_in_lower_halves(float32x4_t values, float32x4_t inverse) {
  const float32x4_t product = vmulq_f32(values, inverse), align = vdupq_n_f32(12582912.0F);
  // The product is rounded on its own, as in every variant; as a sum the compiler would take both for an FMLA.
  float32x4_t sum;
  asm("fadd %0.4s, %1.4s, %2.4s" : "=w"(sum) : "w"(product), "w"(align));
  return vreinterpretq_s16_f32(sum);
}

// Eight codes lie together; the next eight begin `stride` bytes further. kIsBounded: products with the inverse are of
// magnitudes below 2^15, as they are where the mapping was made for this row.
template <bool kIsBounded, typename Element>
void convert(const Element* input, std::int64_t size, const Mapping& mapping, std::int8_t* output,
             std::int64_t stride = kLanes) {
  const int16x8_t zero_point = vdupq_n_s16(static_cast<std::int16_t>(mapping.zero_point));
  const float32x4_t inverse = vdupq_n_f32(mapping.inverse);
  const auto to_integers = [&](float32x4_t value) { return vcvtnq_s32_f32(vmulq_f32(value, inverse)); };
  // What saturates on the way saturates at the end, for a zero point has eight bits.
  const auto convert_lanes = [&](Float8 x) {
    const int16x8_t integers =
        kIsBounded ? vuzp1q_s16(round_in_lower_halves(x.low, inverse), round_in_lower_halves(x.high, inverse))
                   : vqmovn_high_s32(vqmovn_s32(to_integers(x.low)), to_integers(x.high));
    return vqmovn_s16(vqaddq_s16(integers, zero_point));
  };
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes, output += 2 * stride) {
    vst1_s8(output, convert_lanes(load(input + i)));
    vst1_s8(output + stride, convert_lanes(load(input + i + kLanes)));
  }
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
