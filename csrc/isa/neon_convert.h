// SPDX-License-Identifier: Apache-2.0
// Loads and stores of eight elements at a time as fp32, by NEON.
#pragma once

#include <arm_neon.h>

#include "isa/scalar_types.h"

namespace vllm_arm {
namespace {

constexpr std::int64_t kLanes = 8;

struct Float8 {
  float32x4_t low, high;
};

[[maybe_unused]] Float8 load(const float* source) { return {vld1q_f32(source), vld1q_f32(source + 4)}; }

[[maybe_unused]] Float8 load(const BFloat16* source) {
  const uint16x8_t bits = vld1q_u16(&source->bits);
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)),
          vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16))};
}

[[maybe_unused]] Float8 load(const Float16* source) {
  const float16x8_t half = vreinterpretq_f16_u16(vld1q_u16(&source->bits));
  return {vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half)};
}

template <bool kAnyNan = true>
void store(float* destination, Float8 value) {
  vst1q_f32(destination, value.low);
  vst1q_f32(destination + 4, value.high);
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <bool kAnyNan = true>
void store(BFloat16* destination, Float8 value) {
  const bfloat16x8_t rounded = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(value.low), value.high);
  vst1q_u16(&destination->bits, vreinterpretq_u16_bf16(rounded));
}
#else
// BFCVT is not in Armv8.2: round to nearest even by integer arithmetic. A NaN whose low half is zero, as those made of
// bf16 values are, stays one; any other could be carried into infinity or zero, and is told apart where kAnyNan is set.
template <bool kAnyNan = true>
uint16x4_t to_bfloat16(float32x4_t value) {
  const uint32x4_t bits = vreinterpretq_u32_f32(value);
  const uint32x4_t half_way = vaddq_u32(bits, vdupq_n_u32(0x7fff));
  const uint16x4_t rounded = vshrn_n_u32(vsraq_n_u32(half_way, vshlq_n_u32(bits, 15), 31), 16);
  if constexpr (!kAnyNan) return rounded;
  const uint16x4_t quiet_nan = vorr_u16(vshrn_n_u32(bits, 16), vdup_n_u16(0x40));
  return vbsl_u16(vmovn_u32(vceqq_f32(value, value)), rounded, quiet_nan);
}

template <bool kAnyNan = true>
void store(BFloat16* destination, Float8 value) {
  vst1q_u16(&destination->bits, vcombine_u16(to_bfloat16<kAnyNan>(value.low), to_bfloat16<kAnyNan>(value.high)));
}
#endif

template <bool kAnyNan = true>
void store(Float16* destination, Float8 value) {
  const float16x8_t half = vcvt_high_f16_f32(vcvt_f16_f32(value.low), value.high);
  vst1q_u16(&destination->bits, vreinterpretq_u16_f16(half));
}

[[maybe_unused]] void store_four(float* destination, float32x4_t value) { vst1q_f32(destination, value); }

[[maybe_unused]] void store_four(BFloat16* destination, float32x4_t value) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  vst1_u16(&destination->bits, vreinterpret_u16_bf16(vcvt_bf16_f32(value)));
#else
  vst1_u16(&destination->bits, to_bfloat16<>(value));
#endif
}

[[maybe_unused]] void store_four(Float16* destination, float32x4_t value) {
  vst1_u16(&destination->bits, vreinterpret_u16_f16(vcvt_f16_f32(value)));
}

}  // namespace
}  // namespace vllm_arm
