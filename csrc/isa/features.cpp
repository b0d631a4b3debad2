// SPDX-License-Identifier: Apache-2.0
#include "isa/isa.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#include <sys/prctl.h>

#include <fstream>
#endif

namespace vllm_arm {
namespace {

#if defined(__aarch64__)
// From sysfs, or from the register, for which the kernel answers where HWCAP_CPUID is set.
std::uint64_t read_midr(bool has_cpuid) {
  std::ifstream file("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1");
  std::uint64_t midr = 0;
  if (file >> std::hex >> midr) return midr;
  if (has_cpuid) asm("mrs %0, MIDR_EL1" : "=r"(midr));
  return midr;
}

Features detect() {
  const unsigned long hwcap = getauxval(AT_HWCAP);
  const unsigned long hwcap2 = getauxval(AT_HWCAP2);
  Features features;
  features.asimd_half = hwcap & HWCAP_ASIMDHP;
  features.dot_product = hwcap & HWCAP_ASIMDDP;
  features.lse_atomics = hwcap & HWCAP_ATOMICS;
  features.bfloat16 = hwcap2 & HWCAP2_BF16;
  features.int8_matmul = hwcap2 & HWCAP2_I8MM;
  features.sve = hwcap & HWCAP_SVE;
  features.sve_bfloat16 = hwcap2 & HWCAP2_SVEBF16;
  features.sve2 = hwcap2 & HWCAP2_SVE2;
  if (features.sve) {
    const int length = prctl(PR_SVE_GET_VL);
    features.sve_bytes = length < 0 ? 0 : static_cast<std::uint32_t>(length & PR_SVE_VL_LEN_MASK);
  }
  features.midr = read_midr(hwcap & HWCAP_CPUID);
  return features;
}
#else
Features detect() { return {}; }
#endif

}  // namespace

const Features& host_features() {
  static const Features features = detect();
  return features;
}

// Part numbers: "Main ID Register" in the technical reference manual of each core.
std::string_view core_name(std::uint64_t midr) {
  if (midr == 0) return "unknown";
  const std::uint64_t implementer = (midr >> 24) & 0xff;
  const std::uint64_t part = (midr >> 4) & 0xfff;
  constexpr std::uint64_t kArmLimited = 0x41;
  if (implementer != kArmLimited) return "other";
  switch (part) {
    case 0xd0c: return "N1";
    case 0xd40: return "V1";
    case 0xd49: return "N2";
    case 0xd4f: return "V2";
    case 0xd8e: return "N3";
    case 0xd83:
    case 0xd84: return "V3";
    default: return "other";
  }
}

}  // namespace vllm_arm
