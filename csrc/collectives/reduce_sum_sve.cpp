// SPDX-License-Identifier: Apache-2.0
// bf16 by SVE, which has what NEON lacks: rounding into every second element, so that even and odd elements can be
// added apart and come together again at no cost. The other types gain nothing by SVE.
#include <arm_sve.h>

#include "collectives/reduce_sum_neon_vectors.h"

namespace vllm_arm {
namespace {

// A bf16 is the upper half of the fp32 of the same value.
svfloat32_t even_elements(svuint16_t pairs) {
  return svreinterpret_f32(svlsl_n_u32_x(svptrue_b32(), svreinterpret_u32(pairs), 16));
}
svfloat32_t odd_elements(svuint16_t pairs) {
  return svreinterpret_f32(svand_n_u32_x(svptrue_b32(), svreinterpret_u32(pairs), 0xffff0000));
}

svuint16_t round(svfloat32_t even, svfloat32_t odd) {
  const svbool_t all = svptrue_b32();
  return svreinterpret_u16(svcvtnt_bf16_x(svcvt_bf16_x(all, even), all, odd));
}

svbfloat16_t ones() {
  std::uint16_t bits = 0x3f80;
  asm("" : "+r"(bits));  // GCC 12 makes 1.0 of half precision of what it sees to be a constant
  return svreinterpret_bf16(svdup_n_u16(bits));
}

// The product with 1 is exact: one instruction widens and adds, and rounds once as an addition does.
svfloat32_t add_even(svfloat32_t sum, svuint16_t pairs, svbfloat16_t one) {
  return svbfmlalb(sum, svreinterpret_bf16(pairs), one);
}
svfloat32_t add_odd(svfloat32_t sum, svuint16_t pairs, svbfloat16_t one) {
  return svbfmlalt(sum, svreinterpret_bf16(pairs), one);
}

// Sums of `kSources` sources, or of as many as there are where that is 0.
template <int kSources>
struct BFloat16Sums {
  const ReduceSumArguments& arguments;

  int source_count() const { return kSources == 0 ? arguments.source_count : kSources; }
  const std::uint16_t* source(int number) const { return static_cast<const std::uint16_t*>(arguments.sources[number]); }
  std::uint16_t* output() const { return static_cast<std::uint16_t*>(arguments.output); }
  std::uint16_t* copy() const { return static_cast<std::uint16_t*>(arguments.copy); }

  void add_range(std::int64_t begin, std::int64_t end) const {
    const auto step = static_cast<std::int64_t>(svcnth());
    const svbfloat16_t one = ones();
    std::int64_t i = begin;
    for (; i + 4 * step <= end; i += 4 * step) add_four(i, step, one);
    for (; i < end; i += step) add_vector(svwhilelt_b16_s64(i, end), i, one);
  }

  // The elements of `lanes` from `i` on.
  void add_vector(svbool_t lanes, std::int64_t i, svbfloat16_t one) const {
    svuint16_t next = svld1(lanes, source(0) + i);
    svfloat32_t even = even_elements(next), odd = odd_elements(next);
    for (int number = 1; number < source_count(); ++number) {
      next = svld1(lanes, source(number) + i);
      even = add_even(even, next, one);
      odd = add_odd(odd, next, one);
    }
    const svuint16_t rounded = round(even, odd);
    svst1(lanes, output() + i, rounded);
    if (copy() != nullptr) svst1(lanes, copy() + i, rounded);
  }

  // Four whole vectors of `step` elements. There are no arrays of vectors, so that each has its name.
  void add_four(std::int64_t i, std::int64_t step, svbfloat16_t one) const {
    const svbool_t all = svptrue_b16();
    svuint16_t next0 = svld1(all, source(0) + i), next1 = svld1(all, source(0) + i + step);
    svuint16_t next2 = svld1(all, source(0) + i + 2 * step), next3 = svld1(all, source(0) + i + 3 * step);
    svfloat32_t even0 = even_elements(next0), odd0 = odd_elements(next0);
    svfloat32_t even1 = even_elements(next1), odd1 = odd_elements(next1);
    svfloat32_t even2 = even_elements(next2), odd2 = odd_elements(next2);
    svfloat32_t even3 = even_elements(next3), odd3 = odd_elements(next3);
    for (int number = 1; number < source_count(); ++number) {
      const std::uint16_t* from = source(number) + i;
      next0 = svld1(all, from);
      next1 = svld1(all, from + step);
      next2 = svld1(all, from + 2 * step);
      next3 = svld1(all, from + 3 * step);
      even0 = add_even(even0, next0, one);
      odd0 = add_odd(odd0, next0, one);
      even1 = add_even(even1, next1, one);
      odd1 = add_odd(odd1, next1, one);
      even2 = add_even(even2, next2, one);
      odd2 = add_odd(odd2, next2, one);
      even3 = add_even(even3, next3, one);
      odd3 = add_odd(odd3, next3, one);
    }
    next0 = round(even0, odd0);
    next1 = round(even1, odd1);
    next2 = round(even2, odd2);
    next3 = round(even3, odd3);
    store_four(output() + i, step, next0, next1, next2, next3);
    if (copy() != nullptr) store_four(copy() + i, step, next0, next1, next2, next3);
  }

  static void store_four(std::uint16_t* to, std::int64_t step, svuint16_t values0, svuint16_t values1,
                         svuint16_t values2, svuint16_t values3) {
    const svbool_t all = svptrue_b16();
    svst1(all, to, values0);
    svst1(all, to + step, values1);
    svst1(all, to + 2 * step, values2);
    svst1(all, to + 3 * step, values3);
  }
};

}  // namespace

void reduce_sum_sve(const ReduceSumArguments& arguments, std::int64_t begin, std::int64_t end) {
  if (arguments.type != SumType::bfloat16) return sum_by_neon(arguments, begin, end);
  switch (arguments.source_count) {
    case 2: return BFloat16Sums<2>{arguments}.add_range(begin, end);
    case 4: return BFloat16Sums<4>{arguments}.add_range(begin, end);
    default: return BFloat16Sums<0>{arguments}.add_range(begin, end);
  }
}

}  // namespace vllm_arm
