// SPDX-License-Identifier: Apache-2.0
// The collective operations of one group of ranks that share memory.
//
// Every rank calls the same operations in the same order, apart from send and recv, which concern two ranks. One thread
// of a rank is in a communicator at a time, with those that `RunLanes` brings. An operation that cannot be completed
// throws CollectiveError on every rank, and so does every later one.
#pragma once

#include <functional>
#include <memory>

#include "collectives/layout.h"
#include "collectives/reduce_sum.h"
#include "collectives/wait.h"

namespace vllm_arm {

// Calls lane(0) ... lane(count - 1), which do not throw: in ascending order in each thread, in as many threads as it
// has.
using RunLanes = std::function<void(int count, const std::function<void(int)>& lane)>;

// What depends on the way between the ranks' cores; results do not depend on it.
struct Tuning {
  Stores stores = kHasStreamedStores ? Stores::streamed : Stores::cached;
  // Messages of more bytes go by blocks, which take another trip between cores, and less work for each byte.
  std::int64_t most_by_lines = 8 << 10;
};

class Communicator {
 public:
  // `segments` are the ranks' segments, of zeros at first, as this process sees them, laid out by `layout`.
  Communicator(int rank, const std::vector<std::byte*>& segments, std::vector<Process> processes, Layout layout,
               std::chrono::duration<double> timeout, ReduceSumKernel reduce_sum, RunLanes run_lanes);

  int rank() const { return group_.rank; }
  int world_size() const { return group_.world_size(); }

  // data[i] = the sum over ranks of data[i], added in the order of ranks: the same bits on every rank.
  void all_reduce(void* data, std::int64_t count, SumType type);
  // output = the inputs of all ranks one after the other, sizes[r] bytes from rank r.
  void all_gather(void* output, const void* input, std::span<const std::int64_t> sizes);
  // The same on `destination` only; the output of other ranks is not looked at.
  void gather(void* output, const void* input, std::span<const std::int64_t> sizes, int destination);
  // Rank r's output = the sum over ranks of the r-th part of their inputs, counts[r] elements; `output` is not in
  // `input`.
  void reduce_scatter(void* output, const void* input, std::span<const std::int64_t> counts, SumType type);
  // data = that of `source`.
  void broadcast(void* data, std::int64_t bytes, int source);
  // Returns when the data is in shared memory, which holds 4 blocks: what is larger must be on its way out.
  void send(const void* data, std::int64_t bytes, int destination);
  void receive(void* data, std::int64_t bytes, int source);
  void barrier();
  // Measures what is fastest between these ranks, in so many turns, and keeps to it. An operation like the others: all
  // take part. all_reduce does it again from time to time, for the CPUs of a virtual machine move.
  void tune(int turns);
  Tuning tuning() const { return tuning_; }
  // The same on every rank, between operations.
  void set_tuning(Tuning tuning) { tuning_ = tuning; }
  // Tells the others that this rank takes part no more.
  void close();

 private:
  struct Lane {
    BlockWriter writer;
    std::vector<BlockReader> readers;  // one for each rank, that of this rank unused
  };
  struct Operation;  // what is common to the steps of one call
  using Sizes = std::span<const std::int64_t>;
  // The ranks that read what the others give: all, or one.
  static constexpr int kEveryRank = -1;

  template <typename Run>
  void in_lanes(std::int64_t bytes, const Run& run);
  template <typename Value>
  void choose(Value& setting, std::array<Value, 2> values, std::int64_t bytes, int turns);
  bool is_small(std::int64_t written, std::int64_t read) const;
  template <typename Visit>
  void for_each_peer(const Visit& visit) const;
  void sum(const void* const* sources, void* output, void* copy, std::int64_t bytes, SumType type) const;
  void check_rank(const char* operation, const char* name, int rank) const;

  void all_reduce_small(const Operation& operation, std::byte* data, std::int64_t bytes, SumType type);
  void all_reduce_lane(const Operation& operation, Lane& lane, std::byte* data, std::int64_t bytes, SumType type);
  void gather_to(const Operation& operation, int destination, void* output, const void* input, Sizes sizes);
  void gather_small(const Operation& operation, std::byte* output, const std::byte* input, Sizes sizes);
  void gather_lane(const Operation& operation, int lane, int lanes, std::byte* output, const std::byte* input,
                   Sizes sizes);
  void reduce_scatter_small(const Operation& operation, std::byte* output, const std::byte* input, Sizes sizes,
                            SumType type);
  void reduce_scatter_lane(const Operation& operation, int lane, int lanes, std::byte* output, const std::byte* input,
                           Sizes sizes, SumType type);

  Group group_;
  Layout layout_;
  ReduceSumKernel reduce_sum_;
  RunLanes run_lanes_;
  Tuning tuning_;
  struct {
    std::int64_t calls = 0, bytes = 0;
  } since_tuning_;  // of all_reduce
  LineWriter<> line_writer_;
  std::vector<LineReader<>> line_readers_;  // one for each rank, that of this rank unused
  std::vector<Lane> lanes_;
  std::vector<BlockWriter> direct_writers_;  // one for each destination
  std::vector<BlockReader> direct_readers_;  // one for each source
};

}  // namespace vllm_arm
