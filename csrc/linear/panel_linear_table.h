// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include "isa/kernel_table.h"
#include "linear/panel_linear.h"
#include "operations.h"

namespace vllm_arm {

#define VLLM_ARM_DECLARE(isa)                                                                                \
  PanelFormat panel_format_##isa(PanelType);                                                                 \
  void pack_panel_rows_##isa(const PanelRows&, std::int64_t, std::int64_t);                                  \
  bool quantise_panel_rows_##isa(const QuantiseArguments&, std::int64_t, char*, std::int64_t, std::int64_t); \
  void panel_linear_##isa(const PanelProduct&, std::int64_t, std::int64_t, std::int64_t, std::int64_t);
VLLM_ARM_PANEL_LINEAR_VARIANTS(VLLM_ARM_DECLARE)
#undef VLLM_ARM_DECLARE

#define VLLM_ARM_ROW(isa)           \
  KernelVariant<PanelLinearKernel>{ \
      Isa::isa, {panel_format_##isa, pack_panel_rows_##isa, quantise_panel_rows_##isa, panel_linear_##isa}},
inline constexpr std::array kPanelLinearTable{VLLM_ARM_PANEL_LINEAR_VARIANTS(VLLM_ARM_ROW)};
#undef VLLM_ARM_ROW

}  // namespace vllm_arm
