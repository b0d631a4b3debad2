// SPDX-License-Identifier: Apache-2.0
// Problems of paged attention for the tests: random inputs, a float64 reference, and a run of one variant of the
// kernels in which every buffer lies between guard pages and all that must not be read is NaN.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/paged_attention.h"
#include "guarded_buffer.h"
#include "isa/isa.h"

namespace vllm_arm::tests {

struct Sequence {
  std::int64_t queries, keys;
  bool causal = true;  // where Problem::dynamic_causal
};

struct Problem {
  ScalarType type = ScalarType::bfloat16;
  KvCacheType cache_type = KvCacheType::same;
  std::int64_t head_size = 64, block_size = 16, kv_heads = 1, group_size = 1;
  std::vector<Sequence> sequences;
  bool causal = true, dynamic_causal = false;
  std::int64_t window = -1;
  float scale = 0.125F, softcap = 0;
  bool alibi = false, sinks = false;
  float key_scale = 1, value_scale = 1;  // fp8

  std::int64_t query_heads() const { return kv_heads * group_size; }
  std::int64_t query_tokens() const;
  std::int64_t key_tokens() const;
  bool is_causal(const Sequence& sequence) const { return dynamic_causal ? sequence.causal : causal; }
  // (query row, key, element) triples: what the reference costs.
  std::int64_t cost() const;
  std::string describe() const;
};

// [tokens, heads, head_size] of all sequences one after another, as values that the problem's type holds exactly.
struct Inputs {
  std::vector<float> query, key, value;
  std::vector<float> alibi_slopes, sinks;  // [query_heads]
};

Inputs make_inputs(const Problem& problem, std::uint32_t seed);

// A token's elements of one head as the cache gives them back, by the scalar conversions.
std::vector<float> through_cache(const Problem& problem, const float* elements, float scale);

// [query tokens, query_heads, head_size] in float64, of the keys and values that the cache gives back.
std::vector<double> reference(const Problem& problem, const Inputs& inputs);

// What a result may be off by, where the largest magnitude of its row is `magnitude`.
double tolerance(ScalarType type, double magnitude);
// The distance between neighbouring values of the type at this magnitude.
double unit_in_the_last_place(ScalarType type, double magnitude);

// Variants of the two kernels that go together.
struct Variant {
  Isa isa;
  WriteKvCacheKernel write;
  PagedAttentionKernel attend;
};

// Those that this CPU can run.
std::vector<Variant> runnable_variants();

float load(ScalarType type, const char* source);
void store(ScalarType type, float value, char* destination);

// A tensor [tokens, heads, head_size] with padding between heads and tokens, all of it 0x5a at first.
class HeadsTensor {
 public:
  HeadsTensor(ScalarType type, std::int64_t tokens, std::int64_t heads, std::int64_t head_size, std::int64_t padding,
              GuardedBuffer::Place place);

  char* data() { return buffer_.data(); }
  std::int64_t token_stride() const { return token_stride_; }  // bytes
  std::int64_t head_stride() const { return head_stride_; }
  char* row(std::int64_t token, std::int64_t head) {
    return buffer_.data() + token * token_stride_ + head * head_stride_;
  }
  float get(std::int64_t token, std::int64_t head, std::int64_t i);
  void set(std::int64_t token, std::int64_t head, std::int64_t i, float value);
  // Whether all bytes but the rows of the first `tokens` tokens are as they were.
  bool rest_is_untouched(std::int64_t tokens);

 private:
  ScalarType type_;
  std::int64_t heads_, head_size_, head_stride_, token_stride_;
  GuardedBuffer buffer_;
};

// A cache that is NaN throughout, with gaps between heads and blocks.
class TestCache {
 public:
  TestCache(const Problem& problem, std::int64_t blocks, GuardedBuffer::Place place, unsigned char fill = 0xff);
  const KvCache& cache() const { return cache_; }
  GuardedBuffer& buffer() { return buffer_; }

 private:
  KvCache cache_;
  GuardedBuffer buffer_;
};

// Writes tokens of `key` and `value` ([tokens, kv_heads, head_size]) into the slots.
void write(const Variant& variant, const Problem& problem, const KvCache& cache, const std::vector<float>& key,
           const std::vector<float>& value, const std::vector<std::int64_t>& slots, GuardedBuffer::Place place);

// The output of the whole problem, as `threads` threads would compute it: [query tokens, query_heads, head_size].
std::vector<float> attend(const Variant& variant, const Problem& problem, const Inputs& inputs, std::int64_t threads,
                          std::uint32_t seed);

// Fails where `actual` is not within the tolerance of its type of `expected`, each row by its own magnitude.
void check_close(const Problem& problem, const std::vector<float>& actual, const std::vector<double>& expected);

// As check_close, for all variants, on one and on `threads` threads, which must agree within a unit in the last place.
void check_problem(const Problem& problem, const Inputs& inputs, std::int64_t threads, std::uint32_t seed);

}  // namespace vllm_arm::tests
