// SPDX-License-Identifier: Apache-2.0
// How the matrix engines store an fp8 element: as a code that few instructions turn into bf16. It is the element's own
// bits with the exponent's highest bit inverted, except that NaN takes the place of -0, which becomes 0. The high byte
// of the bf16 depends on the code's upper five bits only, and its low byte is the code shifted left, unless the element
// is subnormal, zero or NaN (e5m2: or has the smallest normal exponent): these special codes are looked up whole.
#pragma once

#include <array>

#include "attention/kv_cache_types.h"

namespace vllm_arm {
namespace {

template <typename Stored>
struct Fp8Traits;

template <>
struct Fp8Traits<Float8E4M3> {
  static constexpr int mantissa_bits = 3;
  static constexpr int exponent_offset = 120;  // of bf16 from that of the element
  static constexpr float largest = 448;
  static constexpr float smallest_normal = 0x1p-6F;
  static constexpr float subnormal_magic = 0x1p14F;  // adding it leaves a subnormal in the lowest bits
  static constexpr std::uint8_t largest_finite = 0x7e;
};

template <>
struct Fp8Traits<Float8E5M2> {
  static constexpr int mantissa_bits = 2;
  static constexpr int exponent_offset = 112;
  static constexpr float largest = 57344;
  static constexpr float smallest_normal = 0x1p-14F;
  static constexpr float subnormal_magic = 0x1p7F;
  static constexpr std::uint8_t largest_finite = 0x7b;
};

constexpr std::uint8_t kFp8Inverted = 0x40;
constexpr std::uint8_t kFp8NaN = 0x80;  // before inversion

// The code's shift that makes the low byte of a bf16.
template <typename Stored>
constexpr int kFp8Shift = 7 - Fp8Traits<Stored>::mantissa_bits;

struct Fp8Tables {
  // By the upper five bits of a code: the high byte. For special codes, what makes a number below 16 of them by
  // exclusive or; others become at least 16 by it.
  std::array<std::uint8_t, 32> high;
  // By that number: both bytes.
  std::array<std::uint8_t, 16> special_high, special_low;
};

template <typename Stored>
constexpr Fp8Tables make_fp8_tables() {
  using Traits = Fp8Traits<Stored>;
  Fp8Tables tables{};
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned bits = (i << 3) ^ kFp8Inverted;
    const unsigned sign = bits & 0x80, magnitude = bits & 0x7f;
    const unsigned exponent = (magnitude >> Traits::mantissa_bits) + Traits::exponent_offset;
    tables.high[i] = static_cast<std::uint8_t>(sign | exponent >> 1);
    if (magnitude < 8) tables.high[i] = static_cast<std::uint8_t>((i << 3) ^ (sign >> 4));
  }
  for (unsigned i = 0; i < 16; ++i) {
    const unsigned sign = (i & 8) << 12, magnitude = i & 7;
    unsigned exponent = magnitude >> Traits::mantissa_bits, mantissa = magnitude << kFp8Shift<Stored> & 0x7f;
    unsigned bits = 0;
    if (exponent > 0) {
      bits = (exponent + Traits::exponent_offset) << 7 | mantissa;
    } else if (mantissa > 0) {
      for (exponent = 1 + Traits::exponent_offset; mantissa < 0x80; --exponent) mantissa <<= 1;
      bits = exponent << 7 | (mantissa & 0x7f);
    }
    bits = i == 8 ? 0x7fc0 : bits | sign;
    tables.special_high[i] = static_cast<std::uint8_t>(bits >> 8);
    tables.special_low[i] = static_cast<std::uint8_t>(bits);
  }
  return tables;
}

template <typename Stored>
constexpr Fp8Tables kFp8Tables = make_fp8_tables<Stored>();

}  // namespace
}  // namespace vllm_arm
