// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "norm/rms_norm_rows.h"

namespace vllm_arm {
namespace {

template <typename Element>
float input_value(const Element* input, const Element* residual, std::int64_t i) {
  return residual != nullptr ? to_float(input[i]) + to_float(residual[i]) : to_float(input[i]);
}

}  // namespace

void rms_norm_portable(const RmsNormArguments& arguments, std::int64_t row_begin, std::int64_t row_end) {
  for_each_row(arguments, row_begin, row_end,
               []<typename Element, typename Weight>(const Element* input, Element* output, Element* residual,
                                                     const Weight* weight, std::int64_t size, float epsilon) {
                 // Several partial sums: less rounding than one, and the compiler can keep them in vectors.
                 constexpr std::int64_t kPartialSums = 16;
                 float partial[kPartialSums] = {};
                 for (std::int64_t i = 0; i < size; ++i) {
                   const float x = input_value(input, residual, i);
                   partial[i % kPartialSums] += x * x;
                 }
                 float sum_of_squares = 0.0F;
                 for (const float sum : partial) sum_of_squares += sum;
                 const float scale = 1.0F / std::sqrt(sum_of_squares / static_cast<float>(size) + epsilon);
                 for (std::int64_t i = 0; i < size; ++i) {
                   const float x = input_value(input, residual, i);
                   if (residual != nullptr) from_float(x, residual[i]);
                   from_float(x * scale * (weight != nullptr ? to_float(weight[i]) : 1.0F), output[i]);
                 }
               });
}

}  // namespace vllm_arm
