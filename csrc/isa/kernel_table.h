// SPDX-License-Identifier: Apache-2.0
// One table per op, made from the op's list of variants (generated from cmake/operations.cmake).
#pragma once

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "isa/isa.h"

namespace vllm_arm {

template <typename Kernel>
struct KernelVariant {
  Isa isa;
  Kernel kernel;
};

// The variant of `table` that runs on this CPU under VLLM_ARM_ISA. Throws as select_isa does.
template <typename Kernel, std::size_t N>
const KernelVariant<Kernel>& select_kernel(const std::array<KernelVariant<Kernel>, N>& table) {
  std::array<Isa, N> variants;
  for (std::size_t i = 0; i < N; ++i) variants[i] = table[i].isa;
  const Isa selected = select_isa(variants, host_features(), forced_isa());
  for (const auto& variant : table) {
    if (variant.isa == selected) return variant;
  }
  throw std::logic_error("no variant " + std::string(isa_name(selected)));
}

}  // namespace vllm_arm
