// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include "isa/kernel_table.h"
#include "linear/linear_int4.h"
#include "operations.h"

namespace vllm_arm {

#define VLLM_ARM_DECLARE(isa) extern const LinearInt4Kernel linear_int4_##isa;
VLLM_ARM_LINEAR_INT4_VARIANTS(VLLM_ARM_DECLARE)
#undef VLLM_ARM_DECLARE

// Pointers, for what they point to is made in the files of the variants.
#define VLLM_ARM_ROW(isa) KernelVariant<const LinearInt4Kernel*>{Isa::isa, &linear_int4_##isa},
inline constexpr std::array kLinearInt4Table{VLLM_ARM_LINEAR_INT4_VARIANTS(VLLM_ARM_ROW)};
#undef VLLM_ARM_ROW

}  // namespace vllm_arm
