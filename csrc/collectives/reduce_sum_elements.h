// SPDX-License-Identifier: Apache-2.0
// What the variants of reduce_sum share: the choice of the element's type, and the sum of single elements.
#pragma once

#include "collectives/reduce_sum.h"
#include "isa/scalar_types.h"

namespace vllm_arm {
namespace {

// Integers as unsigned, which wrap around; the others in fp32.
[[maybe_unused]] std::uint32_t to_sum(std::uint32_t value) { return value; }
[[maybe_unused]] std::uint64_t to_sum(std::uint64_t value) { return value; }
[[maybe_unused]] float to_sum(float value) { return value; }
[[maybe_unused]] float to_sum(BFloat16 value) { return to_float(value); }
[[maybe_unused]] float to_sum(Float16 value) { return to_float(value); }

[[maybe_unused]] void from_sum(std::uint32_t sum, std::uint32_t& result) { result = sum; }
[[maybe_unused]] void from_sum(std::uint64_t sum, std::uint64_t& result) { result = sum; }
template <typename Element>
void from_sum(float sum, Element& result) {
  from_float(sum, result);
}

// N elements from `i` on, N known to the compiler: the sums stay in registers.
template <typename Element, std::int64_t N>
void sum_elements(const ReduceSumArguments& arguments, std::int64_t i) {
  decltype(to_sum(Element{})) sums[N];
  const Element* first = static_cast<const Element*>(arguments.sources[0]) + i;
  for (std::int64_t j = 0; j < N; ++j) sums[j] = to_sum(first[j]);
  for (int source = 1; source < arguments.source_count; ++source) {
    const Element* next = static_cast<const Element*>(arguments.sources[source]) + i;
    for (std::int64_t j = 0; j < N; ++j) sums[j] += to_sum(next[j]);
  }
  Element results[N];
  for (std::int64_t j = 0; j < N; ++j) from_sum(sums[j], results[j]);
  std::memcpy(static_cast<Element*>(arguments.output) + i, results, sizeof results);
  if (arguments.copy != nullptr) std::memcpy(static_cast<Element*>(arguments.copy) + i, results, sizeof results);
}

template <typename Element, std::int64_t N>
void sum_range(const ReduceSumArguments& arguments, std::int64_t begin, std::int64_t end) {
  std::int64_t i = begin;
  for (; i + N <= end; i += N) sum_elements<Element, N>(arguments, i);
  for (; i < end; ++i) sum_elements<Element, 1>(arguments, i);
}

}  // namespace
}  // namespace vllm_arm
