// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include "isa/kernel_table.h"
#include "linear/dequantise.h"
#include "operations.h"

namespace vllm_arm {

#define VLLM_ARM_DECLARE(isa) void dequantise_##isa(const DequantiseArguments&, std::int64_t, std::int64_t);
VLLM_ARM_DEQUANTISE_VARIANTS(VLLM_ARM_DECLARE)
#undef VLLM_ARM_DECLARE

#define VLLM_ARM_ROW(isa) KernelVariant<DequantiseKernel>{Isa::isa, dequantise_##isa},
inline constexpr std::array kDequantiseTable{VLLM_ARM_DEQUANTISE_VARIANTS(VLLM_ARM_ROW)};
#undef VLLM_ARM_ROW

}  // namespace vllm_arm
