// SPDX-License-Identifier: Apache-2.0
// The ops of linear layers on weights in panels.
#include <algorithm>
#include <optional>

#include "bindings/linear_arguments.h"
#include "host/thread_scratch.h"
#include "linear/panel_linear_table.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::parallel_for;
using vllm_arm::block_count;
using vllm_arm::kBlockRows;
using vllm_arm::kPanelOutputs;
using vllm_arm::panel_bytes;
using vllm_arm::panel_count;
using vllm_arm::PanelLinearKernel;
using vllm_arm::PanelProduct;
using vllm_arm::PanelRows;
using vllm_arm::PanelType;
using vllm_arm::thread_scratch;
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

constexpr std::int64_t kGrainProducts = 1 << 17;      // fewer than these are not worth waking another thread
constexpr std::int64_t kCachedBytes = 3 << 18;        // of packed rows, beside a panel in a core's L2 cache of 1 MiB
constexpr std::int64_t kLargestScratch = 32LL << 20;  // bytes of rows packed at a time, unless a block needs more

const PanelLinearKernel& kernel() {
  static const auto& selected = vllm_arm::select_kernel(vllm_arm::kPanelLinearTable);
  return selected.kernel;
}

PanelType panel_type(const char* op, const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16: return PanelType::bfloat16;
    case ScalarType::Half: return PanelType::float16;
    case ScalarType::Char: return PanelType::int8;
    default:
      STD_TORCH_CHECK(false, op, ": ", name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()),
                      ", expected bfloat16, float16 or int8");
  }
}

std::int64_t packed_bytes(PanelType type, std::int64_t n, std::int64_t k) {
  return panel_count(n) * panel_bytes(type, k);
}

void check_packed(const char* op, const Tensor& packed, PanelType type, std::int64_t n, std::int64_t k) {
  check_contiguous(op, "packed", packed, 1);
  const std::int64_t bytes = packed.size(0) * static_cast<std::int64_t>(packed.element_size());
  STD_TORCH_CHECK(k > 0 && bytes == packed_bytes(type, n, k), op, ": packed has ", bytes, " bytes, expected ",
                  packed_bytes(type, n, k), " for a weight of ", n, " x ", k);
}

std::int64_t panels_size(Tensor weight) {
  const char* op = "panels_size";
  STD_TORCH_CHECK(weight.dim() == 2, op, ": weight has ", weight.dim(), " dimensions, expected 2");
  STD_TORCH_CHECK(weight.size(0) > 0 && weight.size(1) > 0, op, ": weight is empty");
  return packed_bytes(panel_type(op, "weight", weight), weight.size(0), weight.size(1));
}

void pack_panels(Tensor packed, Tensor weight) {
  const char* op = "pack_panels";
  check_cpu(op, "weight", weight);
  STD_TORCH_CHECK(weight.dim() == 2, op, ": weight has ", weight.dim(), " dimensions, expected 2");
  const std::int64_t n = weight.size(0), k = weight.size(1);
  STD_TORCH_CHECK(k == 1 || weight.stride(1) == 1, op, ": weight has stride ", weight.stride(1),
                  " in its last dimension, expected 1");
  const PanelType type = panel_type(op, "weight", weight);
  check_packed(op, packed, type, n, k);
  const std::int64_t row_bytes = weight.stride(0) * static_cast<std::int64_t>(weight.element_size());
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / (kPanelOutputs * k));
  parallel_for(0, panel_count(n), grain, [&](std::int64_t begin, std::int64_t end) {
    vllm_arm::pack_panels(weight.const_data_ptr(), row_bytes, n, k, type, kernel().format(type),
                          static_cast<char*>(packed.mutable_data_ptr()), begin, end);
  });
}

void unpack_panel_rows(Tensor output, Tensor packed, Tensor indices, std::int64_t n) {
  const char* op = "unpack_panel_rows";
  check_contiguous(op, "output", output, 2);
  const PanelType type = panel_type(op, "output", output);
  const std::int64_t k = output.size(1), row_bytes = k * vllm_arm::element_bytes(type);
  check_packed(op, packed, type, n, k);
  const std::int64_t* rows = checked_rows(op, indices, output, n);
  const auto* panels = static_cast<const char*>(packed.const_data_ptr());
  auto* result = static_cast<char*>(output.mutable_data_ptr());
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / k);
  parallel_for(0, indices.size(0), grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      vllm_arm::unpack_panel_row(panels, rows[i], k, type, kernel().format(type), result + i * row_bytes);
    }
  });
}

// What is the same for all rows of a product. Checks the tensors.
PanelProduct make_product(const char* op, const Tensor& output, const Tensor& input, const Tensor& packed,
                          const std::optional<Tensor>& bias, PanelType type) {
  check_contiguous(op, "output", output, 2);
  check_contiguous(op, "input", input, 2);
  check_type_like(op, "output", output, input);
  STD_TORCH_CHECK(output.size(0) == input.size(0), op, ": output has ", output.size(0), " rows, input ", input.size(0));
  PanelProduct product{};
  product.n = output.size(1);
  product.k = input.size(1);
  product.type = type;
  product.output_type = scalar_type(op, "input", input);
  check_packed(op, packed, type, product.n, product.k);
  product.weight = static_cast<const char*>(packed.const_data_ptr());
  if (bias) check_type_like(op, "bias", *bias, input);
  product.bias = checked_vector(op, "bias", bias, input.scalar_type(), product.n);
  return product;
}

// Divides blocks of rows and panels among threads: the blocks into parts that a core's cache can hold, and the panels
// of each part.
void multiply(const PanelProduct& product) {
  const std::int64_t blocks = block_count(product.row_count), panels = panel_count(product.n);
  const std::int64_t block_bytes = kernel().format(product.type).block_bytes(product.type, product.k);
  const std::int64_t most = std::max<std::int64_t>(1, kCachedBytes / block_bytes);
  const std::int64_t parts = (blocks + most - 1) / most;
  const std::int64_t part_blocks = (blocks + parts - 1) / parts;
  const std::int64_t part_rows = std::min(product.row_count, part_blocks * kBlockRows);
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainProducts / (part_rows * kPanelOutputs * product.k));
  parallel_for(0, parts * panels, grain, [&](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t part = begin / panels, panel = begin % panels;
      const std::int64_t count = std::min(end - begin, panels - panel);
      kernel().multiply(product, part * part_blocks, std::min((part + 1) * part_blocks, blocks), panel, panel + count);
      begin += count;
    }
  });
}

// Packs and multiplies as many blocks of rows at a time as scratch memory of a bounded size holds.
template <typename Pack>
void multiply_all(PanelProduct product, const Tensor& output, const Tensor& input, std::int64_t blocks_at_once,
                  char* packed_rows, Pack pack) {
  const auto element = static_cast<std::int64_t>(input.element_size());
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / (kBlockRows * product.k));
  product.rows = packed_rows;
  for (std::int64_t row = 0; row < input.size(0); row += blocks_at_once * kBlockRows) {
    product.row_count = std::min(blocks_at_once * kBlockRows, input.size(0) - row);
    product.output = static_cast<char*>(output.mutable_data_ptr()) + row * product.n * element;
    const char* first = static_cast<const char*>(input.const_data_ptr()) + row * product.k * element;
    parallel_for(0, block_count(product.row_count), grain,
                 [&](std::int64_t begin, std::int64_t end) { pack(first, product.row_count, begin, end); });
    multiply(product);
  }
}

std::int64_t blocks_in_scratch(std::int64_t rows, std::int64_t block_bytes) {
  return std::min(block_count(rows), std::max<std::int64_t>(1, kLargestScratch / block_bytes));
}

void panel_linear(Tensor output, Tensor input, Tensor packed, std::optional<Tensor> bias) {
  const char* op = "panel_linear";
  const PanelType type = panel_type(op, "input", input);
  STD_TORCH_CHECK(type != PanelType::int8, op, ": input has dtype int8, expected bfloat16 or float16");
  const PanelProduct product = make_product(op, output, input, packed, bias, type);
  if (input.size(0) == 0) return;
  const std::int64_t block_bytes = kernel().format(type).block_bytes(type, product.k);
  const std::int64_t blocks = blocks_in_scratch(input.size(0), block_bytes);
  auto* packed_rows = static_cast<char*>(thread_scratch(static_cast<std::size_t>(blocks * block_bytes)));
  multiply_all(product, output, input, blocks, packed_rows,
               [&](const char* first, std::int64_t rows, std::int64_t begin, std::int64_t end) {
                 kernel().pack_rows(PanelRows{first, packed_rows, rows, product.k, type}, begin, end);
               });
}

void panel_linear_int8(Tensor output, Tensor input, Tensor packed, Tensor weight_scales,
                       std::optional<Tensor> weight_sums, std::optional<Tensor> bias,
                       std::optional<Tensor> static_scale, std::optional<Tensor> static_zero_point) {
  const char* op = "panel_linear_int8";
  PanelProduct product = make_product(op, output, input, packed, bias, PanelType::int8);
  const std::int64_t n = product.n, k = product.k;
  product.weight_scales =
      static_cast<const float*>(checked_vector(op, "weight_scales", weight_scales, ScalarType::Float, n));
  product.weight_sums =
      static_cast<const std::int32_t*>(checked_vector(op, "weight_sums", weight_sums, ScalarType::Int, n));
  STD_TORCH_CHECK(!static_scale || !weight_sums || static_zero_point, op, ": static_zero_point is missing");
  vllm_arm::QuantiseArguments quantising = quantisation(op, input, static_scale, static_zero_point);
  if (input.size(0) == 0) return;

  // Parts of one allocation: packed rows, rows quantised one after another, their scales and zero points.
  const std::int64_t block_bytes = kernel().format(PanelType::int8).block_bytes(PanelType::int8, k);
  const std::int64_t blocks = blocks_in_scratch(input.size(0), 2 * block_bytes);
  const std::int64_t rows = blocks * kBlockRows;
  auto* packed_rows = static_cast<char*>(thread_scratch(static_cast<std::size_t>(2 * blocks * block_bytes + 8 * rows)));
  quantising.output = reinterpret_cast<std::int8_t*>(packed_rows + blocks * block_bytes);
  quantising.scales = reinterpret_cast<float*>(packed_rows + 2 * blocks * block_bytes);
  if (weight_sums) quantising.zero_points = reinterpret_cast<std::int32_t*>(quantising.scales + rows);
  product.scales = quantising.scales;
  product.zero_points = quantising.zero_points;
  multiply_all(product, output, input, blocks, packed_rows,
               [&](const char* first, std::int64_t count, std::int64_t begin, std::int64_t end) {
                 vllm_arm::QuantiseArguments arguments = quantising;
                 arguments.input = first;
                 if (kernel().quantise_rows(arguments, count, packed_rows, begin, end)) return;
                 quantise_kernel()(arguments, begin * kBlockRows, std::min(end * kBlockRows, count));
                 kernel().pack_rows(PanelRows{quantising.output, packed_rows, count, k, PanelType::int8}, begin, end);
               });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_arm, library) {
  library.def("panels_size(Tensor weight) -> int");
  library.def("pack_panels(Tensor(a!) packed, Tensor weight) -> ()");
  library.def("panel_linear(Tensor(a!) output, Tensor input, Tensor packed, Tensor? bias) -> ()");
  library.def(
      "panel_linear_int8(Tensor(a!) output, Tensor input, Tensor packed, Tensor weight_scales, Tensor? weight_sums, "
      "Tensor? bias, Tensor? static_scale, Tensor? static_zero_point) -> ()");
  library.def("unpack_panel_rows(Tensor(a!) output, Tensor packed, Tensor indices, int n) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_arm, CPU, library) {
  library.impl("panels_size", TORCH_BOX(&panels_size));
  library.impl("pack_panels", TORCH_BOX(&pack_panels));
  library.impl("panel_linear", TORCH_BOX(&panel_linear));
  library.impl("panel_linear_int8", TORCH_BOX(&panel_linear_int8));
  library.impl("unpack_panel_rows", TORCH_BOX(&unpack_panel_rows));
}
