// The interface between a LayerSchedule and the unit that computes: blocks, the CPU's part of a layer, time.
//
// The schedule decides, an executor acts and says how long it took. There are four: HostExecutor and
// DeviceExecutor (executors.h) compute for real; the simulator's HostClock and CardClock (simulate/clocks.h)
// only move a clock of their own.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "memory/slab.h"

namespace moechat {

// Copies and kernels cannot be ordered any more.
class LinkFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Blocks [begin, end) of a row that the CPU computes from the far tier.
struct FarPiece {
  std::int32_t row;
  std::int32_t begin;
  std::int32_t end;
};

// One pass over one layer. Rows are those of Grouped; they are taken in groups of neighbours, and within a
// group in any order, each from its first block to its last.
class LayerExecutor {
 public:
  virtual ~LayerExecutor() = default;

  // ---- the near tier
  // Opens the next group; false when there is none.
  virtual bool next_group() = 0;
  virtual std::int32_t first_row() const = 0;
  virtual std::int32_t end_row() const = 0;
  // (token, block) pairs. The schedule adds rows to a call until it has work_of_call; of a row it adds
  // only so many blocks that the call stays within work_of_row, but at least one.
  virtual std::int64_t work_of_call() const = 0;
  virtual std::int64_t work_of_row() const = 0;
  // Adds the next block of a row. Rows of one call in ascending order, blocks of a row in ascending order.
  // landed: the page is filled; else the link is filling it.
  virtual void add(std::int32_t row, std::int32_t block, PageId page, bool landed) = 0;
  // (token, block) pairs added since the last `compute`.
  virtual std::int64_t pending() const = 0;
  // Runs the blocks that were added; returns how many. Transfers that are submitted afterwards may refill
  // their pages. Throws LinkFailure, or what launching kernels throws.
  virtual std::int64_t compute() = 0;
  // Forgets the blocks that were added.
  virtual void drop() = 0;
  // Every row of the group has been computed.
  virtual void finish_group() = 0;

  // ---- launching behind copies, where the link orders copies and kernels (StreamOrder)
  virtual bool orders_copies() const { return false; }
  // Puts the next `compute` behind the copies into the pages that were added and have not landed. False when
  // some of them have not started yet; it has then waited for them for a slice of time. Throws
  // LinkFailure.
  virtual bool follow_copies() { return true; }

  // ---- the far tier
  // Threads that far_compute uses.
  virtual std::int64_t far_threads() const = 0;
  // Computes the pieces where they lie.
  virtual void far_compute(const std::vector<FarPiece>& pieces) = 0;

  // ---- time
  virtual double now() = 0;  // seconds, never falling
  // Waits for the link, for a slice of time at most; true when something has arrived.
  virtual bool wait() = 0;
  // Called a few times a second at least. May throw, and the pass is aborted.
  virtual void poll_interrupt() {}
};

}  // namespace moechat
