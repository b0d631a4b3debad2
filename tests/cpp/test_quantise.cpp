// SPDX-License-Identifier: Apache-2.0
// Every variant of quantise and dequantise that this CPU can run, against float64 references.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "element_types.h"
#include "linear/dequantise_table.h"
#include "linear/quantise_table.h"
#include "runnable_variants.h"

using vllm_arm::BFloat16;
using vllm_arm::Float16;
using vllm_arm::ScalarType;
using vllm_arm::tests::for_each_runnable_variant;
using vllm_arm::tests::kHalfUlp;
using vllm_arm::tests::kType;

namespace {

constexpr std::int8_t kCanary = 0x5a;
constexpr std::int64_t kSizes[] = {1, 7, 8, 9, 15, 16, 17, 33, 64, 1000};

template <typename Element>
std::vector<Element> random_elements(std::int64_t size, float offset, std::mt19937& random) {
  std::normal_distribution<float> normal(offset, 3.0F);
  std::vector<Element> elements(static_cast<std::size_t>(size));
  for (auto& element : elements) vllm_arm::from_float(normal(random), element);
  return elements;
}

struct Quantised {
  std::vector<std::int8_t> values;
  std::vector<float> scales;
  std::vector<std::int32_t> zero_points;
};

template <typename Element>
Quantised quantise(vllm_arm::QuantiseKernel kernel, const std::vector<Element>& input, std::int64_t rows,
                   bool symmetric, const float* static_scale = nullptr,
                   const std::int32_t* static_zero_point = nullptr) {
  Quantised result{std::vector<std::int8_t>(input.size() + 1, kCanary),
                   std::vector<float>(static_cast<std::size_t>(rows)),
                   std::vector<std::int32_t>(static_cast<std::size_t>(rows))};
  vllm_arm::QuantiseArguments arguments{};
  arguments.input = input.data();
  arguments.output = result.values.data();
  arguments.scales = result.scales.data();
  arguments.zero_points = symmetric ? nullptr : result.zero_points.data();
  arguments.static_scale = static_scale;
  arguments.static_zero_point = static_zero_point;
  arguments.size = static_cast<std::int64_t>(input.size()) / rows;
  arguments.type = kType<Element>;
  kernel(arguments, 1, rows);  // two calls, as two threads make
  kernel(arguments, 0, 1);
  CHECK(result.values.back() == kCanary);
  return result;
}

template <typename Element>
void check_quantise(vllm_arm::QuantiseKernel kernel, std::int64_t size, float offset, bool symmetric,
                    std::mt19937& random) {
  constexpr std::int64_t kRows = 3;
  const auto input = random_elements<Element>(kRows * size, offset, random);
  const Quantised result = quantise(kernel, input, kRows, symmetric);
  for (std::int64_t i = 0; i < kRows * size; ++i) {
    const std::int64_t row = i / size;
    const double exact = static_cast<double>(vllm_arm::to_float(input[i])) / static_cast<double>(result.scales[row]) +
                         result.zero_points[row];
    // Half a step, and what fp32 loses in the division; saturation only takes that away.
    REQUIRE(std::fabs(result.values[i] - exact) <= 0.5001);
  }
}

template <typename Element>
void check_quantise_shapes(vllm_arm::QuantiseKernel kernel) {
  std::mt19937 random(11);
  for (const std::int64_t size : kSizes) {
    for (const bool symmetric : {true, false}) {
      check_quantise<Element>(kernel, size, 0.0F, symmetric, random);
      check_quantise<Element>(kernel, size, -20.0F, symmetric, random);
    }
  }
}

template <typename Accumulator, typename Element>
void check_dequantise(vllm_arm::DequantiseKernel kernel, std::int64_t size, bool has_bias, bool has_zero_point,
                      std::mt19937& random) {
  constexpr std::int64_t kRows = 3;
  std::uniform_int_distribution<std::int32_t> whole(-(1 << 20), 1 << 20), small(-128, 127);
  std::uniform_real_distribution<float> positive(1e-4F, 1e-2F);
  std::vector<Accumulator> accumulators;
  for (std::int64_t i = 0; i < kRows * size; ++i) accumulators.push_back(static_cast<Accumulator>(whole(random)));
  std::vector<float> scales, weight_scales;
  std::vector<std::int32_t> zero_points, sums;
  for (std::int64_t row = 0; row < kRows; ++row) {
    scales.push_back(positive(random));
    zero_points.push_back(small(random));
  }
  for (std::int64_t n = 0; n < size; ++n) {
    weight_scales.push_back(positive(random));
    sums.push_back(whole(random) / 256);
  }
  const auto bias = random_elements<Element>(size, 0.0F, random);
  std::vector<Element> output(static_cast<std::size_t>(kRows * size));
  vllm_arm::DequantiseArguments arguments{};
  arguments.accumulators = accumulators.data();
  arguments.scales = scales.data();
  arguments.zero_points = has_zero_point ? zero_points.data() : nullptr;
  arguments.weight_scales = weight_scales.data();
  arguments.weight_sums = sums.data();
  arguments.bias = has_bias ? bias.data() : nullptr;
  arguments.output = output.data();
  arguments.size = size;
  arguments.type = kType<Element>;
  arguments.accumulators_are_float = std::is_same_v<Accumulator, float>;
  kernel(arguments, 0, kRows);
  for (std::int64_t i = 0; i < kRows * size; ++i) {
    const std::int64_t row = i / size, n = i % size;
    const double sum = static_cast<double>(accumulators[i]) - (has_zero_point ? 1.0 * zero_points[row] * sums[n] : 0.0);
    const double added = has_bias ? static_cast<double>(vllm_arm::to_float(bias[n])) : 0.0;
    const double product = sum * static_cast<double>(scales[row]) * static_cast<double>(weight_scales[n]);
    const double want = product + added;
    const double allowed = kHalfUlp<Element> * std::fabs(want) + 4e-7 * (std::fabs(product) + std::fabs(added));
    REQUIRE(std::fabs(static_cast<double>(vllm_arm::to_float(output[i])) - want) <= allowed + 1e-7);
  }
}

template <typename Element>
void check_dequantise_shapes(vllm_arm::DequantiseKernel kernel) {
  std::mt19937 random(13);
  for (const std::int64_t size : kSizes) {
    for (const bool has_bias : {true, false}) {
      for (const bool has_zero_point : {true, false}) {
        check_dequantise<std::int32_t, Element>(kernel, size, has_bias, has_zero_point, random);
        check_dequantise<float, Element>(kernel, size, has_bias, has_zero_point, random);
      }
    }
  }
}

}  // namespace

TEST_CASE("quantise rounds to the nearest step") {
  for_each_runnable_variant(vllm_arm::kQuantiseTable, [](vllm_arm::QuantiseKernel kernel) {
    check_quantise_shapes<float>(kernel);
    check_quantise_shapes<BFloat16>(kernel);
    check_quantise_shapes<Float16>(kernel);
  });
}

TEST_CASE("quantise takes ties to even and saturates") {
  for_each_runnable_variant(vllm_arm::kQuantiseTable, [](vllm_arm::QuantiseKernel kernel) {
    const std::vector<float> input{127.0F, 0.5F, 1.5F, 2.5F, -0.5F, -1.5F, -2.5F, 126.5F, -1e9F, 1e9F};
    const float one = 1.0F;
    const std::int32_t ten = 10;
    auto values = quantise(kernel, input, 1, true, &one).values;
    values.pop_back();
    CHECK(values == std::vector<std::int8_t>{127, 0, 2, 2, 0, -2, -2, 126, -128, 127});
    values = quantise(kernel, input, 1, false, &one, &ten).values;
    values.pop_back();
    CHECK(values == std::vector<std::int8_t>{127, 10, 12, 12, 10, 8, 8, 127, -128, 127});
  });
}

TEST_CASE("quantise shows what is not finite in the scale") {
  for_each_runnable_variant(vllm_arm::kQuantiseTable, [](vllm_arm::QuantiseKernel kernel) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    for (const float value : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
      for (const std::size_t place : {0, 8, 10}) {
        std::vector<float> input(11, 1.0F);
        input[place] = value;
        for (const bool symmetric : {true, false}) {
          CHECK(std::isnan(quantise(kernel, input, 1, symmetric).scales[0]));
        }
      }
    }
    CHECK(quantise(kernel, std::vector<float>(11, 0.0F), 1, true).scales[0] == 0.0F);
  });
}

TEST_CASE("dequantise rounds once") {
  for_each_runnable_variant(vllm_arm::kDequantiseTable, [](vllm_arm::DequantiseKernel kernel) {
    check_dequantise_shapes<float>(kernel);
    check_dequantise_shapes<BFloat16>(kernel);
    check_dequantise_shapes<Float16>(kernel);
  });
}
