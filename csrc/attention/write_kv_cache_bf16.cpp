// SPDX-License-Identifier: Apache-2.0
#include "attention/dispatch.h"
#include "attention/matrix_writer.h"
#include "attention/portable_engine.h"

namespace vllm_arm {

void write_kv_cache_bf16(const WriteKvCacheArguments& arguments, std::int64_t token_begin, std::int64_t token_end,
                         std::int64_t head_begin, std::int64_t head_end) {
  dispatch(arguments.cache, [&]<typename Element, typename Stored>() {
    if constexpr (std::is_same_v<Element, BFloat16> && std::is_same_v<Stored, BFloat16>) {
      write_matrices(arguments, 1, token_begin, token_end, head_begin, head_end);
    } else {
      write_tokens<PortableEngine<Element, Stored>, Stored>(arguments, token_begin, token_end, head_begin, head_end);
    }
  });
}

}  // namespace vllm_arm
