// SPDX-License-Identifier: Apache-2.0
#include "linear/panel_matrix.h"
#include "linear/panel_quantise.h"
#include "linear/panel_vector.h"

namespace vllm_arm {

// There are no matrix instructions for fp16, which is multiplied as the neon variant does it.
PanelFormat panel_format_bf16(PanelType type) {
  if (type == PanelType::float16) return {1, sizeof(float)};
  return {kRunBytes / element_bytes(type), element_bytes(type)};
}

void pack_panel_rows_bf16(const PanelRows& rows, std::int64_t block_begin, std::int64_t block_end) {
  if (rows.type == PanelType::float16) return pack_vector_rows<Float16>(rows, block_begin, block_end);
  pack_matrix_rows(rows, block_begin, block_end);
}

bool quantise_panel_rows_bf16(const QuantiseArguments& arguments, std::int64_t rows, char* packed,
                              std::int64_t block_begin, std::int64_t block_end) {
  const bool is_dynamic = arguments.static_scale == nullptr && arguments.zero_points == nullptr;
  if (arguments.type != ScalarType::bfloat16 || !is_dynamic) return false;
  quantise_matrix_rows(arguments, rows, packed, block_begin, block_end);
  return true;
}

void panel_linear_bf16(const PanelProduct& product, std::int64_t block_begin, std::int64_t block_end,
                       std::int64_t panel_begin, std::int64_t panel_end) {
  const auto run = [&](auto multiply) { multiply(product, block_begin, block_end, panel_begin, panel_end); };
  switch (product.type) {
    case PanelType::bfloat16: return run(multiply_matrix<BFloat16Matrix, BFloat16>);
    case PanelType::float16: return run(multiply_vectors<WidenedVectors<Float16>, Float16>);
    case PanelType::int8: break;
  }
  switch (product.output_type) {
    case ScalarType::bfloat16: return run(multiply_matrix<Int8Matrix, BFloat16>);
    case ScalarType::float16: return run(multiply_matrix<Int8Matrix, Float16>);
    case ScalarType::float32: return run(multiply_matrix<Int8Matrix, float>);
  }
}

}  // namespace vllm_arm
