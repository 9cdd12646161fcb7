// Sharing with the CPU: the part of the schedule that assigns missing blocks to link or CPU.
#include <algorithm>

#include "offload/layer_schedule.h"

namespace moechat {
namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

}  // namespace

// Leaves the blocks unassigned that the CPU may compute of a layer that begins.
void LayerSchedule::divide() {
  const double* const keys = policy_->keys(layer_);
  far_.begin(&grouped_, keys, tokens_,
             options_.far_experts.empty()
                 ? nullptr
                 : &options_.far_experts[at(std::int64_t{layer_} * options_.experts)]);
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) {
    if (far_.eligible(i)) row_at(i).link_end = cache_.assigned(layer_, expert_of(i));
  }
  if (miss_ == Miss::kBoth) {
    const std::int64_t coming = on_the_way();
    assign_to_link(part_of_link(unassigned(), coming) - coming);
  } else if (miss_ == Miss::kCompute) {
    admit(keys);
  } else if (miss_ == Miss::kSeldom || miss_ == Miss::kStay) {
    admit_seldom(keys);
  }
}

// Assigns blocks to the link that are worth bringing while the CPU computes the others. keys [experts]: of
// the layer.
void LayerSchedule::admit(const double* keys) {
  const LayerTarget target = cache_.targets()[at(layer_)];
  if (policy_->comparable() && 2 * target.experts >= options_.experts) {
    admit_what_pays(keys);
  } else {
    admit_targets(keys);
  }
}

// Whether the key of an expert is among the highest ones of the layer, as many as its target keeps.
bool LayerSchedule::of_target(const double* keys, std::int32_t expert) const {
  const auto above =
      std::count_if(keys, keys + options_.experts, [&](double key) { return key > keys[expert]; });
  return above < cache_.targets()[at(layer_)].experts;
}

// The experts that the target keeps, up to its blocks, at once.
void LayerSchedule::admit_targets(const double* keys) {
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) {
    if (!far_.eligible(i) || !of_target(keys, expert_of(i))) continue;
    row_at(i).link_end = std::max(row_at(i).link_end, cache_.targets()[at(layer_)].blocks);
  }
}

// Of the link's part, the blocks of experts that the target keeps and that are worth more than the expert
// whose pages they take: the best experts first.
void LayerSchedule::admit_what_pays(const double* keys) {
  const std::int64_t coming = on_the_way();
  const LinkStats link = link_->stats();
  const std::int64_t ahead = std::max<std::int64_t>(0, link.in_flight - coming * options_.record_bytes);
  const double share = far_.share_of_link(unassigned() + coming, link, ahead);
  upload_credit_ += std::max(0.0, share - static_cast<double>(coming));
  auto part = static_cast<std::int64_t>(upload_credit_);
  upload_credit_ -= static_cast<double>(part);
  std::int64_t free = slab_.free_pages() - options_.reserve;
  for (auto place = far_.order().rbegin(); place != far_.order().rend() && part > 0; ++place) {
    Row& row = row_at(*place);
    const std::int32_t expert = expert_of(*place);
    const std::int64_t lacks = std::min<std::int64_t>(part, row.far_begin - row.link_end);
    if (lacks == 0 || !of_target(keys, expert)) continue;
    if (lacks > free && !(keys[expert] > cache_.cheapest(layer_))) continue;
    row.link_end += static_cast<std::int32_t>(lacks);
    part -= lacks;
    free -= lacks;
  }
}

// Experts that free pages hold, and at most one that is worth much more than the expert whose pages it takes:
// the best first.
void LayerSchedule::admit_seldom(const double* keys) {
  std::int64_t free = slab_.free_pages() - options_.reserve;
  for (auto place = far_.order().rbegin(); place != far_.order().rend(); ++place) {
    Row& row = row_at(*place);
    const std::int32_t lacks = row.far_begin - row.link_end;
    if (lacks == 0) continue;
    if (lacks > free) {
      const bool much = policy_->comparable() &&
                        FarShare::worth_upload(miss_, keys[expert_of(*place)], cache_.cheapest(layer_));
      if (much) row.link_end = row.far_begin;
      return;
    }
    row.link_end = row.far_begin;
    free -= lacks;
  }
}

std::int64_t LayerSchedule::unassigned() const {
  std::int64_t count = 0;
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) count += row_at(i).far_begin - row_at(i).link_end;
  return count;
}

// Blocks of the layer that were assigned to the link and have not landed.
std::int64_t LayerSchedule::on_the_way() const {
  std::int64_t count = 0;
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) {
    if (done(row_at(i))) continue;
    count += std::max(0, row_at(i).link_end - cache_.resident(layer_, expert_of(i)));
  }
  return count;
}

// acquire() will fetch them.
void LayerSchedule::assign_to_link(std::int64_t count) {
  for (auto place = far_.order().rbegin(); place != far_.order().rend() && count > 0; ++place) {
    Row& row = row_at(*place);
    const std::int64_t given = std::min<std::int64_t>(count, row.far_begin - row.link_end);
    row.link_end += static_cast<std::int32_t>(given);
    count -= given;
  }
}

// Unassigned blocks that have landed meanwhile, whoever asked for them.
void LayerSchedule::absorb_landed() {
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) {
    Row& row = row_at(i);
    if (!row.pinned) continue;
    const std::int32_t landed = cache_.resident(layer_, expert_of(i));
    row.link_end = std::max(row.link_end, std::min(landed, row.far_begin));
  }
}

// Takes blocks back that the link would bring later than the CPU has them. They still arrive, and fill their
// pages.
void LayerSchedule::take_from_link(std::int64_t count) {
  for (const std::int32_t index : far_.order()) {
    if (count <= 0) return;
    Row& row = row_at(index);
    if (!far_.eligible(index) || !row.pinned) continue;
    const std::int32_t landed = std::max(row.next, cache_.resident(layer_, expert_of(index)));
    const std::int64_t taken = std::min<std::int64_t>(count, row.link_end - landed);
    if (taken <= 0) continue;
    row.link_end -= static_cast<std::int32_t>(taken);
    count -= taken;
  }
}

// Blocks that have no page yet, of the rows that the CPU may compute, become unassigned again.
void LayerSchedule::reopen_without_pages() {
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) {
    Row& row = row_at(i);
    if (!far_.eligible(i) || !row.pinned) continue;
    row.link_end = std::min(row.far_begin, cache_.assigned(layer_, expert_of(i)));
  }
}

// Of the blocks that are unassigned or on their way, how many the link brings before the CPU has the others.
std::int64_t LayerSchedule::part_of_link(std::int64_t unassigned, std::int64_t coming) const {
  const LinkStats link = link_->stats();
  const std::int64_t ahead = std::max<std::int64_t>(0, link.in_flight - coming * options_.record_bytes);
  return far_.of_link(unassigned + coming, link, ahead);
}

// Divides what has not landed by the rates of link and CPU. A block is the CPU's if the CPU has it sooner,
// also when it is on its way.
void LayerSchedule::divide_again() {
  const std::int64_t left = unassigned();
  const std::int64_t coming = on_the_way();
  if (left + coming == 0) return;
  const std::int64_t part = part_of_link(left, coming);
  if (part < coming) {
    take_from_link(coming - part);
  } else if (miss_ == Miss::kBoth && !starved_ && part > coming && left > 0) {
    assign_to_link(std::min(part - coming, left));
    acquire();
  }
}

// The CPU computes a piece of its own. There is an unassigned block.
void LayerSchedule::share() {
  const std::int64_t size = far_.piece(unassigned(), executor_->far_threads());
  std::int64_t piece = size;
  pieces_.clear();
  for (const std::int32_t index : far_.order()) {
    if (piece == 0) break;
    Row& row = row_at(index);
    const auto taken = static_cast<std::int32_t>(std::min<std::int64_t>(piece, row.far_begin - row.link_end));
    if (taken == 0) continue;
    pieces_.push_back({index, row.far_begin - taken, row.far_begin});
    row.far_begin -= taken;
    piece -= taken;
  }
  const double begun = executor_->now();
  executor_->far_compute(pieces_);
  const double time = executor_->now() - begun;
  far_.count(size, time);
  far_blocks_ += size;
  own_.blocks_far += size;
  own_.far_seconds += time;
  for (const FarPiece& one : pieces_) {
    far_used_[place(layer_, expert_of(one.row))] = 1;
    if (row_at(one.row).pinned && done(row_at(one.row))) end_row(one.row);
  }
  waited_ = 0;
  executor_->poll_interrupt();
}

}  // namespace moechat
