// SPDX-License-Identifier: Apache-2.0
#include "linear/quantise_neon_rows.h"

namespace vllm_arm {

void quantise_neon(const QuantiseArguments& arguments, std::int64_t row_begin, std::int64_t row_end) {
  const auto find = [](const auto* input, std::int64_t size) { return find_range(input, size); };
  const auto run = [&]<bool kIsBounded>() {
    quantise_rows(arguments, row_begin, row_end, find,
                  [](const auto* input, std::int64_t size, const Mapping& mapping, std::int8_t* output) {
                    convert<kIsBounded>(input, size, mapping, output);
                  });
  };
  arguments.static_scale == nullptr ? run.template operator()<true>() : run.template operator()<false>();
}

}  // namespace vllm_arm
