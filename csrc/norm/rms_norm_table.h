// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include "isa/kernel_table.h"
#include "norm/rms_norm.h"
#include "operations.h"

namespace vllm_arm {

#define VLLM_ARM_DECLARE(isa) void rms_norm_##isa(const RmsNormArguments&, std::int64_t, std::int64_t);
VLLM_ARM_RMS_NORM_VARIANTS(VLLM_ARM_DECLARE)
#undef VLLM_ARM_DECLARE

#define VLLM_ARM_ROW(isa) KernelVariant<RmsNormKernel>{Isa::isa, rms_norm_##isa},
inline constexpr std::array kRmsNormTable{VLLM_ARM_RMS_NORM_VARIANTS(VLLM_ARM_ROW)};
#undef VLLM_ARM_ROW

}  // namespace vllm_arm
