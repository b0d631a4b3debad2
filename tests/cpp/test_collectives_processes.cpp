// SPDX-License-Identifier: Apache-2.0
// The collective operations, with processes as ranks that open each other's memory; one is killed in the end.
#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>

#include "collectives/segment.h"
#include "collectives_ranks.h"

using collectives_test::RandomOperations;
using vllm_arm::Address;
using vllm_arm::Communicator;
using vllm_arm::Segment;

namespace {

constexpr std::int64_t kBytes = 2 << 20;
constexpr std::size_t kAddressBytes = 256;

// Writes this rank's address to all ranks' pipes and reads theirs from its own.
std::vector<Address> exchange(int rank, const std::vector<std::array<int, 2>>& pipes, const Segment& segment) {
  char text[kAddressBytes] = {};
  std::snprintf(text, sizeof text, "%02d%s", rank, segment.address(1).text().c_str());
  for (const auto& each : pipes) REQUIRE(write(each[1], text, sizeof text) == sizeof text);
  std::vector<Address> addresses(pipes.size());
  for (std::size_t i = 0; i < pipes.size(); ++i) {
    REQUIRE(read(pipes[rank][0], text, sizeof text) == sizeof text);
    addresses[static_cast<std::size_t>(std::stoi(std::string(text, 2)))] = Address::parse(text + 2);
  }
  return addresses;
}

template <typename Body>
void run_rank(int rank, const std::vector<std::array<int, 2>>& pipes, Body body) {
  Segment own(kBytes);
  const std::vector<Address> addresses = exchange(rank, pipes, own);
  std::vector<Segment> others;
  std::vector<std::byte*> data;
  std::vector<vllm_arm::Process> processes;
  for (std::size_t peer = 0; peer < addresses.size(); ++peer) {
    const bool is_own = static_cast<int>(peer) == rank;
    processes.push_back(is_own ? addresses[peer].process : addresses[peer].process.as_others_see_it());
    if (!is_own) others.emplace_back(addresses[peer]);
    data.push_back(is_own ? own.data() : others.back().data());
  }
  body(*collectives_test::make_communicator(rank, data, processes, kBytes, 1, 60, collectives_test::in_this_thread));
}

// Forks the ranks and returns their exit codes; `body` returns that of its rank.
template <typename Body>
std::vector<int> fork_ranks(int world_size, Body body) {
  std::vector<std::array<int, 2>> pipes(world_size);
  for (auto& each : pipes) REQUIRE(pipe(each.data()) == 0);
  std::vector<pid_t> children;
  for (int rank = 0; rank < world_size; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      int code = 99;
      try {
        run_rank(rank, pipes, [&](Communicator& communicator) { code = body(communicator); });
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      _exit(code);
    }
    children.push_back(child);
  }
  std::vector<int> codes;
  for (const pid_t child : children) {
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  for (auto& each : pipes) {
    close(each[0]);
    close(each[1]);
  }
  return codes;
}

}  // namespace

TEST_CASE("processes open each other's memory and agree") {
  for (const int world_size : {2, 3}) {
    const std::vector<int> codes = fork_ranks(world_size, [](Communicator& communicator) {
      RandomOperations operations(communicator, 5, 1 << 20);
      for (int i = 0; i < 100; ++i) {
        if (!operations.next()) return 1;
      }
      return 0;
    });
    for (const int code : codes) CHECK(code == 0);
  }
}

TEST_CASE("a killed rank is named by the others") {
  const std::vector<int> codes = fork_ranks(3, [](Communicator& communicator) {
    std::vector<float> data(100000);
    try {
      for (int i = 0; i < 1000000; ++i) {
        if (communicator.rank() == 1 && i == 5) std::raise(SIGKILL);
        communicator.all_reduce(data.data(), 100000, vllm_arm::SumType::float32);
      }
    } catch (const vllm_arm::CollectiveError& error) {
      const std::string text = error.what();
      return text.find("all_reduce: rank 1 (process ") == 0 && text.find("has died") != std::string::npos ? 0 : 1;
    }
    return 2;
  });
  CHECK(codes == std::vector<int>{0, -SIGKILL, 0});
}

TEST_CASE("memory that there is not is an error, and so is an address that leads nowhere") {
  rlimit limit{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &limit) == 0);
  const rlimit small{1 << 20, limit.rlim_max};
  const auto previous = std::signal(SIGXFSZ, SIG_IGN);
  REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  CHECK_THROWS_WITH_AS(Segment(4 << 20), "no 4194304 bytes of shared memory: File too large", std::runtime_error);
  REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  std::signal(SIGXFSZ, previous);

  Segment segment(1 << 20);
  Address address = segment.address(1);
  CHECK(Address::parse(address.text()).identity == address.identity);
  CHECK(Segment(address).data() != segment.data());
  address.identity ^= 2;
  CHECK_THROWS_WITH_AS(Segment{address}, doctest::Contains("is not its shared memory"), std::runtime_error);
  address.host += "x";
  CHECK_THROWS_WITH_AS(Segment{address}, "it is on another host or in another PID namespace", std::runtime_error);
  CHECK_THROWS_AS(Address::parse("nonsense"), vllm_arm::CollectiveError);
  address = segment.address(1);
  segment.close_descriptor();
  CHECK_THROWS_WITH_AS(Segment{address}, doctest::Contains("cannot open /proc/"), std::runtime_error);
}
