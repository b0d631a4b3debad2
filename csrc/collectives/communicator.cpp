// SPDX-License-Identifier: Apache-2.0
#include "collectives/communicator.h"

#include <unistd.h>

#include <array>
#include <chrono>
#include <limits>
#include <numeric>

#include "collectives/operation.h"

namespace vllm_arm {

Communicator::Communicator(int rank, const std::vector<std::byte*>& segments, std::vector<Process> processes,
                           Layout layout, std::chrono::duration<double> timeout, ReduceSumKernel reduce_sum,
                           RunLanes run_lanes)
    : group_{rank, {}, std::move(processes), timeout},
      layout_(layout),
      reduce_sum_(reduce_sum),
      run_lanes_(std::move(run_lanes)),
      line_writer_({}, {}) {
  std::byte* own = segments[rank];
  const int ranks = static_cast<int>(segments.size());
  const auto acknowledgements = [&](auto done_of) {
    std::vector<Acknowledgement> result;
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer != rank) result.push_back({peer, done_of(segments[peer])});
    }
    return result;
  };
  for (std::byte* segment : segments) group_.controls.push_back(layout.control(segment));
  line_writer_ = LineWriter<>(layout.lines(own),
                              acknowledgements([&](std::byte* segment) { return layout.lines_done(segment, rank); }));
  for (int peer = 0; peer < ranks; ++peer) {
    line_readers_.emplace_back(peer, layout.lines(segments[peer]), layout.lines_done(own, peer));
    direct_writers_.emplace_back(layout.direct_ring(own, peer),
                                 std::vector<Acknowledgement>{{peer, layout.direct_done(segments[peer], rank)}});
    direct_readers_.emplace_back(peer, layout.direct_ring(segments[peer], rank), layout.direct_done(own, peer));
  }
  for (int lane = 0; lane < layout.lanes(); ++lane) {
    const auto done_of = [&](std::byte* segment) { return layout.lane_done(segment, lane, rank); };
    Lane& added = lanes_.emplace_back(Lane{{layout.lane_ring(own, lane), acknowledgements(done_of)}, {}});
    for (int peer = 0; peer < ranks; ++peer) {
      added.readers.emplace_back(peer, layout.lane_ring(segments[peer], lane), layout.lane_done(own, lane, peer));
    }
  }
}

void Communicator::all_gather(void* output, const void* input, Sizes sizes) {
  const Operation operation(group_, "all_gather", OperationKind::all_gather, sizes.front());
  gather_to(operation, kEveryRank, output, input, sizes);
}

void Communicator::gather(void* output, const void* input, Sizes sizes, int destination) {
  check_rank("gather", "destination", destination);
  const std::uint64_t detail = static_cast<std::uint64_t>(sizes.front()) * kMaximumWorldSize + destination;
  const Operation operation(group_, "gather", OperationKind::gather, detail);
  gather_to(operation, destination, output, input, sizes);
}

void Communicator::broadcast(void* data, std::int64_t bytes, int source) {
  check_rank("broadcast", "source", source);
  const std::uint64_t detail = static_cast<std::uint64_t>(bytes) * kMaximumWorldSize + source;
  const Operation operation(group_, "broadcast", OperationKind::broadcast, detail);
  std::array<std::int64_t, kMaximumWorldSize> sizes{};
  sizes[source] = bytes;
  gather_to(operation, kEveryRank, data, data, Sizes(sizes).first(world_size()));
}

// What every rank gives is read by all, or by `destination`; ranks that give nothing do not take part in writing.
void Communicator::gather_to(const Operation& common, int destination, void* output, const void* input, Sizes sizes) {
  Operation operation = common;
  operation.is_reader = destination == kEveryRank || destination == rank();
  auto* out = static_cast<std::byte*>(output);
  const auto* in = static_cast<const std::byte*>(input);
  const std::int64_t most = *std::max_element(sizes.begin(), sizes.end());
  if (is_small(most, most * (world_size() - 1))) {
    gather_small(operation, out, in, sizes);
  } else {
    in_lanes(most, [&](int lane, int lanes) { gather_lane(operation, lane, lanes, out, in, sizes); });
  }
}

void Communicator::gather_small(const Operation& operation, std::byte* output, const std::byte* input, Sizes sizes) {
  if (sizes[rank()] > 0) {
    line_writer_.write(input, sizes[rank()], operation.fingerprint, tuning_.stores, operation.waiter);
  }
  std::byte* target = output;
  for (int source = 0; source < world_size(); ++source) {
    const std::int64_t size = sizes[source];
    if (source == rank()) {
      if (operation.is_reader) copy_bytes(target, input, size);
    } else if (size > 0) {
      LineReader<>& reader = line_readers_[source];
      if (operation.is_reader) {
        reader.read(target, size, operation.fingerprint, operation.waiter);
      } else {
        reader.skip(size);
      }
      reader.acknowledge();
    }
    if (operation.is_reader) target += size;
  }
}

void Communicator::gather_lane(const Operation& operation, int number, int lanes, std::byte* output,
                               const std::byte* input, Sizes sizes) {
  Lane& lane = lanes_[number];
  const std::int64_t block = layout_.lane_block_bytes();
  std::array<std::int64_t, kMaximumWorldSize> offsets{};
  std::exclusive_scan(sizes.begin(), sizes.end(), offsets.begin(), std::int64_t{0});
  const Range own = part_of(sizes[rank()], number, lanes);
  if (operation.is_reader) copy_bytes(output + offsets[rank()] + own.begin, input + own.begin, own.size());

  std::int64_t steps = 0;
  for (const std::int64_t size : sizes) {
    steps = std::max(steps, pieces_of(part_of(size, number, lanes).size(), block));
  }
  // One step ahead of its readers: they copy a piece while the next one is written.
  for (std::int64_t step = 0; step <= steps; ++step) {
    const Range piece = piece_of(own.size(), step, block);
    if (piece.size() > 0) {
      write_bytes(lane.writer.begin(operation.waiter), input + own.begin + piece.begin, piece.size(), tuning_.stores);
      lane.writer.publish(operation.fingerprint);
    }
    if (step == 0) continue;
    for_each_peer([&](int peer) {
      const Range stripe = part_of(sizes[peer], number, lanes);
      const Range wanted = piece_of(stripe.size(), step - 1, block);
      if (wanted.size() == 0) return;
      BlockReader& reader = lane.readers[peer];
      if (operation.is_reader) {
        const std::byte* source = reader.wait(operation.fingerprint, operation.waiter);
        std::memcpy(output + offsets[peer] + stripe.begin + wanted.begin, source, wanted.size());
      }
      reader.release();
    });
  }
}

void Communicator::send(const void* data, std::int64_t bytes, int destination) {
  check_rank("send", "destination", destination);
  if (destination == rank()) throw CollectiveError("send: destination is this rank itself");
  const Operation operation(group_, "send", OperationKind::direct, bytes);
  BlockWriter& writer = direct_writers_[destination];
  const std::int64_t block = layout_.direct_block_bytes();
  const std::int64_t steps = std::max<std::int64_t>(1, pieces_of(bytes, block));
  for (std::int64_t step = 0; step < steps; ++step) {
    const Range piece = piece_of(bytes, step, block);
    write_bytes(writer.begin(operation.waiter), static_cast<const std::byte*>(data) + piece.begin, piece.size(),
                tuning_.stores);
    writer.publish(operation.fingerprint);
  }
}

void Communicator::receive(void* data, std::int64_t bytes, int source) {
  check_rank("recv", "source", source);
  if (source == rank()) throw CollectiveError("recv: source is this rank itself");
  const Operation operation(group_, "recv", OperationKind::direct, bytes);
  BlockReader& reader = direct_readers_[source];
  const std::int64_t block = layout_.direct_block_bytes();
  const std::int64_t steps = std::max<std::int64_t>(1, pieces_of(bytes, block));
  for (std::int64_t step = 0; step < steps; ++step) {
    const Range piece = piece_of(bytes, step, block);
    const std::byte* arrived = reader.wait(operation.fingerprint, operation.waiter);
    copy_bytes(static_cast<std::byte*>(data) + piece.begin, arrived, piece.size());
    reader.release();
  }
}

void Communicator::barrier() {
  const Operation operation(group_, "barrier", OperationKind::barrier, 0);
  std::byte nothing;
  line_writer_.write(&nothing, 0, operation.fingerprint, tuning_.stores, operation.waiter);
  for_each_peer([&](int peer) {
    line_readers_[peer].read(&nothing, 0, operation.fingerprint, operation.waiter);
    line_readers_[peer].acknowledge();
  });
}

void Communicator::tune(int turns) {
  since_tuning_ = {};
  // Ranks that share a CPU would measure the scheduler.
  if (world_size() == 1 || world_size() > sysconf(_SC_NPROCESSORS_ONLN)) return;
  if (kHasStreamedStores) choose(tuning_.stores, {Stores::cached, Stores::streamed}, 64 << 10, turns);
  choose(tuning_.most_by_lines, {4 << 10, 8 << 10}, 8 << 10, turns);
}

// Sets `setting` to that one of two values with which all ranks together take less time for an all_reduce.
template <typename Value>
void Communicator::choose(Value& setting, std::array<Value, 2> values, std::int64_t bytes, int turns) {
  constexpr int kCalls = 4;
  std::vector<std::byte> data(bytes);
  const auto call = [&] { all_reduce(data.data(), bytes / sum_type_size(SumType::int32), SumType::int32); };
  std::array<std::int64_t, 2> nanoseconds;
  nanoseconds.fill(std::numeric_limits<std::int32_t>::max());
  for (int turn = 0; turn < turns; ++turn) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      setting = values[i];
      call();  // meets what the other way has left
      const auto start = std::chrono::steady_clock::now();
      for (int j = 0; j < kCalls; ++j) call();
      const std::chrono::nanoseconds time = std::chrono::steady_clock::now() - start;
      nanoseconds[i] = std::min(nanoseconds[i], time.count());
    }
  }
  // Sums are the same on every rank, and so is the choice.
  all_reduce(nanoseconds.data(), nanoseconds.size(), SumType::int64);
  setting = values[nanoseconds[0] < nanoseconds[1] ? 0 : 1];
}

void Communicator::close() { group_.controls[rank()]->is_closed.word.store(1, std::memory_order_release); }

void Communicator::check_rank(const char* operation, const char* name, int rank) const {
  if (rank >= 0 && rank < world_size()) return;
  throw CollectiveError(std::string(operation) + ": " + name + " is " + std::to_string(rank) + ", expected 0 to " +
                        std::to_string(world_size() - 1));
}

}  // namespace vllm_arm
