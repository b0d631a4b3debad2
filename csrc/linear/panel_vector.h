// SPDX-License-Identifier: Apache-2.0
// Products of rows and panels by FMLA, for bf16 and fp16 weights widened in registers, and by SDOT. A vector of a panel
// is four outputs, times one input of fp32 or a run of four of int8: 4 bytes, which stand in a lane of a vector of
// rows. Blocks are filled up with zeros to 1, 4 or 8 rows.
#pragma once

#include <type_traits>

#include "linear/panel_output.h"

namespace vllm_arm {
namespace {

constexpr std::int64_t filled_rows(std::int64_t rows) { return rows == 1 ? 1 : rows <= 4 ? 4 : 8; }

// A weight of 16-bit elements, of which four steps are six vectors.
template <typename Element>
struct WidenedVectors {
  using Sum = float32x4_t;
  using Input = float32x4_t;
  static constexpr std::int64_t kStepBytes = kPanelOutputs * 2;

  static Input load_inputs(const char* source) { return vld1q_f32(reinterpret_cast<const float*>(source)); }
  static Sum zero() { return vdupq_n_f32(0); }
  static Sum add(Sum a, Sum b) { return vaddq_f32(a, b); }
  template <int kLane>
  static Sum multiply_add(Sum sum, float32x4_t outputs, Input inputs) {
    return vfmaq_laneq_f32(sum, outputs, inputs, kLane);
  }

  // The outputs of four steps.
  static void load_steps(const char* source, float32x4_t (&outputs)[4][kPanelVectors]) {
    const auto* elements = reinterpret_cast<const std::uint16_t*>(source);
    for (int i = 0; i < 2 * kPanelVectors; ++i) {
      const uint16x8_t eight = vld1q_u16(elements + 8 * i);
      outputs[2 * i / kPanelVectors][2 * i % kPanelVectors] = widen_low(eight, Element{});
      outputs[(2 * i + 1) / kPanelVectors][(2 * i + 1) % kPanelVectors] = widen_high(eight, Element{});
    }
  }

 private:
  // Interleaved with zeros, which unlike a shift both pipes of an N1 can do.
  static float32x4_t widen_low(uint16x8_t eight, BFloat16) {
    return vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), eight));
  }
  static float32x4_t widen_high(uint16x8_t eight, BFloat16) {
    return vreinterpretq_f32_u16(vzip2q_u16(vdupq_n_u16(0), eight));
  }
  static float32x4_t widen_low(uint16x8_t eight, Float16) {
    return vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u16(eight)));
  }
  static float32x4_t widen_high(uint16x8_t eight, Float16) { return vcvt_high_f32_f16(vreinterpretq_f16_u16(eight)); }
};

struct Int8Vectors {
  using Sum = int32x4_t;
  using Input = int8x16_t;
  static constexpr std::int64_t kStepBytes = kPanelOutputs * 4;

  static Input load_inputs(const char* source) { return vld1q_s8(reinterpret_cast<const int8_t*>(source)); }
  static Sum zero() { return vdupq_n_s32(0); }
  static Sum add(Sum a, Sum b) { return vaddq_s32(a, b); }
  template <int kLane>
  static Sum multiply_add(Sum sum, int8x16_t outputs, Input inputs) {
    return vdotq_laneq_s32(sum, outputs, inputs, kLane);
  }
  static void load_steps(const char* source, int8x16_t (&outputs)[4][kPanelVectors]) {
    for (int step = 0; step < 4; ++step) {
      for (int i = 0; i < kPanelVectors; ++i) outputs[step][i] = load_inputs(source + step * kStepBytes + 16 * i);
    }
  }
};

template <typename Vectors>
using Outputs = std::conditional_t<std::is_same_v<Vectors, Int8Vectors>, int8x16_t, float32x4_t>;

// One row: each step of four has sums of its own.
template <typename Vectors, typename Output>
[[gnu::noinline]] void row_by_vectors(const Output& output, const char* row, const char* panel, std::int64_t steps,
                                      std::int64_t row_index) {
  using Sum = typename Vectors::Sum;
  Sum sums[4][kPanelVectors];
  for (auto& step : sums) {
    for (Sum& sum : step) sum = Vectors::zero();
  }
  for (std::int64_t step = 0; step < steps; step += 4, row += 16, panel += 4 * Vectors::kStepBytes) {
    const auto inputs = Vectors::load_inputs(row);
    Outputs<Vectors> outputs[4][kPanelVectors];
    Vectors::load_steps(panel, outputs);
    for (int i = 0; i < kPanelVectors; ++i) {
      sums[0][i] = Vectors::template multiply_add<0>(sums[0][i], outputs[0][i], inputs);
      sums[1][i] = Vectors::template multiply_add<1>(sums[1][i], outputs[1][i], inputs);
      sums[2][i] = Vectors::template multiply_add<2>(sums[2][i], outputs[2][i], inputs);
      sums[3][i] = Vectors::template multiply_add<3>(sums[3][i], outputs[3][i], inputs);
    }
  }
  Sum total[kPanelVectors];
  for (int i = 0; i < kPanelVectors; ++i) {
    total[i] = Vectors::add(Vectors::add(sums[0][i], sums[1][i]), Vectors::add(sums[2][i], sums[3][i]));
  }
  typename Output::Buffer buffer;
  BlockOutput block(output, row_index, buffer);
  block.store(0, total);
  block.finish(1);
}

// Rows [row_begin, row_end) in blocks of 4 * kFours rows.
template <typename Vectors, int kFours, typename Output>
[[gnu::noinline]] void rows_by_vectors(const Output& output, const char* rows, const char* panel_begin,
                                       std::int64_t steps, std::int64_t row_begin, std::int64_t row_end) {
  using Sum = typename Vectors::Sum;
  for (std::int64_t row = row_begin; row < row_end; row += 4 * kFours) {
    const char* panel = panel_begin;
    Sum sums[4 * kFours][kPanelVectors];
    for (auto& of_row : sums) {
      for (Sum& sum : of_row) sum = Vectors::zero();
    }
    for (std::int64_t step = 0; step < steps; step += 4, panel += 4 * Vectors::kStepBytes) {
      Outputs<Vectors> outputs[4][kPanelVectors];
      Vectors::load_steps(panel, outputs);
      for (int each = 0; each < 4; ++each) {
        for (int four = 0; four < kFours; ++four, rows += 16) {
          const auto inputs = Vectors::load_inputs(rows);
          Sum(*of)[kPanelVectors] = sums + 4 * four;
          for (int i = 0; i < kPanelVectors; ++i) {
            of[0][i] = Vectors::template multiply_add<0>(of[0][i], outputs[each][i], inputs);
            of[1][i] = Vectors::template multiply_add<1>(of[1][i], outputs[each][i], inputs);
            of[2][i] = Vectors::template multiply_add<2>(of[2][i], outputs[each][i], inputs);
            of[3][i] = Vectors::template multiply_add<3>(of[3][i], outputs[each][i], inputs);
          }
        }
      }
    }
    typename Output::Buffer buffer;
    BlockOutput block(output, row, buffer);
    const std::int64_t count = std::min<std::int64_t>(4 * kFours, row_end - row);
    unrolled<4 * kFours>([&](auto m) {
      if (m < count) block.store(m, sums[m]);
    });
    block.finish(count);
  }
}

template <typename Vectors, typename Element>
void multiply_vectors(const PanelProduct& product, std::int64_t block_begin, std::int64_t block_end,
                      std::int64_t panel_begin, std::int64_t panel_end) {
  const std::int64_t padded = padded_inputs(product.type, product.k);
  const std::int64_t steps = padded * element_bytes(product.type) * kPanelOutputs / Vectors::kStepBytes;
  const std::int64_t row_bytes = 4 * steps;
  const std::int64_t begin = block_begin * kBlockRows, end = std::min(block_end * kBlockRows, product.row_count);
  const std::int64_t rest = (end - begin) % kBlockRows;
  const std::int64_t whole_end = rest > 4 ? end : end - rest;
  const char* rows = product.rows + begin * row_bytes;
  const char* rest_rows = product.rows + whole_end * row_bytes;
  for_each_panel<Element, std::is_same_v<Vectors, Int8Vectors>, 1>(
      product, panel_begin, panel_end, [&](const auto& outputs, const char* panel) {
        const auto& output = outputs[0];
        if (whole_end > begin) rows_by_vectors<Vectors, 2>(output, rows, panel, steps, begin, whole_end);
        if (whole_end == end) return;
        if (rest == 1) return row_by_vectors<Vectors>(output, rest_rows, panel, steps, whole_end);
        rows_by_vectors<Vectors, 1>(output, rest_rows, panel, steps, whole_end, end);
      });
}

// Four lanes of 4 bytes from each of a row's elements: widened to fp32, or a run of int8.
template <typename Element>
struct FourLanes {
  static constexpr std::int64_t kElements = 4;
  static uint32x4_t load(const Element* source) {
    if constexpr (std::is_same_v<Element, BFloat16>) {
      return vshll_n_u16(vld1_u16(&source->bits), 16);
    } else {
      return vreinterpretq_u32_f32(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&source->bits))));
    }
  }
};

template <>
struct FourLanes<std::int8_t> {
  static constexpr std::int64_t kElements = 16;
  static uint32x4_t load(const std::int8_t* source) { return vreinterpretq_u32_s8(vld1q_s8(source)); }
};

inline void transpose(uint32x4_t (&lanes)[4]) {
  const uint32x4_t low = vtrn1q_u32(lanes[0], lanes[1]), high = vtrn2q_u32(lanes[0], lanes[1]);
  const uint32x4_t next_low = vtrn1q_u32(lanes[2], lanes[3]), next_high = vtrn2q_u32(lanes[2], lanes[3]);
  const auto pair = [](uint32x4_t a) { return vreinterpretq_u64_u32(a); };
  lanes[0] = vreinterpretq_u32_u64(vtrn1q_u64(pair(low), pair(next_low)));
  lanes[1] = vreinterpretq_u32_u64(vtrn1q_u64(pair(high), pair(next_high)));
  lanes[2] = vreinterpretq_u32_u64(vtrn2q_u64(pair(low), pair(next_low)));
  lanes[3] = vreinterpretq_u32_u64(vtrn2q_u64(pair(high), pair(next_high)));
}

template <typename Element>
void pack_vector_rows(const PanelRows& arguments, std::int64_t block_begin, std::int64_t block_end) {
  using Lanes = FourLanes<Element>;
  const std::int64_t k = arguments.k;
  const std::int64_t padded = padded_inputs(arguments.type, k);
  const std::int64_t block_lanes = kBlockRows * padded * 4 / Lanes::kElements;
  for (std::int64_t block = block_begin; block < block_end; ++block) {
    const std::int64_t row = block * kBlockRows;
    const std::int64_t count = std::min(kBlockRows, arguments.rows - row);
    const std::int64_t filled = filled_rows(count);
    const Element* input = static_cast<const Element*>(arguments.input) + row * k;
    auto* packed = reinterpret_cast<std::uint32_t*>(arguments.packed) + block * block_lanes;
    const auto lanes_of = [&](std::int64_t m, std::int64_t at) {
      if (m >= count || at >= k) return vdupq_n_u32(0);
      if (at + Lanes::kElements <= k) return Lanes::load(input + m * k + at);
      Element rest[Lanes::kElements] = {};
      std::memcpy(rest, input + m * k + at, static_cast<std::size_t>(k - at) * sizeof(Element));
      return Lanes::load(rest);
    };
    for (std::int64_t at = 0; at < padded; at += Lanes::kElements, packed += 4 * filled) {
      if (filled == 1) {
        vst1q_u32(packed, lanes_of(0, at));
        continue;
      }
      for (std::int64_t m = 0; m < filled; m += 4) {
        uint32x4_t lanes[4] = {lanes_of(m, at), lanes_of(m + 1, at), lanes_of(m + 2, at), lanes_of(m + 3, at)};
        transpose(lanes);
        for (int i = 0; i < 4; ++i) vst1q_u32(packed + i * filled + m, lanes[i]);
      }
    }
  }
}

}  // namespace
}  // namespace vllm_arm
