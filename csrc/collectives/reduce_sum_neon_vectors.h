// SPDX-License-Identifier: Apache-2.0
// The sum by NEON, for the variants that share it: they differ in how fp32 is rounded to bf16.
#pragma once

#include <arm_neon.h>

#include "collectives/reduce_sum_elements.h"

namespace vllm_arm {
namespace {

// 16 bytes of elements, and their sums in one vector or, where those are wider, two.
struct BFloat16Vector {
  using Element = BFloat16;
  using Sum = float32x4x2_t;
  static constexpr std::int64_t kElements = 8;
  static Sum add(Sum a, Sum b) { return {{vaddq_f32(a.val[0], b.val[0]), vaddq_f32(a.val[1], b.val[1])}}; }
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  static Sum load(const Element* source) {
    const uint16x8_t bits = vld1q_u16(&source->bits);
    return {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)),
             vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16))}};
  }
  static uint16x8_t round(Sum sum) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(sum.val[0]), sum.val[1]));
  }
#else
  // Even elements and odd ones, which come together again by one instruction.
  static Sum load(const Element* source) {
    const uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(&source->bits));
    return {{vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16)),
             vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000)))}};
  }
  // BFCVT is not in Armv8.2: round to nearest even by integer arithmetic. The low half of a NaN that comes from bf16
  // values is zero, so that nothing is carried out of it.
  static uint32x4_t rounded(float32x4_t value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    return vsraq_n_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), vshlq_n_u32(bits, 15), 31);
  }
  static uint16x8_t round(Sum sum) {
    return vreinterpretq_u16_u32(vsriq_n_u32(rounded(sum.val[1]), rounded(sum.val[0]), 16));
  }
#endif
  static void store(Element* destination, uint16x8_t bits) { vst1q_u16(&destination->bits, bits); }
};

struct Float16Vector {
  using Element = Float16;
  using Sum = float32x4x2_t;
  static constexpr std::int64_t kElements = 8;
  static Sum load(const Element* source) {
    const float16x8_t half = vreinterpretq_f16_u16(vld1q_u16(&source->bits));
    return {{vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half)}};
  }
  static Sum add(Sum a, Sum b) { return BFloat16Vector::add(a, b); }
  static float16x8_t round(Sum sum) { return vcvt_high_f16_f32(vcvt_f16_f32(sum.val[0]), sum.val[1]); }
  static void store(Element* destination, float16x8_t value) {
    vst1q_u16(&destination->bits, vreinterpretq_u16_f16(value));
  }
};

struct Float32Vector {
  using Element = float;
  using Sum = float32x4_t;
  static constexpr std::int64_t kElements = 4;
  static Sum load(const Element* source) { return vld1q_f32(source); }
  static Sum add(Sum a, Sum b) { return vaddq_f32(a, b); }
  static Sum round(Sum sum) { return sum; }
  static void store(Element* destination, Sum sum) { vst1q_f32(destination, sum); }
};

struct Int32Vector {
  using Element = std::uint32_t;
  using Sum = uint32x4_t;
  static constexpr std::int64_t kElements = 4;
  static Sum load(const Element* source) { return vld1q_u32(source); }
  static Sum add(Sum a, Sum b) { return vaddq_u32(a, b); }
  static Sum round(Sum sum) { return sum; }
  static void store(Element* destination, Sum sum) { vst1q_u32(destination, sum); }
};

struct Int64Vector {
  using Element = std::uint64_t;
  using Sum = uint64x2_t;
  static constexpr std::int64_t kElements = 2;
  static Sum load(const Element* source) { return vld1q_u64(source); }
  static Sum add(Sum a, Sum b) { return vaddq_u64(a, b); }
  static Sum round(Sum sum) { return sum; }
  static void store(Element* destination, Sum sum) { vst1q_u64(destination, sum); }
};

// Sums of `kSources` sources, or of as many as there are where that is 0.
template <typename Vector, int kSources>
void sum_vectors_of(const ReduceSumArguments& arguments, std::int64_t begin, std::int64_t end) {
  using Element = typename Vector::Element;
  constexpr int kVectors = 4;  // a cache line at a time
  constexpr std::int64_t kStep = kVectors * Vector::kElements;
  const auto* first = static_cast<const Element*>(arguments.sources[0]);
  auto* output = static_cast<Element*>(arguments.output);
  auto* copy = static_cast<Element*>(arguments.copy);
  const int source_count = kSources == 0 ? arguments.source_count : kSources;
  std::int64_t i = begin;
  for (; i + kStep <= end; i += kStep) {
    typename Vector::Sum sums[kVectors];
    for (int v = 0; v < kVectors; ++v) sums[v] = Vector::load(first + i + v * Vector::kElements);
    for (int source = 1; source < source_count; ++source) {
      const Element* next = static_cast<const Element*>(arguments.sources[source]) + i;
      for (int v = 0; v < kVectors; ++v) sums[v] = Vector::add(sums[v], Vector::load(next + v * Vector::kElements));
    }
    decltype(Vector::round(sums[0])) rounded[kVectors];
    for (int v = 0; v < kVectors; ++v) rounded[v] = Vector::round(sums[v]);
    for (int v = 0; v < kVectors; ++v) Vector::store(output + i + v * Vector::kElements, rounded[v]);
    if (copy == nullptr) continue;
    for (int v = 0; v < kVectors; ++v) Vector::store(copy + i + v * Vector::kElements, rounded[v]);
  }
  for (; i < end; ++i) sum_elements<Element, 1>(arguments, i);
}

template <typename Vector>
void sum_vectors(const ReduceSumArguments& arguments, std::int64_t begin, std::int64_t end) {
  switch (arguments.source_count) {
    case 2: return sum_vectors_of<Vector, 2>(arguments, begin, end);
    case 4: return sum_vectors_of<Vector, 4>(arguments, begin, end);
    default: return sum_vectors_of<Vector, 0>(arguments, begin, end);
  }
}

void sum_by_neon(const ReduceSumArguments& arguments, std::int64_t begin, std::int64_t end) {
  switch (arguments.type) {
    case SumType::bfloat16: return sum_vectors<BFloat16Vector>(arguments, begin, end);
    case SumType::float16: return sum_vectors<Float16Vector>(arguments, begin, end);
    case SumType::float32: return sum_vectors<Float32Vector>(arguments, begin, end);
    case SumType::int32: return sum_vectors<Int32Vector>(arguments, begin, end);
    case SumType::int64: return sum_vectors<Int64Vector>(arguments, begin, end);
  }
}

}  // namespace
}  // namespace vllm_arm
