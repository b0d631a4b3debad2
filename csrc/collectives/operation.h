// SPDX-License-Identifier: Apache-2.0
// What the files of Communicator share.
#pragma once

#include <cstring>

#include "collectives/communicator.h"

namespace vllm_arm {

enum class OperationKind : std::uint8_t {
  all_reduce = 1,
  all_gather,
  gather,
  reduce_scatter,
  broadcast,
  direct,
  barrier,
};

struct Communicator::Operation {
  Waiter waiter;
  Fingerprint fingerprint;
  bool is_reader = true;

  // `detail`: whatever must be the same on every rank besides the kind.
  Operation(const Group& group, const char* name, OperationKind kind, std::uint64_t detail)
      : waiter(group, name), fingerprint(mix(kind, detail)) {
    group.check(name);
  }

  static Fingerprint mix(OperationKind kind, std::uint64_t detail) {
    constexpr std::uint64_t kGoldenRatio = 0x9e3779b97f4a7c15;
    return static_cast<Fingerprint>(static_cast<std::uint64_t>(kind) << 12 | (detail * kGoldenRatio) >> 52);
  }
};

// Bytes [begin, end) of something.
struct Range {
  std::int64_t begin, end;
  std::int64_t size() const { return end - begin; }
};

// The part of `bytes` that is number `i` of `count`, in whole cache lines apart from the end.
inline Range part_of(std::int64_t bytes, int i, int count) {
  const std::int64_t lines = (bytes + kCacheLine - 1) / kCacheLine;
  const std::int64_t part = (lines + count - 1) / count * kCacheLine;
  return {std::min(i * part, bytes), std::min((i + 1) * part, bytes)};
}

// Piece number `i` of `bytes` in pieces of `piece`; empty past the end.
inline Range piece_of(std::int64_t bytes, std::int64_t i, std::int64_t piece) {
  return {std::min(i * piece, bytes), std::min((i + 1) * piece, bytes)};
}

inline std::int64_t pieces_of(std::int64_t bytes, std::int64_t piece) { return (bytes + piece - 1) / piece; }

inline void copy_bytes(void* destination, const void* source, std::int64_t bytes) {
  if (bytes > 0 && destination != source) std::memcpy(destination, source, static_cast<std::size_t>(bytes));
}

// Whether messages go by lines: `written` bytes by this rank, `read` bytes from all others.
inline bool Communicator::is_small(std::int64_t written, std::int64_t read) const {
  constexpr std::int64_t kMostRead = 32 << 10;
  return written <= tuning_.most_by_lines && read <= kMostRead;
}

// Visits the other ranks, beginning after this one, so that not all look at the same at the same time.
template <typename Visit>
void Communicator::for_each_peer(const Visit& visit) const {
  for (int i = 1; i < world_size(); ++i) visit((rank() + i) % world_size());
}

// Runs `run(lane, lanes)` for as many lanes as `bytes` are worth, which depends on nothing that differs between ranks.
template <typename Run>
void Communicator::in_lanes(std::int64_t bytes, const Run& run) {
  constexpr std::int64_t kLeastBytes = 128 << 10;
  const int lanes = static_cast<int>(std::clamp<std::int64_t>(bytes / kLeastBytes, 1, layout_.lanes()));
  if (lanes == 1) return run(0, 1);
  std::vector<std::exception_ptr> errors(lanes);
  run_lanes_(lanes, [&](int lane) {
    try {
      run(lane, lanes);
    } catch (...) {
      errors[lane] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace vllm_arm
