// SPDX-License-Identifier: Apache-2.0
// How the matrix engines store fp8 elements: so that two instructions turn 16 of them into bf16.
//
// The elements of a token, e4m3 or e5m2, become numbers of 4 bits of exponent and 3 of mantissa without subnormals:
// those of exponent 0 count as zero. A power of two for each token and head puts its largest element near the top of
// their range, so that none is lost of an e4m3 token whose elements are less than 64, and otherwise only what is 2^-14
// of its largest. Where an element is NaN, that scale is.
//
// 16 bits hold two of them. The first has the bits that a bf16 of the same sign, exponent and mantissa has; the rest
// are those of the second after the halves of each byte change places.
//   bit       15  14 13 12  11  10  9  8    7   6  5  4    3   2  1  0
//   first      s                 e3 e2 e1   e0  m2 m1 m0
//   second        e3 e2 e1  s                              e0  m2 m1 m0
// As a bf16 an element is 2^kFp8ExponentOffset of what it stands for.
#pragma once

#include <arm_neon.h>

#include <algorithm>
#include <array>
#include <limits>

#include "attention/kv_cache_types.h"

namespace vllm_arm {
namespace {

constexpr std::uint16_t kFp8First = 0x87f0;
constexpr int kFp8ExponentOffset = -120;

template <typename Stored>
struct Fp8Traits;

template <>
struct Fp8Traits<Float8E4M3> {
  static constexpr int mantissa_bits = 3;
  static constexpr int exponent_offset = 120;  // of fp32 from that of the element
  static constexpr float largest = 448;
  static constexpr float smallest_normal = 0x1p-6F;
  static constexpr float subnormal_magic = 0x1p14F;  // adding it leaves a subnormal in the lowest bits
};

template <>
struct Fp8Traits<Float8E5M2> {
  static constexpr int mantissa_bits = 2;
  static constexpr int exponent_offset = 112;
  static constexpr float largest = 57344;
  static constexpr float smallest_normal = 0x1p-14F;
  static constexpr float subnormal_magic = 0x1p7F;
};

constexpr int kLargestRaise = 3;  // of an exponent: what makes the smallest subnormal normal

// Magnitudes of the smallest elements, in steps of 1/8 of the smallest normal number, after their exponent is raised.
constexpr std::array<std::array<std::uint8_t, 16>, kLargestRaise + 1> make_small_codes() {
  std::array<std::array<std::uint8_t, 16>, kLargestRaise + 1> codes{};
  for (int raise = 0; raise <= kLargestRaise; ++raise) {
    for (int steps = 1; steps < 16; ++steps) {
      int exponent = 1 + raise, mantissa = steps;
      for (; mantissa < 8; mantissa *= 2) --exponent;
      if (exponent > 0) codes[raise][steps] = static_cast<std::uint8_t>(exponent << 3 | (mantissa & 7));
    }
  }
  return codes;
}

constexpr auto kSmallCodes = make_small_codes();

// Elements without sign: rounded to nearest, ties to even; what is too large becomes the largest finite value, and NaN
// more.
template <typename Stored>
uint32x4_t fp8_magnitudes(float32x4_t values) {
  using Traits = Fp8Traits<Stored>;
  constexpr int kDropped = 23 - Traits::mantissa_bits;
  const float32x4_t magnitude = vabsq_f32(values);
  const uint32x4_t subnormal =
      vsubq_u32(vreinterpretq_u32_f32(vaddq_f32(magnitude, vdupq_n_f32(Traits::subnormal_magic))),
                vreinterpretq_u32_f32(vdupq_n_f32(Traits::subnormal_magic)));
  const uint32x4_t limited = vreinterpretq_u32_f32(vminq_f32(magnitude, vdupq_n_f32(Traits::largest)));
  const uint32x4_t bits = vsubq_u32(limited, vdupq_n_u32(std::uint32_t{Traits::exponent_offset} << 23));
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, kDropped), vdupq_n_u32(1));
  const uint32x4_t half = vdupq_n_u32((1U << (kDropped - 1)) - 1);
  const uint32x4_t normal = vshrq_n_u32(vaddq_u32(vaddq_u32(bits, half), odd), kDropped);
  const uint32x4_t rounded = vbslq_u32(vcltq_f32(magnitude, vdupq_n_f32(Traits::smallest_normal)), subnormal, normal);
  return vbslq_u32(vceqq_f32(values, values), rounded, vdupq_n_u32(0x7f));
}

inline uint8x16_t swap_halves(uint8x16_t bytes) { return vsriq_n_u8(vshlq_n_u8(bytes, 4), bytes, 4); }

// Sixteen elements of a token as 16 bits each, all as if they were first.
struct Fp8Sixteen {
  uint16x8_t low, high;
};

// The elements of a token times a factor, `use(i, sixteen)` for each sixteen. Returns the token's scale.
template <typename Stored, typename Use>
float encode_fp8(const bfloat16_t* elements, std::int64_t head_size, float factor, Use use) {
  constexpr int kMantissaShift = 3 - Fp8Traits<Stored>::mantissa_bits;
  constexpr int kMostRaise = Fp8Traits<Stored>::mantissa_bits;
  std::uint8_t magnitudes[kMaximumHeadSize], signs[kMaximumHeadSize];
  uint8x8_t largest_of_lanes = vdup_n_u8(0);
  for (std::int64_t i = 0; i < head_size; i += 8) {
    const bfloat16x8_t eight = vld1q_bf16(elements + i);
    const uint32x4_t low = fp8_magnitudes<Stored>(vmulq_n_f32(vcvtq_low_f32_bf16(eight), factor));
    const uint32x4_t high = fp8_magnitudes<Stored>(vmulq_n_f32(vcvtq_high_f32_bf16(eight), factor));
    const uint8x8_t magnitude = vshl_n_u8(vmovn_u16(vmovn_high_u32(vmovn_u32(low), high)), kMantissaShift);
    largest_of_lanes = vmax_u8(largest_of_lanes, magnitude);
    vst1_u8(magnitudes + i, magnitude);
    vst1_u8(signs + i, vshrn_n_u16(vreinterpretq_u16_bf16(eight), 8));
  }
  const int largest = vmaxv_u8(largest_of_lanes);
  // The exponent 15 is the highest.
  const int raise = std::min(kMostRaise, (127 - largest) >> 3);
  const uint8x16_t small = vld1q_u8(kSmallCodes[std::max(raise, 0)].data());
  const uint8x16_t up = vdupq_n_u8(static_cast<std::uint8_t>(8 * std::max(raise, 0)));
  const uint8x16_t down = vdupq_n_u8(static_cast<std::uint8_t>(8 * std::max(-raise, 0)));
  for (std::int64_t i = 0; i < head_size; i += 16) {
    const uint8x16_t magnitude = vld1q_u8(magnitudes + i);
    uint8x16_t code = vqtbx1q_u8(vaddq_u8(magnitude, up), small, magnitude);
    code = vqsubq_u8(code, down);
    code = vandq_u8(code, vcgeq_u8(code, vdupq_n_u8(8)));
    const uint8x16_t low = vshlq_n_u8(code, 4);
    const uint8x16_t high = vbslq_u8(vdupq_n_u8(0x80), vld1q_u8(signs + i), vshrq_n_u8(code, 4));
    use(i, Fp8Sixteen{vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high))});
  }
  constexpr int kNaN = 0x7f << kMantissaShift;
  if (largest == kNaN) return std::numeric_limits<float>::quiet_NaN();
  constexpr int kExponent = Fp8Traits<Stored>::exponent_offset - 120;
  return bits_to_float(static_cast<std::uint32_t>(127 + kExponent - raise) << 23);
}

}  // namespace
}  // namespace vllm_arm
