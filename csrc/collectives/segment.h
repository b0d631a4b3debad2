// SPDX-License-Identifier: Apache-2.0
// Shared memory without a name in any file system: it goes when the last process that has it mapped does, however that
// ends, and the size of /dev/shm does not limit it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "collectives/control.h"

namespace vllm_arm {

// How a peer finds a segment: /proc/PID/fd/FD of a process on the same host, in the same PID namespace.
struct Address {
  std::string host;  // the boot of the kernel and the PID namespace
  Process process;
  int descriptor = -1;
  std::uint64_t identity = 0;  // what the segment's Control::identity must hold
  std::int64_t bytes = 0;
  int threads = 0;

  std::string text() const;
  // Throws CollectiveError on anything that text() does not write.
  static Address parse(const std::string& text);
};

class Segment {
 public:
  // A new segment with all of its pages, on the memory node of the calling thread unless a policy says otherwise.
  // Throws std::runtime_error where there is no memory for it.
  explicit Segment(std::int64_t bytes);
  // A peer's. Throws std::runtime_error where it cannot be reached.
  explicit Segment(const Address& address);
  ~Segment();
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;

  std::byte* data() const { return data_; }
  Address address(int threads) const;
  // No process can map it from now on.
  void close_descriptor();

 private:
  void map();

  std::byte* data_ = nullptr;
  std::int64_t bytes_;
  int descriptor_ = -1;
  std::uint64_t identity_ = 0;
};

}  // namespace vllm_arm
