// SPDX-License-Identifier: Apache-2.0
#include "collectives/wait.h"

#include <sched.h>

#include <algorithm>
#include <thread>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace vllm_arm {
namespace {

using namespace std::chrono_literals;

constexpr auto kYieldingTime = 5ms;
constexpr auto kShortestSleep = 20us;
constexpr auto kLongestSleep = 500us;
constexpr auto kTimeBetweenChecks = 50ms;

// Until the line of `word` is written, or the kernel's event stream (every 100 us) ends the wait.
void wait_for_event([[maybe_unused]] const SharedWord& word, [[maybe_unused]] std::uint64_t seen) {
#if defined(__aarch64__)
  static const bool has_event_stream = getauxval(AT_HWCAP) & HWCAP_EVTSTRM;
  if (!has_event_stream) return;
  std::uint64_t value;
  asm volatile("ldaxr %0, [%1]" : "=r"(value) : "r"(&word) : "memory");
  if (value == seen) asm volatile("wfe" ::: "memory");
#endif
}

}  // namespace

LongWait::LongWait(const Group& group, const char* operation, int peer)
    : group_(group),
      operation_(operation),
      peer_(peer),
      start_(Clock::now()),
      next_check_(start_ + kTimeBetweenChecks),
      sleep_(kShortestSleep) {
  group_.controls[group_.rank]->waiting_for.word.store(1 + peer, std::memory_order_relaxed);
}

LongWait::~LongWait() { group_.controls[group_.rank]->waiting_for.word.store(0, std::memory_order_relaxed); }

void LongWait::pause(const SharedWord& word, std::uint64_t seen) {
  group_.check(operation_);
  if (Clock::now() - start_ < kYieldingTime) {
    wait_for_event(word, seen);
    sched_yield();
  } else {
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min<std::chrono::microseconds>(2 * sleep_, kLongestSleep);
  }
}

bool LongWait::is_check_due() {
  const auto now = Clock::now();
  const bool is_closed = group_.controls[peer_]->is_closed.word.load(std::memory_order_acquire) != 0;
  if (now < next_check_ && !is_closed) return false;
  next_check_ = now + kTimeBetweenChecks;
  if (is_closed) {
    gone_ = Failure::Reason::closed;
  } else if (!group_.processes[peer_].is_alive()) {
    gone_ = Failure::Reason::died;
  } else if (now - start_ > group_.timeout) {
    gone_ = Failure::Reason::silent;
  }
  return gone_ != Failure::Reason::none;
}

void LongWait::check() {
  int culprit = peer_;
  if (gone_ == Failure::Reason::silent) {
    // The peer may itself be waiting: follow it to the one that is not.
    for (int hops = 0; hops < group_.world_size(); ++hops) {
      const auto next = static_cast<int>(group_.controls[culprit]->waiting_for.word.load(std::memory_order_relaxed));
      if (next == 0 || next - 1 == group_.rank) break;
      culprit = next - 1;
    }
  }
  group_.fail(operation_, {gone_, culprit, group_.rank});
}

}  // namespace vllm_arm
