// SPDX-License-Identifier: Apache-2.0
// The operations of Communicator that add.
#include <numeric>

#include "collectives/communicator.h"
#include "collectives/operation.h"

namespace vllm_arm {
namespace {

using Sources = std::array<const void*, kMaximumWorldSize>;

// Large messages go in chunks of this, small enough for what is under way to stay in the cache.
constexpr std::int64_t kChunkBytes = 256 << 10;

// Until all_reduce tunes itself again, which takes half a millisecond.
constexpr std::int64_t kMostCalls = 16 << 10;
constexpr std::int64_t kMostBytes = 1 << 30;
constexpr int kTurns = 5;

}  // namespace

void Communicator::sum(const void* const* sources, void* output, void* copy, std::int64_t bytes, SumType type) const {
  reduce_sum_({sources, world_size(), output, copy, type, tuning_.stores}, 0, bytes / sum_type_size(type));
}

void Communicator::all_reduce(void* data, std::int64_t count, SumType type) {
  const std::int64_t bytes = count * sum_type_size(type);
  const std::uint64_t detail = static_cast<std::uint64_t>(bytes) * 8 + static_cast<std::uint64_t>(type);
  const Operation operation(group_, "all_reduce", OperationKind::all_reduce, detail);
  if (world_size() == 1 || bytes == 0) return;
  since_tuning_.bytes += bytes;
  if (++since_tuning_.calls > kMostCalls || since_tuning_.bytes > kMostBytes) tune(kTurns);
  auto* target = static_cast<std::byte*>(data);
  if (is_small(bytes, bytes * (world_size() - 1))) return all_reduce_small(operation, target, bytes, type);
  in_lanes(bytes, [&](int lane, int lanes) {
    const Range stripe = part_of(bytes, lane, lanes);
    all_reduce_lane(operation, lanes_[lane], target + stripe.begin, stripe.size(), type);
  });
}

// Every rank reads what all others give, and adds it itself.
void Communicator::all_reduce_small(const Operation& operation, std::byte* data, std::int64_t bytes, SumType type) {
  line_writer_.write(data, bytes, operation.fingerprint, tuning_.stores, operation.waiter);
  alignas(kCacheLine) std::byte batches[kMaximumWorldSize][kBatchBytes];
  Sources sources;
  for (int source = 0; source < world_size(); ++source) sources[source] = batches[source];
  for_each_peer([&](int peer) { line_readers_[peer].expect(bytes); });
  for (std::int64_t begin = 0; begin < bytes; begin += kBatchBytes) {
    const std::int64_t size = std::min(kBatchBytes, bytes - begin);
    for_each_peer([&](int peer) {
      line_readers_[peer].read_batch(batches[peer], size, operation.fingerprint, operation.waiter);
    });
    sources[rank()] = data + begin;
    sum(sources.data(), data + begin, nullptr, size, type);
  }
  for_each_peer([&](int peer) { line_readers_[peer].acknowledge(); });
}

// In chunks, of which each rank adds one part. Three are under way: while the parts of one are written for the ranks
// that add them, the one before is added, and the sums of the one before that are collected.
void Communicator::all_reduce_lane(const Operation& operation, Lane& lane, std::byte* data, std::int64_t bytes,
                                   SumType type) {
  const Waiter& waiter = operation.waiter;
  const Fingerprint fingerprint = operation.fingerprint;
  const std::int64_t chunk = std::min(kChunkBytes, layout_.lane_block_bytes());
  const std::int64_t chunks = pieces_of(bytes, chunk);
  Sources sources;
  for (std::int64_t step = 0; step < chunks + 2; ++step) {
    if (const Range given = piece_of(bytes, step, chunk); given.size() > 0) {
      const Range own = part_of(given.size(), rank(), world_size());
      std::byte* block = lane.writer.begin(waiter);
      const std::byte* source = data + given.begin;
      write_bytes(block, source, own.begin, tuning_.stores);
      write_bytes(block + own.end, source + own.end, given.size() - own.end, tuning_.stores);
      lane.writer.publish(fingerprint);
    }
    if (const Range added = step >= 1 ? piece_of(bytes, step - 1, chunk) : Range{0, 0}; added.size() > 0) {
      const Range own = part_of(added.size(), rank(), world_size());
      for_each_peer([&](int peer) { sources[peer] = lane.readers[peer].wait(fingerprint, waiter) + own.begin; });
      std::byte* target = data + added.begin + own.begin;
      sources[rank()] = target;
      std::byte* block = lane.writer.begin(waiter);
      sum(sources.data(), target, block, own.size(), type);
      lane.writer.publish(fingerprint);
      for_each_peer([&](int peer) { lane.readers[peer].release(); });
    }
    if (step >= 2) {
      const Range collected = piece_of(bytes, step - 2, chunk);
      for_each_peer([&](int peer) {
        const Range part = part_of(collected.size(), peer, world_size());
        const std::byte* source = lane.readers[peer].wait(fingerprint, waiter);
        copy_bytes(data + collected.begin + part.begin, source, part.size());
        lane.readers[peer].release();
      });
    }
  }
}

void Communicator::reduce_scatter(void* output, const void* input, Sizes counts, SumType type) {
  std::array<std::int64_t, kMaximumWorldSize> bytes{};
  std::int64_t total = 0;
  for (int part = 0; part < world_size(); ++part) {
    bytes[part] = counts[part] * sum_type_size(type);
    total += bytes[part];
  }
  const Sizes sizes = Sizes(bytes).first(world_size());
  const std::uint64_t detail = static_cast<std::uint64_t>(total) * 8 + static_cast<std::uint64_t>(type);
  const Operation operation(group_, "reduce_scatter", OperationKind::reduce_scatter, detail);
  auto* out = static_cast<std::byte*>(output);
  const auto* in = static_cast<const std::byte*>(input);
  const std::int64_t most = *std::max_element(sizes.begin(), sizes.end());
  if (is_small(total, most * (world_size() - 1))) return reduce_scatter_small(operation, out, in, sizes, type);
  in_lanes(most, [&](int lane, int lanes) { reduce_scatter_lane(operation, lane, lanes, out, in, sizes, type); });
}

void Communicator::reduce_scatter_small(const Operation& operation, std::byte* output, const std::byte* input,
                                        Sizes sizes, SumType type) {
  const std::byte* own = nullptr;
  for (int part = 0; part < world_size(); ++part) {
    if (part == rank()) {
      own = input;
    } else if (sizes[part] > 0) {
      line_writer_.write(input, sizes[part], operation.fingerprint, tuning_.stores, operation.waiter);
    }
    input += sizes[part];
  }
  // Every peer gives a message for each part but its own.
  for_each_peer([&](int peer) {
    for (int part = 0; part < rank(); ++part) {
      if (part != peer && sizes[part] > 0) line_readers_[peer].skip(sizes[part]);
    }
  });
  alignas(kCacheLine) std::byte batches[kMaximumWorldSize][kBatchBytes];
  Sources sources;
  for (int source = 0; source < world_size(); ++source) sources[source] = batches[source];
  if (sizes[rank()] > 0) for_each_peer([&](int peer) { line_readers_[peer].expect(sizes[rank()]); });
  for (std::int64_t begin = 0; begin < sizes[rank()]; begin += kBatchBytes) {
    const std::int64_t size = std::min(kBatchBytes, sizes[rank()] - begin);
    for_each_peer([&](int peer) {
      line_readers_[peer].read_batch(batches[peer], size, operation.fingerprint, operation.waiter);
    });
    sources[rank()] = own + begin;
    sum(sources.data(), output + begin, nullptr, size, type);
  }
  for_each_peer([&](int peer) {
    for (int part = rank() + 1; part < world_size(); ++part) {
      if (part != peer && sizes[part] > 0) line_readers_[peer].skip(sizes[part]);
    }
    line_readers_[peer].acknowledge();
  });
}

// In steps, of which each writes a block with a piece for every rank. The next is written before the last is added.
void Communicator::reduce_scatter_lane(const Operation& operation, int number, int lanes, std::byte* output,
                                       const std::byte* input, Sizes sizes, SumType type) {
  Lane& lane = lanes_[number];
  const std::int64_t piece = layout_.lane_block_bytes() / world_size() / kCacheLine * kCacheLine;
  std::array<std::int64_t, kMaximumWorldSize> offsets{};
  std::exclusive_scan(sizes.begin(), sizes.end(), offsets.begin(), std::int64_t{0});
  std::int64_t steps = 0;
  for (const std::int64_t size : sizes) {
    steps = std::max(steps, pieces_of(part_of(size, number, lanes).size(), piece));
  }
  const Range own = part_of(sizes[rank()], number, lanes);
  const std::byte* own_input = input + offsets[rank()];
  Sources sources;
  for (std::int64_t step = 0; step <= steps; ++step) {
    if (step < steps) {
      std::byte* block = lane.writer.begin(operation.waiter);
      for_each_peer([&](int peer) {
        const Range stripe = part_of(sizes[peer], number, lanes);
        const Range given = piece_of(stripe.size(), step, piece);
        write_bytes(block + peer * piece, input + offsets[peer] + stripe.begin + given.begin, given.size(),
                    tuning_.stores);
      });
      lane.writer.publish(operation.fingerprint);
    }
    if (step == 0) continue;
    const Range added = piece_of(own.size(), step - 1, piece);
    for_each_peer([&](int peer) {
      sources[peer] = lane.readers[peer].wait(operation.fingerprint, operation.waiter) + rank() * piece;
    });
    sources[rank()] = own_input + own.begin + added.begin;
    sum(sources.data(), output + own.begin + added.begin, nullptr, added.size(), type);
    for_each_peer([&](int peer) { lane.readers[peer].release(); });
  }
}

}  // namespace vllm_arm
