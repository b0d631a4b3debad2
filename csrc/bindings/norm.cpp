// SPDX-License-Identifier: Apache-2.0
// The ops of RMSNorm.
#include <algorithm>
#include <optional>

#include "bindings/arguments.h"
#include "norm/rms_norm_table.h"

namespace {

using vllm_arm::RowLayout;
using vllm_arm::ScalarType;
using vllm_arm::bindings::check_cpu;
using vllm_arm::bindings::scalar_type;
using vllm_arm::bindings::Tensor;

constexpr std::int64_t kGrainElements = 16384;  // fewer than these are not worth waking another thread

// Tensors of 1 to 3 dimensions as rows: [hidden], [rows, hidden] or [groups, rows, hidden].
struct Rows {
  std::int64_t groups, rows_per_group, hidden_size;
  RowLayout layout;
};

Rows rows_of(const char* op, const char* name, const Tensor& tensor) {
  check_cpu(op, name, tensor);
  const std::int64_t dims = tensor.dim();
  STD_TORCH_CHECK(dims >= 1 && dims <= 3, op, ": ", name, " has ", dims, " dimensions, expected 1 to 3");
  const std::int64_t hidden_size = tensor.size(dims - 1);
  STD_TORCH_CHECK(hidden_size <= 1 || tensor.stride(dims - 1) == 1, op, ": ", name, " has stride ",
                  tensor.stride(dims - 1), " in its last dimension, expected 1");
  const std::int64_t bytes = static_cast<std::int64_t>(tensor.element_size());
  Rows rows{1, 1, hidden_size, {0, 0}};
  if (dims >= 2) {
    rows.rows_per_group = tensor.size(dims - 2);
    rows.layout.row_stride = tensor.stride(dims - 2) * bytes;
  }
  if (dims == 3) {
    rows.groups = tensor.size(0);
    rows.layout.group_stride = tensor.stride(0) * bytes;
  }
  return rows;
}

RowLayout layout_like(const char* op, const char* name, const Tensor& tensor, const Tensor& input,
                      const Rows& expected) {
  const Rows rows = rows_of(op, name, tensor);
  STD_TORCH_CHECK(tensor.dim() == input.dim() && rows.groups == expected.groups &&
                      rows.rows_per_group == expected.rows_per_group && rows.hidden_size == expected.hidden_size,
                  op, ": ", name, " has another shape than input");
  STD_TORCH_CHECK(tensor.scalar_type() == input.scalar_type(), op, ": ", name, " has dtype ",
                  torch::headeronly::toString(tensor.scalar_type()), ", expected that of input, ",
                  torch::headeronly::toString(input.scalar_type()));
  return rows.layout;
}

const auto& rms_norm_kernel() {
  static const auto& selected = vllm_arm::select_kernel(vllm_arm::kRmsNormTable);
  return selected;
}

void run_rms_norm(const char* op, const Tensor& output, const Tensor& input, const Tensor* residual,
                  const std::optional<Tensor>& weight, double epsilon) {
  const Rows rows = rows_of(op, "input", input);
  vllm_arm::RmsNormArguments arguments{};
  arguments.type = scalar_type(op, "input", input);
  arguments.input_layout = rows.layout;
  arguments.output_layout = layout_like(op, "output", output, input, rows);
  if (residual != nullptr) {
    arguments.residual_layout = layout_like(op, "residual", *residual, input, rows);
    arguments.residual = residual->mutable_data_ptr();
  }
  if (weight) {
    check_cpu(op, "weight", *weight);
    STD_TORCH_CHECK(weight->dim() == 1 && weight->size(0) == rows.hidden_size && weight->is_contiguous(), op,
                    ": weight must be contiguous with shape [", rows.hidden_size, "]");
    arguments.weight_type = scalar_type(op, "weight", *weight);
    STD_TORCH_CHECK(arguments.weight_type == arguments.type || arguments.weight_type == ScalarType::float32, op,
                    ": weight has dtype ", torch::headeronly::toString(weight->scalar_type()),
                    ", expected float32 or that of input");
    arguments.weight = weight->const_data_ptr();
  }
  arguments.input = input.const_data_ptr();
  arguments.output = output.mutable_data_ptr();
  arguments.rows_per_group = rows.rows_per_group;
  arguments.hidden_size = rows.hidden_size;
  arguments.epsilon = static_cast<float>(epsilon);

  const std::int64_t count = rows.groups * rows.rows_per_group;
  if (count == 0 || rows.hidden_size == 0) return;
  const auto kernel = rms_norm_kernel().kernel;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / rows.hidden_size);
  torch::stable::parallel_for(0, count, grain,
                              [&](std::int64_t begin, std::int64_t end) { kernel(arguments, begin, end); });
}

void rms_norm(Tensor output, Tensor input, std::optional<Tensor> weight, double epsilon) {
  run_rms_norm("rms_norm", output, input, nullptr, weight, epsilon);
}

void fused_add_rms_norm(Tensor input, Tensor residual, std::optional<Tensor> weight, double epsilon) {
  run_rms_norm("fused_add_rms_norm", input, input, &residual, weight, epsilon);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_arm, library) {
  library.def("rms_norm(Tensor(a!) output, Tensor input, Tensor? weight, float epsilon) -> ()");
  library.def("fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_arm, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm));
}
