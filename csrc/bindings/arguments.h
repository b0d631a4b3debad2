// SPDX-License-Identifier: Apache-2.0
// What the bindings share: checks of tensors, with errors that name the op and the argument.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "isa/scalar_types.h"

namespace vllm_arm::bindings {

using torch::stable::Tensor;

inline void check_cpu(const char* op, const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_cpu(), op, ": ", name, " is not on the CPU");
}

inline ScalarType scalar_type(const char* op, const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case torch::headeronly::ScalarType::BFloat16: return ScalarType::bfloat16;
    case torch::headeronly::ScalarType::Half: return ScalarType::float16;
    case torch::headeronly::ScalarType::Float: return ScalarType::float32;
    default:
      STD_TORCH_CHECK(false, op, ": ", name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()),
                      ", expected bfloat16, float16 or float32");
  }
}

}  // namespace vllm_arm::bindings
