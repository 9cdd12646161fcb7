#include "simulate/draws.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

namespace moechat {
namespace {

constexpr std::int64_t kRowsBetweenChecks = 1 << 15;
constexpr int kTries = 8;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

// SplitMix64 (Steele, Lea and Flood, 2014). One for each row: hashing its numbers costs less than keeping the
// state of a better generator, and what is drawn does not depend on the order of the rows.
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t stream, std::uint64_t row) {
    state_ = seed;
    state_ = next() ^ stream;
    state_ = next() ^ row;
    next();
  }

  std::uint64_t next() {
    std::uint64_t bits = state_ += 0x9e3779b97f4a7c15u;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
  }
  // In [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  double exponential() { return -std::log1p(-uniform()); }

 private:
  std::uint64_t state_ = 0;
};

// Draws places without replacement, with probabilities in proportion to weights.
//
// Invariant: left_ is the sum of the weights that are not taken, apart from rounding.
class Urn {
 public:
  Urn(const double* weights, std::int32_t places)
      : weights_(weights, weights + places), sums_(at(places)), taken_(at(places)) {
    std::partial_sum(weights_.begin(), weights_.end(), sums_.begin());
    left_ = sums_.back();
  }

  void take(std::int32_t place) {
    taken_[at(place)] = 1;
    left_ -= weights_[at(place)];
    list_.push_back(place);
  }

  // A place that is not taken, of which there must be one; takes it.
  std::int32_t draw(Random& random) {
    std::int32_t place = -1;
    // A few tries find one, unless those that are taken have almost all of the weight.
    for (int i = 0; i < kTries && place < 0; ++i) place = tried(random);
    if (place < 0) place = searched(random);
    take(place);
    return place;
  }

  // Puts everything back.
  void reset() {
    for (const std::int32_t place : list_) taken_[at(place)] = 0;
    list_.clear();
    left_ = sums_.back();
  }

 private:
  std::int32_t tried(Random& random) const {
    const auto found = std::upper_bound(sums_.begin(), sums_.end(), random.uniform() * sums_.back());
    const auto place = std::min(found - sums_.begin(), static_cast<std::ptrdiff_t>(sums_.size()) - 1);
    return taken_[at(place)] != 0 ? -1 : static_cast<std::int32_t>(place);
  }

  std::int32_t searched(Random& random) const {
    double left = random.uniform() * left_;
    std::int32_t last = -1;
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      if (taken_[i] != 0) continue;
      last = static_cast<std::int32_t>(i);
      left -= weights_[i];
      if (left < 0) break;
    }
    return last;
  }

  std::vector<double> weights_, sums_;
  std::vector<char> taken_;
  std::vector<std::int32_t> list_;  // places that are taken
  double left_ = 0;
};

// Draws one row of rankings after the other; see RankingInputs.
class RankingRow {
 public:
  explicit RankingRow(const RankingInputs& inputs)
      : inputs_(inputs), own_(at(inputs.k)), keys_(at(inputs.k)), right_(at(inputs.k)) {}

  void draw(std::int64_t row, Random random, Urn& others, std::int32_t* out) {
    const std::int32_t layer = static_cast<std::int32_t>(row % inputs_.layers);
    const double* right = inputs_.right + std::int64_t{layer} * inputs_.experts;
    const std::int32_t k = inputs_.k;
    mark_right(right, random);
    order_own(row, random);
    others.reset();
    for (std::int32_t i = 0; i < k; ++i) others.take(own_[at(i)]);
    std::int32_t found = 0;
    for (std::int32_t rank = 0; rank < inputs_.width; ++rank) {
      const std::int32_t left = k - found;
      bool here = left > 0;
      if (rank < k) {
        here = right_[at(rank)] != 0;
      } else if (here) {
        // The last ranks have what no other rank has.
        here = random.uniform() < left * right[rank] || left >= inputs_.experts - rank;
      }
      out[rank] = here ? own_[at(found++)] : others.draw(random);
    }
  }

 private:
  // Which of the first k ranks are right; more of them where too few other experts exist.
  void mark_right(const double* right, Random& random) {
    std::int32_t missing = 2 * inputs_.k - inputs_.experts;
    for (std::int32_t rank = 0; rank < inputs_.k; ++rank) {
      right_[at(rank)] = random.uniform() < right[rank] ? 1 : 0;
      missing -= right_[at(rank)];
    }
    for (std::int32_t rank = 0; rank < inputs_.k && missing > 0; ++rank) {
      if (right_[at(rank)] != 0) continue;
      right_[at(rank)] = 1;
      --missing;
    }
  }

  // The chosen experts in the order of their ranks: of exponential variables divided by rates, the smallest
  // are drawn without replacement by rate, which is weight ** 2.
  void order_own(std::int64_t row, Random& random) {
    const std::int32_t k = inputs_.k;
    const std::int32_t* chosen = inputs_.chosen + row * k;
    for (std::int32_t i = 0; i < k; ++i) {
      const double weight = inputs_.weights == nullptr ? 1.0 : double{inputs_.weights[row * k + i]};
      keys_[at(i)] = {random.exponential() / (weight * weight), chosen[i]};
    }
    std::sort(keys_.begin(), keys_.end());
    for (std::int32_t i = 0; i < k; ++i) own_[at(i)] = keys_[at(i)].second;
  }

  const RankingInputs& inputs_;
  std::vector<std::int32_t> own_;
  std::vector<std::pair<double, std::int32_t>> keys_;
  std::vector<char> right_;
};

}  // namespace

void draw_routing(const double* weights, std::int32_t layers, std::int32_t experts, std::int32_t k,
                  std::int64_t tokens, std::uint64_t seed, const Check& check, std::int32_t* out) {
  std::vector<std::int32_t> order(at(experts)), ranks(at(k));
  std::int64_t rows = 0;
  for (std::int32_t layer = 0; layer < layers; ++layer) {
    Random random(seed, 0, static_cast<std::uint64_t>(layer));
    Urn urn(weights + std::int64_t{layer} * experts, experts);
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.next() % i]);
    for (std::int64_t token = 0; token < tokens; ++token) {
      if (++rows % kRowsBetweenChecks == 0) check();
      std::int32_t* row = out + (token * layers + layer) * k;
      urn.reset();
      for (std::int32_t i = 0; i < k; ++i) {
        ranks[at(i)] = urn.draw(random);
        row[i] = order[at(ranks[at(i)])];
      }
      // Those of the token come to the front, in the order that they had.
      std::sort(ranks.begin(), ranks.end());
      for (std::int32_t i = 0; i < k; ++i) {
        const auto rank = order.begin() + ranks[at(i)];
        std::rotate(order.begin() + i, rank, rank + 1);
      }
    }
  }
}

void draw_rankings(const RankingInputs& inputs, std::uint64_t seed, std::uint64_t stream, const Check& check,
                   std::int32_t* out) {
  std::vector<Urn> others;
  others.reserve(at(inputs.layers));
  for (std::int32_t layer = 0; layer < inputs.layers; ++layer) {
    others.emplace_back(inputs.popularity + std::int64_t{layer} * inputs.experts, inputs.experts);
  }
  RankingRow ranked(inputs);
  const std::int64_t first = inputs.first_token * inputs.layers;
  for (std::int64_t row = 0; row < inputs.tokens * inputs.layers; ++row) {
    if ((row + 1) % kRowsBetweenChecks == 0) check();
    const Random random(seed, stream, static_cast<std::uint64_t>(first + row));
    ranked.draw(row, random, others[at(row % inputs.layers)], out + row * inputs.width);
  }
}

}  // namespace moechat
