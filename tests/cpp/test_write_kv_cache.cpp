// SPDX-License-Identifier: Apache-2.0
// Every variant of write_kv_cache that this CPU can run: which bytes it writes, and which codes. That attention reads
// them where they were written is for test_paged_attention.cpp.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "attention/kv_cache_types.h"
#include "attention_problem.h"

using namespace vllm_arm::tests;
using vllm_arm::Isa;
using vllm_arm::KvCache;
using vllm_arm::KvCacheType;
using vllm_arm::ScalarType;

namespace {

using Place = GuardedBuffer::Place;
using Slots = std::vector<std::int64_t>;

constexpr std::int64_t kBlocks = 2;

struct Tokens {
  std::vector<float> key, value;
};

// As many tokens as the cache has slots.
Tokens tokens_for(const Problem& problem) {
  Problem sized = problem;
  sized.sequences = {{0, kBlocks * problem.block_size}};
  Inputs inputs = make_inputs(sized, 11);
  return {inputs.key, inputs.value};
}

Tokens token_of(const Problem& problem, const Tokens& tokens, std::int64_t token) {
  const std::int64_t size = problem.kv_heads * problem.head_size;
  const auto part = [&](const std::vector<float>& all) {
    return std::vector<float>(all.begin() + token * size, all.begin() + (token + 1) * size);
  };
  return {part(tokens.key), part(tokens.value)};
}

std::vector<unsigned char> bytes_of(TestCache& cache) {
  const char* data = cache.buffer().data();
  return {data, data + cache.buffer().bytes()};
}

// Calls `use(variant, problem)` for every variant and way to store.
template <typename Use>
void for_each_problem(Use use) {
  for (const Variant& variant : runnable_variants()) {
    for (const ScalarType type : {ScalarType::bfloat16, ScalarType::float16, ScalarType::float32}) {
      for (const KvCacheType cache_type :
           {KvCacheType::same, KvCacheType::fp8_e4m3, KvCacheType::fp8_e5m2, KvCacheType::int8}) {
        for (const std::int64_t head_size : {16, 64, 80}) {
          Problem problem;
          problem.type = type;
          problem.cache_type = cache_type;
          problem.head_size = head_size;
          problem.block_size = 48;
          problem.kv_heads = 3;
          problem.key_scale = 0.037F;
          problem.value_scale = 0.3F;
          const std::string name(vllm_arm::isa_name(variant.isa)), text = problem.describe();
          INFO(name, ": ", text);
          use(variant, problem);
        }
      }
    }
  }
}

// How the cache stores an element, as a number.
std::uint32_t code_of(const Problem& problem, float value, float inverse) {
  std::uint32_t code = 0;
  vllm_arm::Float8E4M3 e4m3;
  vllm_arm::Float8E5M2 e5m2;
  switch (problem.cache_type) {
    case KvCacheType::same: store(problem.type, value, reinterpret_cast<char*>(&code)); return code;
    case KvCacheType::fp8_e4m3: vllm_arm::from_float(value * inverse, e4m3); return e4m3.bits;
    case KvCacheType::fp8_e5m2: vllm_arm::from_float(value * inverse, e5m2); return e5m2.bits;
    case KvCacheType::int8: return static_cast<std::uint8_t>(static_cast<std::int8_t>(std::nearbyint(value * inverse)));
  }
  return code;
}

std::vector<std::uint32_t> codes(const KvCache& cache, const char* plane) {
  std::vector<std::uint32_t> result(cache.block_size * cache.head_size, 0);
  for (std::size_t i = 0; i < result.size(); ++i) {
    std::memcpy(&result[i], plane + i * cache.element_size(), cache.element_size());
  }
  return result;
}

bool is_fp8(KvCacheType type) { return type == KvCacheType::fp8_e4m3 || type == KvCacheType::fp8_e5m2; }

// Elements as fp8_code.h keeps them, times the scale of their token; -0 is 0. What has less than 2^-14 of the largest
// element's power of two is lost. With SVE the pairs of a group of four keys are 0 and 2, and 1 and 3.
void check_paired_plane(const Problem& problem, const KvCache& cache, const char* interior, bool is_value, bool is_sve,
                        const std::vector<std::vector<float>>& rows) {
  const char* plane = interior + (is_value ? cache.plane_bytes() : 0);
  const auto* scales = reinterpret_cast<const float*>(interior + 2 * cache.plane_bytes());
  for (std::int64_t token = 0; token < cache.block_size; ++token) {
    const std::int64_t in_panel = token % vllm_arm::kPanelTokens, size = cache.head_size;
    const auto* panel = reinterpret_cast<const std::uint16_t*>(plane + (token - in_panel) * size);
    const float scale = scales[token + (is_value ? cache.block_size : 0)];
    const auto number = [&](std::uint16_t bits) {
      return std::ldexp(vllm_arm::bits_to_float(std::uint32_t{bits} << 16), 120) * scale;
    };
    const std::int64_t key_pair = is_sve ? in_panel / 4 * 2 + in_panel % 2 : in_panel / 2;
    const std::int64_t in_pair = is_sve ? in_panel % 4 / 2 : in_panel % 2;
    std::vector<float> actual(size), expected(size);
    for (std::int64_t pair = 0; pair < size / 2; ++pair) {
      const std::int64_t of_key = key_pair * size + pair / 4 * 8 + in_pair * 4 + pair % 4;
      const std::int64_t of_value = in_panel / 4 * 2 * size + pair * 4 + in_panel % 4;
      const std::uint16_t stored = panel[is_value ? of_value : of_key];
      const auto swapped = static_cast<std::uint16_t>((stored & 0x0f0f) << 4 | (stored & 0xf0f0) >> 4);
      const std::int64_t apart = is_value ? 2 : 4, first = pair / apart * 2 * apart + pair % apart;
      actual[first] = number(stored & 0x87f0);
      actual[first + apart] = number(swapped & 0x87f0);
    }
    for (std::int64_t i = 0; i < size; ++i) {
      const std::uint32_t code = code_of(problem, rows[token][i], 1 / (is_value ? cache.value_scale : cache.key_scale));
      const auto bits = static_cast<std::uint8_t>(code);
      expected[i] = problem.cache_type == KvCacheType::fp8_e4m3 ? vllm_arm::to_float(vllm_arm::Float8E4M3{bits})
                                                                : vllm_arm::to_float(vllm_arm::Float8E5M2{bits});
    }
    const auto smaller = [](float a, float b) { return std::fabs(a) < std::fabs(b); };
    const float largest = *std::max_element(expected.begin(), expected.end(), smaller);
    const float kept = std::ldexp(1.0F, std::ilogb(largest) - 14);
    for (float& element : expected) {
      if (std::fabs(element) < kept) element = 0;
    }
    REQUIRE(actual == expected);
  }
}

// Whether a plane has the right codes; their order is the variant's own affair.
void check_plane(const Variant& variant, const Problem& problem, const KvCache& cache, std::int64_t block,
                 std::int64_t head, const std::vector<float>& elements, bool is_value) {
  std::vector<std::uint32_t> expected;
  const char* interior = cache.interior(block, head);
  if (is_fp8(cache.type) && problem.type == ScalarType::bfloat16 && variant.isa >= Isa::bf16) {
    std::vector<std::vector<float>> rows;
    for (std::int64_t token = 0; token < cache.block_size; ++token) {
      const float* row = &elements[((block * cache.block_size + token) * cache.kv_heads + head) * cache.head_size];
      rows.emplace_back(row, row + cache.head_size);
    }
    return check_paired_plane(problem, cache, interior, is_value, variant.isa == Isa::sve, rows);
  }
  const auto* scales = reinterpret_cast<const float*>(interior + 2 * cache.plane_bytes());
  for (std::int64_t token = 0; token < cache.block_size; ++token) {
    const float* row = &elements[((block * cache.block_size + token) * cache.kv_heads + head) * cache.head_size];
    float scale = is_value ? cache.value_scale : cache.key_scale;
    if (cache.type == KvCacheType::int8) {
      scale = 0;
      for (std::int64_t i = 0; i < cache.head_size; ++i) scale = std::max(scale, std::fabs(row[i]));
      scale /= 127;
      REQUIRE(scales[token + (is_value ? cache.block_size : 0)] == scale);
    }
    for (std::int64_t i = 0; i < cache.head_size; ++i) expected.push_back(code_of(problem, row[i], 1 / scale));
  }
  std::vector<std::uint32_t> actual = codes(cache, interior + (is_value ? cache.plane_bytes() : 0));
  std::sort(actual.begin(), actual.end());
  std::sort(expected.begin(), expected.end());
  if (cache.type == KvCacheType::int8 && actual != expected) {
    // A variant may keep int8 with its sign bit flipped.
    for (std::uint32_t& code : expected) code ^= 0x80;
    std::sort(expected.begin(), expected.end());
  }
  REQUIRE(actual == expected);
}

}  // namespace

TEST_CASE("each slot has bytes of its own, and those of all slots are the whole cache") {
  for_each_problem([](const Variant& variant, const Problem& problem) {
    const Tokens tokens = tokens_for(problem);
    // A byte is written if it is the same over two backgrounds.
    TestCache first(problem, kBlocks, Place::end, 0x5a), second(problem, kBlocks, Place::begin, 0xa5);
    const std::int64_t written_by_token = problem.kv_heads * first.cache().interior_bytes() / problem.block_size;
    std::vector<unsigned char> before = bytes_of(first);
    std::vector<bool> written(before.size(), false);
    std::vector<std::int64_t> slots(kBlocks * problem.block_size);
    std::iota(slots.begin(), slots.end(), 0);
    std::mt19937 random(5);
    std::shuffle(slots.begin(), slots.end(), random);
    for (const std::int64_t slot : slots) {
      const auto [key, value] = token_of(problem, tokens, slot);
      for (const TestCache* cache : {&first, &second}) {
        write(variant, problem, cache->cache(), key, value, {slot}, Place::end);
      }
      const std::vector<unsigned char> after = bytes_of(first), other = bytes_of(second);
      std::int64_t now_written = 0;
      bool earlier_untouched = true;
      for (std::size_t i = 0; i < after.size(); ++i) {
        if (written[i]) {
          earlier_untouched = earlier_untouched && after[i] == before[i] && other[i] == before[i];
        } else if (after[i] == other[i]) {
          written[i] = true;
          ++now_written;
        }
      }
      REQUIRE(earlier_untouched);
      REQUIRE(now_written == written_by_token);
      before = after;
    }
    const KvCache& cache = first.cache();
    bool interiors_written = true;
    for (std::int64_t block = 0; block < kBlocks; ++block) {
      for (std::int64_t head = 0; head < problem.kv_heads; ++head) {
        const auto begin = written.begin() + (cache.interior(block, head) - cache.data);
        interiors_written =
            interiors_written && std::all_of(begin, begin + cache.interior_bytes(), [](bool b) { return b; });
      }
    }
    REQUIRE(interiors_written);
  });
}

TEST_CASE("elements are stored as the scalar conversions store them") {
  for_each_problem([](const Variant& variant, const Problem& problem) {
    const Tokens tokens = tokens_for(problem);
    TestCache cache(problem, kBlocks, Place::end);
    std::vector<std::int64_t> slots(kBlocks * problem.block_size);
    std::iota(slots.begin(), slots.end(), 0);
    write(variant, problem, cache.cache(), tokens.key, tokens.value, slots, Place::begin);
    for (std::int64_t block = 0; block < kBlocks; ++block) {
      for (std::int64_t head = 0; head < problem.kv_heads; ++head) {
        check_plane(variant, problem, cache.cache(), block, head, tokens.key, false);
        check_plane(variant, problem, cache.cache(), block, head, tokens.value, true);
      }
    }
  });
}

TEST_CASE("one token at a time, all at once and in any order with gaps give the same bytes") {
  for_each_problem([](const Variant& variant, const Problem& problem) {
    const Tokens tokens = tokens_for(problem);
    const std::int64_t row = problem.kv_heads * problem.head_size;
    for (const std::int64_t first : {0, 1, 7, 15, 16, 30}) {
      for (const std::int64_t count : {1, 2, 15, 16, 17, 33, 50}) {
        TestCache together(problem, kBlocks, Place::end, 0x5a), alone(problem, kBlocks, Place::begin, 0x5a),
            mixed(problem, kBlocks, Place::end, 0x5a);
        Slots slots(count);
        std::iota(slots.begin(), slots.end(), first);
        write(variant, problem, together.cache(), tokens.key, tokens.value, slots, Place::end);
        Slots order(count);
        std::iota(order.begin(), order.end(), 0);
        std::mt19937 random(static_cast<std::uint32_t>(100 * first + count));
        std::shuffle(order.begin(), order.end(), random);
        Tokens shuffled;
        Slots shuffled_slots;
        for (const std::int64_t token : order) {
          const auto [key, value] = token_of(problem, tokens, token);
          write(variant, problem, alone.cache(), key, value, {slots[token]}, Place::begin);
          // Beside each token one that is skipped.
          for (const std::int64_t slot : {slots[token], std::int64_t{-1}}) {
            shuffled_slots.push_back(slot);
            shuffled.key.insert(shuffled.key.end(), key.begin(), key.end());
            shuffled.value.insert(shuffled.value.end(), value.begin(), value.end());
          }
        }
        std::fill(shuffled.key.end() - row, shuffled.key.end(), std::numeric_limits<float>::quiet_NaN());
        write(variant, problem, mixed.cache(), shuffled.key, shuffled.value, shuffled_slots, Place::end);
        INFO("slots ", first, " to ", first + count - 1);
        REQUIRE(bytes_of(together) == bytes_of(alone));
        REQUIRE(bytes_of(together) == bytes_of(mixed));
      }
    }
  });
}

TEST_CASE("an int8 token of zeros has the scale 0, NaN and infinity show in the scale") {
  for (const Variant& variant : runnable_variants()) {
    const std::string name(vllm_arm::isa_name(variant.isa));
    INFO(name);
    for (const ScalarType type : {ScalarType::bfloat16, ScalarType::float16, ScalarType::float32}) {
      Problem problem;
      problem.type = type;
      problem.cache_type = KvCacheType::int8;
      for (const float special :
           {0.0F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        for (const std::int64_t place : {0, 5, 63}) {
          std::vector<float> key(64, special == 0 ? 0.0F : 1.0F), value(64, 2.0F);
          key[place] = special;
          TestCache cache(problem, 1, Place::end);
          write(variant, problem, cache.cache(), key, value, {3}, Place::end);
          const auto* scales = reinterpret_cast<const float*>(cache.buffer().data() + 2 * cache.cache().plane_bytes());
          CHECK((std::isnan(special) ? std::isnan(scales[3]) : scales[3] == special));
          CHECK(scales[3 + problem.block_size] == 2.0F / 127);
        }
      }
    }
  }
}
