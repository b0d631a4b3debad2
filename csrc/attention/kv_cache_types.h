// SPDX-License-Identifier: Apache-2.0
// The 8-bit floating-point formats of the KV cache (OCP 8-bit Floating Point Specification, 2023), in portable code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "isa/scalar_types.h"

namespace vllm_arm {

// 4 bits of exponent, 3 of mantissa, no infinity, largest 448.
struct Float8E4M3 {
  std::uint8_t bits;
};
// 5 bits of exponent, 2 of mantissa: the upper byte of an fp16, largest finite 57344.
struct Float8E5M2 {
  std::uint8_t bits;
};

namespace {

[[maybe_unused]] float to_float(Float8E5M2 value) {
  return to_float(Float16{static_cast<std::uint16_t>(value.bits << 8)});
}

[[maybe_unused]] float to_float(Float8E4M3 value) {
  if ((value.bits & 0x7f) == 0x7f) return bits_to_float(0x7fc00000);
  // As an fp16 the same bits have an exponent that is 8 too small.
  const auto half = static_cast<std::uint16_t>(((value.bits & 0x80) << 8) | ((value.bits & 0x7f) << 7));
  return to_float(Float16{half}) * 256.0F;
}

// Rounds to nearest, ties to even; what is too large becomes the largest finite value; NaN stays.
[[maybe_unused]] void from_float(float value, Float8E4M3& result) {
  const std::uint32_t sign = (float_to_bits(value) >> 24) & 0x80;
  const float magnitude = std::fabs(value);
  if (magnitude != magnitude) {
    result.bits = static_cast<std::uint8_t>(sign | 0x7f);
    return;
  }
  if (magnitude < 0x1p-6F) {
    // Adding 2^14 puts the last place of an fp32 at 2^-9, that of the subnormals.
    const std::uint32_t steps = float_to_bits(magnitude + 0x1p14F) - float_to_bits(0x1p14F);
    result.bits = static_cast<std::uint8_t>(sign | steps);
    return;
  }
  const std::uint32_t bits = float_to_bits(std::min(magnitude, 448.0F)) - (120U << 23);
  result.bits = static_cast<std::uint8_t>(sign | ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20));
}

[[maybe_unused]] void from_float(float value, Float8E5M2& result) {
  const std::uint32_t sign = (float_to_bits(value) >> 24) & 0x80;
  const float magnitude = std::fabs(value);
  if (magnitude != magnitude) {
    result.bits = static_cast<std::uint8_t>(sign | 0x7f);
    return;
  }
  if (magnitude < 0x1p-14F) {
    // Adding 2^7 puts the last place of an fp32 at 2^-16.
    const std::uint32_t steps = float_to_bits(magnitude + 0x1p7F) - float_to_bits(0x1p7F);
    result.bits = static_cast<std::uint8_t>(sign | steps);
    return;
  }
  const std::uint32_t bits = float_to_bits(std::min(magnitude, 57344.0F)) - (112U << 23);
  result.bits = static_cast<std::uint8_t>(sign | ((bits + 0xfffff + ((bits >> 21) & 1)) >> 21));
}

}  // namespace
}  // namespace vllm_arm
