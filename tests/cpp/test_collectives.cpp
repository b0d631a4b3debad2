// SPDX-License-Identifier: Apache-2.0
// The collective operations, with threads as ranks: what the thread sanitizer can follow.
#include <doctest/doctest.h>

#include <atomic>
#include <string>
#include <thread>

#include "collectives_ranks.h"

using collectives_test::in_this_thread;
using collectives_test::RandomOperations;
using collectives_test::run_ranks;
using vllm_arm::BFloat16;
using vllm_arm::CollectiveError;
using vllm_arm::Communicator;
using vllm_arm::Layout;
using vllm_arm::Stores;
using vllm_arm::SumType;
using vllm_arm::Tuning;

namespace {

constexpr std::int64_t kSmallSegment = 1 << 20;  // rings that go round often
constexpr double kTimeout = 60;

template <typename Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("random operations of any number of ranks give the right bits") {
  constexpr Tuning kTunings[] = {{Stores::cached, 4 << 10}, {Stores::streamed, 8 << 10}};
  for (const int world_size : {1, 2, 3, 4, 5, 8}) {
    for (const int lanes : {1, 3}) {
      std::atomic<int> wrong = 0;
      run_ranks(world_size, kSmallSegment, lanes, kTimeout, [&](Communicator& communicator) {
        RandomOperations operations(communicator, static_cast<std::uint32_t>(17 * world_size + lanes), 1 << 19);
        for (int i = 0; i < 80; ++i) {
          if (i % 20 == 0) communicator.set_tuning(kTunings[i / 20 % 2]);
          if (!operations.next()) ++wrong;
        }
      });
      CHECK_MESSAGE(wrong == 0, world_size, " ranks, ", lanes, " lanes");
    }
  }
}

TEST_CASE("ranks tune themselves alike, after many operations too") {
  Tuning chosen[2];
  run_ranks(2, kSmallSegment, 1, kTimeout, [&](Communicator& communicator) {
    communicator.set_tuning({Stores::cached, 0});
    for (int i = 0; i < 20000; ++i) {
      std::int64_t value = 1;
      communicator.all_reduce(&value, 1, SumType::int64);
    }
    chosen[communicator.rank()] = communicator.tuning();
  });
  CHECK(chosen[0].stores == chosen[1].stores);
  CHECK(chosen[0].most_by_lines == chosen[1].most_by_lines);
  if (std::thread::hardware_concurrency() >= 2) CHECK(chosen[0].most_by_lines > 0);
}

TEST_CASE("the same bits for any number of lanes and any rank") {
  constexpr std::int64_t kCount = 300001;
  std::vector<std::vector<BFloat16>> results;
  for (const int lanes : {1, 2, 3}) {
    std::vector<std::vector<BFloat16>> of_rank(3);
    run_ranks(3, kSmallSegment, lanes, kTimeout, [&](Communicator& communicator) {
      std::vector<BFloat16>& data = of_rank[communicator.rank()];
      for (std::int64_t i = 0; i < kCount; ++i) {
        data.push_back(collectives_test::given_bfloat16(communicator.rank(), 1, i));
      }
      communicator.all_reduce(data.data(), kCount, SumType::bfloat16);
    });
    for (auto& result : of_rank) results.push_back(std::move(result));
  }
  for (const auto& result : results) {
    CHECK(std::memcmp(result.data(), results[0].data(), kCount * sizeof(BFloat16)) == 0);
  }
}

TEST_CASE("64 ranks, and a segment that is too small for them") {
  std::atomic<int> right = 0;
  run_ranks(64, 1 << 20, 1, kTimeout, [&](Communicator& communicator) {
    for (const std::int64_t count : {1, 5000}) {
      std::vector<std::int64_t> data(count, communicator.rank());
      communicator.all_reduce(data.data(), count, SumType::int64);
      if (data.front() == 63 * 32 && data.back() == 63 * 32) ++right;
    }
  });
  CHECK(right == 128);
  CHECK(error_of([] { Layout(1 << 16, 64, 1); }).find("bytes_per_rank is 65536, too few for 64 ranks") == 0);
}

TEST_CASE("8 MiB are enough for 64 ranks of 32 threads, and everything lies within them") {
  const Layout layout(8 << 20, 64, vllm_arm::kMaximumLanes);
  std::byte* const begin = nullptr;
  const auto lane = layout.lane_ring(begin, vllm_arm::kMaximumLanes - 1);
  const auto direct = layout.direct_ring(begin, 63);
  CHECK(reinterpret_cast<std::uintptr_t>(lane.block(lane.count - 1)) + lane.block_bytes <= 8 << 20);
  CHECK(direct.block(direct.count - 1) + direct.block_bytes <= layout.lane_ring(begin, 0).data);
  CHECK(reinterpret_cast<std::byte*>(layout.direct_ring(begin, 0).flags) >=
        reinterpret_cast<std::byte*>(lane.flags + lane.count));
}

TEST_CASE("ranks in different operations are told so") {
  std::vector<std::string> errors(2);
  run_ranks(2, kSmallSegment, 1, kTimeout, [&](Communicator& communicator) {
    std::vector<float> data(4);
    const std::int64_t sizes[] = {16, 16};
    std::vector<float> output(8);
    errors[communicator.rank()] = error_of([&] {
      if (communicator.rank() == 0) {
        communicator.all_reduce(data.data(), 4, SumType::float32);
      } else {
        communicator.all_gather(output.data(), data.data(), sizes);
      }
      communicator.barrier();
    });
  });
  for (const std::string& error : errors)
    CHECK(error.find("runs another operation, size or dtype") != std::string::npos);
}

TEST_CASE("a rank that is silent, or has left, is named by all") {
  std::vector<std::string> errors(3);
  run_ranks(3, kSmallSegment, 1, 0.3, [&](Communicator& communicator) {
    if (communicator.rank() == 2) return;
    float value = 1;
    errors[communicator.rank()] = error_of([&] { communicator.all_reduce(&value, 1, SumType::float32); });
    const std::string again = error_of([&] { communicator.barrier(); });
    if (again.find("barrier: rank 2") != 0) errors[communicator.rank()] += " and then " + again;
  });
  for (int rank : {0, 1}) {
    CHECK(errors[rank].find("all_reduce: rank 2 (process 0) has been silent for 0.3 s") == 0);
    CHECK(errors[rank].find("and then") == std::string::npos);
  }

  std::string error;
  run_ranks(2, kSmallSegment, 1, kTimeout, [&](Communicator& communicator) {
    std::byte data[64] = {};
    if (communicator.rank() == 1) {
      communicator.send(data, 64, 0);
      communicator.close();
    } else {
      communicator.receive(data, 64, 1);  // what was sent before is still good
      error = error_of([&] { communicator.receive(data, 64, 1); });
    }
  });
  CHECK(error.find("recv: rank 1 (process 0) has closed the communicator") == 0);
}

TEST_CASE("a rank out of range is refused") {
  run_ranks(1, kSmallSegment, 1, kTimeout, [](Communicator& communicator) {
    std::byte data[1];
    CHECK(error_of([&] { communicator.broadcast(data, 1, 1); }) == "broadcast: source is 1, expected 0 to 0");
    CHECK(error_of([&] { communicator.send(data, 1, 0); }) == "send: destination is this rank itself");
  });
}
