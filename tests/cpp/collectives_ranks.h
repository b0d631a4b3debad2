// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of this process, and random sequences of operations with every result checked.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "collectives/communicator.h"
#include "collectives/reduce_sum_table.h"
#include "isa/scalar_types.h"

namespace collectives_test {

using vllm_arm::BFloat16;
using vllm_arm::Communicator;
using vllm_arm::Layout;
using vllm_arm::SumType;

inline void in_threads(int lanes, const std::function<void(int)>& lane) {
  std::vector<std::thread> threads;
  for (int i = 0; i < lanes; ++i) threads.emplace_back(lane, i);
  for (std::thread& thread : threads) thread.join();
}

inline void in_this_thread(int lanes, const std::function<void(int)>& lane) {
  for (int i = 0; i < lanes; ++i) lane(i);
}

inline std::unique_ptr<Communicator> make_communicator(int rank, const std::vector<std::byte*>& segments,
                                                       std::vector<vllm_arm::Process> processes, std::int64_t bytes,
                                                       int lanes, double timeout_seconds,
                                                       const vllm_arm::RunLanes& run_lanes) {
  return std::make_unique<Communicator>(rank, segments, std::move(processes),
                                        Layout(bytes, static_cast<int>(segments.size()), lanes),
                                        std::chrono::duration<double>(timeout_seconds),
                                        vllm_arm::select_kernel(vllm_arm::kReduceSumTable).kernel, run_lanes);
}

// Memory of zeros that begins a page.
class Memory {
 public:
  explicit Memory(std::int64_t bytes) : data_(static_cast<std::byte*>(std::aligned_alloc(4096, bytes)), &std::free) {
    std::memset(data_.get(), 0, static_cast<std::size_t>(bytes));
  }
  std::byte* data() const { return data_.get(); }

 private:
  std::unique_ptr<std::byte, decltype(&std::free)> data_;
};

// Runs `body(communicator)` as every rank of a group of threads. A rank of odd number runs its lanes in threads.
template <typename Body>
void run_ranks(int world_size, std::int64_t bytes, int lanes, double timeout_seconds, Body body) {
  std::vector<Memory> memory;
  std::vector<std::byte*> segments;
  for (int rank = 0; rank < world_size; ++rank) {
    memory.emplace_back(bytes);
    segments.push_back(memory.back().data());
  }
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.emplace_back([&, rank] {
      body(*make_communicator(rank, segments, std::vector<vllm_arm::Process>(world_size), bytes, lanes, timeout_seconds,
                              rank % 2 == 1 ? in_threads : in_this_thread));
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

// What rank `rank` gives as element `i` of operation `operation`.
inline std::uint32_t given(int rank, int operation, std::int64_t i) {
  std::uint32_t x = static_cast<std::uint32_t>(i) * 2654435761U + static_cast<std::uint32_t>(operation) * 40503U +
                    static_cast<std::uint32_t>(rank) * 97U + 1;
  x ^= x >> 15;
  x *= 2246822519U;
  return x ^ x >> 13;
}

inline BFloat16 given_bfloat16(int rank, int operation, std::int64_t i) {
  // Of magnitudes far enough apart for the order of a sum to show in its bits.
  BFloat16 value;
  value.bits = static_cast<std::uint16_t>((given(rank, operation, i) & 0x8fff) + 0x3c00);
  return value;
}

// Operations that a rank and its peers draw alike from one seed. Each checks its result and returns whether it was
// right.
class RandomOperations {
 public:
  RandomOperations(Communicator& communicator, std::uint32_t seed, std::int64_t most_bytes)
      : communicator_(communicator), random_(seed), most_bytes_(most_bytes) {}

  bool next() {
    const int kind = draw(8);
    const std::int64_t bytes = size();
    const int root = draw(world_size());
    ++operation_;
    switch (kind) {
      case 0: return all_reduce_bfloat16(bytes / 2);
      case 1: return all_reduce_int32(bytes / 4);
      case 2: return gather(bytes, root, true);
      case 3: return gather(bytes, root, false);
      case 4: return reduce_scatter(bytes / 4);
      case 5: return broadcast(bytes, root);
      case 6: return send_and_receive(bytes, root);
      default: communicator_.barrier(); return true;
    }
  }

 private:
  int world_size() const { return communicator_.world_size(); }
  int rank() const { return communicator_.rank(); }
  int draw(int count) { return static_cast<int>(random_() % static_cast<std::uint32_t>(count)); }
  // Between 1 byte and the most, small ones as often as large ones.
  std::int64_t size() {
    const double exponent = std::uniform_real_distribution<>(0.0, std::log2(static_cast<double>(most_bytes_)))(random_);
    return static_cast<std::int64_t>(std::exp2(exponent));
  }

  bool all_reduce_bfloat16(std::int64_t count) {
    std::vector<BFloat16> data(count);
    for (std::int64_t i = 0; i < count; ++i) data[i] = given_bfloat16(rank(), operation_, i);
    communicator_.all_reduce(data.data(), count, SumType::bfloat16);
    for (std::int64_t i = 0; i < count; ++i) {
      float sum = vllm_arm::to_float(given_bfloat16(0, operation_, i));
      for (int source = 1; source < world_size(); ++source) {
        sum += vllm_arm::to_float(given_bfloat16(source, operation_, i));
      }
      BFloat16 expected;
      vllm_arm::from_float(sum, expected);
      if (data[i].bits != expected.bits) return false;
    }
    return true;
  }

  std::uint32_t sum(std::int64_t i) const {
    std::uint32_t total = 0;
    for (int source = 0; source < world_size(); ++source) total += given(source, operation_, i);
    return total;
  }

  bool all_reduce_int32(std::int64_t count) {
    std::vector<std::uint32_t> data(count);
    for (std::int64_t i = 0; i < count; ++i) data[i] = given(rank(), operation_, i);
    communicator_.all_reduce(data.data(), count, SumType::int32);
    for (std::int64_t i = 0; i < count; ++i) {
      if (data[i] != sum(i)) return false;
    }
    return true;
  }

  // A third of the ranks give nothing, the others different numbers of bytes.
  std::vector<std::int64_t> uneven(std::int64_t most) {
    std::vector<std::int64_t> sizes(world_size());
    for (std::int64_t& size : sizes) size = draw(3) == 0 ? 0 : most - draw(static_cast<int>(most / 2 + 1));
    return sizes;
  }

  bool gather(std::int64_t bytes, int root, bool to_all) {
    const std::vector<std::int64_t> sizes =
        draw(2) == 0 ? uneven(bytes) : std::vector<std::int64_t>(world_size(), bytes);
    std::vector<std::uint8_t> input(sizes[rank()]), output;
    for (std::size_t i = 0; i < input.size(); ++i) {
      input[i] = static_cast<std::uint8_t>(given(rank(), operation_, static_cast<std::int64_t>(i)));
    }
    std::int64_t total = 0;
    for (const std::int64_t size : sizes) total += size;
    const bool is_reader = to_all || root == rank();
    if (is_reader) output.resize(total);
    if (to_all) {
      communicator_.all_gather(output.data(), input.data(), sizes);
    } else {
      communicator_.gather(output.data(), input.data(), sizes, root);
    }
    std::size_t next = 0;
    for (int source = 0; is_reader && source < world_size(); ++source) {
      for (std::int64_t i = 0; i < sizes[source]; ++i) {
        if (output[next++] != static_cast<std::uint8_t>(given(source, operation_, i))) return false;
      }
    }
    return true;
  }

  bool reduce_scatter(std::int64_t most) {
    const std::vector<std::int64_t> counts =
        draw(2) == 0 ? uneven(most) : std::vector<std::int64_t>(world_size(), most);
    std::int64_t total = 0, begin = 0;
    for (int part = 0; part < world_size(); ++part) {
      if (part == rank()) begin = total;
      total += counts[part];
    }
    std::vector<std::uint32_t> input(total), output(counts[rank()]);
    for (std::int64_t i = 0; i < total; ++i) input[i] = given(rank(), operation_, i);
    communicator_.reduce_scatter(output.data(), input.data(), counts, SumType::int32);
    for (std::int64_t i = 0; i < counts[rank()]; ++i) {
      if (output[i] != sum(begin + i)) return false;
    }
    return true;
  }

  bool is_from(const std::vector<std::uint8_t>& data, int source) const {
    for (std::size_t i = 0; i < data.size(); ++i) {
      if (data[i] != static_cast<std::uint8_t>(given(source, operation_, static_cast<std::int64_t>(i)))) return false;
    }
    return true;
  }

  std::vector<std::uint8_t> own_bytes(std::int64_t bytes) const {
    std::vector<std::uint8_t> data(bytes);
    for (std::int64_t i = 0; i < bytes; ++i) data[i] = static_cast<std::uint8_t>(given(rank(), operation_, i));
    return data;
  }

  bool broadcast(std::int64_t bytes, int source) {
    std::vector<std::uint8_t> data = own_bytes(bytes);
    communicator_.broadcast(data.data(), bytes, source);
    return is_from(data, source);
  }

  bool send_and_receive(std::int64_t bytes, int source) {
    const int destination = draw(world_size());
    if (source == destination) return true;
    std::vector<std::uint8_t> data = own_bytes(bytes);
    if (rank() == source) communicator_.send(data.data(), bytes, destination);
    if (rank() == destination) communicator_.receive(data.data(), bytes, source);
    return rank() != destination || is_from(data, source);
  }

  Communicator& communicator_;
  std::mt19937 random_;
  std::int64_t most_bytes_;
  int operation_ = 0;
};

}  // namespace collectives_test
