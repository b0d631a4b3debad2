// SPDX-License-Identifier: Apache-2.0
// The path of small messages in every order in which ranks can touch shared memory: the code itself runs, with memory
// that hands control to a scheduler before each access. Orders that reach a state that was seen before are cut off
// there.
#include <doctest/doctest.h>
#include <ucontext.h>

#include <array>
#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "collectives/line_stream.h"

using vllm_arm::Fingerprint;
using vllm_arm::Line;
using vllm_arm::LineReader;
using vllm_arm::LineWriter;
using vllm_arm::SharedLine;
using vllm_arm::SharedWord;

namespace {

constexpr std::size_t kMostLines = 2;
constexpr int kMostRanks = 3;

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15 + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccd;
}

// One run: a coroutine for each rank, of which the scheduler continues one at a time.
class World {
 public:
  using Program = std::function<void(World&, int rank)>;

  World(int ranks, std::size_t ring_lines, Program program)
      : ranks_(ranks), ring_lines_(ring_lines), program_(std::move(program)), coroutines_(ranks) {
    current_ = this;
    for (int rank = 0; rank < ranks; ++rank) prepare(coroutines_[rank], rank);
  }

  static World& current() { return *current_; }
  std::span<Line> ring(int rank) { return std::span(rings_[rank]).first(ring_lines_); }
  SharedWord* done(int reader, int writer) { return &done_[reader][writer].word; }
  int ranks() const { return ranks_; }

  // Called by a rank: lets others go on before its next access, which waits for `is_possible`.
  void pause(std::function<bool()> is_possible = {}) {
    Coroutine& coroutine = coroutines_[running_];
    coroutine.is_possible = std::move(is_possible);
    swapcontext(&coroutine.context, &scheduler_);
  }
  void note(std::uint64_t value) { coroutines_[running_].seen = mix(coroutines_[running_].seen, value); }
  void fail() { failed_ = true; }

  bool can_continue(int rank) const {
    const Coroutine& coroutine = coroutines_[rank];
    return !coroutine.is_finished && (!coroutine.is_possible || coroutine.is_possible());
  }
  void resume(int rank) {
    running_ = rank;
    note(1);
    swapcontext(&scheduler_, &coroutines_[rank].context);
  }
  bool has_failed() const { return failed_; }
  bool is_finished() const {
    return std::all_of(coroutines_.begin(), coroutines_.end(), [](const Coroutine& each) { return each.is_finished; });
  }
  // A rank's next steps follow from what it has seen, so that this and the memory are the whole state.
  std::uint64_t state() const {
    std::uint64_t hash = 0;
    for (const Coroutine& coroutine : coroutines_) hash = mix(hash, coroutine.seen);
    for (const auto& ring : rings_) {
      for (const Line& line : ring) {
        for (const std::byte byte : line.payload) hash = mix(hash, static_cast<std::uint64_t>(byte));
        hash = mix(hash, line.flag.load());
      }
    }
    for (const auto& counts : done_) {
      for (const SharedLine& count : counts) hash = mix(hash, count.word.load());
    }
    return hash;
  }

 private:
  struct Coroutine {
    ucontext_t context;
    std::vector<char> stack;
    std::function<bool()> is_possible;
    std::uint64_t seen = 0;
    bool is_finished = false;
  };

  void prepare(Coroutine& coroutine, int rank) {
    getcontext(&coroutine.context);
    coroutine.stack.resize(1 << 16);
    coroutine.context.uc_stack.ss_sp = coroutine.stack.data();
    coroutine.context.uc_stack.ss_size = coroutine.stack.size();
    coroutine.context.uc_link = &scheduler_;
    makecontext(&coroutine.context, reinterpret_cast<void (*)()>(&World::enter), 1, rank);
  }
  static void enter(int rank) {
    current_->program_(*current_, rank);
    current_->coroutines_[rank].is_finished = true;
  }

  static inline World* current_ = nullptr;
  int ranks_;
  std::size_t ring_lines_;
  int running_ = 0;
  bool failed_ = false;
  Program program_;
  ucontext_t scheduler_{};
  std::vector<Coroutine> coroutines_;
  std::array<std::array<Line, kMostLines>, kMostRanks> rings_{};
  std::array<std::array<SharedLine, kMostRanks>, kMostRanks> done_{};
};

// Memory in which every access is a step of its own. `kFlagFirst` is a fault, to see that it is found.
template <bool kFlagFirst>
struct SteppedMemory {
  static std::uint64_t load(const SharedWord& word) {
    World::current().pause();
    const std::uint64_t value = word.load();
    World::current().note(value);
    return value;
  }
  static void store(SharedWord& word, std::uint64_t value) {
    World::current().pause();
    word.store(value);
  }
  static void write_lines(std::span<Line> ring, std::int64_t first, std::int64_t count, const std::byte* source,
                          std::int64_t bytes, Fingerprint fingerprint, vllm_arm::Stores) {
    const auto write_flags = [&] {
      for (std::int64_t i = 0; i < count; ++i) {
        store(vllm_arm::line_of(ring, first + i).flag, vllm_arm::flag_of(first + i, fingerprint));
      }
    };
    if (kFlagFirst) write_flags();
    for (std::int64_t i = 0; i < count; ++i) {
      World::current().pause();
      const std::int64_t size = std::min(Line::kPayload, bytes - i * Line::kPayload);
      std::memcpy(vllm_arm::line_of(ring, first + i).payload, source + i * Line::kPayload, size);
    }
    if (!kFlagFirst) write_flags();
  }
  static void copy_out(std::byte* destination, const std::byte* source, std::int64_t bytes) {
    World::current().pause();
    std::memcpy(destination, source, bytes);
    for (std::int64_t i = 0; i < bytes; ++i) World::current().note(static_cast<std::uint64_t>(source[i]));
  }
  static void prefetch(const Line&) {}
  static void acquire() {}
  static void release() {}
};

struct SteppedWaiter {
  template <typename IsReady>
  void wait(int, const SharedWord& word, IsReady is_ready) const {
    World::current().pause([&word, is_ready]() mutable { return is_ready(word.load()); });
    const std::uint64_t value = word.load();
    World::current().note(value);
    if (!is_ready(value)) World::current().fail();
  }
  void mismatch(int) const { World::current().fail(); }
};

struct Step {
  int root;  // the only reader; -1: all are
  std::int64_t bytes;
};

// The ends of the streams of all ranks, outside of the coroutines, which may be left in the middle.
template <typename Memory>
struct Ends {
  std::vector<LineWriter<Memory>> writers;
  std::vector<std::vector<LineReader<Memory>>> readers;

  explicit Ends(World& world) {
    for (int rank = 0; rank < world.ranks(); ++rank) {
      std::vector<vllm_arm::Acknowledgement> acknowledgements;
      std::vector<LineReader<Memory>> own;
      for (int peer = 0; peer < world.ranks(); ++peer) {
        if (peer != rank) acknowledgements.push_back({peer, world.done(peer, rank)});
        own.emplace_back(peer, world.ring(peer), world.done(rank, peer));
      }
      writers.emplace_back(world.ring(rank), std::move(acknowledgements));
      readers.push_back(std::move(own));
    }
  }
};

template <typename Memory>
void run_rank(World& world, Ends<Memory>& ends, std::span<const Step> steps, int rank) {
  const SteppedWaiter waiter;
  for (std::size_t number = 0; number < steps.size(); ++number) {
    const Step& step = steps[number];
    const auto fingerprint = static_cast<Fingerprint>(number);
    const auto value = [&](int source) { return static_cast<std::byte>(1 + source + 16 * static_cast<int>(number)); };
    std::array<std::byte, 2 * Line::kPayload> data;
    data.fill(value(rank));
    ends.writers[rank].write(data.data(), step.bytes, fingerprint, vllm_arm::Stores::cached, waiter);
    for (int peer = 0; peer < world.ranks(); ++peer) {
      if (peer == rank) continue;
      LineReader<Memory>& reader = ends.readers[rank][peer];
      if (step.root == -1 || step.root == rank) {
        reader.read(data.data(), step.bytes, fingerprint, waiter);
        for (std::int64_t i = 0; i < step.bytes; ++i) {
          if (data[i] != value(peer)) world.fail();
        }
      } else {
        reader.skip(step.bytes);
      }
      reader.acknowledge();
    }
  }
}

struct Result {
  std::size_t states = 0;
  bool has_failed = false, is_stuck = false;
};

// Every order, each run from the beginning by its list of choices.
template <typename Memory>
Result explore(int ranks, std::size_t ring_lines, std::span<const Step> steps) {
  Result result;
  std::set<std::uint64_t> seen;
  std::vector<std::vector<int>> pending{{}};
  while (!pending.empty() && !result.has_failed && !result.is_stuck) {
    std::vector<int> choices = std::move(pending.back());
    pending.pop_back();
    std::unique_ptr<Ends<Memory>> ends;
    World world(ranks, ring_lines, [&](World& running, int rank) { run_rank(running, *ends, steps, rank); });
    ends = std::make_unique<Ends<Memory>>(world);
    for (const int rank : choices) world.resume(rank);
    while (!world.is_finished() && !world.has_failed() && seen.insert(world.state()).second) {
      int chosen = -1;
      for (int rank = ranks - 1; rank >= 0; --rank) {
        if (!world.can_continue(rank)) continue;
        if (chosen >= 0) {
          pending.push_back(choices);
          pending.back().push_back(chosen);
        }
        chosen = rank;
      }
      if (chosen < 0) {
        result.is_stuck = true;
        break;
      }
      choices.push_back(chosen);
      world.resume(chosen);
    }
    result.has_failed = result.has_failed || world.has_failed();
  }
  result.states = seen.size();
  return result;
}

}  // namespace

TEST_CASE("small messages arrive whole in every order of two ranks' accesses") {
  // Two lines, which fill the ring, then what a rank does not read, twice.
  constexpr Step kSteps[] = {{-1, 60}, {0, 8}, {0, 8}, {1, 8}};
  const Result result = explore<SteppedMemory<false>>(2, 2, kSteps);
  CHECK_FALSE(result.has_failed);
  CHECK_FALSE(result.is_stuck);
  CHECK(result.states > 500);
}

TEST_CASE("small messages arrive whole in every order of three ranks' accesses") {
  constexpr Step kSteps[] = {{2, 8}, {2, 8}};
  const Result result = explore<SteppedMemory<false>>(3, 1, kSteps);
  CHECK_FALSE(result.has_failed);
  CHECK_FALSE(result.is_stuck);
  CHECK(result.states > 500);
}

TEST_CASE("a flag that is written before its data is found out") {
  constexpr Step kSteps[] = {{-1, 60}};
  CHECK(explore<SteppedMemory<true>>(2, 2, kSteps).has_failed);
}
