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

}  // namespace vllm_arm::tests
