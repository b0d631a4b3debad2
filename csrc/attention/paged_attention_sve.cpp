// SPDX-License-Identifier: Apache-2.0
#include "attention/dispatch.h"
#include "attention/portable_engine.h"
#include "attention/sve_engine.h"

namespace vllm_arm {

void paged_attention_sve(const PagedAttentionArguments& arguments, const WorkItem* items, std::int64_t count,
                         char* scratch) {
  dispatch(arguments.cache, [&]<typename Element, typename Stored>() {
    if constexpr (std::is_same_v<Element, BFloat16> && std::is_same_v<Stored, BFloat16>) {
      if (vector_units() == 0) return run_items<MatrixEngine>(arguments, items, count, scratch);
      run_items<SveEngine>(arguments, items, count, scratch);
    } else {
      run_items<PortableEngine<Element, Stored>>(arguments, items, count, scratch);
    }
  });
}

}  // namespace vllm_arm
