// SPDX-License-Identifier: Apache-2.0
#include "host/elf_atomics.h"

#include <elf.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <vector>

namespace vllm_arm {
namespace {

// Encodings: "Atomic memory operations", "Compare and swap" and "Load/store exclusive register" in the A64 instruction
// set index of the Arm Architecture Reference Manual.
bool is_lse(std::uint32_t word) {
  const bool read_modify_write = (word & 0x3f200c00) == 0x38200000 && (word & 0x0000f000) <= 0x8000;
  const bool compare_and_swap = (word & 0x3fa07c00) == 0x08a07c00;
  return read_modify_write || compare_and_swap;
}

bool is_exclusive_load(std::uint32_t word) { return (word & 0x3fff7c00) == 0x085f7c00; }

template <typename Record>
Record record_at(const std::vector<char>& file, std::uint64_t offset, const std::string& path) {
  if (offset > file.size() || file.size() - offset < sizeof(Record))
    throw std::runtime_error(path + ": truncated ELF file");
  Record record;
  std::memcpy(&record, file.data() + offset, sizeof record);
  return record;
}

}  // namespace

AtomicCounts count_atomics(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error(path + ": cannot be read");
  const std::vector<char> file((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  const auto header = record_at<Elf64_Ehdr>(file, 0, path);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_ident[EI_DATA] != ELFDATA2LSB) {
    throw std::runtime_error(path + ": no 64-bit little-endian ELF file");
  }
  AtomicCounts counts;
  counts.is_aarch64 = header.e_machine == EM_AARCH64;
  if (!counts.is_aarch64) return counts;
  for (int i = 0; i < header.e_shnum; ++i) {
    const auto section = record_at<Elf64_Shdr>(file, header.e_shoff + i * sizeof(Elf64_Shdr), path);
    if (section.sh_type != SHT_PROGBITS || !(section.sh_flags & SHF_EXECINSTR)) continue;
    for (std::uint64_t at = 0; at + 4 <= section.sh_size; at += 4) {
      const auto word = record_at<std::uint32_t>(file, section.sh_offset + at, path);
      counts.lse += is_lse(word);
      counts.exclusive += is_exclusive_load(word);
    }
  }
  return counts;
}

}  // namespace vllm_arm
