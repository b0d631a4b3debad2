// SPDX-License-Identifier: Apache-2.0
#include "attention/dispatch.h"
#include "attention/portable_engine.h"

namespace vllm_arm {

void paged_attention_portable(const PagedAttentionArguments& arguments, const WorkItem* items, std::int64_t count,
                              char* scratch) {
  dispatch(arguments.cache, [&]<typename Element, typename Stored>() {
    run_items<PortableEngine<Element, Stored>>(arguments, items, count, scratch);
  });
}

}  // namespace vllm_arm
