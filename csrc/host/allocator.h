// SPDX-License-Identifier: Apache-2.0
// What the process's allocator is and does.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace vllm_arm {

// Path of the library whose malloc this process calls; empty where the loader does not know it.
std::string malloc_library();

struct MimallocStatistics {
  int version;                  // as mimalloc gives it: 3.4.3 is 343 or 30403
  std::int64_t resident_bytes;  // resident set size now
  std::int64_t peak_resident_bytes;
  std::int64_t committed_bytes;  // memory that mimalloc has committed now
  std::int64_t peak_committed_bytes;
  std::int64_t page_faults;  // major page faults, as mimalloc counts them
};

// mimalloc's own figures where it is the allocator, nothing otherwise.
std::optional<MimallocStatistics> mimalloc_statistics();

}  // namespace vllm_arm
