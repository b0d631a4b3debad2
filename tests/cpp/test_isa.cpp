// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <array>
#include <cstdlib>
#include <stdexcept>

#include "isa/isa.h"
#include "norm/rms_norm_table.h"

using vllm_arm::Features;
using vllm_arm::Isa;

namespace {

Features n1() {
  Features features;
  features.asimd_half = features.dot_product = features.lse_atomics = true;
  return features;
}
Features bf16_without_sve() {
  Features features = n1();
  features.bfloat16 = features.int8_matmul = true;
  return features;
}
Features v2() {
  Features features = bf16_without_sve();
  features.sve = features.sve_bfloat16 = features.sve2 = true;
  features.sve_bytes = 16;
  return features;
}

constexpr std::array kAll{Isa::portable, Isa::neon, Isa::bf16, Isa::sve};

}  // namespace

TEST_CASE("the best variant that the CPU can run is selected") {
  CHECK(select_isa(kAll, Features{}, {}) == Isa::portable);
  CHECK(select_isa(kAll, n1(), {}) == Isa::neon);
  CHECK(select_isa(kAll, bf16_without_sve(), {}) == Isa::bf16);
  CHECK(select_isa(kAll, v2(), {}) == Isa::sve);
}

TEST_CASE("SVE without its bf16 instructions, and bf16 without i8mm, are passed over") {
  Features features = v2();
  features.sve_bfloat16 = false;
  CHECK(select_isa(kAll, features, {}) == Isa::bf16);
  features.int8_matmul = false;
  CHECK(select_isa(kAll, features, {}) == Isa::neon);
}

TEST_CASE("an op without the best variant takes the next one") {
  constexpr std::array few{Isa::portable, Isa::neon};
  CHECK(select_isa(few, v2(), {}) == Isa::neon);
  CHECK(select_isa(few, v2(), Isa::sve) == Isa::neon);
}

TEST_CASE("a forced variant is not exceeded") {
  CHECK(select_isa(kAll, v2(), Isa::portable) == Isa::portable);
  CHECK(select_isa(kAll, v2(), Isa::neon) == Isa::neon);
  CHECK(select_isa(kAll, v2(), Isa::sve) == Isa::sve);
}

TEST_CASE("forcing what the CPU cannot run is an error that names what is missing") {
  CHECK_THROWS_WITH_AS(static_cast<void>(select_isa(kAll, n1(), Isa::sve)),
                       "VLLM_ARM_ISA=sve: this CPU lacks bf16, i8mm, SVE, SVE bf16", std::invalid_argument);
}

TEST_CASE("an unknown name is an error that names the variants") {
  CHECK_THROWS_WITH_AS(static_cast<void>(vllm_arm::parse_isa("avx")),
                       "VLLM_ARM_ISA='avx': expected one of portable, neon, bf16, sve", std::invalid_argument);
  for (const Isa isa : vllm_arm::kAllIsas) CHECK(vllm_arm::parse_isa(vllm_arm::isa_name(isa)) == isa);
}

TEST_CASE("MIDR_EL1 names the core, whatever its revision") {
  CHECK(vllm_arm::core_name(0x413fd0c1) == "N1");
  CHECK(vllm_arm::core_name(0x410fd490) == "N2");
  CHECK(vllm_arm::core_name(0x411fd401) == "V1");
  CHECK(vllm_arm::core_name(0x410fd4f0) == "V2");
  CHECK(vllm_arm::core_name(0x410fd8e0) == "N3");
  CHECK(vllm_arm::core_name(0x410fd840) == "V3");
  CHECK(vllm_arm::core_name(0xc00fac30) == "other");
  CHECK(vllm_arm::core_name(0) == "unknown");
}

TEST_CASE("the kernel table follows VLLM_ARM_ISA, and has portable first") {
  const auto& table = vllm_arm::kRmsNormTable;
  CHECK(table[0].isa == Isa::portable);
  setenv("VLLM_ARM_ISA", "portable", 1);
  CHECK(vllm_arm::select_kernel(table).isa == Isa::portable);
  unsetenv("VLLM_ARM_ISA");
  const Isa best = vllm_arm::select_kernel(table).isa;
  for (const auto& variant : table) {
    if (vllm_arm::missing_features(variant.isa, vllm_arm::host_features()).empty()) CHECK(variant.isa <= best);
  }
}

#if defined(__aarch64__)
TEST_CASE("an aarch64 build holds the neon variant") { CHECK(vllm_arm::kRmsNormTable[1].isa == Isa::neon); }
#endif
