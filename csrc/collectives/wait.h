// SPDX-License-Identifier: Apache-2.0
// Waiting for a word that another rank writes: spinning first, then giving way, and never without end.
#pragma once

#include <chrono>

#include "collectives/control.h"

namespace vllm_arm {

// A short rest between two looks at a word.
inline void rest() {
#if defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // some ten cycles; YIELD takes none on these cores
#elif defined(__x86_64__)
  asm volatile("pause" ::: "memory");
#endif
}

// One wait that has outlasted the spinning.
class LongWait {
 public:
  LongWait(const Group& group, const char* operation, int peer);
  ~LongWait();
  LongWait(const LongWait&) = delete;
  LongWait& operator=(const LongWait&) = delete;

  // Gives way for a while, shorter if `word` changes from `seen`. Throws CollectiveError if the group has failed.
  void pause(const SharedWord& word, std::uint64_t seen);
  // True if it is time to see to whether the peer can still answer; then look at the word once more, and call `check`.
  bool is_check_due();
  // Throws CollectiveError if the peer is dead, has left, or has been silent for too long.
  void check();

 private:
  using Clock = std::chrono::steady_clock;

  const Group& group_;
  const char* operation_;
  int peer_;
  Clock::time_point start_, next_check_;
  Failure::Reason gone_ = Failure::Reason::none;
  std::chrono::microseconds sleep_;
};

// Waits on behalf of one rank in one operation.
class Waiter {
 public:
  Waiter(const Group& group, const char* operation) : group_(group), operation_(operation) {}

  // Returns when `is_ready(word)`, with all that was written before it. Throws CollectiveError.
  template <typename IsReady>
  void wait(int peer, const SharedWord& word, IsReady is_ready) const {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (is_ready(word.load(std::memory_order_acquire))) return;
      rest();
    }
    LongWait wait(group_, operation_, peer);
    while (true) {
      const std::uint64_t seen = word.load(std::memory_order_acquire);
      if (is_ready(seen)) return;
      wait.pause(word, seen);
      if (wait.is_check_due()) {
        // What the peer wrote before it went is still good.
        if (is_ready(word.load(std::memory_order_acquire))) return;
        wait.check();
      }
    }
  }

  [[noreturn]] void mismatch(int peer) const {
    group_.fail(operation_, {Failure::Reason::mismatch, peer, group_.rank});
  }

 private:
  static constexpr int kSpins = 1000;  // some 10 to 40 us

  const Group& group_;
  const char* operation_;
};

}  // namespace vllm_arm
