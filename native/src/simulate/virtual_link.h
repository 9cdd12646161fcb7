// A link without bytes and without threads, on a clock that its caller moves: for simulations.
//
// It runs on the TransferQueue of the links over real memory, so a schedule over it takes the same decisions.
// Operations end in the order in which they began, on a pipe: one begins to move when the one before it has
// moved and its own latency has passed.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "link/link.h"
#include "link/transfer_queue.h"

namespace moechat {

struct VirtualLinkOptions {
  std::int64_t block_bytes = 0;  // of every transfer
  double latency = 0;            // seconds from the start of an operation to its first byte
  // [n - 1]: seconds that an operation of n neighbouring blocks moves; as many as are merged at most.
  std::vector<double> seconds;
  std::vector<double> seconds_shared;  // the same while the CPU computes experts; empty: as `seconds`
  std::int64_t in_flight_bytes = 0;    // most bytes in flight, of which prefetches take a third
  // Of a card. Seconds of the caller for each operation and each copy of it; and from the end of an operation
  // until the link's thread begins the next one.
  double call = 0;
  double call_copy = 0;
  double wake = 0;
  // As cuda_link.h: demands begin at once, in batches of copies that are not neighbours, and a copy follows
  // the kernels that read its page. Else as file_link.h: an operation is a run of neighbours.
  bool card = false;
};

class VirtualLink final : public Link {
 public:
  // `now`: seconds, never falling; outlives the link. Throws std::invalid_argument for an option out of
  // range.
  VirtualLink(std::int32_t regions, VirtualLinkOptions options, const double* now);

  const char* name() const override { return "virtual"; }
  std::string describe(std::int32_t region, std::int64_t offset) const override;
  std::int64_t region_bytes(std::int32_t region) const override;
  std::int32_t regions() const override { return regions_; }
  void open(std::uint32_t slots) override;
  void submit(const Transfer* transfers, std::int64_t count) override;
  bool cancel(std::uint32_t slot) override;
  void promote(std::uint32_t slot, Priority priority) override;
  std::int64_t poll(std::vector<Completion>* out) override;
  // Never waits: the owner of the clock moves it to next_end().
  bool wait(std::chrono::microseconds limit) override;
  void hurry(bool on) override {
    if (hurried_ && !on) queue_.forget_window();
    hurried_ = on;
  }
  std::string failure() const override { return {}; }
  LinkStats stats() const override { return queue_.stats(*now_); }
  double now() const override { return *now_; }
  bool stop(std::chrono::milliseconds limit) override;

  // When the next completion can be polled; infinite when nothing is in flight.
  double next_end();
  // When this transfer ends or ended; infinite while it has not started.
  double end_of(std::uint32_t slot);
  // Transfers into this slot that start from now on move after `moment`.
  void move_after(std::uint32_t slot, double moment) { move_after_[slot] = moment; }
  // A copy of its caller's in another stream, which may move from `ready` on. Returns when it has moved.
  double pass(double ready, double seconds);
  // Seconds of the caller in operations that began in its calls since this was last called.
  double take_call_seconds() {
    const double seconds = call_seconds_;
    call_seconds_ = 0;
    return seconds;
  }
  // The CPU computes experts from now on, for `alone` seconds, or `shared` seconds as long as the link is
  // busy; each slows the other down. Returns when the CPU is done. REQUIRES: nothing computed before ends
  // later.
  double compute_beside(double alone, double shared);

 private:
  struct Operation {
    double ready;  // its latency has passed, and the kernels that read its pages are done
    double begin;  // moving
    double end;
    double slowdown;  // while the CPU computes
    std::size_t blocks;
  };
  struct Moving {
    double alone;
    double shared;
  };

  void start(double moment, bool called = true);
  void advance();
  Moving moving(const std::uint32_t* slots, std::size_t count);
  double slow_down(double until, bool apply);

  const std::int32_t regions_;
  const VirtualLinkOptions options_;
  const double* now_;
  TransferQueue queue_;
  std::deque<Operation> operations_;   // under way, in order
  std::deque<std::uint32_t> started_;  // their slots
  std::vector<std::uint32_t> run_;     // scratch of start()
  std::vector<double> end_;            // by slot: of its last transfer; infinite while that is queued
  std::vector<double> move_after_;     // by slot
  double busy_until_ = 0;
  double shared_until_ = 0;
  double call_seconds_ = 0;
  double copies_ = 0;  // so far, and the seconds that they move
  double copy_seconds_ = 0;
  bool hurried_ = false;
};

}  // namespace moechat
