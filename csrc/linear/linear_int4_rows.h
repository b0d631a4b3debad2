// SPDX-License-Identifier: Apache-2.0
// What every variant of linear_int4 shares: quantised activations in blocks, and what is read of them.
#pragma once

#include <cmath>
#include <cstring>

#include "linear/linear_int4.h"
#include "linear/quantise_rows.h"

namespace vllm_arm {

// In an anonymous namespace: each variant keeps its own copy, compiled for its own instruction set.
namespace {

constexpr std::int64_t kInterleave = 8;  // codes of a row that lie together

// Where the sums over groups of `row` begin; they are there only where the weight has zero points.
float* group_sums(const LinearInt4Arguments& arguments, std::int64_t block_rows, std::int64_t row) {
  std::byte* end_of_blocks = arguments.activations + activation_bytes(arguments.shape, arguments.rows, block_rows) -
                             arguments.rows * arguments.shape.groups() * 4;
  return reinterpret_cast<float*>(end_of_blocks) + row * arguments.shape.groups();
}

// convert(row, size, mapping, codes, stride) writes eight codes, then eight more `stride` bytes further.
// find_corrections(codes, k, block_rows, corrections) sums -8 * code for each row of a block, over the codes that meet
// low halves.
template <typename Element, typename FindRange, typename Convert, typename FindCorrections>
void quantise_blocks(const LinearInt4Arguments& arguments, std::int64_t block_rows, std::int64_t block_begin,
                     std::int64_t block_end, FindRange find_range, Convert convert, FindCorrections find_corrections) {
  const std::int64_t k = arguments.shape.k, stride = block_rows * kInterleave;
  for (std::int64_t block = block_begin; block < block_end; ++block) {
    std::byte* begin = arguments.activations + block * activation_block_bytes(arguments.shape, block_rows);
    auto* negated_zero_points = reinterpret_cast<std::int32_t*>(begin + block_rows * k);
    auto* scales = reinterpret_cast<float*>(negated_zero_points + block_rows);
    for (std::int64_t i = 0; i < block_rows; ++i) {
      const std::int64_t row = block * block_rows + i;
      auto* codes = reinterpret_cast<std::int8_t*>(begin) + i * kInterleave;
      Mapping mapping{};  // of rows that only fill the last block
      if (row < arguments.rows) {
        const Element* input = static_cast<const Element*>(arguments.input) + row * k;
        const Range range = find_range(input, k);
        const bool is_finite = std::isfinite(range.smallest) && std::isfinite(range.largest);
        mapping = is_finite ? map_asymmetric(range) : Mapping{std::numeric_limits<float>::quiet_NaN(), 0.0F, 0};
        if (!std::isnan(mapping.scale)) convert(input, k, mapping, codes, stride);
      }
      if (row >= arguments.rows || std::isnan(mapping.scale)) {
        for (std::int64_t j = 0; j < k; j += kInterleave) std::memset(codes + j * block_rows, 0, kInterleave);
      }
      negated_zero_points[i] = -mapping.zero_point;
      scales[i] = mapping.scale;
      if (!arguments.shape.has_zero_points || row >= arguments.rows) continue;
      const std::int64_t group_size = arguments.shape.group_size;
      float* sums = group_sums(arguments, block_rows, row);
      for (std::int64_t group = 0; group < arguments.shape.groups(); ++group) {
        std::int32_t sum = 0;
        for (std::int64_t j = group * group_size; j < (group + 1) * group_size; j += kInterleave) {
          for (std::int64_t lane = 0; lane < kInterleave; ++lane) sum += codes[j * block_rows + lane];
        }
        sums[group] =
            static_cast<float>(sum - static_cast<std::int32_t>(group_size) * mapping.zero_point) * mapping.scale;
      }
    }
    if (arguments.shape.has_groups()) continue;
    auto* corrections = reinterpret_cast<std::int32_t*>(scales + block_rows);
    find_corrections(reinterpret_cast<const std::int8_t*>(begin), k, block_rows, corrections);
  }
}

template <typename FindRange, typename Convert, typename FindCorrections>
void quantise_blocks(const LinearInt4Arguments& arguments, std::int64_t block_rows, std::int64_t block_begin,
                     std::int64_t block_end, FindRange find_range, Convert convert, FindCorrections find_corrections) {
  const auto run = [&]<typename Element>(Element) {
    quantise_blocks<Element>(arguments, block_rows, block_begin, block_end, find_range, convert, find_corrections);
  };
  switch (arguments.type) {
    case ScalarType::bfloat16: return run(BFloat16{});
    case ScalarType::float16: return run(Float16{});
    case ScalarType::float32: return run(float{});
  }
}

}  // namespace
}  // namespace vllm_arm
