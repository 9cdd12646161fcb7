// Routing and predictions that are drawn from statistics, for simulations of what was counted but not
// recorded. The distributions: moechat/simulate/drawn_routing.py and moechat/routing/drawn_predictions.py.
#pragma once

#include <cstdint>
#include <functional>

namespace moechat {

// Called now and then; may throw, which ends the drawing.
using Check = std::function<void()>;

// Draws the experts of tokens, layer by layer. A token takes k places of its layer's order of last use,
// without replacement and with probabilities in proportion to the weights of the places; its experts move to
// the front. A longer drawing with the same seed begins with a shorter one.
//
// weights: [layers, experts], all positive. out: [tokens, layers, k].
void draw_routing(const double* weights, std::int32_t layers, std::int32_t experts, std::int32_t k,
                  std::int64_t tokens, std::uint64_t seed, const Check& check, std::int32_t* out);

// What rankings of predicted experts are drawn by.
//
// Invariants:
// - every chosen row has k different experts of [0, experts), 1 <= k <= experts, 1 <= width <= experts;
// - all of popularity is positive.
struct RankingInputs {
  const std::int32_t* chosen = nullptr;  // [tokens, layers, k]
  const float* weights = nullptr;  // [tokens, layers, k], positive: order of the chosen; null: random order
  // [layers, experts]. The first k ranks: probability that the expert there is a chosen one. Ranks after
  // them: probability of each chosen expert that is not ranked yet to be ranked there.
  const double* right = nullptr;
  const double* popularity = nullptr;  // [layers, experts]: of experts that are ranked wrongly
  std::int64_t tokens = 0;
  std::int64_t first_token = 0;  // number of the first one in the whole trace
  std::int32_t layers = 0;
  std::int32_t experts = 0;
  std::int32_t k = 0;
  std::int32_t width = 0;
};

// Draws the `width` best experts of every token and layer, best first. A row depends on the seed, the stream,
// and the numbers of its token and layer; its first experts do not depend on the width.
//
// out: [tokens, layers, width].
void draw_rankings(const RankingInputs& inputs, std::uint64_t seed, std::uint64_t stream, const Check& check,
                   std::int32_t* out);

}  // namespace moechat
