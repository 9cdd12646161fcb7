#include "cache/policy.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "cache/policy_forecast.h"
#include "cache/policy_requests.h"

namespace moechat {
namespace {

// Below every key that an access can produce.
constexpr double kNever = -1e300;
// Key of an expert that is expected in every token; of others it is lower. Also below every key of an access.
constexpr double kExpected = -1e9;

std::size_t size_of(std::int64_t value) { return static_cast<std::size_t>(value); }

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

// Base of all policies with a clock per layer; maps (layer, expert) to an index.
class Clocked : public EvictionPolicy {
 public:
  void reset() override {
    std::fill(clock_.begin(), clock_.end(), 0);
    std::fill(keys_.begin(), keys_.end(), kNever);
  }
  void expect(std::int32_t layer, const double* shares) override {
    if (clock_[size_of(layer)] > 0) return;
    for (std::int32_t expert = 0; expert < experts_; ++expert) {
      keys_[place(layer, expert)] = kExpected * (2 - std::clamp(shares[expert], 0.0, 1.0));
    }
  }

 protected:
  explicit Clocked(const PolicySpec& spec) : EvictionPolicy(spec.name, spec.layers, spec.experts) {
    clock_.resize(size_of(layers_));
    keys_.resize(size_of(std::int64_t{layers_} * experts_), kNever);
  }
  std::size_t place(std::int32_t layer, std::int32_t expert) const {
    return size_of(std::int64_t{layer} * experts_ + expert);
  }
  void forget() {
    reset();
    for (std::int32_t layer = 0; layer < layers_; ++layer) touch(layer);
  }
  // Advances the layer's clock past the pass and returns it, in tokens.
  std::int64_t advance(std::int32_t layer, std::int64_t pass_tokens) {
    return clock_[size_of(layer)] += pass_tokens;
  }

  std::vector<std::int64_t> clock_;
};

// Least cache priority (MoEpic, section 3.3): priority mu * rho^(nu / omega), with mu activations so far and
// nu tokens since the last one. Its logarithm at clock t is log(mu) - (t - last) * log(1/rho) / omega. All
// experts of a layer share t, so the key log(mu) + last * log(1/rho) / omega ranks them at any t. In a pass
// of many tokens the last activation counts as that of the pass's last token.
class Lcp final : public Clocked {
 public:
  explicit Lcp(const PolicySpec& spec)
      // Bounded so that a key stays finite for any omega.
      : Clocked(spec), growth_(std::min(-std::log(spec.rho) / spec.omega, 1e280)), uses_(keys_.size()) {}
  void access(std::int32_t layer, const std::int32_t* experts, const std::int32_t* tokens, std::int64_t count,
              std::int64_t pass_tokens) override {
    const double last = static_cast<double>(advance(layer, pass_tokens));
    for (std::int64_t i = 0; i < count; ++i) {
      const std::size_t at = place(layer, experts[i]);
      uses_[at] += tokens[i];
      keys_[at] = std::log(static_cast<double>(uses_[at])) + last * growth_;
    }
  }
  void reset() override {
    Clocked::reset();
    std::fill(uses_.begin(), uses_.end(), 0);
  }
  std::unique_ptr<EvictionPolicy> copy() const override { return std::make_unique<Lcp>(*this); }

 private:
  double growth_;
  std::vector<std::int64_t> uses_;
};

// Returns the time of the last use in tokens. Of the experts of one pass, those chosen by more tokens count
// as more recent, because they are likelier to have been chosen late in it.
double recency(std::int64_t clock, std::int32_t tokens, std::int64_t pass_tokens) {
  const double share = std::min(1.0, static_cast<double>(tokens) / static_cast<double>(pass_tokens));
  return static_cast<double>(clock) - 0.5 + 0.5 * share;
}

// Least recently used, as in Mixtral-offloading (Eliseev and Mazur, 2023).
class Lru final : public Clocked {
 public:
  explicit Lru(const PolicySpec& spec) : Clocked(spec) {}
  void access(std::int32_t layer, const std::int32_t* experts, const std::int32_t* tokens, std::int64_t count,
              std::int64_t pass_tokens) override {
    const std::int64_t clock = advance(layer, pass_tokens);
    for (std::int64_t i = 0; i < count; ++i) {
      keys_[place(layer, experts[i])] = recency(clock, tokens[i], pass_tokens);
    }
  }
  std::unique_ptr<EvictionPolicy> copy() const override { return std::make_unique<Lru>(*this); }
};

// Least frequently used: the key is the number of activations so far; ties keep the expert used last. The
// time of the last use enters as a fraction below 1, so that it never outweighs an activation.
class Lfu final : public Clocked {
 public:
  explicit Lfu(const PolicySpec& spec) : Clocked(spec), uses_(keys_.size()), per_request_(spec.per_request) {}
  void begin_request() override {
    if (per_request_) forget();
  }
  void access(std::int32_t layer, const std::int32_t* experts, const std::int32_t* tokens, std::int64_t count,
              std::int64_t pass_tokens) override {
    constexpr std::int64_t kLatest = (std::int64_t{1} << 32) - 1;
    const double last = std::ldexp(static_cast<double>(std::min(advance(layer, pass_tokens), kLatest)), -32);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::size_t at = place(layer, experts[i]);
      uses_[at] += tokens[i];
      keys_[at] = static_cast<double>(uses_[at]) + last;
    }
  }
  void reset() override {
    Clocked::reset();
    std::fill(uses_.begin(), uses_.end(), 0);
  }
  std::unique_ptr<EvictionPolicy> copy() const override { return std::make_unique<Lfu>(*this); }

 private:
  std::vector<std::int64_t> uses_;
  bool per_request_;
};

// gamma-discounted counts (MELINOE, definition C.1): at each token count = gamma * count + chosen, from 0.
// The count at clock t is the sum of gamma^(t - t_i) over the activations t_i; the key is the logarithm of
// the sum of gamma^(-t_i), which ranks experts independently of t. In a pass of many tokens an expert's
// activations count as spread evenly over the pass.
class Discount final : public Clocked {
 public:
  explicit Discount(const PolicySpec& spec)
      : Clocked(spec), gamma_(spec.gamma), growth_(-std::log(spec.gamma)), per_request_(spec.per_request) {}
  void begin_request() override {
    if (per_request_) forget();
  }
  // What a request is expected to use counts as used once (MELINOE, section 3.3).
  void predict_ahead(const AheadExpert* experts, std::int64_t count) override {
    if (!per_request_) return;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int32_t layer = experts[i].layer;
      double& key = keys_[place(layer, experts[i].expert)];
      key = std::max(key, static_cast<double>(clock_[size_of(layer)]) * growth_);
      touch(layer);
    }
  }
  void access(std::int32_t layer, const std::int32_t* experts, const std::int32_t* tokens, std::int64_t count,
              std::int64_t pass_tokens) override {
    const double end = static_cast<double>(advance(layer, pass_tokens)) * growth_;
    const double mean = mean_weight(static_cast<double>(pass_tokens));
    for (std::int64_t i = 0; i < count; ++i) {
      double& key = keys_[place(layer, experts[i])];
      const double added = std::log(static_cast<double>(tokens[i]) * mean) + end;
      const double larger = std::max(key, added);
      key = larger + std::log1p(std::exp(std::min(key, added) - larger));
    }
  }
  std::unique_ptr<EvictionPolicy> copy() const override { return std::make_unique<Discount>(*this); }

 private:
  // Mean of gamma^0 .. gamma^(tokens - 1).
  double mean_weight(double tokens) const {
    if (tokens <= 1 || gamma_ == 1) return 1;
    return -std::expm1(-growth_ * tokens) / (tokens * (1 - gamma_));
  }
  double gamma_;
  double growth_;
  bool per_request_;
};

// Two-level LRU (ExpertFlow, section 3.3.1). Experts of "the last layers" and experts predicted for the next
// access form the high list, all others the low list. The low list is evicted first, each list in order of
// last use. A prediction holds until the access that it is for. The paper does not say how many layers are
// the last ones: high_span of them (0: a whole pass), or as many as predictions reach ahead. The layers that
// predictions of the same token cannot reach keep their experts for a whole pass, which is the motive that
// the paper gives.
class TwoLevelLru final : public Clocked {
 public:
  explicit TwoLevelLru(const PolicySpec& spec)
      : Clocked(spec),
        last_(keys_.size(), kNever),
        why_(keys_.size()),
        high_(keys_.size()),
        high_count_(size_of(layers_)),
        span_(spec.high_span == 0 ? layers_ : std::min(spec.high_span, layers_)),
        first_span_(span_) {}
  void access(std::int32_t layer, const std::int32_t* experts, const std::int32_t* tokens, std::int64_t count,
              std::int64_t pass_tokens) override {
    const std::int64_t clock = advance(layer, pass_tokens);
    keep(layer, 0);
    for (std::int64_t i = 0; i < count; ++i) {
      last_[place(layer, experts[i])] = recency(clock, tokens[i], pass_tokens);
      raise(layer, experts[i], kUsed);
    }
    if (span_ < layers_) demote((layer + layers_ - span_) % layers_);
  }
  void reach(std::int32_t layer, std::int32_t steps) override {
    const std::int32_t before = span_;
    span_ = std::clamp(steps, 1, layers_);
    for (std::int32_t back = span_; back < before; ++back) demote((layer + layers_ - back) % layers_);
  }
  void predict(std::int32_t layer, const std::int32_t* experts, std::int64_t count) override {
    keep(layer, kUsed);
    for (std::int64_t i = 0; i < count; ++i) raise(layer, experts[i], kPredicted);
    touch(layer);
  }
  void reset() override {
    Clocked::reset();
    std::fill(last_.begin(), last_.end(), kNever);
    std::fill(why_.begin(), why_.end(), std::uint8_t{0});
    std::fill(high_count_.begin(), high_count_.end(), 0);
    span_ = first_span_;
  }
  std::unique_ptr<EvictionPolicy> copy() const override { return std::make_unique<TwoLevelLru>(*this); }

 private:
  static constexpr std::uint8_t kUsed = 1;
  static constexpr std::uint8_t kPredicted = 2;
  // Above any clock. A predicted expert that was never used is the first of the high list to be evicted.
  static constexpr double kHigh = 1099511627776.0;

  void raise(std::int32_t layer, std::int32_t expert, std::uint8_t why) {
    const std::size_t at = place(layer, expert);
    if (why_[at] == 0) high_[place(layer, high_count_[size_of(layer)]++)] = expert;
    why_[at] = static_cast<std::uint8_t>(why_[at] | why);
    keys_[at] = std::max(last_[at], 0.0) + kHigh;
  }
  void demote(std::int32_t layer) {
    if (layer < span_ || high_count_[size_of(layer)] == 0) return;
    keep(layer, kPredicted);
    touch(layer);
  }
  // Clears all reasons except those in `mask`, and drops members without a reason from the high list.
  void keep(std::int32_t layer, std::uint8_t mask) {
    std::int32_t& count = high_count_[size_of(layer)];
    std::int32_t left = 0;
    for (std::int32_t i = 0; i < count; ++i) {
      const std::int32_t expert = high_[place(layer, i)];
      const std::size_t at = place(layer, expert);
      why_[at] = static_cast<std::uint8_t>(why_[at] & mask);
      if (why_[at] != 0) {
        high_[place(layer, left++)] = expert;
      } else {
        keys_[at] = last_[at];
      }
    }
    count = left;
  }

  std::vector<double> last_;
  std::vector<std::uint8_t> why_;  // why an expert is in the high list; 0: in the low list
  std::vector<std::int32_t>
      high_;  // [layers, experts]: the first high_count_ entries of a layer are the members of its high list
  std::vector<std::int32_t> high_count_;
  std::int32_t span_;
  std::int32_t first_span_;
};

// A fixed ranking, for expert sets chosen in advance.
class Static final : public EvictionPolicy {
 public:
  explicit Static(const PolicySpec& spec) : EvictionPolicy(spec.name, spec.layers, spec.experts) {
    if (spec.ranks.size() != size_of(std::int64_t{layers_} * experts_)) {
      refuse("ranks has " + std::to_string(spec.ranks.size()) +
             " values; static needs layers * experts = " + std::to_string(std::int64_t{layers_} * experts_));
    }
    for (const double rank : spec.ranks) {
      if (!std::isfinite(rank)) refuse("ranks holds a value that is not finite");
    }
    keys_ = spec.ranks;
  }
  void access(std::int32_t, const std::int32_t*, const std::int32_t*, std::int64_t, std::int64_t) override {}
  void reset() override {}
  std::unique_ptr<EvictionPolicy> copy() const override { return std::make_unique<Static>(*this); }
};

// Belady's rule (Belady, 1966) on a known future: evicts the expert whose next use is farthest away, and
// first of all those that are never used again. The layer's clock is the position in the future; the experts
// passed to `access` are ignored. After the last token of the future all experts rank equal.
class Belady final : public Clocked {
 public:
  explicit Belady(const PolicySpec& spec)
      : Clocked(spec), tokens_(spec.future_tokens), top_k_(spec.future_top_k), future_(spec.future) {
    if (tokens_ < 0 || top_k_ < 1 ||
        future_.size() != size_of(tokens_) * size_of(layers_) * size_of(top_k_)) {
      refuse("future has " + std::to_string(future_.size()) +
             " values; belady needs tokens * layers * top_k = " + std::to_string(tokens_) + " * " +
             std::to_string(layers_) + " * " + std::to_string(top_k_));
    }
    for (const std::int32_t expert : future_) {
      if (expert < -1 || expert >= experts_) {
        refuse("future names expert " + std::to_string(expert) + "; a layer has experts 0 to " +
               std::to_string(experts_ - 1) + ", and -1 stands for none");
      }
    }
    // Stores the uses of all experts, those of each expert contiguous and in order of time.
    first_.resize(keys_.size() + 1);
    each([this](std::size_t at, std::int64_t) { ++first_[at + 1]; });
    for (std::size_t i = 1; i < first_.size(); ++i) first_[i] += first_[i - 1];
    uses_.resize(size_of(first_.back()));
    next_.assign(first_.begin(), first_.end() - 1);
    each([this](std::size_t at, std::int64_t token) { uses_[size_of(next_[at]++)] = token; });
    reset();
  }
  void access(std::int32_t layer, const std::int32_t*, const std::int32_t*, std::int64_t,
              std::int64_t pass_tokens) override {
    const std::int64_t before = clock_[size_of(layer)];
    const std::int64_t now = advance(layer, pass_tokens);
    for (std::int64_t token = before; token < std::min(now, tokens_); ++token) {
      for (std::int32_t k = 0; k < top_k_; ++k) {
        const std::int32_t expert = chosen(token, layer, k);
        if (expert >= 0) look_ahead(place(layer, expert), now);
      }
    }
  }
  void expect(std::int32_t, const double*) override {}
  void reset() override {
    Clocked::reset();
    next_.assign(first_.begin(), first_.end() - 1);
    for (std::size_t at = 0; at < keys_.size(); ++at) look_ahead(at, 0);
  }
  std::unique_ptr<EvictionPolicy> copy() const override { return std::make_unique<Belady>(*this); }

 private:
  std::int32_t chosen(std::int64_t token, std::int32_t layer, std::int32_t k) const {
    return future_[size_of((token * layers_ + layer) * top_k_ + k)];
  }
  template <class Visit>
  void each(Visit visit) {
    for (std::int64_t token = 0; token < tokens_; ++token) {
      for (std::int32_t layer = 0; layer < layers_; ++layer) {
        for (std::int32_t k = 0; k < top_k_; ++k) {
          const std::int32_t expert = chosen(token, layer, k);
          if (expert >= 0) visit(place(layer, expert), token);
        }
      }
    }
  }
  void look_ahead(std::size_t at, std::int64_t now) {
    while (next_[at] < first_[at + 1] && uses_[size_of(next_[at])] < now) ++next_[at];
    keys_[at] = next_[at] < first_[at + 1] ? -static_cast<double>(uses_[size_of(next_[at])]) : kNever;
  }

  std::int64_t tokens_;
  std::int32_t top_k_;
  std::vector<std::int32_t> future_;
  std::vector<std::int64_t> first_;  // [layers * experts + 1] into uses_
  std::vector<std::int64_t> next_;   // [layers * experts] into uses_: the first use that is not in the past
  std::vector<std::int64_t> uses_;   // tokens
};

// Discounted counts over three spans of time at once (ours): experts that a phrase uses, that a topic uses,
// and that the model always uses. The key is the weighted sum of the rates at which an expert was chosen,
// each discounted with its own half-life. On recorded decoding of gpt-oss-20b and DeepSeek-V2-Lite no single
// half-life, nor LCP or LRU, had as few misses at all cache sizes. Rates decay at different speeds, so every
// access computes new keys for all experts of the layer, with three multiplications per expert.
class Blend final : public Clocked {
 public:
  explicit Blend(const PolicySpec& spec) : Clocked(spec) {
    for (int span = 0; span < kSpans; ++span) {
      gamma_[span] = std::exp2(-1.0 / kHalfLives[span]);
      rates_[span].resize(keys_.size());
    }
  }
  void access(std::int32_t layer, const std::int32_t* experts, const std::int32_t* tokens, std::int64_t count,
              std::int64_t pass_tokens) override {
    advance(layer, pass_tokens);
    const std::size_t begin = place(layer, 0);
    const std::size_t end = begin + size_of(experts_);
    const auto pass = static_cast<double>(pass_tokens);
    for (int span = 0; span < kSpans; ++span) {
      std::vector<double>& rates = rates_[span];
      const double left = pass_tokens == 1 ? gamma_[span] : std::pow(gamma_[span], pass);
      for (std::size_t at = begin; at < end; ++at) rates[at] *= left;
      // A pass's activations count as spread evenly over it: a share p of its tokens adds p * (1 - left).
      for (std::int64_t i = 0; i < count; ++i) {
        rates[place(layer, experts[i])] += static_cast<double>(tokens[i]) / pass * (1 - left);
      }
    }
    for (std::size_t at = begin; at < end; ++at) {
      keys_[at] = kWeights[0] * rates_[0][at] + kWeights[1] * rates_[1][at] + kWeights[2] * rates_[2][at];
    }
  }
  // As if the layer had always been used so.
  void expect(std::int32_t layer, const double* shares) override {
    if (clock_[size_of(layer)] > 0) return;
    for (std::int32_t expert = 0; expert < experts_; ++expert) {
      const std::size_t at = place(layer, expert);
      for (int span = 1; span < kSpans; ++span) rates_[span][at] = shares[expert];
      keys_[at] = kWeights[1] * rates_[1][at] + kWeights[2] * rates_[2][at];
    }
  }
  void reset() override {
    Clocked::reset();
    for (std::vector<double>& rates : rates_) std::fill(rates.begin(), rates.end(), 0.0);
  }
  std::unique_ptr<EvictionPolicy> copy() const override { return std::make_unique<Blend>(*this); }

 private:
  static constexpr int kSpans = 3;
  static constexpr double kHalfLives[kSpans] = {4, 64, 1000};  // tokens
  static constexpr double kWeights[kSpans] = {0.5, 1, 1};
  double gamma_[kSpans];
  std::vector<double> rates_[kSpans];
};

template <class Policy>
std::unique_ptr<EvictionPolicy> make(const PolicySpec& spec) {
  return std::make_unique<Policy>(spec);
}

struct Named {
  const char* name;
  std::unique_ptr<EvictionPolicy> (*make)(const PolicySpec&);
};
constexpr Named kPolicies[] = {
    {"forecast", make_forecast},
    {"blend", make<Blend>},
    {"lcp", make<Lcp>},
    {"lru", make<Lru>},
    {"lfu", make<Lfu>},
    {"discount", make<Discount>},
    {"two_level_lru", make<TwoLevelLru>},
    {"request", make_request},
    {"map", make_map},
    {"static", make<Static>},
    {"belady", make<Belady>},
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_policy(const PolicySpec& spec) {
  if (spec.layers < 1) refuse("layers is " + std::to_string(spec.layers) + "; it must be at least 1");
  if (spec.experts < 1) refuse("experts is " + std::to_string(spec.experts) + "; it must be at least 1");
  // Conditions are written so that NaN fails them too.
  if (!(spec.omega > 0 && std::isfinite(spec.omega))) {
    refuse("omega is " + std::to_string(spec.omega) + "; it must be above 0 and finite");
  }
  if (!(spec.rho > 0 && spec.rho <= 1)) {
    refuse("rho is " + std::to_string(spec.rho) + "; it must be above 0 and at most 1");
  }
  if (spec.high_span < 0) {
    refuse("high_span is " + std::to_string(spec.high_span) + "; it cannot be negative");
  }
  if (!(spec.gamma > 0 && spec.gamma <= 1)) {
    refuse("gamma is " + std::to_string(spec.gamma) + "; it must be above 0 and at most 1");
  }
  std::string names;
  for (const Named& policy : kPolicies) {
    if (spec.name == policy.name) return policy.make(spec);
    names += (names.empty() ? "" : ", ") + std::string(policy.name);
  }
  refuse("name is '" + spec.name + "'; it must be one of: " + names);
}

std::vector<std::string> policy_names() {
  std::vector<std::string> names;
  for (const Named& policy : kPolicies) names.emplace_back(policy.name);
  return names;
}

}  // namespace moechat
