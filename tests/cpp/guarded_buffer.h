// SPDX-License-Identifier: Apache-2.0
// Memory between two pages that no access survives.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

namespace vllm_arm::tests {

// Bytes that end at a guard page, or begin after one; the rest of their pages is out of reach of small errors only on
// the other side, so tests use both places. Filled with `fill`.
class GuardedBuffer {
 public:
  enum class Place { begin, end };

  GuardedBuffer(std::size_t bytes, Place place, unsigned char fill) : bytes_(bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t usable = (bytes + page - 1) / page * page;
    mapped_bytes_ = usable + 2 * page;
    mapped_ = static_cast<char*>(mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    char* begin = mapped_ + page;
    if (usable > 0 && mprotect(begin, usable, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    data_ = place == Place::begin ? begin : begin + usable - bytes;
    if (bytes > 0) std::memset(data_, fill, bytes);
  }
  ~GuardedBuffer() { munmap(mapped_, mapped_bytes_); }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  char* data() { return data_; }
  const char* data() const { return data_; }
  template <typename Number>
  Number* as() {
    return reinterpret_cast<Number*>(data_);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_, mapped_bytes_;
  char* mapped_;
  char* data_;
};

}  // namespace vllm_arm::tests
