// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <string>

#include "isa/isa.h"

namespace vllm_arm::tests {

// Calls run(kernel) with the kernel of every variant in the table that this CPU can run; there is at least one.
template <typename Table, typename Run>
void for_each_runnable_variant(const Table& table, Run run) {
  int count = 0;
  for (const auto& variant : table) {
    if (!missing_features(variant.isa, host_features()).empty()) continue;
    ++count;
    INFO("variant ", std::string(isa_name(variant.isa)));
    run(variant.kernel);
  }
  CHECK(count >= 1);
}

}  // namespace vllm_arm::tests
