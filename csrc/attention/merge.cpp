// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>

#include "attention/paged_attention.h"

namespace vllm_arm {
namespace {

constexpr float kLog2E = 1.44269504088896340736F;

template <typename Element>
void merge(const PagedAttentionArguments& arguments, const MergeItem& item) {
  const std::int64_t head_size = arguments.cache.head_size, group_size = arguments.group_size();
  const std::int64_t rows = item.row_end - item.row_begin;
  const std::int64_t first_token = arguments.batch.query_starts[item.sequence];
  float sums[kMaximumHeadSize];
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t token = first_token + (item.row_begin + row) / group_size;
    const std::int64_t head = item.kv_head * group_size + (item.row_begin + row) % group_size;
    const float sink =
        arguments.sinks != nullptr ? arguments.sinks[head] * kLog2E : -std::numeric_limits<float>::infinity();
    float maximum = sink;
    for (std::int64_t part = 0; part < item.parts; ++part) {
      const float value = arguments.partial_maximum[item.partial_row + part * rows + row];
      if (value > maximum || value != value) maximum = value;
    }
    // A part in which the row saw no key has the maximum -inf, and no weight.
    const auto weight = [&](float value) {
      return value == -std::numeric_limits<float>::infinity() ? 0.0F : std::exp2(value - maximum);
    };
    float total = weight(sink);
    std::fill_n(sums, head_size, 0.0F);
    for (std::int64_t part = 0; part < item.parts; ++part) {
      const std::int64_t partial_row = item.partial_row + part * rows + row;
      const float scale = weight(arguments.partial_maximum[partial_row]);
      if (scale == 0.0F) continue;
      total += scale * arguments.partial_sum[partial_row];
      const float* partial = arguments.partial_output + partial_row * head_size;
      for (std::int64_t i = 0; i < head_size; ++i) sums[i] += scale * partial[i];
    }
    const float inverse = total == 0.0F ? 0.0F : 1.0F / total;
    auto* output = reinterpret_cast<Element*>(arguments.output_row(token, head));
    for (std::int64_t i = 0; i < head_size; ++i) {
      Element element;
      from_float(sums[i] * inverse, element);
      output[i] = element;
    }
  }
}

}  // namespace

void merge_partials(const PagedAttentionArguments& arguments, const MergeItem& item) {
  switch (arguments.cache.scalar_type) {
    case ScalarType::bfloat16: return merge<BFloat16>(arguments, item);
    case ScalarType::float16: return merge<Float16>(arguments, item);
    case ScalarType::float32: return merge<float>(arguments, item);
  }
}

}  // namespace vllm_arm
