// SPDX-License-Identifier: Apache-2.0
// Small messages: one writer, any number of readers, and a ring of cache lines that each carry data and a flag, so that
// a line that has arrived needs no second transfer to be known as such.
//
// Lines are numbered from 0 on without end; line n lies at n modulo the ring's size, a power of two, and its flag holds
// n + 1 and the fingerprint of the operation. Every reader counts the lines that it is done with in a word of its own;
// the writer overwrites a line when every count has passed it. Writer and readers know from the operation itself how
// many lines it takes, so that a reader without interest in some of them counts them as done without a look.
//
// `Memory` is how shared memory is touched (see DirectMemory): tests put their own in its place, to run through every
// order in which ranks can do so.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "collectives/control.h"

namespace vllm_arm {

struct alignas(kCacheLine) Line {
  static constexpr std::int64_t kPayload = kCacheLine - static_cast<std::int64_t>(sizeof(SharedWord));
  std::byte payload[kPayload];
  SharedWord flag;
};
static_assert(sizeof(Line) == kCacheLine);

inline constexpr std::int64_t kBatchLines = 16;  // whose flags are read, or written, together
inline constexpr std::int64_t kBatchBytes = kBatchLines * Line::kPayload;
static_assert(kBatchBytes % 128 == 0, "whole elements, and whole steps of the sums, in every batch");

inline Line& line_of(std::span<Line> ring, std::int64_t number) {
  return ring[static_cast<std::size_t>(number) & (ring.size() - 1)];
}
inline const Line& line_of(std::span<const Line> ring, std::int64_t number) {
  return ring[static_cast<std::size_t>(number) & (ring.size() - 1)];
}

constexpr std::int64_t lines_of(std::int64_t bytes) {
  return std::max<std::int64_t>(1, (bytes + Line::kPayload - 1) / Line::kPayload);
}

// Tells the operations of a group apart: ranks that meet in different ones get an error.
using Fingerprint = std::uint16_t;

constexpr std::uint64_t flag_of(std::int64_t number, Fingerprint fingerprint) {
  return static_cast<std::uint64_t>(number + 1) << 16 | fingerprint;
}

// Whether `flag` is that of `number`, of whatever operation.
constexpr bool is_flag_of(std::uint64_t flag, std::int64_t number) {
  return flag >> 16 == (static_cast<std::uint64_t>(number + 1) & 0xffffffffffff);
}

#if defined(VLLM_ARM_STREAMED_STORES)
// A line by one non-temporal store of 64 bytes, data and flag: no order between stores is needed. See stores.h.
__attribute__((target("avx512f"))) inline void write_whole_lines(std::span<Line> ring, std::int64_t first,
                                                                 std::int64_t count, const std::byte* source,
                                                                 std::int64_t bytes, Fingerprint fingerprint) {
  constexpr __mmask8 kFlag = 0x80;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t size = std::min(Line::kPayload, bytes - i * Line::kPayload);
    __m512i words;
    if (size == Line::kPayload) {
      words = _mm512_maskz_loadu_epi64(static_cast<__mmask8>(~kFlag), source + i * Line::kPayload);
    } else {
      alignas(kCacheLine) std::byte last[kCacheLine] = {};
      std::memcpy(last, source + i * Line::kPayload, static_cast<std::size_t>(size));
      words = _mm512_load_si512(last);
    }
    words = _mm512_mask_set1_epi64(words, kFlag, static_cast<long long>(flag_of(first + i, fingerprint)));
    _mm512_stream_si512(reinterpret_cast<__m512i*>(&line_of(ring, first + i)), words);
  }
}
#endif

// Plain memory. A whole batch is ordered by one fence: on Arm, an acquiring load for each line would have to wait for
// the one before it, where these are all under way together.
struct DirectMemory {
#if defined(__SANITIZE_THREAD__)
  // The sanitizer does not know fences.
  static constexpr auto kRead = std::memory_order_acquire;
  static constexpr auto kWrite = std::memory_order_release;
  static void acquire() {}
  static void release() {}
#else
  static constexpr auto kRead = std::memory_order_relaxed;
  static constexpr auto kWrite = std::memory_order_relaxed;
  static void acquire() { std::atomic_thread_fence(std::memory_order_acquire); }
  static void release() { std::atomic_thread_fence(std::memory_order_release); }
#endif
  static std::uint64_t load(const SharedWord& word) { return word.load(kRead); }
  static void store(SharedWord& word, std::uint64_t value) { word.store(value, kWrite); }
  // Writes lines [first, first + count) of the ring, in which the next `bytes` of the message are.
  static void write_lines(std::span<Line> ring, std::int64_t first, std::int64_t count, const std::byte* source,
                          std::int64_t bytes, Fingerprint fingerprint, [[maybe_unused]] Stores stores) {
#if defined(VLLM_ARM_STREAMED_STORES)
    static const bool has_whole_line_stores = __builtin_cpu_supports("avx512f");
    if (stores == Stores::streamed && has_whole_line_stores) {
      return write_whole_lines(ring, first, count, source, bytes, fingerprint);
    }
#endif
    for (std::int64_t i = 0; i < count; ++i) {
      prefetch_to_write(line_of(ring, first + kBatchLines + i).payload);
      const std::int64_t size = std::min(Line::kPayload, bytes - i * Line::kPayload);
      std::byte* payload = line_of(ring, first + i).payload;
      // The usual size is a constant, so that the copy is a few instructions.
      if (size == Line::kPayload) {
        std::memcpy(payload, source + i * Line::kPayload, Line::kPayload);
      } else {
        std::memcpy(payload, source + i * Line::kPayload, static_cast<std::size_t>(size));
      }
    }
    release();
    for (std::int64_t i = 0; i < count; ++i) store(line_of(ring, first + i).flag, flag_of(first + i, fingerprint));
  }
  static void prefetch(const Line& line) { __builtin_prefetch(&line); }
  static void copy_out(std::byte* destination, const std::byte* source, std::int64_t bytes) {
    std::memcpy(destination, source, bytes);
  }
};

// A reader's count of what it is done with, as the writer sees it.
struct Acknowledgement {
  int reader;
  const SharedWord* count;
};

// How far a writer may go, given what its readers are done with.
template <typename Memory>
class Room {
 public:
  Room(std::int64_t capacity, std::vector<Acknowledgement> acknowledgements)
      : capacity_(capacity), limit_(capacity), acknowledgements_(std::move(acknowledgements)) {}

  // Returns when units up to `end` can be written. The readers' words are looked at only if what is known of them does
  // not suffice.
  template <typename Waiter>
  void wait(std::int64_t end, const Waiter& waiter) {
    if (end <= limit_) return;
    const auto needed = static_cast<std::uint64_t>(end - capacity_);
    std::uint64_t least = UINT64_MAX;
    for (const Acknowledgement& each : acknowledgements_) {
      waiter.wait(each.reader, *each.count, [&](std::uint64_t count) { return count >= needed; });
      least = std::min(least, Memory::load(*each.count));
    }
    Memory::acquire();
    limit_ = acknowledgements_.empty() ? INT64_MAX : static_cast<std::int64_t>(least) + capacity_;
  }

 private:
  std::int64_t capacity_, limit_;
  std::vector<Acknowledgement> acknowledgements_;
};

template <typename Memory = DirectMemory>
class LineWriter {
 public:
  LineWriter(std::span<Line> ring, std::vector<Acknowledgement> acknowledgements)
      : ring_(ring), room_(static_cast<std::int64_t>(ring.size()), std::move(acknowledgements)) {}

  // Writes `bytes` from `data`, in lines_of(bytes) lines, which must be fewer than the ring's.
  template <typename Waiter>
  void write(const void* data, std::int64_t bytes, Fingerprint fingerprint, Stores stores, const Waiter& waiter) {
    const auto* source = static_cast<const std::byte*>(data);
    const std::int64_t end = next_ + lines_of(bytes);
    while (next_ < end) {
      const std::int64_t count = std::min(kBatchLines, end - next_);
      room_.wait(next_ + count, waiter);
      Memory::write_lines(ring_, next_, count, source, bytes, fingerprint, stores);
      source += count * Line::kPayload;
      bytes -= count * Line::kPayload;
      next_ += count;
    }
  }

 private:
  std::span<Line> ring_;
  Room<Memory> room_;
  std::int64_t next_ = 0;
};

template <typename Memory = DirectMemory>
class LineReader {
 public:
  LineReader(int writer, std::span<const Line> ring, SharedWord* done) : writer_(writer), ring_(ring), done_(done) {}

  // A message of `bytes` is about to be read: the first lines can set out.
  void expect(std::int64_t bytes) {
    end_ = next_ + lines_of(bytes);
    prefetch(next_, next_ + kBatchLines);
  }

  // The next lines of the message, at most kBatchLines, into `destination`.
  template <typename Waiter>
  void read_batch(void* destination, std::int64_t bytes, Fingerprint fingerprint, const Waiter& waiter) {
    const std::int64_t count = lines_of(bytes);
    prefetch(next_ + kBatchLines, next_ + 2 * kBatchLines);
    // All flags first, so that the lines travel at the same time.
    std::uint64_t differences = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      differences |= Memory::load(line(next_ + i).flag) ^ flag_of(next_ + i, fingerprint);
    }
    if (differences != 0) {
      for (std::int64_t i = 0; i < count; ++i) wait_for(next_ + i, fingerprint, waiter);
    }
    Memory::acquire();
    auto* target = static_cast<std::byte*>(destination);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t size = std::min(Line::kPayload, bytes);
      if (size == Line::kPayload) {
        Memory::copy_out(target, line(next_ + i).payload, Line::kPayload);
      } else {
        Memory::copy_out(target, line(next_ + i).payload, size);
      }
      target += size;
      bytes -= size;
    }
    next_ += count;
  }

  template <typename Waiter>
  void read(void* destination, std::int64_t bytes, Fingerprint fingerprint, const Waiter& waiter) {
    auto* target = static_cast<std::byte*>(destination);
    expect(bytes);
    do {
      const std::int64_t size = std::min(kBatchBytes, bytes);
      read_batch(target, size, fingerprint, waiter);
      target += size;
      bytes -= size;
    } while (bytes > 0);
  }

  // Passes over the lines of a message of `bytes` that this reader has no use for.
  void skip(std::int64_t bytes) { next_ += lines_of(bytes); }

  // Lets the writer have the lines that were read or skipped.
  void acknowledge() {
    Memory::release();
    Memory::store(*done_, static_cast<std::uint64_t>(next_));
  }

 private:
  const Line& line(std::int64_t number) const { return line_of(ring_, number); }

  void prefetch(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t number = begin; number < std::min(end, end_); ++number) Memory::prefetch(line(number));
  }

  template <typename Waiter>
  void wait_for(std::int64_t number, Fingerprint fingerprint, const Waiter& waiter) const {
    std::uint64_t flag = 0;
    waiter.wait(writer_, line(number).flag, [&](std::uint64_t seen) {
      flag = seen;
      return is_flag_of(seen, number);
    });
    if (flag != flag_of(number, fingerprint)) waiter.mismatch(writer_);
  }

  int writer_;
  std::span<const Line> ring_;
  SharedWord* done_;
  std::int64_t next_ = 0;
  std::int64_t end_ = 0;  // of the message that is being read
};

}  // namespace vllm_arm
