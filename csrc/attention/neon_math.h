// SPDX-License-Identifier: Apache-2.0
// Powers of two and tanh by NEON. The polynomials are minimax in the relative error.
#pragma once

#include <arm_neon.h>

#include <initializer_list>

namespace vllm_arm {
namespace {

// x, at most about 0, as the nearest integer and a fraction in [-1/2, 1/2].
struct Exponent {
  uint32x4_t negated;  // of the integer, in the place of an fp32's exponent
  float32x4_t fraction;

  // What is below -127.4 counts as that, and is zero after `scale`.
  explicit Exponent(float32x4_t x) {
    // Subtracting from 1.5 * 2^23 leaves the integer in the lowest bits.
    const float32x4_t magic = vdupq_n_f32(0x1.8p23F);
    x = vmaxq_f32(x, vdupq_n_f32(-127.4F));
    const float32x4_t shifted = vsubq_f32(magic, x);
    negated = vshlq_n_u32(vreinterpretq_u32_f32(shifted), 23);
    fraction = vaddq_f32(x, vsubq_f32(shifted, magic));
  }

  // `power` times two to the integer. Saturation turns what is below the range of fp32 into zero.
  float32x4_t scale(float32x4_t power) const {
    return vreinterpretq_f32_u32(vqsubq_u32(vreinterpretq_u32_f32(power), negated));
  }
};

// 2^x to 7.5e-5 of its value, a twenty-fifth of half a bf16 ulp, for x in [-125.5, 0]. Below, it falls to zero, which
// -infinity gives too. NaN stays if its low half is zero.
[[maybe_unused]] float32x4_t exp2_approximate(float32x4_t x) {
  const Exponent exponent(x);
  float32x4_t power = vfmaq_f32(vdupq_n_f32(0x1.f0de1ap-3F), exponent.fraction, vdupq_n_f32(0x1.c3f760p-5F));
  power = vfmaq_f32(vdupq_n_f32(0x1.62f31ap-1F), exponent.fraction, power);
  power = vfmaq_f32(vdupq_n_f32(0x1.fff692p-1F), exponent.fraction, power);
  return exponent.scale(power);
}

// 2^x to 1e-7 of its value, likewise. Every NaN stays.
[[maybe_unused]] float32x4_t exp2_accurate(float32x4_t x) {
  const Exponent exponent(x);
  float32x4_t power = vdupq_n_f32(0x1.41d334p-13F);
  for (const float coefficient :
       {0x1.5f456ap-10F, 0x1.3b2dbcp-7F, 0x1.c6aed4p-5F, 0x1.ebfbdap-3F, 0x1.62e43p-1F, 1.0F}) {
    power = vfmaq_f32(vdupq_n_f32(coefficient), exponent.fraction, power);
  }
  return vbslq_f32(vceqq_f32(x, x), exponent.scale(power), x);
}

// To 2e-7 of its value.
[[maybe_unused]] float32x4_t tanh(float32x4_t x) {
  const float32x4_t magnitude = vabsq_f32(x), square = vmulq_f32(x, x), one = vdupq_n_f32(1);
  // Near zero 1 - e^(-2 |x|) would cancel: x + x^3 * P(x^2).
  float32x4_t polynomial = vdupq_n_f32(-0.0060963463F);
  for (const float coefficient : {0.020996831F, -0.0538508F, 0.13332768F, -0.33333328F}) {
    polynomial = vfmaq_f32(vdupq_n_f32(coefficient), square, polynomial);
  }
  const float32x4_t near = vfmaq_f32(x, vmulq_f32(x, square), polynomial);
  const float32x4_t power = exp2_accurate(vmulq_n_f32(magnitude, -2 * 1.44269504088896340736F));
  const float32x4_t far = vdivq_f32(vsubq_f32(one, power), vaddq_f32(one, power));
  const uint32x4_t sign = vdupq_n_u32(0x80000000);
  return vbslq_f32(vcltq_f32(magnitude, vdupq_n_f32(0.625F)), near, vbslq_f32(sign, x, far));
}

}  // namespace
}  // namespace vllm_arm
