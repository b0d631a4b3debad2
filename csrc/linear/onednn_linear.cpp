// SPDX-License-Identifier: Apache-2.0
#include "linear/onednn_linear.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "host/thread_scratch.h"
#include "oneapi/dnnl/dnnl.hpp"

namespace vllm_arm {
namespace {

using dnnl::matmul;
using dnnl::memory;

const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

dnnl::stream& thread_stream() {
  thread_local dnnl::stream stream(cpu_engine());
  return stream;
}

memory::data_type element_type(ScalarType type) {
  switch (type) {
    case ScalarType::bfloat16: return memory::data_type::bf16;
    case ScalarType::float16: return memory::data_type::f16;
    case ScalarType::float32: return memory::data_type::f32;
  }
  throw std::logic_error("unknown type");
}

struct Types {
  memory::data_type operand, output;
};

memory::desc rows_of(std::int64_t rows, std::int64_t columns, memory::data_type type) {
  return {{rows, columns}, type, memory::dims{columns, 1}};
}

matmul::primitive_desc describe(const LinearShape& shape, const Types& types, const memory::desc& weight,
                                std::int64_t rows, bool has_bias) {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const memory::desc input = rows_of(rows, shape.k, types.operand);
  const memory::desc output = rows_of(rows, shape.n, types.output);
  if (!has_bias) return {cpu_engine(), input, weight, output, attributes};
  return {cpu_engine(), input, weight, rows_of(1, shape.n, types.output), output, attributes};
}

// oneDNN falls back to plain loops ("ref"), and on Arm without a BLAS to a GEMM of plain loops too ("gemm").
bool is_optimised(std::string_view implementation) {
  return implementation.find("ref") == std::string_view::npos && !implementation.starts_with("gemm");
}

// A weight is packed for products of this many rows; the others take the format as it is.
constexpr std::int64_t kRowsToPackFor = 128;

void execute(const dnnl::primitive& primitive, std::initializer_list<dnnl_exec_arg_t> arguments) {
  const auto status = dnnl_primitive_execute(primitive.get(), thread_stream().get(), static_cast<int>(arguments.size()),
                                             arguments.begin());
  dnnl::error::wrap_c_api(status, "oneDNN could not run a product");
}

// Where the elements of one dimension are in a blocked format, whose offsets are sums over dimensions: `outer` elements
// for each whole block, and a place within it.
class Offsets {
 public:
  Offsets(const memory::desc& description, int dimension, std::int64_t size) {
    const memory::dims blocks = description.get_inner_blks();
    const memory::dims of = description.get_inner_idxs();
    const memory::dim stride = description.get_strides()[dimension];
    for (std::int64_t i = 0; i < size; ++i) {
      memory::dim rest = i, within = 1, offset = 0;
      for (std::size_t block = blocks.size(); block-- > 0;) {
        if (of[block] == dimension) {
          offset += rest % blocks[block] * within;
          rest /= blocks[block];
        }
        within *= blocks[block];
      }
      offsets_.push_back(offset + rest * stride);
    }
  }
  std::int64_t operator[](std::int64_t i) const { return offsets_[static_cast<std::size_t>(i)]; }

 private:
  std::vector<std::int64_t> offsets_;
};

template <typename Element>
void copy_row(const Offsets& columns, const Element* row, std::int64_t size, Element* output) {
  for (std::int64_t i = 0; i < size; ++i) output[i] = row[columns[i]];
}

memory memory_at(const memory::desc& description, const void* data) {
  return {description, cpu_engine(), const_cast<void*>(data)};
}

}  // namespace

std::string onednn_version() {
  const dnnl_version_t* version = dnnl::version();
  return std::to_string(version->major) + "." + std::to_string(version->minor) + "." + std::to_string(version->patch);
}

struct OneDnnLinear::Weight {
  Types types;
  memory::desc packed;
  Offsets of_input, of_output;

  Weight(const Types& of, const memory::desc& description, const LinearShape& shape)
      : types(of), packed(description), of_input(description, 0, shape.k), of_output(description, 1, shape.n) {}
};

struct OneDnnLinear::Primitive {
  matmul::primitive_desc description;
  matmul primitive;
  memory::desc input, weight, bias, output, scratch;

  explicit Primitive(matmul::primitive_desc made)
      : description(std::move(made)),
        primitive(description),
        input(description.src_desc()),
        weight(description.weights_desc()),
        bias(description.bias_desc()),
        output(description.dst_desc()),
        scratch(description.scratchpad_desc()) {}
};

OneDnnLinear::OneDnnLinear(const LinearShape& shape) : shape_(shape) {
  std::vector<Types> candidates;
  if (shape.scheme == LinearScheme::int8_accumulators) {
    candidates = {{memory::data_type::s8, memory::data_type::s32}, {memory::data_type::s8, memory::data_type::f32}};
  } else {
    candidates = {{element_type(shape.type), element_type(shape.type)}};
  }
  std::string found = "oneDNN has no such product for this CPU";
  for (const Types& types : candidates) {
    const memory::desc any({shape.k, shape.n}, types.operand, memory::format_tag::any);
    try {
      const auto description = describe(shape, types, any, kRowsToPackFor, false);
      if (is_optimised(description.impl_info_str()) &&
          description.weights_desc().get_format_kind() == memory::format_kind::blocked) {
        weight_ = std::make_unique<Weight>(types, description.weights_desc(), shape);
        return;
      }
      found = "oneDNN's implementation for this CPU, " + std::string(description.impl_info_str()) +
              ", is not an optimised one";
    } catch (const dnnl::error&) {  // tried next, or said below
    }
  }
  throw std::invalid_argument(found);
}

OneDnnLinear::~OneDnnLinear() {
  for (auto& of_kind : primitives_) {
    for (auto& each : of_kind) delete each.load();
  }
}

const OneDnnLinear& OneDnnLinear::get(const LinearShape& shape) {
  static std::mutex mutex;
  static auto& known =
      *new std::map<LinearShape, std::unique_ptr<OneDnnLinear>>;  // never destroyed: threads outlive it
  const std::lock_guard lock(mutex);
  auto& entry = known[shape];
  if (!entry) entry.reset(new OneDnnLinear(shape));
  return *entry;
}

std::int64_t OneDnnLinear::packed_bytes() const { return static_cast<std::int64_t>(weight_->packed.get_size()); }

std::string OneDnnLinear::implementation(std::int64_t rows) const {
  return primitive(std::min(rows, kLargestBlock), false).description.impl_info_str();
}

bool OneDnnLinear::accumulators_are_float() const { return weight_->types.output == memory::data_type::f32; }

void OneDnnLinear::pack(const void* weight, std::int64_t row_stride, void* packed) const {
  const memory::desc plain({shape_.k, shape_.n}, weight_->types.operand, memory::dims{1, row_stride});
  memory source = memory_at(plain, weight);
  memory destination = memory_at(weight_->packed, packed);
  dnnl::reorder(source, destination).execute(thread_stream(), source, destination);
  thread_stream().wait();
}

void OneDnnLinear::unpack_rows(const void* packed, const std::int64_t* indices, std::int64_t begin, std::int64_t end,
                               void* output) const {
  const auto unpack = [&]<typename Element>(const Element* elements, Element* rows) {
    for (std::int64_t i = begin; i < end; ++i) {
      copy_row(weight_->of_input, elements + weight_->of_output[indices[i]], shape_.k, rows + i * shape_.k);
    }
  };
  if (memory::data_type_size(weight_->types.operand) == sizeof(std::uint16_t)) {
    unpack(static_cast<const std::uint16_t*>(packed), static_cast<std::uint16_t*>(output));
  } else {
    unpack(static_cast<const std::uint32_t*>(packed), static_cast<std::uint32_t*>(output));
  }
}

std::size_t OneDnnLinear::slot(std::int64_t rows) {
  if (rows <= kExact) return static_cast<std::size_t>(rows);
  return kExact + static_cast<std::size_t>(std::countr_zero(static_cast<std::uint64_t>(rows / kExact)));
}

const OneDnnLinear::Primitive& OneDnnLinear::primitive(std::int64_t rows, bool has_bias) const {
  auto& entry = primitives_[has_bias ? 1 : 0][slot(rows)];
  if (const Primitive* known = entry.load(std::memory_order_acquire)) return *known;
  const std::lock_guard lock(mutex_);
  if (const Primitive* known = entry.load(std::memory_order_relaxed)) return *known;
  const auto* made = new Primitive(describe(shape_, weight_->types, weight_->packed, rows, has_bias));
  entry.store(made, std::memory_order_release);
  return *made;
}

void OneDnnLinear::prepare(bool has_bias) const {
  for (std::int64_t rows = 1; rows <= kExact; ++rows) primitive(rows, has_bias);
  for (std::int64_t rows = 2 * kExact; rows <= kLargestBlock; rows *= 2) primitive(rows, has_bias);
}

void OneDnnLinear::run(const void* input, const void* packed, const void* bias, void* output, std::int64_t rows) const {
  const auto input_row = static_cast<std::int64_t>(memory::data_type_size(weight_->types.operand)) * shape_.k;
  const auto output_row = static_cast<std::int64_t>(memory::data_type_size(weight_->types.output)) * shape_.n;
  for (std::int64_t row = 0; row < rows;) {
    const std::int64_t left = rows - row;
    std::int64_t block = left;
    if (left > kExact) {
      block = std::min(kLargestBlock, static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(left))));
      // Where most of the next larger block is left, it may begin with rows that are done already: computing them
      // again, to the same values, costs less than reading the weight once more.
      const std::int64_t larger = 2 * block;
      if (larger <= kLargestBlock && larger <= rows && 4 * left >= 3 * larger) {
        block = larger;
        row = rows - larger;
      }
    }
    const Primitive& chosen = primitive(block, bias != nullptr);
    const memory input_memory = memory_at(chosen.input, static_cast<const char*>(input) + row * input_row);
    const memory weight_memory = memory_at(chosen.weight, packed);
    const memory output_memory = memory_at(chosen.output, static_cast<char*>(output) + row * output_row);
    const memory scratch_memory = memory_at(chosen.scratch, thread_scratch(chosen.scratch.get_size()));
    if (bias != nullptr) {
      const memory bias_memory = memory_at(chosen.bias, bias);
      execute(chosen.primitive, {{DNNL_ARG_SRC, input_memory.get()},
                                 {DNNL_ARG_WEIGHTS, weight_memory.get()},
                                 {DNNL_ARG_BIAS, bias_memory.get()},
                                 {DNNL_ARG_DST, output_memory.get()},
                                 {DNNL_ARG_SCRATCHPAD, scratch_memory.get()}});
    } else {
      execute(chosen.primitive, {{DNNL_ARG_SRC, input_memory.get()},
                                 {DNNL_ARG_WEIGHTS, weight_memory.get()},
                                 {DNNL_ARG_DST, output_memory.get()},
                                 {DNNL_ARG_SCRATCHPAD, scratch_memory.get()}});
    }
    row += block;
  }
}

}  // namespace vllm_arm
