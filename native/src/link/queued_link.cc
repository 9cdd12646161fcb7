#include "link/queued_link.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <utility>

#include "link/mutation.h"
#include "memory/sent_signals.h"

namespace moechat {
namespace {

constexpr std::chrono::milliseconds kDestructorLimit{500};
constexpr std::chrono::hours kLongest{24 * 365};  // longer limits would overflow the clock

template <class Duration>
std::chrono::steady_clock::time_point after(Duration limit) {
  if (limit > kLongest) return std::chrono::steady_clock::now() + kLongest;
  return std::chrono::steady_clock::now() + std::max(limit, Duration::zero());
}

}  // namespace

void LinkEngine::open(std::uint32_t slots) {
  const Lock lock(mutex_);
  if (opened_) throw std::logic_error("the link is open already: it serves one caller");
  if (stopping_) throw std::logic_error("the link was stopped");
  if (slots == 0 || slots == kNone) {
    throw std::invalid_argument("a link with " + std::to_string(slots) + " slots; there must be at least 1");
  }
  queue_.open(slots);
  if (const VirtualClock* const clock = virtual_clock()) {
    clock->watch(pump_watched, this);
    opened_ = true;
    return;
  }
  const SentSignalsBlocked blocked;
  try {
    for (int i = 0; i < threads(); ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {
    stopping_ = true;
    throw std::runtime_error("could not start " + std::to_string(threads()) + " threads for a link");
  }
  opened_ = true;
}

void LinkEngine::require(const Transfer& transfer) const {
  const auto wrong = [&](const std::string& what) {
    throw std::invalid_argument("transfer of " + std::to_string(transfer.bytes) + " bytes from offset " +
                                std::to_string(transfer.offset) + " of region " +
                                std::to_string(transfer.region) + " to slot " +
                                std::to_string(transfer.slot) + ": " + what);
  };
  if (transfer.slot >= queue_.slots()) wrong("there are " + std::to_string(queue_.slots()) + " slots");
  if (queue_[transfer.slot].state != State::kIdle) wrong("the slot has a transfer already");
  if (transfer.region < 0 || transfer.region >= regions()) {
    wrong("there are " + std::to_string(regions()) + " regions");
  }
  const std::int64_t size = region_bytes(transfer.region);
  if (transfer.bytes < 1 || transfer.offset < 0 || transfer.offset > size - transfer.bytes) {
    wrong("the region has " + std::to_string(size) + " bytes");
  }
  if (transfer.offset % alignment_ != 0 || transfer.bytes % alignment_ != 0) {
    wrong("offset and bytes must be multiples of " + std::to_string(alignment_));
  }
  if (transfer.to == nullptr) wrong("there is no target");
  if (static_cast<int>(transfer.priority) >= kPriorities) wrong("there is no such priority");
  admit(transfer);
}

void LinkEngine::submit(const Transfer* transfers, std::int64_t count) {
  const Lock lock(mutex_);
  if (!opened_) throw std::logic_error("the link is not open");
  if (stopping_) throw std::runtime_error("the link was stopped");
  if (failed()) throw std::runtime_error("the link has failed: " + failure_);
  const double now = seconds_now();
  for (std::int64_t i = 0; i < count; ++i) {
    try {
      require(transfers[i]);
    } catch (...) {
      while (i-- > 0) queue_.withdraw(transfers[i].slot);
      throw;
    }
    queue_.push(transfers[i], now);
  }
  pump();
}

bool LinkEngine::cancel(std::uint32_t slot) {
  const Lock lock(mutex_);
  return queue_.cancel(slot);
}

void LinkEngine::promote(std::uint32_t slot, Priority priority) {
  const Lock lock(mutex_);
  queue_.promote(slot, priority);
}

std::int64_t LinkEngine::poll(std::vector<Completion>* out) {
  const Lock lock(mutex_);
  pump();
  return queue_.take_completions(out);
}

// In the place of the threads, on a virtual clock.
std::int64_t LinkEngine::pump_watched(void* engine, int act) {
  auto* const self = static_cast<LinkEngine*>(engine);
  const Lock lock(self->mutex_);
  if (act != 0) self->pump_as_thread();
  return self->queue_.stats(seconds_now()).queued + self->queue_.started();
}

bool LinkEngine::wait(std::chrono::microseconds limit) {
  const Clock::time_point until = after(limit);
  Lock lock(mutex_);
  pump();
  if (const VirtualClock* const clock = virtual_clock()) {
    return step_until(*clock, &lock, [this] {
      pump();
      return queue_.has_completions() || halted();
    });
  }
  ++waiting_;
  // Wait 1: for something to poll.
  MOECHAT_WAIT(1, ready_.wait_until(lock, until, [this] {
    return queue_.has_completions() || stopping_ || (failed() && queue_.started() == 0);
  }));
  --waiting_;
  return queue_.has_completions();
}

std::string LinkEngine::failure() const {
  const Lock lock(mutex_);
  return failure_;
}

LinkStats LinkEngine::stats() const {
  const Lock lock(mutex_);
  return queue_.stats(seconds_now());
}

bool LinkEngine::stop(std::chrono::milliseconds limit) {
  const Clock::time_point until = after(limit);
  Lock lock(mutex_);
  stopping_ = true;
  queue_.cancel_all();
  if (!opened_) return true;
  abandon();
  pump();
  if (const VirtualClock* const clock = virtual_clock()) {
    return step_until(*clock, &lock, [this] {
      pump();
      return queue_.started() == 0;
    });
  }
  wake();
  ready_.notify_all();
  // Wait 2: until nothing writes to any target.
  MOECHAT_WAIT(2, ready_.wait_until(lock, until, [this] { return queue_.started() == 0; }));
  return queue_.started() == 0;
}

void LinkEngine::join() {
  if (const VirtualClock* const clock = virtual_clock()) clock->unwatch(this);
  {
    const Lock lock(mutex_);
    ending_ = true;
    if (!workers_.empty()) wake();
  }
  // Wait 3: for the threads, which use this object to their end.
  for (std::thread& worker : workers_) MOECHAT_WAIT(3, worker.join());
}

void LinkEngine::pump() {
  if (!opened_) return;
  reap();
  if (!halted()) start();
}

std::size_t LinkEngine::index_of(std::int32_t region, std::size_t count) {
  if (region < 0 || static_cast<std::size_t>(region) >= count) {
    throw std::out_of_range("region " + std::to_string(region) + " of a link with " + std::to_string(count));
  }
  return static_cast<std::size_t>(region);
}

void LinkEngine::finish(std::uint32_t slot, int error) {
  queue_.finish(slot, error, seconds_now());
  ready_.notify_all();
}

void LinkEngine::put_back(std::uint32_t slot) {
  if (halted()) {
    finish(slot, failed() ? error_ : ECANCELED);
  } else {
    queue_.put_back(slot, seconds_now());
  }
}

void LinkEngine::fail(int error, const std::string& why) {
  if (failed()) return;
  error_ = error;
  failure_ = why;
  queue_.fail_queued(error);
  ready_.notify_all();
}

QueuedLink::QueuedLink(std::unique_ptr<LinkEngine> engine) : engine_(std::move(engine)), process_(getpid()) {}

bool QueuedLink::stop(std::chrono::milliseconds limit) {
  return getpid() == process_ && engine_->stop(limit);
}

QueuedLink::~QueuedLink() {
  if (QueuedLink::stop(kDestructorLimit)) {
    engine_->join();
  } else {
    static_cast<void>(engine_.release());
  }
}

}  // namespace moechat
