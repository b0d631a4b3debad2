// SPDX-License-Identifier: Apache-2.0
// A single row by a weight of four bits: what the variants of linear_int4 for Arm share beside its products with a
// panel that has one scale for each output.
#pragma once

#include "linear/linear_int4_tiles.h"

namespace vllm_arm {
namespace {

// multiply_codes(activations, codes, k, correction, sums) gives the eight sums of a panel, with the row's correction.
// Panels are at `packed`, their biases at `bias`.
template <bool kHasBias, typename Bias, typename Element, typename MultiplyCodes>
void multiply_whole_row(const Int4Shape& shape, const std::byte* row, const std::byte* packed, std::int64_t panels,
                        const Bias* bias, Element* output, MultiplyCodes multiply_codes) {
  constexpr std::int64_t kPanelsAtOnce = 128;
  alignas(64) std::int32_t sums[kPanelsAtOnce * kInt4PanelRows];
  const std::int64_t panel_bytes = shape.panel_bytes();
  const auto* activations = reinterpret_cast<const std::int8_t*>(row);
  const auto* numbers = reinterpret_cast<const std::int32_t*>(activations + shape.k);
  const std::int32_t zero_point = numbers[0], correction = numbers[2];
  const float scale = reinterpret_cast<const float*>(numbers)[1];
  for (std::int64_t begin = 0; begin < panels; begin += kPanelsAtOnce) {
    const std::int64_t count = std::min(kPanelsAtOnce, panels - begin);
    const std::byte* trailer = packed + shape.code_bytes();
    for (std::int64_t i = 0; i < count; ++i, packed += panel_bytes) {
      multiply_codes(activations, reinterpret_cast<const std::int8_t*>(packed), shape.k, correction,
                     sums + i * kInt4PanelRows);
    }
    for (std::int64_t i = 0; i < count; ++i, trailer += panel_bytes, output += kInt4PanelRows) {
      const auto* code_sums = reinterpret_cast<const std::int32_t*>(trailer);
      const Float8 scales = load(reinterpret_cast<const float*>(code_sums + kInt4PanelRows));
      const auto finish = [&](int at, float32x4_t four_scales) {
        const int32x4_t products = vld1q_s32(sums + i * kInt4PanelRows + at);
        const int32x4_t sum = vmlaq_n_s32(products, vld1q_s32(code_sums + at), zero_point);
        return vmulq_f32(vmulq_n_f32(vcvtq_f32_s32(sum), scale), four_scales);
      };
      Float8 values{finish(0, scales.low), finish(4, scales.high)};
      if constexpr (kHasBias) {
        const Float8 added = load(bias + (begin + i) * kInt4PanelRows);
        values = {vaddq_f32(values.low, added.low), vaddq_f32(values.high, added.high)};
      }
      store(output, values);
    }
  }
}

// Whole panels at once; what is left is done by tiles.
template <typename Element, typename MultiplyCodes>
std::int64_t multiply_whole_panels(const LinearInt4Arguments& arguments, std::int64_t panel_begin,
                                   std::int64_t panel_end, MultiplyCodes multiply_codes) {
  const Int4Shape& shape = arguments.shape;
  const std::int64_t panels = std::min(panel_end, shape.n / kInt4PanelRows) - panel_begin;
  if (panels <= 0) return panel_begin;
  const std::int64_t first = panel_begin * kInt4PanelRows;
  const std::byte* packed = arguments.packed + panel_begin * shape.panel_bytes();
  const auto* bias = static_cast<const Element*>(arguments.bias);
  Element* output = static_cast<Element*>(arguments.output) + first;
  if (bias == nullptr) {
    multiply_whole_row<false>(shape, arguments.activations, packed, panels, bias, output, multiply_codes);
  } else {
    multiply_whole_row<true>(shape, arguments.activations, packed, panels, bias + first, output, multiply_codes);
  }
  return panel_begin + panels;
}

// By tiles with groups, with zero points and for the last panel where it is not whole.
template <typename Element, typename MultiplyCodes>
void multiply_row(const LinearInt4Arguments& arguments, std::int64_t panel_begin, std::int64_t panel_end,
                  MultiplyCodes multiply_codes) {
  const bool is_plain = !arguments.shape.has_groups() && !arguments.shape.has_zero_points;
  if (is_plain) panel_begin = multiply_whole_panels<Element>(arguments, panel_begin, panel_end, multiply_codes);
  const auto multiply_tile = [&](const Tile& tile) {
    if (tile.shape.has_groups()) return multiply_row_by_kleidiai(tile);
    const float* no_bias = nullptr;
    multiply_whole_row<false>(tile.shape, tile.activations, tile.panels, tile.outputs / kInt4PanelRows, no_bias,
                              tile.values, multiply_codes);
  };
  multiply_tiles(arguments, 0, 1, panel_begin, panel_end, multiply_tile);
}

// The same for activations of any type.
template <typename MultiplyCodes>
void multiply_row(const LinearInt4Arguments& arguments, std::int64_t panel_begin, std::int64_t panel_end,
                  MultiplyCodes multiply_codes) {
  switch (arguments.type) {
    case ScalarType::bfloat16: return multiply_row<BFloat16>(arguments, panel_begin, panel_end, multiply_codes);
    case ScalarType::float16: return multiply_row<Float16>(arguments, panel_begin, panel_end, multiply_codes);
    case ScalarType::float32: return multiply_row<float>(arguments, panel_begin, panel_end, multiply_codes);
  }
}

}  // namespace
}  // namespace vllm_arm
