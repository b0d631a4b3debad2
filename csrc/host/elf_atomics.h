// SPDX-License-Identifier: Apache-2.0
// Which kind of atomic instructions an aarch64 library holds.
#pragma once

#include <cstdint>
#include <string>

namespace vllm_arm {

struct AtomicCounts {
  std::int64_t lse = 0;        // LDADD, SWP, CAS and their kin
  std::int64_t exclusive = 0;  // LDXR and LDAXR, the first half of a load-store-exclusive loop
  bool is_aarch64 = false;
};

// Counts in the executable sections of the ELF file at `path`. Throws std::runtime_error naming the path where it
// cannot be read or is no 64-bit little-endian ELF file.
AtomicCounts count_atomics(const std::string& path);

}  // namespace vllm_arm
