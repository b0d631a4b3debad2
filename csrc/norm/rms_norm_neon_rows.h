// SPDX-License-Identifier: Apache-2.0
// RMS normalisation by NEON, for the variants that share it: they differ in how fp32 is rounded to bf16.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "isa/neon_convert.h"
#include "norm/rms_norm_rows.h"

namespace vllm_arm {
namespace {

Float8 add(Float8 a, Float8 b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }

template <typename Element>
Float8 input_value(const Element* input, const Element* residual, std::int64_t i) {
  const Float8 x = load(input + i);
  return residual != nullptr ? add(x, load(residual + i)) : x;
}

struct SumOfSquares {
  float32x4_t sums[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};

  void accumulate(Float8 x, int pair) {
    sums[2 * pair] = vfmaq_f32(sums[2 * pair], x.low, x.low);
    sums[2 * pair + 1] = vfmaq_f32(sums[2 * pair + 1], x.high, x.high);
  }
  float total() const { return vaddvq_f32(vaddq_f32(vaddq_f32(sums[0], sums[1]), vaddq_f32(sums[2], sums[3]))); }
};

template <typename Element, typename Weight>
void scale_and_store(const Element* input, Element* output, Element* residual, const Weight* weight, std::int64_t i,
                     float scale) {
  Float8 x = input_value(input, residual, i);
  if (residual != nullptr) store<false>(residual + i, x);
  x = {vmulq_n_f32(x.low, scale), vmulq_n_f32(x.high, scale)};
  if (weight != nullptr) {
    const Float8 w = load(weight + i);
    x = {vmulq_f32(x.low, w.low), vmulq_f32(x.high, w.high)};
  }
  store<std::is_same_v<Weight, float>>(output + i, x);
}

// The last, partial vector of a row: copied through buffers, so that nothing is read or written past the row.
template <typename Element>
struct Tail {
  Element values[kLanes] = {};

  Tail(const Element* source, std::int64_t count) {
    if (source != nullptr) std::memcpy(values, source, count * sizeof(Element));
  }
};

void normalise_rows(const RmsNormArguments& arguments, std::int64_t row_begin, std::int64_t row_end) {
  for_each_row(arguments, row_begin, row_end,
               []<typename Element, typename Weight>(const Element* input, Element* output, Element* residual,
                                                     const Weight* weight, std::int64_t size, float epsilon) {
                 const std::int64_t whole = size - size % kLanes;
                 const std::int64_t rest = size - whole;
                 SumOfSquares squares;
                 std::int64_t i = 0;
                 for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
                   squares.accumulate(input_value(input, residual, i), 0);
                   squares.accumulate(input_value(input, residual, i + kLanes), 1);
                 }
                 if (i < whole) squares.accumulate(input_value(input, residual, i), 0);
                 Tail<Element> input_tail(input + whole, rest);
                 Tail<Element> residual_tail(residual != nullptr ? residual + whole : nullptr, rest);
                 Element* tail_residual = residual != nullptr ? residual_tail.values : nullptr;
                 if (rest > 0) squares.accumulate(input_value(input_tail.values, tail_residual, 0), 1);

                 const float scale = 1.0F / std::sqrt(squares.total() / static_cast<float>(size) + epsilon);
                 for (i = 0; i + 2 * kLanes <= size; i += 2 * kLanes) {
                   scale_and_store(input, output, residual, weight, i, scale);
                   scale_and_store(input, output, residual, weight, i + kLanes, scale);
                 }
                 if (i < whole) scale_and_store(input, output, residual, weight, i, scale);
                 if (rest > 0) {
                   const Tail<Weight> weight_tail(weight != nullptr ? weight + whole : nullptr, rest);
                   const Weight* tail_weight = weight != nullptr ? weight_tail.values : nullptr;
                   scale_and_store(input_tail.values, input_tail.values, tail_residual, tail_weight, 0, scale);
                   std::memcpy(output + whole, input_tail.values, rest * sizeof(Element));
                   if (residual != nullptr) std::memcpy(residual + whole, tail_residual, rest * sizeof(Element));
                 }
               });
}

}  // namespace
}  // namespace vllm_arm
