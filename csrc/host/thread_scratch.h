// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <new>

namespace vllm_arm {

// Memory that an operation needs while it runs, aligned to a cache line: one block for each thread that calls, grown as
// needed. Each call gives the same block.
inline void* thread_scratch(std::size_t bytes) {
  constexpr std::align_val_t kAlignment{64};
  struct Block {
    void* data = nullptr;
    std::size_t size = 0;
    ~Block() { ::operator delete(data, kAlignment); }
  };
  thread_local Block block;
  if (block.size < bytes) {
    ::operator delete(block.data, kAlignment);
    block.data = nullptr;
    block.size = 0;
    block.data = ::operator new(bytes, kAlignment);
    block.size = bytes;
  }
  return block.data;
}

}  // namespace vllm_arm
