// SPDX-License-Identifier: Apache-2.0
// Weights into panels and back, for every variant: they differ in the length of a run alone.
#include <algorithm>
#include <cstring>

#include "linear/panel_linear.h"

namespace vllm_arm {
namespace {

// Goes through a row of `bytes` and its runs in a panel, which are kBytes long and begin kPanelOutputs runs apart.
// copy(at, run, size) copies `size` bytes at `at` in the row and `run` in the panel.
template <std::int64_t kBytes, typename Copy>
void for_each_run(std::int64_t bytes, Copy copy) {
  std::int64_t at = 0, run = 0;
  for (; at + kBytes <= bytes; at += kBytes, run += kPanelOutputs * kBytes) copy(at, run, kBytes);
  if (at < bytes) copy(at, run, bytes - at);
}

// The length of a run as a constant, so that copying one is an instruction or two.
template <typename Copy>
void for_each_run(std::int64_t run_bytes, std::int64_t bytes, Copy copy) {
  switch (run_bytes) {
    case 1: return for_each_run<1>(bytes, copy);
    case 2: return for_each_run<2>(bytes, copy);
    case 4: return for_each_run<4>(bytes, copy);
    default: return for_each_run<8>(bytes, copy);
  }
}

}  // namespace

void pack_panels(const void* weight, std::int64_t row_bytes, std::int64_t n, std::int64_t k, PanelType type,
                 const PanelFormat& format, char* packed, std::int64_t panel_begin, std::int64_t panel_end) {
  const std::int64_t run_bytes = format.run * element_bytes(type);
  for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
    char* destination = packed + panel * panel_bytes(type, k);
    std::memset(destination, 0, static_cast<std::size_t>(panel_bytes(type, k)));
    const std::int64_t outputs = std::min(kPanelOutputs, n - panel * kPanelOutputs);
    for (std::int64_t output = 0; output < outputs; ++output) {
      const char* source = static_cast<const char*>(weight) + (panel * kPanelOutputs + output) * row_bytes;
      char* runs = destination + output * run_bytes;
      for_each_run(run_bytes, k * element_bytes(type), [&](std::int64_t at, std::int64_t run, std::int64_t size) {
        std::memcpy(runs + run, source + at, static_cast<std::size_t>(size));
      });
    }
  }
}

void unpack_panel_row(const char* packed, std::int64_t row, std::int64_t k, PanelType type, const PanelFormat& format,
                      void* output) {
  const std::int64_t run_bytes = format.run * element_bytes(type);
  const char* runs = packed + row / kPanelOutputs * panel_bytes(type, k) + row % kPanelOutputs * run_bytes;
  for_each_run(run_bytes, k * element_bytes(type), [&](std::int64_t at, std::int64_t run, std::int64_t size) {
    std::memcpy(static_cast<char*>(output) + at, runs + run, static_cast<std::size_t>(size));
  });
}

}  // namespace vllm_arm
