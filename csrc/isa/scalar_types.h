// SPDX-License-Identifier: Apache-2.0
// The element types of tensors, and their conversion to and from fp32 in portable code.
#pragma once

#include <cstdint>
#include <cstring>

namespace vllm_arm {

enum class ScalarType : std::uint8_t { bfloat16, float16, float32 };

constexpr std::int64_t scalar_size(ScalarType type) { return type == ScalarType::float32 ? 4 : 2; }

struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

// In an anonymous namespace: each file that includes this keeps its own copy, compiled for its own instruction set.
namespace {

[[maybe_unused]] float bits_to_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

[[maybe_unused]] std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

[[maybe_unused]] float to_float(float value) { return value; }

[[maybe_unused]] float to_float(BFloat16 value) { return bits_to_float(static_cast<std::uint32_t>(value.bits) << 16); }

[[maybe_unused]] float to_float(Float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(value.bits & 0x7fff);
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | ((magnitude & 0x3ff) << 13));
  // Scaling by 2^112 moves fp16's exponent range onto fp32's and normalises subnormals on the way.
  const float scaled = bits_to_float(magnitude << 13) * bits_to_float(0x77800000);
  return bits_to_float(sign | float_to_bits(scaled));
}

// Each of these rounds to nearest, ties to even, and keeps NaN.
[[maybe_unused]] void from_float(float value, float& result) { result = value; }

[[maybe_unused]] void from_float(float value, BFloat16& result) {
  const std::uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    result.bits = static_cast<std::uint16_t>((bits >> 16) | 0x40);
  } else {
    result.bits = static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

[[maybe_unused]] void from_float(float value, Float16& result) {
  const std::uint32_t bits = float_to_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  const std::uint32_t magnitude = bits & 0x7fffffff;
  constexpr std::uint32_t kOverflow = 0x477ff000;  // 65520: the first that rounds to infinity
  constexpr std::uint32_t kSmallest = 0x38800000;  // 2^-14: the smallest normal fp16
  std::uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= kOverflow) {
    half = 0x7c00;
  } else if (magnitude >= kSmallest) {
    const std::uint32_t rebased = magnitude - (112U << 23);
    half = (rebased + 0xfff + ((rebased >> 13) & 1)) >> 13;
  } else {
    // Adding 0.5 aligns the subnormal's last place with fp32's, so the addition does the rounding.
    half = float_to_bits(bits_to_float(magnitude) + 0.5F) - float_to_bits(0.5F);
  }
  result.bits = static_cast<std::uint16_t>(sign | half);
}

}  // namespace
}  // namespace vllm_arm
