// SPDX-License-Identifier: Apache-2.0
#include "attention/dispatch.h"
#include "attention/matrix_writer.h"
#include "attention/portable_engine.h"
#include "attention/sve_engine.h"

namespace vllm_arm {

void write_kv_cache_sve(const WriteKvCacheArguments& arguments, std::int64_t token_begin, std::int64_t token_end,
                        std::int64_t head_begin, std::int64_t head_end) {
  dispatch(arguments.cache, [&]<typename Element, typename Stored>() {
    if constexpr (std::is_same_v<Element, BFloat16> && std::is_same_v<Stored, BFloat16>) {
      const std::int64_t together = std::max<std::int64_t>(vector_units(), 1);
      write_matrices(arguments, together, token_begin, token_end, head_begin, head_end);
    } else {
      write_tokens<PortableEngine<Element, Stored>, Stored>(arguments, token_begin, token_end, head_begin, head_end);
    }
  });
}

}  // namespace vllm_arm
