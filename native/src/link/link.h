// A link moves block records from the far tier into pages. There are four: from files (file_link.h), from
// pinned host memory into VRAM (cuda_link.h), from host memory at a programmed speed (sim_link.h), and on the
// clock of a simulation (simulate/virtual_link.h). The first three are backends of QueuedLink
// (queued_link.h).
//
// Contract of every link
// - A transfer is named by its slot, a number below slots() that the caller chooses (the cache uses the page
//   number). Two unfinished transfers never share a slot.
// - A transfer is *queued*, then *started*, then *finished*. Finished transfers stay in the completion list
//   until poll() returns them, each exactly once. Between `submit` and the completion only the link may touch
//   the target; after the completion it never does again.
// - Queued transfers start in order of priority (demand, next, later), within one priority in order of
//   submission (promotion counts as submission). Little is in flight at a time, so that a demand waits for a
//   few blocks, not for the queue.
// - A completion carries 0 or an errno. A failing transfer fails alone. A link that fails as a whole
//   (`failure`) finishes all queued and started transfers with that error and accepts no more: `submit`
//   throws.
// - submit, cancel, promote, poll and stats never block on a transfer. `wait` does, until there is something
//   to poll, its limit has passed, or the link was stopped or failed: every wait in a link has a predicate, a
//   stop flag and an error flag.
// - All calls are safe from any thread (VirtualLink: of one thread). After fork() only the destructor may be
//   called in the child, where it does nothing that waits.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace moechat {

// kNext: prefetches for the next layer; kLater: for layers after it.
enum class Priority : std::uint8_t { kDemand = 0, kNext = 1, kLater = 2 };
constexpr int kPriorities = 3;

// Bytes [offset, offset + bytes) of a region (a file or a piece of host memory that the link was made with).
struct Transfer {
  std::uint32_t slot;
  std::int32_t region;
  std::int64_t offset;
  std::int64_t bytes;
  unsigned char* to;
  Priority priority;
};

struct Completion {
  std::uint32_t slot;
  int error;  // 0, or an errno
};

// The error of a transfer whose record does not have its checksum, read twice.
constexpr int kRecordDamaged = EBADMSG;

struct LinkStats {
  std::int64_t bytes[kPriorities] = {};      // moved, by the priority at which the transfer started
  std::int64_t transfers[kPriorities] = {};  // finished without an error
  std::int64_t operations = 0;               // reads or copies issued; neighbours that were merged count once
  std::int64_t errors = 0;
  std::int64_t rereads = 0;  // reads again of records that did not have their checksums
  std::int64_t cancelled = 0;
  std::int64_t queued = 0;     // now
  std::int64_t in_flight = 0;  // now, bytes
  double busy_seconds = 0;     // with at least one transfer in flight
  double bandwidth = 0;        // bytes a second while busy: a moving estimate; 0 before the first transfer
  // More it cannot be lately: what is in flight has not arrived yet. Infinite while nothing is in flight.
  double bandwidth_bound = std::numeric_limits<double>::infinity();
};

// Additional functions of a link into a GPU's memory. They order copies and kernels on the GPU, so that no
// thread waits. `stream` is a CUstream.
class StreamOrder {
 public:
  virtual ~StreamOrder() = default;

  // Work that is put into `stream` from now on runs after the transfers into these slots, which must have
  // been submitted and not cancelled; finished ones, failed or not, count as done. Returns false, and orders
  // nothing, if some have not started within the limit. Demands start at once unless a thread has to read
  // them first. Throws std::runtime_error when the link has failed or was stopped.
  virtual bool fills_first(void* stream, const std::uint32_t* slots, std::int64_t count,
                           std::chrono::microseconds limit) = 0;
  // Transfers into these slots that are submitted from now on run after all work already put into `stream`.
  // Throws std::runtime_error as above.
  virtual void reads_first(void* stream, const std::uint32_t* slots, std::int64_t count) = 0;
};

class Link {
 public:
  virtual ~Link() = default;

  virtual const char* name() const = 0;
  // Where these bytes come from, for messages: "FILE at byte N".
  virtual std::string describe(std::int32_t region, std::int64_t offset) const = 0;
  // Bytes of a region; regions are numbered from 0. Throws std::out_of_range.
  virtual std::int64_t region_bytes(std::int32_t region) const = 0;
  virtual std::int32_t regions() const = 0;

  // Makes slots [0, slots) available; once, before the first submit. A link serves one caller: throws
  // std::logic_error at the second call.
  virtual void open(std::uint32_t slots) = 0;

  // Throws std::invalid_argument (slot, region or range impossible; nothing was queued), std::runtime_error
  // when the link has failed.
  virtual void submit(const Transfer* transfers, std::int64_t count) = 0;
  // True: the transfer had not started and never will; there will be no completion.
  virtual bool cancel(std::uint32_t slot) = 0;
  // Moves a queued transfer to the end of a higher priority's queue; nothing happens if it has started, or if
  // it has that priority or a higher one already.
  virtual void promote(std::uint32_t slot, Priority priority) = 0;

  // Appends all completions that have not been handed out; returns how many.
  virtual std::int64_t poll(std::vector<Completion>* out) = 0;
  // True when poll has something. False: the limit has passed or the link is stopped. A failed link always
  // has its completions out, so it never makes a caller wait.
  virtual bool wait(std::chrono::microseconds limit) = 0;

  // Null for links into host memory: a completion says when the bytes may be read, and its caller when they
  // are not read any more.
  virtual StreamOrder* stream_order() { return nullptr; }

  // A simulated link moves at the speed of memory while this is on, to fill a cache before a measurement;
  // others move as fast as they can anyway.
  virtual void hurry(bool on) { (void)on; }

  // Empty, or why the whole link has failed.
  virtual std::string failure() const = 0;
  virtual LinkStats stats() const = 0;
  // Seconds of the clock that busy_seconds counts in; never falling.
  virtual double now() const = 0;

  // Cancels queued transfers and waits until nothing is in flight, at most `limit`. True: nothing will write
  // to any target any more. False: something is stuck; the caller must keep the targets mapped for ever.
  // Idempotent; wakes every waiter.
  virtual bool stop(std::chrono::milliseconds limit) = 0;
};

}  // namespace moechat
