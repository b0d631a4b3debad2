// SPDX-License-Identifier: Apache-2.0
#include "collectives/segment.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

namespace vllm_arm {
namespace {

std::string error_text(int error) { return std::strerror(error); }

std::string host_name() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  char target[PATH_MAX] = {};
  const ssize_t length = readlink("/proc/self/ns/pid", target, sizeof target - 1);
  return (boot.empty() ? "unknown" : boot) + "/" + (length > 0 ? target : "unknown");
}

std::uint64_t random_identity() {
  std::uint64_t value = 0;
  if (getrandom(&value, sizeof value, 0) != sizeof value) {
    throw std::runtime_error("getrandom: " + error_text(errno));
  }
  return value | 1;  // 0 is what memory holds before
}

}  // namespace

std::string Address::text() const {
  std::ostringstream out;
  out << host << ' ' << process.pid << ' ' << process.start_time << ' ' << descriptor << ' ' << identity << ' ' << bytes
      << ' ' << threads;
  return out.str();
}

Address Address::parse(const std::string& text) {
  std::istringstream in(text);
  Address address;
  in >> address.host >> address.process.pid >> address.process.start_time >> address.descriptor >> address.identity >>
      address.bytes >> address.threads;
  if (!in || !(in >> std::ws).eof()) throw CollectiveError("'" + text + "' is no address of a segment");
  return address;
}

Segment::Segment(std::int64_t bytes) : bytes_(bytes), identity_(random_identity()) {
  descriptor_ = memfd_create("vllm_arm_collectives", MFD_CLOEXEC);
  if (descriptor_ < 0) throw std::runtime_error("memfd_create: " + error_text(errno));
  // Takes the pages now: a limit is met here, and not as a SIGBUS in the middle of an operation.
  const int error = ftruncate(descriptor_, bytes) != 0 ? errno : posix_fallocate(descriptor_, 0, bytes);
  if (error != 0) {
    close(descriptor_);
    throw std::runtime_error("no " + std::to_string(bytes) + " bytes of shared memory: " + error_text(error));
  }
  map();
  reinterpret_cast<Control*>(data_)->identity.word.store(identity_, std::memory_order_release);
}

Segment::Segment(const Address& address) : bytes_(address.bytes), identity_(address.identity) {
  if (address.host != host_name()) throw std::runtime_error("it is on another host or in another PID namespace");
  const std::string path = "/proc/" + std::to_string(address.process.pid) + "/fd/" + std::to_string(address.descriptor);
  descriptor_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor_ < 0) throw std::runtime_error("cannot open " + path + ": " + error_text(errno));
  struct stat status{};
  if (fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size != bytes_) {
    close(descriptor_);
    throw std::runtime_error(path + " is not its shared memory");
  }
  map();
  close_descriptor();
  if (reinterpret_cast<Control*>(data_)->identity.word.load(std::memory_order_acquire) != identity_) {
    munmap(data_, static_cast<std::size_t>(bytes_));
    throw std::runtime_error(path + " is not its shared memory");
  }
}

Segment::Segment(Segment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      descriptor_(std::exchange(other.descriptor_, -1)),
      identity_(other.identity_) {}

Segment::~Segment() {
  close_descriptor();
  if (data_ != nullptr) munmap(data_, static_cast<std::size_t>(bytes_));
}

Address Segment::address(int threads) const {
  return {host_name(), Process::self(), descriptor_, identity_, bytes_, threads};
}

void Segment::close_descriptor() {
  if (descriptor_ >= 0) close(std::exchange(descriptor_, -1));
}

void Segment::map() {
  void* mapped = mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                      descriptor_, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    close_descriptor();
    throw std::runtime_error("mmap of " + std::to_string(bytes_) + " bytes: " + error_text(error));
  }
  data_ = static_cast<std::byte*>(mapped);
}

}  // namespace vllm_arm
