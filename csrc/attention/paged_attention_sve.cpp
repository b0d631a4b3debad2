// SPDX-License-Identifier: Apache-2.0
#include "attention/matrix_variants.h"
#include "attention/sve_engine.h"
#include "attention/sve_fp8_engine.h"
#include "isa/isa.h"

namespace vllm_arm {

void paged_attention_sve(const PagedAttentionArguments& arguments, const WorkItem* items, std::int64_t count,
                         char* scratch) {
  run_matrix_items(
      arguments, items, count, scratch,
      [&] {
        if (vector_units() == 0) return run_items<MatrixEngine>(arguments, items, count, scratch);
        run_items<SveEngine>(arguments, items, count, scratch);
      },
      [&] {
        if (vector_units() == 0) return run_fp8_items<Fp8Engine<NeonFp8Decoder>>(arguments, items, count, scratch);
        if (!host_features().sve2) return run_fp8_items<SveFp8Engine<NeonFp8Decoder>>(arguments, items, count, scratch);
        run_fp8_items<SveFp8Engine<Sve2Fp8Decoder>>(arguments, items, count, scratch);
      });
}

}  // namespace vllm_arm
