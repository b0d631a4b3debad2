// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include "attention/paged_attention.h"
#include "isa/kernel_table.h"
#include "operations.h"

namespace vllm_arm {

// The variants of both ops must be the same, for each orders the elements of a panel in its own way.
#define VLLM_ARM_DECLARE(isa)                                                                                      \
  void write_kv_cache_##isa(const WriteKvCacheArguments&, std::int64_t, std::int64_t, std::int64_t, std::int64_t); \
  void paged_attention_##isa(const PagedAttentionArguments&, const WorkItem*, std::int64_t, char*);
VLLM_ARM_PAGED_ATTENTION_VARIANTS(VLLM_ARM_DECLARE)
#undef VLLM_ARM_DECLARE

#define VLLM_ARM_ROW(isa) KernelVariant<WriteKvCacheKernel>{Isa::isa, write_kv_cache_##isa},
inline constexpr std::array kWriteKvCacheTable{VLLM_ARM_WRITE_KV_CACHE_VARIANTS(VLLM_ARM_ROW)};
#undef VLLM_ARM_ROW

#define VLLM_ARM_ROW(isa) KernelVariant<PagedAttentionKernel>{Isa::isa, paged_attention_##isa},
inline constexpr std::array kPagedAttentionTable{VLLM_ARM_PAGED_ATTENTION_VARIANTS(VLLM_ARM_ROW)};
#undef VLLM_ARM_ROW

}  // namespace vllm_arm
