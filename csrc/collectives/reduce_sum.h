// SPDX-License-Identifier: Apache-2.0
// The sum over ranks, element by element: the one arithmetic of the collectives.
#pragma once

#include <cstdint>

#include "collectives/stores.h"

namespace vllm_arm {

enum class SumType : std::uint8_t { bfloat16, float16, float32, int32, int64 };

constexpr std::int64_t sum_type_size(SumType type) {
  switch (type) {
    case SumType::bfloat16:
    case SumType::float16: return 2;
    case SumType::float32:
    case SumType::int32: return 4;
    case SumType::int64: return 8;
  }
  return 0;
}

// output[i] = sources[0][i] + sources[1][i] + ... in this order. Floating point types are added in fp32 and rounded
// once, to nearest even; integers wrap around. `output` may be one of the sources.
struct ReduceSumArguments {
  const void* const* sources;  // `source_count` arrays, aligned to their elements at least
  int source_count;            // at least 1
  void* output;
  void* copy;  // receives the same as `output`, for another core to read; null, or aligned to a cache line
  SumType type;
  Stores copy_stores = Stores::cached;  // how `copy` is written
};

// Sums elements [begin, end).
using ReduceSumKernel = void (*)(const ReduceSumArguments&, std::int64_t begin, std::int64_t end);

}  // namespace vllm_arm
