#include "simulate/virtual_link.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

namespace moechat {
namespace {

// As LinkEngine: a prefetch starts only below a third of what may be in flight, or where two of them fit.
constexpr std::int64_t kPrefetchShare = 3;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

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

}  // namespace

VirtualLink::VirtualLink(std::int32_t regions, VirtualLinkOptions options, const double* now)
    : regions_(regions), options_(checked(std::move(options))), now_(now) {}

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
  if (!nodes_.empty()) throw std::logic_error("the link is open already: it serves one caller");
  nodes_.resize(slots);
  completions_.reserve(slots);
}

void VirtualLink::submit(const Transfer* transfers, std::int64_t count) {
  advance();
  for (std::int64_t i = 0; i < count; ++i) {
    Node& node = nodes_.at(transfers[i].slot);
    if (node.state != State::kIdle) {
      throw std::invalid_argument("slot " + std::to_string(transfers[i].slot) + " has a transfer already");
    }
    node.transfer = transfers[i];
    append(transfers[i].slot);
  }
  start(*now_);
}

void VirtualLink::append(std::uint32_t slot) {
  Node& node = nodes_[slot];
  List& list = queues_[static_cast<int>(node.transfer.priority)];
  node.state = State::kQueued;
  node.next = kNone;
  node.previous = list.last;
  (list.last == kNone ? list.first : nodes_[list.last].next) = slot;
  list.last = slot;
  ++list.count;
  ++stats_.queued;
}

void VirtualLink::unlink(std::uint32_t slot) {
  Node& node = nodes_[slot];
  List& list = queues_[static_cast<int>(node.transfer.priority)];
  (node.previous == kNone ? list.first : nodes_[node.previous].next) = node.next;
  (node.next == kNone ? list.last : nodes_[node.next].previous) = node.previous;
  --list.count;
  --stats_.queued;
}

bool VirtualLink::cancel(std::uint32_t slot) {
  advance();
  if (nodes_.at(slot).state != State::kQueued) return false;
  unlink(slot);
  nodes_[slot].state = State::kIdle;
  ++stats_.cancelled;
  return true;
}

void VirtualLink::promote(std::uint32_t slot, Priority priority) {
  advance();
  Node& node = nodes_.at(slot);
  if (node.state != State::kQueued || priority >= node.transfer.priority) return;
  unlink(slot);
  node.transfer.priority = priority;
  append(slot);
}

std::int64_t VirtualLink::poll(std::vector<Completion>* out) {
  advance();
  start(*now_);
  // What takes no time at all has ended already.
  advance();
  const auto count = static_cast<std::int64_t>(completions_.size());
  out->insert(out->end(), completions_.begin(), completions_.end());
  for (const Completion& completion : completions_) nodes_[completion.slot].state = State::kIdle;
  completions_.clear();
  return count;
}

bool VirtualLink::wait(std::chrono::microseconds) {
  advance();
  return !completions_.empty();
}

double VirtualLink::next_end() {
  advance();
  start(*now_);
  if (!completions_.empty()) return *now_;
  return operations_.empty() ? std::numeric_limits<double>::infinity() : operations_.front().end;
}

LinkStats VirtualLink::stats() const {
  LinkStats stats = stats_;
  stats.in_flight = static_cast<std::int64_t>(started_.size()) * options_.block_bytes;
  stats.busy_seconds = busy_ + (operations_.empty() ? 0 : std::max(0.0, *now_ - busy_since_));
  return stats;
}

bool VirtualLink::stop(std::chrono::milliseconds) { return true; }

double VirtualLink::backlog() const {
  const auto queued = static_cast<double>(queues_[static_cast<int>(Priority::kDemand)].count);
  return std::max(busy_until_ - *now_, options_.latency) + queued * block_seconds(true);
}

double VirtualLink::block_seconds(bool shared) const {
  const std::vector<double>& seconds = shared ? options_.seconds_shared : options_.seconds;
  return seconds.back() / static_cast<double>(seconds.size());
}

std::uint32_t VirtualLink::front() const {
  for (const List& list : queues_) {
    if (list.first != kNone) return list.first;
  }
  return kNone;
}

bool VirtualLink::room(Priority priority) const {
  const std::int64_t bytes = options_.block_bytes;
  const std::int64_t most = options_.in_flight_bytes;
  const std::int64_t limit =
      priority == Priority::kDemand ? most : std::max(most / kPrefetchShare, std::min(most, 2 * bytes));
  return started_.empty() || (static_cast<std::int64_t>(started_.size()) + 1) * bytes <= limit;
}

double VirtualLink::moving(std::size_t blocks, double moment) const {
  if (hurried_) return 0;
  return (moment < shared_until_ ? options_.seconds_shared : options_.seconds)[blocks - 1];
}

// Begins what there is room for.
void VirtualLink::start(double moment) {
  for (;;) {
    std::uint32_t slot = front();
    if (slot == kNone || !room(nodes_[slot].transfer.priority)) return;
    if (operations_.empty()) busy_since_ = moment;
    const Transfer first = nodes_[slot].transfer;
    std::size_t blocks = 0;
    do {
      unlink(slot);
      nodes_[slot].state = State::kStarted;
      started_.push_back(slot);
      ++blocks;
      slot = front();
      if (slot == kNone || blocks == options_.seconds.size()) break;
      const Transfer& next = nodes_[slot].transfer;
      if (next.region != first.region ||
          next.offset != first.offset + static_cast<std::int64_t>(blocks) * first.bytes ||
          next.priority != first.priority) {
        break;
      }
    } while (room(first.priority));
    const double ready = moment + (hurried_ ? 0 : options_.latency);
    busy_until_ = std::max(busy_until_, ready) + moving(blocks, moment);
    operations_.push_back({busy_until_, blocks});
    ++stats_.operations;
  }
}

// Ends what is due; what begins in its place begins at that moment.
void VirtualLink::advance() {
  while (!operations_.empty() && operations_.front().end <= *now_) {
    const Operation done = operations_.front();
    operations_.pop_front();
    for (std::size_t i = 0; i < done.blocks; ++i) {
      const std::uint32_t slot = started_.front();
      started_.pop_front();
      nodes_[slot].state = State::kDone;
      completions_.push_back({slot, 0});
      const auto priority = at(static_cast<std::int64_t>(nodes_[slot].transfer.priority));
      stats_.bytes[priority] += options_.block_bytes;
      ++stats_.transfers[priority];
    }
    if (operations_.empty()) busy_ += done.end - busy_since_;
    start(done.end);
  }
}

}  // namespace moechat
