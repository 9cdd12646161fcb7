// ExpertFlow's adaptive step (section 3.2): how many layers ahead experts are predicted and fetched.
//
// The estimate (section 3.2.1) is S = N * E / (C * T): the time to move the N experts of a prediction, of E
// bytes each, over a link of C bytes a second, in layers of T seconds. Then a loop corrects it (section
// 3.2.2): where experts that were predicted are too often not there when their layer begins, S grows by 1;
// where they have long been there, it falls by 1. The prose of section 3.2.1 also raises S where predictions
// are wrong; an earlier prediction is not a better one, so the loop alone decides here. The paper gives no
// thresholds and no bounds.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

namespace moechat {

class AdaptiveStep {
 public:
  static constexpr std::int32_t kMost = 8;
  static constexpr std::int32_t kStalls = 4;  // layers that waited, until S grows
  static constexpr std::int32_t kReady = 16;  // layers that did not, until S falls
  static constexpr double kShare = 0.85;      // of the distribution that a prediction covers

  // expert_bytes: of a whole expert. wanted: N.
  AdaptiveStep(std::int32_t layers, std::int32_t experts, double expert_bytes, double wanted,
               std::int32_t stalls = kStalls, std::int32_t ready = kReady, std::int32_t most = kMost);

  // A prediction whose experts make up kShare of the router's distribution has so many (N, section 3.2.1).
  void want(double experts);
  // What a layer of a decoded token took, and what the link moves in a second; not positive: not known.
  void measure(double layer_seconds, double link_rate);
  // These experts will be fetched for the next turn of the layer.
  void predicted(std::int32_t layer, const std::int32_t* experts, std::int64_t count);
  // The turn has come: `there` says of each chosen expert whether all its blocks are there.
  template <class There>
  void needed(std::int32_t layer, const std::int32_t* experts, std::int64_t count, const There& there) {
    bool named = false;
    bool late = false;
    for (std::int64_t i = 0; i < count; ++i) {
      if (!was_predicted(layer, experts[i])) continue;
      named = true;
      late = late || !there(experts[i]);
    }
    forget(layer);
    if (named) count_turn(late);
  }

  std::int32_t step() const { return step_; }    // S, 1 to min(most, layers - 1)
  double estimate() const { return estimate_; }  // S of the formula, not rounded; 0 before it is known

 private:
  bool was_predicted(std::int32_t layer, std::int32_t expert) const;
  void forget(std::int32_t layer);
  void count_turn(bool late);
  void choose();

  std::int32_t experts_;
  std::int32_t most_;
  double wanted_;  // N, a moving mean
  double bytes_;   // E
  std::int32_t stall_limit_;
  std::int32_t ready_limit_;
  double seconds_ = 0;  // T, a moving mean
  double estimate_ = 0;
  std::int32_t rounded_ = 1;  // of the estimate
  std::int32_t offset_ = 0;   // of the loop
  std::int32_t stalled_ = 0;
  std::int32_t ready_ = 0;
  std::int32_t step_ = 1;
  std::vector<std::uint8_t> predicted_;  // [layers * experts]
};

}  // namespace moechat
