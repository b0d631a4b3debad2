// SPDX-License-Identifier: Apache-2.0
// The ops of linear layers with weights of four bits.
#include <algorithm>
#include <optional>

#include "bindings/arguments.h"
#include "linear/linear_int4_table.h"

namespace {

using vllm_arm::Int4Shape;
using vllm_arm::bindings::check_cpu;
using vllm_arm::bindings::scalar_type;
using vllm_arm::bindings::Tensor;
using Type = torch::headeronly::ScalarType;

constexpr std::int64_t kGrainProducts = 1 << 18;  // fewer multiply-accumulates are not worth waking another thread
constexpr std::int64_t kGrainElements = 16384;    // the same for elements to be converted
constexpr std::int64_t kRowsAtATime = 256;        // whose quantised rows a thread keeps near
constexpr std::int64_t kRowsQuantised = 1024;     // before they are multiplied

void check(const char* op, const char* name, const Tensor& tensor, Type type, std::int64_t rows, std::int64_t columns) {
  check_cpu(op, name, tensor);
  STD_TORCH_CHECK(tensor.scalar_type() == type, op, ": ", name, " has dtype ",
                  torch::headeronly::toString(tensor.scalar_type()), ", expected ", torch::headeronly::toString(type));
  STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns, op, ": ", name, " is not [",
                  rows, ", ", columns, "]");
  STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " is not contiguous");
}

void check_vector(const char* op, const char* name, const Tensor& tensor, Type type, std::int64_t size) {
  check_cpu(op, name, tensor);
  STD_TORCH_CHECK(tensor.scalar_type() == type, op, ": ", name, " has dtype ",
                  torch::headeronly::toString(tensor.scalar_type()), ", expected ", torch::headeronly::toString(type));
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == size && tensor.is_contiguous(), op, ": ", name, " is not [",
                  size, "]");
}

Int4Shape checked_shape(const char* op, std::int64_t n, std::int64_t k, std::int64_t group_size, bool has_zero_points) {
  STD_TORCH_CHECK(n > 0, op, ": n is ", n, ", expected at least 1");
  STD_TORCH_CHECK(k > 0 && k % vllm_arm::kInt4Block == 0 && k <= vllm_arm::kInt4MaximumInputs, op, ": k is ", k,
                  ", expected a multiple of ", vllm_arm::kInt4Block, " up to ", vllm_arm::kInt4MaximumInputs);
  const bool is_known = group_size == 32 || group_size == 64 || group_size == 128 || group_size == k;
  STD_TORCH_CHECK(is_known && k % group_size == 0, op, ": group_size is ", group_size,
                  ", expected 32, 64 or 128 that divides k = ", k, ", or k");
  return {n, k, group_size, has_zero_points};
}

std::int64_t packed_int4_size(std::int64_t n, std::int64_t k, std::int64_t group_size, bool has_zero_points) {
  return checked_shape("packed_int4_size", n, k, group_size, has_zero_points).packed_bytes();
}

void pack_int4(Tensor packed, Tensor codes, Tensor scales, std::optional<Tensor> zero_points) {
  const char* op = "pack_int4";
  STD_TORCH_CHECK(codes.dim() == 2, op, ": codes has ", codes.dim(), " dimensions, expected 2");
  STD_TORCH_CHECK(scales.dim() == 2 && scales.size(1) > 0, op, ": scales is not [n, k / group_size]");
  const std::int64_t n = codes.size(0), k = codes.size(1), groups = scales.size(1);
  const Int4Shape shape = checked_shape(op, n, k, k / groups, zero_points.has_value());
  check(op, "codes", codes, Type::Char, n, k);
  check(op, "scales", scales, Type::Float, n, shape.groups());
  if (zero_points) check(op, "zero_points", *zero_points, Type::Char, n, shape.groups());
  check_vector(op, "packed", packed, Type::Byte, shape.packed_bytes());
  const auto* source = static_cast<const std::int8_t*>(codes.const_data_ptr());
  const auto* offsets = zero_points ? static_cast<const std::int8_t*>(zero_points->const_data_ptr()) : nullptr;
  const auto [least, greatest] = std::minmax_element(source, source + n * k);
  STD_TORCH_CHECK(*least >= -8 && *greatest <= 7, op, ": codes has ",
                  static_cast<int>(*least < -8 ? *least : *greatest), ", expected -8 to 7");
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / (vllm_arm::kInt4PanelRows * k));
  torch::stable::parallel_for(0, shape.panels(), grain, [&](std::int64_t begin, std::int64_t end) {
    vllm_arm::pack_int4(shape, source, static_cast<const float*>(scales.const_data_ptr()), offsets,
                        static_cast<std::byte*>(packed.mutable_data_ptr()), begin, end);
  });
}

const auto& selected_kernel() {
  static const auto& selected = vllm_arm::select_kernel(vllm_arm::kLinearInt4Table);
  return *selected.kernel;
}

// torch's threads, where there is enough to do for a second one.
template <typename Run>
void run_parallel(std::int64_t count, std::int64_t grain, Run run) {
  if (count <= grain) {
    run(0, count);
  } else {
    torch::stable::parallel_for(0, count, grain, run);
  }
}

void quantise_and_multiply(const vllm_arm::LinearInt4Arguments& arguments) {
  const auto& kernel = selected_kernel();
  const std::int64_t block_rows = kernel.block_rows(arguments.rows), k = arguments.shape.k;
  const std::int64_t blocks = (arguments.rows + block_rows - 1) / block_rows;
  run_parallel(blocks, std::max<std::int64_t>(1, kGrainElements / (block_rows * k)),
               [&](std::int64_t begin, std::int64_t end) { kernel.quantise(arguments, begin, end); });

  // Panels are divided, and rows where there are many.
  const std::int64_t panels = arguments.shape.panels();
  const std::int64_t blocks_at_a_time = kRowsAtATime / block_rows;
  const std::int64_t parts = (blocks + blocks_at_a_time - 1) / blocks_at_a_time;
  const std::int64_t products = std::min(arguments.rows, kRowsAtATime) * vllm_arm::kInt4PanelRows * k;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainProducts / products);
  run_parallel(parts * panels, grain, [&](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t block = begin / panels * blocks_at_a_time, panel = begin % panels;
      const std::int64_t count = std::min(end - begin, panels - panel);
      kernel.multiply(arguments, block, std::min(block + blocks_at_a_time, blocks), panel, panel + count);
      begin += count;
    }
  });
}

void linear_int4(Tensor output, Tensor input, Tensor packed, std::int64_t group_size, bool has_zero_points,
                 std::optional<Tensor> bias) {
  const char* op = "linear_int4";
  STD_TORCH_CHECK(input.dim() == 2, op, ": input has ", input.dim(), " dimensions, expected 2");
  STD_TORCH_CHECK(output.dim() == 2, op, ": output has ", output.dim(), " dimensions, expected 2");
  const std::int64_t rows = input.size(0), n = output.size(1);
  const Int4Shape shape = checked_shape(op, n, input.size(1), group_size, has_zero_points);
  vllm_arm::LinearInt4Arguments arguments{};
  arguments.shape = shape;
  arguments.type = scalar_type(op, "input", input);
  check(op, "input", input, input.scalar_type(), rows, shape.k);
  check(op, "output", output, input.scalar_type(), rows, n);
  check_vector(op, "packed", packed, Type::Byte, shape.packed_bytes());
  if (bias) check_vector(op, "bias", *bias, input.scalar_type(), n);
  if (rows == 0) return;

  // A few rows need little room, and no allocation.
  alignas(64) std::byte few_activations[1 << 15];
  std::optional<Tensor> many_activations;
  const std::int64_t most = std::min(rows, kRowsQuantised);
  const std::int64_t bytes = vllm_arm::activation_bytes(shape, most, selected_kernel().block_rows(most));
  if (bytes > static_cast<std::int64_t>(sizeof few_activations)) {
    many_activations = torch::stable::new_empty(packed, {bytes});
  }
  arguments.activations =
      many_activations ? static_cast<std::byte*>(many_activations->mutable_data_ptr()) : few_activations;
  arguments.packed = static_cast<const std::byte*>(packed.const_data_ptr());
  arguments.bias = bias ? bias->const_data_ptr() : nullptr;
  const std::int64_t element = vllm_arm::scalar_size(arguments.type);
  for (std::int64_t row = 0; row < rows; row += kRowsQuantised) {
    arguments.rows = std::min(kRowsQuantised, rows - row);
    arguments.input = static_cast<const std::byte*>(input.const_data_ptr()) + row * shape.k * element;
    arguments.output = static_cast<std::byte*>(output.mutable_data_ptr()) + row * n * element;
    quantise_and_multiply(arguments);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_arm, library) {
  library.def("packed_int4_size(int n, int k, int group_size, bool has_zero_points) -> int");
  library.def("pack_int4(Tensor(a!) packed, Tensor codes, Tensor scales, Tensor? zero_points) -> ()");
  library.def(
      "linear_int4(Tensor(a!) output, Tensor input, Tensor packed, int group_size, bool has_zero_points, Tensor? bias) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_arm, CPU, library) {
  library.impl("pack_int4", TORCH_BOX(&pack_int4));
  library.impl("linear_int4", TORCH_BOX(&linear_int4));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_arm, CompositeExplicitAutograd, library) {
  library.impl("packed_int4_size", TORCH_BOX(&packed_int4_size));
}
