// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "isa/scalar_types.h"

using vllm_arm::BFloat16;
using vllm_arm::Float16;

namespace {

// By the definition of the format: sign, exponent and fraction as numbers.
double value_of(std::uint16_t bits, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const double fraction = (bits & ((1 << fraction_bits) - 1)) / std::ldexp(1.0, fraction_bits);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, exponent - bias));
}

template <typename Element>
void check_every_value(int exponent_bits) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Element element{static_cast<std::uint16_t>(bits)};
    const double expected = value_of(element.bits, exponent_bits);
    const float value = vllm_arm::to_float(element);
    Element back;
    vllm_arm::from_float(value, back);
    if (std::isnan(expected)) {
      REQUIRE(std::isnan(value));
      REQUIRE(std::isnan(vllm_arm::to_float(back)));
    } else {
      REQUIRE(static_cast<double>(value) == expected);
      REQUIRE(back.bits == element.bits);
    }
  }
}

// The neighbours of the result are no nearer, and a tie went to the even one.
template <typename Element>
void check_nearest(float value, int exponent_bits) {
  Element rounded;
  vllm_arm::from_float(value, rounded);
  if (std::isinf(value_of(rounded.bits, exponent_bits))) return;
  const double error = std::fabs(value_of(rounded.bits, exponent_bits) - value);
  for (const int step : {-1, 1}) {
    const auto neighbour = static_cast<std::uint16_t>(rounded.bits + step);
    if (((neighbour ^ rounded.bits) & 0x8000) != 0) continue;
    const double other = std::fabs(value_of(neighbour, exponent_bits) - value);
    REQUIRE(error <= other);
    if (error == other) REQUIRE((rounded.bits & 1) == 0);
  }
}

}  // namespace

TEST_CASE("every bf16 and fp16 value converts to fp32 and back") {
  check_every_value<BFloat16>(8);
  check_every_value<Float16>(5);
}

TEST_CASE("fp32 rounds to nearest even") {
  std::mt19937 random(1);
  std::uniform_int_distribution<std::uint32_t> any;
  for (int i = 0; i < 200000; ++i) {
    const float value = vllm_arm::bits_to_float(any(random));
    if (!std::isfinite(value)) continue;
    check_nearest<BFloat16>(value, 8);
    check_nearest<Float16>(std::ldexp(value, -std::ilogb(value) + static_cast<int>(any(random) % 44) - 27), 5);
  }
}

TEST_CASE("what is too large becomes infinity, at the right place") {
  Float16 half;
  vllm_arm::from_float(65519.9F, half);
  CHECK(half.bits == 0x7bff);
  vllm_arm::from_float(65520.0F, half);
  CHECK(half.bits == 0x7c00);
  vllm_arm::from_float(-1e30F, half);
  CHECK(half.bits == 0xfc00);
  BFloat16 brain;
  vllm_arm::from_float(std::numeric_limits<float>::max(), brain);
  CHECK(brain.bits == 0x7f80);
}
