#include "cache/routing_counter.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace moechat {
RoutingCounter::RoutingCounter(std::int32_t layers, std::int32_t experts, std::int32_t top_k,
                               std::int64_t even_share)
    : layers_(layers), experts_(experts), depth_(depth_of(experts, top_k)), even_share_(even_share) {
  constexpr std::int64_t kMost = std::int64_t{1} << 28;
  if (layers < 1 || experts < 1 || top_k < 1 || std::int64_t{layers} * experts > kMost) {
    throw std::invalid_argument("layers, experts and top_k are " + std::to_string(layers) + ", " +
                                std::to_string(experts) + " and " + std::to_string(top_k) +
                                "; each must be at least 1, and layers * experts at most " +
                                std::to_string(kMost));
  }
  if (even_share < 0) {
    throw std::invalid_argument("even_share is " + std::to_string(even_share) + "; it cannot be negative");
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
  begun_.resize(at(layers));
  order_.resize(all);
  rank_.resize(all);
  for (std::size_t i = 0; i < all; ++i) order_[i] = static_cast<std::int32_t>(i % at(experts));
  chosen_.resize(at(experts));
  pool_.resize(at(experts));
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
  if (begun_[at(layer)] == 0) begin(layer, keys);
  const std::int32_t places = waiting_[at(layer)];
  waiting_[at(layer)] = 0;
  if (pass_tokens != 1) return;
  counts_.tokens = std::max(counts_.tokens, ++seen_[at(layer)]);
  const std::int64_t row = std::int64_t{layer} * experts_;
  const std::int32_t* rank = rank_.data() + row;
  for (std::int64_t i = 0; i < count; ++i) {
    ++counts_.ranks[at(row + rank[experts[i]])];
    hard_ += rank[experts[i]] >= even_share_ ? 1 : 0;
    ++counts_.activations[at(row + experts[i])];
  }
  if (places == 0) return;
  for (std::int64_t i = 0; i < count; ++i) chosen_[at(experts[i])] = 1;
  ++counts_.predicted[at(layer)];
  const std::int64_t first = std::int64_t{layer} * depth_;
  for (std::int32_t y = 0; y < places; ++y) {
    const std::int32_t expert = predictions_[at(first + y)];
    counts_.hits_of_prediction[at(first + y)] += chosen_[at(expert)];
    ++counts_.ranks_of_prediction[at((first + y) * experts_ + rank[expert])];
  }
  for (std::int64_t i = 0; i < count; ++i) chosen_[at(experts[i])] = 0;
}

void RoutingCounter::begin(std::int32_t layer, const double* keys) {
  begun_[at(layer)] = 1;
  std::int32_t* order = order_.data() + std::int64_t{layer} * experts_;
  std::sort(order, order + experts_, [keys](std::int32_t a, std::int32_t b) {
    return keys[a] != keys[b] ? keys[a] > keys[b] : a > b;
  });
  for (std::int32_t i = 0; i < experts_; ++i) rank_[at(std::int64_t{layer} * experts_ + order[i])] = i;
}

// With C experts cached before the access, afterwards the best C of these and the chosen ones are. That of
// C + 1 is that of C and one more: the best of what the first C + 1 places held and the chosen ones, as far
// as it is not in a place yet. So the places are filled one after the other from a pool.
void RoutingCounter::keep(std::int32_t layer, const double* keys, const std::int32_t* experts,
                          std::int64_t count) {
  const std::int64_t row = std::int64_t{layer} * experts_;
  std::int32_t* order = order_.data() + row;
  const auto better = [](const Candidate& a, const Candidate& b) {
    return a.key != b.key ? a.key > b.key : a.expert > b.expert;
  };
  // The pool is pool_[head, tail), the best first.
  std::int64_t head = 0, tail = count;
  for (std::int64_t i = 0; i < count; ++i) {
    pool_[at(i)] = {keys[experts[i]], experts[i]};
    chosen_[at(experts[i])] = 1;
  }
  std::sort(pool_.begin(), pool_.begin() + count, better);
  for (std::int32_t place = 0; head < tail; ++place) {
    const std::int32_t expert = order[place];
    if (chosen_[at(expert)] == 0) {
      const Candidate candidate{keys[expert], expert};
      std::int64_t to = tail++;
      for (; to > head && better(candidate, pool_[at(to - 1)]); --to) pool_[at(to)] = pool_[at(to - 1)];
      pool_[at(to)] = candidate;
    }
    order[place] = pool_[at(head++)].expert;
    rank_[at(row + order[place])] = place;
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
