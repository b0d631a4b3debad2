// SPDX-License-Identifier: Apache-2.0
// Every variant of linear_int4 that this CPU can run, against float64 products of what it quantised.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "element_types.h"
#include "guarded_buffer.h"
#include "linear/linear_int4_table.h"
#include "runnable_variants.h"

#if defined(__aarch64__)
#include <kai/ukernels/matmul/pack/kai_rhs_pack_nxk_qsi4c32p_qsu4c32s1s0.h>
#endif

using vllm_arm::BFloat16;
using vllm_arm::Float16;
using vllm_arm::Int4Shape;
using vllm_arm::LinearInt4Arguments;
using vllm_arm::LinearInt4Kernel;
using vllm_arm::tests::for_each_runnable_variant;
using vllm_arm::tests::GuardedBuffer;
using vllm_arm::tests::kHalfUlp;
using vllm_arm::tests::kType;

namespace {

constexpr unsigned char kCanary = 0x5a;

struct Weight {
  Int4Shape shape;
  std::vector<std::int8_t> codes, zero_points;
  std::vector<float> scales;
  GuardedBuffer packed;

  Weight(const Int4Shape& of, std::mt19937& random)
      : shape(of), packed(static_cast<std::size_t>(of.packed_bytes()), GuardedBuffer::Place::end, kCanary) {
    std::uniform_int_distribution<int> code(-8, 7), zero_point(-8, 7);
    std::uniform_real_distribution<float> scale(0.001F, 0.05F);
    for (std::int64_t i = 0; i < shape.n * shape.k; ++i) codes.push_back(static_cast<std::int8_t>(code(random)));
    for (std::int64_t i = 0; i < shape.n * shape.groups(); ++i) {
      scales.push_back(scale(random) * (i % 3 == 0 ? -1.0F : 1.0F));
      zero_points.push_back(static_cast<std::int8_t>(zero_point(random)));
    }
    const std::int64_t half = shape.panels() / 2;  // two calls, as two threads make
    for (const auto& [begin, end] : {std::pair{half, shape.panels()}, std::pair{std::int64_t{0}, half}}) {
      vllm_arm::pack_int4(shape, codes.data(), scales.data(), zero_points.data(), packed.as<std::byte>(), begin, end);
    }
  }

  // As it is kept: the scales of groups in bf16.
  double scale(std::int64_t row, std::int64_t group) const {
    const float exact = scales[row * shape.groups() + group];
    BFloat16 rounded;
    vllm_arm::from_float(exact, rounded);
    return shape.has_groups() ? vllm_arm::to_float(rounded) : exact;
  }

  double zero_point(std::int64_t row, std::int64_t group) const {
    return shape.has_zero_points ? zero_points[row * shape.groups() + group] : 0;
  }
};

template <typename Element>
std::vector<Element> random_elements(std::int64_t size, std::mt19937& random) {
  std::normal_distribution<float> normal(0.3F, 1.0F);
  std::vector<Element> elements(static_cast<std::size_t>(size));
  for (auto& element : elements) vllm_arm::from_float(normal(random), element);
  return elements;
}

// What a kernel read and wrote.
template <typename Element>
struct Result {
  std::vector<double> activations;  // [rows, k], as they were quantised
  std::vector<double> steps;        // [rows]
  std::vector<Element> output;      // [rows, n]
};

template <typename Element>
Result<Element> run(const LinearInt4Kernel& kernel, const Weight& weight, const std::vector<Element>& input,
                    const std::vector<Element>& bias) {
  const Int4Shape& shape = weight.shape;
  const auto rows = static_cast<std::int64_t>(input.size()) / shape.k;
  const std::int64_t block_rows = kernel.block_rows(rows), blocks = (rows + block_rows - 1) / block_rows;
  GuardedBuffer source(input.size() * sizeof(Element), GuardedBuffer::Place::end, 0);
  std::memcpy(source.data(), input.data(), source.bytes());
  GuardedBuffer output(static_cast<std::size_t>(rows * shape.n) * sizeof(Element), GuardedBuffer::Place::end, kCanary);
  GuardedBuffer activations(static_cast<std::size_t>(vllm_arm::activation_bytes(shape, rows, block_rows)),
                            GuardedBuffer::Place::end, kCanary);
  LinearInt4Arguments arguments{};
  arguments.shape = shape;
  arguments.packed = reinterpret_cast<const std::byte*>(weight.packed.data());
  arguments.input = source.data();
  arguments.bias = bias.empty() ? nullptr : bias.data();
  arguments.output = output.data();
  arguments.activations = activations.as<std::byte>();
  arguments.rows = rows;
  arguments.type = kType<Element>;
  kernel.quantise(arguments, 1, blocks);
  kernel.quantise(arguments, 0, 1);
  const std::int64_t half = shape.panels() / 2;
  kernel.multiply(arguments, 0, blocks, half, shape.panels());
  kernel.multiply(arguments, 1, blocks, 0, half);
  kernel.multiply(arguments, 0, 1, 0, half);

  Result<Element> result;
  for (std::int64_t row = 0; row < rows; ++row) {
    const char* block = activations.data() + row / block_rows * vllm_arm::activation_block_bytes(shape, block_rows);
    const auto* negated_zero_points = reinterpret_cast<const std::int32_t*>(block + block_rows * shape.k);
    const auto* scales = reinterpret_cast<const float*>(negated_zero_points + block_rows);
    const std::int64_t lane = row % block_rows;
    result.steps.push_back(static_cast<double>(scales[lane]));
    for (std::int64_t i = 0; i < shape.k; ++i) {
      const auto code = static_cast<std::int8_t>(block[(i / 8 * block_rows + lane) * 8 + i % 8]);
      result.activations.push_back(static_cast<double>(scales[lane]) * (code + negated_zero_points[lane]));
    }
  }
  result.output.assign(output.as<Element>(), output.as<Element>() + rows * shape.n);
  return result;
}

template <typename Element>
void check_product(const LinearInt4Kernel& kernel, const Int4Shape& shape, std::int64_t rows, bool has_bias,
                   std::mt19937& random) {
  INFO("n ", shape.n, ", k ", shape.k, ", groups of ", shape.group_size, ", rows ", rows, ", zero points ",
       shape.has_zero_points);
  const Weight weight(shape, random);
  const auto input = random_elements<Element>(rows * shape.k, random);
  const auto bias = random_elements<Element>(has_bias ? shape.n : 0, random);
  const auto result = run(kernel, weight, input, bias);
  for (std::int64_t i = 0; i < rows * shape.k; ++i) {
    const double error = result.activations[i] - static_cast<double>(vllm_arm::to_float(input[i]));
    REQUIRE(std::fabs(error) <= 0.5001 * result.steps[i / shape.k]);
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t n = 0; n < shape.n; ++n) {
      double want = has_bias ? static_cast<double>(vllm_arm::to_float(bias[n])) : 0.0;
      double magnitude = std::fabs(want);
      for (std::int64_t group = 0; group < shape.groups(); ++group) {
        double product = 0, sum = 0;
        for (std::int64_t i = group * shape.group_size; i < (group + 1) * shape.group_size; ++i) {
          product += result.activations[row * shape.k + i] * weight.codes[n * shape.k + i];
          sum += result.activations[row * shape.k + i];
        }
        const double scale = weight.scale(n, group), zero_point = weight.zero_point(n, group);
        want += scale * (product - sum * zero_point);
        magnitude += std::fabs(scale * product) + std::fabs(scale * sum * zero_point);
      }
      // What fp32 loses: in the scales where the sum is exact, else also while groups are summed without their
      // activations' zero points, which are as large as the activations.
      const double lost = shape.has_groups() ? 4e-6 * magnitude + 1e-6 : 5e-7 * magnitude;
      const double got = static_cast<double>(vllm_arm::to_float(result.output[row * shape.n + n]));
      REQUIRE(std::fabs(got - want) <= kHalfUlp<Element> * std::fabs(want) + lost);
    }
  }
}

template <typename Element>
void check_products(const LinearInt4Kernel& kernel) {
  std::mt19937 random(17);
  for (const std::int64_t rows : {1, 2, 3, 17, 70}) {
    for (const std::int64_t n : {1, 8, 37}) {
      for (const std::int64_t k : {32, 96, 128, 384}) {
        for (const std::int64_t group_size : {std::int64_t{32}, std::int64_t{64}, std::int64_t{128}, k}) {
          if (group_size > k || k % group_size != 0) continue;
          const bool has_zero_points = random() % 2 == 0, has_bias = random() % 2 == 0;
          check_product<Element>(kernel, {n, k, group_size, has_zero_points}, rows, has_bias, random);
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("linear_int4 multiplies what it quantised") {
  for_each_runnable_variant(vllm_arm::kLinearInt4Table, [](const LinearInt4Kernel* kernel) {
    check_products<float>(*kernel);
    check_products<BFloat16>(*kernel);
    check_products<Float16>(*kernel);
  });
}

TEST_CASE("linear_int4 multiplies more outputs than it computes together") {
  for_each_runnable_variant(vllm_arm::kLinearInt4Table, [](const LinearInt4Kernel* kernel) {
    std::mt19937 random(19);
    check_product<BFloat16>(*kernel, {2060, 32, 32, false}, 1, true, random);
    check_product<BFloat16>(*kernel, {1030, 64, 32, true}, 6, true, random);
  });
}

TEST_CASE("linear_int4 multiplies more rows and inputs than it has at hand") {
  for_each_runnable_variant(vllm_arm::kLinearInt4Table, [](const LinearInt4Kernel* kernel) {
    std::mt19937 random(23);
    check_product<BFloat16>(*kernel, {16, 96, 96, false}, 11, true, random);
    check_product<BFloat16>(*kernel, {16, 32, 32, false}, 270, true, random);
    check_product<BFloat16>(*kernel, {9, 64, 32, true}, 270, false, random);
    check_product<BFloat16>(*kernel, {9, 4128, 32, false}, 18, true, random);
    // Rounded to bf16, which hides what fp32 loses of sums beyond 2^24.
    check_product<BFloat16>(*kernel, {9, 4128, 4128, false}, 18, false, random);
    check_product<BFloat16>(*kernel, {9, 4128, 4128, true}, 1, false, random);
  });
}

TEST_CASE("linear_int4 sums exactly up to the most inputs") {
  for_each_runnable_variant(vllm_arm::kLinearInt4Table, [](const LinearInt4Kernel* kernel) {
    for (const std::int64_t rows : {1, 5}) {
      const Int4Shape shape{9, vllm_arm::kInt4MaximumInputs, vllm_arm::kInt4MaximumInputs, false};
      std::mt19937 random(3);
      Weight weight(shape, random);
      for (const std::int8_t code : {-8, 7}) {
        weight.codes.assign(weight.codes.size(), code);
        vllm_arm::pack_int4(shape, weight.codes.data(), weight.scales.data(), nullptr, weight.packed.as<std::byte>(), 0,
                            shape.panels());
        for (const float value : {1.0F, -1.0F}) {
          const std::vector<float> input(static_cast<std::size_t>(rows * shape.k), value);
          const auto result = run(*kernel, weight, input, {});
          for (std::int64_t i = 0; i < rows * shape.n; ++i) {
            const double want =
                static_cast<double>(value) * code * static_cast<double>(shape.k) * weight.scale(i % 9, 0);
            REQUIRE(static_cast<double>(result.output[i]) == doctest::Approx(want).epsilon(1e-6));
          }
        }
      }
    }
  });
}

TEST_CASE("linear_int4 shows what is not finite in its own row") {
  for_each_runnable_variant(vllm_arm::kLinearInt4Table, [](const LinearInt4Kernel* kernel) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    std::mt19937 random(5);
    for (const std::int64_t group_size : {32, 64}) {
      for (const bool has_zero_points : {false, true}) {
        const Weight weight({11, 64, group_size, has_zero_points}, random);
        for (const float value : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
          for (const std::int64_t rows : {1, 6}) {
            auto input = random_elements<float>(rows * 64, random);
            input[(rows / 2) * 64 + 63] = value;
            const auto output = run(*kernel, weight, input, {}).output;
            for (std::int64_t i = 0; i < rows * 11; ++i) CHECK(std::isnan(output[i]) == (i / 11 == rows / 2));
          }
        }
        const auto output = run(*kernel, weight, std::vector<float>(2 * 64, 0.0F), {}).output;
        for (const float value : output) CHECK(value == 0.0F);
      }
    }
  });
}

#if defined(__aarch64__)
TEST_CASE("pack_int4 writes what KleidiAI packs where there are groups") {
  std::mt19937 random(7);
  for (const std::int64_t n : {1, 8, 21}) {
    for (const std::int64_t group_size : {32, 64, 128}) {
      const Int4Shape shape{n, 256, group_size, false};
      const Weight weight(shape, random);
      std::vector<std::uint8_t> pairs;
      for (std::size_t i = 0; i < weight.codes.size(); i += 2) {
        pairs.push_back(static_cast<std::uint8_t>((weight.codes[i] + 8) | ((weight.codes[i + 1] + 8) << 4)));
      }
      const auto rows = static_cast<std::size_t>(n), k = static_cast<std::size_t>(shape.k);
      std::vector<char> expected(static_cast<std::size_t>(shape.packed_bytes()));
      const auto size = static_cast<std::size_t>(group_size);
      REQUIRE(kai_get_rhs_packed_size_rhs_pack_nxk_qsi4c32p_qsu4c32s1s0(rows, k, 8, 16, 2, size, kai_dt_bf16) ==
              expected.size());
      std::vector<BFloat16> scales(weight.scales.size());
      for (std::size_t i = 0; i < scales.size(); ++i) vllm_arm::from_float(weight.scales[i], scales[i]);
      kai_rhs_pack_nxk_qsi4c32p_qsu4c32s1s0_params parameters{};
      parameters.lhs_zero_point = 1;
      parameters.rhs_zero_point = 8;
      parameters.scale_dt = kai_dt_bf16;
      kai_run_rhs_pack_nxk_qsi4c32p_qsu4c32s1s0(1, rows, k, 8, 16, 2, size, pairs.data(), k / 2, nullptr, scales.data(),
                                                k / size * sizeof(BFloat16), expected.data(), 0, &parameters);
      CHECK(std::memcmp(expected.data(), weight.packed.data(), expected.size()) == 0);
    }
  }
}
#endif
