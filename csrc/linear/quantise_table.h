// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include "isa/kernel_table.h"
#include "linear/quantise.h"
#include "operations.h"

namespace vllm_arm {

#define VLLM_ARM_DECLARE(isa) void quantise_##isa(const QuantiseArguments&, std::int64_t, std::int64_t);
VLLM_ARM_QUANTISE_VARIANTS(VLLM_ARM_DECLARE)
#undef VLLM_ARM_DECLARE

#define VLLM_ARM_ROW(isa) KernelVariant<QuantiseKernel>{Isa::isa, quantise_##isa},
inline constexpr std::array kQuantiseTable{VLLM_ARM_QUANTISE_VARIANTS(VLLM_ARM_ROW)};
#undef VLLM_ARM_ROW

}  // namespace vllm_arm
