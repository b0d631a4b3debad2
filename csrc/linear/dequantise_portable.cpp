// SPDX-License-Identifier: Apache-2.0
#include "linear/dequantise_rows.h"

namespace vllm_arm {
namespace {

// The flags are constants, so that each loop is one that the compiler can keep in vectors.
template <bool kHasZeroPoint, bool kHasBias, typename Accumulator, typename Element>
void dequantise_row(const DequantiseRow<Accumulator, Element>& row) {
  for (std::int64_t n = 0; n < row.size; ++n) {
    Accumulator sum = row.accumulators[n];
    if constexpr (kHasZeroPoint) sum -= static_cast<Accumulator>(row.zero_point * row.weight_sums[n]);
    float value = static_cast<float>(sum) * (row.scale * row.weight_scales[n]);
    if constexpr (kHasBias) value += to_float(row.bias[n]);
    from_float(value, row.output[n]);
  }
}

}  // namespace

void dequantise_portable(const DequantiseArguments& arguments, std::int64_t row_begin, std::int64_t row_end) {
  dequantise_rows(arguments, row_begin, row_end, [](const auto& row) {
    if (row.weight_sums != nullptr) {
      row.bias != nullptr ? dequantise_row<true, true>(row) : dequantise_row<true, false>(row);
    } else {
      row.bias != nullptr ? dequantise_row<false, true>(row) : dequantise_row<false, false>(row);
    }
  });
}

}  // namespace vllm_arm
