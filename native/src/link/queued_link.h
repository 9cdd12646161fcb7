// What all links have in common: the queues, the bytes in flight, the completions, stopping and failing.
// Backends (FileEngine, SimEngine) say how a transfer is begun and how it ends.
//
// Invariants
// - One mutex guards everything. Whoever holds it pumps: reaps what has ended and begins what there is room
//   for. So a submit to an idle link starts at once, without a switch to another thread, and a caller that
//   polls need not wait for a busy link thread. The link's own threads do the same while callers compute.
// - A slot is idle, queued (in exactly one of the lists), started, or done (its completion has not been
// handed
//   out). Only `begin` makes a transfer started, only `finish` ends it; in_flight_ and started_ follow.
// - While something is started, at most in_flight_limit bytes are (demand_limit where a demand starts), or
//   one transfer that is larger. A prefetch starts only below a third of that, or where two of them fit: a
//   demand that comes then waits for little, and demands by themselves still fill the link.
// - After open() nothing is allocated on the way of a transfer.
// - stopping_ and failure_ are never taken back; both mean that nothing more is begun.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "link/link.h"

namespace moechat {

class LinkEngine {
 public:
  LinkEngine(const LinkEngine&) = delete;
  LinkEngine& operator=(const LinkEngine&) = delete;
  virtual ~LinkEngine() = default;  // nothing started, threads joined

  // As in Link.
  virtual const char* name() const = 0;
  virtual std::string describe(std::int32_t region, std::int64_t offset) const = 0;
  virtual std::int32_t regions() const = 0;
  virtual std::int64_t region_bytes(std::int32_t region) const = 0;
  void open(std::uint32_t slots);
  void submit(const Transfer* transfers, std::int64_t count);
  bool cancel(std::uint32_t slot);
  void promote(std::uint32_t slot, Priority priority);
  std::int64_t poll(std::vector<Completion>* out);
  bool wait(std::chrono::microseconds limit);
  virtual void hurry(bool on) { (void)on; }
  virtual StreamOrder* stream_order() { return nullptr; }
  std::string failure() const;
  LinkStats stats() const;
  bool stop(std::chrono::milliseconds limit);

  // Ends the threads. Only after stop() has returned true, so none of them is inside a read.
  void join();

 protected:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  static constexpr std::uint32_t kNone = 0xffffffffu;
  static constexpr std::int64_t kPrefetchShare = 3;
  enum class State : std::uint8_t { kIdle, kQueued, kStarted, kDone };

  struct Node {
    Transfer transfer{};
    std::uint32_t next = kNone;
    std::uint32_t previous = kNone;
    State state = State::kIdle;
    bool alone = false;          // was part of a merged read that failed: try it by itself
    Clock::time_point queued{};  // when it was submitted
  };

  // Offsets and sizes of transfers are multiples of `alignment`.
  LinkEngine(std::int64_t in_flight_limit, std::int64_t alignment)
      : LinkEngine(in_flight_limit, alignment, in_flight_limit) {}
  // Demands may have another limit.
  LinkEngine(std::int64_t in_flight_limit, std::int64_t alignment, std::int64_t demand_limit)
      : in_flight_limit_(in_flight_limit), demand_limit_(demand_limit), alignment_(alignment) {}

  // ---- The backend's part; the mutex is held, except in `work`.
  virtual int threads() const = 0;
  virtual void work(
      int thread) = 0;       // body of a thread; returns soon after ending_ was set and wake() called
  virtual void reap() = 0;   // finish() whatever has ended
  virtual void start() = 0;  // begin() what there is room for, or tell a thread to
  virtual void wake() = 0;   // all threads look at the state again
  virtual void let_go() {}   // stop: give up what would never end by itself
  // Throws std::invalid_argument for a transfer that this backend cannot make; nothing was queued.
  virtual void admit(const Transfer& transfer) const { static_cast<void>(transfer); }

  // ---- For the backend; the mutex is held.
  void pump();
  // Throws std::out_of_range.
  static std::size_t index_of(std::int32_t region, std::size_t count);
  std::uint32_t front() const;  // the next transfer to start, or kNone
  bool room(const Transfer& transfer) const {
    const std::int64_t limit =
        transfer.priority == Priority::kDemand
            ? demand_limit_
            : std::max(in_flight_limit_ / kPrefetchShare, std::min(in_flight_limit_, 2 * transfer.bytes));
    return started_ == 0 || in_flight_ + transfer.bytes <= limit;
  }
  bool startable() const {
    const std::uint32_t slot = front();
    return slot != kNone && !halted() && room(nodes_[slot].transfer);
  }
  bool halted() const { return stopping_ || failed(); }
  bool failed() const { return error_ != 0; }
  const std::string& why() const { return failure_; }  // empty unless failed()
  void begin(std::uint32_t slot);
  void finish(std::uint32_t slot, int error);
  // A started transfer that nothing writes for any more goes back to the front of its queue.
  void put_back(std::uint32_t slot);
  // The whole link has failed: queued transfers finish with `error` now, started ones as they end.
  void fail(int error, const std::string& why);
  void operation_begun() { ++stats_.operations; }

  mutable std::mutex mutex_;
  std::vector<Node> nodes_;  // by slot
  std::int64_t started_ = 0;
  std::int64_t in_flight_ = 0;  // bytes
  bool stopping_ = false;
  bool ending_ = false;  // threads return
  int error_ = 0;        // of the whole link

 private:
  struct List {
    std::uint32_t first = kNone;
    std::uint32_t last = kNone;
  };
  void require(const Transfer& transfer) const;
  void append(std::uint32_t slot);
  void unlink(std::uint32_t slot);
  void count_bandwidth(std::int64_t bytes, Clock::time_point now);

  const std::int64_t in_flight_limit_;
  const std::int64_t demand_limit_;
  const std::int64_t alignment_;
  List queues_[kPriorities];
  std::vector<Completion> completions_;
  std::condition_variable ready_;  // completions, stop, failure; nothing in flight any more
  bool opened_ = false;
  std::string failure_;
  LinkStats stats_;
  std::vector<std::thread> workers_;

  Clock::time_point busy_since_{};  // of the current busy time, if started_ > 0
  Clock::duration busy_{};          // before it
  Clock::time_point counted_{};     // up to here busy time has gone into the window
  Clock::duration window_busy_{};   // of the estimate's current window
  std::int64_t window_bytes_ = 0;
};

// The Link that callers hold. It stops its engine when it is destroyed; an engine that cannot be stopped (a
// read that hangs), or that belongs to a parent process, is left alone for ever instead.
class QueuedLink final : public Link {
 public:
  explicit QueuedLink(std::unique_ptr<LinkEngine> engine);
  ~QueuedLink() override;
  QueuedLink(const QueuedLink&) = delete;
  QueuedLink& operator=(const QueuedLink&) = delete;

  const char* name() const override { return engine_->name(); }
  std::string describe(std::int32_t region, std::int64_t offset) const override {
    return engine_->describe(region, offset);
  }
  std::int64_t region_bytes(std::int32_t region) const override { return engine_->region_bytes(region); }
  std::int32_t regions() const override { return engine_->regions(); }
  void open(std::uint32_t slots) override { engine_->open(slots); }
  void submit(const Transfer* transfers, std::int64_t count) override { engine_->submit(transfers, count); }
  bool cancel(std::uint32_t slot) override { return engine_->cancel(slot); }
  void promote(std::uint32_t slot, Priority priority) override { engine_->promote(slot, priority); }
  std::int64_t poll(std::vector<Completion>* out) override { return engine_->poll(out); }
  bool wait(std::chrono::microseconds limit) override { return engine_->wait(limit); }
  void hurry(bool on) override { engine_->hurry(on); }
  StreamOrder* stream_order() override { return engine_->stream_order(); }
  std::string failure() const override { return engine_->failure(); }
  LinkStats stats() const override { return engine_->stats(); }
  // In a child process: false, at once.
  bool stop(std::chrono::milliseconds limit) override;

 private:
  std::unique_ptr<LinkEngine> engine_;
  int process_;
};

}  // namespace moechat
