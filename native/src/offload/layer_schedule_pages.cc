// Pages for missing blocks, demanded or expected: the part of the schedule that moves blocks.
#include <algorithm>
#include <stdexcept>

#include "offload/layer_schedule.h"

namespace moechat {
namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

}  // namespace

// Queues fetches, in the order in which the rows will be computed, as far as there are pages: for the
// unpinned rows of the group, then for all pinned ones. Returns how many blocks.
std::int64_t LayerSchedule::acquire() {
  starved_ = freed_ = false;
  std::int64_t count = 0;
  for (std::int32_t i = first_; unpinned_rows_ > 0 && i < end_; ++i) count += stage(i);
  std::int64_t missing = 0;
  wanted_.clear();
  wanted_ends_.clear();
  const std::int32_t rows = grouped_.rows();
  for (std::int32_t place = first_; place < rows; ++place) {
    // While sharing, all rows are one group.
    const std::int32_t i = sharing_ ? far_.order()[at(rows - 1 - place)] : place;
    if (!row_at(i).pinned) continue;
    const std::int64_t lacks = row_at(i).link_end - cache_.assigned(layer_, expert_of(i));
    if (lacks <= 0) continue;
    missing += lacks;
    wanted_.push_back(expert_of(i));
    wanted_ends_.push_back(row_at(i).link_end);
  }
  if (missing > 0) {
    const Want want{layer_, layer_,  wanted_.data(), static_cast<std::int64_t>(wanted_.size()),
                    false,  missing, false,          wanted_ends_.data()};
    cache_.plan(want, &plan_);
    const std::int64_t fetched = transfers_.fetch(&plan_, Priority::kDemand, pass_);
    if (fetched < missing) starved_ = true;
    count += fetched;
  }
  note_refusal();
  return count;
}

// For an unpinned row: staging pages for the blocks that the cache has lost.
std::int64_t LayerSchedule::stage(std::int32_t index) {
  Row& row = row_at(index);
  if (row.pinned || done(row)) return 0;
  // The blocks that are there, or on their way, come first.
  if (row.staged.empty() && row.next < cache_.assigned(layer_, expert_of(index))) {
    starved_ = true;
    return 0;
  }
  std::int64_t count = 0;
  for (;;) {
    const std::int32_t block = row.next + static_cast<std::int32_t>(row.staged.size());
    if (block == row.far_begin) return count;
    row.staged.reserve(row.staged.size() + 1);
    const PageId page = transfers_.stage(layer_, expert_of(index), block, pass_);
    if (page == kNoPage) break;
    row.staged.push_back({page, false});
    ++count;
  }
  starved_ = true;
  return count;
}

// True: look again. False: wait.
bool LayerSchedule::make_room() {
  if (acquire() > 0 || !failure_.empty()) return true;
  for (std::int32_t i = 1; i <= options_.layers; ++i) {
    // The layer whose turn is farthest away first.
    const std::int32_t layer = (layer_ + options_.layers + 1 - i) % options_.layers;
    if (transfers_.cancel_stale(layer) > 0) return true;
  }
  if (others_in_flight()) return false;
  if (unpin_one()) return true;
  throw std::logic_error("no page for " + missing_block() + ", although nothing is in flight: " +
                         std::to_string(cache_.available()) + " of " + std::to_string(slab_.pages()) +
                         " pages are available; the cache says: " + cache_.check());
}

bool LayerSchedule::others_in_flight() const {
  std::int64_t held = 0;
  for (std::int32_t i = first_; i < grouped_.rows(); ++i) {
    if (!row_at(i).pinned) continue;
    const std::int32_t expert = expert_of(i);
    const std::int32_t end = cache_.assigned(layer_, expert);
    for (std::int32_t block = cache_.resident(layer_, expert); block < end; ++block) {
      if (cache_.filling(cache_.page(layer_, expert, block))) ++held;
    }
  }
  return cache_.in_flight() > held;
}

// Unpins the last row that holds pages which can be evicted.
bool LayerSchedule::unpin_one() {
  const std::int32_t protected_blocks = cache_.targets()[at(layer_)].blocks;
  for (std::int32_t i = grouped_.rows(); i-- > first_;) {
    Row& row = row_at(i);
    const std::int32_t expert = expert_of(i);
    const std::int32_t kept = cache_.is_protected(layer_, expert) ? protected_blocks : 0;
    if (!row.pinned || cache_.is_fixed(layer_, expert) || cache_.assigned(layer_, expert) <= kept) continue;
    row.pinned = false;
    cache_.release(layer_, expert);
    ++unpinned_rows_;
    starved_ = freed_ = true;
    return true;
  }
  return false;
}

// ---- what earlier runs have used

void LayerSchedule::expect(const std::vector<double>& shares) {
  if (shares.size() != at(std::int64_t{options_.layers} * options_.experts)) {
    throw std::invalid_argument("there are " + std::to_string(shares.size()) + " shares for " +
                                std::to_string(options_.layers) + " layers of " +
                                std::to_string(options_.experts) + " experts");
  }
  for (std::int32_t layer = 0; layer < options_.layers; ++layer) {
    policy_->expect(layer, shares.data() + std::int64_t{layer} * options_.experts);
  }
  cache_.keys_changed();
}

std::int64_t LayerSchedule::preload(const std::vector<std::pair<std::int32_t, std::int32_t>>& experts,
                                    std::int64_t most,
                                    const std::vector<std::pair<std::int32_t, std::int32_t>>& replaceable,
                                    bool to_targets) {
  const auto all = static_cast<std::int64_t>(experts.size());
  for (const auto* const list : {&experts, &replaceable}) {
    for (const auto& [layer, expert] : *list) check_expert(layer, expert);
  }
  settle();
  if (active_) return 0;
  if (!link_->failure().empty()) return all;
  std::size_t given = 0, trimmed = 0;  // of `replaceable`; of `experts`, from the end
  const auto wanted_of = [&](std::int32_t of) {
    const LayerTarget& target = cache_.targets()[at(of)];
    return !to_targets ? options_.blocks : target.experts > 0 ? target.blocks : 0;
  };
  for (std::int64_t done = 0; done < all; ++done) {
    const auto [layer, expert] = experts[at(done)];
    const std::int64_t lacks = wanted_of(layer) - cache_.assigned(layer, expert);
    if (lacks <= 0) continue;
    if (most - cache_.in_flight() < 1) return done;
    std::int64_t room = slab_.free_pages() - options_.reserve;
    for (; room < lacks && given < replaceable.size(); ++given) {
      room += cache_.give_up(replaceable[given].first, replaceable[given].second);
    }
    for (; room < lacks && to_targets && trimmed < experts.size(); ++trimmed) {
      const auto& [of, held] = experts[experts.size() - 1 - trimmed];
      room += cache_.give_up(of, held, wanted_of(of));
    }
    if (room < 1) return all;
    const std::int64_t count = std::min({lacks, room, most - cache_.in_flight()});
    Want want{layer, layer_, &expert, 1, true, count, false};
    want.preload = true;
    cache_.plan(want, &plan_);
    const std::int64_t fetched = transfers_.fetch(&plan_, Priority::kLater, pass_);
    transfers_.forget_refusal();
    if (fetched == 0) return all;
    if (fetched < lacks) return room == fetched ? all : done;
  }
  return all;
}

void LayerSchedule::check_expert(std::int32_t layer, std::int32_t expert) const {
  check_layer(layer);
  if (expert >= 0 && expert < options_.experts) return;
  throw std::invalid_argument("expert is " + std::to_string(expert) + "; it must be from 0 to " +
                              std::to_string(options_.experts - 1));
}

std::int64_t LayerSchedule::withhold(std::int64_t pages) {
  abort();  // what an interrupted pass has left
  stop_preload();
  return cache_.withhold(pages);
}

void LayerSchedule::stop_preload() {
  settle();
  for (std::int32_t layer = 0; layer < options_.layers; ++layer) transfers_.cancel_stale(layer);
}

}  // namespace moechat
