// SPDX-License-Identifier: Apache-2.0
#include "collectives/layout.h"

namespace vllm_arm {
namespace {

constexpr std::int64_t kDirectShare = 8;  // of the segment for send and recv: one in so many

std::int64_t down_to_lines(std::int64_t bytes) { return bytes / kCacheLine * kCacheLine; }

SharedLine* line_at(std::byte* segment, std::int64_t offset) { return reinterpret_cast<SharedLine*>(segment + offset); }

}  // namespace

Layout::Layout(std::int64_t bytes, int world_size, int lanes) : world_size_(world_size), lanes_(lanes) {
  const std::int64_t acknowledgements = (lanes + 2) * world_size;
  lines_ = static_cast<std::int64_t>(sizeof(Control)) + acknowledgements * kCacheLine;
  lane_flags_ = lines_ + kRingLines * kCacheLine;
  direct_flags_ = lane_flags_ + lanes * kLaneBlocks * kCacheLine;
  direct_data_ = direct_flags_ + world_size * kDirectBlocks * kCacheLine;
  direct_block_bytes_ = down_to_lines(bytes / kDirectShare / world_size / kDirectBlocks);
  lane_data_ = direct_data_ + world_size * kDirectBlocks * direct_block_bytes_;
  lane_block_bytes_ = down_to_lines((bytes - lane_data_) / lanes / kLaneBlocks);
  // An all_reduce gives each rank at least one line of each block.
  const std::int64_t least_block = world_size * kCacheLine;
  if (direct_block_bytes_ < kCacheLine || lane_block_bytes_ < least_block) {
    throw CollectiveError("bytes_per_rank is " + std::to_string(bytes) + ", too few for " + std::to_string(world_size) +
                          " ranks and " + std::to_string(lanes) + " threads: expected 8388608");
  }
}

std::span<Line> Layout::lines(std::byte* segment) const {
  return {reinterpret_cast<Line*>(segment + lines_), static_cast<std::size_t>(kRingLines)};
}

SharedWord* Layout::lines_done(std::byte* segment, int writer) const {
  return &line_at(segment, sizeof(Control))[writer].word;
}

SharedWord* Layout::direct_done(std::byte* segment, int writer) const {
  return &line_at(segment, sizeof(Control))[world_size_ + writer].word;
}

SharedWord* Layout::lane_done(std::byte* segment, int lane, int writer) const {
  return &line_at(segment, sizeof(Control))[(2 + lane) * world_size_ + writer].word;
}

BlockRing Layout::lane_ring(std::byte* segment, int lane) const {
  return {segment + lane_data_ + lane * kLaneBlocks * lane_block_bytes_,
          line_at(segment, lane_flags_) + lane * kLaneBlocks, kLaneBlocks, lane_block_bytes_};
}

BlockRing Layout::direct_ring(std::byte* segment, int reader) const {
  return {segment + direct_data_ + reader * kDirectBlocks * direct_block_bytes_,
          line_at(segment, direct_flags_) + reader * kDirectBlocks, kDirectBlocks, direct_block_bytes_};
}

}  // namespace vllm_arm
