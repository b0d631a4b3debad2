// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace vllm_arm {

// Divides tokens [0, count) into at most `parts` ranges of about equal length that may be written into the cache at the
// same time: no panel gets tokens of two of them. Returns where each begins, then `count`. One range where the slots
// are in an order that allows no more.
std::vector<std::int64_t> divide_tokens(const std::int64_t* slot_mapping, std::int64_t count, std::int64_t parts);

}  // namespace vllm_arm
