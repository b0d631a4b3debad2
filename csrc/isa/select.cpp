// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <stdexcept>

#include "isa/isa.h"

namespace vllm_arm {

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::portable: return "portable";
    case Isa::neon: return "neon";
    case Isa::bf16: return "bf16";
    case Isa::sve: return "sve";
  }
  return "unknown";
}

Isa parse_isa(std::string_view name) {
  std::string names;
  for (const Isa isa : kAllIsas) {
    if (name == isa_name(isa)) return isa;
    names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  throw std::invalid_argument("VLLM_ARM_ISA='" + std::string(name) + "': expected one of " + names);
}

std::string missing_features(Isa isa, const Features& features) {
  std::string missing;
  const auto require = [&](Isa from, bool present, const char* name) {
    if (isa >= from && !present) missing += (missing.empty() ? "" : ", ") + std::string(name);
  };
  require(Isa::neon, features.asimd_half, "fp16 vectors");
  require(Isa::neon, features.dot_product, "dot product");
  require(Isa::bf16, features.bfloat16, "bf16");
  require(Isa::bf16, features.int8_matmul, "i8mm");
  require(Isa::sve, features.sve, "SVE");
  require(Isa::sve, features.sve_bfloat16, "SVE bf16");
  return missing;
}

Isa select_isa(std::span<const Isa> variants, const Features& features, std::optional<Isa> forced) {
  if (forced) {
    const std::string missing = missing_features(*forced, features);
    if (!missing.empty()) {
      throw std::invalid_argument("VLLM_ARM_ISA=" + std::string(isa_name(*forced)) + ": this CPU lacks " + missing);
    }
  }
  Isa selected = Isa::portable;
  for (const Isa isa : variants) {
    const bool allowed = !forced || isa <= *forced;
    if (allowed && isa > selected && missing_features(isa, features).empty()) selected = isa;
  }
  return selected;
}

std::optional<Isa> forced_isa() {
  const char* value = std::getenv("VLLM_ARM_ISA");
  if (value == nullptr || *value == '\0') return std::nullopt;
  return parse_isa(value);
}

}  // namespace vllm_arm
