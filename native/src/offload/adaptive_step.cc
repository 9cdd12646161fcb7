#include "offload/adaptive_step.h"

#include <algorithm>
#include <cmath>

namespace moechat {
namespace {

// Weight of the newest in the moving means, and the most that the time of a layer counts: a user may have
// thought in between.
constexpr double kNewest = 0.05;
constexpr double kMostTimes = 4;
// The rounded estimate follows only if the estimate has left its step by so much, so that noise does not
// move it to and fro.
constexpr double kClear = 0.1;

std::size_t size_of(std::int64_t value) { return static_cast<std::size_t>(value); }

}  // namespace

AdaptiveStep::AdaptiveStep(std::int32_t layers, std::int32_t experts, double expert_bytes, double wanted,
                           std::int32_t stalls, std::int32_t ready, std::int32_t most)
    : experts_(experts),
      most_(std::max(1, std::min(most, layers - 1))),
      wanted_(wanted),
      bytes_(expert_bytes),
      stall_limit_(stalls),
      ready_limit_(ready),
      predicted_(size_of(std::int64_t{layers} * experts)) {}

void AdaptiveStep::want(double experts) { wanted_ += kNewest * (experts - wanted_); }

void AdaptiveStep::measure(double layer_seconds, double link_rate) {
  if (layer_seconds > 0) {
    seconds_ = seconds_ == 0
                   ? layer_seconds
                   : seconds_ + kNewest * (std::min(layer_seconds, kMostTimes * seconds_) - seconds_);
  }
  if (!(link_rate > 0) || seconds_ == 0) return;
  estimate_ = wanted_ * bytes_ / (link_rate * seconds_);
  if (estimate_ > rounded_ + kClear || estimate_ < rounded_ - 1 - kClear) {
    rounded_ = static_cast<std::int32_t>(std::clamp(std::ceil(estimate_), 1.0, static_cast<double>(most_)));
  }
  choose();
}

void AdaptiveStep::predicted(std::int32_t layer, const std::int32_t* experts, std::int64_t count) {
  forget(layer);
  std::uint8_t* const flags = predicted_.data() + std::int64_t{layer} * experts_;
  for (std::int64_t i = 0; i < count; ++i) flags[experts[i]] = 1;
}

bool AdaptiveStep::was_predicted(std::int32_t layer, std::int32_t expert) const {
  return predicted_[size_of(std::int64_t{layer} * experts_ + expert)] != 0;
}

void AdaptiveStep::forget(std::int32_t layer) {
  const auto begin = predicted_.begin() + std::int64_t{layer} * experts_;
  std::fill(begin, begin + experts_, std::uint8_t{0});
}

void AdaptiveStep::count_turn(bool late) {
  std::int32_t& count = late ? stalled_ : ready_;
  if (++count < (late ? stall_limit_ : ready_limit_)) return;
  stalled_ = ready_ = 0;
  offset_ = std::clamp(offset_ + (late ? 1 : -1), 1 - rounded_, most_ - rounded_);
  choose();
}

void AdaptiveStep::choose() { step_ = std::clamp(rounded_ + offset_, 1, most_); }

}  // namespace moechat
