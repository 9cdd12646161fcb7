// Eviction policies: pure bookkeeping over (layer, expert), independent of pages.
//
// A policy gives every expert of a layer a key; the cache keeps the experts with the highest keys. Invariant:
// keys change only in `access`, `predict` and `expect`, not with time. A priority that decays alike for all
// experts, such as mu * rho^(nu/omega), is kept as a logarithm without the common decay, log(mu) + last *
// log(1/rho)/omega. So comparing stored numbers ranks experts at any time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moechat {

struct PolicySpec {
  // "forecast", "blend", "lcp", "lru", "lfu", "discount", "two_level_lru", "static" or "belady"
  std::string name;
  std::int32_t layers = 0;
  std::int32_t experts = 0;
  double omega = 128;         // lcp: tokens in which an unused expert's priority falls by the factor rho
  double rho = 0.25;          // lcp
  double gamma = 0.9;         // discount: factor of the counts per token
  std::vector<double> ranks;  // static: [layers * experts], higher ranks are kept
  std::vector<std::int32_t> future;  // belady: [tokens, layers, top_k], -1 for none
  std::int64_t future_tokens = 0;
  std::int32_t future_top_k = 0;
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
  // Records which experts a layer is likely to choose, from earlier runs: shares [experts], of the tokens
  // that chose each. Ranks experts that the layer has not chosen yet, and only before its first access; it is
  // no access itself. Policies with a fixed or a known order ignore it.
  virtual void expect(std::int32_t layer, const double* shares) { (void)layer, (void)shares; }
  // Whether keys of different layers may be compared: of any two experts, the one with the higher key is
  // needed sooner. REQUIRES of such a policy: `predict` changes no keys.
  bool comparable() const { return comparable_; }
  // [experts] keys of a layer, valid until the next access or predict.
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
  std::vector<double> keys_;
  bool comparable_ = false;
};

// Throws std::invalid_argument naming the invalid field.
std::unique_ptr<EvictionPolicy> make_policy(const PolicySpec& spec);
std::vector<std::string> policy_names();

}  // namespace moechat
