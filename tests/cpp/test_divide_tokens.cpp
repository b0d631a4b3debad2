// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "attention/divide_tokens.h"
#include "attention/kv_cache.h"

using vllm_arm::divide_tokens;
using vllm_arm::kPanelTokens;

namespace {

using Slots = std::vector<std::int64_t>;

// Returns how many ranges there are.
std::int64_t check(const Slots& slots, std::int64_t parts) {
  const auto count = static_cast<std::int64_t>(slots.size());
  const std::vector<std::int64_t> begins = divide_tokens(slots.data(), count, parts);
  REQUIRE(begins.size() >= 2);
  REQUIRE(static_cast<std::int64_t>(begins.size()) <= std::max<std::int64_t>(parts, 1) + 1);
  REQUIRE(begins.front() == 0);
  REQUIRE(begins.back() == count);
  REQUIRE(std::is_sorted(begins.begin(), begins.end()));
  std::set<std::int64_t> taken;
  for (std::size_t range = 0; range + 1 < begins.size(); ++range) {
    std::set<std::int64_t> panels;
    for (std::int64_t i = begins[range]; i < begins[range + 1]; ++i) {
      if (slots[i] >= 0) panels.insert(slots[i] / kPanelTokens);
    }
    for (const std::int64_t panel : panels) REQUIRE(taken.insert(panel).second);
  }
  return static_cast<std::int64_t>(begins.size()) - 1;
}

Slots run(std::int64_t first, std::int64_t count) {
  Slots slots(count);
  std::iota(slots.begin(), slots.end(), first);
  return slots;
}

Slots operator+(Slots left, const Slots& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

}  // namespace

TEST_CASE("slots in order are divided into as many ranges as asked for") {
  CHECK(check(run(0, 256), 4) == 4);
  CHECK(check(run(5, 1000), 7) == 7);
  CHECK(check(run(160, 64) + run(0, 64) + run(320, 64), 3) == 3);
}

TEST_CASE("one token of each of many sequences is divided too") {
  Slots slots;
  for (std::int64_t sequence = 0; sequence < 64; ++sequence) slots.push_back(sequence * 128 + sequence % 128);
  CHECK(check(slots, 4) == 4);
  std::reverse(slots.begin(), slots.end());
  CHECK(check(slots, 4) == 4);
}

TEST_CASE("few tokens and one part give one range") {
  CHECK(check({}, 4) == 1);
  CHECK(check({7}, 4) == 1);
  CHECK(check(run(0, 100), 1) == 1);
  CHECK(check(run(0, 16), 4) == 1);
}

TEST_CASE("no panel is in two ranges, whatever the order") {
  const Slots orders[] = {
      run(0, 16) + run(0, 16),                 // a full panel twice
      run(0, 64) + Slots{5},                   // and a token of it again
      run(0, 48) + run(16, 16) + run(64, 64),  // and a panel in the middle
      Slots{5, 20} + run(0, 5) + run(6, 10),   // a panel in three pieces
      run(0, 8) + Slots{-1, -1} + run(8, 24),  // a skipped token within a panel
      run(-8, 40),                             // from negative slots on
      Slots(64, -1),
      Slots(64, 3),
      run(8, 16) + run(0, 8) + run(24, 8),
  };
  for (const Slots& slots : orders) {
    for (const std::int64_t parts : {2, 3, 8, 100}) {
      check(slots, parts);
      Slots backwards = slots;
      std::reverse(backwards.begin(), backwards.end());
      check(backwards, parts);
    }
  }
}

TEST_CASE("random orders of runs, skips and repetitions") {
  for (std::uint32_t seed = 0; seed < 2000; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    Slots slots;
    for (unsigned i = random() % 8; i > 0; --i) {
      slots = slots + run(static_cast<std::int64_t>(random() % 30) * (random() % 2 == 0 ? 16 : 5) - 8,
                          static_cast<std::int64_t>(1 + random() % (random() % 2 == 0 ? 4 : 70)));
    }
    if (random() % 4 == 0) std::shuffle(slots.begin(), slots.end(), random);
    for (const std::int64_t parts : {0, 1, 2, 5, 64}) check(slots, parts);
  }
}
