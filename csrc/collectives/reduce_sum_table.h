// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include "collectives/reduce_sum.h"
#include "isa/kernel_table.h"
#include "operations.h"

namespace vllm_arm {

#define VLLM_ARM_DECLARE(isa) void reduce_sum_##isa(const ReduceSumArguments&, std::int64_t, std::int64_t);
VLLM_ARM_REDUCE_SUM_VARIANTS(VLLM_ARM_DECLARE)
#undef VLLM_ARM_DECLARE

#define VLLM_ARM_ROW(isa) KernelVariant<ReduceSumKernel>{Isa::isa, reduce_sum_##isa},
inline constexpr std::array kReduceSumTable{VLLM_ARM_REDUCE_SUM_VARIANTS(VLLM_ARM_ROW)};
#undef VLLM_ARM_ROW

}  // namespace vllm_arm
