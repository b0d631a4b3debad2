// SPDX-License-Identifier: Apache-2.0
// The kernel variants, what the CPU offers, and which variant runs.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace vllm_arm {

// Ordered: a later variant needs all that an earlier one needs, and is preferred.
enum class Isa : std::uint8_t { portable, neon, bf16, sve };

inline constexpr Isa kAllIsas[] = {Isa::portable, Isa::neon, Isa::bf16, Isa::sve};

// What a CPU offers. A plain value, so that selection can be tested for any CPU on any machine.
struct Features {
  bool asimd_half = false;      // FEAT_FP16: arithmetic on fp16 vectors
  bool dot_product = false;     // FEAT_DotProd: SDOT and UDOT
  bool lse_atomics = false;     // FEAT_LSE: single-instruction atomics
  bool bfloat16 = false;        // FEAT_BF16: BFMMLA, BFDOT, BFCVT
  bool int8_matmul = false;     // FEAT_I8MM: SMMLA
  bool sve = false;             // FEAT_SVE
  bool sve_bfloat16 = false;    // FEAT_BF16 for SVE
  bool sve2 = false;            // FEAT_SVE2
  std::uint32_t sve_bytes = 0;  // bytes of an SVE vector in this process, 0 without SVE
  std::uint64_t midr = 0;       // MIDR_EL1, 0 where it cannot be read
};

// The features of the CPU that this process runs on, read once.
const Features& host_features();

// "N1", "N2", "V1", "V2", "N3", "V3" for Arm's Neoverse cores, "other" for any other MIDR_EL1, "unknown" for 0.
std::string_view core_name(std::uint64_t midr);

std::string_view isa_name(Isa isa);

// The variant of that name; throws std::invalid_argument naming the variants that there are.
Isa parse_isa(std::string_view name);

// What `features` lacks for `isa`, as a comma-separated list; empty where the CPU can run it.
std::string missing_features(Isa isa, const Features& features);

// The variant that runs: the last of `variants` (in the order of Isa, with `portable` first) that the CPU can run and
// that is not above `forced`. Throws std::invalid_argument where the CPU cannot run `forced` itself.
Isa select_isa(std::span<const Isa> variants, const Features& features, std::optional<Isa> forced);

// The value of VLLM_ARM_ISA, or nothing where it is unset or empty. Throws as parse_isa does.
std::optional<Isa> forced_isa();

}  // namespace vllm_arm
