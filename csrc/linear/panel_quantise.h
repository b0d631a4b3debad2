// SPDX-License-Identifier: Apache-2.0
// Rows of bf16 quantised to int8, with a scale of their own and no zero point, straight into the form that SMMLA takes.
#pragma once

#include "linear/panel_matrix.h"
#include "linear/quantise_neon_rows.h"

namespace vllm_arm {
namespace {

constexpr std::int64_t kVectorBytes = 16;  // elements of int8 of a vector

inline uint16x8_t load_bits(const BFloat16* source) { return vld1q_u16(&source->bits); }

// The largest magnitude of a row; infinite or NaN where any element is. Magnitudes of bf16 are ordered as their bits.
inline float find_magnitude(const BFloat16* row, std::int64_t size) {
  constexpr int kVectors = 4;
  const uint16x8_t sign = vdupq_n_u16(0x8000);
  uint16x8_t largest[kVectors];
  for (uint16x8_t& each : largest) each = vdupq_n_u16(0);
  std::int64_t i = 0;
  for (; i + 8 * kVectors <= size; i += 8 * kVectors) {
    for (int v = 0; v < kVectors; ++v) {
      largest[v] = vmaxq_u16(largest[v], vbicq_u16(load_bits(row + i + 8 * v), sign));
    }
  }
  for (; i + 8 <= size; i += 8) largest[0] = vmaxq_u16(largest[0], vbicq_u16(load_bits(row + i), sign));
  const uint16x8_t all = vmaxq_u16(vmaxq_u16(largest[0], largest[1]), vmaxq_u16(largest[2], largest[3]));
  std::uint16_t bits = vmaxvq_u16(all);
  for (; i < size; ++i) bits = std::max(bits, static_cast<std::uint16_t>(row[i].bits & 0x7fff));
  return to_float(BFloat16{bits});
}

// Eight elements and eight more times `inverse`, which leaves magnitudes up to 127: codes in the lower bytes of lanes.
struct QuantisedVector {
  uint8x16_t first, second;

  QuantisedVector(const BFloat16* source, float32x4_t inverse)
      : first(quantise(source, inverse)), second(quantise(source + 8, inverse)) {}

 private:
  static uint8x16_t quantise(const BFloat16* source, float32x4_t inverse) {
    const uint16x8_t bits = load_bits(source), zero = vdupq_n_u16(0);
    const int16x8_t low = round_in_lower_halves(vreinterpretq_f32_u16(vzip1q_u16(zero, bits)), inverse);
    const int16x8_t high = round_in_lower_halves(vreinterpretq_f32_u16(vzip2q_u16(zero, bits)), inverse);
    return vreinterpretq_u8_s16(vuzp1q_s16(low, high));
  }
};

// The last, partial vector of a row, filled up with zeros.
inline QuantisedVector quantise_rest(const BFloat16* source, std::int64_t count, float32x4_t inverse) {
  BFloat16 rest[kVectorBytes] = {};
  std::memcpy(rest, source, static_cast<std::size_t>(count) * sizeof(BFloat16));
  return {rest, inverse};
}

// Calls use(vector of the first row, of the second) for each vector of two rows.
template <typename Use>
void for_each_vector(const BFloat16* first, const BFloat16* second, std::int64_t size, float32x4_t first_inverse,
                     float32x4_t second_inverse, Use use) {
  std::int64_t i = 0;
  for (; i + kVectorBytes <= size; i += kVectorBytes) {
    use(QuantisedVector(first + i, first_inverse), QuantisedVector(second + i, second_inverse));
  }
  if (i == size) return;
  use(quantise_rest(first + i, size - i, first_inverse), quantise_rest(second + i, size - i, second_inverse));
}

// The lower bytes of lanes.
inline void store_codes(char* destination, uint8x16_t first, uint8x16_t second) {
  vst1q_u8(reinterpret_cast<std::uint8_t*>(destination), vuzp1q_u8(first, second));
}

inline void quantise_matrix_rows(const QuantiseArguments& arguments, std::int64_t rows, char* packed,
                                 std::int64_t block_begin, std::int64_t block_end) {
  const std::int64_t size = arguments.size;
  const std::int64_t padded = padded_inputs(PanelType::int8, size);
  const auto* input = static_cast<const BFloat16*>(arguments.input);
  const auto inverse_of = [&](std::int64_t row) {
    const float magnitude = find_magnitude(input + row * size, size);
    const Mapping mapping = map_range(arguments, {-magnitude, magnitude});
    arguments.scales[row] = mapping.scale;
    return vdupq_n_f32(mapping.inverse);
  };
  for (std::int64_t block = block_begin; block < block_end; ++block) {
    const std::int64_t begin = block * kBlockRows, count = std::min(kBlockRows, rows - begin);
    for (std::int64_t m = 0; m < count; m += 2) {
      const std::int64_t row = begin + m;
      const BFloat16* first = input + row * size;
      const float32x4_t inverse = inverse_of(row);
      char* destination = packed + begin * padded + m * kRunBytes;
      if (count == 1) {
        for_each_vector(first, first, size, inverse, inverse, [&](QuantisedVector vector, QuantisedVector) {
          store_codes(destination, vector.first, vector.second);
          destination += kVectorBytes;
        });
        continue;
      }
      // The second row of a pair that is not whole is the first times 0.
      const bool is_whole = m + 1 < count;
      const std::int64_t stride = (count + 1) / 2 * 16;
      for_each_vector(first, is_whole ? first + size : first, size, inverse,
                      is_whole ? inverse_of(row + 1) : vdupq_n_f32(0), [&](QuantisedVector a, QuantisedVector b) {
                        store_codes(destination, a.first, b.first);
                        store_codes(destination + stride, a.second, b.second);
                        destination += 2 * stride;
                      });
    }
  }
}

}  // namespace
}  // namespace vllm_arm
