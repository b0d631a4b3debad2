// SPDX-License-Identifier: Apache-2.0
// Attention of a batch of sequences over a paged key-value cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/kv_cache.h"
#include "attention/schedule.h"

namespace vllm_arm {

// output = softmax(scale * query . key) . value, over the keys that each query sees. Query tokens of all sequences lie
// one after another; those of a sequence are its last. Sums are in fp32.
struct PagedAttentionArguments {
  KvCache cache;
  const void* query;  // [tokens, query_heads, head_size] of cache.scalar_type, unit stride in the last dimension
  void* output;       // likewise
  std::int64_t query_token_stride, query_head_stride;  // bytes
  std::int64_t output_token_stride, output_head_stride;
  std::int64_t query_heads;
  Batch batch;
  const std::int32_t* block_table;  // [sequences, at least the blocks in use]
  std::int64_t block_table_stride;  // elements from a sequence to the next
  float scale;
  float softcap;              // logits become softcap * tanh(logit / softcap); 0: none
  const float* alibi_slopes;  // [query_heads]: slope * (key position - query position) is added; null: none
  const float* sinks;         // [query_heads]: a logit that takes part in the sum only; null: none
  // Items that are not a whole softmax leave fp32 sums here: [partial_rows, head_size], and for each of them its
  // maximum (base 2) and sum of weights.
  float* partial_output;
  float* partial_maximum;
  float* partial_sum;

  std::int64_t group_size() const { return query_heads / cache.kv_heads; }
  const char* query_row(std::int64_t token, std::int64_t head) const {
    return static_cast<const char*>(query) + token * query_token_stride + head * query_head_stride;
  }
  char* output_row(std::int64_t token, std::int64_t head) const {
    return static_cast<char*>(output) + token * output_token_stride + head * output_head_stride;
  }
};

// Computes `count` items with `scratch` of paged_attention_scratch_bytes(head_size), aligned to 64 bytes.
using PagedAttentionKernel = void (*)(const PagedAttentionArguments&, const WorkItem* items, std::int64_t count,
                                      char* scratch);

// Keys are taken in tiles of at most this many, so that their logits stay in the first-level cache.
inline constexpr std::int64_t kMaximumTileKeys = 256;
// Where more rows share a tile than are in work together, elements of its keys, at most: keys and values in bf16 are
// half of the second-level cache of the smallest Neoverse, and are read in order, by 21 bytes a cycle at most.
inline constexpr std::int64_t kTileElements = 256 * 128;
// Rows whose logits are in work at the same time, at most.
inline constexpr std::int64_t kMaximumGroupRows = 8;

// For every variant: queries and outputs of an item in fp32, logits and weights of a group of rows and a tile of keys,
// a panel of values, and widened keys and values of a tile: kTileElements of each in bf16, half as many in fp32, or two
// panels of the largest heads.
constexpr std::int64_t paged_attention_scratch_bytes(std::int64_t head_size) {
  const std::int64_t rows = 4 * 2 * kMaximumItemRows * head_size;
  const std::int64_t logits = 4 * 2 * kMaximumGroupRows * kMaximumTileKeys;
  const std::int64_t panel = 4 * kPanelTokens * head_size;
  constexpr std::int64_t widened = 2 * 2 * kTileElements;
  static_assert(widened >= 2 * 4 * 2 * kPanelTokens * kMaximumHeadSize);
  return rows + logits + panel + widened;
}

// Adds up the partial results of rows [item.row_begin, item.row_end) and writes the output.
void merge_partials(const PagedAttentionArguments& arguments, const MergeItem& item);

}  // namespace vllm_arm
