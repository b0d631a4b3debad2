// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "attention/kv_cache.h"
#include "attention/schedule.h"

using vllm_arm::Batch;
using vllm_arm::kMaximumItemRows;
using vllm_arm::make_schedule;
using vllm_arm::MergeItem;
using vllm_arm::Schedule;
using vllm_arm::WorkItem;

namespace {

struct OwnedBatch {
  std::vector<std::int32_t> query_starts{0}, key_lengths, dynamic_causal;
  bool causal = true;
  std::int64_t window = -1;

  void add(std::int64_t queries, std::int64_t keys, bool is_causal = true) {
    query_starts.push_back(query_starts.back() + static_cast<std::int32_t>(queries));
    key_lengths.push_back(static_cast<std::int32_t>(keys));
    dynamic_causal.push_back(is_causal);
  }
  Batch view(bool with_dynamic_causal = false) const {
    return {static_cast<std::int64_t>(key_lengths.size()),
            query_starts.data(),
            key_lengths.data(),
            causal,
            with_dynamic_causal ? dynamic_causal.data() : nullptr,
            window};
  }
};

// By the definition, not by visible_keys.
bool sees(const Batch& batch, std::int64_t sequence, std::int64_t token, std::int64_t key) {
  const std::int64_t position = batch.key_lengths[sequence] - batch.query_tokens(sequence) + token;
  if (batch.is_causal(sequence) && key > position) return false;
  return batch.sliding_window < 0 || std::abs(key - position) < batch.sliding_window;
}

void check_items(const Batch& batch, std::int64_t group_size, std::int64_t kv_heads, const Schedule& schedule) {
  for (const WorkItem& item : schedule.items) {
    REQUIRE(item.sequence >= 0);
    REQUIRE(item.sequence < batch.sequences);
    REQUIRE(item.kv_head >= 0);
    REQUIRE(item.kv_head < kv_heads);
    REQUIRE(item.row_begin >= 0);
    REQUIRE(item.row_begin < item.row_end);
    REQUIRE(item.row_end - item.row_begin <= kMaximumItemRows);
    REQUIRE(item.row_end <= batch.query_tokens(item.sequence) * group_size);
    REQUIRE(item.key_begin >= 0);
    REQUIRE(item.key_begin % vllm_arm::kPanelTokens == 0);
    REQUIRE(item.key_end <= std::max<std::int64_t>(item.key_begin, batch.key_lengths[item.sequence]));
  }
}

// Every visible pair is in one item, every row is written once.
void check_coverage(const Batch& batch, std::int64_t group_size, std::int64_t kv_heads, const Schedule& schedule) {
  for (std::int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    const std::int64_t rows = batch.query_tokens(sequence) * group_size, keys = batch.key_lengths[sequence];
    for (std::int64_t head = 0; head < kv_heads; ++head) {
      std::vector<int> pairs(rows * keys), written(rows);
      for (const WorkItem& item : schedule.items) {
        if (item.sequence != sequence || item.kv_head != head) continue;
        for (std::int64_t row = item.row_begin; row < item.row_end; ++row) {
          if (item.partial_row < 0) ++written[row];
          for (std::int64_t key = item.key_begin; key < item.key_end; ++key) ++pairs[row * keys + key];
        }
      }
      for (const MergeItem& merge : schedule.merges) {
        if (merge.sequence != sequence || merge.kv_head != head) continue;
        for (std::int64_t row = merge.row_begin; row < merge.row_end; ++row) ++written[row];
      }
      REQUIRE(std::all_of(written.begin(), written.end(), [](int times) { return times == 1; }));
      bool covered = true;
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t key = 0; key < keys; ++key) {
          covered = covered && (pairs[row * keys + key] == 1 || !sees(batch, sequence, row / group_size, key));
        }
      }
      REQUIRE(covered);
    }
  }
}

// Each merge has its parts, and each partial row belongs to one part.
void check_merges(const Schedule& schedule) {
  std::vector<int> owners(schedule.partial_rows);
  std::map<std::int32_t, WorkItem> parts;
  for (const WorkItem& item : schedule.items) {
    if (item.partial_row < 0) continue;
    REQUIRE(parts.emplace(item.partial_row, item).second);
    for (std::int32_t row = 0; row < item.row_end - item.row_begin; ++row) ++owners.at(item.partial_row + row);
  }
  REQUIRE(std::all_of(owners.begin(), owners.end(), [](int count) { return count == 1; }));
  std::size_t merged = 0;
  for (const MergeItem& merge : schedule.merges) {
    REQUIRE(merge.parts >= 2);
    for (std::int32_t part = 0; part < merge.parts; ++part) {
      const WorkItem& item = parts.at(merge.partial_row + part * (merge.row_end - merge.row_begin));
      REQUIRE(std::tie(item.sequence, item.kv_head, item.row_begin, item.row_end) ==
              std::tie(merge.sequence, merge.kv_head, merge.row_begin, merge.row_end));
      ++merged;
    }
  }
  REQUIRE(merged == parts.size());
}

// Pairs of rows and keys; few rows cost as much as four.
std::vector<double> loads(const Schedule& schedule) {
  std::vector<double> result;
  for (std::size_t thread = 0; thread + 1 < schedule.thread_begins.size(); ++thread) {
    double load = 0;
    for (std::int32_t i = schedule.thread_begins[thread]; i < schedule.thread_begins[thread + 1]; ++i) {
      const WorkItem& item = schedule.items[i];
      load += std::max(item.row_end - item.row_begin, 4) * static_cast<double>(item.key_end - item.key_begin);
    }
    result.push_back(load);
  }
  return result;
}

void check(const Batch& batch, std::int64_t group_size, std::int64_t kv_heads, std::int64_t threads) {
  const Schedule schedule = make_schedule(batch, group_size * kv_heads, kv_heads, threads);
  REQUIRE(static_cast<std::int64_t>(schedule.thread_begins.size()) == threads + 1);
  REQUIRE(schedule.thread_begins.front() == 0);
  REQUIRE(schedule.thread_begins.back() == static_cast<std::int32_t>(schedule.items.size()));
  REQUIRE(std::is_sorted(schedule.thread_begins.begin(), schedule.thread_begins.end()));
  check_items(batch, group_size, kv_heads, schedule);
  check_coverage(batch, group_size, kv_heads, schedule);
  check_merges(schedule);
  if (threads == 1) {
    REQUIRE(schedule.merges.empty());
    REQUIRE(schedule.partial_rows == 0);
  }
}

void check_balance(const OwnedBatch& batch, std::int64_t group_size, std::int64_t kv_heads) {
  for (const std::int64_t threads : {2, 3, 4, 8, 16, 64}) {
    CAPTURE(threads);
    const Schedule schedule = make_schedule(batch.view(), group_size * kv_heads, kv_heads, threads);
    const std::vector<double> each = loads(schedule);
    double total = 0;
    for (const double load : each) total += load;
    const double mean = total / static_cast<double>(threads);
    REQUIRE(mean > 16384);  // else the case is too small to ask for balance
    CHECK(*std::max_element(each.begin(), each.end()) <= 1.25 * mean);
  }
}

}  // namespace

TEST_CASE("every visible pair of a random batch is in one item, every row is written once") {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto between = [&](std::int64_t least, std::int64_t most) {
      return least + static_cast<std::int64_t>(random() % (most - least + 1));
    };
    OwnedBatch batch;
    batch.causal = random() % 2 == 0;
    if (random() % 3 == 0) batch.window = between(0, 80);
    for (std::int64_t i = between(0, 5); i > 0; --i) {
      const std::int64_t keys = between(0, random() % 4 == 0 ? 1500 : 120);
      batch.add(random() % 2 == 0 ? between(0, 3) : between(0, std::min<std::int64_t>(keys + 2, 150)), keys,
                random() % 2 == 0);
    }
    const std::int64_t threads = between(1, 3) == 1 ? 1 : between(2, 40);
    check(batch.view(random() % 3 == 0), between(1, 17), between(1, 3), threads);
  }
}

TEST_CASE("no sequences make no items") {
  const OwnedBatch batch;
  const Schedule schedule = make_schedule(batch.view(), 8, 2, 4);
  CHECK(schedule.items.empty());
  CHECK(schedule.merges.empty());
  CHECK(schedule.thread_begins == std::vector<std::int32_t>(5, 0));
}

TEST_CASE("rows that see no key are written all the same") {
  OwnedBatch batch;
  batch.window = 0;
  batch.add(5, 40);
  batch.add(3, 0);
  check(batch.view(), 2, 2, 4);
}

TEST_CASE("threads get about equal work") {
  SUBCASE("one long decode") {
    OwnedBatch batch;
    batch.add(1, 131072);
    check_balance(batch, 4, 8);
  }
  SUBCASE("one long decode, one key head") {
    OwnedBatch batch;
    batch.add(1, 400000);
    check_balance(batch, 8, 1);
  }
  SUBCASE("decodes of very different lengths") {
    OwnedBatch batch;
    for (std::int64_t i = 0; i < 40; ++i) batch.add(1, 37 + i * i * i);
    check_balance(batch, 4, 2);
  }
  SUBCASE("a prompt") {
    OwnedBatch batch;
    batch.add(2048, 2048);
    check_balance(batch, 4, 2);
  }
  SUBCASE("a prompt beside decodes") {
    OwnedBatch batch;
    batch.add(700, 700);
    for (std::int64_t i = 0; i < 20; ++i) batch.add(1, 500 + 800 * i);
    check_balance(batch, 4, 2);
  }
  SUBCASE("the last chunk of a long prompt") {
    OwnedBatch batch;
    batch.add(64, 30000);
    check_balance(batch, 4, 2);
  }
  SUBCASE("a window, encoder and speculative tokens") {
    OwnedBatch batch;
    batch.causal = false;
    batch.window = 512;
    batch.add(1500, 1500);
    for (std::int64_t i = 0; i < 30; ++i) batch.add(4, 3000);
    check_balance(batch, 4, 8);
  }
}

TEST_CASE("keys are not divided where rows alone keep the threads busy") {
  OwnedBatch batch;
  for (std::int64_t i = 0; i < 64; ++i) batch.add(1, 1024);
  const Schedule schedule = make_schedule(batch.view(), 32, 8, 8);
  CHECK(schedule.merges.empty());
}
