// SPDX-License-Identifier: Apache-2.0
// Divides the attention of a batch among threads, by work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace vllm_arm {

// The sequences of a batch, and which keys their queries see.
struct Batch {
  std::int64_t sequences;
  const std::int32_t* query_starts;    // [sequences + 1]: where each sequence's query tokens begin
  const std::int32_t* key_lengths;     // [sequences]: keys of each, its query tokens included
  bool causal;                         // a query sees no key after itself
  const std::int32_t* dynamic_causal;  // [sequences]: overrides `causal` for each; null: none
  // A query sees keys less than this away from itself (backwards only where causal); negative: no limit.
  std::int64_t sliding_window;

  std::int64_t query_tokens(std::int64_t sequence) const { return query_starts[sequence + 1] - query_starts[sequence]; }
  bool is_causal(std::int64_t sequence) const {
    return dynamic_causal != nullptr ? dynamic_causal[sequence] != 0 : causal;
  }
};

// Keys [begin, end); empty where end <= begin.
struct KeyRange {
  std::int64_t begin, end;
};

// The keys that query token `token` of `sequence` sees.
inline KeyRange visible_keys(const Batch& batch, std::int64_t sequence, std::int64_t token) {
  const std::int64_t length = batch.key_lengths[sequence];
  const std::int64_t position = length - batch.query_tokens(sequence) + token;
  KeyRange range{0, length};
  if (batch.is_causal(sequence)) range.end = std::min(range.end, position + 1);
  if (batch.sliding_window >= 0) {
    range.begin = std::max<std::int64_t>(0, position - batch.sliding_window + 1);
    range.end = std::min(range.end, position + batch.sliding_window);
  }
  return range;
}

// Rows of a sequence and a key head are its query tokens times the query heads that share the key head: row =
// token * group_size + query head within the group. All of them read the same keys.
inline constexpr std::int64_t kMaximumItemRows = 96;

// Attention of some rows over the keys in [key_begin, key_end) that they see.
struct WorkItem {
  std::int32_t sequence, kv_head;
  std::int32_t row_begin, row_end;  // at most kMaximumItemRows
  std::int32_t key_begin, key_end;
  std::int32_t partial_row;  // where the item's partial result begins; negative: it writes the output
};

// Rows whose keys were divided into `parts` items: part p of row r is partial row `partial_row` +
// p * (row_end - row_begin) + r - row_begin.
struct MergeItem {
  std::int32_t sequence, kv_head;
  std::int32_t row_begin, row_end;
  std::int32_t partial_row;
  std::int32_t parts;
};

struct Schedule {
  std::vector<WorkItem> items;              // those of a thread lie one after another
  std::vector<std::int32_t> thread_begins;  // [threads + 1]: the items of each thread
  std::vector<MergeItem> merges;
  std::int64_t partial_rows = 0;
};

// Every (row, key) pair that is visible is in exactly one item. Threads get about equal work; keys are divided only
// where rows alone do not make enough items.
Schedule make_schedule(const Batch& batch, std::int64_t query_heads, std::int64_t kv_heads, std::int64_t threads);

}  // namespace vllm_arm
