// SPDX-License-Identifier: Apache-2.0
#include "linear/quantise_portable_rows.h"

namespace vllm_arm {

void quantise_portable(const QuantiseArguments& arguments, std::int64_t row_begin, std::int64_t row_end) {
  quantise_rows(
      arguments, row_begin, row_end, [](const auto* input, std::int64_t size) { return find_range(input, size); },
      [](const auto* input, std::int64_t size, const Mapping& mapping, std::int8_t* output) {
        convert(input, size, mapping, output);
      });
}

}  // namespace vllm_arm
