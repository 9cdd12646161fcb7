// Divides the work of a parallel region so that each thread reads memory in order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

namespace moechat {

// Cuts [0, count) into one contiguous range per thread. A thread takes pieces from the front of its own
// range, half of the rest at a time, so that it reads memory in order. Then it helps the others in the same
// way.
class WorkRanges {
 public:
  // In a cache line of its own: no two threads write to the same line except to take pieces.
  struct alignas(64) Range {
    std::atomic<std::int64_t> next;
    std::int64_t begin;
    std::int64_t end;
  };

  // Pieces are multiples of `grain`, except the last one. REQUIRES: `memory` has room for `threads` ranges.
  WorkRanges(Range* memory, std::int64_t threads, std::int64_t count, std::int64_t grain)
      : ranges_(memory), threads_(threads), grain_(grain) {
    const std::int64_t grains = (count + grain - 1) / grain;
    for (std::int64_t i = 0; i < threads; ++i) {
      Range* range = new (ranges_ + i) Range;
      range->begin = std::min(count, grains * i / threads * grain);
      range->end = std::min(count, grains * (i + 1) / threads * grain);
      range->next.store(range->begin, std::memory_order_relaxed);
    }
  }

  // Calls body(begin, end, last) for pieces until none is left; `last` marks the end of the thread's own
  // range.
  template <class Body>
  void work(std::int64_t thread, const Body& body) {
    for (std::int64_t i = 0; i < threads_; ++i) {
      Range& range = ranges_[(thread + i) % threads_];
      std::int64_t begin = range.next.load(std::memory_order_relaxed);
      while (begin < range.end) {
        const std::int64_t half = (range.end - begin) / 2 / grain_ * grain_;
        const std::int64_t end = std::min(range.end, begin + std::max(half, grain_));
        if (!range.next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
        body(begin, end, i == 0 && end == range.end);
        begin = range.next.load(std::memory_order_relaxed);
      }
    }
  }

  // Returns the first index of the range of a thread.
  std::int64_t begin_of(std::int64_t thread) const { return ranges_[thread % threads_].begin; }

 private:
  Range* ranges_;
  std::int64_t threads_;
  std::int64_t grain_;
};

}  // namespace moechat
