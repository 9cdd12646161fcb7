#include "cache/routing_counter.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace moechat {
namespace {

constexpr std::int64_t kGroup = 4;  // experts that are ranked at a time

// Ranks of experts, `count` rounded up to groups: of what is compared with, each value is loaded once for a
// group. Vectors by hand, because compilers leave loops over comparisons of doubles scalar (a comparison
// could trap).
template <class Doubles, class Integers>
inline __attribute__((always_inline)) void rank_each(const double* keys, std::int32_t experts,
                                                     const std::int32_t* wanted, std::int64_t count,
                                                     std::int32_t* ranks) {
  constexpr std::int32_t kLanes = sizeof(Doubles) / sizeof(double);
  const std::int32_t whole = experts / kLanes * kLanes;
  for (std::int64_t first = 0; first < count; first += kGroup) {
    double key[kGroup];
    Doubles keys_of[kGroup] = {};
    Integers above[kGroup] = {}, not_below[kGroup] = {};  // true is -1
    for (std::int64_t i = 0; i < kGroup; ++i) {
      key[i] = keys[wanted[first + i]];
      keys_of[i] += key[i];
    }
    for (std::int32_t other = 0; other < whole; other += kLanes) {
      Doubles some;
      std::memcpy(&some, keys + other, sizeof some);
      for (std::int64_t i = 0; i < kGroup; ++i) above[i] -= some > keys_of[i];
      for (std::int64_t i = 0; i < kGroup; ++i) not_below[i] -= some >= keys_of[i];
    }
    for (std::int64_t i = 0; i < kGroup; ++i) {
      std::int64_t rank = 0, ties = -1;  // with others than itself
      for (std::int32_t lane = 0; lane < kLanes; ++lane) {
        rank += above[i][lane];
        ties += not_below[i][lane] - above[i][lane];
      }
      for (std::int32_t other = whole; other < experts; ++other) {
        rank += static_cast<int>(keys[other] > key[i]);
        ties += static_cast<int>(keys[other] == key[i]);
      }
      for (std::int32_t other = experts; ties > 0 && --other > wanted[first + i];) {
        if (keys[other] != key[i]) continue;
        ++rank;
        --ties;
      }
      ranks[first + i] = static_cast<std::int32_t>(rank);
    }
  }
}

using Rank = void (*)(const double* keys, std::int32_t experts, const std::int32_t* wanted,
                      std::int64_t count, std::int32_t* ranks);

void rank_narrow(const double* keys, std::int32_t experts, const std::int32_t* wanted, std::int64_t count,
                 std::int32_t* ranks) {
  using Doubles = double __attribute__((vector_size(16)));
  using Integers = std::int64_t __attribute__((vector_size(16)));
  rank_each<Doubles, Integers>(keys, experts, wanted, count, ranks);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void rank_wide(const double* keys, std::int32_t experts,
                                               const std::int32_t* wanted, std::int64_t count,
                                               std::int32_t* ranks) {
  using Doubles = double __attribute__((vector_size(32)));
  using Integers = std::int64_t __attribute__((vector_size(32)));
  rank_each<Doubles, Integers>(keys, experts, wanted, count, ranks);
}

Rank best_rank() { return __builtin_cpu_supports("avx2") ? rank_wide : rank_narrow; }
#else
Rank best_rank() { return rank_narrow; }
#endif

}  // namespace

RoutingCounter::RoutingCounter(std::int32_t layers, std::int32_t experts, std::int32_t top_k)
    : layers_(layers), experts_(experts), depth_(depth_of(experts, top_k)) {
  constexpr std::int64_t kMost = std::int64_t{1} << 28;
  if (layers < 1 || experts < 1 || top_k < 1 || std::int64_t{layers} * experts > kMost) {
    throw std::invalid_argument("layers, experts and top_k are " + std::to_string(layers) + ", " +
                                std::to_string(experts) + " and " + std::to_string(top_k) +
                                "; each must be at least 1, and layers * experts at most " +
                                std::to_string(kMost));
  }
  const std::size_t all = at(std::int64_t{layers} * experts);
  counts_.predicted.resize(at(layers));
  counts_.activations.resize(all);
  counts_.ranks.resize(all);
  counts_.hits_of_prediction.resize(at(std::int64_t{layers} * depth_));
  counts_.ranks_of_prediction.resize(all * at(depth_));
  seen_.resize(at(layers));
  predictions_.resize(at(std::int64_t{layers} * depth_));
  waiting_.resize(at(layers));
  chosen_.resize(at(experts));
  rank_of_.resize(at(experts));
  wanted_.resize(at(std::int64_t{experts} + depth_ + kGroup));
  ranks_.resize(wanted_.size());
}

std::int32_t RoutingCounter::depth_of(std::int32_t experts, std::int32_t top_k) {
  const std::int64_t wanted = std::clamp<std::int64_t>(std::int64_t{4} * top_k, 16, 64);
  return static_cast<std::int32_t>(std::min<std::int64_t>(experts, wanted));
}

void RoutingCounter::predict(std::int32_t layer, const std::int32_t* ranked, std::int64_t count) {
  const auto places = static_cast<std::int32_t>(std::min<std::int64_t>(count, depth_));
  std::copy_n(ranked, places, predictions_.begin() + std::int64_t{layer} * depth_);
  waiting_[at(layer)] = places;
}

void RoutingCounter::access(std::int32_t layer, const double* keys, const std::int32_t* experts,
                            std::int64_t count, std::int64_t pass_tokens) {
  static const Rank rank_all = best_rank();
  const std::int32_t places = waiting_[at(layer)];
  waiting_[at(layer)] = 0;
  if (pass_tokens != 1) return;
  counts_.tokens = std::max(counts_.tokens, ++seen_[at(layer)]);
  // The chosen experts, then those that were only predicted.
  const std::int32_t* predicted = predictions_.data() + std::int64_t{layer} * depth_;
  std::int64_t wanted = 0;
  for (std::int64_t i = 0; i < count; ++i) wanted_[at(wanted++)] = experts[i];
  for (std::int64_t i = 0; i < count; ++i) chosen_[at(experts[i])] = 1;
  for (std::int32_t y = 0; y < places; ++y) {
    if (chosen_[at(predicted[y])] == 0) wanted_[at(wanted++)] = predicted[y];
  }
  for (std::int64_t i = wanted; i % kGroup != 0; ++i) wanted_[at(i)] = 0;
  rank_all(keys, experts_, wanted_.data(), wanted, ranks_.data());
  const std::int64_t row = std::int64_t{layer} * experts_;
  for (std::int64_t i = 0; i < count; ++i) {
    ++counts_.ranks[at(row + ranks_[at(i)])];
    ++counts_.activations[at(row + experts[i])];
  }
  if (places > 0) ++counts_.predicted[at(layer)];
  for (std::int64_t i = 0; i < wanted; ++i) rank_of_[at(wanted_[at(i)])] = ranks_[at(i)];
  const std::int64_t first = std::int64_t{layer} * depth_;
  for (std::int32_t y = 0; y < places; ++y) {
    const std::int32_t expert = predicted[y];
    counts_.hits_of_prediction[at(first + y)] += chosen_[at(expert)];
    ++counts_.ranks_of_prediction[at((first + y) * experts_ + rank_of_[at(expert)])];
  }
  for (std::int64_t i = 0; i < count; ++i) chosen_[at(experts[i])] = 0;
}

void RoutingCounter::reset() {
  counts_.tokens = 0;
  for (auto* counts :
       {&counts_.predicted, &counts_.activations, &counts_.ranks, &counts_.hits_of_prediction, &seen_}) {
    std::fill(counts->begin(), counts->end(), 0);
  }
  std::fill(counts_.ranks_of_prediction.begin(), counts_.ranks_of_prediction.end(), 0u);
}

}  // namespace moechat
