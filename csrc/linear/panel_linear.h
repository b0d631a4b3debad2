// SPDX-License-Identifier: Apache-2.0
// Linear layers by kernels of our own, on weights stored in panels of a few outputs.
//
// A panel holds kPanelOutputs rows of the weight [n, k] as [k / run][kPanelOutputs][run]: `run` inputs side by side, as
// many as the variant's instructions take at once. The rows that it is multiplied with are packed in the same way, in
// blocks of up to kBlockRows rows: [k / run][rows][run], where a variant may add rows of zeros. k is filled up with
// zeros to padded_inputs().
#pragma once

#include <cstdint>

#include "isa/scalar_types.h"
#include "linear/quantise.h"

namespace vllm_arm {

inline constexpr std::int64_t kPanelOutputs = 12;
inline constexpr std::int64_t kBlockRows = 8;

// The elements of a weight and of the rows that it is multiplied with.
enum class PanelType : std::uint8_t { bfloat16, float16, int8 };

constexpr std::int64_t element_bytes(PanelType type) { return type == PanelType::int8 ? 1 : 2; }

// `k` rounded up to a whole number of 16-byte vectors.
constexpr std::int64_t padded_inputs(PanelType type, std::int64_t k) {
  const std::int64_t step = 16 / element_bytes(type);
  return (k + step - 1) / step * step;
}

constexpr std::int64_t panel_count(std::int64_t n) { return (n + kPanelOutputs - 1) / kPanelOutputs; }
constexpr std::int64_t block_count(std::int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

constexpr std::int64_t panel_bytes(PanelType type, std::int64_t k) {
  return kPanelOutputs * padded_inputs(type, k) * element_bytes(type);
}

// How a variant stores elements of a type.
struct PanelFormat {
  std::int64_t run;
  std::int64_t input_bytes;  // of an element of packed rows

  constexpr std::int64_t block_bytes(PanelType type, std::int64_t k) const {
    return kBlockRows * padded_inputs(type, k) * input_bytes;
  }
};

// Rows to be packed.
struct PanelRows {
  const void* input;  // [rows, k] of `type`
  char* packed;       // block_bytes() for each block
  std::int64_t rows;
  std::int64_t k;
  PanelType type;
};

// output[m, n] = sum over k of rows[m, k] * weight[n, k] + bias[n], summed in fp32 and rounded once. For int8 the sum
// is exact, and it is (sum - zero_points[m] * weight_sums[n]) * (scales[m] * weight_scales[n]) + bias[n], rounded once.
struct PanelProduct {
  const char* rows;    // packed
  const char* weight;  // packed
  const void* bias;    // [n] of `output_type`; null: none
  void* output;        // [rows, n] of `output_type`
  std::int64_t row_count;
  std::int64_t n;
  std::int64_t k;
  PanelType type;
  ScalarType output_type;  // other than the type of the operands for int8 only

  // For int8.
  const float* scales;              // one for each row
  const std::int32_t* zero_points;  // one for each row; null: all 0
  const float* weight_scales;       // [n]
  const std::int32_t* weight_sums;  // [n], the sum of each row of the weight; read where zero_points is given
};

// What a variant has. Blocks and panels are ranges.
struct PanelLinearKernel {
  PanelFormat (*format)(PanelType);
  void (*pack_rows)(const PanelRows&, std::int64_t block_begin, std::int64_t block_end);
  // Quantises `rows` rows as quantise does and packs them in one pass, `output` being of no use; false where there is
  // no such short cut for what is to be quantised.
  bool (*quantise_rows)(const QuantiseArguments&, std::int64_t rows, char* packed, std::int64_t block_begin,
                        std::int64_t block_end);
  void (*multiply)(const PanelProduct&, std::int64_t block_begin, std::int64_t block_end, std::int64_t panel_begin,
                   std::int64_t panel_end);
};

// Packs panels of `weight` ([n, k], rows `row_bytes` apart) into `packed`, panel_bytes() for each of panel_count(n).
void pack_panels(const void* weight, std::int64_t row_bytes, std::int64_t n, std::int64_t k, PanelType type,
                 const PanelFormat& format, char* packed, std::int64_t panel_begin, std::int64_t panel_end);

// Copies row `row` of a packed weight to `output`, k elements.
void unpack_panel_row(const char* packed, std::int64_t row, std::int64_t k, PanelType type, const PanelFormat& format,
                      void* output);

}  // namespace vllm_arm
