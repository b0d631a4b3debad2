// SPDX-License-Identifier: Apache-2.0
#include "attention/divide_tokens.h"

#include <algorithm>

#include "attention/kv_cache.h"

namespace vllm_arm {
namespace {

// Whether two runs of neighbouring slots end or begin within the same panel.
bool runs_share_panel(const std::int64_t* slots, std::int64_t count) {
  std::vector<std::int64_t> unfinished;  // panels that a run begins or ends within
  std::int64_t begin = 0;
  for (std::int64_t i = 1; i <= count; ++i) {
    if (i < count && slots[i] == slots[i - 1] + 1) continue;
    const std::int64_t first = slots[begin], last = slots[i - 1];
    begin = i;
    if (last < 0) continue;
    const bool whole_first = first % kPanelTokens == 0, whole_last = (last + 1) % kPanelTokens == 0;
    if (!whole_first) unfinished.push_back(first / kPanelTokens);
    if (!whole_last && (whole_first || last / kPanelTokens != first / kPanelTokens)) {
      unfinished.push_back(last / kPanelTokens);
    }
  }
  std::sort(unfinished.begin(), unfinished.end());
  return std::adjacent_find(unfinished.begin(), unfinished.end()) != unfinished.end();
}

}  // namespace

std::vector<std::int64_t> divide_tokens(const std::int64_t* slot_mapping, std::int64_t count, std::int64_t parts) {
  std::vector<std::int64_t> begins{0};
  if (parts > 1 && count > 1 && !runs_share_panel(slot_mapping, count)) {
    for (std::int64_t part = 1; part < parts; ++part) {
      std::int64_t begin = std::max(part * count / parts, begins.back() + 1);
      while (begin < count && slot_mapping[begin] >= 0 &&
             slot_mapping[begin] / kPanelTokens == slot_mapping[begin - 1] / kPanelTokens) {
        ++begin;
      }
      if (begin >= count) break;
      begins.push_back(begin);
    }
  }
  begins.push_back(count);
  return begins;
}

}  // namespace vllm_arm
