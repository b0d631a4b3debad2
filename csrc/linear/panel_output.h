// SPDX-License-Identifier: Apache-2.0
// From the sums of a row and a panel to the layer's output, for the NEON variants.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "isa/neon_convert.h"
#include "linear/panel_linear.h"

namespace vllm_arm {

// In an anonymous namespace: each variant keeps its own copy, compiled for its own instruction set.
namespace {

constexpr int kPanelVectors = kPanelOutputs / 4;

// Calls action(std::integral_constant<int, i>) for i from 0 to kCount - 1, without a loop: what it indexes stays in
// registers.
template <int kCount, typename Action>
[[gnu::always_inline]] inline void unrolled(Action action) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (action(std::integral_constant<int, kIndex>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// A block of rows of a panel that is not whole, on its way to the output.
template <typename Element>
struct BlockBuffer {
  Element elements[kBlockRows * kPanelOutputs];
};

// What the outputs of a panel, of type Element, have in common. Past the layer's last output everything counts as 0.
// kHasZeroPoints: for int8, whether rows have zero points.
template <typename Element, bool kHasBias, bool kHasZeroPoints>
struct PanelOutput {
  using Buffer = BlockBuffer<Element>;

  const PanelProduct& product;
  std::int64_t first, count;
  float bias[kPanelOutputs];
  float scales[kPanelOutputs] = {};
  std::int32_t sums[kPanelOutputs];

  PanelOutput(const PanelProduct& of, std::int64_t panel)
      : product(of), first(panel * kPanelOutputs), count(std::min(kPanelOutputs, product.n - first)) {
    if constexpr (kHasBias) {
      Element elements[kPanelOutputs];
      copy(elements, static_cast<const Element*>(product.bias));
      for (std::int64_t j = 0; j < kPanelOutputs; ++j) bias[j] = to_float(elements[j]);
    }
    if (product.type != PanelType::int8) return;
    copy(scales, product.weight_scales);
    if constexpr (kHasZeroPoints) copy(sums, product.weight_sums);
  }

 private:
  template <typename Number>
  void copy(Number (&destination)[kPanelOutputs], const Number* source) {
    if (count == kPanelOutputs) {
      std::memcpy(destination, source + first, sizeof destination);
    } else {
      std::memset(destination, 0, sizeof destination);
      std::memcpy(destination, source + first, static_cast<std::size_t>(count) * sizeof(Number));
    }
  }
};

// Writes a block of rows of a panel: to the output itself, or where the panel is not whole through `buffer`, which is
// no member so that the compiler can keep the members in registers.
template <typename Element, bool kHasBias, bool kHasZeroPoints>
class BlockOutput {
 public:
  [[gnu::always_inline]] BlockOutput(const PanelOutput<Element, kHasBias, kHasZeroPoints>& panel, std::int64_t row,
                                     BlockBuffer<Element>& buffer)
      : row_scales_(panel.product.scales + row),
        zero_points_(panel.product.zero_points + row),
        count_(panel.count),
        output_stride_(panel.product.n) {
    const bool is_whole = panel.count == kPanelOutputs;
    output_ = static_cast<Element*>(panel.product.output) + row * output_stride_ + panel.first;
    destination_ = is_whole ? output_ : buffer.elements;
    stride_ = is_whole ? output_stride_ : kPanelOutputs;
    for (int i = 0; i < kPanelVectors; ++i) {
      if constexpr (kHasBias) bias_[i] = vld1q_f32(panel.bias + 4 * i);
      scales_[i] = vld1q_f32(panel.scales + 4 * i);
      if constexpr (kHasZeroPoints) weight_sums_[i] = vld1q_s32(panel.sums + 4 * i);
    }
  }

  // Row `m` of the block.
  [[gnu::always_inline]] void store(std::int64_t m, const float32x4_t (&sums)[kPanelVectors]) const {
    float32x4_t values[kPanelVectors];
    for (int i = 0; i < kPanelVectors; ++i) values[i] = kHasBias ? vaddq_f32(sums[i], bias_[i]) : sums[i];
    write(m, values);
  }

  [[gnu::always_inline]] void store(std::int64_t m, const int32x4_t (&sums)[kPanelVectors]) const {
    float32x4_t values[kPanelVectors];
    for (int i = 0; i < kPanelVectors; ++i) {
      int32x4_t sum = sums[i];
      if constexpr (kHasZeroPoints) sum = vmlsq_n_s32(sum, weight_sums_[i], zero_points_[m]);
      const float32x4_t factors = vmulq_n_f32(scales_[i], row_scales_[m]);
      const float32x4_t exact = vcvtq_f32_s32(sum);
      values[i] = kHasBias ? vfmaq_f32(bias_[i], exact, factors) : vmulq_f32(exact, factors);
    }
    write(m, values);
  }

  // After the last of `rows` rows.
  [[gnu::always_inline]] void finish(std::int64_t rows) const {
    if (destination_ != output_) copy(destination_, output_, rows, count_, output_stride_);
  }

 private:
  [[gnu::always_inline]] void write(std::int64_t m, const float32x4_t (&values)[kPanelVectors]) const {
    Element* row = destination_ + m * stride_;
    vllm_arm::store(row, Float8{values[0], values[1]});
    store_four(row + 8, values[2]);
  }

  [[gnu::noinline]] static void copy(const Element* source, Element* output, std::int64_t rows, std::int64_t count,
                                     std::int64_t stride) {
    for (std::int64_t m = 0; m < rows; ++m) {
      std::memcpy(output + m * stride, source + m * kPanelOutputs, static_cast<std::size_t>(count) * sizeof(Element));
    }
  }

  const float* row_scales_;
  const std::int32_t* zero_points_;
  std::int64_t count_, output_stride_, stride_;
  Element *output_, *destination_;
  float32x4_t bias_[kPanelVectors], scales_[kPanelVectors];
  int32x4_t weight_sums_[kPanelVectors];
};

// Calls multiply_panels(outputs, panels) for each kCount panels, of which there is a multiple: what it multiplies by
// all rows before the next, so that a weight is read from memory once.
template <typename Element, bool kIsInt8, int kCount, typename MultiplyPanels>
void for_each_panel(const PanelProduct& product, std::int64_t panel_begin, std::int64_t panel_end,
                    MultiplyPanels multiply_panels) {
  const auto each = [&]<bool kHasBias, bool kHasZeroPoints>() {
    const std::int64_t bytes = panel_bytes(product.type, product.k);
    for (std::int64_t panel = panel_begin; panel < panel_end; panel += kCount) {
      using Output = PanelOutput<Element, kHasBias, kHasZeroPoints>;
      const auto run = [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
        const Output outputs[] = {Output(product, panel + kIndex)...};
        multiply_panels(outputs, product.weight + panel * bytes);
      };
      run(std::make_integer_sequence<int, kCount>{});
    }
  };
  const bool has_bias = product.bias != nullptr;
  if constexpr (kIsInt8) {
    if (product.zero_points != nullptr) {
      return has_bias ? each.template operator()<true, true>() : each.template operator()<false, true>();
    }
  }
  has_bias ? each.template operator()<true, false>() : each.template operator()<false, false>();
}

}  // namespace
}  // namespace vllm_arm
