// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <elf.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/elf_atomics.h"

namespace {

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::vector<char>& content) {
    const int descriptor = mkstemp(path_.data());
    REQUIRE(descriptor >= 0);
    close(descriptor);
    std::ofstream(path_, std::ios::binary).write(content.data(), static_cast<std::streamsize>(content.size()));
  }
  ~TemporaryFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_ = "/tmp/vllm_arm_elf_XXXXXX";
};

std::vector<char> elf_with(const std::vector<std::uint32_t>& code, std::uint16_t machine = EM_AARCH64) {
  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_CLASS] = ELFCLASS64;
  header.e_ident[EI_DATA] = ELFDATA2LSB;
  header.e_machine = machine;
  header.e_shoff = sizeof header;
  header.e_shnum = 1;
  Elf64_Shdr section{};
  section.sh_type = SHT_PROGBITS;
  section.sh_flags = SHF_EXECINSTR;
  section.sh_offset = sizeof header + sizeof section;
  section.sh_size = code.size() * 4;
  std::vector<char> file(section.sh_offset + section.sh_size);
  std::memcpy(file.data(), &header, sizeof header);
  std::memcpy(file.data() + sizeof header, &section, sizeof section);
  if (!code.empty()) std::memcpy(file.data() + section.sh_offset, code.data(), section.sh_size);
  return file;
}

}  // namespace

TEST_CASE("LSE and exclusive instructions are told apart, and from others") {
  const TemporaryFile file(elf_with({
      0xf8e00041,  // ldaddal x0, x1, [x2]
      0xb8a18041,  // swpa w1, w1, [x2]
      0xc8e0fc41,  // casal x0, x1, [x2]
      0x085f7c41,  // ldxrb w1, [x2]
      0xc85ffc41,  // ldaxr x1, [x2]
      0xc8007c41,  // stxr w0, x1, [x2]
      0xf9400041,  // ldr x1, [x2]
      0xb8bfc041,  // ldapr w1, [x2]
      0xd503201f,  // nop
  }));
  const auto counts = vllm_arm::count_atomics(file.path());
  CHECK(counts.is_aarch64);
  CHECK(counts.lse == 3);
  CHECK(counts.exclusive == 2);
}

TEST_CASE("a library of another architecture has none") {
  const TemporaryFile file(elf_with({0xf8e00041}, EM_X86_64));
  const auto counts = vllm_arm::count_atomics(file.path());
  CHECK_FALSE(counts.is_aarch64);
  CHECK(counts.lse == 0);
}

TEST_CASE("what is no ELF file is an error that names the path") {
  CHECK_THROWS_WITH_AS(vllm_arm::count_atomics("/nonexistent/libgomp.so"), "/nonexistent/libgomp.so: cannot be read",
                       std::runtime_error);
  const TemporaryFile text({'h', 'e', 'l', 'l', 'o'});
  CHECK_THROWS_AS(vllm_arm::count_atomics(text.path()), std::runtime_error);
  std::vector<char> truncated = elf_with({0xf8e00041, 0xf8e00041});
  truncated.resize(truncated.size() - 4);
  const TemporaryFile cut(truncated);
  CHECK_THROWS_WITH_AS(vllm_arm::count_atomics(cut.path()), (cut.path() + ": truncated ELF file").c_str(),
                       std::runtime_error);
}
