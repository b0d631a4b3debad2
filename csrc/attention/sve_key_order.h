// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace vllm_arm {
namespace {

// Which pair of its panel a token is in, in the order of sve_engine.h, for vectors of 2^log_units units.
[[maybe_unused]] constexpr std::int64_t sve_pair(std::int64_t token, int log_units) {
  const std::int64_t group = token / 4, vector = group >> log_units << 1 | token % 2;
  return (vector << log_units) + (group & ((1 << log_units) - 1));
}

}  // namespace
}  // namespace vllm_arm
