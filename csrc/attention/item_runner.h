// SPDX-License-Identifier: Apache-2.0
// The attention of one work item, by the arithmetic of an engine: the algorithm that all variants share. It is online
// softmax (Milakov and Gimelshein, 2018) over tiles of keys, as in FlashAttention (Dao, 2022), in base 2.
//
// An Engine is a type of static functions for one element type and one order of elements in the panels:
//   group_rows(rows)        rows that are in work together, of an item of that many; at most kMaximumGroupRows
//   pack_query              rows of the query into the engine's order
//   scores                  logits of a group and some panels of keys, and the largest of each row
//   transform               applies the scale (in base 2) and the soft cap to logits
//   logit                   the logit of a row and key
//   maxima                  the largest logit of each row
//   exp2                    2^x of a few values
//   weights                 2^(scale * logit - maximum) in the engine's order, and the sums of each row
//   accumulate              adds weights times values to the outputs of a group
//   copy_values             a panel of values whose last tokens are not valid, with these zeroed
//   write_row               a row of the outputs of a group times a factor, in the type of the destination
// and, where it needs or has them:
//   kTokenScales            true where it needs the scales of tokens of an fp8 cache
//   write_rows              as write_row, two rows at once
//   accumulate              with one more argument: where the sums go as the output, if they are complete
//   scales                  what the logits and outputs are to be multiplied by
//   widens(rows)            whether an item of that many rows has its panels widened
//   widen                   makes panels in scratch memory of those in the cache, once for all rows of an item
//   kWideTileElements       of the keys of a tile of such panels, at most
// All are in an anonymous namespace: every file that includes this has its own copy, for its own instruction set.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "attention/paged_attention.h"

namespace vllm_arm {
namespace {

constexpr float kLog2E = 1.44269504088896340736F;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kMaximumTilePanels = kMaximumTileKeys / kPanelTokens;

// What is already in the outputs of a group before weights times values are added.
enum class Accumulate : std::uint8_t { first, keep, rescale };

// Some panels of keys and values, one after another in their sequence. The scales are of each token, for int8 and
// where the engine needs them. Where `wide`, the engine has widened them.
struct Panels {
  const char* const* keys;
  const char* const* values;
  const float* key_scales;
  const float* value_scales;
  std::int64_t count;
  bool wide = false;
  std::int64_t seen = count * kPanelTokens;  // keys: no row sees any after them

  // Groups of four keys, of which the last has a key that is seen.
  std::int64_t seen_groups() const { return (seen + 3) / 4; }

  Panels from(std::int64_t first, std::int64_t some) const {
    const auto skip = [&](const float* scales) { return scales == nullptr ? nullptr : scales + first * kPanelTokens; };
    return {keys + first, values + first, skip(key_scales), skip(value_scales), some, wide};
  }
};

// Where the sums of a group of rows go that are complete: each row times its factor. Absent rows have a place, too.
struct FinalRows {
  std::uint16_t* rows[kMaximumGroupRows];
  float factors[kMaximumGroupRows];
};

struct CacheScales {
  float key = 1, value = 1;
};

template <typename Engine>
class ItemRunner {
 public:
  ItemRunner(const PagedAttentionArguments& arguments, char* scratch)
      : arguments_(arguments), cache_(arguments.cache), head_size_(arguments.cache.head_size) {
    const std::int64_t rows_bytes = kMaximumItemRows * head_size_ * 4;
    query_ = scratch;
    output_ = reinterpret_cast<float*>(scratch + rows_bytes);
    logits_ = reinterpret_cast<float*>(scratch + 2 * rows_bytes);
    weights_ = reinterpret_cast<char*>(logits_ + kMaximumGroupRows * kMaximumTileKeys);
    values_ = weights_ + kMaximumGroupRows * kMaximumTileKeys * 4;
    widened_ = values_ + kPanelTokens * head_size_ * 4;
    const auto place = [&](std::int64_t key) { return &Engine::logit(logits_, 0, key, kMaximumTilePanels) - logits_; };
    for (std::int64_t key = 0; key < kPanelTokens; ++key) places_[key] = static_cast<std::int32_t>(place(key));
    panel_logits_ = place(kPanelTokens);
    if constexpr (requires { Engine::scales(cache_); }) scales_ = Engine::scales(cache_);
  }

  void run(const WorkItem& item) {
    item_ = &item;
    rows_ = item.row_end - item.row_begin;
    group_rows_ = Engine::group_rows(rows_);
    begin();
    if constexpr (kCanWiden) wide_ = Engine::widens(rows_);
    const std::int64_t tile = tile_keys();
    for (std::int64_t key = item.key_begin / kPanelTokens * kPanelTokens; key < item.key_end; key += tile) {
      const Panels panels = find_panels(key, std::min<std::int64_t>(key + tile, item.key_end));
      for (std::int64_t row = 0; row < rows_; row += group_rows_) attend(row, key, panels);
    }
    if (item.partial_row < 0) {
      write_output();
    } else {
      write_partial();
    }
  }

 private:
  static constexpr bool kCanWiden = requires { Engine::widens(0); };
  static constexpr bool kTokenScales = requires { Engine::kTokenScales; };
  static constexpr bool kWritesPairs = requires { &Engine::write_rows; };
  static constexpr bool kFinishes = requires(const Panels& panels, const KvCache& cache, const FinalRows* final) {
    Engine::accumulate(nullptr, nullptr, 0, panels, cache, Accumulate::first, nullptr, final);
  };

  std::int64_t tile_keys() const {
    std::int64_t elements = kTileElements;
    if constexpr (kCanWiden) {
      if (wide_) elements = Engine::kWideTileElements;
    }
    if (rows_ <= group_rows_ && !wide_) return kMaximumTileKeys;
    const std::int64_t keys = elements / head_size_ / kPanelTokens * kPanelTokens;
    return std::clamp(keys, 2 * kPanelTokens, kMaximumTileKeys);
  }

  std::int64_t group_end(std::int64_t row) const { return std::min(row + group_rows_, rows_); }
  char* query_of(std::int64_t row) const { return query_ + row * head_size_ * 4; }
  float* output_of(std::int64_t row) const { return output_ + row * head_size_; }

  // Places, ranges of keys, query and statistics of all rows.
  void begin() {
    const std::int64_t group_size = arguments_.group_size();
    const std::int64_t first_token = arguments_.batch.query_starts[item_->sequence];
    std::int64_t token = item_->row_begin / group_size;
    std::int64_t in_group = item_->row_begin % group_size;
    KeyRange keys = visible_keys(arguments_.batch, item_->sequence, token);
    const char* sources[kMaximumItemRows];
    for (std::int64_t row = 0; row < rows_; ++row, ++in_group) {
      if (in_group == group_size) {
        in_group = 0;
        keys = visible_keys(arguments_.batch, item_->sequence, ++token);
      }
      tokens_[row] = static_cast<std::int32_t>(token);
      heads_[row] = static_cast<std::int32_t>(item_->kv_head * group_size + in_group);
      key_begins_[row] = static_cast<std::int32_t>(std::max<std::int64_t>(keys.begin, item_->key_begin));
      key_ends_[row] = static_cast<std::int32_t>(std::min<std::int64_t>(keys.end, item_->key_end));
      sources[row] = arguments_.query_row(first_token + token, heads_[row]);
    }
    for (std::int64_t row = 0; row < rows_; row += group_rows_) {
      Engine::pack_query(query_of(row), sources + row, group_end(row) - row, head_size_);
    }
    std::fill_n(maxima_, std::size(maxima_), -kInfinity);
    std::fill_n(sums_, kMaximumItemRows, 0.0F);
    std::fill_n(begun_, kMaximumItemRows, false);
    std::fill_n(finished_, kMaximumItemRows, false);
  }

  // The panels that hold keys [key_begin, key_end). Tokens after the sequence's last are in no defined state.
  Panels find_panels(std::int64_t key_begin, std::int64_t key_end) {
    const std::int64_t length = arguments_.batch.key_lengths[item_->sequence];
    const std::int32_t* blocks = arguments_.block_table + item_->sequence * arguments_.block_table_stride;
    const std::int64_t panel_bytes = cache_.panel_bytes(), plane_bytes = cache_.plane_bytes();
    const std::int64_t block_size = cache_.block_size;
    const bool has_scales = kTokenScales || cache_.type == KvCacheType::int8;
    blocks += key_begin / block_size;
    std::int64_t in_block = key_begin % block_size;
    const char* interior = cache_.interior(*blocks, item_->kv_head);
    const char* panel = interior + in_block / kPanelTokens * panel_bytes;
    std::int64_t count = 0;
    for (std::int64_t key = key_begin; key < key_end; key += kPanelTokens, in_block += kPanelTokens, ++count) {
      if (in_block == block_size) {
        in_block = 0;
        panel = interior = cache_.interior(*++blocks, item_->kv_head);
      }
      key_panels_[count] = panel;
      value_panels_[count] = panel + plane_bytes;
      panel += panel_bytes;
      const std::int64_t valid = std::min(kPanelTokens, length - key);
      if (valid < kPanelTokens) {
        Engine::copy_values(values_, value_panels_[count], valid, head_size_);
        value_panels_[count] = values_;
      }
      if (has_scales) {
        const auto* scales = reinterpret_cast<const float*>(interior + 2 * plane_bytes) + in_block;
        copy_scales(key_scales_ + count * kPanelTokens, scales, valid);
        copy_scales(value_scales_ + count * kPanelTokens, scales + block_size, valid);
      }
    }
    if constexpr (kCanWiden) {
      if (wide_) Engine::widen(widened_, key_panels_, value_panels_, count, head_size_);
    }
    return {key_panels_, value_panels_, has_scales ? key_scales_ : nullptr, has_scales ? value_scales_ : nullptr,
            count,       wide_};
  }

  static void copy_scales(float* destination, const float* source, std::int64_t valid) {
    if (valid == kPanelTokens) {
      std::memcpy(destination, source, kPanelTokens * sizeof(float));  // in place of a call
      return;
    }
    std::memcpy(destination, source, valid * sizeof(float));
    std::fill(destination + valid, destination + kPanelTokens, 0.0F);
  }

  // A group of rows against the tile of keys that begins at `tile_begin`.
  void attend(std::int64_t row, std::int64_t tile_begin, const Panels& tile) {
    const std::int64_t rows = group_end(row) - row;
    const std::int64_t last = row + rows - 1;
    // Both ends grow from row to row.
    const std::int64_t tile_end = tile_begin + tile.count * kPanelTokens;
    const std::int64_t key_begin = std::max<std::int64_t>(tile_begin, key_begins_[row]);
    const std::int64_t key_end = std::min<std::int64_t>(tile_end, key_ends_[last]);
    if (key_begin >= key_end) return;
    const std::int64_t first_panel = (key_begin - tile_begin) / kPanelTokens;
    const std::int64_t end_panel = (key_end - tile_begin + kPanelTokens - 1) / kPanelTokens;
    Panels panels = tile.from(first_panel, end_panel - first_panel);
    const std::int64_t first_key = tile_begin + first_panel * kPanelTokens;
    panels.seen = key_end - first_key;
    const std::int64_t end_key = tile_begin + end_panel * kPanelTokens;

    float tile_maxima[kMaximumGroupRows] = {};
    Engine::scores(logits_, tile_maxima, query_of(row), rows, panels, cache_);
    float scale = arguments_.scale * scales_.key * kLog2E;
    const bool transformed = arguments_.softcap != 0 || arguments_.alibi_slopes != nullptr || scale <= 0;
    if (transformed) {
      Engine::transform(logits_, rows, panels.count, scale, arguments_.softcap * kLog2E);
      if (arguments_.alibi_slopes != nullptr) add_alibi(row, rows, first_key, panels.count);
      scale = 1;
    }
    const bool masked = key_begins_[last] > first_key || key_ends_[row] < end_key;
    if (masked) mask(row, rows, first_key, panels.count);
    if (transformed || masked) Engine::maxima(tile_maxima, logits_, rows, panels.count);

    // Statistics of all rows that a group may have are at hand, for vectors; those of absent rows are unused.
    float maxima[kMaximumGroupRows], sums[kMaximumGroupRows], row_sums[kMaximumGroupRows] = {};
    float subtracted[kMaximumGroupRows], factors[kMaximumGroupRows];
    std::uint32_t rises[kMaximumGroupRows], rescale = 0;
    std::copy_n(sums_ + row, kMaximumGroupRows, sums);
    for (std::int64_t i = 0; i < kMaximumGroupRows; ++i) {
      const float old = maxima_[row + i];
      const float here = tile_maxima[i] * scale;
      rises[i] = here > old || here != here ? 1 : 0;
      maxima[i] = rises[i] ? here : old;
      // A row that sees no key yet: any finite value keeps its weights finite.
      subtracted[i] = maxima[i] == -kInfinity ? 0 : maxima[i];
      factors[i] = old == -kInfinity ? -kInfinity : old - subtracted[i];
    }
    Engine::exp2(factors);
    Engine::weights(weights_, row_sums, logits_, rows, panels, scale, subtracted);
    for (std::int64_t i = 0; i < kMaximumGroupRows; ++i) {
      // An engine's 2^0 may differ from 1, and its error would add up over tiles.
      factors[i] = rises[i] ? factors[i] : 1;
      rescale |= rises[i];
      sums[i] = sums[i] * factors[i] + row_sums[i];
    }
    std::copy_n(maxima, rows, maxima_ + row);
    std::copy_n(sums, rows, sums_ + row);
    const Accumulate mode = !begun_[row] ? Accumulate::first : rescale ? Accumulate::rescale : Accumulate::keep;
    begun_[row] = true;
    if constexpr (kFinishes) {
      FinalRows final;
      // No later tile has keys that the group sees.
      finished_[row] = item_->partial_row < 0 && tile_end >= key_ends_[last];
      if (finished_[row]) find_final_rows(row, rows, final);
      Engine::accumulate(output_of(row), weights_, rows, panels, cache_, mode, factors,
                         finished_[row] ? &final : nullptr);
    } else {
      Engine::accumulate(output_of(row), weights_, rows, panels, cache_, mode, factors);
    }
  }

  void find_final_rows(std::int64_t row, std::int64_t rows, FinalRows& final) {
    const std::int64_t first_token = arguments_.batch.query_starts[item_->sequence];
    for (std::int64_t i = 0; i < kMaximumGroupRows; ++i) {
      // The query of the group is not needed any more.
      char* place = i < rows ? arguments_.output_row(first_token + tokens_[row + i], heads_[row + i]) : query_of(row);
      final.rows[i] = reinterpret_cast<std::uint16_t*>(place);
      final.factors[i] = i < rows ? normaliser(row + i) * scales_.value : 0;
    }
  }

  void add_alibi(std::int64_t row, std::int64_t rows, std::int64_t first_key, std::int64_t panels) {
    const Batch& batch = arguments_.batch;
    const std::int64_t first_position = batch.key_lengths[item_->sequence] - batch.query_tokens(item_->sequence);
    for (std::int64_t i = 0; i < rows; ++i) {
      const float slope = arguments_.alibi_slopes[heads_[row + i]] * kLog2E;
      const std::int64_t position = first_position + tokens_[row + i];
      for (std::int64_t key = 0; key < panels * kPanelTokens; ++key) {
        Engine::logit(logits_, i, key, panels) += slope * static_cast<float>(first_key + key - position);
      }
    }
  }

  // Keys [begin, end) of the row whose first logit is `logits`.
  void hide(float* logits, std::int64_t begin, std::int64_t end) const {
    while (begin < end) {
      const std::int64_t panel = begin / kPanelTokens, first = panel * kPanelTokens;
      const std::int64_t panel_end = std::min(end, first + kPanelTokens);
      float* of_panel = logits + panel * panel_logits_;
      for (; begin < panel_end; ++begin) of_panel[places_[begin - first]] = -kInfinity;
    }
  }

  void mask(std::int64_t row, std::int64_t rows, std::int64_t first_key, std::int64_t panels) {
    const std::int64_t keys = panels * kPanelTokens;
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t begin = std::min<std::int64_t>(key_begins_[row + i] - first_key, keys);
      const std::int64_t end = std::max<std::int64_t>(key_ends_[row + i] - first_key, 0);
      float* logits = &Engine::logit(logits_, i, 0, panels);
      hide(logits, 0, begin);
      hide(logits, end, keys);
    }
  }

  // What turns the sum of a row into its result; 0 where the row saw no key.
  float normaliser(std::int64_t row) const {
    const float maximum = maxima_[row];
    if (maximum == -kInfinity) return 0;
    if (arguments_.sinks == nullptr) return 1 / sums_[row];
    const float sink = arguments_.sinks[heads_[row]] * kLog2E;
    const float largest = sink > maximum ? sink : maximum;
    const float own = std::exp2(maximum - largest);
    return own / (own * sums_[row] + std::exp2(sink - largest));
  }

  // Rows of groups that no tile of keys reached have no sums yet.
  void begin_rest() {
    for (std::int64_t row = 0; row < rows_; row += group_rows_) {
      if (!begun_[row]) std::fill_n(output_of(row), group_rows_ * head_size_, 0.0F);
    }
  }

  void write_output() {
    begin_rest();
    const std::int64_t first_token = arguments_.batch.query_starts[item_->sequence];
    using Element = typename Engine::Element;
    const auto destination = [&](std::int64_t row) {
      return reinterpret_cast<Element*>(arguments_.output_row(first_token + tokens_[row], heads_[row]));
    };
    for (std::int64_t group = 0; group < rows_; group += group_rows_) {
      std::int64_t row = group;
      if (finished_[group]) continue;
      if constexpr (kWritesPairs) {
        for (; row + 1 < group_end(group); row += 2) {
          const float factors[] = {normaliser(row) * scales_.value, normaliser(row + 1) * scales_.value};
          Engine::write_rows(destination(row), destination(row + 1), output_of(group), row - group, head_size_,
                             factors);
        }
      }
      for (; row < group_end(group); ++row) {
        Engine::write_row(destination(row), output_of(group), row - group, head_size_, normaliser(row) * scales_.value);
      }
    }
  }

  void write_partial() {
    begin_rest();
    for (std::int64_t group = 0; group < rows_; group += group_rows_) {
      for (std::int64_t row = group; row < group_end(group); ++row) {
        const std::int64_t partial = item_->partial_row + row;
        Engine::write_row(arguments_.partial_output + partial * head_size_, output_of(group), row - group, head_size_,
                          scales_.value);
        arguments_.partial_maximum[partial] = maxima_[row];
        arguments_.partial_sum[partial] = sums_[row];
      }
    }
  }

  const PagedAttentionArguments& arguments_;
  const KvCache& cache_;
  const std::int64_t head_size_;
  const WorkItem* item_ = nullptr;
  std::int64_t rows_ = 0, group_rows_ = 0;
  bool wide_ = false;  // the engine widens the item's panels

  CacheScales scales_;
  std::int32_t places_[kPanelTokens];  // of a panel's logits in a row
  std::int64_t panel_logits_;          // from a panel's first logit in a row to the next panel's

  // In scratch: query and outputs of all rows, logits and weights of one group, one panel of values, and a tile of
  // widened keys and values.
  char* query_;
  float* output_;
  float* logits_;
  char* weights_;
  char* values_;
  char* widened_;

  std::int32_t tokens_[kMaximumItemRows], heads_[kMaximumItemRows];  // of each row: query token, query head
  std::int32_t key_begins_[kMaximumItemRows], key_ends_[kMaximumItemRows];
  // Of each row so far; maxima in base 2. Those of a group can be read as if it had all rows.
  float maxima_[kMaximumItemRows + kMaximumGroupRows], sums_[kMaximumItemRows + kMaximumGroupRows] = {};
  bool finished_[kMaximumItemRows];  // likewise: the output is written
  bool begun_[kMaximumItemRows];     // of the first row of a group: outputs hold a sum
  const char* key_panels_[kMaximumTilePanels];
  const char* value_panels_[kMaximumTilePanels];
  float key_scales_[kMaximumTileKeys], value_scales_[kMaximumTileKeys];
};

template <typename Engine>
void run_items(const PagedAttentionArguments& arguments, const WorkItem* items, std::int64_t count, char* scratch) {
  ItemRunner<Engine> runner(arguments, scratch);
  for (std::int64_t i = 0; i < count; ++i) runner.run(items[i]);
}

}  // namespace
}  // namespace vllm_arm
