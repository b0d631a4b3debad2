// SPDX-License-Identifier: Apache-2.0
// Writing what another core will read. On x86 by non-temporal stores: a plain store would first take the line away from
// the reader that still has the last message in its cache, which was measured to cost five times the copy. Neoverse
// cores see by themselves that whole lines are written, and need no such hint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace vllm_arm {

inline constexpr std::int64_t kCacheLine = 64;

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)

inline void stream_line(std::byte* destination, const std::byte* source) {
  for (std::int64_t i = 0; i < kCacheLine; i += 16) {
    const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm_stream_si128(reinterpret_cast<__m128i*>(destination + i), part);
  }
}

// Before a flag is written that says that the stores are done: it would overtake them.
inline void order_streamed_stores() { _mm_sfence(); }

#else

inline void stream_line(std::byte* destination, const std::byte* source) {
  std::memcpy(destination, source, static_cast<std::size_t>(kCacheLine));
}

inline void order_streamed_stores() {}

#endif

// `destination` begins a cache line.
inline void stream_bytes(std::byte* destination, const std::byte* source, std::int64_t bytes) {
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
  std::int64_t i = 0;
  for (; i + kCacheLine <= bytes; i += kCacheLine) stream_line(destination + i, source + i);
#else
  const std::int64_t i = 0;
#endif
  if (i < bytes) std::memcpy(destination + i, source + i, static_cast<std::size_t>(bytes - i));
}

}  // namespace vllm_arm
