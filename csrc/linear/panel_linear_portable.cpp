// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <type_traits>

#include "linear/panel_linear.h"

namespace vllm_arm {
namespace {

std::int32_t to_number(std::int8_t value) { return value; }
template <typename Element>
float to_number(Element value) {
  return to_float(value);
}

template <typename Element>
using Number = decltype(to_number(Element{}));

// Calls action with an element of the type.
template <typename Action>
void with_element(PanelType type, Action action) {
  switch (type) {
    case PanelType::bfloat16: return action(BFloat16{});
    case PanelType::float16: return action(Float16{});
    case PanelType::int8: return action(std::int8_t{});
  }
}

// Sums of a block of rows and a panel.
template <typename Element>
void add_products(Number<Element> (&sums)[kBlockRows][kPanelOutputs], const Element* rows, const Element* panel,
                  std::int64_t count, std::int64_t k) {
  for (std::int64_t i = 0; i < k; ++i) {
    Number<Element> weights[kPanelOutputs];
    for (std::int64_t j = 0; j < kPanelOutputs; ++j) weights[j] = to_number(panel[i * kPanelOutputs + j]);
    for (std::int64_t m = 0; m < count; ++m) {
      const Number<Element> input = to_number(rows[i * count + m]);
      for (std::int64_t j = 0; j < kPanelOutputs; ++j) sums[m][j] += input * weights[j];
    }
  }
}

float value_of(float sum, const PanelProduct&, std::int64_t, std::int64_t) { return sum; }

float value_of(std::int32_t sum, const PanelProduct& product, std::int64_t m, std::int64_t n) {
  if (product.zero_points != nullptr) sum -= product.zero_points[m] * product.weight_sums[n];
  return static_cast<float>(sum) * (product.scales[m] * product.weight_scales[n]);
}

template <typename Element, typename Output>
void multiply(const PanelProduct& product, std::int64_t block, std::int64_t panel) {
  const std::int64_t padded = padded_inputs(product.type, product.k);
  const std::int64_t row = block * kBlockRows, column = panel * kPanelOutputs;
  const std::int64_t rows = std::min(kBlockRows, product.row_count - row);
  const std::int64_t columns = std::min(kPanelOutputs, product.n - column);
  Number<Element> sums[kBlockRows][kPanelOutputs] = {};
  add_products(sums, reinterpret_cast<const Element*>(product.rows) + row * padded,
               reinterpret_cast<const Element*>(product.weight) + column * padded, rows, product.k);
  const auto* bias = static_cast<const Output*>(product.bias);
  auto* output = static_cast<Output*>(product.output) + row * product.n + column;
  for (std::int64_t m = 0; m < rows; ++m) {
    for (std::int64_t j = 0; j < columns; ++j) {
      const float value = value_of(sums[m][j], product, row + m, column + j);
      from_float(bias != nullptr ? value + to_float(bias[column + j]) : value, output[m * product.n + j]);
    }
  }
}

}  // namespace

PanelFormat panel_format_portable(PanelType type) { return {1, element_bytes(type)}; }

void pack_panel_rows_portable(const PanelRows& arguments, std::int64_t block_begin, std::int64_t block_end) {
  with_element(arguments.type, [&]<typename Element>(Element) {
    const std::int64_t padded = padded_inputs(arguments.type, arguments.k);
    for (std::int64_t row = block_begin * kBlockRows; row < std::min(block_end * kBlockRows, arguments.rows);
         row += kBlockRows) {
      const std::int64_t count = std::min(kBlockRows, arguments.rows - row);
      const Element* input = static_cast<const Element*>(arguments.input) + row * arguments.k;
      Element* packed = reinterpret_cast<Element*>(arguments.packed) + row * padded;
      for (std::int64_t i = 0; i < arguments.k; ++i) {
        for (std::int64_t m = 0; m < count; ++m) packed[i * count + m] = input[m * arguments.k + i];
      }
    }
  });
}

bool quantise_panel_rows_portable(const QuantiseArguments&, std::int64_t, char*, std::int64_t, std::int64_t) {
  return false;
}

void panel_linear_portable(const PanelProduct& product, std::int64_t block_begin, std::int64_t block_end,
                           std::int64_t panel_begin, std::int64_t panel_end) {
  const auto each = [&](auto multiply_one) {
    for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
      for (std::int64_t block = block_begin; block < block_end; ++block) multiply_one(product, block, panel);
    }
  };
  switch (product.type) {
    case PanelType::bfloat16: return each(multiply<BFloat16, BFloat16>);
    case PanelType::float16: return each(multiply<Float16, Float16>);
    case PanelType::int8: break;
  }
  switch (product.output_type) {
    case ScalarType::bfloat16: return each(multiply<std::int8_t, BFloat16>);
    case ScalarType::float16: return each(multiply<std::int8_t, Float16>);
    case ScalarType::float32: return each(multiply<std::int8_t, float>);
  }
}

}  // namespace vllm_arm
