// SPDX-License-Identifier: Apache-2.0
#include "collectives/reduce_sum_neon_vectors.h"

namespace vllm_arm {

void reduce_sum_bf16(const ReduceSumArguments& arguments, std::int64_t begin, std::int64_t end) {
  sum_by_neon(arguments, begin, end);
}

}  // namespace vllm_arm
