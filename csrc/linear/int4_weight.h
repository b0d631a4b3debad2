// SPDX-License-Identifier: Apache-2.0
// Weights of four bits as the kernels read them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vllm_arm {

inline constexpr std::int64_t kInt4PanelRows = 8;  // outputs that are computed together
inline constexpr std::int64_t kInt4Block = 32;     // inputs whose codes lie together
// The most inputs whose products a sum of 32 bits surely holds: |code| <= 8, times 16, |activation| <= 255.
inline constexpr std::int64_t kInt4MaximumInputs = 65536;

// A weight [n, k] = scale * (code - zero point), where each row has a scale for every `group_size` inputs: 32, 64, 128,
// or k, which is a scale for each output.
//
// It is kept in panels of 8 rows, the last one filled up with copies of the last row. Sixteen bytes of a row hold 32
// codes, two in each. They are interleaved by eight bytes: the first eight of each row of the panel, then the next
// eight of each. A panel is
//
//   one scale for each output: codes; int32 sums of the rows' codes; fp32 scales
//   groups: for each the codes and bf16 scales; then fp32 sums of the rows' scale * code; fp32 zeros
//
// With groups, byte i of sixteen has inputs i and i + 16 in its low and high half. That is what KleidiAI calls
// qsi4c32p8x8; the zeros are a bias, which is added elsewhere. With one scale for each output, byte i of each eight has
// inputs i and i + 8 of the sixteen that they hold, and the low half is code + 8: 16 * high + low is then the byte, and
// its low half alone is unpacked by one AND. Products with it are too large by 8 * activation, which is known for each
// row of activations. Where there are zero points, scale * zero point follows all panels in fp32: [panels][groups][8].
class Int4Shape {
 public:
  constexpr Int4Shape() = default;
  constexpr Int4Shape(std::int64_t outputs, std::int64_t inputs, std::int64_t inputs_of_a_group, bool zero_points)
      : n(outputs),
        k(inputs),
        group_size(inputs_of_a_group),
        has_zero_points(zero_points),
        groups_(inputs / inputs_of_a_group) {}

  std::int64_t n = 0, k = 0, group_size = 0;
  bool has_zero_points = false;

  constexpr bool has_groups() const { return group_size != k; }
  constexpr std::int64_t groups() const { return groups_; }
  std::int64_t panels() const { return (n + kInt4PanelRows - 1) / kInt4PanelRows; }
  // How far apart the inputs of a byte are.
  static constexpr std::int64_t inputs_apart(bool has_groups) { return has_groups ? kInt4Block / 2 : kInt4Block / 4; }
  // Of the codes of a group of a panel.
  std::int64_t code_bytes() const { return kInt4PanelRows * group_size / 2; }
  // Of a group of a panel: its codes and, where each group has its own, the scales.
  std::int64_t group_bytes() const { return code_bytes() + (has_groups() ? kInt4PanelRows * 2 : 0); }
  std::int64_t panel_bytes() const { return groups_ * group_bytes() + kInt4PanelRows * 2 * 4; }
  std::int64_t offsets_begin() const { return panels() * panel_bytes(); }
  std::int64_t packed_bytes() const {
    return offsets_begin() + (has_zero_points ? panels() * groups_ * kInt4PanelRows * 4 : 0);
  }

 private:
  std::int64_t groups_ = 0;  // kept, for a division takes as long as a few hundred products
};

// Packs panels [panel_begin, panel_end). `codes` [n, k] are -8 to 7, one in each byte; `scales` [n, groups];
// `zero_points` likewise, null where the shape has none.
void pack_int4(const Int4Shape& shape, const std::int8_t* codes, const float* scales, const std::int8_t* zero_points,
               std::byte* packed, std::int64_t panel_begin, std::int64_t panel_end);

}  // namespace vllm_arm
