// SPDX-License-Identifier: Apache-2.0
#include "attention/dispatch.h"
#include "attention/matrix_engine.h"
#include "attention/portable_engine.h"

namespace vllm_arm {

void paged_attention_bf16(const PagedAttentionArguments& arguments, const WorkItem* items, std::int64_t count,
                          char* scratch) {
  dispatch(arguments.cache, [&]<typename Element, typename Stored>() {
    if constexpr (std::is_same_v<Element, BFloat16> && std::is_same_v<Stored, BFloat16>) {
      run_items<MatrixEngine>(arguments, items, count, scratch);
    } else {
      run_items<PortableEngine<Element, Stored>>(arguments, items, count, scratch);
    }
  });
}

}  // namespace vllm_arm
