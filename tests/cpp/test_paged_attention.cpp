// SPDX-License-Identifier: Apache-2.0
// Every variant of paged_attention that this CPU can run, over a cache that its own write_kv_cache has written, against
// a float64 reference.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "attention_problem.h"

using namespace vllm_arm::tests;
using vllm_arm::KvCacheType;
using vllm_arm::ScalarType;

namespace {

constexpr ScalarType kTypes[] = {ScalarType::bfloat16, ScalarType::float16, ScalarType::float32};
constexpr KvCacheType kCacheTypes[] = {KvCacheType::same, KvCacheType::fp8_e4m3, KvCacheType::fp8_e5m2,
                                       KvCacheType::int8};
constexpr std::int64_t kLargestCost = 600'000;

class RandomProblems {
 public:
  explicit RandomProblems(std::uint32_t seed) : random_(seed) {}

  template <typename Value>
  Value one_of(std::initializer_list<Value> values) {
    return values.begin()[random_() % values.size()];
  }
  std::int64_t between(std::int64_t least, std::int64_t most) {
    return least + static_cast<std::int64_t>(random_() % (most - least + 1));
  }

  Problem next() {
    Problem problem;
    problem.type = kTypes[random_() % 3];
    problem.cache_type = random_() % 2 == 0 ? KvCacheType::same : kCacheTypes[random_() % 4];
    problem.head_size = random_() % 16 == 0 ? 512 : 16 * between(2, 16);
    problem.block_size = one_of<std::int64_t>({16, 32, 48, 128});
    problem.group_size = one_of<std::int64_t>({1, 2, 3, 4, 5, 7, 8, 16});
    problem.kv_heads = between(1, 3);
    problem.scale = one_of({0.5F, 1.0F, 2.0F}) / std::sqrt(static_cast<float>(problem.head_size));
    problem.causal = random_() % 4 != 0;
    problem.dynamic_causal = random_() % 8 == 0;
    problem.window = one_of<std::int64_t>({-1, -1, -1, 0, 1, 3, 16, 17, 33, 100});
    problem.softcap = one_of({0.0F, 0.0F, 3.0F, 30.0F});
    problem.alibi = random_() % 4 == 0;
    problem.sinks = random_() % 4 == 0;
    problem.key_scale = one_of({1.0F, 0.25F, 0.037F});
    problem.value_scale = one_of({1.0F, 0.125F, 0.043F});
    const auto kind = random_() % 6;
    for (std::int64_t most = 2048; problem.sequences.empty() || problem.cost() > kLargestCost; most = most * 3 / 4) {
      problem.kv_heads = std::min(problem.kv_heads, std::max<std::int64_t>(1, most / 512));
      problem.sequences.clear();
      for (std::int64_t i = between(1, kind == 0 ? 1 : 4); i > 0; --i)
        problem.sequences.push_back(sequence(kind, most));
    }
    return problem;
  }

 private:
  Sequence sequence(unsigned kind, std::int64_t most) {
    const bool causal = random_() % 2 == 0;
    const std::int64_t keys = between(1, most);
    switch (kind) {
      case 0: return {1, keys, causal};                                   // one long decode
      case 1: return {1, keys / 8 + 1, causal};                           // decode
      case 2: return {keys / 20 + 1, keys / 20 + 1, causal};              // prefill
      case 3: return {between(1, keys / 40 + 1), keys / 16 + 1, causal};  // chunks of a prompt
      case 4: return {between(2, 5), keys / 8 + 5, causal};               // speculative decoding
      default:
        return random_() % 2 == 0 ? Sequence{1, keys / 8 + 1, causal}
                                  : Sequence{between(0, keys / 40), keys / 40, causal};  // a mixture
    }
  }

  std::mt19937 random_;
};

Problem simple(ScalarType type, std::vector<Sequence> sequences) {
  Problem problem;
  problem.type = type;
  problem.group_size = 2;
  problem.sequences = std::move(sequences);
  return problem;
}

void check(const Problem& problem, std::int64_t threads = 1, std::uint32_t seed = 1) {
  check_problem(problem, make_inputs(problem, seed), threads, seed);
}

}  // namespace

TEST_CASE("paged attention of random problems agrees with float64, on any number of threads") {
  for (std::uint32_t seed = 0; seed < 80; ++seed) {
    CAPTURE(seed);
    RandomProblems problems(seed);
    const auto threads = problems.one_of<std::int64_t>({1, 2, 3, 7, 16});
    check(problems.next(), threads, seed);
  }
}

TEST_CASE("every head size, with every type of element and of cache") {
  std::uint32_t seed = 0;
  for (const ScalarType type : kTypes) {
    for (const KvCacheType cache_type : kCacheTypes) {
      for (std::int64_t head_size = 16; head_size <= 272; head_size += 16) {
        Problem problem = simple(type, {{3, 3}, {1, 38}});
        problem.cache_type = cache_type;
        problem.head_size = head_size == 272 ? 512 : head_size;
        problem.key_scale = 0.3F;
        problem.value_scale = 0.7F;
        check(problem, 1, ++seed);
      }
    }
  }
}

TEST_CASE("every group size and number of query tokens") {
  std::uint32_t seed = 0;
  for (const ScalarType type : kTypes) {
    for (std::int64_t group_size = 1; group_size <= 17; ++group_size) {
      Problem problem = simple(type, {{1, 20}, {2, 33}, {static_cast<std::int64_t>(seed) % 9, 17}});
      problem.head_size = 32;
      problem.group_size = group_size;
      check(problem, 1, ++seed);
    }
  }
}

TEST_CASE("every number of keys round the ends of panels and blocks") {
  for (const ScalarType type : kTypes) {
    for (const KvCacheType cache_type : {KvCacheType::same, KvCacheType::fp8_e4m3, KvCacheType::int8}) {
      Problem problem = simple(type, {});
      problem.cache_type = cache_type;
      problem.head_size = 32;
      problem.block_size = 32;
      for (const std::int64_t keys : {0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 272, 513}) {
        problem.sequences.push_back({1, keys});
        if (keys < 64) problem.sequences.push_back({keys, keys});
      }
      check(problem, 2, 3);
    }
  }
}

TEST_CASE("windows of every width, causal and not, with keys on both sides") {
  for (const bool causal : {true, false}) {
    for (const std::int64_t window : {0, 1, 2, 5, 15, 16, 17, 31, 32, 33, 64, 300}) {
      Problem problem = simple(ScalarType::bfloat16, {{40, 70}, {1, 70}, {70, 70}});
      problem.head_size = 32;
      problem.causal = causal;
      problem.window = window;
      problem.sinks = window % 2 == 1;
      check(problem, 3, static_cast<std::uint32_t>(window));
    }
  }
}

TEST_CASE("keys that are divided among threads, under every feature") {
  for (int features = 0; features < 16; ++features) {
    Problem problem = simple(kTypes[features % 3], {{1, 1500}, {3, 700}, {1, 1033}});
    problem.cache_type = kCacheTypes[features % 4];
    problem.head_size = 16;
    problem.group_size = 8;
    problem.block_size = 48;
    problem.sinks = features % 2 == 1;
    problem.alibi = features / 2 % 2 == 1;
    problem.softcap = features / 4 % 2 == 1 ? 3.0F : 0.0F;
    // Narrower than the schedule's parts where it is 40: some parts then see no key of a row.
    problem.window = features / 8 % 2 == 1 ? (features % 2 == 1 ? 40 : 1200) : -1;
    check(problem, 16, static_cast<std::uint32_t>(features));
  }
}

TEST_CASE("no sequences, no query tokens and no keys") {
  for (const ScalarType type : kTypes) {
    check(simple(type, {}), 2);
    check(simple(type, {{0, 0}}), 2);
    check(simple(type, {{0, 20}, {1, 20}, {0, 0}}), 2);
    check(simple(type, {{2, 0}, {1, 20}}), 2);
  }
}

TEST_CASE("a query that sees no key gives zeros, whatever the scores' transformations") {
  for (const bool transformed : {false, true}) {
    // The first three queries lie before the first key.
    Problem problem = simple(ScalarType::bfloat16, {{5, 2}, {1, 40}});
    problem.alibi = problem.sinks = transformed;
    problem.softcap = transformed ? 10.0F : 0.0F;
    const Inputs inputs = make_inputs(problem, 5);
    check_problem(problem, inputs, 2, 5);
    for (const Variant& variant : runnable_variants()) {
      const std::vector<float> output = attend(variant, problem, inputs, 1, 5);
      const std::int64_t row = problem.query_heads() * problem.head_size;
      CHECK(std::all_of(output.begin(), output.begin() + 3 * row, [](float value) { return value == 0; }));
    }
  }
}

TEST_CASE("a scale that is negative or zero") {
  for (const float scale : {-0.125F, 0.0F}) {
    Problem problem = simple(ScalarType::bfloat16, {{7, 20}, {1, 300}});
    problem.scale = scale;
    check(problem, 2);
    problem.softcap = 4;
    check(problem, 2);
  }
}

TEST_CASE("logits of tens of thousands give neither NaN nor infinity") {
  for (const ScalarType type : kTypes) {
    for (const float softcap : {0.0F, 50.0F}) {
      Problem problem = simple(type, {{9, 30}, {1, 300}});
      problem.softcap = softcap;
      Inputs inputs = make_inputs(problem, 6);
      // Powers of two, for which logits of 10^4 are exact, or nearly so, in fp32.
      for (float& value : inputs.query)
        value = std::copysign(std::exp2(std::round(std::log2(std::fabs(value)))), value) * 128;
      for (float& value : inputs.key)
        value = std::copysign(std::exp2(std::round(std::log2(std::fabs(value)))), value) * 64;
      check_problem(problem, inputs, 3, 6);
    }
  }
}

TEST_CASE("keys whose logit is minus infinity have no weight") {
  for (const ScalarType type : kTypes) {
    Problem problem = simple(type, {{1, 40}, {5, 5}});
    Inputs inputs = make_inputs(problem, 7);
    const std::int64_t size = problem.head_size;
    for (std::size_t i = 0; i < inputs.query.size(); i += size) inputs.query[i] = 1;
    // Of the second sequence all keys, so that its rows have no finite logit at all.
    for (std::int64_t token = 0; token < 45; ++token) {
      if (token % 3 == 0 || token >= 40) inputs.key[token * size] = -std::numeric_limits<float>::infinity();
    }
    Inputs finite = inputs;
    for (float& value : finite.key) value = std::max(value, -1e4F);
    std::vector<double> expected = reference(problem, finite);
    std::fill(expected.begin() + 2 * size, expected.end(), 0.0);
    for (const Variant& variant : runnable_variants()) {
      const std::string name(vllm_arm::isa_name(variant.isa));
      INFO(name);
      check_close(problem, attend(variant, problem, inputs, 1, 7), expected);
    }
  }
}

TEST_CASE("NaN in a sequence stays visible there and does not reach another") {
  for (const ScalarType type : kTypes) {
    for (const KvCacheType cache_type : kCacheTypes) {
      Problem problem = simple(type, {{3, 20}, {3, 20}, {1, 40}});
      problem.cache_type = cache_type;
      Inputs inputs = make_inputs(problem, 8);
      const std::vector<double> expected = reference(problem, inputs);
      const std::int64_t size = problem.head_size, row = problem.query_heads() * size;
      const float nan = std::numeric_limits<float>::quiet_NaN();
      for (std::vector<float> Inputs::* poisoned : {&Inputs::query, &Inputs::key, &Inputs::value}) {
        Inputs changed = inputs;
        // In the middle sequence: its queries begin at token 3, its keys at 20.
        std::vector<float>& values = changed.*poisoned;
        for (std::int64_t i = 0; i < size; ++i) values[(poisoned == &Inputs::query ? 3 * row : 25 * size) + i] = nan;
        for (const Variant& variant : runnable_variants()) {
          const std::string text = problem.describe(), name(vllm_arm::isa_name(variant.isa));
          INFO(name, ": ", text);
          std::vector<float> output = attend(variant, problem, changed, 2, 8);
          CHECK(std::isnan(output[3 * row]));
          for (std::int64_t i = 3 * row; i < 6 * row; ++i) output[i] = static_cast<float>(expected[i]);
          check_close(problem, output, expected);
        }
      }
    }
  }
}

TEST_CASE("sums over 32K tokens do not drift") {
  for (const ScalarType type : kTypes) {
    Problem problem = simple(type, {{1, 32768}});
    problem.head_size = 32;
    problem.group_size = 1;
    problem.block_size = 128;
    Inputs inputs = make_inputs(problem, 9);
    check_problem(problem, inputs, 4, 9);
    // Equal weights and equal values: an average that any lost weight shows in.
    std::fill(inputs.key.begin(), inputs.key.end(), 0.0F);
    std::fill(inputs.value.begin(), inputs.value.end(), 1.0F);
    for (const Variant& variant : runnable_variants()) {
      for (const std::int64_t threads : {1, 4}) {
        for (const float value : attend(variant, problem, inputs, threads, 9))
          REQUIRE(value == doctest::Approx(1.0F).epsilon(1e-5));
      }
    }
  }
}
