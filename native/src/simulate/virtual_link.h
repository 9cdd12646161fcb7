// A link without bytes and without threads, on a clock that its caller moves: for simulations.
//
// It queues, merges, promotes, cancels and limits what is in flight as the links over real memory do (see
// queued_link.h and file_link.cc), so a runner over it takes the same decisions. Every transfer is one block,
// whatever its number of bytes says. Operations end in the order in which they began, on a pipe: one begins
// to move when the one before it has moved and its own latency has passed.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "link/link.h"

namespace moechat {

struct VirtualLinkOptions {
  std::int64_t block_bytes = 0;
  double latency = 0;  // seconds from the start of an operation to its first byte
  // [n - 1]: seconds that an operation of n neighbouring blocks moves; as many as are merged at most.
  std::vector<double> seconds;
  std::vector<double> seconds_shared;  // the same while the CPU computes experts; empty: as `seconds`
  std::int64_t in_flight_bytes = 0;    // most bytes in flight, of which prefetches take a third
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
  // Never waits: who owns the clock moves it to next_end().
  bool wait(std::chrono::microseconds limit) override;
  void hurry(bool on) override { hurried_ = on; }
  std::string failure() const override { return {}; }
  LinkStats stats() const override;
  bool stop(std::chrono::milliseconds limit) override;

  // When the next completion will be there to poll; infinite when nothing is in flight.
  double next_end();
  // Until then the CPU computes experts, and both are slower for it.
  void share_until(double moment) { shared_until_ = moment; }
  // Seconds from now until a demand that is submitted now would begin to move.
  double backlog() const;
  // Seconds that one more block takes, the longest operations being merged.
  double block_seconds(bool shared) const;

 private:
  static constexpr std::uint32_t kNone = 0xffffffffu;
  enum class State : std::uint8_t { kIdle, kQueued, kStarted, kDone };
  struct Node {
    Transfer transfer{};
    std::uint32_t next = kNone;
    std::uint32_t previous = kNone;
    State state = State::kIdle;
  };
  struct List {
    std::uint32_t first = kNone;
    std::uint32_t last = kNone;
    std::int64_t count = 0;
  };
  struct Operation {
    double end;
    std::size_t blocks;
  };

  void append(std::uint32_t slot);
  void unlink(std::uint32_t slot);
  std::uint32_t front() const;
  bool room(Priority priority) const;
  void start(double moment);
  void advance();
  double moving(std::size_t blocks, double moment) const;

  const std::int32_t regions_;
  const VirtualLinkOptions options_;
  const double* now_;
  std::vector<Node> nodes_;  // by slot
  List queues_[kPriorities];
  std::deque<Operation> operations_;   // under way, in order
  std::deque<std::uint32_t> started_;  // their slots
  std::vector<Completion> completions_;
  double busy_until_ = 0;
  double shared_until_ = 0;
  double busy_since_ = 0;  // of the current busy time, if anything is under way
  double busy_ = 0;        // before it
  bool hurried_ = false;
  LinkStats stats_;
};

}  // namespace moechat
