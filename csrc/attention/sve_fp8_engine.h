// SPDX-License-Identifier: Apache-2.0
// Attention on an fp8 cache with SVE: the products of fp8_matrix_engine.h, and weights by the exponential of
// sve_engine.h. All vectors are of one unit, whatever their length, in the order that sve_engine.h has for these: the
// pairs of a group of four keys are 0 and 2, and 1 and 3.
#pragma once

#include "attention/fp8_matrix_engine.h"
#include "attention/sve_engine.h"

namespace vllm_arm {
namespace {

struct Sve2Fp8Decoder {
  static void decode(const std::uint8_t* unit, bfloat16x8_t& first, bfloat16x8_t& second) {
    uint8x16_t stored = vld1q_u8(unit);
    const uint8x16_t of_first = vandq_u8(stored, vreinterpretq_u8_u16(vdupq_n_u16(kFp8First)));
    // What differs from the first element is the second, with the halves of its bytes swapped.
    asm(".arch_extension sve2\n\txar %z0.b, %z0.b, %z1.b, #4" : "+w"(stored) : "w"(of_first));
    first = vreinterpretq_bf16_u8(of_first);
    second = vreinterpretq_bf16_u8(stored);
  }
};

template <typename Decoder>
struct SveFp8Engine : Fp8Engine<Decoder> {
  static float& logit(float* logits, std::int64_t row, std::int64_t key, std::int64_t panels) {
    const std::int64_t pair = key / kPanelTokens * kPanelPairs + sve_pair(key % kPanelTokens, 0);
    return logits[(row / 2 * panels * kPanelPairs + pair) * 4 + row % 2 * 2 + key % 4 / 2];
  }

  // Times the scales of the values, whose exponents are added to those of weights. Both have a bias; kSpare takes away
  // one, but for that of kFp8Factor. The sum saturates, so that a scale that is NaN gives NaN.
  static void weights(char* destination, float* sums, const float* logits, std::int64_t rows, const Panels& panels,
                      float scale, const float* subtracted) {
    auto* result = reinterpret_cast<std::int16_t*>(destination);
    const svbool_t unit = svptrue_pat_b32(SV_VL4), all = svptrue_b32();
    const svfloat32_t factor = svdup_f32(scale);
    const svbfloat16_t ones = svdup_bf16(vcvth_bf16_f32(1.0F));
    for (std::int64_t row = 0; row < rows; row += 2) {
      float pair[4];
      vst1q_f32(pair, vaddq_f32(pair_of(subtracted + row), vdupq_n_f32(kExponentOffset + kSpare)));
      const svfloat32_t offset = svld1rq(all, pair);
      svfloat32_t sum = svdup_f32(0);
      for (std::int64_t i = 0; i < panels.count * kPanelGroups; ++i, logits += 8, result += kUnit) {
        const svfloat32_t first = exp2_lookup(all, svnmls_x(all, offset, svld1(unit, logits), factor));
        const svfloat32_t second = exp2_lookup(all, svnmls_x(all, offset, svld1(unit, logits + 4), factor));
        const svbfloat16_t rounded = svcvtnt_bf16_x(svcvt_bf16_x(all, first), all, second);
        sum = svbfmmla(sum, rounded, ones);
        const svint16_t scales = svreinterpret_s16(svld1rq(all, panels.value_scales + 4 * i));
        const svint16_t scaled = svqadd(svreinterpret_s16(rounded), svuzp2(scales, scales));
        svst1(svptrue_pat_b16(SV_VL8), result, scaled);
      }
      float of_rows[4];
      svst1(unit, of_rows, sum);
      sums[row] = of_rows[0] * kSpareFactor;
      sums[row + 1] = of_rows[2] * kSpareFactor;
    }
  }

 protected:
  static float32x4x2_t key_scales(const float* scales) {
    const float32x4_t group = vld1q_f32(scales);
    return {vuzp1q_f32(group, group), vuzp2q_f32(group, group)};
  }

 private:
  static constexpr float kSpare = 63;  // 127 less the logarithm of kFp8Factor
  static constexpr float kSpareFactor = 0x1p63F;
};

}  // namespace
}  // namespace vllm_arm
