// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "isa/scalar_types.h"

namespace vllm_arm::tests {

// The ScalarType of an element.
template <typename Element>
inline constexpr ScalarType kType = ScalarType::float32;
template <>
inline constexpr ScalarType kType<BFloat16> = ScalarType::bfloat16;
template <>
inline constexpr ScalarType kType<Float16> = ScalarType::float16;

// What rounding to an element costs at most, relative to the value.
template <typename Element>
inline constexpr double kHalfUlp = 1.0 / (1 << 24);
template <>
inline constexpr double kHalfUlp<BFloat16> = 1.0 / (1 << 8);
template <>
inline constexpr double kHalfUlp<Float16> = 1.0 / (1 << 11);

}  // namespace vllm_arm::tests
