// The common part of all links over real memory: mutex, threads, waiting, stopping and failing around one
// TransferQueue. Backends (FileEngine, SimEngine, CudaEngine) define how a transfer begins and how it ends.
//
// Invariants, besides those of TransferQueue
// - One mutex guards everything. Every holder pumps: it reaps the transfers that have ended and begins those
//   that there is room for. So a submit to an idle link starts at once, without a switch to another thread,
//   and a caller that polls need not wait for a busy link thread. The link's own threads do the same while
//   callers compute. A backend may release the mutex within reap() and start(), around calls that can block
//   (Unlocked): nothing that was read before pump() still holds after it.
// - stopping_ and failure_ are final; both mean that no further transfer begins.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda/virtual_clock.h"
#include "link/link.h"
#include "link/transfer_queue.h"

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
  using Node = TransferQueue::Node;
  using State = TransferQueue::State;
  static constexpr std::uint32_t kNone = TransferQueue::kNone;

  // Offsets and sizes of transfers are multiples of `alignment`.
  LinkEngine(std::int64_t in_flight_limit, std::int64_t alignment)
      : LinkEngine(in_flight_limit, alignment, in_flight_limit) {}
  // Demands may have another limit.
  LinkEngine(std::int64_t in_flight_limit, std::int64_t alignment, std::int64_t demand_limit)
      : queue_(in_flight_limit, demand_limit), alignment_(alignment) {}

  // Releases the mutex for a scope; REQUIRES: this thread holds it.
  class Unlocked {
   public:
    explicit Unlocked(std::mutex* mutex) : mutex_(mutex) { mutex_->unlock(); }
    ~Unlocked() { mutex_->lock(); }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

   private:
    std::mutex* const mutex_;
  };

  // ---- The backend's part; the mutex is held, except in `work`.
  virtual int threads() const = 0;
  // Body of a thread; returns soon after ending_ was set and wake() called.
  virtual void work(int thread) = 0;
  virtual void reap() = 0;   // finish() the transfers that have ended
  virtual void start() = 0;  // begin the transfers that there is room for, or have a thread do it
  virtual void wake() = 0;   // all threads look at the state again
  virtual void abandon() {}  // stop: finish() the transfers that would never end by themselves
  // Throws std::invalid_argument for a transfer that this backend cannot make; nothing was queued.
  virtual void admit(const Transfer& transfer) const { static_cast<void>(transfer); }
  // What the thread that waits for the backend does whenever it wakes up; on a virtual clock it has none.
  virtual void pump_as_thread() { pump(); }

  // ---- For the backend; the mutex is held.
  void pump();
  // Moves a virtual clock, without the mutex, until ready() holds, or until nothing will ever happen: false.
  template <class Ready>
  static bool step_until(const VirtualClock& clock, Lock* lock, const Ready& ready) {
    while (!ready()) {
      lock->unlock();
      const bool moved = clock.step() != 0;
      lock->lock();
      if (!moved) return ready();
    }
    return true;
  }
  // Throws std::out_of_range.
  static std::size_t index_of(std::int32_t region, std::size_t count);
  bool startable() const { return !halted() && queue_.startable(); }
  bool halted() const { return stopping_ || failed(); }
  bool failed() const { return error_ != 0; }
  bool awaited() const { return waiting_ > 0; }        // a caller waits for something to poll
  const std::string& why() const { return failure_; }  // empty unless failed()
  void finish(std::uint32_t slot, int error);
  // As TransferQueue::put_back; a halted link finishes the transfer instead.
  void put_back(std::uint32_t slot);
  // The whole link has failed: queued transfers finish with `error` now, started ones as they end.
  void fail(int error, const std::string& why);

  mutable std::mutex mutex_;
  TransferQueue queue_;
  bool stopping_ = false;
  bool ending_ = false;  // threads return
  int error_ = 0;        // of the whole link

 private:
  void require(const Transfer& transfer) const;
  static std::int64_t pump_watched(void* engine, int act);

  const std::int64_t alignment_;
  std::condition_variable ready_;  // completions, stop, failure; nothing in flight any more
  bool opened_ = false;
  int waiting_ = 0;  // callers in wait()
  std::string failure_;
  std::vector<std::thread> workers_;
};

// The Link that callers hold. Its destructor stops the engine; an engine that cannot be stopped (a read that
// hangs), or that belongs to a parent process, is leaked instead.
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
  double now() const override { return seconds_now(); }
  // In a child process: false, at once.
  bool stop(std::chrono::milliseconds limit) override;

 private:
  std::unique_ptr<LinkEngine> engine_;
  int process_;
};

}  // namespace moechat
