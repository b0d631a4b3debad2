// SPDX-License-Identifier: Apache-2.0
// The ops of linear layers.
#include <algorithm>
#include <optional>
#include <string>

#include "bindings/arguments.h"
#include "linear/onednn_linear.h"

namespace {

using vllm_arm::LinearScheme;
using vllm_arm::LinearShape;
using vllm_arm::OneDnnLinear;
using vllm_arm::ScalarType;
using vllm_arm::bindings::check_cpu;
using vllm_arm::bindings::scalar_type;
using vllm_arm::bindings::Tensor;

constexpr std::int64_t kGrainElements = 16384;  // fewer than these are not worth waking another thread

void check_contiguous(const char* op, const char* name, const Tensor& tensor, std::int64_t dims) {
  check_cpu(op, name, tensor);
  STD_TORCH_CHECK(tensor.dim() == dims, op, ": ", name, " has ", tensor.dim(), " dimensions, expected ", dims);
  STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " is not contiguous");
}

void check_type_like(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  STD_TORCH_CHECK(tensor.scalar_type() == input.scalar_type(), op, ": ", name, " has dtype ",
                  torch::headeronly::toString(tensor.scalar_type()), ", expected that of input, ",
                  torch::headeronly::toString(input.scalar_type()));
}

void check_packed(const char* op, const Tensor& packed, const OneDnnLinear& linear, const LinearShape& shape) {
  check_contiguous(op, "packed", packed, 1);
  const std::int64_t bytes = packed.size(0) * static_cast<std::int64_t>(packed.element_size());
  STD_TORCH_CHECK(bytes == linear.packed_bytes(), op, ": packed has ", bytes, " bytes, expected ",
                  linear.packed_bytes(), " for a weight of ", shape.n, " x ", shape.k);
}

// The shape of a weight, from the weight itself.
LinearShape shape_of(const char* op, const Tensor& weight) {
  check_cpu(op, "weight", weight);
  STD_TORCH_CHECK(weight.dim() == 2, op, ": weight has ", weight.dim(), " dimensions, expected 2");
  STD_TORCH_CHECK(weight.size(0) > 0 && weight.size(1) > 0, op, ": weight is empty");
  if (weight.scalar_type() == torch::headeronly::ScalarType::Char) {
    return {LinearScheme::int8_accumulators, ScalarType::float32, weight.size(0), weight.size(1)};
  }
  return {LinearScheme::same_type, scalar_type(op, "weight", weight), weight.size(0), weight.size(1)};
}

std::int64_t packed_linear_size(Tensor weight) {
  return OneDnnLinear::get(shape_of("packed_linear_size", weight)).packed_bytes();
}

void pack_linear(Tensor packed, Tensor weight) {
  const char* op = "pack_linear";
  const LinearShape shape = shape_of(op, weight);
  STD_TORCH_CHECK(shape.k == 1 || weight.stride(1) == 1, op, ": weight has stride ", weight.stride(1),
                  " in its last dimension, expected 1");
  const OneDnnLinear& linear = OneDnnLinear::get(shape);
  check_packed(op, packed, linear, shape);
  linear.pack(weight.const_data_ptr(), shape.n == 1 ? shape.k : weight.stride(0), packed.mutable_data_ptr());
}

void prepare_linear(Tensor weight, bool has_bias) {
  OneDnnLinear::get(shape_of("prepare_linear", weight)).prepare(has_bias);
}

std::string linear_implementation(Tensor weight, std::int64_t rows) {
  return OneDnnLinear::get(shape_of("linear_implementation", weight)).implementation(rows);
}

std::string onednn_version() { return vllm_arm::onednn_version(); }

void linear(Tensor output, Tensor input, Tensor packed, std::optional<Tensor> bias) {
  const char* op = "linear";
  check_contiguous(op, "output", output, 2);
  check_contiguous(op, "input", input, 2);
  check_type_like(op, "output", output, input);
  const std::int64_t rows = input.size(0);
  STD_TORCH_CHECK(output.size(0) == rows, op, ": output has ", output.size(0), " rows, input ", rows);
  const LinearShape shape{LinearScheme::same_type, scalar_type(op, "input", input), output.size(1), input.size(1)};
  const OneDnnLinear& product = OneDnnLinear::get(shape);
  check_packed(op, packed, product, shape);
  if (bias) {
    check_contiguous(op, "bias", *bias, 1);
    check_type_like(op, "bias", *bias, input);
    STD_TORCH_CHECK(bias->size(0) == shape.n, op, ": bias has ", bias->size(0), " elements, expected ", shape.n);
  }
  product.run(input.const_data_ptr(), packed.const_data_ptr(), bias ? bias->const_data_ptr() : nullptr,
              output.mutable_data_ptr(), rows);
}

void unpack_rows(Tensor output, Tensor packed, Tensor indices, std::int64_t n) {
  const char* op = "unpack_rows";
  check_contiguous(op, "output", output, 2);
  check_contiguous(op, "indices", indices, 1);
  STD_TORCH_CHECK(indices.scalar_type() == torch::headeronly::ScalarType::Long, op, ": indices has dtype ",
                  torch::headeronly::toString(indices.scalar_type()), ", expected int64");
  STD_TORCH_CHECK(output.size(0) == indices.size(0), op, ": output has ", output.size(0), " rows, expected ",
                  indices.size(0));
  const LinearShape shape{LinearScheme::same_type, scalar_type(op, "output", output), n, output.size(1)};
  const OneDnnLinear& linear = OneDnnLinear::get(shape);
  check_packed(op, packed, linear, shape);
  const auto* rows = static_cast<const std::int64_t*>(indices.const_data_ptr());
  for (std::int64_t i = 0; i < indices.size(0); ++i) {
    STD_TORCH_CHECK(rows[i] >= 0 && rows[i] < n, op, ": index ", rows[i], " is not below ", n);
  }
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / shape.k);
  torch::stable::parallel_for(0, indices.size(0), grain, [&](std::int64_t begin, std::int64_t end) {
    linear.unpack_rows(packed.const_data_ptr(), rows, begin, end, output.mutable_data_ptr());
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_arm, library) {
  library.def("onednn_version() -> str");
  library.def("packed_linear_size(Tensor weight) -> int");
  library.def("pack_linear(Tensor(a!) packed, Tensor weight) -> ()");
  library.def("prepare_linear(Tensor weight, bool has_bias) -> ()");
  library.def("linear_implementation(Tensor weight, int rows) -> str");
  library.def("linear(Tensor(a!) output, Tensor input, Tensor packed, Tensor? bias) -> ()");
  library.def("unpack_rows(Tensor(a!) output, Tensor packed, Tensor indices, int n) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_arm, CPU, library) {
  library.impl("packed_linear_size", TORCH_BOX(&packed_linear_size));
  library.impl("pack_linear", TORCH_BOX(&pack_linear));
  library.impl("prepare_linear", TORCH_BOX(&prepare_linear));
  library.impl("linear_implementation", TORCH_BOX(&linear_implementation));
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("unpack_rows", TORCH_BOX(&unpack_rows));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_arm, CompositeExplicitAutograd, library) {
  library.impl("onednn_version", TORCH_BOX(&onednn_version));
}
