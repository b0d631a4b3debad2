// SPDX-License-Identifier: Apache-2.0
#include "linear/int4_weight.h"

#include <algorithm>
#include <cstring>

#include "isa/scalar_types.h"

namespace vllm_arm {
namespace {

constexpr std::int64_t kSegment = 8;  // bytes of a row that lie together

template <typename Number>
void put(std::byte*& destination, Number value) {
  std::memcpy(destination, &value, sizeof value);
  destination += sizeof value;
}

std::byte two_codes(int low, int high) {
  return static_cast<std::byte>((low & 0xf) | (static_cast<unsigned>(high & 0xf) << 4));
}

}  // namespace

void pack_int4(const Int4Shape& shape, const std::int8_t* codes, const float* scales, const std::int8_t* zero_points,
               std::byte* packed, std::int64_t panel_begin, std::int64_t panel_end) {
  const std::int64_t groups = shape.groups(), apart = Int4Shape::inputs_apart(shape.has_groups());
  const int offset = shape.has_groups() ? 0 : 8;
  for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
    std::byte* destination = packed + panel * shape.panel_bytes();
    std::byte* offsets = packed + shape.offsets_begin() + panel * groups * kInt4PanelRows * 4;
    std::int32_t sums[kInt4PanelRows] = {};
    float scaled_sums[kInt4PanelRows] = {};
    std::int64_t rows[kInt4PanelRows];
    for (std::int64_t i = 0; i < kInt4PanelRows; ++i) rows[i] = std::min(panel * kInt4PanelRows + i, shape.n - 1);

    for (std::int64_t group = 0; group < groups; ++group) {
      float group_scales[kInt4PanelRows];
      BFloat16 stored_scales[kInt4PanelRows];
      for (std::int64_t i = 0; i < kInt4PanelRows; ++i) {
        group_scales[i] = scales[rows[i] * groups + group];
        from_float(group_scales[i], stored_scales[i]);
        if (shape.has_groups()) group_scales[i] = to_float(stored_scales[i]);
      }
      for (std::int64_t block = 0; block < shape.group_size; block += kInt4Block) {
        for (std::int64_t segment = 0; segment < 2; ++segment) {
          const std::int64_t first = group * shape.group_size + block + segment * (kInt4Block / 2 - apart + kSegment);
          for (std::int64_t i = 0; i < kInt4PanelRows; ++i) {
            const std::int8_t* low = codes + rows[i] * shape.k + first;
            std::int32_t sum = 0;
            for (std::int64_t j = 0; j < kSegment; ++j) {
              const std::int8_t high = low[j + apart];
              *destination++ = two_codes(low[j] + offset, high);
              sum += low[j] + high;
            }
            sums[i] += sum;
            scaled_sums[i] += static_cast<float>(sum) * group_scales[i];
          }
        }
      }
      for (std::int64_t i = 0; i < kInt4PanelRows; ++i) {
        if (shape.has_groups()) put(destination, stored_scales[i]);
        if (shape.has_zero_points) {
          put(offsets, group_scales[i] * static_cast<float>(zero_points[rows[i] * groups + group]));
        }
      }
    }
    for (std::int64_t i = 0; i < kInt4PanelRows; ++i) {
      if (shape.has_groups()) {
        put(destination, scaled_sums[i]);
      } else {
        put(destination, sums[i]);
      }
    }
    for (const std::int64_t row : rows) put(destination, shape.has_groups() ? 0.0F : scales[row]);
  }
}

}  // namespace vllm_arm
