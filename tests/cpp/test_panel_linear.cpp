// SPDX-License-Identifier: Apache-2.0
// Every variant of panel_linear that this CPU can run, against sums in float64 and in integers.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "element_types.h"
#include "guarded_buffer.h"
#include "linear/panel_linear_table.h"
#include "linear/quantise_table.h"
#include "runnable_variants.h"

using vllm_arm::BFloat16;
using vllm_arm::Float16;
using vllm_arm::PanelLinearKernel;
using vllm_arm::PanelProduct;
using vllm_arm::PanelType;
using vllm_arm::ScalarType;
using vllm_arm::tests::for_each_runnable_variant;
using vllm_arm::tests::GuardedBuffer;
using vllm_arm::tests::kHalfUlp;
using vllm_arm::tests::kType;

namespace {

struct Shape {
  std::int64_t rows, n, k;
};

constexpr Shape kShapes[] = {{1, 1, 1},   {1, 12, 8},   {1, 25, 100}, {2, 13, 7},    {3, 11, 9},
                             {4, 24, 33}, {5, 25, 64},  {6, 12, 31},  {7, 1, 17},    {8, 12, 16},
                             {9, 36, 15}, {10, 7, 129}, {12, 2, 5},   {16, 48, 128}, {17, 5, 3},
                             {23, 13, 2}, {24, 37, 70}, {0, 12, 8},   {1, 64, 1000}, {8, 40, 1000}};

template <typename Element>
constexpr PanelType kPanelType = PanelType::int8;
template <>
constexpr PanelType kPanelType<BFloat16> = PanelType::bfloat16;
template <>
constexpr PanelType kPanelType<Float16> = PanelType::float16;

template <typename Element>
std::vector<Element> random_elements(std::int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<Element> elements(static_cast<std::size_t>(count));
  for (auto& element : elements) vllm_arm::from_float(normal(random), element);
  return elements;
}

std::vector<std::int8_t> random_bytes(std::int64_t count, std::mt19937& random) {
  std::uniform_int_distribution<int> byte(-128, 127);
  std::vector<std::int8_t> bytes(static_cast<std::size_t>(count));
  for (auto& each : bytes) each = static_cast<std::int8_t>(byte(random));
  return bytes;
}

// A copy that ends where memory ends.
struct Guarded : GuardedBuffer {
  template <typename Number>
  explicit Guarded(const std::vector<Number>& numbers) : GuardedBuffer(numbers.size() * sizeof(Number), Place::end, 0) {
    if (!numbers.empty()) std::memcpy(data(), numbers.data(), bytes());
  }
};

// A weight in panels, packed in two calls.
struct PackedWeight : GuardedBuffer {
  template <typename Element>
  PackedWeight(const PanelLinearKernel& kernel, const Shape& shape, const std::vector<Element>& weight)
      : GuardedBuffer(vllm_arm::panel_count(shape.n) * vllm_arm::panel_bytes(kPanelType<Element>, shape.k), Place::end,
                      0xff) {
    const Guarded plain(weight);
    const auto pack = [&](std::int64_t begin, std::int64_t end) {
      vllm_arm::pack_panels(plain.data(), shape.k * static_cast<std::int64_t>(sizeof(Element)), shape.n, shape.k,
                            kPanelType<Element>, kernel.format(kPanelType<Element>), data(), begin, end);
    };
    const std::int64_t panels = vllm_arm::panel_count(shape.n);
    pack(panels / 2, panels);
    pack(0, panels / 2);
  }
};

// What the kernel makes of `product`, which says all but the operands and the output. In several calls, as threads
// make.
template <typename Element, typename Output>
std::vector<Output> multiply(const PanelLinearKernel& kernel, const Shape& shape, const std::vector<Element>& rows,
                             const std::vector<Element>& weight, PanelProduct product) {
  constexpr PanelType type = kPanelType<Element>;
  const std::int64_t blocks = vllm_arm::block_count(shape.rows), panels = vllm_arm::panel_count(shape.n);
  const Guarded input(rows);
  const PackedWeight panel_buffer(kernel, shape, weight);
  GuardedBuffer row_buffer(blocks * kernel.format(type).block_bytes(type, shape.k), GuardedBuffer::Place::end, 0xff);
  const vllm_arm::PanelRows arguments{input.data(), row_buffer.data(), shape.rows, shape.k, type};
  kernel.pack_rows(arguments, blocks / 2, blocks);
  kernel.pack_rows(arguments, 0, blocks / 2);
  GuardedBuffer output(shape.rows * shape.n * sizeof(Output), GuardedBuffer::Place::end, 0xff);
  product.rows = row_buffer.data();
  product.weight = panel_buffer.data();
  product.output = output.data();
  product.row_count = shape.rows;
  product.n = shape.n;
  product.k = shape.k;
  product.type = type;
  product.output_type = kType<Output>;
  kernel.multiply(product, 0, blocks, panels / 2, panels);
  kernel.multiply(product, blocks / 2, blocks, 0, panels / 2);
  kernel.multiply(product, 0, blocks / 2, 0, panels / 2);
  return {output.as<Output>(), output.as<Output>() + shape.rows * shape.n};
}

template <typename Element>
void check_sums(const PanelLinearKernel& kernel, const Shape& shape, bool has_bias, std::mt19937& random) {
  const auto rows = random_elements<Element>(shape.rows * shape.k, random);
  const auto weight = random_elements<Element>(shape.n * shape.k, random);
  const auto bias = random_elements<Element>(shape.n, random);
  const Guarded bias_buffer(bias);
  PanelProduct product{};
  product.bias = has_bias ? bias_buffer.data() : nullptr;
  const auto output = multiply<Element, Element>(kernel, shape, rows, weight, product);
  for (std::int64_t m = 0; m < shape.rows; ++m) {
    for (std::int64_t n = 0; n < shape.n; ++n) {
      double want = has_bias ? static_cast<double>(vllm_arm::to_float(bias[n])) : 0.0, magnitude = std::fabs(want);
      for (std::int64_t k = 0; k < shape.k; ++k) {
        const double term = static_cast<double>(vllm_arm::to_float(rows[m * shape.k + k])) *
                            static_cast<double>(vllm_arm::to_float(weight[n * shape.k + k]));
        want += term;
        magnitude += std::fabs(term);
      }
      const double allowed = kHalfUlp<Element> * std::fabs(want) + 2e-7 * std::sqrt(1.0 * shape.k) * magnitude + 1e-7;
      INFO(m << ", " << n << " of " << shape.rows << " x " << shape.n << " x " << shape.k);
      REQUIRE(std::fabs(static_cast<double>(vllm_arm::to_float(output[m * shape.n + n])) - want) <= allowed);
    }
  }
}

struct Scales {
  std::vector<float> rows, weight;
  std::vector<std::int32_t> zero_points, sums;
};

// Against the product in integers and its scales in float64. `extreme`: every operand is -128.
template <typename Output>
void check_int8(const PanelLinearKernel& kernel, const Shape& shape, bool has_bias, bool has_zero_points, bool extreme,
                std::mt19937& random) {
  auto rows = random_bytes(shape.rows * shape.k, random), weight = random_bytes(shape.n * shape.k, random);
  if (extreme) {
    std::fill(rows.begin(), rows.end(), std::int8_t{-128});
    std::fill(weight.begin(), weight.end(), std::int8_t{-128});
  }
  std::uniform_int_distribution<std::int32_t> point(-128, 127);
  std::uniform_real_distribution<float> positive(1e-3F, 1e-2F);
  Scales scales;
  for (std::int64_t m = 0; m < shape.rows; ++m) {
    scales.rows.push_back(positive(random));
    scales.zero_points.push_back(point(random));
  }
  for (std::int64_t n = 0; n < shape.n; ++n) {
    scales.weight.push_back(positive(random));
    std::int32_t sum = 0;
    for (std::int64_t k = 0; k < shape.k; ++k) sum += weight[n * shape.k + k];
    scales.sums.push_back(sum);
  }
  const auto bias = random_elements<Output>(shape.n, random);
  const Guarded bias_buffer(bias), weight_scales(scales.weight), sums(scales.sums);
  PanelProduct product{};
  product.bias = has_bias ? bias_buffer.data() : nullptr;
  product.scales = scales.rows.data();
  product.zero_points = has_zero_points ? scales.zero_points.data() : nullptr;
  product.weight_scales = reinterpret_cast<const float*>(weight_scales.data());
  product.weight_sums = reinterpret_cast<const std::int32_t*>(sums.data());
  const auto output = multiply<std::int8_t, Output>(kernel, shape, rows, weight, product);
  for (std::int64_t m = 0; m < shape.rows; ++m) {
    for (std::int64_t n = 0; n < shape.n; ++n) {
      std::int64_t sum = has_zero_points ? -std::int64_t{scales.zero_points[m]} * scales.sums[n] : 0;
      for (std::int64_t k = 0; k < shape.k; ++k) sum += rows[m * shape.k + k] * weight[n * shape.k + k];
      const double value =
          static_cast<double>(sum) * static_cast<double>(scales.rows[m]) * static_cast<double>(scales.weight[n]);
      const double added = has_bias ? static_cast<double>(vllm_arm::to_float(bias[n])) : 0.0;
      // A sum that fp32 cannot hold is rounded to it before it is scaled.
      const double allowed =
          kHalfUlp<Output> * std::fabs(value + added) + 4e-7 * (std::fabs(value) + std::fabs(added)) + 1e-7;
      INFO(m << ", " << n << " of " << shape.rows << " x " << shape.n << " x " << shape.k);
      REQUIRE(std::fabs(static_cast<double>(vllm_arm::to_float(output[m * shape.n + n])) - (value + added)) <= allowed);
    }
  }
}

template <typename Element>
void check_not_finite(const PanelLinearKernel& kernel, float value) {
  std::mt19937 random(5);
  for (const std::int64_t rows : {1, 2, 3, 5, 7, 8}) {
    const Shape shape{rows, 25, 43};
    for (const std::int64_t at : {0, 7, 42}) {
      auto input = random_elements<Element>(shape.rows * shape.k, random);
      auto weight = random_elements<Element>(shape.n * shape.k, random);
      vllm_arm::from_float(value, input[(rows - 1) * shape.k + at]);
      vllm_arm::from_float(value, weight[24 * shape.k + at]);
      const auto output = multiply<Element, Element>(kernel, shape, input, weight, {});
      for (std::int64_t m = 0; m < rows; ++m) {
        for (std::int64_t n = 0; n < shape.n; ++n) {
          REQUIRE(std::isfinite(vllm_arm::to_float(output[m * shape.n + n])) == (m != rows - 1 && n != 24));
        }
      }
    }
  }
}

template <typename Element>
void check_unpacking(const PanelLinearKernel& kernel, const Shape& shape, const std::vector<Element>& weight) {
  const PackedWeight panels(kernel, shape, weight);
  const auto bytes = static_cast<std::size_t>(shape.k) * sizeof(Element);
  for (std::int64_t n = 0; n < shape.n; ++n) {
    GuardedBuffer row(bytes, GuardedBuffer::Place::end, 0xff);
    vllm_arm::unpack_panel_row(panels.data(), n, shape.k, kPanelType<Element>, kernel.format(kPanelType<Element>),
                               row.data());
    REQUIRE(std::memcmp(row.data(), weight.data() + n * shape.k, bytes) == 0);
  }
}

}  // namespace

TEST_CASE("panel_linear sums in fp32 and rounds once") {
  for_each_runnable_variant(vllm_arm::kPanelLinearTable, [](const PanelLinearKernel& kernel) {
    std::mt19937 random(1);
    for (const Shape& shape : kShapes) {
      for (const bool has_bias : {true, false}) {
        check_sums<BFloat16>(kernel, shape, has_bias, random);
        check_sums<Float16>(kernel, shape, has_bias, random);
      }
    }
  });
}

TEST_CASE("panel_linear sums int8 exactly") {
  for_each_runnable_variant(vllm_arm::kPanelLinearTable, [](const PanelLinearKernel& kernel) {
    std::mt19937 random(2);
    for (const Shape& shape : kShapes) {
      for (const bool has_bias : {true, false}) {
        for (const bool has_zero_points : {true, false}) {
          check_int8<float>(kernel, shape, has_bias, has_zero_points, false, random);
          check_int8<BFloat16>(kernel, shape, has_bias, has_zero_points, false, random);
          check_int8<Float16>(kernel, shape, has_bias, has_zero_points, false, random);
        }
      }
      check_int8<float>(kernel, shape, false, false, true, random);
    }
  });
}

TEST_CASE("panel_linear shows what is not finite in its row and its output alone") {
  for_each_runnable_variant(vllm_arm::kPanelLinearTable, [](const PanelLinearKernel& kernel) {
    for (const float value : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      check_not_finite<BFloat16>(kernel, value);
      check_not_finite<Float16>(kernel, value);
    }
  });
}

TEST_CASE("panel_linear shows a row without a scale") {
  for_each_runnable_variant(vllm_arm::kPanelLinearTable, [](const PanelLinearKernel& kernel) {
    const Shape shape{3, 13, 5};
    const std::vector<float> scales{1.0F, std::numeric_limits<float>::quiet_NaN(), 1.0F}, weight_scales(13, 1.0F);
    PanelProduct product{};
    product.scales = scales.data();
    product.weight_scales = weight_scales.data();
    const std::vector<std::int8_t> rows(15, 1), weight(65, 1);
    const auto output = multiply<std::int8_t, float>(kernel, shape, rows, weight, product);
    for (std::int64_t i = 0; i < 39; ++i) CHECK(std::isnan(output[i]) == (i / 13 == 1));
  });
}

TEST_CASE("rows that are quantised as they are packed are those of quantise") {
  for_each_runnable_variant(vllm_arm::kPanelLinearTable, [](const PanelLinearKernel& kernel) {
    std::mt19937 random(4);
    for (const Shape& shape : kShapes) {
      auto rows = random_elements<BFloat16>(shape.rows * shape.k, random);
      if (shape.rows > 2) {
        vllm_arm::from_float(std::numeric_limits<float>::infinity(), rows[shape.k - 1]);
        std::fill(rows.begin() + shape.k, rows.begin() + 2 * shape.k, BFloat16{0});
      }
      const Guarded input(rows);
      const std::int64_t blocks = vllm_arm::block_count(shape.rows);
      const auto bytes =
          static_cast<std::size_t>(blocks * kernel.format(PanelType::int8).block_bytes(PanelType::int8, shape.k));
      std::vector<std::int8_t> quantised(rows.size());
      std::vector<float> scales(static_cast<std::size_t>(shape.rows)), expected_scales = scales;
      vllm_arm::QuantiseArguments arguments{};
      arguments.input = input.data();
      arguments.output = quantised.data();
      arguments.scales = expected_scales.data();
      arguments.size = shape.k;
      arguments.type = ScalarType::bfloat16;
      vllm_arm::quantise_portable(arguments, 0, shape.rows);
      GuardedBuffer expected(bytes, GuardedBuffer::Place::end, 0), packed(bytes, GuardedBuffer::Place::end, 0);
      kernel.pack_rows({quantised.data(), expected.data(), shape.rows, shape.k, PanelType::int8}, 0, blocks);
      arguments.scales = scales.data();
      if (!kernel.quantise_rows(arguments, shape.rows, packed.data(), blocks / 2, blocks)) return;
      kernel.quantise_rows(arguments, shape.rows, packed.data(), 0, blocks / 2);
      INFO(shape.rows << " x " << shape.k);
      REQUIRE(std::memcmp(packed.data(), expected.data(), bytes) == 0);
      REQUIRE(std::memcmp(scales.data(), expected_scales.data(), scales.size() * sizeof(float)) == 0);
      // What there is no short cut for.
      std::int32_t zero_points[1];
      arguments.zero_points = zero_points;
      CHECK(!kernel.quantise_rows(arguments, shape.rows, packed.data(), 0, blocks));
      arguments.zero_points = nullptr;
      const float static_scale = 1.0F;
      arguments.static_scale = &static_scale;
      CHECK(!kernel.quantise_rows(arguments, shape.rows, packed.data(), 0, blocks));
    }
  });
}

TEST_CASE("a row of a weight in panels can be read back") {
  for_each_runnable_variant(vllm_arm::kPanelLinearTable, [](const PanelLinearKernel& kernel) {
    std::mt19937 random(3);
    for (const Shape& shape : kShapes) {
      check_unpacking(kernel, shape, random_elements<BFloat16>(shape.n * shape.k, random));
      check_unpacking(kernel, shape, random_elements<Float16>(shape.n * shape.k, random));
      check_unpacking(kernel, shape, random_bytes(shape.n * shape.k, random));
    }
  });
}
