// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "linear/linear_int4_rows.h"
#include "linear/linear_int4_table.h"
#include "linear/quantise_portable_rows.h"

namespace vllm_arm {
namespace {

constexpr std::int64_t kTileRows = 16;  // for which a panel's codes are unpacked once

std::int64_t block_rows(std::int64_t) { return 1; }

void quantise(const LinearInt4Arguments& arguments, std::int64_t block_begin, std::int64_t block_end) {
  quantise_blocks(
      arguments, 1, block_begin, block_end,
      [](const auto* input, std::int64_t size) { return find_range(input, size); },
      [](const auto* input, std::int64_t size, const Mapping& mapping, std::int8_t* codes, std::int64_t) {
        convert(input, size, mapping, codes);
      },
      [](const std::int8_t* codes, std::int64_t size, std::int64_t, std::int32_t* correction) {
        *correction = 0;
        for (std::int64_t i = 0; i < size; i += 2 * kInterleave) {
          for (std::int64_t j = 0; j < kInterleave; ++j) *correction -= 8 * codes[i + j];
        }
      });
}

// Sixteen-bit copies of the codes of a block of a panel, in the order of inputs; without groups, those of low halves
// plus 8.
template <bool kHasGroups>
struct UnpackedBlock {
  std::int16_t codes[kInt4PanelRows][kInt4Block];

  explicit UnpackedBlock(const std::byte* packed) {
    constexpr std::int64_t kApart = Int4Shape::inputs_apart(kHasGroups);
    for (std::int64_t segment = 0; segment < 2; ++segment) {
      const std::int64_t first = segment * (kInt4Block / 2 - kApart + kInterleave);
      for (auto& row : codes) {
        for (std::int64_t i = 0; i < kInterleave; ++i) {
          const auto pair = static_cast<std::int8_t>(*packed++);
          const int low = kHasGroups ? static_cast<std::int8_t>(pair << 4) >> 4 : pair & 0xf;
          row[first + i] = static_cast<std::int16_t>(low);
          row[first + i + kApart] = static_cast<std::int16_t>(pair >> 4);
        }
      }
    }
  }
};

std::int32_t product(const std::int8_t* activations, const std::int16_t* codes) {
  std::int32_t sum = 0;
  for (std::int64_t i = 0; i < kInt4Block; ++i) sum += static_cast<std::int16_t>(activations[i]) * codes[i];
  return sum;
}

// The number after `index` others at `source`.
template <typename Number>
Number read(const std::byte* source, std::int64_t index) {
  Number value;
  std::memcpy(&value, source + index * static_cast<std::int64_t>(sizeof value), sizeof value);
  return value;
}

struct Tile {
  float values[kTileRows][kInt4PanelRows] = {};
};

// The negated zero point of a quantised row, its scale and, without groups, its correction.
const std::byte* row_numbers(const Int4Shape& shape, const std::byte* activations, std::int64_t row) {
  return activations + row * activation_block_bytes(shape, 1) + shape.k;
}

// Sums of activation code * scale * code, where all groups have one scale without it.
template <bool kHasGroups>
Tile multiply_codes(const Int4Shape& shape, const std::byte* panel, const std::byte* activations, std::int64_t rows) {
  Tile tile;
  const std::byte* trailer = panel + shape.groups() * shape.group_bytes();
  for (std::int64_t group = 0; group < shape.groups(); ++group) {
    std::int32_t sums[kTileRows][kInt4PanelRows] = {};
    const std::byte* codes = panel + group * shape.group_bytes();
    for (std::int64_t block = 0; block < shape.group_size; block += kInt4Block) {
      const UnpackedBlock<kHasGroups> unpacked(codes + block * kInt4PanelRows / 2);
      for (std::int64_t row = 0; row < rows; ++row) {
        const auto* row_codes =
            reinterpret_cast<const std::int8_t*>(activations + row * activation_block_bytes(shape, 1));
        row_codes += group * shape.group_size + block;
        for (std::int64_t i = 0; i < kInt4PanelRows; ++i) sums[row][i] += product(row_codes, unpacked.codes[i]);
      }
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto negated_zero_point = read<std::int32_t>(row_numbers(shape, activations, row), 0);
      for (std::int64_t i = 0; i < kInt4PanelRows; ++i) {
        if constexpr (kHasGroups) {
          tile.values[row][i] +=
              static_cast<float>(sums[row][i]) * to_float(read<BFloat16>(codes + shape.code_bytes(), i));
        } else {
          const std::int32_t sum = sums[row][i] + read<std::int32_t>(row_numbers(shape, activations, row), 2);
          tile.values[row][i] = static_cast<float>(sum + negated_zero_point * read<std::int32_t>(trailer, i));
        }
      }
    }
  }
  return tile;
}

template <typename Element>
void finish(const LinearInt4Arguments& arguments, std::int64_t panel, std::int64_t row_begin, std::int64_t rows,
            const Tile& tile) {
  const Int4Shape& shape = arguments.shape;
  const std::int64_t groups = shape.groups();
  const std::byte* trailer = arguments.packed + panel * shape.panel_bytes() + groups * shape.group_bytes();
  const std::byte* offsets = arguments.packed + shape.offsets_begin() + panel * groups * kInt4PanelRows * 4;
  const std::int64_t first = panel * kInt4PanelRows, count = std::min(kInt4PanelRows, shape.n - first);
  const auto* bias = static_cast<const Element*>(arguments.bias);
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t row = row_begin + i;
    const std::byte* numbers = row_numbers(shape, arguments.activations, row);
    const auto negated_zero_point = static_cast<float>(read<std::int32_t>(numbers, 0));
    const float scale = read<float>(numbers, 1);
    Element* output = static_cast<Element*>(arguments.output) + row * shape.n + first;
    for (std::int64_t j = 0; j < count; ++j) {
      float value = tile.values[i][j];
      if (shape.has_groups()) {
        value = (value + negated_zero_point * read<float>(trailer, j)) * scale;
      } else {
        value *= scale * read<float>(trailer, kInt4PanelRows + j);
      }
      if (shape.has_zero_points) {
        const float* sums = group_sums(arguments, 1, row);
        for (std::int64_t group = 0; group < groups; ++group) {
          value -= sums[group] * read<float>(offsets, group * kInt4PanelRows + j);
        }
      }
      if (bias != nullptr) value += to_float(bias[first + j]);
      from_float(value, output[j]);
    }
  }
}

void multiply(const LinearInt4Arguments& arguments, std::int64_t row_begin, std::int64_t row_end,
              std::int64_t panel_begin, std::int64_t panel_end) {
  const Int4Shape& shape = arguments.shape;
  for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
    for (std::int64_t row = row_begin; row < row_end; row += kTileRows) {
      const std::int64_t rows = std::min(kTileRows, row_end - row);
      const auto multiply_rows = shape.has_groups() ? multiply_codes<true> : multiply_codes<false>;
      const Tile tile = multiply_rows(shape, arguments.packed + panel * shape.panel_bytes(),
                                      arguments.activations + row * activation_block_bytes(shape, 1), rows);
      switch (arguments.type) {
        case ScalarType::bfloat16: finish<BFloat16>(arguments, panel, row, rows, tile); break;
        case ScalarType::float16: finish<Float16>(arguments, panel, row, rows, tile); break;
        case ScalarType::float32: finish<float>(arguments, panel, row, rows, tile); break;
      }
    }
  }
}

}  // namespace

const LinearInt4Kernel linear_int4_portable{block_rows, quantise, multiply};

}  // namespace vllm_arm
