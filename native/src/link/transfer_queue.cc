#include "link/transfer_queue.h"

#include <cmath>

namespace moechat {
namespace {

// The bandwidth estimate absorbs a window of busy time at a time, and forgets with this time constant.
constexpr double kWindow = 0.02;  // seconds
constexpr double kForget = 0.5;   // seconds

}  // namespace

void TransferQueue::open(std::uint32_t slots) {
  nodes_.resize(slots);
  completions_.reserve(slots);
}

void TransferQueue::push(const Transfer& transfer, double now) {
  Node& node = nodes_[transfer.slot];
  node.transfer = transfer;
  node.alone = node.again = node.landed = false;
  node.queued = now;
  append(transfer.slot);
}

void TransferQueue::append(std::uint32_t slot) {
  Node& node = nodes_[slot];
  List& list = queues_[static_cast<int>(node.transfer.priority)];
  node.state = State::kQueued;
  node.next = kNone;
  node.previous = list.last;
  (list.last == kNone ? list.first : nodes_[list.last].next) = slot;
  list.last = slot;
  ++stats_.queued;
}

void TransferQueue::unlink(std::uint32_t slot) {
  Node& node = nodes_[slot];
  List& list = queues_[static_cast<int>(node.transfer.priority)];
  (node.previous == kNone ? list.first : nodes_[node.previous].next) = node.next;
  (node.next == kNone ? list.last : nodes_[node.next].previous) = node.previous;
  --stats_.queued;
}

void TransferQueue::withdraw(std::uint32_t slot) {
  unlink(slot);
  nodes_[slot].state = State::kIdle;
}

bool TransferQueue::cancel(std::uint32_t slot) {
  if (slot >= nodes_.size() || nodes_[slot].state != State::kQueued) return false;
  withdraw(slot);
  ++stats_.cancelled;
  return true;
}

template <class Body>
void TransferQueue::drain_queues(const Body& body) {
  for (const List& list : queues_) {
    while (list.first != kNone) body(list.first);
  }
}

void TransferQueue::cancel_all() {
  drain_queues([this](std::uint32_t slot) { cancel(slot); });
}

void TransferQueue::fail_queued(int error) {
  drain_queues([&](std::uint32_t slot) {
    unlink(slot);
    nodes_[slot].state = State::kDone;
    completions_.push_back({slot, error});
    ++stats_.errors;
  });
}

void TransferQueue::promote(std::uint32_t slot, Priority priority) {
  if (slot >= nodes_.size()) return;
  Node& node = nodes_[slot];
  if (node.state != State::kQueued || priority >= node.transfer.priority) return;
  unlink(slot);
  node.transfer.priority = priority;
  append(slot);
}

std::uint32_t TransferQueue::front() const {
  for (const List& list : queues_) {
    if (list.first != kNone) return list.first;
  }
  return kNone;
}

void TransferQueue::begin(std::uint32_t slot, double now) {
  unlink(slot);
  Node& node = nodes_[slot];
  node.state = State::kStarted;
  if (started_++ == 0) busy_since_ = counted_ = now;
  in_flight_ += node.transfer.bytes;
}

void TransferQueue::landed(std::uint32_t slot) {
  Node& node = nodes_[slot];
  if (!node.landed) in_flight_ -= node.transfer.bytes;
  node.landed = true;
}

void TransferQueue::end_started(std::uint32_t slot, double now) {
  landed(slot);
  nodes_[slot].landed = false;
  if (--started_ == 0) busy_ += now - busy_since_;
}

void TransferQueue::finish(std::uint32_t slot, int error, double now) {
  end_started(slot, now);
  Node& node = nodes_[slot];
  node.state = State::kDone;
  completions_.push_back({slot, error});
  if (error == 0) {
    const auto priority = static_cast<int>(node.transfer.priority);
    stats_.bytes[priority] += node.transfer.bytes;
    ++stats_.transfers[priority];
  } else {
    ++stats_.errors;
  }
  count_bandwidth(error == 0 ? node.transfer.bytes : 0, now);
}

void TransferQueue::put_back(std::uint32_t slot, double now) {
  end_started(slot, now);
  Node& node = nodes_[slot];
  List& list = queues_[static_cast<int>(node.transfer.priority)];
  node.state = State::kQueued;
  node.alone = true;
  node.previous = kNone;
  node.next = list.first;
  (list.first == kNone ? list.last : nodes_[list.first].previous) = slot;
  list.first = slot;
  ++stats_.queued;
}

void TransferQueue::count_bandwidth(std::int64_t bytes, double now) {
  window_busy_ += now - counted_;
  counted_ = now;
  window_bytes_ += bytes;
  if (window_busy_ < kWindow) return;
  const double rate = static_cast<double>(window_bytes_) / window_busy_;
  const double weight = stats_.bandwidth == 0 ? 1.0 : 1.0 - std::exp(-window_busy_ / kForget);
  stats_.bandwidth += weight * (rate - stats_.bandwidth);
  window_busy_ = 0;
  window_bytes_ = 0;
}

std::int64_t TransferQueue::take_completions(std::vector<Completion>* out) {
  const auto count = static_cast<std::int64_t>(completions_.size());
  out->insert(out->end(), completions_.begin(), completions_.end());
  for (const Completion& completion : completions_) nodes_[completion.slot].state = State::kIdle;
  completions_.clear();
  return count;
}

LinkStats TransferQueue::stats(double now) const {
  LinkStats stats = stats_;
  stats.in_flight = in_flight_;
  stats.busy_seconds = busy_ + (started_ > 0 ? std::max(0.0, now - busy_since_) : 0);
  if (stats.bandwidth == 0 && window_busy_ > 0) {
    stats.bandwidth = static_cast<double>(window_bytes_) / window_busy_;
  }
  const double busy = window_busy_ + (now - counted_);
  if (started_ > 0 && busy > 0) {
    stats.bandwidth_bound = static_cast<double>(window_bytes_ + in_flight_) / busy;
  }
  return stats;
}

}  // namespace moechat
