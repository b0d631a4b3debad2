// SPDX-License-Identifier: Apache-2.0
#include "attention_problem.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <sstream>

#include "attention/kv_cache_types.h"
#include "attention/paged_attention_table.h"

namespace vllm_arm::tests {
namespace {

using Place = GuardedBuffer::Place;

constexpr unsigned char kCanary = 0x5a;
constexpr unsigned char kNan = 0xff;  // repeated, a NaN in every type of element and of scale

constexpr const char* kTypeNames[] = {"bf16", "fp16", "fp32"};
constexpr const char* kCacheNames[] = {"same", "e4m3", "e5m2", "int8"};

float rounded(ScalarType type, float value) {
  char bytes[4] = {};
  store(type, value, bytes);
  return load(type, bytes);
}

template <typename Stored>
float through(float value, float inverse, float scale) {
  Stored stored;
  from_float(value * inverse, stored);
  return to_float(stored) * scale;
}

}  // namespace

std::int64_t Problem::query_tokens() const {
  std::int64_t total = 0;
  for (const Sequence& sequence : sequences) total += sequence.queries;
  return total;
}

std::int64_t Problem::key_tokens() const {
  std::int64_t total = 0;
  for (const Sequence& sequence : sequences) total += sequence.keys;
  return total;
}

std::int64_t Problem::cost() const {
  std::int64_t pairs = 0;
  for (const Sequence& sequence : sequences) pairs += sequence.queries * sequence.keys;
  return pairs * query_heads() * head_size;
}

std::string Problem::describe() const {
  std::ostringstream text;
  text << kTypeNames[static_cast<int>(type)] << ", cache " << kCacheNames[static_cast<int>(cache_type)]
       << ", head size " << head_size << ", block size " << block_size << ", " << kv_heads << " key heads x "
       << group_size << ", causal " << causal << ", window " << window << ", scale " << scale << ", softcap " << softcap
       << ", alibi " << alibi << ", sinks " << sinks << ", sequences (queries/keys):";
  for (const Sequence& sequence : sequences) {
    text << ' ' << sequence.queries << '/' << sequence.keys;
    if (dynamic_causal) text << (sequence.causal ? " causal" : " not causal");
  }
  return text.str();
}

float load(ScalarType type, const char* source) {
  if (type == ScalarType::float32) {
    float value;
    std::memcpy(&value, source, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, source, sizeof bits);
  return type == ScalarType::bfloat16 ? to_float(BFloat16{bits}) : to_float(Float16{bits});
}

void store(ScalarType type, float value, char* destination) {
  const auto store_as = [&]<typename Element>(Element element) {
    from_float(value, element);
    std::memcpy(destination, &element, sizeof element);
  };
  switch (type) {
    case ScalarType::bfloat16: return store_as(BFloat16{});
    case ScalarType::float16: return store_as(Float16{});
    case ScalarType::float32: return store_as(float{});
  }
}

Inputs make_inputs(const Problem& problem, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto values = [&](std::int64_t count, float size) {
    std::vector<float> result(count);
    for (float& value : result) value = rounded(problem.type, size * normal(random));
    return result;
  };
  Inputs inputs;
  inputs.query = values(problem.query_tokens() * problem.query_heads() * problem.head_size, 2);
  inputs.key = values(problem.key_tokens() * problem.kv_heads * problem.head_size, 1);
  inputs.value = values(problem.key_tokens() * problem.kv_heads * problem.head_size, 1);
  for (std::int64_t head = 0; head < problem.query_heads(); ++head) {
    inputs.alibi_slopes.push_back(std::exp2(-2.0F - static_cast<float>(head % 6)));
    inputs.sinks.push_back(normal(random));
  }
  return inputs;
}

std::vector<float> through_cache(const Problem& problem, const float* elements, float scale) {
  std::vector<float> result(elements, elements + problem.head_size);
  float inverse = 1 / scale;
  if (problem.cache_type == KvCacheType::int8) {
    float largest = 0;
    for (const float value : result) largest = std::max(largest, std::fabs(value));
    scale = largest / 127;
    inverse = scale == 0 ? 0 : 1 / scale;
  }
  for (float& value : result) {
    switch (problem.cache_type) {
      case KvCacheType::same: break;
      case KvCacheType::fp8_e4m3: value = through<Float8E4M3>(value, inverse, scale); break;
      case KvCacheType::fp8_e5m2: value = through<Float8E5M2>(value, inverse, scale); break;
      case KvCacheType::int8: value = std::nearbyint(value * inverse) * scale; break;
    }
  }
  return result;
}

std::vector<double> reference(const Problem& problem, const Inputs& inputs) {
  const std::int64_t size = problem.head_size, heads = problem.query_heads();
  std::vector<double> output(problem.query_tokens() * heads * size, 0.0);
  std::int64_t first_query = 0, first_key = 0;
  for (const Sequence& sequence : problem.sequences) {
    for (std::int64_t kv_head = 0; kv_head < problem.kv_heads; ++kv_head) {
      std::vector<double> keys, values;
      for (std::int64_t token = first_key; token < first_key + sequence.keys; ++token) {
        const std::int64_t place = (token * problem.kv_heads + kv_head) * size;
        for (const float value : through_cache(problem, &inputs.key[place], problem.key_scale)) keys.push_back(value);
        for (const float value : through_cache(problem, &inputs.value[place], problem.value_scale)) {
          values.push_back(value);
        }
      }
      for (std::int64_t row = 0; row < sequence.queries * problem.group_size; ++row) {
        const std::int64_t token = row / problem.group_size;
        const std::int64_t head = kv_head * problem.group_size + row % problem.group_size;
        const std::int64_t position = sequence.keys - sequence.queries + token;
        const float* query = &inputs.query[((first_query + token) * heads + head) * size];
        std::vector<double> logits, exact(query, query + size);
        std::vector<std::int64_t> seen;
        for (std::int64_t key = 0; key < sequence.keys; ++key) {
          if (problem.is_causal(sequence) && key > position) continue;
          if (problem.window >= 0 && std::abs(position - key) >= problem.window) continue;
          double logit = std::inner_product(exact.begin(), exact.end(), keys.begin() + key * size, 0.0);
          logit *= static_cast<double>(problem.scale);
          if (problem.softcap != 0) logit = problem.softcap * std::tanh(logit / problem.softcap);
          if (problem.alibi) logit += inputs.alibi_slopes[head] * static_cast<double>(key - position);
          logits.push_back(logit);
          seen.push_back(key);
        }
        if (logits.empty()) continue;
        const double largest = *std::max_element(logits.begin(), logits.end());
        double sum = problem.sinks ? std::exp(inputs.sinks[head] - largest) : 0;
        double* result = &output[((first_query + token) * heads + head) * size];
        for (std::size_t k = 0; k < seen.size(); ++k) {
          const double weight = std::exp(logits[k] - largest);
          sum += weight;
          for (std::int64_t i = 0; i < size; ++i) result[i] += weight * values[seen[k] * size + i];
        }
        for (std::int64_t i = 0; i < size; ++i) result[i] /= sum;
      }
    }
    first_query += sequence.queries;
    first_key += sequence.keys;
  }
  return output;
}

double unit_in_the_last_place(ScalarType type, double magnitude) {
  const int fraction_bits = type == ScalarType::bfloat16 ? 7 : type == ScalarType::float16 ? 10 : 23;
  const int smallest = type == ScalarType::float16 ? -14 : -126;
  const int exponent = magnitude == 0 ? smallest : std::max(smallest, std::ilogb(magnitude));
  return std::ldexp(1.0, exponent - fraction_bits);
}

double tolerance(ScalarType type, double magnitude) {
  if (type == ScalarType::float32) return 1e-5 * magnitude;
  return (type == ScalarType::bfloat16 ? 2 : 4) * unit_in_the_last_place(type, magnitude);
}

std::vector<Variant> runnable_variants() {
  std::vector<Variant> variants;
  for (const auto& attend : kPagedAttentionTable) {
    if (!missing_features(attend.isa, host_features()).empty()) continue;
    for (const auto& write : kWriteKvCacheTable) {
      if (write.isa == attend.isa) variants.push_back({attend.isa, write.kernel, attend.kernel});
    }
  }
  return variants;
}

HeadsTensor::HeadsTensor(ScalarType type, std::int64_t tokens, std::int64_t heads, std::int64_t head_size,
                         std::int64_t padding, Place place)
    : type_(type),
      heads_(heads),
      head_size_(head_size),
      head_stride_((head_size + padding) * scalar_size(type)),
      token_stride_(heads * head_stride_ + padding * scalar_size(type)),
      buffer_(tokens == 0 || heads == 0
                  ? 0
                  : (tokens - 1) * token_stride_ + (heads - 1) * head_stride_ + head_size * scalar_size(type),
              place, kCanary) {}

float HeadsTensor::get(std::int64_t token, std::int64_t head, std::int64_t i) {
  return load(type_, row(token, head) + i * scalar_size(type_));
}

void HeadsTensor::set(std::int64_t token, std::int64_t head, std::int64_t i, float value) {
  store(type_, value, row(token, head) + i * scalar_size(type_));
}

bool HeadsTensor::rest_is_untouched(std::int64_t tokens) {
  std::vector<bool> may_change(buffer_.bytes(), false);
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (std::int64_t head = 0; head < heads_; ++head) {
      const std::int64_t begin = row(token, head) - buffer_.data();
      std::fill_n(may_change.begin() + begin, head_size_ * scalar_size(type_), true);
    }
  }
  for (std::size_t i = 0; i < may_change.size(); ++i) {
    if (!may_change[i] && static_cast<unsigned char>(buffer_.data()[i]) != kCanary) return false;
  }
  return true;
}

namespace {

KvCache layout_of(const Problem& problem, std::int64_t blocks) {
  KvCache cache{};
  cache.blocks = blocks;
  cache.kv_heads = problem.kv_heads;
  cache.block_size = problem.block_size;
  cache.head_size = problem.head_size;
  cache.type = problem.cache_type;
  cache.scalar_type = problem.type;
  const bool is_fp8 = cache.type == KvCacheType::fp8_e4m3 || cache.type == KvCacheType::fp8_e5m2;
  cache.key_scale = is_fp8 ? problem.key_scale : 1;
  cache.value_scale = is_fp8 ? problem.value_scale : 1;
  // Each gap is as long as an element of any type needs for its alignment.
  cache.head_stride = cache.interior_bytes() + 16;
  cache.block_stride = problem.kv_heads * cache.head_stride + 48;
  return cache;
}

}  // namespace

TestCache::TestCache(const Problem& problem, std::int64_t blocks, Place place, unsigned char fill)
    : cache_(layout_of(problem, blocks)),
      buffer_(
          (blocks - 1) * cache_.block_stride + (problem.kv_heads - 1) * cache_.head_stride + cache_.interior_bytes(),
          place, fill) {
  cache_.data = buffer_.data();
}

void write(const Variant& variant, const Problem& problem, const KvCache& cache, const std::vector<float>& key,
           const std::vector<float>& value, const std::vector<std::int64_t>& slots, Place place) {
  const auto tokens = static_cast<std::int64_t>(slots.size());
  HeadsTensor keys(problem.type, tokens, problem.kv_heads, problem.head_size, 3, place);
  HeadsTensor values(problem.type, tokens, problem.kv_heads, problem.head_size, 5, place);
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (std::int64_t head = 0; head < problem.kv_heads; ++head) {
      for (std::int64_t i = 0; i < problem.head_size; ++i) {
        const std::int64_t place_in_input = (token * problem.kv_heads + head) * problem.head_size + i;
        keys.set(token, head, i, key[place_in_input]);
        values.set(token, head, i, value[place_in_input]);
      }
    }
  }
  GuardedBuffer mapping(slots.size() * sizeof(std::int64_t), place, 0);
  if (tokens > 0) std::memcpy(mapping.data(), slots.data(), mapping.bytes());
  const WriteKvCacheArguments arguments{cache,
                                        keys.data(),
                                        values.data(),
                                        keys.token_stride(),
                                        keys.head_stride(),
                                        values.token_stride(),
                                        values.head_stride(),
                                        mapping.as<std::int64_t>()};
  // In four calls, as threads divide heads and tokens.
  const std::int64_t middle_head = problem.kv_heads / 2, middle_token = tokens / 2;
  for (const bool later : {true, false}) {
    const std::int64_t begin = later ? middle_token : 0, end = later ? tokens : middle_token;
    variant.write(arguments, begin, end, middle_head, problem.kv_heads);
    variant.write(arguments, begin, end, 0, middle_head);
  }
}

std::vector<float> attend(const Variant& variant, const Problem& problem, const Inputs& inputs, std::int64_t threads,
                          std::uint32_t seed) {
  std::mt19937 random(seed);
  const Place place = seed % 2 == 0 ? Place::end : Place::begin;
  const std::int64_t size = problem.head_size, heads = problem.query_heads(), tokens = problem.query_tokens();
  const auto sequences = static_cast<std::int64_t>(problem.sequences.size());

  // Blocks in any order, some of which belong to no sequence.
  std::int64_t used = 0, most = 0;
  std::vector<std::int64_t> needed;
  for (const Sequence& sequence : problem.sequences) {
    needed.push_back((sequence.keys + problem.block_size - 1) / problem.block_size);
    used += needed.back();
    most = std::max(most, needed.back());
  }
  std::vector<std::int32_t> blocks(used + 2);
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), random);
  TestCache cache(problem, used + 2, place);
  const std::int64_t table_stride = most + 1;
  GuardedBuffer table(sequences == 0 ? 0 : ((sequences - 1) * table_stride + most) * sizeof(std::int32_t), place, kNan);
  GuardedBuffer starts((sequences + 1) * sizeof(std::int32_t), place, 0);
  GuardedBuffer lengths(sequences * sizeof(std::int32_t), place, 0);
  GuardedBuffer causal(problem.dynamic_causal ? sequences * sizeof(std::int32_t) : 0, place, 0);
  std::vector<std::int64_t> slots;
  std::int64_t next_block = 0;
  for (std::int64_t sequence = 0; sequence < sequences; ++sequence) {
    const auto& [queries, keys, is_causal] = problem.sequences[sequence];
    starts.as<std::int32_t>()[sequence + 1] = starts.as<std::int32_t>()[sequence] + static_cast<std::int32_t>(queries);
    lengths.as<std::int32_t>()[sequence] = static_cast<std::int32_t>(keys);
    if (problem.dynamic_causal) causal.as<std::int32_t>()[sequence] = is_causal;
    for (std::int64_t block = 0; block < needed[sequence]; ++block) {
      table.as<std::int32_t>()[sequence * table_stride + block] = blocks[next_block + block];
    }
    for (std::int64_t key = 0; key < keys; ++key) {
      slots.push_back(blocks[next_block + key / problem.block_size] * problem.block_size + key % problem.block_size);
    }
    next_block += needed[sequence];
  }
  write(variant, problem, cache.cache(), inputs.key, inputs.value, slots, place);

  constexpr std::int64_t kPaddingTokens = 2;  // of the batch: not to be computed
  HeadsTensor query(problem.type, tokens, heads, size, 3, place);
  HeadsTensor output(problem.type, tokens + kPaddingTokens, heads, size, 5, place);
  for (std::int64_t i = 0; i < tokens * heads * size; ++i) {
    query.set(i / size / heads, i / size % heads, i % size, inputs.query[i]);
  }
  GuardedBuffer slopes(problem.alibi ? heads * sizeof(float) : 0, place, 0);
  GuardedBuffer sinks(problem.sinks ? heads * sizeof(float) : 0, place, 0);
  if (problem.alibi) std::memcpy(slopes.data(), inputs.alibi_slopes.data(), slopes.bytes());
  if (problem.sinks) std::memcpy(sinks.data(), inputs.sinks.data(), sinks.bytes());

  PagedAttentionArguments arguments{};
  arguments.cache = cache.cache();
  arguments.query = query.data();
  arguments.output = output.data();
  arguments.query_token_stride = query.token_stride();
  arguments.query_head_stride = query.head_stride();
  arguments.output_token_stride = output.token_stride();
  arguments.output_head_stride = output.head_stride();
  arguments.query_heads = heads;
  arguments.batch = {sequences,
                     starts.as<std::int32_t>(),
                     lengths.as<std::int32_t>(),
                     problem.causal,
                     problem.dynamic_causal ? causal.as<std::int32_t>() : nullptr,
                     problem.window};
  arguments.block_table = table.as<std::int32_t>();
  arguments.block_table_stride = table_stride;
  arguments.scale = problem.scale;
  arguments.softcap = problem.softcap;
  arguments.alibi_slopes = problem.alibi ? slopes.as<float>() : nullptr;
  arguments.sinks = problem.sinks ? sinks.as<float>() : nullptr;
  const Schedule schedule = make_schedule(arguments.batch, heads, problem.kv_heads, threads);
  GuardedBuffer partial_output(schedule.partial_rows * size * sizeof(float), place, kNan);
  GuardedBuffer partial_maximum(schedule.partial_rows * sizeof(float), place, kNan);
  GuardedBuffer partial_sum(schedule.partial_rows * sizeof(float), place, kNan);
  arguments.partial_output = partial_output.as<float>();
  arguments.partial_maximum = partial_maximum.as<float>();
  arguments.partial_sum = partial_sum.as<float>();
  for (std::int64_t thread = threads - 1; thread >= 0; --thread) {
    GuardedBuffer scratch(paged_attention_scratch_bytes(size), place, kNan);
    const std::int32_t begin = schedule.thread_begins[thread], end = schedule.thread_begins[thread + 1];
    variant.attend(arguments, schedule.items.data() + begin, end - begin, scratch.data());
  }
  for (const MergeItem& merge : schedule.merges) merge_partials(arguments, merge);

  CHECK(output.rest_is_untouched(tokens));
  std::vector<float> result(tokens * heads * size);
  for (std::int64_t i = 0; i < tokens * heads * size; ++i) {
    result[i] = output.get(i / size / heads, i / size % heads, i % size);
  }
  return result;
}

namespace {

// A row of `actual` against the same of `expected`: NaN counts as infinitely far.
template <typename Number>
double error_of_row(const Number* expected, const float* actual, std::int64_t size) {
  double error = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    const double difference = std::fabs(static_cast<double>(actual[i]) - static_cast<double>(expected[i]));
    error = std::isnan(difference) ? std::numeric_limits<double>::infinity() : std::max(error, difference);
  }
  return error;
}

double magnitude_of_row(const double* row, std::int64_t size) {
  double magnitude = 0;
  for (std::int64_t i = 0; i < size; ++i) magnitude = std::max(magnitude, std::fabs(row[i]));
  return magnitude;
}

}  // namespace

void check_close(const Problem& problem, const std::vector<float>& actual, const std::vector<double>& expected) {
  REQUIRE(actual.size() == expected.size());
  const std::int64_t size = problem.head_size, heads = problem.query_heads();
  for (std::int64_t row = 0; row < problem.query_tokens() * heads; ++row) {
    const double magnitude = magnitude_of_row(&expected[row * size], size);
    INFO("query token ", row / heads, ", head ", row % heads, ", largest magnitude ", magnitude);
    REQUIRE(error_of_row(&expected[row * size], &actual[row * size], size) <= tolerance(problem.type, magnitude));
  }
}

void check_problem(const Problem& problem, const Inputs& inputs, std::int64_t threads, std::uint32_t seed) {
  const std::string text = problem.describe();
  const std::vector<double> expected = reference(problem, inputs);
  const std::vector<Variant> variants = runnable_variants();
  CHECK(!variants.empty());
  for (const Variant& variant : variants) {
    const std::string name(isa_name(variant.isa));
    INFO(name, ": ", text, ", threads ", threads);
    const std::vector<float> alone = attend(variant, problem, inputs, 1, seed);
    check_close(problem, alone, expected);
    if (threads == 1) continue;
    const std::vector<float> shared = attend(variant, problem, inputs, threads, seed + 1);
    check_close(problem, shared, expected);
    const std::int64_t size = problem.head_size;
    for (std::int64_t row = 0; row < problem.query_tokens() * problem.query_heads(); ++row) {
      const double magnitude = magnitude_of_row(&expected[row * size], size);
      const double unit = unit_in_the_last_place(problem.type, magnitude);
      // fp32 sums in another order differ by more than one.
      const double allowed = problem.type == ScalarType::float32 ? tolerance(problem.type, magnitude) : unit;
      INFO("row ", row, ", largest magnitude ", magnitude);
      REQUIRE(error_of_row(&alone[row * size], &shared[row * size], size) <= allowed);
    }
  }
}

}  // namespace vllm_arm::tests
