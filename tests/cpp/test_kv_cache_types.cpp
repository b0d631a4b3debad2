// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>

#include "attention/kv_cache_types.h"

using vllm_arm::Float8E4M3;
using vllm_arm::Float8E5M2;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// By the definition of the formats: sign, exponent and fraction as numbers.
double value_of(Float8E4M3 code) {
  const int exponent = (code.bits >> 3) & 15, fraction = code.bits & 7;
  const double sign = code.bits & 0x80 ? -1 : 1;
  if (exponent == 15 && fraction == 7) return kNan;
  return sign * (exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10));
}

double value_of(Float8E5M2 code) {
  const int exponent = (code.bits >> 2) & 31, fraction = code.bits & 3;
  const double sign = code.bits & 0x80 ? -1 : 1;
  if (exponent == 31) return fraction == 0 ? sign * kInfinity : kNan;
  return sign * (exponent == 0 ? std::ldexp(fraction, -16) : std::ldexp(4 + fraction, exponent - 17));
}

template <typename Stored>
Stored stored(float value) {
  Stored result;
  vllm_arm::from_float(value, result);
  return result;
}

template <typename Stored>
void check_every_code() {
  for (int bits = 0; bits < 256; ++bits) {
    CAPTURE(bits);
    const Stored code{static_cast<std::uint8_t>(bits)};
    const double expected = value_of(code);
    const float value = vllm_arm::to_float(code);
    if (std::isnan(expected)) {
      CHECK(std::isnan(value));
      CHECK(std::isnan(value_of(stored<Stored>(value))));
      continue;
    }
    CHECK(static_cast<double>(value) == expected);
    CHECK(std::signbit(value) == std::signbit(expected));
    if (std::isfinite(expected)) CHECK(stored<Stored>(value).bits == code.bits);
  }
}

// Of all codes the nearest, of two the even one; beyond the largest, that.
template <typename Stored>
std::uint8_t nearest(float value, std::uint8_t largest) {
  std::uint8_t best = 0;
  double smallest_error = kInfinity;
  for (int bits = 0; bits <= largest; ++bits) {
    const double error = std::fabs(std::fabs(value) - value_of(Stored{static_cast<std::uint8_t>(bits)}));
    if (error < smallest_error || (error == smallest_error && bits % 2 == 0)) {
      smallest_error = error;
      best = static_cast<std::uint8_t>(bits);
    }
  }
  return static_cast<std::uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

template <typename Stored>
void check_rounding(std::uint8_t largest) {
  for (int bits = 0; bits < largest; ++bits) {
    // A tie, and its neighbours on both sides.
    const Stored low{static_cast<std::uint8_t>(bits)}, high{static_cast<std::uint8_t>(bits + 1)};
    const auto tie = static_cast<float>((value_of(low) + value_of(high)) / 2);
    for (const float value : {tie, std::nextafter(tie, 0.0F), std::nextafter(tie, 1e9F)}) {
      for (const float signed_value : {value, -value}) {
        CAPTURE(signed_value);
        CHECK(stored<Stored>(signed_value).bits == nearest<Stored>(signed_value, largest));
      }
    }
  }
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 2000; ++i) {
    const float value = std::ldexp(normal(random), static_cast<int>(random() % 40) - 22);
    CAPTURE(value);
    CHECK(stored<Stored>(value).bits == nearest<Stored>(value, largest));
  }
}

template <typename Stored>
void check_extremes(float largest, std::uint8_t code) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float value : {largest, 1.06F * largest, 1.5F * largest, std::numeric_limits<float>::max(), infinity}) {
    CAPTURE(value);
    CHECK(stored<Stored>(value).bits == code);
    CHECK(stored<Stored>(-value).bits == (code | 0x80));
  }
  for (const float value : {std::numeric_limits<float>::denorm_min(), 1e-30F}) {
    CHECK(stored<Stored>(value).bits == 0);
    CHECK(stored<Stored>(-value).bits == 0x80);
  }
  for (const std::uint32_t bits : {0x7fc00000U, 0xffc00000U, 0x7f800001U, 0xffffffffU}) {
    CHECK(std::isnan(value_of(stored<Stored>(vllm_arm::bits_to_float(bits)))));
  }
}

}  // namespace

TEST_CASE("every 8-bit floating-point code converts to fp32 and back") {
  check_every_code<Float8E4M3>();
  check_every_code<Float8E5M2>();
}

TEST_CASE("fp32 rounds to the nearest 8-bit code, ties to even") {
  check_rounding<Float8E4M3>(0x7e);
  check_rounding<Float8E5M2>(0x7b);
}

TEST_CASE("what is too large for 8 bits becomes the largest, NaN stays, the smallest goes to zero") {
  check_extremes<Float8E4M3>(448, 0x7e);
  check_extremes<Float8E5M2>(57344, 0x7b);
}
