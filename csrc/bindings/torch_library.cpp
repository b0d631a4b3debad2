// SPDX-License-Identifier: Apache-2.0
// The library vllm_arm of torch. Each family of ops has a file of its own beside this one, in which every binding
// checks its tensors, fills a plain struct and calls the selected kernel.
#include <array>
#include <string>

#include "bindings/arguments.h"
#include "isa/isa.h"
#include "operations.h"

namespace {

std::string active_isa(std::string operation) {
#define VLLM_ARM_ISA(isa) vllm_arm::Isa::isa,
#define VLLM_ARM_OPERATION(name, VARIANTS)                                                                      \
  if (operation == #name) {                                                                                     \
    constexpr std::array variants{VARIANTS(VLLM_ARM_ISA)};                                                      \
    return std::string(                                                                                         \
        vllm_arm::isa_name(vllm_arm::select_isa(variants, vllm_arm::host_features(), vllm_arm::forced_isa()))); \
  }
  VLLM_ARM_OPERATIONS(VLLM_ARM_OPERATION)
#undef VLLM_ARM_OPERATION
#undef VLLM_ARM_ISA
  STD_TORCH_CHECK(false, "active_isa: no op named '", operation, "'");
}

}  // namespace

STABLE_TORCH_LIBRARY(vllm_arm, library) { library.def("active_isa(str operation) -> str"); }

STABLE_TORCH_LIBRARY_IMPL(vllm_arm, CompositeExplicitAutograd, library) {
  library.impl("active_isa", TORCH_BOX(&active_isa));
}
