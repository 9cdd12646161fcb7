#include "link/queued_link.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "link/mutation.h"

namespace moechat {
namespace {

constexpr std::chrono::milliseconds kDestructorLimit{500};
constexpr std::chrono::hours kLongest{24 * 365};  // longer limits would overflow the clock

// The estimate takes in a window of busy time at a time, and forgets with this time constant.
constexpr std::chrono::milliseconds kWindow{20};
constexpr double kForget = 0.5;  // seconds

double seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

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
  nodes_.resize(slots);
  completions_.reserve(slots);
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int i = 0; i < threads(); ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    stopping_ = true;
    throw std::runtime_error("could not start " + std::to_string(threads()) + " threads for a link");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  opened_ = true;
}

void LinkEngine::require(const Transfer& transfer) const {
  const auto wrong = [&](const std::string& what) {
    throw std::invalid_argument("transfer of " + std::to_string(transfer.bytes) + " bytes from offset " +
                                std::to_string(transfer.offset) + " of region " +
                                std::to_string(transfer.region) + " to slot " +
                                std::to_string(transfer.slot) + ": " + what);
  };
  if (transfer.slot >= nodes_.size()) wrong("there are " + std::to_string(nodes_.size()) + " slots");
  if (nodes_[transfer.slot].state != State::kIdle) wrong("the slot has a transfer already");
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
  const Clock::time_point now = Clock::now();
  for (std::int64_t i = 0; i < count; ++i) {
    const Transfer& transfer = transfers[i];
    try {
      require(transfer);
    } catch (...) {
      while (i-- > 0) {
        unlink(transfers[i].slot);
        nodes_[transfers[i].slot].state = State::kIdle;
      }
      throw;
    }
    Node& node = nodes_[transfer.slot];
    node.transfer = transfer;
    node.alone = false;
    node.queued = now;
    append(transfer.slot);
  }
  pump();
}

void LinkEngine::append(std::uint32_t slot) {
  Node& node = nodes_[slot];
  List& list = queues_[static_cast<int>(node.transfer.priority)];
  node.state = State::kQueued;
  node.next = kNone;
  node.previous = list.last;
  (list.last == kNone ? list.first : nodes_[list.last].next) = slot;
  list.last = slot;
  ++stats_.queued;
}

void LinkEngine::unlink(std::uint32_t slot) {
  Node& node = nodes_[slot];
  List& list = queues_[static_cast<int>(node.transfer.priority)];
  (node.previous == kNone ? list.first : nodes_[node.previous].next) = node.next;
  (node.next == kNone ? list.last : nodes_[node.next].previous) = node.previous;
  --stats_.queued;
}

bool LinkEngine::cancel(std::uint32_t slot) {
  const Lock lock(mutex_);
  if (slot >= nodes_.size() || nodes_[slot].state != State::kQueued) return false;
  unlink(slot);
  nodes_[slot].state = State::kIdle;
  ++stats_.cancelled;
  return true;
}

void LinkEngine::promote(std::uint32_t slot, Priority priority) {
  const Lock lock(mutex_);
  if (slot >= nodes_.size()) return;
  Node& node = nodes_[slot];
  if (node.state != State::kQueued || priority >= node.transfer.priority) return;
  unlink(slot);
  node.transfer.priority = priority;
  append(slot);
}

std::int64_t LinkEngine::poll(std::vector<Completion>* out) {
  const Lock lock(mutex_);
  pump();
  const auto count = static_cast<std::int64_t>(completions_.size());
  out->insert(out->end(), completions_.begin(), completions_.end());
  for (const Completion& completion : completions_) nodes_[completion.slot].state = State::kIdle;
  completions_.clear();
  return count;
}

bool LinkEngine::wait(std::chrono::microseconds limit) {
  const Clock::time_point until = after(limit);
  Lock lock(mutex_);
  pump();
  // Wait 1: for something to poll.
  MOECHAT_WAIT(1, ready_.wait_until(lock, until, [this] {
    return !completions_.empty() || stopping_ || (failed() && started_ == 0);
  }));
  return !completions_.empty();
}

std::string LinkEngine::failure() const {
  const Lock lock(mutex_);
  return failure_;
}

LinkStats LinkEngine::stats() const {
  const Lock lock(mutex_);
  LinkStats stats = stats_;
  const Clock::duration now = started_ > 0 ? Clock::now() - busy_since_ : Clock::duration::zero();
  stats.in_flight = in_flight_;
  stats.busy_seconds = seconds(busy_ + now);
  if (stats.bandwidth == 0 && window_busy_ > Clock::duration::zero()) {
    stats.bandwidth = static_cast<double>(window_bytes_) / seconds(window_busy_);
  }
  return stats;
}

bool LinkEngine::stop(std::chrono::milliseconds limit) {
  const Clock::time_point until = after(limit);
  Lock lock(mutex_);
  stopping_ = true;
  for (List& list : queues_) {
    while (list.first != kNone) {
      const std::uint32_t slot = list.first;
      unlink(slot);
      nodes_[slot].state = State::kIdle;
      ++stats_.cancelled;
    }
  }
  if (!opened_) return true;
  let_go();
  pump();
  wake();
  ready_.notify_all();
  // Wait 2: until nothing writes to any target.
  MOECHAT_WAIT(2, ready_.wait_until(lock, until, [this] { return started_ == 0; }));
  return started_ == 0;
}

void LinkEngine::join() {
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

std::uint32_t LinkEngine::front() const {
  for (const List& list : queues_) {
    if (list.first != kNone) return list.first;
  }
  return kNone;
}

void LinkEngine::begin(std::uint32_t slot) {
  unlink(slot);
  Node& node = nodes_[slot];
  node.state = State::kStarted;
  if (started_++ == 0) busy_since_ = counted_ = Clock::now();
  in_flight_ += node.transfer.bytes;
}

void LinkEngine::finish(std::uint32_t slot, int error) {
  Node& node = nodes_[slot];
  const Clock::time_point now = Clock::now();
  node.state = State::kDone;
  completions_.push_back({slot, error});
  in_flight_ -= node.transfer.bytes;
  if (--started_ == 0) busy_ += now - busy_since_;
  if (error == 0) {
    const auto priority = static_cast<int>(node.transfer.priority);
    stats_.bytes[priority] += node.transfer.bytes;
    ++stats_.transfers[priority];
  } else {
    ++stats_.errors;
  }
  count_bandwidth(error == 0 ? node.transfer.bytes : 0, now);
  ready_.notify_all();
}

void LinkEngine::count_bandwidth(std::int64_t bytes, Clock::time_point now) {
  window_busy_ += now - counted_;
  counted_ = now;
  window_bytes_ += bytes;
  if (window_busy_ < kWindow) return;
  const double time = seconds(window_busy_);
  const double rate = static_cast<double>(window_bytes_) / time;
  const double weight = stats_.bandwidth == 0 ? 1.0 : 1.0 - std::exp(-time / kForget);
  stats_.bandwidth += weight * (rate - stats_.bandwidth);
  window_busy_ = Clock::duration::zero();
  window_bytes_ = 0;
}

void LinkEngine::put_back(std::uint32_t slot) {
  if (halted()) {
    finish(slot, failed() ? error_ : ECANCELED);
    return;
  }
  Node& node = nodes_[slot];
  List& list = queues_[static_cast<int>(node.transfer.priority)];
  in_flight_ -= node.transfer.bytes;
  if (--started_ == 0) busy_ += Clock::now() - busy_since_;
  node.state = State::kQueued;
  node.alone = true;
  node.previous = kNone;
  node.next = list.first;
  (list.first == kNone ? list.last : nodes_[list.first].previous) = slot;
  list.first = slot;
  ++stats_.queued;
}

void LinkEngine::fail(int error, const std::string& why) {
  if (failed()) return;
  error_ = error;
  failure_ = why;
  for (List& list : queues_) {
    while (list.first != kNone) {
      const std::uint32_t slot = list.first;
      unlink(slot);
      nodes_[slot].state = State::kDone;
      completions_.push_back({slot, error});
      ++stats_.errors;
    }
  }
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
