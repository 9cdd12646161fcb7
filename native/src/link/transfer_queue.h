// The transfers of a link by slot: queues by priority, bytes in flight, completions and figures.
//
// No clock, no thread and no lock: the caller passes the time and serialises. Links over real memory
// (queued_link.h) and the link of the simulator (simulate/virtual_link.h) run on this one queue.
//
// Invariants
// - A slot is idle, queued (in exactly one of the lists), started, or done (its completion has not been
// taken).
//   Only `begin` makes a transfer started, only `finish` ends it; started() and in_flight() follow.
// - While something is started, at most in_flight_limit bytes are (demand_limit where a demand starts), or
//   one transfer that is larger; bytes that have landed do not count. A prefetch starts only below a third of
//   that, or where two of them fit: a demand that comes then waits for little, and demands by themselves
//   still fill the link.
// - A batch has at most a quarter of the bytes that may be in flight when its first transfer starts, or one
//   transfer that is larger. So where there is work for it, at least two batches are under way: the next one
//   moves while the end of the last one is noticed and another one is issued.
// - After open() a transfer allocates nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "link/link.h"

namespace moechat {

class TransferQueue {
 public:
  static constexpr std::uint32_t kNone = 0xffffffffu;
  enum class State : std::uint8_t { kIdle, kQueued, kStarted, kDone };

  struct Node {
    Transfer transfer{};
    std::uint32_t next = kNone;
    std::uint32_t previous = kNone;
    State state = State::kIdle;
    bool alone = false;   // was part of a merged read that failed: try it by itself
    bool landed = false;  // its bytes are there, and are being looked at
    bool again = false;   // its record did not have its checksum when it was read for the first time
    double queued = 0;    // when it was submitted
  };

  TransferQueue(std::int64_t in_flight_limit, std::int64_t demand_limit)
      : in_flight_limit_(in_flight_limit), demand_limit_(demand_limit) {}

  // Times are seconds of one clock and never fall.
  void open(std::uint32_t slots);
  std::size_t slots() const { return nodes_.size(); }
  const Node& operator[](std::uint32_t slot) const { return nodes_[slot]; }

  // REQUIRES: the slot is idle.
  void push(const Transfer& transfer, double now);
  // Takes back what `push` queued, as if it had never been there. REQUIRES: queued.
  void withdraw(std::uint32_t slot);
  // False if the slot is not queued.
  bool cancel(std::uint32_t slot);
  void cancel_all();
  // Does nothing unless the slot is queued at a lower priority.
  void promote(std::uint32_t slot, Priority priority);

  std::uint32_t front() const;  // the next transfer to start, or kNone
  // Most bytes in flight when such a transfer starts.
  std::int64_t limit(const Transfer& transfer) const {
    if (transfer.priority == Priority::kDemand) return demand_limit_;
    return std::max(in_flight_limit_ / kPrefetchShare, std::min(in_flight_limit_, 2 * transfer.bytes));
  }
  bool room(const Transfer& transfer) const {
    return started_ == 0 || in_flight_ + transfer.bytes <= limit(transfer);
  }
  // Most bytes of a batch that begins with such a transfer.
  std::int64_t batch_bytes(const Transfer& first) const {
    return std::min(limit(first), in_flight_limit_) / kBatchesInFlight;
  }
  bool startable() const {
    const std::uint32_t slot = front();
    return slot != kNone && room(nodes_[slot].transfer);
  }
  // REQUIRES: queued.
  void begin(std::uint32_t slot, double now);
  // Begins the next transfer and those behind it that have its priority and find room, as long as
  // joins(node of the one before, node of the next) holds; at most `most`, and beyond the first no more than
  // most_bytes in all. Returns how many, in slots. REQUIRES: startable(), most >= 1.
  template <class Joins>
  std::size_t begin_run(std::uint32_t* run, std::size_t most, std::int64_t most_bytes, double now,
                        const Joins& joins) {
    std::size_t count = 0;
    std::uint32_t slot = front();
    for (std::int64_t bytes = 0;;) {
      begin(slot, now);
      run[count++] = slot;
      if (count == most || !startable()) return count;
      const Node& last = nodes_[slot];
      bytes += last.transfer.bytes;
      slot = front();
      const Node& next = nodes_[slot];
      if (bytes + next.transfer.bytes > most_bytes) return count;
      if (next.transfer.priority != last.transfer.priority || !joins(last, next)) return count;
    }
  }
  // The same without a limit of bytes.
  template <class Joins>
  std::size_t begin_run(std::uint32_t* run, std::size_t most, double now, const Joins& joins) {
    return begin_run(run, most, std::numeric_limits<std::int64_t>::max(), now, joins);
  }
  // Whether `next` continues `last` in its region.
  static bool adjacent(const Transfer& last, const Transfer& next) {
    return next.region == last.region && next.offset == last.offset + last.bytes;
  }
  // REQUIRES: started. error: 0, or an errno.
  void finish(std::uint32_t slot, int error, double now);
  // A started transfer that nothing writes for any more goes back to the front of its queue, to be tried by
  // itself.
  void put_back(std::uint32_t slot, double now);
  // Everything queued finishes with `error`.
  void fail_queued(int error);
  void operation_begun() { ++stats_.operations; }
  // The bytes of a started transfer are there: they are not in flight any more. `finish` or `put_back`
  // follows.
  void landed(std::uint32_t slot);
  // Notes that a started transfer is made a second time. The caller puts it back.
  void note_reread(std::uint32_t slot) {
    nodes_[slot].again = true;
    ++stats_.rereads;
  }

  // Forgets what the bandwidth estimate has not absorbed yet: it moved in no time.
  void forget_window() { window_busy_ = 0, window_bytes_ = 0; }

  std::int64_t queued() const { return stats_.queued; }
  std::int64_t started() const { return started_; }
  double bandwidth() const { return stats_.bandwidth; }  // as in LinkStats, of whole windows
  bool has_completions() const { return !completions_.empty(); }
  // Appends all completions; returns how many.
  std::int64_t take_completions(std::vector<Completion>* out);
  LinkStats stats(double now) const;

 private:
  static constexpr std::int64_t kPrefetchShare = 3;
  static constexpr std::int64_t kBatchesInFlight = 4;

  struct List {
    std::uint32_t first = kNone;
    std::uint32_t last = kNone;
  };
  void append(std::uint32_t slot);
  void unlink(std::uint32_t slot);
  void end_started(std::uint32_t slot, double now);
  void count_bandwidth(std::int64_t bytes, double now);
  template <class Body>
  void drain_queues(const Body& body);

  const std::int64_t in_flight_limit_;
  const std::int64_t demand_limit_;
  std::vector<Node> nodes_;  // by slot
  List queues_[kPriorities];
  std::vector<Completion> completions_;
  std::int64_t started_ = 0;
  std::int64_t in_flight_ = 0;  // bytes
  LinkStats stats_;

  double busy_since_ = 0;   // start of the current busy time, if started_ > 0
  double busy_ = 0;         // seconds busy before it
  double counted_ = 0;      // busy time up to here is in the window
  double window_busy_ = 0;  // of the bandwidth estimate's current window
  std::int64_t window_bytes_ = 0;
};

}  // namespace moechat
