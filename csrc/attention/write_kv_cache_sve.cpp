// SPDX-License-Identifier: Apache-2.0
#include "attention/matrix_variants.h"
#include "attention/sve_engine.h"

namespace vllm_arm {

void write_kv_cache_sve(const WriteKvCacheArguments& arguments, std::int64_t token_begin, std::int64_t token_end,
                        std::int64_t head_begin, std::int64_t head_end) {
  write_matrix_cache(arguments, vector_units(), token_begin, token_end, head_begin, head_end);
}

}  // namespace vllm_arm
