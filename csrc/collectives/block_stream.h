// SPDX-License-Identifier: Apache-2.0
// Large messages: one writer, any number of readers, and a ring of blocks with a flag each, on a line of its own.
// Numbers, flags and acknowledgements are as in line_stream.h.
#pragma once

#include "collectives/line_stream.h"

namespace vllm_arm {

struct BlockRing {
  std::byte* data;     // `count` blocks of `block_bytes`
  SharedLine* flags;   // `count`
  std::int64_t count;  // a power of two
  std::int64_t block_bytes;

  std::byte* block(std::int64_t number) const { return data + (number & (count - 1)) * block_bytes; }
  SharedWord& flag(std::int64_t number) const { return flags[number & (count - 1)].word; }
};

class BlockWriter {
 public:
  BlockWriter(BlockRing ring, std::vector<Acknowledgement> acknowledgements)
      : ring_(ring), room_(ring.count, std::move(acknowledgements)) {}

  // The next block, to be filled and then published.
  template <typename Waiter>
  std::byte* begin(const Waiter& waiter) {
    room_.wait(next_ + 1, waiter);
    return ring_.block(next_);
  }
  void publish(Fingerprint fingerprint) {
    order_stores();
    ring_.flag(next_).store(flag_of(next_, fingerprint), std::memory_order_release);
    ++next_;
  }

 private:
  BlockRing ring_;
  Room<DirectMemory> room_;
  std::int64_t next_ = 0;
};

class BlockReader {
 public:
  BlockReader(int writer, BlockRing ring, SharedWord* done) : writer_(writer), ring_(ring), done_(done) {}

  // The next block, once it is published; good until it is released.
  template <typename Waiter>
  const std::byte* wait(Fingerprint fingerprint, const Waiter& waiter) const {
    std::uint64_t flag = 0;
    waiter.wait(writer_, ring_.flag(next_), [&](std::uint64_t seen) {
      flag = seen;
      return is_flag_of(seen, next_);
    });
    if (flag != flag_of(next_, fingerprint)) waiter.mismatch(writer_);
    return ring_.block(next_);
  }
  // Lets the writer have the next `count` blocks, read or not.
  void release(std::int64_t count = 1) {
    next_ += count;
    done_->store(static_cast<std::uint64_t>(next_), std::memory_order_release);
  }

 private:
  int writer_;
  BlockRing ring_;
  SharedWord* done_;
  std::int64_t next_ = 0;
};

}  // namespace vllm_arm
