// SPDX-License-Identifier: Apache-2.0
// Every variant of reduce_sum that this CPU can run, bit by bit against sums of single elements.
#include <doctest/doctest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "collectives/reduce_sum_table.h"
#include "isa/scalar_types.h"
#include "runnable_variants.h"

using vllm_arm::BFloat16;
using vllm_arm::Float16;
using vllm_arm::ReduceSumArguments;
using vllm_arm::SumType;
using vllm_arm::tests::for_each_runnable_variant;

namespace {

template <typename Element>
constexpr SumType kType = SumType::float32;
template <>
constexpr SumType kType<BFloat16> = SumType::bfloat16;
template <>
constexpr SumType kType<Float16> = SumType::float16;
template <>
constexpr SumType kType<std::uint32_t> = SumType::int32;
template <>
constexpr SumType kType<std::uint64_t> = SumType::int64;

template <typename Element>
Element sum_of(const std::vector<std::vector<Element>>& sources, std::size_t i) {
  if constexpr (std::is_integral_v<Element>) {
    Element sum = 0;
    for (const auto& source : sources) sum += source[i];
    return sum;
  } else {
    float sum = vllm_arm::to_float(sources[0][i]);
    for (std::size_t source = 1; source < sources.size(); ++source) sum += vllm_arm::to_float(sources[source][i]);
    Element result;
    vllm_arm::from_float(sum, result);
    return result;
  }
}

template <typename Element>
Element random_element(std::mt19937& random) {
  if constexpr (std::is_integral_v<Element>) {
    return static_cast<Element>(random()) << (8 * sizeof(Element) - 32) | random();
  } else {
    Element result;
    vllm_arm::from_float(std::normal_distribution<float>(0, 100)(random), result);
    return result;
  }
}

template <typename Element>
void check(vllm_arm::ReduceSumKernel kernel, int source_count, std::int64_t count, bool in_place,
           std::mt19937& random) {
  std::vector<std::vector<Element>> sources(source_count);
  std::vector<const void*> pointers;
  for (auto& source : sources) {
    for (std::int64_t i = 0; i < count + 1; ++i) source.push_back(random_element<Element>(random));
    pointers.push_back(source.data());
  }
  std::vector<Element> expected;
  for (std::int64_t i = 0; i < count; ++i) expected.push_back(sum_of(sources, i));
  std::vector<Element> output(count + 1, Element{});
  alignas(64) static std::byte copy[1 << 14];
  std::memset(copy, 0x5a, sizeof copy);
  std::vector<Element>& target = in_place ? sources[source_count - 1] : output;
  const Element after = target[count];
  const ReduceSumArguments arguments{pointers.data(), source_count, target.data(), in_place ? nullptr : copy,
                                     kType<Element>};
  kernel(arguments, 0, count);
  REQUIRE(std::memcmp(target.data(), expected.data(), count * sizeof(Element)) == 0);
  REQUIRE(std::memcmp(&target[count], &after, sizeof after) == 0);
  if (!in_place) REQUIRE(std::memcmp(copy, expected.data(), count * sizeof(Element)) == 0);
  REQUIRE(copy[count * sizeof(Element)] == std::byte{0x5a});
}

template <typename Element>
void check_sizes(vllm_arm::ReduceSumKernel kernel) {
  std::mt19937 random(3);
  for (const int source_count : {1, 2, 3, 4, 8}) {
    for (const std::int64_t count : {0, 1, 2, 7, 15, 16, 31, 32, 33, 63, 64, 100, 448, 1001}) {
      check<Element>(kernel, source_count, count, false, random);
      check<Element>(kernel, source_count, count, true, random);
    }
  }
}

}  // namespace

TEST_CASE("reduce_sum adds in order, in fp32, and rounds once") {
  for_each_runnable_variant(vllm_arm::kReduceSumTable, [](vllm_arm::ReduceSumKernel kernel) {
    check_sizes<BFloat16>(kernel);
    check_sizes<Float16>(kernel);
    check_sizes<float>(kernel);
    check_sizes<std::uint32_t>(kernel);
    check_sizes<std::uint64_t>(kernel);
  });
}

TEST_CASE("NaN stays one in a sum, and infinities that cancel become one") {
  for_each_runnable_variant(vllm_arm::kReduceSumTable, [](vllm_arm::ReduceSumKernel kernel) {
    const float infinity = std::numeric_limits<float>::infinity();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const std::size_t count : {3, 40}) {
      std::vector<BFloat16> a(count), b(count);
      for (std::size_t i = 0; i < count; ++i) {
        vllm_arm::from_float(i % 2 == 0 ? nan : infinity, a[i]);
        vllm_arm::from_float(-infinity, b[i]);
      }
      a[count - 1].bits = 0xffff;  // of any payload
      const void* sources[] = {a.data(), b.data()};
      kernel({sources, 2, a.data(), nullptr, SumType::bfloat16}, 0, static_cast<std::int64_t>(count));
      for (const BFloat16 value : a) CHECK(vllm_arm::to_float(value) != vllm_arm::to_float(value));
    }
  });
}
