// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <type_traits>

#include "isa/neon_convert.h"
#include "linear/dequantise_rows.h"

namespace vllm_arm {
namespace {

Float8 load(const std::int32_t* source) {
  return {vcvtq_f32_s32(vld1q_s32(source)), vcvtq_f32_s32(vld1q_s32(source + 4))};
}

Float8 without_zero_point(const std::int32_t* accumulators, const std::int32_t* weight_sums, std::int32_t zero_point) {
  const auto difference = [&](int at) {
    return vcvtq_f32_s32(vmlsq_n_s32(vld1q_s32(accumulators + at), vld1q_s32(weight_sums + at), zero_point));
  };
  return {difference(0), difference(4)};
}

Float8 without_zero_point(const float* accumulators, const std::int32_t* weight_sums, std::int32_t zero_point) {
  const auto difference = [&](int at) {
    return vsubq_f32(vld1q_f32(accumulators + at), vcvtq_f32_s32(vmulq_n_s32(vld1q_s32(weight_sums + at), zero_point)));
  };
  return {difference(0), difference(4)};
}

template <typename Accumulator, typename Element>
Float8 eight_values(const DequantiseRow<Accumulator, Element>& row, std::int64_t n) {
  const Float8 sums = row.weight_sums != nullptr
                          ? without_zero_point(row.accumulators + n, row.weight_sums + n, row.zero_point)
                          : load(row.accumulators + n);
  const Float8 scales = load(row.weight_scales + n);
  const Float8 factors{vmulq_n_f32(scales.low, row.scale), vmulq_n_f32(scales.high, row.scale)};
  if (row.bias == nullptr) return {vmulq_f32(sums.low, factors.low), vmulq_f32(sums.high, factors.high)};
  const Float8 bias = load(row.bias + n);
  return {vfmaq_f32(bias.low, sums.low, factors.low), vfmaq_f32(bias.high, sums.high, factors.high)};
}

template <typename Value>
void copy_tail(Value (&destination)[kLanes], const Value*& source, std::int64_t begin, std::int64_t count) {
  if (source == nullptr) return;
  std::memcpy(destination, source + begin, static_cast<std::size_t>(count) * sizeof(Value));
  source = destination;
}

}  // namespace

void dequantise_neon(const DequantiseArguments& arguments, std::int64_t row_begin, std::int64_t row_end) {
  dequantise_rows(arguments, row_begin, row_end,
                  []<typename Accumulator, typename Element>(DequantiseRow<Accumulator, Element> row) {
                    std::int64_t n = 0;
                    for (; n + kLanes <= row.size; n += kLanes) store(row.output + n, eight_values(row, n));
                    const std::int64_t rest = row.size - n;
                    if (rest == 0) return;
                    // The last, partial vector: through buffers, so that nothing is read or written past the row.
                    Accumulator accumulators[kLanes] = {};
                    float weight_scales[kLanes] = {};
                    std::int32_t weight_sums[kLanes] = {};
                    Element bias[kLanes] = {}, output[kLanes];
                    copy_tail(accumulators, row.accumulators, n, rest);
                    copy_tail(weight_scales, row.weight_scales, n, rest);
                    copy_tail(weight_sums, row.weight_sums, n, rest);
                    copy_tail(bias, row.bias, n, rest);
                    store(output, eight_values(row, 0));
                    std::memcpy(row.output + n, output, static_cast<std::size_t>(rest) * sizeof(Element));
                  });
}

}  // namespace vllm_arm
