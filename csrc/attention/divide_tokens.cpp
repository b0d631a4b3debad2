// SPDX-License-Identifier: Apache-2.0
#include "attention/divide_tokens.h"

#include <algorithm>

#include "attention/kv_cache.h"

namespace vllm_arm {
namespace {

struct Run {
  std::int64_t first_panel, last_panel;
};

// Whether two runs of neighbouring slots have a panel in common.
bool runs_share_panel(const std::int64_t* slots, std::int64_t count) {
  std::vector<Run> runs;
  std::int64_t begin = 0;
  for (std::int64_t i = 1; i <= count; ++i) {
    if (i < count && slots[i] == slots[i - 1] + 1) continue;
    const std::int64_t first = std::max<std::int64_t>(slots[begin], 0), last = slots[i - 1];
    begin = i;
    if (last >= 0) runs.push_back({first / kPanelTokens, last / kPanelTokens});
  }
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.first_panel < b.first_panel; });
  const auto overlap = [](const Run& a, const Run& b) { return b.first_panel <= a.last_panel; };
  return std::adjacent_find(runs.begin(), runs.end(), overlap) != runs.end();
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
