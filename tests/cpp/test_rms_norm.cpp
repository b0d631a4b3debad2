// SPDX-License-Identifier: Apache-2.0
// Every variant of rms_norm that this CPU can run, against a float64 reference.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "element_types.h"
#include "norm/rms_norm_table.h"
#include "runnable_variants.h"

using vllm_arm::BFloat16;
using vllm_arm::Float16;
using vllm_arm::RmsNormArguments;
using vllm_arm::ScalarType;
using vllm_arm::tests::for_each_runnable_variant;
using vllm_arm::tests::kType;

namespace {

constexpr float kEpsilon = 1e-5F;
constexpr unsigned char kCanary = 0x5a;

// Half a unit in the last place relative to the value, plus what fp32 sums and products lose.
template <typename Element>
constexpr double kRelativeError = 1e-5;
template <>
constexpr double kRelativeError<BFloat16> = 1.0 / 256 + 1e-5;
template <>
constexpr double kRelativeError<Float16> = 1.0 / 2048 + 1e-5;

struct Shape {
  std::int64_t groups, rows, size, padding;  // padding: elements between rows
};

// A tensor with padding between rows and a canary in it, at an address aligned to its element only.
template <typename Element>
struct Tensor {
  Shape shape;
  std::vector<unsigned char> bytes;

  explicit Tensor(Shape s)
      : shape(s), bytes((s.groups * s.rows * (s.size + s.padding) + 2) * sizeof(Element), kCanary) {}
  Element* data() { return reinterpret_cast<Element*>(bytes.data()) + 1; }
  Element& at(std::int64_t row, std::int64_t i) { return data()[row * (shape.size + shape.padding) + i]; }
  vllm_arm::RowLayout layout() const {
    const auto row = static_cast<std::int64_t>((shape.size + shape.padding) * sizeof(Element));
    return {row * shape.rows, row};
  }
  std::int64_t rows() const { return shape.groups * shape.rows; }
  bool padding_untouched() {
    bool untouched = bytes.front() == kCanary && bytes.back() == kCanary;
    for (std::int64_t row = 0; row < rows(); ++row) {
      for (std::int64_t i = shape.size; i < shape.size + shape.padding; ++i) {
        Element canary;
        std::memset(&canary, kCanary, sizeof canary);
        untouched = untouched && std::memcmp(&at(row, i), &canary, sizeof canary) == 0;
      }
    }
    return untouched;
  }
};

template <typename Element, typename Fill>
void fill(Tensor<Element>& tensor, Fill value) {
  for (std::int64_t row = 0; row < tensor.rows(); ++row) {
    for (std::int64_t i = 0; i < tensor.shape.size; ++i) vllm_arm::from_float(value(), tensor.at(row, i));
  }
}

std::vector<double> reference(const std::vector<double>& x, const std::vector<double>& weight) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  const double scale = 1.0 / std::sqrt(sum / static_cast<double>(x.size()) + static_cast<double>(kEpsilon));
  std::vector<double> result;
  for (std::size_t i = 0; i < x.size(); ++i) result.push_back(x[i] * scale * weight[i]);
  return result;
}

template <typename Element, typename Weight>
void check(vllm_arm::RmsNormKernel kernel, Shape shape, bool with_residual, bool with_weight, bool in_place,
           std::mt19937& random) {
  std::normal_distribution<float> normal(0.0F, 3.0F);
  const auto value = [&] { return normal(random); };
  Tensor<Element> input(shape), output(shape), residual(shape);
  Tensor<Weight> weight({1, 1, shape.size, 0});
  fill(input, value);
  fill(residual, value);
  fill(weight, value);

  std::vector<std::vector<double>> expected, sums;
  for (std::int64_t row = 0; row < input.rows(); ++row) {
    std::vector<double> x, w;
    for (std::int64_t i = 0; i < shape.size; ++i) {
      x.push_back(static_cast<double>(vllm_arm::to_float(input.at(row, i))) +
                  (with_residual ? static_cast<double>(vllm_arm::to_float(residual.at(row, i))) : 0.0));
      w.push_back(with_weight ? static_cast<double>(vllm_arm::to_float(weight.at(0, i))) : 1.0);
    }
    sums.push_back(x);
    expected.push_back(reference(x, w));
  }

  RmsNormArguments arguments{};
  arguments.input = input.data();
  Tensor<Element>& destination = in_place ? input : output;
  arguments.output = destination.data();
  arguments.residual = with_residual ? residual.data() : nullptr;
  arguments.weight = with_weight ? weight.data() : nullptr;
  arguments.input_layout = arguments.output_layout = arguments.residual_layout = input.layout();
  arguments.rows_per_group = shape.rows;
  arguments.hidden_size = shape.size;
  arguments.epsilon = kEpsilon;
  arguments.type = kType<Element>;
  arguments.weight_type = kType<Weight>;
  const std::int64_t middle = input.rows() / 3;  // two calls, as two threads make
  kernel(arguments, middle, input.rows());
  kernel(arguments, 0, middle);

  const double relative = kRelativeError<Element>;
  for (std::int64_t row = 0; row < input.rows(); ++row) {
    for (std::int64_t i = 0; i < shape.size; ++i) {
      const double want = expected[row][i];
      const double got = vllm_arm::to_float(destination.at(row, i));
      REQUIRE(std::fabs(got - want) <= relative * std::fabs(want) + 1e-6);
      if (with_residual) {
        const double sum = vllm_arm::to_float(residual.at(row, i));
        REQUIRE(std::fabs(sum - sums[row][i]) <= relative * std::fabs(sums[row][i]) + 1e-6);
      }
    }
  }
  CHECK(destination.padding_untouched());
  CHECK(residual.padding_untouched());
}

template <typename Element, typename Weight>
void check_shapes(vllm_arm::RmsNormKernel kernel) {
  std::mt19937 random(7);
  for (const std::int64_t size : {1, 2, 7, 8, 9, 15, 16, 17, 31, 64, 80, 100, 2047, 4096, 16384}) {
    for (const bool with_residual : {false, true}) {
      check<Element, Weight>(kernel, {1, 3, size, 0}, with_residual, true, true, random);
      check<Element, Weight>(kernel, {2, 3, size, 5}, with_residual, size % 2 == 0, false, random);
    }
  }
  check<Element, Weight>(kernel, {0, 3, 64, 0}, true, true, true, random);
}

template <typename Element>
std::vector<float> normalise_one(vllm_arm::RmsNormKernel kernel, const std::vector<float>& values) {
  Tensor<Element> input({1, 1, static_cast<std::int64_t>(values.size()), 0});
  auto next = values.begin();
  fill(input, [&] { return *next++; });
  RmsNormArguments arguments{};
  arguments.input = arguments.output = input.data();
  arguments.rows_per_group = 1;
  arguments.hidden_size = static_cast<std::int64_t>(values.size());
  arguments.epsilon = kEpsilon;
  arguments.type = arguments.weight_type = kType<Element>;
  kernel(arguments, 0, 1);
  std::vector<float> result;
  for (std::size_t i = 0; i < values.size(); ++i) {
    result.push_back(vllm_arm::to_float(input.at(0, static_cast<std::int64_t>(i))));
  }
  return result;
}

}  // namespace

TEST_CASE("rms_norm agrees with float64") {
  for_each_runnable_variant(vllm_arm::kRmsNormTable, [](vllm_arm::RmsNormKernel kernel) {
    check_shapes<BFloat16, BFloat16>(kernel);
    check_shapes<BFloat16, float>(kernel);
    check_shapes<Float16, Float16>(kernel);
    check_shapes<float, float>(kernel);
  });
}

TEST_CASE("NaN stays visible, and zeros stay zeros") {
  for_each_runnable_variant(vllm_arm::kRmsNormTable, [](vllm_arm::RmsNormKernel kernel) {
    for (const std::size_t size : {3, 8, 21}) {
      std::vector<float> values(size, 1.0F);
      values[size - 1] = std::numeric_limits<float>::quiet_NaN();
      for (const float value : normalise_one<BFloat16>(kernel, values)) CHECK(std::isnan(value));
      for (const float value : normalise_one<Float16>(kernel, values)) CHECK(std::isnan(value));
      for (const float value : normalise_one<float>(kernel, std::vector<float>(size, 0.0F))) CHECK(value == 0.0F);
      // An infinite input gives an infinite norm: what is finite goes to 0, the infinity itself to NaN.
      values[size - 1] = std::numeric_limits<float>::infinity();
      const std::vector<float> result = normalise_one<BFloat16>(kernel, values);
      CHECK(result.front() == 0.0F);
      CHECK(std::isnan(result.back()));
    }
  });
}

TEST_CASE("a NaN in a float32 weight stays one in bf16, whatever its payload") {
  for_each_runnable_variant(vllm_arm::kRmsNormTable, [](vllm_arm::RmsNormKernel kernel) {
    for (const std::uint32_t bits : {0x7fffffffU, 0xffffffffU, 0x7f800001U}) {
      Tensor<BFloat16> input({1, 1, 19, 0});
      fill(input, [] { return 1.0F; });
      std::vector<float> weight(19, vllm_arm::bits_to_float(bits));
      RmsNormArguments arguments{};
      arguments.input = arguments.output = input.data();
      arguments.weight = weight.data();
      arguments.rows_per_group = 1;
      arguments.hidden_size = 19;
      arguments.type = ScalarType::bfloat16;
      arguments.weight_type = ScalarType::float32;
      kernel(arguments, 0, 1);
      for (std::int64_t i = 0; i < 19; ++i) CHECK(std::isnan(vllm_arm::to_float(input.at(0, i))));
    }
  });
}

TEST_CASE("large and small magnitudes do not overflow before fp32 does") {
  for_each_runnable_variant(vllm_arm::kRmsNormTable, [](vllm_arm::RmsNormKernel kernel) {
    for (const float value : normalise_one<BFloat16>(kernel, std::vector<float>(24, 1e18F))) {
      CHECK(value == doctest::Approx(1.0F));
    }
    for (const float value : normalise_one<Float16>(kernel, std::vector<float>(24, 65504.0F))) {
      CHECK(value == doctest::Approx(1.0F));
    }
  });
}
