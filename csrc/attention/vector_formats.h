// SPDX-License-Identifier: Apache-2.0
// How elements of the cache become fp32 vectors in registers, and how they are stored.
#pragma once

#include <arm_neon.h>

#include <cstring>
#include <type_traits>

#include "attention/dispatch.h"
#include "isa/neon_convert.h"

namespace vllm_arm {
namespace {

// Format<Stored>::load puts 4, 8 or 16 elements (8 or 16 of the types of one byte) into as many lanes, divided by
// kScale. kStep: elements taken at once along the head. kMayHideNan: load does not keep NaN, so has_nan must look for
// it.
template <typename Stored>
struct Format;

template <>
struct Format<float> {
  static constexpr int kStep = 4;
  static constexpr float kScale = 1;
  static constexpr bool kMayHideNan = false;

  template <int kVectors>
  static void load(const float* source, float32x4_t (&values)[kVectors]) {
    for (int i = 0; i < kVectors; ++i) values[i] = vld1q_f32(source + 4 * i);
  }
};

template <>
struct Format<BFloat16> {
  static constexpr int kStep = 4;
  static constexpr float kScale = 1;
  static constexpr bool kMayHideNan = false;

  template <int kVectors>
  static void load(const BFloat16* source, float32x4_t (&values)[kVectors]) {
    if constexpr (kVectors == 1) {
      values[0] = widen_low(vcombine_u16(vld1_u16(&source->bits), vdup_n_u16(0)));
    } else {
      for (int i = 0; i < kVectors; i += 2) {
        const uint16x8_t bits = vld1q_u16(&source[4 * i].bits);
        values[i] = widen_low(bits);
        values[i + 1] = widen_high(bits);
      }
    }
  }

  // Unlike a shift, ZIP runs in every pipe.
  static float32x4_t widen_low(uint16x8_t bits) { return vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), bits)); }
  static float32x4_t widen_high(uint16x8_t bits) { return vreinterpretq_f32_u16(vzip2q_u16(vdupq_n_u16(0), bits)); }
};

template <>
struct Format<Float16> {
  static constexpr int kStep = 4;
  static constexpr float kScale = 1;
  static constexpr bool kMayHideNan = false;

  template <int kVectors>
  static void load(const Float16* source, float32x4_t (&values)[kVectors]) {
    if constexpr (kVectors == 1) {
      values[0] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&source->bits)));
    } else {
      for (int i = 0; i < kVectors; i += 2) {
        const Float8 both = vllm_arm::load(source + 4 * i);
        values[i] = both.low;
        values[i + 1] = both.high;
      }
    }
  }
};

template <>
struct Format<Float8E5M2> {
  static constexpr int kStep = 8;
  static constexpr float kScale = 1;
  static constexpr bool kMayHideNan = false;

  template <int kVectors>
  static void load(const Float8E5M2* source, float32x4_t (&values)[kVectors]) {
    if constexpr (kVectors == 2) {
      widen(vshll_n_u8(vld1_u8(&source->bits), 8), values[0], values[1]);
    } else {
      const uint8x16_t bits = vld1q_u8(&source->bits), zero = vdupq_n_u8(0);
      widen(vreinterpretq_u16_u8(vzip1q_u8(zero, bits)), values[0], values[1]);
      widen(vreinterpretq_u16_u8(vzip2q_u8(zero, bits)), values[2], values[3]);
    }
  }

 private:
  static void widen(uint16x8_t halves, float32x4_t& low, float32x4_t& high) {
    low = vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u16(halves)));
    high = vcvt_high_f32_f16(vreinterpretq_f16_u16(halves));
  }
};

// With the bits moved to where a bf16 has them the exponent is 120 too small: 2^-120 of the value. Conversion by way of
// fp16 would take twice the time.
template <>
struct Format<Float8E4M3> {
  static constexpr int kStep = 8;
  static constexpr float kScale = 0x1p120F;
  static constexpr bool kMayHideNan = true;

  template <int kVectors>
  static void load(const Float8E4M3* source, float32x4_t (&values)[kVectors]) {
    if constexpr (kVectors == 2) {
      widen(vshll_n_s8(vreinterpret_s8_u8(vld1_u8(&source->bits)), 4), values[0], values[1]);
    } else {
      const int8x16_t bits = vreinterpretq_s8_u8(vld1q_u8(&source->bits));
      widen(vshll_n_s8(vget_low_s8(bits), 4), values[0], values[1]);
      widen(vshll_high_n_s8(bits, 4), values[2], values[3]);
    }
  }

 private:
  // The sign was copied into the upper bits of the exponent.
  static void widen(int16x8_t shifted, float32x4_t& low, float32x4_t& high) {
    const uint16x8_t bits = vandq_u16(vreinterpretq_u16_s16(shifted), vdupq_n_u16(0x87ff));
    low = Format<BFloat16>::widen_low(bits);
    high = Format<BFloat16>::widen_high(bits);
  }
};

// Stored with 128 added. An 8-bit number below the exponent of 2^8 in the mantissa of an fp32 is 256 plus that number;
// conversion from integers would take more time.
template <>
struct Format<Int8> {
  static constexpr int kStep = 8;
  static constexpr float kScale = 1;
  static constexpr bool kMayHideNan = false;

  template <int kVectors>
  static void load(const Int8* source, float32x4_t (&values)[kVectors]) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(source);
    const uint8x16_t exponent = vdupq_n_u8(0x87);
    if constexpr (kVectors == 2) {
      const uint8x8_t bits = vld1_u8(bytes);
      widen(vreinterpretq_u16_u8(vzip1q_u8(vcombine_u8(bits, bits), exponent)), values[0], values[1]);
    } else {
      const uint8x16_t bits = vld1q_u8(bytes);
      widen(vreinterpretq_u16_u8(vzip1q_u8(bits, exponent)), values[0], values[1]);
      widen(vreinterpretq_u16_u8(vzip2q_u8(bits, exponent)), values[2], values[3]);
    }
  }

 private:
  static void widen(uint16x8_t bits, float32x4_t& low, float32x4_t& high) {
    const float32x4_t excess = vdupq_n_f32(256 + 128);
    low = vsubq_f32(vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 15)), excess);
    high = vsubq_f32(vreinterpretq_f32_u32(vshll_high_n_u16(bits, 15)), excess);
  }
};

// Queries and weights are multiplied by this, so that their products with elements divided by kScale stay far from the
// limits of fp32.
template <typename Stored>
constexpr float kPrescale = Format<Stored>::kScale == 1 ? 1.0F : 0x1p64F;
template <typename Stored>
constexpr float kProductScale = Format<Stored>::kScale / kPrescale<Stored>;

// Whether any of `count` elements, a multiple of 16, is NaN.
inline bool has_nan(const Float8E4M3* elements, std::int64_t count) {
  uint8x16_t largest = vdupq_n_u8(0);
  for (std::int64_t i = 0; i < count; i += 16) {
    const uint8x16_t bits = vld1q_u8(&elements[i].bits);
    largest = vmaxq_u8(largest, vaddq_u8(bits, bits));
  }
  return vmaxvq_u8(largest) == 0xfe;
}

// Elements divided by kScale in fp32, NaN included; `count` is a multiple of 16.
template <typename Stored>
void widen_elements(float* destination, const Stored* source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += 16) {
    float32x4_t values[4];
    Format<Stored>::load(source + i, values);
    for (int j = 0; j < 4; ++j) vst1q_f32(destination + i + 4 * j, values[j]);
  }
  if constexpr (Format<Stored>::kMayHideNan) {
    if (!has_nan(source, count)) return;
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = to_float(source[i]);
      if (value != value) destination[i] = value;
    }
  }
}

// fp32 to the bits of an 8-bit floating-point number: to nearest, ties to even; what is too large becomes the largest
// finite value, and NaN stays. `kBias` is how much the exponents' biases differ.
template <int kMantissaBits, int kBias>
uint32x4_t to_float8(float32x4_t value, float largest) {
  constexpr int kShift = 23 - kMantissaBits;
  const uint32x4_t sign = vandq_u32(vshrq_n_u32(vreinterpretq_u32_f32(value), 24), vdupq_n_u32(0x80));
  const float32x4_t magnitude = vabsq_f32(value);
  const uint32x4_t bits = vsubq_u32(vreinterpretq_u32_f32(vminq_f32(magnitude, vdupq_n_f32(largest))),
                                    vdupq_n_u32(static_cast<std::uint32_t>(kBias) << 23));
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, kShift), vdupq_n_u32(1));
  const uint32x4_t normal = vshrq_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32((1U << (kShift - 1)) - 1)), odd), kShift);
  // Adding a power of two aligns the last place of the subnormals with fp32's, so that the addition rounds.
  const uint32x4_t magic = vdupq_n_u32(static_cast<std::uint32_t>(kBias + 1 + kShift) << 23);
  const uint32x4_t subnormal =
      vsubq_u32(vreinterpretq_u32_f32(vaddq_f32(magnitude, vreinterpretq_f32_u32(magic))), magic);
  const float32x4_t smallest = vreinterpretq_f32_u32(vdupq_n_u32(static_cast<std::uint32_t>(kBias + 1) << 23));
  const uint32x4_t finite = vbslq_u32(vcltq_f32(magnitude, smallest), subnormal, normal);
  return vorrq_u32(sign, vbslq_u32(vceqq_f32(value, value), finite, vdupq_n_u32(0x7f)));
}

inline uint8x8_t narrow(uint32x4_t low, uint32x4_t high) {
  return vmovn_u16(vcombine_u16(vmovn_u32(low), vmovn_u32(high)));
}

inline void store_narrow(Float8E4M3* destination, Float8 value) {
  vst1_u8(&destination->bits, narrow(to_float8<3, 120>(value.low, 448), to_float8<3, 120>(value.high, 448)));
}

inline void store_narrow(Float8E5M2* destination, Float8 value) {
  vst1_u8(&destination->bits, narrow(to_float8<2, 112>(value.low, 57344), to_float8<2, 112>(value.high, 57344)));
}

inline void store_narrow(Int8* destination, Float8 value) {
  const int16x8_t rounded = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(value.low)), vqmovn_s32(vcvtnq_s32_f32(value.high)));
  const uint8x8_t bits = veor_u8(vreinterpret_u8_s8(vqmovn_s16(rounded)), vdup_n_u8(0x80));
  vst1_u8(reinterpret_cast<std::uint8_t*>(destination), bits);
}

// Stores `count` elements, a multiple of 16, multiplied by `inverse` where the types differ.
template <typename Stored, typename Element>
void store_elements(Stored* destination, const Element* source, std::int64_t count, float inverse) {
  if constexpr (std::is_same_v<Stored, Element>) {
    constexpr std::int64_t kBytes = kLanes * sizeof(Element);
    for (std::int64_t i = 0; i < count; i += kLanes) std::memcpy(destination + i, source + i, kBytes);
  } else {
    for (std::int64_t i = 0; i < count; i += kLanes) {
      const Float8 value = load(source + i);
      store_narrow(destination + i, {vmulq_n_f32(value.low, inverse), vmulq_n_f32(value.high, inverse)});
    }
  }
}

}  // namespace
}  // namespace vllm_arm
