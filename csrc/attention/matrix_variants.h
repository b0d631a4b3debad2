// SPDX-License-Identifier: Apache-2.0
// What the variants with matrix instructions share: which engine and which writer each type of cache has.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/dispatch.h"
#include "attention/fp8_matrix_engine.h"
#include "attention/fp8_matrix_writer.h"
#include "attention/int8_matrix_engine.h"
#include "attention/int8_matrix_writer.h"
#include "attention/matrix_engine.h"
#include "attention/matrix_writer.h"
#include "attention/vector_engine.h"
#include "attention/write_tokens.h"

namespace vllm_arm {
namespace {

// `run_bf16()` does caches of bf16, `run_fp8()` those of fp8 for queries in bf16.
template <typename RunBf16, typename RunFp8>
[[maybe_unused]] void run_matrix_items(const PagedAttentionArguments& arguments, const WorkItem* items,
                                       std::int64_t count, char* scratch, RunBf16 run_bf16, RunFp8 run_fp8) {
  dispatch(arguments.cache, [&]<typename Element, typename Stored>() {
    if constexpr (!std::is_same_v<Element, BFloat16>) {
      run_items<VectorEngine<Element, Stored>>(arguments, items, count, scratch);
    } else if constexpr (std::is_same_v<Stored, BFloat16>) {
      run_bf16();
    } else if constexpr (std::is_same_v<Stored, Int8>) {
      run_items<Int8MatrixEngine>(arguments, items, count, scratch);
    } else {
      run_fp8();
    }
  });
}

// `units` is MatrixWriter's; vectors of fp8 have one at most.
[[maybe_unused]] void write_matrix_cache(const WriteKvCacheArguments& arguments, std::int64_t units,
                                         std::int64_t token_begin, std::int64_t token_end, std::int64_t head_begin,
                                         std::int64_t head_end) {
  dispatch(arguments.cache, [&]<typename Element, typename Stored>() {
    if constexpr (!std::is_same_v<Element, BFloat16>) {
      write_tokens<VectorEngine<Element, Stored>, Stored>(arguments, token_begin, token_end, head_begin, head_end);
    } else if constexpr (std::is_same_v<Stored, BFloat16>) {
      MatrixWriter(units, arguments.cache.head_size).write(arguments, token_begin, token_end, head_begin, head_end);
    } else if constexpr (std::is_same_v<Stored, Int8>) {
      write_int8_matrices(arguments, token_begin, token_end, head_begin, head_end);
    } else {
      write_fp8_matrices<Stored>(arguments, std::min<std::int64_t>(units, 1), token_begin, token_end, head_begin,
                                 head_end);
    }
  });
}

}  // namespace
}  // namespace vllm_arm
