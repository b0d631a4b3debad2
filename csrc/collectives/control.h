// SPDX-License-Identifier: Apache-2.0
// What each rank's segment of shared memory begins with, and who the ranks of a group are.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "collectives/stores.h"

namespace vllm_arm {

inline constexpr int kMaximumWorldSize = 64;

// A collective operation that cannot be completed; the message names the operation and the rank.
struct CollectiveError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using SharedWord = std::atomic<std::uint64_t>;
static_assert(SharedWord::is_always_lock_free && sizeof(SharedWord) == 8, "words are shared between processes");

// A word on a cache line of its own.
struct alignas(kCacheLine) SharedLine {
  SharedWord word;
};

struct Control {
  SharedLine identity;     // written once by the owner, so that a peer knows that it opened the right memory
  SharedLine failure;      // see Failure; written by whichever rank finds one
  SharedLine is_closed;    // 1 when the owner has left
  SharedLine waiting_for;  // 1 + the rank that the owner waits for, 0 while it waits for none: a hint
};

// Why a group has failed: which rank, what happened to it, and who found that. 0 stands for none.
struct Failure {
  enum class Reason : std::uint8_t { none, died, silent, closed, mismatch };
  Reason reason = Reason::none;
  int rank = 0;
  int found_by = 0;

  std::uint64_t pack() const {
    return static_cast<std::uint64_t>(reason) | static_cast<std::uint64_t>(rank) << 8 |
           static_cast<std::uint64_t>(found_by) << 16;
  }
  static Failure unpack(std::uint64_t word) {
    return {static_cast<Reason>(word & 0xff), static_cast<int>(word >> 8 & 0xff), static_cast<int>(word >> 16 & 0xff)};
  }
};

// A process, told apart from a later one of the same number by its start.
struct Process {
  std::int64_t pid = 0;
  std::uint64_t start_time = 0;  // in clock ticks since boot; 0: not known, and never taken for dead

  static Process self();
  // The same process by the start that others see of it: to itself, an emulated one sees another.
  Process as_others_see_it() const;
  // False where it has ended, even if its parent has not waited for it yet.
  bool is_alive() const;
};

// The ranks of a communicator as one of them sees them.
struct Group {
  int rank;
  std::vector<Control*> controls;  // one for each rank
  std::vector<Process> processes;  // one for each rank
  std::chrono::duration<double> timeout;

  int world_size() const { return static_cast<int>(controls.size()); }
  // Throws CollectiveError if the group has failed.
  void check(const char* operation) const;
  // Makes `failure` known to every rank, unless an earlier one is, and throws CollectiveError.
  [[noreturn]] void fail(const char* operation, Failure failure) const;
};

}  // namespace vllm_arm
