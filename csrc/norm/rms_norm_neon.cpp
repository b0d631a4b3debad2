// SPDX-License-Identifier: Apache-2.0
#include "norm/rms_norm_neon_rows.h"

namespace vllm_arm {

void rms_norm_neon(const RmsNormArguments& arguments, std::int64_t row_begin, std::int64_t row_end) {
  normalise_rows(arguments, row_begin, row_end);
}

}  // namespace vllm_arm
