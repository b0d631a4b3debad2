// SPDX-License-Identifier: Apache-2.0
#include "attention/schedule.h"

#include <functional>
#include <queue>
#include <tuple>
#include <utility>

#include "attention/kv_cache.h"

namespace vllm_arm {
namespace {

// Work is counted in (row, key) pairs. Reading the keys costs about as much as this many rows, so fewer are not
// cheaper.
constexpr std::int64_t kCheapestRows = 4;
// Below this an item is not worth dividing.
constexpr std::int64_t kSmallestWork = 4096;
// Items that each thread gets on average before keys are divided: fewer are hard to balance.
constexpr std::int64_t kItemsPerThread = 4;
// Rows that share a read of the keys in an item, at least, where rows are divided for the sake of balance.
constexpr std::int64_t kFewestRows = 24;
constexpr std::int64_t kFewestKeys = 64;
// Rows of an item are a multiple of what the kernels take at once.
constexpr std::int64_t kRowStep = 6;

constexpr std::int64_t divide_up(std::int64_t value, std::int64_t divisor) { return (value + divisor - 1) / divisor; }
constexpr std::int64_t round_up(std::int64_t value, std::int64_t step) { return divide_up(value, step) * step; }

std::int64_t work(std::int64_t rows, std::int64_t keys) {
  return std::max(rows, kCheapestRows) * std::max<std::int64_t>(keys, kPanelTokens);
}

struct Divider {
  const Batch& batch;
  std::int64_t group_size;
  std::int64_t kv_heads;

  // Keys that any of the rows sees. Both ends grow from row to row.
  KeyRange keys_of(std::int64_t sequence, std::int64_t row_begin, std::int64_t row_end) const {
    return {visible_keys(batch, sequence, row_begin / group_size).begin,
            visible_keys(batch, sequence, (row_end - 1) / group_size).end};
  }

  // Calls `use(sequence, row_begin, row_end, keys)` for items as large as they may be, of one head.
  template <typename Use>
  void for_each_tile(Use use) const {
    for (std::int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
      const std::int64_t rows = batch.query_tokens(sequence) * group_size;
      if (rows == 0) continue;
      const std::int64_t step = round_up(divide_up(rows, divide_up(rows, kMaximumItemRows)), kRowStep);
      for (std::int64_t row = 0; row < rows; row += step) {
        const std::int64_t end = std::min(rows, row + step);
        use(sequence, row, end, keys_of(sequence, row, end));
      }
    }
  }
};

class Builder {
 public:
  Builder(const Divider& divider, std::int64_t largest_work) : divider_(divider), largest_work_(largest_work) {}

  void add(std::int64_t sequence, std::int64_t row_begin, std::int64_t row_end, KeyRange keys) {
    const std::int64_t rows = row_end - row_begin;
    const std::int64_t parts = divide_up(work(rows, keys.end - keys.begin), largest_work_);
    const std::int64_t row_parts = std::clamp<std::int64_t>(rows / kFewestRows, 1, parts);
    const std::int64_t step = round_up(divide_up(rows, row_parts), kRowStep);
    for (std::int64_t row = row_begin; row < row_end; row += step) {
      const std::int64_t end = std::min(row_end, row + step);
      add_rows(sequence, row, end, divider_.keys_of(sequence, row, end));
    }
  }

  std::vector<WorkItem> items;
  std::vector<MergeItem> merges;
  std::int64_t partial_rows = 0;

 private:
  void add_rows(std::int64_t sequence, std::int64_t row_begin, std::int64_t row_end, KeyRange keys) {
    const std::int64_t rows = row_end - row_begin;
    const std::int64_t count = std::max<std::int64_t>(0, keys.end - keys.begin);
    const std::int64_t most = std::max<std::int64_t>(1, count / kFewestKeys);
    const std::int64_t parts = std::min(most, divide_up(work(rows, count), largest_work_));
    const std::int64_t begin = keys.begin / kPanelTokens * kPanelTokens;
    const std::int64_t step =
        std::max(kPanelTokens, round_up(divide_up(std::max(keys.end, begin) - begin, parts), kPanelTokens));
    for (std::int64_t head = 0; head < divider_.kv_heads; ++head) {
      WorkItem item{static_cast<std::int32_t>(sequence),
                    static_cast<std::int32_t>(head),
                    static_cast<std::int32_t>(row_begin),
                    static_cast<std::int32_t>(row_end),
                    static_cast<std::int32_t>(begin),
                    static_cast<std::int32_t>(std::max(keys.end, begin)),
                    -1};
      if (step >= keys.end - begin) {
        items.push_back(item);
        continue;
      }
      MergeItem merge{
          item.sequence, item.kv_head, item.row_begin, item.row_end, static_cast<std::int32_t>(partial_rows), 0};
      for (std::int64_t key = begin; key < keys.end; key += step) {
        item.key_begin = static_cast<std::int32_t>(key);
        item.key_end = static_cast<std::int32_t>(std::min(keys.end, key + step));
        item.partial_row = static_cast<std::int32_t>(partial_rows);
        items.push_back(item);
        partial_rows += rows;
        ++merge.parts;
      }
      merges.push_back(merge);
    }
  }

  const Divider& divider_;
  std::int64_t largest_work_;
};

std::int64_t work(const WorkItem& item) { return work(item.row_end - item.row_begin, item.key_end - item.key_begin); }

// The largest items first, each to the thread that has least; then by place within each thread, so that items that
// share keys follow each other.
void distribute(std::vector<WorkItem> items, std::int64_t threads, Schedule& schedule) {
  std::stable_sort(items.begin(), items.end(), [](const WorkItem& a, const WorkItem& b) { return work(a) > work(b); });
  using Load = std::pair<std::int64_t, std::int64_t>;  // work, thread
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (std::int64_t thread = 0; thread < threads; ++thread) loads.emplace(0, thread);
  std::vector<std::vector<WorkItem>> shares(threads);
  for (const WorkItem& item : items) {
    const auto [load, thread] = loads.top();
    loads.pop();
    shares[thread].push_back(item);
    loads.emplace(load + work(item), thread);
  }
  const auto place = [](const WorkItem& item) {
    return std::tuple(item.sequence, item.kv_head, item.key_begin, item.row_begin);
  };
  for (auto& share : shares) {
    std::sort(share.begin(), share.end(), [&](const WorkItem& a, const WorkItem& b) { return place(a) < place(b); });
    schedule.thread_begins.push_back(static_cast<std::int32_t>(schedule.items.size()));
    schedule.items.insert(schedule.items.end(), share.begin(), share.end());
  }
  schedule.thread_begins.push_back(static_cast<std::int32_t>(schedule.items.size()));
}

}  // namespace

Schedule make_schedule(const Batch& batch, std::int64_t query_heads, std::int64_t kv_heads, std::int64_t threads) {
  const Divider divider{batch, query_heads / kv_heads, kv_heads};
  std::int64_t total = 0;
  divider.for_each_tile([&](std::int64_t, std::int64_t row_begin, std::int64_t row_end, KeyRange keys) {
    total += kv_heads * work(row_end - row_begin, keys.end - keys.begin);
  });
  // One thread needs no balance: its items stay whole.
  const std::int64_t share = threads == 1 ? total + 1 : total / (threads * kItemsPerThread);
  Builder builder(divider, std::max(share, kSmallestWork));
  divider.for_each_tile([&](std::int64_t sequence, std::int64_t row_begin, std::int64_t row_end, KeyRange keys) {
    builder.add(sequence, row_begin, row_end, keys);
  });
  Schedule schedule;
  schedule.merges = std::move(builder.merges);
  schedule.partial_rows = builder.partial_rows;
  distribute(std::move(builder.items), threads, schedule);
  return schedule;
}

}  // namespace vllm_arm
