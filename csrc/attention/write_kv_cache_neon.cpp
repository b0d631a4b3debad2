// SPDX-License-Identifier: Apache-2.0
#include "attention/dispatch.h"
#include "attention/vector_engine.h"
#include "attention/write_tokens.h"

namespace vllm_arm {

void write_kv_cache_neon(const WriteKvCacheArguments& arguments, std::int64_t token_begin, std::int64_t token_end,
                         std::int64_t head_begin, std::int64_t head_end) {
  dispatch(arguments.cache, [&]<typename Element, typename Stored>() {
    write_tokens<VectorEngine<Element, Stored>, Stored>(arguments, token_begin, token_end, head_begin, head_end);
  });
}

}  // namespace vllm_arm
