// SPDX-License-Identifier: Apache-2.0
// The ops of linear layers.
#include <algorithm>
#include <bit>
#include <optional>
#include <string>

#include "bindings/linear_arguments.h"
#include "linear/dequantise_table.h"
#include "linear/onednn_linear.h"

namespace {

using vllm_arm::LinearScheme;
using vllm_arm::LinearShape;
using vllm_arm::OneDnnLinear;
using vllm_arm::ScalarType;
using vllm_arm::bindings::check_contiguous;
using vllm_arm::bindings::check_cpu;
using vllm_arm::bindings::check_type_like;
using vllm_arm::bindings::checked_rows;
using vllm_arm::bindings::checked_vector;
using vllm_arm::bindings::kGrainElements;
using vllm_arm::bindings::quantisation;
using vllm_arm::bindings::quantise_kernel;
using vllm_arm::bindings::scalar_type;
using vllm_arm::bindings::Tensor;

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
  const LinearShape shape{LinearScheme::same_type, scalar_type(op, "output", output), n, output.size(1)};
  const OneDnnLinear& linear = OneDnnLinear::get(shape);
  check_packed(op, packed, linear, shape);
  const std::int64_t* rows = checked_rows(op, indices, output, n);
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / shape.k);
  torch::stable::parallel_for(0, indices.size(0), grain, [&](std::int64_t begin, std::int64_t end) {
    linear.unpack_rows(packed.const_data_ptr(), rows, begin, end, output.mutable_data_ptr());
  });
}

vllm_arm::DequantiseKernel dequantise_kernel() {
  static const auto& selected = vllm_arm::select_kernel(vllm_arm::kDequantiseTable);
  return selected.kernel;
}

template <typename Kernel, typename Arguments>
void run_rows(Kernel kernel, const Arguments& arguments, std::int64_t rows) {
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / arguments.size);
  torch::stable::parallel_for(0, rows, grain,
                              [&](std::int64_t begin, std::int64_t end) { kernel(arguments, begin, end); });
}

void quantise(Tensor output, Tensor scales, std::optional<Tensor> zero_points, Tensor input,
              std::optional<Tensor> static_scale, std::optional<Tensor> static_zero_point) {
  const char* op = "quantise";
  check_contiguous(op, "input", input, 2);
  check_contiguous(op, "output", output, 2);
  STD_TORCH_CHECK(output.scalar_type() == torch::headeronly::ScalarType::Char, op, ": output has dtype ",
                  torch::headeronly::toString(output.scalar_type()), ", expected int8");
  const std::int64_t rows = input.size(0), size = input.size(1);
  STD_TORCH_CHECK(output.size(0) == rows && output.size(1) == size, op, ": output has another shape than input");
  STD_TORCH_CHECK(!static_scale || !zero_points || static_zero_point, op, ": static_zero_point is missing");
  vllm_arm::QuantiseArguments arguments = quantisation(op, input, static_scale, static_zero_point);
  arguments.input = input.const_data_ptr();
  arguments.output = static_cast<std::int8_t*>(output.mutable_data_ptr());
  checked_vector(op, "scales", scales, torch::headeronly::ScalarType::Float, rows);
  checked_vector(op, "zero_points", zero_points, torch::headeronly::ScalarType::Int, rows);
  arguments.scales = static_cast<float*>(scales.mutable_data_ptr());
  if (zero_points) arguments.zero_points = static_cast<std::int32_t*>(zero_points->mutable_data_ptr());
  if (rows == 0 || size == 0) return;
  run_rows(quantise_kernel(), arguments, rows);
}

// As many rows as keep the integer products within a core's share of the cache, at most those of a large product.
std::int64_t rows_at_a_time(const LinearShape& shape) {
  constexpr std::int64_t kAccumulators = 1 << 20;
  const auto fitting = static_cast<std::uint64_t>(std::max<std::int64_t>(kAccumulators / shape.n, 1));
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(std::bit_floor(fitting)), 16, 256);
}

void linear_int8(Tensor output, Tensor input, Tensor packed, Tensor weight_scales, std::optional<Tensor> weight_sums,
                 std::optional<Tensor> bias, std::optional<Tensor> static_scale,
                 std::optional<Tensor> static_zero_point) {
  const char* op = "linear_int8";
  check_contiguous(op, "output", output, 2);
  check_contiguous(op, "input", input, 2);
  check_type_like(op, "output", output, input);
  const std::int64_t rows = input.size(0), n = output.size(1), k = input.size(1);
  STD_TORCH_CHECK(output.size(0) == rows, op, ": output has ", output.size(0), " rows, input ", rows);
  const LinearShape shape{LinearScheme::int8_accumulators, ScalarType::float32, n, k};
  const OneDnnLinear& product = OneDnnLinear::get(shape);
  check_packed(op, packed, product, shape);

  vllm_arm::QuantiseArguments quantising = quantisation(op, input, static_scale, static_zero_point);
  vllm_arm::DequantiseArguments dequantising{};
  dequantising.type = quantising.type;
  dequantising.size = n;
  dequantising.accumulators_are_float = product.accumulators_are_float();
  dequantising.weight_scales = static_cast<const float*>(
      checked_vector(op, "weight_scales", weight_scales, torch::headeronly::ScalarType::Float, n));
  dequantising.weight_sums = static_cast<const std::int32_t*>(
      checked_vector(op, "weight_sums", weight_sums, torch::headeronly::ScalarType::Int, n));
  dequantising.bias = checked_vector(op, "bias", bias, input.scalar_type(), n);
  STD_TORCH_CHECK(!static_scale || !weight_sums || static_zero_point, op, ": static_zero_point is missing");

  // Parts of one allocation, in the order of their alignment.
  const std::int64_t block = std::min(rows_at_a_time(shape), rows);
  const std::int64_t words = block * n + 2 * block;
  const Tensor scratch = torch::stable::new_empty(weight_scales, {words + (block * k + 3) / 4});
  auto* accumulators = static_cast<float*>(scratch.mutable_data_ptr());
  quantising.scales = accumulators + block * n;
  auto* zero_points = reinterpret_cast<std::int32_t*>(quantising.scales + block);
  quantising.zero_points = weight_sums ? zero_points : nullptr;
  quantising.output = reinterpret_cast<std::int8_t*>(accumulators + words);
  dequantising.accumulators = accumulators;
  dequantising.scales = quantising.scales;
  dequantising.zero_points = quantising.zero_points;

  const std::int64_t element = vllm_arm::scalar_size(quantising.type);
  for (std::int64_t row = 0; row < rows; row += block) {
    const std::int64_t count = std::min(block, rows - row);
    quantising.input = static_cast<const char*>(input.const_data_ptr()) + row * k * element;
    dequantising.output = static_cast<char*>(output.mutable_data_ptr()) + row * n * element;
    run_rows(quantise_kernel(), quantising, count);
    product.run(quantising.output, packed.const_data_ptr(), nullptr, accumulators, count);
    run_rows(dequantise_kernel(), dequantising, count);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_arm, library) {
  library.def("onednn_version() -> str");
  library.def("packed_linear_size(Tensor weight) -> int");
  library.def("pack_linear(Tensor(a!) packed, Tensor weight) -> ()");
  library.def("prepare_linear(Tensor weight, bool has_bias) -> ()");
  library.def("linear_implementation(Tensor weight, int rows) -> str");
  library.def("linear(Tensor(a!) output, Tensor input, Tensor packed, Tensor? bias) -> ()");
  library.def(
      "quantise(Tensor(a!) output, Tensor(b!) scales, Tensor(c!)? zero_points, Tensor input, Tensor? static_scale, "
      "Tensor? static_zero_point) -> ()");
  library.def(
      "linear_int8(Tensor(a!) output, Tensor input, Tensor packed, Tensor weight_scales, Tensor? weight_sums, "
      "Tensor? bias, Tensor? static_scale, Tensor? static_zero_point) -> ()");
  library.def("unpack_rows(Tensor(a!) output, Tensor packed, Tensor indices, int n) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_arm, CPU, library) {
  library.impl("packed_linear_size", TORCH_BOX(&packed_linear_size));
  library.impl("pack_linear", TORCH_BOX(&pack_linear));
  library.impl("prepare_linear", TORCH_BOX(&prepare_linear));
  library.impl("linear_implementation", TORCH_BOX(&linear_implementation));
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("quantise", TORCH_BOX(&quantise));
  library.impl("linear_int8", TORCH_BOX(&linear_int8));
  library.impl("unpack_rows", TORCH_BOX(&unpack_rows));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_arm, CompositeExplicitAutograd, library) {
  library.impl("onednn_version", TORCH_BOX(&onednn_version));
}
