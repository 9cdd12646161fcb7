#include "simulate/virtual_link.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "link/cuda_link.h"

namespace moechat {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

void check_times(const char* name, const std::vector<double>& seconds) {
  for (const double value : seconds) {
    if (!(value >= 0) || !std::isfinite(value)) {
      throw std::invalid_argument(std::string(name) + " holds " + std::to_string(value) +
                                  "; times are finite and at least 0");
    }
  }
}

VirtualLinkOptions checked(VirtualLinkOptions options) {
  if (options.block_bytes < 1) {
    throw std::invalid_argument("block_bytes is " + std::to_string(options.block_bytes) +
                                "; it must be at least 1");
  }
  if (options.seconds.empty()) throw std::invalid_argument("seconds of the link is empty");
  if (options.seconds_shared.empty()) options.seconds_shared = options.seconds;
  if (options.seconds_shared.size() != options.seconds.size()) {
    throw std::invalid_argument("seconds_shared has " + std::to_string(options.seconds_shared.size()) +
                                " values, seconds " + std::to_string(options.seconds.size()));
  }
  check_times("seconds of the link", options.seconds);
  check_times("seconds_shared of the link", options.seconds_shared);
  check_times("latency of the link", {options.latency});
  if (options.in_flight_bytes < 1) {
    throw std::invalid_argument("in_flight_bytes is " + std::to_string(options.in_flight_bytes) +
                                "; it must be at least 1");
  }
  return options;
}

// Of a move that takes `alone` seconds by itself, and is slowed down until a moment.
double end_of_move(double begin, double alone, double slowdown, double slow_until) {
  const double slow = slow_until - begin;
  if (slow <= 0) return begin + alone;
  return alone * slowdown <= slow ? begin + alone * slowdown : slow_until + (alone - slow / slowdown);
}

}  // namespace

VirtualLink::VirtualLink(std::int32_t regions, VirtualLinkOptions options, const double* now)
    : regions_(regions),
      options_(checked(std::move(options))),
      now_(now),
      queue_(options_.in_flight_bytes,
             options_.card ? std::numeric_limits<std::int64_t>::max() : options_.in_flight_bytes),
      run_(options_.card ? kCudaBatchCopies : options_.seconds.size()) {}

std::string VirtualLink::describe(std::int32_t region, std::int64_t offset) const {
  return "virtual region " + std::to_string(region) + " at byte " + std::to_string(offset);
}

std::int64_t VirtualLink::region_bytes(std::int32_t region) const {
  if (region < 0 || region >= regions_) {
    throw std::out_of_range("region " + std::to_string(region) + " of a link with " +
                            std::to_string(regions_));
  }
  return std::numeric_limits<std::int64_t>::max();
}

void VirtualLink::open(std::uint32_t slots) {
  if (queue_.slots() > 0) throw std::logic_error("the link is open already: it serves one caller");
  queue_.open(slots);
  end_.assign(slots, 0);
  move_after_.assign(slots, 0);
}

void VirtualLink::submit(const Transfer* transfers, std::int64_t count) {
  advance();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t slot = transfers[i].slot;
    if (slot >= queue_.slots() || queue_[slot].state != TransferQueue::State::kIdle) {
      throw std::invalid_argument("slot " + std::to_string(slot) + " has a transfer already, or none of " +
                                  std::to_string(queue_.slots()));
    }
    queue_.push(transfers[i], *now_);
    end_[slot] = kNever;
  }
  start(*now_);
}

bool VirtualLink::cancel(std::uint32_t slot) {
  advance();
  if (!queue_.cancel(slot)) return false;
  end_[slot] = *now_;
  return true;
}

void VirtualLink::promote(std::uint32_t slot, Priority priority) {
  advance();
  queue_.promote(slot, priority);
}

std::int64_t VirtualLink::poll(std::vector<Completion>* out) {
  advance();
  start(*now_);
  advance();  // transfers that take no time have ended already
  return queue_.take_completions(out);
}

bool VirtualLink::wait(std::chrono::microseconds) {
  advance();
  return queue_.has_completions();
}

double VirtualLink::next_end() {
  advance();
  start(*now_);
  if (queue_.has_completions()) return *now_;
  return operations_.empty() ? kNever : operations_.front().end;
}

double VirtualLink::end_of(std::uint32_t slot) {
  advance();
  start(*now_);
  return end_[slot];
}

bool VirtualLink::stop(std::chrono::milliseconds) { return true; }

// Seconds that an operation moves: neighbours, both in the region and in the pages, move together.
VirtualLink::Moving VirtualLink::moving(const std::uint32_t* slots, std::size_t count) {
  Moving sum{0, 0};
  for (std::size_t i = 0; i < count;) {
    std::size_t end = options_.card ? i + 1 : count;
    while (end < count && end - i < options_.seconds.size() && slots[end] == slots[end - 1] + 1 &&
           TransferQueue::adjacent(queue_[slots[end - 1]].transfer, queue_[slots[end]].transfer)) {
      ++end;
    }
    queue_.operation_begun();
    sum.alone += options_.seconds[end - i - 1];
    sum.shared += options_.seconds_shared[end - i - 1];
    i = end;
  }
  return hurried_ ? Moving{0, 0} : sum;
}

// Begins the transfers that there is room for.
void VirtualLink::start(double moment, bool called) {
  const auto joins = [this](const TransferQueue::Node& last, const TransferQueue::Node& next) {
    return options_.card || TransferQueue::adjacent(last.transfer, next.transfer);
  };
  while (queue_.startable()) {
    const std::int64_t most = options_.card ? queue_.batch_bytes(queue_[queue_.front()].transfer)
                                            : std::numeric_limits<std::int64_t>::max();
    const std::size_t count = queue_.begin_run(run_.data(), run_.size(), most, moment, joins);
    double ready = moment + (hurried_ ? 0 : options_.latency);
    for (std::size_t i = 0; i < count; ++i) ready = std::max(ready, move_after_[run_[i]]);
    const double begin = std::max(busy_until_, ready);
    const std::int64_t before = queue_.stats(moment).operations;
    const auto [alone, shared] = moving(run_.data(), count);
    if (!hurried_) {
      const auto copies = static_cast<double>(queue_.stats(moment).operations - before);
      copies_ += copies;
      copy_seconds_ += alone;
      if (called) call_seconds_ += options_.call + copies * options_.call_copy;
    }
    const double slowdown = alone > 0 ? shared / alone : 1;
    busy_until_ = end_of_move(begin, alone, slowdown, shared_until_);
    operations_.push_back({ready, begin, busy_until_, slowdown, count});
    for (std::size_t i = 0; i < count; ++i) {
      end_[run_[i]] = busy_until_;
      started_.push_back(run_[i]);
    }
  }
}

double VirtualLink::compute_beside(double alone, double shared) {
  advance();
  start(*now_);
  const double idle = queue_.front() == TransferQueue::kNone ? slow_down(kNever, false) : kNever;
  double work = shared;
  if (work > idle - *now_ && shared > 0) work = idle - *now_ + (shared - (idle - *now_)) * alone / shared;
  shared_until_ = *now_ + work;
  slow_down(shared_until_, true);
  return shared_until_;
}

// When the operations under way will have moved if the CPU computes until then; apply: it does.
double VirtualLink::slow_down(double until, bool apply) {
  double end = *now_;
  auto slot = started_.begin();
  for (Operation& operation : operations_) {
    const double left = operation.end - std::max(operation.begin, *now_);
    const double begin = operation.begin <= *now_ ? *now_ : std::max(operation.ready, end);
    end = end_of_move(begin, left, operation.slowdown, until);
    if (!apply) continue;
    operation.begin = begin;
    operation.end = end;
    for (std::size_t i = 0; i < operation.blocks; ++i) end_[*slot++] = end;
    busy_until_ = end;
  }
  return end;
}

// Ends the operations that are due; those that begin in their place begin at that moment.
void VirtualLink::advance() {
  while (!operations_.empty() && operations_.front().end <= *now_) {
    const Operation done = operations_.front();
    operations_.pop_front();
    for (std::size_t i = 0; i < done.blocks; ++i) {
      queue_.finish(started_.front(), 0, done.end);
      started_.pop_front();
    }
    // The caller's next call begins what the link's thread has not begun by then.
    if (done.end + options_.wake <= *now_) start(done.end + options_.wake, false);
  }
}

double VirtualLink::pass(double ready, double seconds) {
  advance();
  start(*now_);
  // Streams take turns: it waits for the rest of one copy, which is as long as a copy is on average, since
  // long ones are met more often; and the transfers wait for it.
  const double rest = copies_ > 0 ? copy_seconds_ / copies_ : 0;
  const double begin = std::max(ready, std::min(busy_until_, ready + rest));
  busy_until_ = std::max(busy_until_, begin) + seconds;
  return begin + seconds;
}

}  // namespace moechat
