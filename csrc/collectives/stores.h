// SPDX-License-Identifier: Apache-2.0
// Writing what another core will read, and still has in its cache from the last time. On x86 a plain store waits for
// the line to come over, at five times the cost of the copy. Two ways round that, of which the faster one depends on
// what lies between the two cores, so that it is measured (Communicator::tune):
// - streamed: non-temporal stores, which take the line away from all caches and write to memory;
// - cached: plain stores into lines that were asked for some time before.
// Neoverse cores see by themselves that whole lines are written, and need neither.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define VLLM_ARM_STREAMED_STORES
#include <immintrin.h>
#endif

namespace vllm_arm {

inline constexpr std::int64_t kCacheLine = 64;

enum class Stores : std::uint8_t { cached, streamed };

#if defined(VLLM_ARM_STREAMED_STORES)

inline constexpr bool kHasStreamedStores = true;
inline constexpr std::int64_t kPrefetchedBytes = 16 * kCacheLine;

inline void prefetch_to_write(const std::byte* line) { __builtin_prefetch(line, 1); }

// `destination` begins a cache line.
inline void write_line(std::byte* destination, const std::byte* source, Stores stores) {
  if (stores == Stores::cached) {
    prefetch_to_write(destination + kPrefetchedBytes);
    std::memcpy(destination, source, static_cast<std::size_t>(kCacheLine));
    return;
  }
  for (std::int64_t i = 0; i < kCacheLine; i += 16) {
    const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm_stream_si128(reinterpret_cast<__m128i*>(destination + i), part);
  }
}

// Before a flag is written that says that the stores are done: streamed ones would be overtaken by it.
inline void order_stores() { _mm_sfence(); }

#else

inline constexpr bool kHasStreamedStores = false;

inline void prefetch_to_write(const std::byte*) {}

inline void write_line(std::byte* destination, const std::byte* source, Stores) {
  std::memcpy(destination, source, static_cast<std::size_t>(kCacheLine));
}

inline void order_stores() {}

#endif

// `destination` begins a cache line.
inline void write_bytes(std::byte* destination, const std::byte* source, std::int64_t bytes, Stores stores) {
  std::int64_t i = 0;
  if constexpr (kHasStreamedStores) {
    for (; i + kCacheLine <= bytes; i += kCacheLine) write_line(destination + i, source + i, stores);
  }
  if (i < bytes) std::memcpy(destination + i, source + i, static_cast<std::size_t>(bytes - i));
}

}  // namespace vllm_arm
