// SPDX-License-Identifier: Apache-2.0
// How long a cache line takes from one core to another.
#pragma once

namespace vllm_arm {

/// The time, in nanoseconds, that a store on CPU `first` takes to be seen on CPU `second`: half of a round trip of one
/// cache line between two threads, the least over `repeats` times the mean of `round_trips`. Throws
/// std::invalid_argument on numbers that cannot be, std::runtime_error where a CPU cannot be had or a thread does not
/// get to run for seconds.
double core_latency_ns(int first, int second, int round_trips, int repeats);

}  // namespace vllm_arm
