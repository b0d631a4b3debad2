// SPDX-License-Identifier: Apache-2.0
// The ops of attention over a paged key-value cache.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "attention/divide_tokens.h"
#include "attention/paged_attention_table.h"
#include "bindings/arguments.h"
#include "host/thread_scratch.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::parallel_for;
using vllm_arm::Batch;
using vllm_arm::KvCache;
using vllm_arm::KvCacheType;
using vllm_arm::bindings::check_cpu;
using vllm_arm::bindings::scalar_type;
using vllm_arm::bindings::Tensor;

constexpr std::int64_t kSmallestWrite = 65536;  // bytes: less is not worth waking another thread

KvCacheType parse_kv_cache_dtype(const char* op, const std::string& name) {
  if (name == "auto" || name == "bfloat16" || name == "float16") return KvCacheType::same;
  if (name == "fp8" || name == "fp8_e4m3") return KvCacheType::fp8_e4m3;
  if (name == "fp8_e5m2") return KvCacheType::fp8_e5m2;
  if (name == "int8_per_token_head") return KvCacheType::int8;
  STD_TORCH_CHECK(false, op, ": kv_cache_dtype is '", name,
                  "', expected auto, bfloat16, float16, fp8, fp8_e4m3, fp8_e5m2 or int8_per_token_head");
}

// A tensor [tokens, heads, head_size] with unit stride in its last dimension.
void check_heads(const char* op, const char* name, const Tensor& tensor) {
  check_cpu(op, name, tensor);
  STD_TORCH_CHECK(tensor.dim() == 3, op, ": ", name, " has ", tensor.dim(),
                  " dimensions, expected [tokens, heads, head_size]");
  STD_TORCH_CHECK(tensor.size(2) <= 1 || tensor.stride(2) == 1, op, ": ", name, " has stride ", tensor.stride(2),
                  " in its last dimension, expected 1");
}

template <typename Number>
const Number* vector_of(const char* op, const char* name, const Tensor& tensor, ScalarType type, std::int64_t size) {
  check_cpu(op, name, tensor);
  STD_TORCH_CHECK(tensor.scalar_type() == type, op, ": ", name, " has dtype ",
                  torch::headeronly::toString(tensor.scalar_type()), ", expected ", torch::headeronly::toString(type));
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == size && tensor.is_contiguous(), op, ": ", name,
                  " must be contiguous with shape [", size, "]");
  return static_cast<const Number*>(tensor.const_data_ptr());
}

KvCache make_cache(const char* op, const Tensor& tensor, const Tensor& heads, std::int64_t kv_heads,
                   const std::string& dtype, double key_scale, double value_scale) {
  check_cpu(op, "kv_cache", tensor);
  KvCache cache{};
  cache.type = parse_kv_cache_dtype(op, dtype);
  cache.scalar_type = scalar_type(op, "query, key or value", heads);
  STD_TORCH_CHECK(tensor.dim() == 4, op, ": kv_cache has ", tensor.dim(),
                  " dimensions, expected [blocks, kv_heads, block_size, content]");
  cache.blocks = tensor.size(0);
  cache.kv_heads = tensor.size(1);
  cache.block_size = tensor.size(2);
  cache.head_size = heads.size(2);
  STD_TORCH_CHECK(cache.kv_heads == kv_heads, op, ": kv_cache has ", cache.kv_heads, " heads, expected ", kv_heads);
  STD_TORCH_CHECK(cache.block_size > 0 && cache.block_size % vllm_arm::kPanelTokens == 0, op,
                  ": kv_cache has blocks of ", cache.block_size, " tokens, expected a multiple of ",
                  vllm_arm::kPanelTokens);
  STD_TORCH_CHECK(cache.head_size > 0 && cache.head_size % vllm_arm::kHeadSizeStep == 0 &&
                      cache.head_size <= vllm_arm::kMaximumHeadSize,
                  op, ": the head size is ", cache.head_size, ", expected a multiple of ", vllm_arm::kHeadSizeStep,
                  " up to ", vllm_arm::kMaximumHeadSize);
  const auto element_size = static_cast<std::int64_t>(tensor.element_size());
  if (cache.type == KvCacheType::same) {
    STD_TORCH_CHECK(tensor.scalar_type() == heads.scalar_type(), op, ": kv_cache has dtype ",
                    torch::headeronly::toString(tensor.scalar_type()), ", expected ",
                    torch::headeronly::toString(heads.scalar_type()));
  } else {
    STD_TORCH_CHECK(element_size == 1, op, ": kv_cache has elements of ", element_size, " bytes, expected 1 for ",
                    dtype);
  }
  const std::int64_t content = cache.interior_bytes() / cache.block_size / element_size;
  STD_TORCH_CHECK(tensor.size(3) == content && tensor.stride(3) == 1 && tensor.stride(2) == content, op,
                  ": the last two dimensions of kv_cache must be contiguous with shape [", cache.block_size, ", ",
                  content, "]");
  cache.block_stride = tensor.stride(0) * element_size;
  cache.head_stride = tensor.stride(1) * element_size;
  const bool has_tensor_scale = cache.type == KvCacheType::fp8_e4m3 || cache.type == KvCacheType::fp8_e5m2;
  STD_TORCH_CHECK(!has_tensor_scale || (key_scale > 0 && value_scale > 0), op,
                  ": key_scale and value_scale must be positive, got ", key_scale, " and ", value_scale);
  cache.key_scale = has_tensor_scale ? static_cast<float>(key_scale) : 1;
  cache.value_scale = has_tensor_scale ? static_cast<float>(value_scale) : 1;
  cache.data = static_cast<char*>(tensor.mutable_data_ptr());
  return cache;
}

void write_kv_cache(Tensor key, Tensor value, Tensor kv_cache, Tensor slot_mapping, std::string kv_cache_dtype,
                    double key_scale, double value_scale) {
  constexpr const char* kOp = "write_kv_cache";
  check_heads(kOp, "key", key);
  check_heads(kOp, "value", value);
  STD_TORCH_CHECK(key.sizes().equals(value.sizes()) && key.scalar_type() == value.scalar_type(), kOp,
                  ": value must have key's shape and dtype");
  const std::int64_t heads = key.size(1);
  vllm_arm::WriteKvCacheArguments arguments{};
  arguments.cache = make_cache(kOp, kv_cache, key, heads, kv_cache_dtype, key_scale, value_scale);
  const KvCache& cache = arguments.cache;
  check_cpu(kOp, "slot_mapping", slot_mapping);
  const std::int64_t mapped = slot_mapping.dim() == 1 ? slot_mapping.size(0) : key.size(0);
  arguments.slot_mapping = vector_of<std::int64_t>(kOp, "slot_mapping", slot_mapping, ScalarType::Long, mapped);
  const std::int64_t tokens = std::min(mapped, key.size(0));
  const std::int64_t slots = cache.blocks * cache.block_size;
  for (std::int64_t i = 0; i < tokens; ++i) {
    STD_TORCH_CHECK(arguments.slot_mapping[i] < slots, kOp, ": slot_mapping[", i, "] is ", arguments.slot_mapping[i],
                    ", expected less than ", slots);
  }
  if (tokens == 0 || heads == 0) return;
  const auto bytes = static_cast<std::int64_t>(key.element_size());
  arguments.key = key.const_data_ptr();
  arguments.value = value.const_data_ptr();
  arguments.key_token_stride = key.stride(0) * bytes;
  arguments.key_head_stride = key.stride(1) * bytes;
  arguments.value_token_stride = value.stride(0) * bytes;
  arguments.value_head_stride = value.stride(1) * bytes;

  static const auto kernel = vllm_arm::select_kernel(vllm_arm::kWriteKvCacheTable).kernel;
  if (2 * tokens * heads * cache.head_size * bytes < kSmallestWrite) {
    kernel(arguments, 0, tokens, 0, heads);
    return;
  }
  const std::int64_t threads = torch::stable::get_num_threads();
  const std::vector<std::int64_t> begins =
      vllm_arm::divide_tokens(arguments.slot_mapping, tokens, (threads + heads - 1) / heads);
  const auto parts = static_cast<std::int64_t>(begins.size()) - 1;
  parallel_for(0, heads * parts, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t head = i / parts, part = i % parts;
      kernel(arguments, begins[part], begins[part + 1], head, head + 1);
    }
  });
}

Batch make_batch(const char* op, const Tensor& query_start_loc, const Tensor& seq_lens, bool causal,
                 std::int64_t sliding_window, const std::optional<Tensor>& dynamic_causal) {
  STD_TORCH_CHECK(seq_lens.dim() == 1, op, ": seq_lens has ", seq_lens.dim(), " dimensions, expected 1");
  const std::int64_t sequences = seq_lens.size(0);
  Batch batch{};
  batch.sequences = sequences;
  batch.query_starts = vector_of<std::int32_t>(op, "query_start_loc", query_start_loc, ScalarType::Int, sequences + 1);
  batch.key_lengths = vector_of<std::int32_t>(op, "seq_lens", seq_lens, ScalarType::Int, sequences);
  batch.causal = causal;
  if (dynamic_causal) {
    batch.dynamic_causal = vector_of<std::int32_t>(op, "dynamic_causal", *dynamic_causal, ScalarType::Int, sequences);
  }
  batch.sliding_window = sliding_window;
  STD_TORCH_CHECK(batch.query_starts[0] == 0, op, ": query_start_loc begins with ", batch.query_starts[0],
                  ", expected 0");
  for (std::int64_t i = 0; i < sequences; ++i) {
    STD_TORCH_CHECK(batch.query_tokens(i) >= 0 && batch.key_lengths[i] >= 0, op, ": sequence ", i, " has ",
                    batch.query_tokens(i), " query tokens and ", batch.key_lengths[i], " keys");
  }
  return batch;
}

// A schedule as int32: this, then where each thread's items begin, the items, and the merges.
struct Header {
  std::int32_t threads, items, merges, partial_rows, sequences, query_heads, kv_heads, query_tokens, lengths;
};

// Tells batches apart by their lengths (FNV-1a, on whole numbers).
std::int32_t hash_lengths(const Batch& batch) {
  std::uint32_t hash = 2166136261;
  const auto add = [&](std::int32_t number) { hash = (hash ^ static_cast<std::uint32_t>(number)) * 16777619; };
  for (std::int64_t i = 0; i < batch.sequences; ++i) {
    add(batch.query_starts[i]);
    add(batch.key_lengths[i]);
  }
  return static_cast<std::int32_t>(hash);
}

template <typename Record>
std::int64_t numbers(std::int64_t count) {
  static_assert(sizeof(Record) % sizeof(std::int32_t) == 0);
  return count * static_cast<std::int64_t>(sizeof(Record) / sizeof(std::int32_t));
}

std::int64_t length_of(const Header& header) {
  return numbers<Header>(1) + header.threads + 1 + numbers<vllm_arm::WorkItem>(header.items) +
         numbers<vllm_arm::MergeItem>(header.merges);
}

Tensor schedule_attention(Tensor query_start_loc, Tensor seq_lens, std::int64_t num_heads, std::int64_t num_kv_heads,
                          bool causal, std::int64_t sliding_window, std::optional<Tensor> dynamic_causal,
                          std::int64_t threads) {
  constexpr const char* kOp = "schedule_attention";
  STD_TORCH_CHECK(num_kv_heads > 0 && num_heads >= 0 && num_heads % num_kv_heads == 0, kOp, ": num_heads is ",
                  num_heads, ", expected a multiple of num_kv_heads, ", num_kv_heads);
  const Batch batch = make_batch(kOp, query_start_loc, seq_lens, causal, sliding_window, dynamic_causal);
  if (threads <= 0) threads = torch::stable::get_num_threads();
  const vllm_arm::Schedule schedule = vllm_arm::make_schedule(batch, num_heads, num_kv_heads, threads);
  const auto narrow = [](std::int64_t number) { return static_cast<std::int32_t>(number); };
  const Header header{narrow(threads),
                      narrow(static_cast<std::int64_t>(schedule.items.size())),
                      narrow(static_cast<std::int64_t>(schedule.merges.size())),
                      narrow(schedule.partial_rows),
                      narrow(batch.sequences),
                      narrow(num_heads),
                      narrow(num_kv_heads),
                      batch.query_starts[batch.sequences],
                      hash_lengths(batch)};
  Tensor result = torch::stable::new_empty(seq_lens, {length_of(header)}, ScalarType::Int);
  auto* destination = static_cast<char*>(result.mutable_data_ptr());
  const auto append = [&](const void* source, std::size_t bytes) {
    if (bytes > 0) std::memcpy(destination, source, bytes);
    destination += bytes;
  };
  append(&header, sizeof header);
  append(schedule.thread_begins.data(), schedule.thread_begins.size() * sizeof(std::int32_t));
  append(schedule.items.data(), schedule.items.size() * sizeof(vllm_arm::WorkItem));
  append(schedule.merges.data(), schedule.merges.size() * sizeof(vllm_arm::MergeItem));
  return result;
}

void check_block_table(const char* op, const Batch& batch, const KvCache& cache, const std::int32_t* block_table,
                       std::int64_t stride, std::int64_t width) {
  for (std::int64_t i = 0; i < batch.sequences; ++i) {
    const std::int64_t used = (batch.key_lengths[i] + cache.block_size - 1) / cache.block_size;
    STD_TORCH_CHECK(used <= width, op, ": sequence ", i, " has ", batch.key_lengths[i], " keys in ", used,
                    " blocks, but block_table has ", width, " columns");
    const std::int32_t* blocks = block_table + i * stride;
    for (std::int64_t k = 0; k < used; ++k) {
      STD_TORCH_CHECK(blocks[k] >= 0 && blocks[k] < cache.blocks, op, ": block_table[", i, ", ", k, "] is ", blocks[k],
                      ", expected 0 to ", cache.blocks - 1);
    }
  }
}

void paged_attention(Tensor output, Tensor query, Tensor kv_cache, Tensor schedule, Tensor query_start_loc,
                     Tensor seq_lens, Tensor block_table, double scale, bool causal, std::int64_t sliding_window,
                     std::optional<Tensor> dynamic_causal, std::optional<Tensor> alibi_slopes, double softcap,
                     std::optional<Tensor> sinks, std::string kv_cache_dtype, double key_scale, double value_scale) {
  constexpr const char* kOp = "paged_attention";
  check_heads(kOp, "query", query);
  check_heads(kOp, "output", output);
  const std::int64_t heads = query.size(1);
  STD_TORCH_CHECK(output.sizes().equals(query.sizes()) && output.scalar_type() == query.scalar_type(), kOp,
                  ": output must have query's shape and dtype");
  vllm_arm::PagedAttentionArguments arguments{};
  const std::int64_t kv_heads = kv_cache.dim() == 4 ? kv_cache.size(1) : 0;
  arguments.cache = make_cache(kOp, kv_cache, query, kv_heads, kv_cache_dtype, key_scale, value_scale);
  STD_TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, kOp, ": query has ", heads,
                  " heads, expected a multiple of kv_cache's, ", kv_heads);
  arguments.batch = make_batch(kOp, query_start_loc, seq_lens, causal, sliding_window, dynamic_causal);
  const Batch& batch = arguments.batch;
  const KvCache& cache = arguments.cache;

  Header header{};
  check_cpu(kOp, "schedule", schedule);
  STD_TORCH_CHECK(schedule.scalar_type() == ScalarType::Int && schedule.dim() == 1 && schedule.is_contiguous() &&
                      schedule.numel() >= numbers<Header>(1),
                  kOp, ": schedule is not one of schedule_attention's");
  const auto* numbers_begin = static_cast<const std::int32_t*>(schedule.const_data_ptr());
  std::memcpy(&header, numbers_begin, sizeof header);
  STD_TORCH_CHECK(schedule.numel() == length_of(header) && header.sequences == batch.sequences &&
                      header.query_heads == heads && header.kv_heads == cache.kv_heads &&
                      header.query_tokens == batch.query_starts[batch.sequences] &&
                      header.lengths == hash_lengths(batch),
                  kOp, ": schedule was made for another batch");
  STD_TORCH_CHECK(header.query_tokens <= query.size(0), kOp, ": query has ", query.size(0),
                  " tokens, query_start_loc ends with ", header.query_tokens);
  const auto* thread_begins = numbers_begin + numbers<Header>(1);
  const auto* items = reinterpret_cast<const vllm_arm::WorkItem*>(thread_begins + header.threads + 1);
  const auto* merges = reinterpret_cast<const vllm_arm::MergeItem*>(items + header.items);

  check_cpu(kOp, "block_table", block_table);
  STD_TORCH_CHECK(block_table.scalar_type() == ScalarType::Int && block_table.dim() == 2 &&
                      block_table.size(0) >= batch.sequences &&
                      (block_table.size(1) <= 1 || block_table.stride(1) == 1),
                  kOp, ": block_table must be int32 with shape [", batch.sequences, ", blocks]");
  arguments.block_table = static_cast<const std::int32_t*>(block_table.const_data_ptr());
  arguments.block_table_stride = block_table.stride(0);
  check_block_table(kOp, batch, cache, arguments.block_table, arguments.block_table_stride, block_table.size(1));

  const auto bytes = static_cast<std::int64_t>(query.element_size());
  arguments.query = query.const_data_ptr();
  arguments.output = output.mutable_data_ptr();
  arguments.query_token_stride = query.stride(0) * bytes;
  arguments.query_head_stride = query.stride(1) * bytes;
  arguments.output_token_stride = output.stride(0) * bytes;
  arguments.output_head_stride = output.stride(1) * bytes;
  arguments.query_heads = heads;
  arguments.scale = static_cast<float>(scale);
  arguments.softcap = static_cast<float>(softcap);
  if (alibi_slopes) {
    arguments.alibi_slopes = vector_of<float>(kOp, "alibi_slopes", *alibi_slopes, ScalarType::Float, heads);
  }
  if (sinks) arguments.sinks = vector_of<float>(kOp, "sinks", *sinks, ScalarType::Float, heads);

  std::optional<Tensor> partials;
  if (header.partial_rows > 0) {
    const std::int64_t rows = header.partial_rows;
    partials = torch::stable::new_empty(query, {rows * (cache.head_size + 2)}, ScalarType::Float);
    arguments.partial_output = static_cast<float*>(partials->mutable_data_ptr());
    arguments.partial_maximum = arguments.partial_output + rows * cache.head_size;
    arguments.partial_sum = arguments.partial_maximum + rows;
  }
  static const auto kernel = vllm_arm::select_kernel(vllm_arm::kPagedAttentionTable).kernel;
  const auto scratch_bytes = static_cast<std::size_t>(vllm_arm::paged_attention_scratch_bytes(cache.head_size));
  parallel_for(0, header.threads, 1, [&](std::int64_t begin, std::int64_t end) {
    auto* scratch = static_cast<char*>(vllm_arm::thread_scratch(scratch_bytes));
    for (std::int64_t i = begin; i < end; ++i) {
      kernel(arguments, items + thread_begins[i], thread_begins[i + 1] - thread_begins[i], scratch);
    }
  });
  if (header.merges == 0) return;
  parallel_for(0, header.merges, 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) vllm_arm::merge_partials(arguments, merges[i]);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_arm, library) {
  library.def(
      "write_kv_cache(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping, str kv_cache_dtype, "
      "float key_scale, float value_scale) -> ()");
  library.def(
      "schedule_attention(Tensor query_start_loc, Tensor seq_lens, int num_heads, int num_kv_heads, bool causal, "
      "int sliding_window, Tensor? dynamic_causal, int threads) -> Tensor");
  library.def(
      "paged_attention(Tensor(a!) output, Tensor query, Tensor kv_cache, Tensor schedule, Tensor query_start_loc, "
      "Tensor seq_lens, Tensor block_table, float scale, bool causal, int sliding_window, Tensor? dynamic_causal, "
      "Tensor? alibi_slopes, float softcap, Tensor? sinks, str kv_cache_dtype, float key_scale, float value_scale) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_arm, CPU, library) {
  library.impl("write_kv_cache", TORCH_BOX(&write_kv_cache));
  library.impl("schedule_attention", TORCH_BOX(&schedule_attention));
  library.impl("paged_attention", TORCH_BOX(&paged_attention));
}
