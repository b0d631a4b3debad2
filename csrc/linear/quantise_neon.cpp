// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "linear/neon_elements.h"
#include "linear/quantise_rows.h"

namespace vllm_arm {
namespace {

int16x4_t to_integers(float32x4_t value, float inverse, int32x4_t zero_point) {
  return vqmovn_s32(vqaddq_s32(vcvtnq_s32_f32(vmulq_n_f32(value, inverse)), zero_point));
}

}  // namespace

void quantise_neon(const QuantiseArguments& arguments, std::int64_t row_begin, std::int64_t row_end) {
  quantise_rows(
      arguments, row_begin, row_end,
      []<typename Element>(const Element* input, std::int64_t size) {
        // FMIN and FMAX give NaN where either operand is one.
        Float8 smallest{vdupq_n_f32(0), vdupq_n_f32(0)}, largest = smallest;
        std::int64_t i = 0;
        const auto take = [&](Float8 x) {
          smallest = {vminq_f32(smallest.low, x.low), vminq_f32(smallest.high, x.high)};
          largest = {vmaxq_f32(largest.low, x.low), vmaxq_f32(largest.high, x.high)};
        };
        for (; i + kLanes <= size; i += kLanes) take(load(input + i));
        if (i < size) {
          Element tail[kLanes] = {};
          std::memcpy(tail, input + i, static_cast<std::size_t>(size - i) * sizeof(Element));
          take(load(tail));
        }
        return Range{vminvq_f32(vminq_f32(smallest.low, smallest.high)),
                     vmaxvq_f32(vmaxq_f32(largest.low, largest.high))};
      },
      []<typename Element>(const Element* input, std::int64_t size, const Mapping& mapping, std::int8_t* output) {
        const int32x4_t zero_point = vdupq_n_s32(mapping.zero_point);
        const auto convert = [&](Float8 x) {
          return vqmovn_s16(vcombine_s16(to_integers(x.low, mapping.inverse, zero_point),
                                         to_integers(x.high, mapping.inverse, zero_point)));
        };
        std::int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) vst1_s8(output + i, convert(load(input + i)));
        if (i < size) {
          Element tail[kLanes] = {};
          std::int8_t converted[kLanes];
          std::memcpy(tail, input + i, static_cast<std::size_t>(size - i) * sizeof(Element));
          vst1_s8(converted, convert(load(tail)));
          std::memcpy(output + i, converted, static_cast<std::size_t>(size - i));
        }
      });
}

}  // namespace vllm_arm
