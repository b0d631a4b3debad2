// SPDX-License-Identifier: Apache-2.0
#include "attention/matrix_variants.h"

namespace vllm_arm {

void paged_attention_bf16(const PagedAttentionArguments& arguments, const WorkItem* items, std::int64_t count,
                          char* scratch) {
  run_matrix_items(
      arguments, items, count, scratch, [&] { run_items<MatrixEngine>(arguments, items, count, scratch); },
      [&] { run_fp8_items<Fp8Engine<NeonFp8Decoder>>(arguments, items, count, scratch); });
}

}  // namespace vllm_arm
