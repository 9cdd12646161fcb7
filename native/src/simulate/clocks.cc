#include "simulate/clocks.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "offload/executors.h"

namespace moechat {
namespace {

// As moechat.offload.on_device.WORK_PAIRS: (token, block) pairs that a launch has memory for.
constexpr std::int64_t kWorkPairs = 1 << 18;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

}  // namespace

bool HostClock::next_group() {
  const Grouped& rows = schedule_->rows();
  first_ = end_;
  if (first_ == rows.rows()) return false;
  const bool all = group_items_ == 0 || schedule_->sharing();
  std::int64_t items = rows.tokens_of[at(end_++)];
  while (end_ < rows.rows() && (all || items + rows.tokens_of[at(end_)] <= group_items_)) {
    items += rows.tokens_of[at(end_++)];
  }
  return true;
}

std::int64_t HostClock::work_of_call() const { return HostExecutor::kWorkOfCall; }
std::int64_t HostClock::work_of_row() const { return HostExecutor::kWorkOfRow; }

void HostClock::add(std::int32_t row, std::int32_t, PageId, bool) {
  pending_ += schedule_->rows().tokens_of[at(row)];
  ++blocks_;
}

double HostClock::cost() const {
  if (hurried_) return 0;
  const std::vector<double>& curve = costs_.compute;
  const auto known = static_cast<std::int64_t>(curve.size());
  double seconds = costs_.call + curve[at(std::min(pending_, known) - 1)];
  if (pending_ > known) {
    const double step = known > 1 ? curve.back() - curve[at(known - 2)] : curve.back();
    seconds += step * static_cast<double>(pending_ - known);
  }
  return seconds;
}

double HostClock::spend(double seconds) {
  if (hurried_) return 0;
  const double begun = *now_;
  *now_ = costs_.near_slowdown == 1 ? begun + seconds
                                    : link_->compute_beside(seconds, seconds * costs_.near_slowdown);
  return *now_ - begun;
}

std::int64_t HostClock::compute() {
  compute_seconds_ += spend(cost());
  const std::int64_t blocks = blocks_;
  HostClock::drop();
  return blocks;
}

void HostClock::drop() { pending_ = blocks_ = 0; }

bool HostClock::wait() {
  const double moment = link_->next_end();
  if (!std::isfinite(moment)) throw std::logic_error("a block is waited for, and nothing is on its way");
  *now_ = std::max(*now_, moment);
  return true;
}

void HostClock::far_compute(const std::vector<FarPiece>& pieces) {
  double pairs = 0;
  for (const FarPiece& piece : pieces) {
    pairs += static_cast<double>(schedule_->rows().tokens_of[at(piece.row)]) * (piece.end - piece.begin);
  }
  *now_ = link_->compute_beside(pairs * costs_.far_block, pairs * costs_.far_block_shared);
}

// ---- a card

bool CardClock::next_group() {
  if (end_ > 0) return false;
  first_ = 0;
  end_ = schedule_->rows().rows();
  return end_ > 0;
}

std::int64_t CardClock::work_of_call() const { return kWorkPairs; }

void CardClock::add(std::int32_t row, std::int32_t block, PageId page, bool landed) {
  HostClock::add(row, block, page, landed);
  pages_.push_back(page);
  if (!landed) flying_.push_back(page);
}

bool CardClock::follow_copies() {
  copied_until_ = 0;
  pay_link();
  for (const PageId page : flying_) copied_until_ = std::max(copied_until_, link_->end_of(page));
  if (std::isfinite(copied_until_)) {
    if (!flying_.empty() && !hurried_) copied_until_ += costs_.calls.event;
    return true;
  }
  wait();  // for room on the link
  return false;
}

// The host's calls of the link.
void CardClock::pay_link() {
  const double seconds = link_->take_call_seconds();
  if (!hurried_) *now_ += seconds;
}

// Gives a few numbers to the card; returns when they are there.
double CardClock::small_copy() {
  if (hurried_) return *now_;
  *now_ += costs_.calls.lists;
  if (costs_.calls.list_copy == 0) return *now_;
  return link_->pass(*now_ + costs_.calls.list_latency, costs_.calls.list_copy);
}

void CardClock::start(bool shares) {
  HostClock::start(shares);
  pay_link();
  far_sums_ = false;
  if (shares && !hurried_) *now_ += costs_.calls.clear;
}

void CardClock::compute_dense(double seconds) {
  if (hurried_) return;
  busy_until_ = std::max(busy_until_, *now_ + costs_.calls.dense) + seconds;
  *now_ = busy_until_ + costs_.calls.choice;
}

double CardClock::end_layer() {
  double ready = busy_until_;
  if (far_sums_) ready = std::max(ready, small_copy() + (hurried_ ? 0 : costs_.far_call));
  if (!hurried_) *now_ += costs_.calls.sum;
  busy_until_ = std::max(ready, *now_) + (hurried_ ? 0 : costs_.calls.sum_card);
  // What is left of the calls for the next dense part belongs to that.
  return std::max(busy_until_, *now_ + costs_.calls.dense) - costs_.calls.dense;
}

std::int64_t CardClock::compute() {
  const double seconds = cost();
  pay_link();
  const double listed = small_copy();
  const double launched = *now_ + (hurried_ ? 0 : costs_.calls.launch);
  if (!hurried_) *now_ += costs_.calls.launch_host;
  busy_until_ = std::max({busy_until_, launched, listed, copied_until_}) + seconds;
  compute_seconds_ += seconds;
  for (const PageId page : pages_) link_->move_after(page, busy_until_);
  const std::int64_t blocks = blocks_;
  drop();
  return blocks;
}

void CardClock::far_compute(const std::vector<FarPiece>& pieces) {
  HostClock::far_compute(pieces);
  far_sums_ = true;
}

void CardClock::drop() {
  HostClock::drop();
  pages_.clear();
  flying_.clear();
  copied_until_ = 0;
}

// ---- a card that runs ahead of the host

std::int64_t GraphClock::work_of_call() const { return kWorkPairs; }

double GraphClock::end_layer() {
  if (!hurried_) *now_ += costs_.calls.sum_card;
  return *now_;
}

}  // namespace moechat
