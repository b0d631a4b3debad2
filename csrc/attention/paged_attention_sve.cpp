// SPDX-License-Identifier: Apache-2.0
#include "attention/matrix_variants.h"
#include "attention/sve_engine.h"
#include "isa/isa.h"

namespace vllm_arm {
namespace {

struct Sve2Fp8Decoder {
  static void decode(const std::uint8_t* unit, bfloat16x8_t& first, bfloat16x8_t& second) {
    uint8x16_t stored = vld1q_u8(unit);
    const uint8x16_t of_first = vandq_u8(stored, vreinterpretq_u8_u16(vdupq_n_u16(kFp8First)));
    // What differs from the first element is the second, with the halves of its bytes swapped.
    asm(".arch_extension sve2\n\txar %z0.b, %z0.b, %z1.b, #4" : "+w"(stored) : "w"(of_first));
    first = vreinterpretq_bf16_u8(of_first);
    second = vreinterpretq_bf16_u8(stored);
  }
};

}  // namespace

void paged_attention_sve(const PagedAttentionArguments& arguments, const WorkItem* items, std::int64_t count,
                         char* scratch) {
  run_matrix_items(
      arguments, items, count, scratch,
      [&] {
        if (vector_units() == 0) return run_items<MatrixEngine>(arguments, items, count, scratch);
        run_items<SveEngine>(arguments, items, count, scratch);
      },
      [&] {
        if (host_features().sve2) return run_fp8_items<Sve2Fp8Decoder>(arguments, items, count, scratch);
        run_fp8_items<NeonFp8Decoder>(arguments, items, count, scratch);
      });
}

}  // namespace vllm_arm
