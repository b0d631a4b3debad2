// SPDX-License-Identifier: Apache-2.0
// Eight elements of any type as fp32, for the NEON variants.
#pragma once

#include <arm_neon.h>

#include "isa/scalar_types.h"

namespace vllm_arm {

// In an anonymous namespace: each variant keeps its own copy, compiled for its own instruction set.
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

[[maybe_unused]] Float8 load(const std::int32_t* source) {
  return {vcvtq_f32_s32(vld1q_s32(source)), vcvtq_f32_s32(vld1q_s32(source + 4))};
}

[[maybe_unused]] void store(float* destination, Float8 value) {
  vst1q_f32(destination, value.low);
  vst1q_f32(destination + 4, value.high);
}

// BFCVT is not in Armv8.2: round to nearest even by integer arithmetic, with NaN told apart, for it could be carried
// into infinity or zero.
[[maybe_unused]] uint16x4_t to_bfloat16(float32x4_t value) {
  const uint32x4_t bits = vreinterpretq_u32_f32(value);
  const uint32x4_t half_way = vaddq_u32(bits, vdupq_n_u32(0x7fff));
  const uint16x4_t rounded = vshrn_n_u32(vsraq_n_u32(half_way, vshlq_n_u32(bits, 15), 31), 16);
  const uint16x4_t quiet_nan = vorr_u16(vshrn_n_u32(bits, 16), vdup_n_u16(0x40));
  return vbsl_u16(vmovn_u32(vceqq_f32(value, value)), rounded, quiet_nan);
}

[[maybe_unused]] void store(BFloat16* destination, Float8 value) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const bfloat16x8_t rounded = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(value.low), value.high);
  vst1q_u16(&destination->bits, vreinterpretq_u16_bf16(rounded));
#else
  vst1q_u16(&destination->bits, vcombine_u16(to_bfloat16(value.low), to_bfloat16(value.high)));
#endif
}

[[maybe_unused]] void store(Float16* destination, Float8 value) {
  const float16x8_t half = vcvt_high_f16_f32(vcvt_f16_f32(value.low), value.high);
  vst1q_u16(&destination->bits, vreinterpretq_u16_f16(half));
}

}  // namespace
}  // namespace vllm_arm
