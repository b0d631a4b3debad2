// SPDX-License-Identifier: Apache-2.0
// What the bindings of linear layers share.
#pragma once

#include <algorithm>
#include <optional>

#include "bindings/arguments.h"
#include "linear/quantise_table.h"

namespace vllm_arm::bindings {

inline constexpr std::int64_t kGrainElements = 16384;  // fewer than these are not worth waking another thread

inline void check_contiguous(const char* op, const char* name, const Tensor& tensor, std::int64_t dims) {
  check_cpu(op, name, tensor);
  STD_TORCH_CHECK(tensor.dim() == dims, op, ": ", name, " has ", tensor.dim(), " dimensions, expected ", dims);
  STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " is not contiguous");
}

inline void check_type_like(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  STD_TORCH_CHECK(tensor.scalar_type() == input.scalar_type(), op, ": ", name, " has dtype ",
                  torch::headeronly::toString(tensor.scalar_type()), ", expected that of input, ",
                  torch::headeronly::toString(input.scalar_type()));
}

inline const void* checked_vector(const char* op, const char* name, const std::optional<Tensor>& tensor,
                                  torch::headeronly::ScalarType type, std::int64_t size) {
  if (!tensor) return nullptr;
  check_contiguous(op, name, *tensor, 1);
  STD_TORCH_CHECK(tensor->scalar_type() == type, op, ": ", name, " has dtype ",
                  torch::headeronly::toString(tensor->scalar_type()), ", expected ", torch::headeronly::toString(type));
  STD_TORCH_CHECK(tensor->size(0) == size, op, ": ", name, " has ", tensor->size(0), " elements, expected ", size);
  return tensor->const_data_ptr();
}

// The rows that an op looks up, each checked to be below `n`.
inline const std::int64_t* checked_rows(const char* op, const Tensor& indices, const Tensor& output, std::int64_t n) {
  check_contiguous(op, "indices", indices, 1);
  STD_TORCH_CHECK(indices.scalar_type() == torch::headeronly::ScalarType::Long, op, ": indices has dtype ",
                  torch::headeronly::toString(indices.scalar_type()), ", expected int64");
  STD_TORCH_CHECK(output.size(0) == indices.size(0), op, ": output has ", output.size(0), " rows, expected ",
                  indices.size(0));
  const auto* rows = static_cast<const std::int64_t*>(indices.const_data_ptr());
  for (std::int64_t i = 0; i < indices.size(0); ++i) {
    STD_TORCH_CHECK(rows[i] >= 0 && rows[i] < n, op, ": index ", rows[i], " is not below ", n);
  }
  return rows;
}

inline QuantiseKernel quantise_kernel() {
  static const auto& selected = select_kernel(kQuantiseTable);
  return selected.kernel;
}

// How a linear layer quantises `input`, [rows, k]; the caller gives the rows and where they go.
inline QuantiseArguments quantisation(const char* op, const Tensor& input, const std::optional<Tensor>& static_scale,
                                      const std::optional<Tensor>& static_zero_point) {
  QuantiseArguments arguments{};
  arguments.type = scalar_type(op, "input", input);
  arguments.size = input.size(1);
  arguments.static_scale = static_cast<const float*>(
      checked_vector(op, "static_scale", static_scale, torch::headeronly::ScalarType::Float, 1));
  arguments.static_zero_point = static_cast<const std::int32_t*>(
      checked_vector(op, "static_zero_point", static_zero_point, torch::headeronly::ScalarType::Int, 1));
  return arguments;
}

}  // namespace vllm_arm::bindings
