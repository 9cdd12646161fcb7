// Both policies are meant for one pool of pages for all layers: their keys are counts of one unit, which are
// compared across layers.
#include "cache/policy_requests.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace moechat {
namespace {

std::size_t size_of(std::int64_t value) { return static_cast<std::size_t>(value); }

// The time of the last use as a fraction below 1/2, so that it decides between equal counts only.
double fraction_of(std::int64_t last) {
  constexpr std::int64_t kLatest = (std::int64_t{1} << 32) - 1;
  return std::ldexp(static_cast<double>(std::min(last, kLatest)), -33);
}

// Counts per expert, and the time of its last use in tokens of its layer; 0: not yet.
class Counted : public EvictionPolicy {
 public:
  void reset() override {
    std::fill(clock_.begin(), clock_.end(), 0);
    std::fill(last_.begin(), last_.end(), 0);
    std::fill(count_.begin(), count_.end(), 0.0);
  }
  // In the order of the shares, and below whatever has been chosen once.
  void expect(std::int32_t layer, const double* shares) override {
    if (clock_[size_of(layer)] > 0) return;
    for (std::int32_t expert = 0; expert < experts_; ++expert) {
      keys_[place(layer, expert)] = std::clamp(shares[expert], 0.0, 1.0) * 1e-12;
    }
  }

 protected:
  explicit Counted(const PolicySpec& spec) : EvictionPolicy(spec.name, spec.layers, spec.experts) {
    const std::size_t all = size_of(std::int64_t{layers_} * experts_);
    clock_.resize(size_of(layers_));
    last_.resize(all);
    count_.resize(all);
    keys_.resize(all);
  }
  std::size_t place(std::int32_t layer, std::int32_t expert) const {
    return size_of(std::int64_t{layer} * experts_ + expert);
  }

  std::vector<std::int64_t> clock_;  // [layers] tokens
  std::vector<std::int64_t> last_;   // [layers * experts]
  std::vector<double> count_;        // [layers * experts]
};

// MoE-Infinity (section 5.3, and the specification of its cache priority): how often the running request has
// chosen an expert while decoding, weighted by 1 - l / L as the first layers are predicted worst; of equal
// counts, the last use decides. What a predictor expects has the highest priority until the layer's next
// access, or until the predictor no longer names it.
class Request final : public Counted {
 public:
  explicit Request(const PolicySpec& spec) : Counted(spec), raised_(keys_.size()) {
    for (std::int32_t layer = 0; layer < layers_; ++layer) {
      factor_.push_back(spec.layer_factor ? 1 - static_cast<double>(layer) / layers_ : 1.0);
    }
  }
  void access(std::int32_t layer, const std::int32_t* experts, const std::int32_t*, std::int64_t count,
              std::int64_t pass_tokens) override {
    const std::int64_t clock = clock_[size_of(layer)] += pass_tokens;
    lower(layer);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::size_t at = place(layer, experts[i]);
      if (pass_tokens == 1) ++count_[at];
      last_[at] = clock;
      rank(layer, at);
    }
  }
  void predict(std::int32_t layer, const std::int32_t* experts, std::int64_t count) override {
    lower(layer);
    for (std::int64_t i = 0; i < count; ++i) raise(layer, experts[i]);
    touch(layer);
  }
  void predict_ahead(const AheadExpert* experts, std::int64_t count) override {
    for (std::int32_t layer = 0; layer < layers_; ++layer) {
      if (lower(layer)) touch(layer);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      raise(experts[i].layer, experts[i].expert);
      touch(experts[i].layer);
    }
  }
  void begin_request() override {
    std::fill(count_.begin(), count_.end(), 0.0);
    std::fill(raised_.begin(), raised_.end(), std::uint8_t{0});
    raised_of_.clear();
    for (std::int32_t layer = 0; layer < layers_; ++layer) {
      for (std::int32_t expert = 0; expert < experts_; ++expert) rank(layer, place(layer, expert));
      touch(layer);
    }
  }
  void reset() override {
    Counted::reset();
    begin_request();
  }
  std::unique_ptr<EvictionPolicy> copy() const override { return std::make_unique<Request>(*this); }

 private:
  static constexpr double kRaised = 1099511627776.0;  // 2^40, above any count

  void rank(std::int32_t layer, std::size_t at) {
    keys_[at] = (count_[at] + fraction_of(last_[at])) * factor_[size_of(layer)];
  }
  void raise(std::int32_t layer, std::int32_t expert) {
    const std::size_t at = place(layer, expert);
    if (raised_[at] != 0) return;
    raised_[at] = 1;
    keys_[at] += kRaised;
    if (raised_of_.empty()) raised_of_.resize(size_of(layers_));
    raised_of_[size_of(layer)].push_back(expert);
  }
  // Whether any expert of the layer was raised.
  bool lower(std::int32_t layer) {
    if (raised_of_.empty()) return false;
    std::vector<std::int32_t>& raised = raised_of_[size_of(layer)];
    if (raised.empty()) return false;
    for (const std::int32_t expert : raised) {
      raised_[place(layer, expert)] = 0;
      rank(layer, place(layer, expert));
    }
    raised.clear();
    return true;
  }

  std::vector<double> factor_;                        // [layers]
  std::vector<std::uint8_t> raised_;                  // [layers * experts]
  std::vector<std::vector<std::int32_t>> raised_of_;  // [layers], or empty: none is
};

// FineMoE (section 4.5): the expert with the highest 1 / (p * freq) is evicted first, with p the expert's
// share in the map that was found last, and freq how often it was chosen at all. An expert that was
// prefetched and not chosen yet counts as chosen once; without it a prefetch would be the first to go. p has
// a floor, so that freq ranks the experts that no map names.
class Map final : public Counted {
 public:
  explicit Map(const PolicySpec& spec) : Counted(spec), share_(keys_.size()) {}
  void access(std::int32_t layer, const std::int32_t* experts, const std::int32_t* tokens, std::int64_t count,
              std::int64_t pass_tokens) override {
    const std::int64_t clock = clock_[size_of(layer)] += pass_tokens;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::size_t at = place(layer, experts[i]);
      count_[at] += tokens[i];
      last_[at] = clock;
      rank(at);
    }
  }
  void predict_ahead(const AheadExpert* experts, std::int64_t count) override {
    named_.assign(size_of(layers_), 0);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int32_t layer = experts[i].layer;
      if (named_[size_of(layer)] == 0) {
        named_[size_of(layer)] = 1;
        touch(layer);
        for (std::int32_t expert = 0; expert < experts_; ++expert) {
          const std::size_t at = place(layer, expert);
          if (share_[at] == 0) continue;
          share_[at] = 0;
          rank(at);
        }
      }
      const std::size_t at = place(layer, experts[i].expert);
      share_[at] = std::max(0.0, static_cast<double>(experts[i].score));
      rank(at);
    }
  }
  void reset() override {
    Counted::reset();
    std::fill(share_.begin(), share_.end(), 0.0);
    std::fill(keys_.begin(), keys_.end(), 0.0);
    for (std::int32_t layer = 0; layer < layers_; ++layer) touch(layer);
  }
  std::unique_ptr<EvictionPolicy> copy() const override { return std::make_unique<Map>(*this); }

 private:
  static constexpr double kFloor = 1e-3;

  void rank(std::size_t at) { keys_[at] = (share_[at] + kFloor) * (count_[at] + 1 + fraction_of(last_[at])); }

  std::vector<double> share_;        // [layers * experts]: p of the last map that was found for the layer
  std::vector<std::uint8_t> named_;  // [layers], scratch
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_request(const PolicySpec& spec) {
  return std::make_unique<Request>(spec);
}

std::unique_ptr<EvictionPolicy> make_map(const PolicySpec& spec) { return std::make_unique<Map>(spec); }

}  // namespace moechat
