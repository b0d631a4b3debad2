// SPDX-License-Identifier: Apache-2.0
#include "host/core_latency.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>

namespace vllm_arm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kPatience{5};
// How often a waiting thread looks at the clock: seldom, for that costs more than the line.
constexpr std::uint32_t kSpinsPerLook = 1 << 16;

// Two lines wide, so that no prefetcher brings a neighbour along.
struct alignas(256) Ball {
  std::atomic<std::int64_t> value{0};
};

enum class Outcome { kDone, kNoCpu, kStuck };

bool move_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return pthread_setaffinity_np(pthread_self(), sizeof(set), &set) == 0;
}

// Waits until the ball holds `expected`; false where it does not for too long, or the other side has given up.
bool await(const std::atomic<std::int64_t>& value, std::int64_t expected) {
  const Clock::time_point deadline = Clock::now() + kPatience;
  for (std::uint32_t spins = 1;; ++spins) {
    const std::int64_t seen = value.load(std::memory_order_acquire);
    if (seen == expected) return true;
    if (seen < 0 || (spins % kSpinsPerLook == 0 && Clock::now() > deadline)) return false;
  }
}

// Returns every ball that arrives, an odd number, as the even one after it.
Outcome return_balls(int cpu, Ball& ball, std::int64_t count) {
  Outcome outcome = Outcome::kDone;
  if (!move_to(cpu)) outcome = Outcome::kNoCpu;
  for (std::int64_t turn = 0; outcome == Outcome::kDone && turn < count; ++turn) {
    if (!await(ball.value, 2 * turn + 1)) {
      outcome = Outcome::kStuck;
    } else {
      ball.value.store(2 * turn + 2, std::memory_order_release);
    }
  }
  if (outcome != Outcome::kDone) ball.value.store(-1, std::memory_order_release);
  return outcome;
}

Outcome play(int cpu, Ball& ball, int round_trips, int repeats, double& best) {
  if (!move_to(cpu)) {
    ball.value.store(-1, std::memory_order_release);
    return Outcome::kNoCpu;
  }
  std::int64_t turn = 0;
  // The first round brings both threads to their CPUs, and the line to their caches.
  for (int repeat = -1; repeat < repeats; ++repeat) {
    const Clock::time_point start = Clock::now();
    for (int trip = 0; trip < round_trips; ++trip, ++turn) {
      ball.value.store(2 * turn + 1, std::memory_order_release);
      if (!await(ball.value, 2 * turn + 2)) {
        ball.value.store(-1, std::memory_order_release);
        return Outcome::kStuck;
      }
    }
    const std::chrono::duration<double, std::nano> taken = Clock::now() - start;
    if (repeat >= 0) best = std::min(best, taken.count() / round_trips / 2);
  }
  return Outcome::kDone;
}

void check(Outcome outcome, int cpu) {
  const std::string name = "CPU " + std::to_string(cpu);
  if (outcome == Outcome::kNoCpu) throw std::runtime_error(name + " cannot be used by this process");
  if (outcome == Outcome::kStuck) throw std::runtime_error(name + " waited for seconds: is the other CPU busy?");
}

}  // namespace

double core_latency_ns(int first, int second, int round_trips, int repeats) {
  if (first < 0 || second < 0 || first >= CPU_SETSIZE || second >= CPU_SETSIZE || first == second) {
    throw std::invalid_argument("CPUs " + std::to_string(first) + " and " + std::to_string(second) +
                                ": expected two different ids below " + std::to_string(CPU_SETSIZE));
  }
  if (round_trips < 1 || repeats < 1) throw std::invalid_argument("round_trips and repeats: expected at least 1");
  Ball ball;
  double best = std::numeric_limits<double>::infinity();
  Outcome here = Outcome::kDone;
  Outcome there = Outcome::kDone;
  // A thread for this side too: the caller's CPUs are to stay as they are.
  std::thread returner(
      [&] { there = return_balls(second, ball, static_cast<std::int64_t>(round_trips) * (repeats + 1)); });
  std::thread player([&] { here = play(first, ball, round_trips, repeats, best); });
  player.join();
  returner.join();
  check(here == Outcome::kStuck && there == Outcome::kNoCpu ? Outcome::kDone : here, first);
  check(there, second);
  return best;
}

}  // namespace vllm_arm
