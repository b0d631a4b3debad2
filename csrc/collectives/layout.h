// SPDX-License-Identifier: Apache-2.0
// Where things lie in a rank's segment. Each rank writes its own segment only, apart from Control::failure.
#pragma once

#include "collectives/block_stream.h"

namespace vllm_arm {

inline constexpr std::int64_t kRingLines = 2048;
inline constexpr int kMaximumLanes = 32;
inline constexpr std::int64_t kLaneBlocks = 8;    // the pipeline of all_reduce has six under way
inline constexpr std::int64_t kDirectBlocks = 4;  // of send and recv, for each destination

// The same on every rank: made from the same numbers.
class Layout {
 public:
  // A segment of `bytes` in a group of `world_size` ranks, for large messages in `lanes` independent stripes. Throws
  // CollectiveError where `bytes` are too few.
  Layout(std::int64_t bytes, int world_size, int lanes);

  int lanes() const { return lanes_; }
  std::int64_t lane_block_bytes() const { return lane_block_bytes_; }
  std::int64_t direct_block_bytes() const { return direct_block_bytes_; }

  Control* control(std::byte* segment) const { return reinterpret_cast<Control*>(segment); }
  std::span<Line> lines(std::byte* segment) const;
  // What the segment's owner has read of the lines, the lane's blocks and the direct blocks of `writer`.
  SharedWord* lines_done(std::byte* segment, int writer) const;
  SharedWord* lane_done(std::byte* segment, int lane, int writer) const;
  SharedWord* direct_done(std::byte* segment, int writer) const;
  BlockRing lane_ring(std::byte* segment, int lane) const;
  BlockRing direct_ring(std::byte* segment, int reader) const;

 private:
  int world_size_, lanes_;
  std::int64_t lines_, lane_flags_, direct_flags_, direct_data_, lane_data_;  // offsets
  std::int64_t lane_block_bytes_, direct_block_bytes_;
};

}  // namespace vllm_arm
