// SPDX-License-Identifier: Apache-2.0
// Linear layers by oneDNN: weights reordered once into the format that oneDNN picks, and a fixed set of primitives for
// each shape of weight, so that no number of rows makes one anew.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "isa/scalar_types.h"

namespace vllm_arm {

// "3.2.0", and whether it was built with Arm's Compute Library.
std::string onednn_version();

// What a weight is multiplied with and what comes out.
enum class LinearScheme : std::uint8_t {
  same_type,          // input, weight, bias and output of one type
  int8_accumulators,  // int8 input and weight; the sums as they are, int32 or exact fp32
};

struct LinearShape {
  LinearScheme scheme;
  ScalarType type;  // of the output; without meaning for accumulators
  std::int64_t n;   // outputs
  std::int64_t k;   // inputs

  auto operator<=>(const LinearShape&) const = default;
};

// The product of a weight [n, k] with rows of k elements. Thread-safe; each run uses the threads of OpenMP.
class OneDnnLinear {
 public:
  // The one object for `shape` in this process. Throws std::invalid_argument saying why oneDNN is of no use for it: it
  // has no implementation, or only one that is not optimised for this CPU.
  static const OneDnnLinear& get(const LinearShape& shape);

  ~OneDnnLinear();
  OneDnnLinear(const OneDnnLinear&) = delete;
  OneDnnLinear& operator=(const OneDnnLinear&) = delete;

  std::int64_t packed_bytes() const;
  // The name that oneDNN gives to what runs `rows` rows.
  std::string implementation(std::int64_t rows) const;
  bool accumulators_are_float() const;

  // Reorders `weight` ([n, k], rows `row_stride` elements apart) into `packed`, of packed_bytes(), aligned to 64.
  void pack(const void* weight, std::int64_t row_stride, void* packed) const;
  // Makes every primitive that run() may need with or without a bias.
  void prepare(bool has_bias) const;
  // output[rows, n] = input[rows, k] * weight^T + bias[n]; all contiguous, `bias` may be null.
  void run(const void* input, const void* packed, const void* bias, void* output, std::int64_t rows) const;

  // output[i, k] = weight[indices[i], k] for i in [begin, end), read from the packed weight, so that an embedding needs
  // no other copy of it. Indices must be rows of the weight.
  void unpack_rows(const void* packed, const std::int64_t* indices, std::int64_t begin, std::int64_t end,
                   void* output) const;

  // The most rows that a single product takes; more are computed in several.
  static constexpr std::int64_t kLargestBlock = 2048;

 private:
  struct Primitive;
  struct Weight;

  explicit OneDnnLinear(const LinearShape& shape);
  const Primitive& primitive(std::int64_t rows, bool has_bias) const;

  // Every number of rows up to 64, where reading the weight is what costs, and powers of two.
  static constexpr std::int64_t kExact = 64;
  static constexpr std::size_t kSlots = kExact + 1 + 5;
  static std::size_t slot(std::int64_t rows);

  LinearShape shape_;
  std::unique_ptr<Weight> weight_;
  mutable std::mutex mutex_;
  mutable std::array<std::array<std::atomic<const Primitive*>, kSlots>, 2> primitives_{};
};

}  // namespace vllm_arm
