// SPDX-License-Identifier: Apache-2.0
#include "collectives/reduce_sum_elements.h"
#include "collectives/stores.h"

// On x86, where this project is developed and measured against code for AVX-512, the compiler makes copies for newer
// CPUs, of which the loader picks one. (The thread sanitizer cannot start a program that has such functions.)
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define VLLM_ARM_FOR_EACH_CPU __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4"), flatten))
#else
#define VLLM_ARM_FOR_EACH_CPU
#endif

namespace vllm_arm {
namespace {

// A cache line of elements at a time, in as many registers as the CPU needs for it.
using Words = std::uint32_t __attribute__((vector_size(kCacheLine)));
using Floats = float __attribute__((vector_size(kCacheLine)));

struct Float32Line {
  using Element = float;
  Floats sums;

  void load(const void* source) { std::memcpy(&sums, source, sizeof sums); }
  void add(const void* source) {
    Floats next;
    std::memcpy(&next, source, sizeof next);
    sums += next;
  }
  void round(void* destination) const { std::memcpy(destination, &sums, sizeof sums); }
};

// Two elements in each word: the upper one needs its neighbour cleared to be an fp32, the lower one to be shifted.
struct BFloat16Line {
  using Element = BFloat16;
  Floats lower, upper;

  static void split(const void* source, Floats& lower, Floats& upper) {
    Words words;
    std::memcpy(&words, source, sizeof words);
    const Words shifted = words << 16;
    words &= 0xffff0000;
    std::memcpy(&lower, &shifted, sizeof lower);
    std::memcpy(&upper, &words, sizeof upper);
  }
  void load(const void* source) { split(source, lower, upper); }
  void add(const void* source) {
    Floats next_lower, next_upper;
    split(source, next_lower, next_upper);
    lower += next_lower;
    upper += next_upper;
  }
  // The low half of a NaN that comes from bf16 values is zero, so that rounding carries nothing out of it.
  void round(void* destination) const {
    Words low, high;
    std::memcpy(&low, &lower, sizeof low);
    std::memcpy(&high, &upper, sizeof high);
    low += 0x7fff + ((low >> 16) & 1);
    high += 0x7fff + ((high >> 16) & 1);
    const Words both = (low >> 16) | (high & 0xffff0000);
    std::memcpy(destination, &both, sizeof both);
  }
};

template <typename Line>
void sum_lines(const ReduceSumArguments& arguments, std::int64_t begin, std::int64_t end) {
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(typename Line::Element));
  constexpr std::int64_t kStep = kCacheLine / kSize;
  const auto at = [](const void* array, std::int64_t i) { return static_cast<const std::byte*>(array) + i * kSize; };
  std::int64_t i = begin;
  for (; i + kStep <= end; i += kStep) {
    Line line;
    line.load(at(arguments.sources[0], i));
    for (int source = 1; source < arguments.source_count; ++source) line.add(at(arguments.sources[source], i));
    alignas(kCacheLine) std::byte rounded[kCacheLine];
    line.round(rounded);
    std::memcpy(static_cast<std::byte*>(arguments.output) + i * kSize, rounded, sizeof rounded);
    if (arguments.copy != nullptr) {
      write_line(static_cast<std::byte*>(arguments.copy) + i * kSize, rounded, arguments.copy_stores);
    }
  }
  for (; i < end; ++i) sum_elements<typename Line::Element, 1>(arguments, i);
}

VLLM_ARM_FOR_EACH_CPU
void sum_portable(const ReduceSumArguments& arguments, std::int64_t begin, std::int64_t end) {
  switch (arguments.type) {
    case SumType::bfloat16: return sum_lines<BFloat16Line>(arguments, begin, end);
    case SumType::float16: return sum_range<Float16, 32>(arguments, begin, end);
    case SumType::float32: return sum_lines<Float32Line>(arguments, begin, end);
    case SumType::int32: return sum_range<std::uint32_t, 16>(arguments, begin, end);
    case SumType::int64: return sum_range<std::uint64_t, 8>(arguments, begin, end);
  }
}

}  // namespace

void reduce_sum_portable(const ReduceSumArguments& arguments, std::int64_t begin, std::int64_t end) {
  sum_portable(arguments, begin, end);
}

}  // namespace vllm_arm
