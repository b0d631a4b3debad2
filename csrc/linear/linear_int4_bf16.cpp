// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "linear/linear_int4_row.h"
#include "linear/linear_int4_table.h"

namespace vllm_arm {
namespace {

constexpr std::int64_t kChunk = kInterleavedRows * kInterleave;  // bytes of eight inputs of a block of rows
constexpr std::int64_t kUnpackedInputs = 4096;                   // of a panel, in half of the L1 cache
constexpr float kNoBias[kInt4PanelRows] = {};
constexpr std::int64_t kTileRows = 16;   // at most
constexpr std::int64_t kMostRows = 256;  // whose sums with a panel are kept
// What the sums of a pair of rows start from, once for each sum: to load is cheaper than to copy.
constexpr std::int64_t kPanelStarts = 2 * kInt4PanelRows;

// Codes of pairs of outputs: use(chunk of eight inputs, vectors) for each chunk of a block of 32 inputs. Packed: two
// codes in a byte. With groups they come times 16, without those of low halves plus 8.
struct PackedCodes {
  static constexpr std::int64_t kBlockBytes = kPanelBlockBytes;
  static std::int64_t group_bytes(const Int4Shape& shape) { return shape.group_bytes(); }

  template <bool kHasGroups, int kPairs, typename Use>
  [[gnu::always_inline]] static void for_each_chunk(const std::int8_t* codes, Use use) {
    const int8x16_t half = vdupq_n_s8(static_cast<std::int8_t>(kHasGroups ? 0xf0 : 0x0f));
#pragma GCC unroll 2
    for (int segment = 0; segment < 2; ++segment) {
      int8x16_t low[kPairs], high[kPairs];
#pragma GCC unroll 4
      for (int i = 0; i < kPairs; ++i) {
        const int8x16_t packed = vld1q_s8(codes + segment * kPanelBlockBytes / 2 + i * 16);
        low[i] = kHasGroups ? vshlq_n_s8(packed, 4) : vandq_s8(packed, half);
        high[i] = kHasGroups ? vandq_s8(packed, half) : vshrq_n_s8(packed, 4);
      }
      use(kHasGroups ? segment : 2 * segment, low);
      use(kHasGroups ? segment + 2 : 2 * segment + 1, high);
    }
  }
};

// One code in a byte, chunks in their order.
struct UnpackedCodes {
  static constexpr std::int64_t kBlockBytes = 2 * kPanelBlockBytes;
  static std::int64_t group_bytes(const Int4Shape& shape) { return shape.group_size * kInt4PanelRows; }

  template <bool, int kPairs, typename Use>
  [[gnu::always_inline]] static void for_each_chunk(const std::int8_t* codes, Use use) {
#pragma GCC unroll 4
    for (int chunk = 0; chunk < 4; ++chunk) {
      int8x16_t vectors[kPairs];
#pragma GCC unroll 4
      for (int i = 0; i < kPairs; ++i) vectors[i] = vld1q_s8(codes + chunk * kPanelBlockBytes / 2 + i * 16);
      use(chunk, vectors);
    }
  }
};

template <bool kHasGroups>
void unpack_panel(const Int4Shape& shape, const std::byte* panel, std::int8_t* unpacked) {
  for (std::int64_t group = 0; group < shape.groups(); ++group, panel += shape.group_bytes()) {
    const auto* codes = reinterpret_cast<const std::int8_t*>(panel);
    for (std::int64_t i = 0; i < shape.group_size; i += kInt4Block) {
      PackedCodes::for_each_chunk<kHasGroups, 4>(codes, [&](int chunk, const int8x16_t(&vectors)[4]) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) vst1q_s8(unpacked + chunk * kPanelBlockBytes / 2 + j * 16, vectors[j]);
      });
      codes += PackedCodes::kBlockBytes;
      unpacked += UnpackedCodes::kBlockBytes;
    }
  }
}

// Sums of 2 x 2 products each: of pairs of rows and pairs of outputs.
template <int kBlocks, int kPairs, typename Number>
struct Sums {
  Number pairs[2 * kBlocks][kPairs];
};

// The products of 4 * kBlocks rows and 2 * kPairs outputs over `size` inputs: times 16 with groups, else added to what
// `starts` has for each pair of rows.
template <bool kHasGroups, typename Codes, int kBlocks, int kPairs>
[[gnu::always_inline]] inline Sums<kBlocks, kPairs, int32x4_t> multiply_codes(const std::int8_t* rows,
                                                                              std::int64_t block_bytes,
                                                                              const std::int8_t* codes,
                                                                              std::int64_t size,
                                                                              const std::int32_t* starts) {
  Sums<kBlocks, kPairs, int32x4_t> sums;
  for (auto& pair : sums.pairs) {
#pragma GCC unroll 4
    for (int j = 0; j < kPairs; ++j) pair[j] = kHasGroups ? vdupq_n_s32(0) : vld1q_s32(starts + 4 * j);
    starts += kPanelStarts;
  }
  std::int64_t left = size;
  do {  // at least once, so that the sums' starts are loaded beside the first products
    Codes::template for_each_chunk<kHasGroups, kPairs>(codes, [&](int chunk, const int8x16_t(&vectors)[kPairs]) {
#pragma GCC unroll 8
      for (int pair = 0; pair < 2 * kBlocks; ++pair) {
        const int8x16_t two_rows = vld1q_s8(rows + chunk * kChunk + pair / 2 * block_bytes + pair % 2 * 16);
#pragma GCC unroll 4
        for (int j = 0; j < kPairs; ++j) sums.pairs[pair][j] = vmmlaq_s32(sums.pairs[pair][j], two_rows, vectors[j]);
      }
    });
    rows += 4 * kChunk;
    codes += Codes::kBlockBytes;
    left -= kInt4Block;
  } while (left > 0);
  return sums;
}

int32x4_t bits_of(int32x4_t sum) { return sum; }
int32x4_t bits_of(float32x4_t sum) { return vreinterpretq_s32_f32(sum); }

// Rows of eight outputs.
template <int kBlocks, int kPairs, typename Number>
[[gnu::always_inline]] inline void store_sums(const Sums<kBlocks, kPairs, Number>& sums, std::int32_t* destination) {
#pragma GCC unroll 8
  for (int pair = 0; pair < 2 * kBlocks; ++pair) {
#pragma GCC unroll 2
    for (int vector = 0; vector < kPairs / 2; ++vector) {
      const int64x2_t first = vreinterpretq_s64_s32(bits_of(sums.pairs[pair][2 * vector]));
      const int64x2_t second = vreinterpretq_s64_s32(bits_of(sums.pairs[pair][2 * vector + 1]));
      std::int32_t* row = destination + 2 * pair * kInt4PanelRows + vector * 4;
      vst1q_s32(row, vreinterpretq_s32_s64(vuzp1q_s64(first, second)));
      vst1q_s32(row + kInt4PanelRows, vreinterpretq_s32_s64(vuzp2q_s64(first, second)));
    }
  }
}

// Interleaved rows, from the first of a block, and where there are no groups what the sums of each pair start from.
struct Rows {
  const std::int8_t* blocks;
  std::int64_t block_bytes, count;
  const std::int32_t* starts;
};

// A panel, and its codes as they are multiplied.
struct Panel {
  const Int4Shape& shape;
  const std::byte* packed;
  const std::int8_t* codes;
};

// Sums of 4 * kBlocks rows with a panel, half of it at a time where kPairs is 2: of codes in int32, or with groups in
// fp32, of codes times their scale.
template <bool kHasGroups, typename Codes, int kBlocks, int kPairs>
[[gnu::noinline]] void multiply_some_rows(const Panel& panel, const std::int8_t* rows, std::int64_t block_bytes,
                                          const std::int32_t* starts, std::int32_t* destination) {
  const Int4Shape& shape = panel.shape;
  for (std::int64_t half = 0; half < 2; half += kPairs / 2) {
    const std::int8_t* codes = panel.codes + half * 32;
    if constexpr (!kHasGroups) {
      store_sums(multiply_codes<false, Codes, kBlocks, kPairs>(rows, block_bytes, codes, shape.k, starts),
                 destination + half * 4);
    } else {
      Sums<kBlocks, kPairs, float32x4_t> scaled;
      for (auto& pair : scaled.pairs) {
        for (auto& sum : pair) sum = vdupq_n_f32(0);
      }
      const std::int8_t* group_rows = rows;
      const std::byte* scales = panel.packed + shape.code_bytes() + half * 8;
      for (std::int64_t group = 0; group < shape.groups(); ++group) {
        const auto sums =
            multiply_codes<true, Codes, kBlocks, kPairs>(group_rows, block_bytes, codes, shape.group_size, starts);
#pragma GCC unroll 2
        for (int i = 0; i < kPairs; i += 2) {
          const uint16x4_t stored = vld1_u16(reinterpret_cast<const std::uint16_t*>(scales) + 2 * i);
          const uint64x2_t two_pairs = vreinterpretq_u64_u32(vshll_n_u16(stored, 16));
          const float32x4_t first = vreinterpretq_f32_u64(vdupq_laneq_u64(two_pairs, 0));
          const float32x4_t second = vreinterpretq_f32_u64(vdupq_laneq_u64(two_pairs, 1));
#pragma GCC unroll 8
          for (int pair = 0; pair < 2 * kBlocks; ++pair) {
            // The sums are those of 16 * code.
            float32x4_t(&of)[kPairs] = scaled.pairs[pair];
            of[i] = vfmaq_f32(of[i], vcvtq_n_f32_s32(sums.pairs[pair][i], 4), first);
            of[i + 1] = vfmaq_f32(of[i + 1], vcvtq_n_f32_s32(sums.pairs[pair][i + 1], 4), second);
          }
        }
        group_rows += shape.group_size * kInterleavedRows;
        codes += Codes::group_bytes(shape);
        scales += shape.group_bytes();
      }
      store_sums(scaled, destination + half * 4);
    }
  }
}

// A panel by all rows: as many at a time as leave their sums in registers.
template <bool kHasGroups, typename Codes>
void multiply_panel(const Panel& panel, const Rows& rows, std::int32_t* sums) {
  for (std::int64_t row = 0; row < rows.count;) {
    const auto run = [&]<int kBlocks, int kPairs>() {
      multiply_some_rows<kHasGroups, Codes, kBlocks, kPairs>(
          panel, rows.blocks + row / kInterleavedRows * rows.block_bytes, rows.block_bytes,
          rows.starts + row / 2 * kPanelStarts, sums + row * kInt4PanelRows);
      row += kBlocks * kInterleavedRows;
    };
    const std::int64_t left = rows.count - row;
    if (left <= 4) {
      run.template operator()<1, 4>();
    } else if constexpr (kHasGroups) {
      run.template operator()<2, 2>();
    } else if (std::is_same_v<Codes, UnpackedCodes> || left <= 8) {
      run.template operator()<2, 4>();
    } else if (left <= 12) {
      run.template operator()<3, 2>();
    } else {
      run.template operator()<4, 2>();
    }
  }
}

// Unpacks the codes first where that is done once for many rows.
template <bool kHasGroups>
void multiply_packed_panel(const Int4Shape& shape, const std::byte* packed, const Rows& rows, std::int8_t* unpacked,
                           std::int32_t* sums) {
  if (rows.count <= kTileRows || shape.k > kUnpackedInputs) {
    const Panel panel{shape, packed, reinterpret_cast<const std::int8_t*>(packed)};
    return multiply_panel<kHasGroups, PackedCodes>(panel, rows, sums);
  }
  unpack_panel<kHasGroups>(shape, packed, unpacked);
  multiply_panel<kHasGroups, UnpackedCodes>(Panel{shape, packed, unpacked}, rows, sums);
}

// What the outputs of a panel have in common: the sums of their codes and, without groups, scales; in the units of the
// sums of products.
struct PanelNumbers {
  float code_sums[kInt4PanelRows], scales[kInt4PanelRows];

  PanelNumbers(const Int4Shape& shape, const std::byte* packed) {
    const std::byte* trailer = packed + shape.groups() * shape.group_bytes();
    for (int i = 0; i < kInt4PanelRows; i += 4) {
      const auto* sums = reinterpret_cast<const std::int32_t*>(trailer) + i;
      const int32x4_t four = vld1q_s32(sums);
      vst1q_f32(code_sums + i, shape.has_groups() ? vreinterpretq_f32_s32(four) : vcvtq_f32_s32(four));
      if (!shape.has_groups()) vst1q_f32(scales + i, vld1q_f32(reinterpret_cast<const float*>(sums) + kInt4PanelRows));
    }
  }
};

// Zero points, negated, and scales of rows, and what their sums start from.
struct RowNumbers {
  float zero_points[kMostRows + kInterleavedRows], scales[kMostRows + kInterleavedRows];
  alignas(64) std::int32_t starts[(kMostRows + kTileRows) / 2 * kPanelStarts];

  RowNumbers(const Int4Shape& shape, const Rows& rows) {
    for (std::int64_t row = 0; row < rows.count; row += kInterleavedRows) {
      const std::int8_t* block = rows.blocks + row / kInterleavedRows * rows.block_bytes;
      const auto* numbers = reinterpret_cast<const std::int32_t*>(block + kInterleavedRows * shape.k);
      vst1q_f32(zero_points + row, vcvtq_f32_s32(vld1q_s32(numbers)));
      vst1q_f32(scales + row, vld1q_f32(reinterpret_cast<const float*>(numbers + kInterleavedRows)));
      if (shape.has_groups()) continue;
      const int32x4_t corrections = vld1q_s32(numbers + 2 * kInterleavedRows);
      std::int32_t* pair = starts + row / 2 * kPanelStarts;
      for (int i = 0; i < kPanelStarts; i += 4) {
        vst1q_s32(pair + i, vzip1q_s32(corrections, corrections));
        vst1q_s32(pair + kPanelStarts + i, vzip2q_s32(corrections, corrections));
      }
    }
  }
};

// Outputs of a panel for all rows, from their sums: rows of eight, `stride` elements apart.
template <bool kHasGroups, bool kHasBias, typename Element>
void finish_panel(const std::int32_t* sums, const RowNumbers& row_numbers, const PanelNumbers& panel, const float* bias,
                  std::int64_t rows, Element* output, std::int64_t stride) {
  const Float8 code_sums = load(panel.code_sums), scales = load(panel.scales), added = load(bias);
  const auto finish_row = [&]<int kLane>(float32x4_t zero_points, float32x4_t row_scales) {
    const auto finish = [&](const std::int32_t* four, float32x4_t four_sums, float32x4_t four_scales,
                            float32x4_t four_added) {
      const int32x4_t stored = vld1q_s32(four);
      float32x4_t sum = kHasGroups ? vreinterpretq_f32_s32(stored) : vcvtq_f32_s32(stored);
      sum = vfmaq_laneq_f32(sum, four_sums, zero_points, kLane);
      if constexpr (!kHasGroups) sum = vmulq_f32(sum, four_scales);
      return kHasBias ? vfmaq_laneq_f32(four_added, sum, row_scales, kLane) : vmulq_laneq_f32(sum, row_scales, kLane);
    };
    store(output, Float8{finish(sums, code_sums.low, scales.low, added.low),
                         finish(sums + 4, code_sums.high, scales.high, added.high)});
    sums += kInt4PanelRows;
    output += stride;
  };
  std::int64_t row = 0;
  for (; row + kInterleavedRows <= rows; row += kInterleavedRows) {
    const float32x4_t zero_points = vld1q_f32(row_numbers.zero_points + row);
    const float32x4_t row_scales = vld1q_f32(row_numbers.scales + row);
    finish_row.template operator()<0>(zero_points, row_scales);
    finish_row.template operator()<1>(zero_points, row_scales);
    finish_row.template operator()<2>(zero_points, row_scales);
    finish_row.template operator()<3>(zero_points, row_scales);
  }
  for (; row < rows; ++row) {
    finish_row.template operator()<0>(vdupq_n_f32(row_numbers.zero_points[row]), vdupq_n_f32(row_numbers.scales[row]));
  }
}

template <bool kHasGroups, typename Element>
void multiply_panels(const LinearInt4Arguments& arguments, std::int64_t row_begin, std::int64_t row_end,
                     std::int64_t panel_begin, std::int64_t panel_end) {
  alignas(64) std::int8_t unpacked[kUnpackedInputs * kInt4PanelRows];
  alignas(64) std::int32_t sums[(kMostRows + kTileRows) * kInt4PanelRows];
  alignas(64) float values[kMostRows * kInt4PanelRows];
  const Int4Shape& shape = arguments.shape;
  const std::int64_t block_bytes = activation_block_bytes(shape, kInterleavedRows), panel_bytes = shape.panel_bytes();
  Rows rows{reinterpret_cast<const std::int8_t*>(arguments.activations + row_begin / kInterleavedRows * block_bytes),
            block_bytes, row_end - row_begin, nullptr};
  const RowNumbers row_numbers(shape, rows);
  rows.starts = row_numbers.starts;
  for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const std::byte* packed = arguments.packed + panel * panel_bytes;
    multiply_packed_panel<kHasGroups>(shape, packed, rows, unpacked, sums);
    const PanelNumbers numbers(shape, packed);
    const std::int64_t first = panel * kInt4PanelRows;
    if (shape.has_zero_points || first + kInt4PanelRows > shape.n) {
      finish_panel<kHasGroups, false>(sums, row_numbers, numbers, kNoBias, rows.count, values, kInt4PanelRows);
      for (std::int64_t row = 0; row < rows.count; ++row) {
        const float* of_groups =
            shape.has_zero_points ? group_sums(arguments, kInterleavedRows, row_begin + row) : nullptr;
        finish_row<Element>(arguments, row_begin + row, panel, panel + 1, values + row * kInt4PanelRows, of_groups);
      }
      continue;
    }
    Element* output = static_cast<Element*>(arguments.output) + row_begin * shape.n + first;
    if (arguments.bias == nullptr) {
      finish_panel<kHasGroups, false>(sums, row_numbers, numbers, kNoBias, rows.count, output, shape.n);
      continue;
    }
    float bias[kInt4PanelRows];
    store(bias, load(static_cast<const Element*>(arguments.bias) + first));
    finish_panel<kHasGroups, true>(sums, row_numbers, numbers, bias, rows.count, output, shape.n);
  }
}

// The products of a single row with a panel. A register holds two chunks of eight inputs as if they were two rows: the
// first meets low halves, the second high ones. Each is multiplied with the bytes' low halves, and with the bytes as
// they are; what is 16 times the products of the second chunk with high halves is the difference.
void multiply_row_codes(const std::int8_t* activations, const std::int8_t* codes, std::int64_t k,
                        std::int32_t correction, std::int32_t* sums) {
  const int8x16_t low_half = vdupq_n_s8(0x0f);
  const int32x4_t start = vcombine_s32(vdup_n_s32(correction), vdup_n_s32(0));
  int32x4_t bytes[4], low[4];  // pairs of outputs
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    bytes[i] = vdupq_n_s32(0);
    low[i] = start;
  }
  for (std::int64_t j = 0; j < k; j += kInt4Block) {
#pragma GCC unroll 2
    for (int segment = 0; segment < 2; ++segment) {
      const int8x16_t inputs = vld1q_s8(activations + j + segment * 16);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int8x16_t packed = vld1q_s8(codes + segment * kPanelBlockBytes / 2 + i * 16);
        bytes[i] = vmmlaq_s32(bytes[i], inputs, packed);
        low[i] = vmmlaq_s32(low[i], inputs, vandq_s8(packed, low_half));
      }
    }
    codes += kPanelBlockBytes;
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const auto as_pairs = [](int32x4_t sum) { return vreinterpretq_s64_s32(sum); };
    const auto difference = [&](int i) { return as_pairs(vsubq_s32(bytes[i], low[i])); };
    const int64x2_t of_low = vuzp1q_s64(as_pairs(low[2 * half]), as_pairs(low[2 * half + 1]));
    const int64x2_t of_high = vuzp2q_s64(difference(2 * half), difference(2 * half + 1));
    vst1q_s32(sums + 4 * half, vsraq_n_s32(vreinterpretq_s32_s64(of_low), vreinterpretq_s32_s64(of_high), 4));
  }
}

void multiply(const LinearInt4Arguments& arguments, std::int64_t block_begin, std::int64_t block_end,
              std::int64_t panel_begin, std::int64_t panel_end) {
  if (arguments.rows == 1) return multiply_row(arguments, panel_begin, panel_end, multiply_row_codes);
  const auto run = [&]<typename Element>(Element) {
    const std::int64_t end = std::min(block_end * kInterleavedRows, arguments.rows);
    for (std::int64_t row = block_begin * kInterleavedRows; row < end; row += kMostRows) {
      const std::int64_t row_end = std::min(row + kMostRows, end);
      (arguments.shape.has_groups() ? multiply_panels<true, Element>
                                    : multiply_panels<false, Element>)(arguments, row, row_end, panel_begin, panel_end);
    }
  };
  switch (arguments.type) {
    case ScalarType::bfloat16: return run(BFloat16{});
    case ScalarType::float16: return run(Float16{});
    case ScalarType::float32: return run(float{});
  }
}

}  // namespace

const LinearInt4Kernel linear_int4_bf16{block_rows, quantise, multiply};

}  // namespace vllm_arm
