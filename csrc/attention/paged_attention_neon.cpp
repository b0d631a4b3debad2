// SPDX-License-Identifier: Apache-2.0
#include "attention/dispatch.h"
#include "attention/vector_engine.h"

namespace vllm_arm {

void paged_attention_neon(const PagedAttentionArguments& arguments, const WorkItem* items, std::int64_t count,
                          char* scratch) {
  dispatch(arguments.cache, [&]<typename Element, typename Stored>() {
    run_items<VectorEngine<Element, Stored>>(arguments, items, count, scratch);
  });
}

}  // namespace vllm_arm
