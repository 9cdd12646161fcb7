// Eviction policies: pure bookkeeping over (layer, expert), independent of pages.
//
// A policy gives every expert of a layer a key; the cache keeps the experts with the highest keys. Invariant:
// keys change only in `access`, `begin_request`, `expect` and predictions, not with time. A priority that
// decays alike for all experts, such as mu * rho^(nu/omega), is kept as a logarithm without the common decay,
// log(mu) + last * log(1/rho)/omega. So comparing stored numbers ranks experts at any time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moechat {

struct PolicySpec {
  // "forecast", "blend", "lcp", "lru", "lfu", "discount", "two_level_lru", "request", "map", "static" or
  // "belady"
  std::string name;
  std::int32_t layers = 0;
  std::int32_t experts = 0;
  double omega = 128;        // lcp: tokens in which an unused expert's priority falls by the factor rho
  double rho = 0.25;         // lcp
  double gamma = 0.9;        // discount: factor of the counts per token
  bool per_request = false;  // discount, lfu: counts begin anew with each request
  bool layer_factor = true;  // request: counts of layer l weigh 1 - l / layers
  // two_level_lru: layer steps for which an expert that was used stays in the high list; 0, or more than
  // there are: until the layer's next access.
  std::int32_t high_span = 0;
  std::vector<double> ranks;         // static: [layers * experts], higher ranks are kept
  std::vector<std::int32_t> future;  // belady: [tokens, layers, top_k], -1 for none
  std::int64_t future_tokens = 0;
  std::int32_t future_top_k = 0;
};

// An expert that a predictor expects in a layer whose turn comes.
struct AheadExpert {
  std::int32_t layer;
  std::int32_t expert;
  float score;  // its expected share of the router's distribution; 0 where it is not known
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  const std::string& name() const { return name_; }
  std::int32_t layers() const { return layers_; }
  std::int32_t experts() const { return experts_; }

  // Records that the router of `layer` chose experts[i] for tokens[i] of the pass_tokens tokens of a pass,
  // and advances the layer's clock by pass_tokens. REQUIRES: experts are distinct.
  virtual void access(std::int32_t layer, const std::int32_t* experts, const std::int32_t* tokens,
                      std::int64_t count, std::int64_t pass_tokens) = 0;
  // Records that a predictor expects these experts (best first) at the next access of `layer`. Most policies
  // ignore it.
  virtual void predict(std::int32_t layer, const std::int32_t* experts, std::int64_t count) {
    (void)layer, (void)experts, (void)count;
  }
  // Records what a predictor expects of all later layers, most urgent first; it replaces what was recorded of
  // the layers that are named, and of all layers where only the order counts. Most policies ignore it.
  // REQUIRES: numbers in range.
  virtual void predict_ahead(const AheadExpert* experts, std::int64_t count) { (void)experts, (void)count; }
  // Predictions now reach `steps` layers ahead of `layer`, the one that was accessed last. Most policies
  // ignore it.
  virtual void reach(std::int32_t layer, std::int32_t steps) { (void)layer, (void)steps; }
  // The accesses that follow belong to another request. Most policies do not tell requests apart.
  virtual void begin_request() {}
  // Records which experts a layer is likely to choose, from earlier runs: shares [experts], of the tokens
  // that chose each. Ranks experts that the layer has not chosen yet, and only before its first access; it is
  // no access itself. Policies with a fixed or a known order ignore it.
  virtual void expect(std::int32_t layer, const double* shares) { (void)layer, (void)shares; }
  // Whether keys of different layers may be compared: of any two experts, the one with the higher key is
  // needed sooner. REQUIRES of such a policy: `predict` changes no keys.
  bool comparable() const { return comparable_; }
  // Rises when keys of the layer change by anything but its own access or `expect`.
  std::uint64_t stamp(std::int32_t layer) const {
    return stamps_.empty() ? 0 : stamps_[static_cast<std::size_t>(layer)];
  }
  // [experts] keys of a layer, valid until the next access or prediction.
  const double* keys(std::int32_t layer) const { return keys_.data() + std::int64_t{layer} * experts_; }
  // Restores the state after construction.
  virtual void reset() = 0;
  // A policy in the same state, which from now on changes by itself.
  virtual std::unique_ptr<EvictionPolicy> copy() const = 0;

 protected:
  EvictionPolicy(const EvictionPolicy&) = default;  // only for copy()
  EvictionPolicy& operator=(const EvictionPolicy&) = delete;
  EvictionPolicy(std::string name, std::int32_t layers, std::int32_t experts)
      : name_(std::move(name)), layers_(layers), experts_(experts) {}
  std::string name_;
  std::int32_t layers_;
  std::int32_t experts_;
  void touch(std::int32_t layer) {
    if (stamps_.empty()) stamps_.resize(static_cast<std::size_t>(layers_));
    ++stamps_[static_cast<std::size_t>(layer)];
  }
  std::vector<double> keys_;
  bool comparable_ = false;

 private:
  std::vector<std::uint64_t> stamps_;  // [layers]; empty: all are 0
};

// Throws std::invalid_argument naming the invalid field.
std::unique_ptr<EvictionPolicy> make_policy(const PolicySpec& spec);
std::vector<std::string> policy_names();

}  // namespace moechat
