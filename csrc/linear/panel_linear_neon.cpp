// SPDX-License-Identifier: Apache-2.0
#include "linear/panel_vector.h"

namespace vllm_arm {

PanelFormat panel_format_neon(PanelType type) {
  return type == PanelType::int8 ? PanelFormat{4, 1} : PanelFormat{1, sizeof(float)};
}

void pack_panel_rows_neon(const PanelRows& rows, std::int64_t block_begin, std::int64_t block_end) {
  switch (rows.type) {
    case PanelType::bfloat16: return pack_vector_rows<BFloat16>(rows, block_begin, block_end);
    case PanelType::float16: return pack_vector_rows<Float16>(rows, block_begin, block_end);
    case PanelType::int8: return pack_vector_rows<std::int8_t>(rows, block_begin, block_end);
  }
}

bool quantise_panel_rows_neon(const QuantiseArguments&, std::int64_t, char*, std::int64_t, std::int64_t) {
  return false;
}

void panel_linear_neon(const PanelProduct& product, std::int64_t block_begin, std::int64_t block_end,
                       std::int64_t panel_begin, std::int64_t panel_end) {
  const auto run = [&](auto multiply) { multiply(product, block_begin, block_end, panel_begin, panel_end); };
  switch (product.type) {
    case PanelType::bfloat16: return run(multiply_vectors<WidenedVectors<BFloat16>, BFloat16>);
    case PanelType::float16: return run(multiply_vectors<WidenedVectors<Float16>, Float16>);
    case PanelType::int8: break;
  }
  switch (product.output_type) {
    case ScalarType::bfloat16: return run(multiply_vectors<Int8Vectors, BFloat16>);
    case ScalarType::float16: return run(multiply_vectors<Int8Vectors, Float16>);
    case ScalarType::float32: return run(multiply_vectors<Int8Vectors, float>);
  }
}

}  // namespace vllm_arm
