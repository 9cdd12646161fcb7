#include "plan/layer_plan.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace moechat {
namespace {

// Replacements for 0 and infinity, with which the formulas would give NaN.
constexpr double kInstant = 1e-15;
constexpr double kNever = 1e15;

std::size_t size_of(std::int64_t value) { return static_cast<std::size_t>(value); }

}  // namespace

LayerPlan::LayerPlan(const LayerCosts& costs, LayerTables tables)
    : costs_(costs), tables_(std::move(tables)) {
  const LayerTables& t = tables_;
  if (t.outcomes < 1 || t.layers < 1 || t.experts < 1 || t.depth < 0 || costs.top_k < 1) {
    throw std::invalid_argument("outcomes, layers, experts and top_k must be at least 1");
  }
  const std::size_t places = size_of(t.outcomes * t.layers * (t.experts + 1));
  if (t.shares.size() != places || t.chances.size() != places ||
      t.accuracy.size() != size_of(t.layers * t.depth) || t.cached.size() != places * size_of(t.depth)) {
    throw std::invalid_argument("the sizes of the tables do not match");
  }
}

double LayerPlan::amount(std::int64_t outcome, std::int64_t layer, std::int64_t experts, double theta,
                         double reach) const {
  const std::int64_t row = (outcome * tables_.layers + layer) * (tables_.experts + 1) + experts;
  double total = costs_.top_k * tables_.shares[size_of(row)] * theta;
  const double* cached = tables_.cached.data() + row * tables_.depth;
  const double* accuracy = tables_.accuracy.data() + layer * tables_.depth;
  double left = reach;
  for (std::int64_t y = 0; y < tables_.depth && left > 0; ++y) {
    const double part = std::min(1 - cached[y] * theta, left);
    total += part * accuracy[y];
    left -= part;
  }
  return std::min<double>(total, costs_.top_k);
}

LayerPlan::Outcome LayerPlan::times(double loaded) const {
  const LayerCosts& c = costs_;
  const double compute = c.moe / c.top_k;
  if (c.miss == MissModel::kPaper) {
    const double hide = loaded * compute;
    const double miss = (c.top_k - loaded) * c.load;
    return {loaded, std::max(miss - hide, 0.0), c.moe - std::min(hide, miss) + c.attention};
  }
  const double missing = std::max(c.top_k - loaded, 0.0);
  double done = missing * c.far;
  double busy = 0;
  if (c.miss != MissModel::kCompute) {
    const double latency = std::min(c.latency, kNever) * std::min(missing, 1.0);
    done = latency + missing * std::max(c.load, compute) +
           std::min(missing, c.grain) * std::min(c.load, compute);
    busy = latency + missing * c.load;
    if (c.miss == MissModel::kBoth) {
      const double link = std::min(std::max(c.link_together, kInstant), kNever);
      const double far = std::min(std::max(c.far_together, kInstant), kNever);
      const double drained = (missing + latency / link) / (1 / link + 1 / far);
      const bool shares = drained > latency;
      const double fetched = std::max(drained - latency, 0.0) / link;
      const double together = shares ? drained + std::min(fetched, c.grain) * compute : missing * far;
      if (together < done) {
        done = together;
        busy = shares ? drained : 0;
      }
      const double alone = missing * c.far;
      if (alone < done) {
        done = alone;
        busy = 0;
      }
    }
  }
  const double exposed = std::max(done - c.moe, 0.0);
  return {loaded, exposed, std::max(c.moe + exposed - busy, 0.0) + c.attention};
}

LayerPlan::Outcome LayerPlan::mean(std::int64_t layer, std::int64_t experts, double theta,
                                   double reach) const {
  Outcome sum{0, 0, 0};
  for (std::int64_t outcome = 0; outcome < tables_.outcomes; ++outcome) {
    const double chance =
        tables_.chances[size_of((outcome * tables_.layers + layer) * (tables_.experts + 1) + experts)];
    const Outcome one = times(amount(outcome, layer, experts, theta, reach));
    sum.loaded += chance * one.loaded;
    sum.exposed += chance * one.exposed;
    sum.window += chance * one.window;
  }
  return sum;
}

void LayerPlan::evaluate(const std::int64_t* experts, const double* theta, double more,
                         const Evaluation& out) const {
  std::vector<double> handed(size_of(tables_.layers));
  double window = costs_.head + costs_.attention;
  for (std::int64_t layer = 0; layer < tables_.layers; ++layer) {
    const double reach = window / costs_.load;
    const Outcome here = mean(layer, experts[layer], theta[layer], reach);
    const Outcome longer = mean(layer, experts[layer], theta[layer], reach + more);
    out.loaded[layer] = here.loaded;
    out.exposed[layer] = here.exposed;
    out.windows[layer] = window;
    out.prices[layer] = (here.exposed - longer.exposed) / (more * costs_.load);
    handed[size_of(layer)] = (longer.window - here.window) / (more * costs_.load);
    window = here.window;
  }
  double price = 0;
  for (std::int64_t layer = tables_.layers - 1; layer >= 0; --layer) {
    price = out.prices[layer] + handed[size_of(layer)] * price;
    out.prices[layer] = price;
  }
}

void LayerPlan::split(const double* volumes, double split, std::int64_t* experts, double* loaded,
                      double* exposed, double* windows) const {
  double window = costs_.head + costs_.attention;
  for (std::int64_t layer = 0; layer < tables_.layers; ++layer) {
    const double volume = volumes[layer];
    double most = -1;
    for (std::int64_t count = 1; count <= tables_.experts; ++count) {
      const double number = static_cast<double>(count);
      const double theta = split < 0                          ? std::min(volume / number, 1.0)
                           : number * split <= volume + 1e-12 ? split
                                                              : 0.0;
      const double m = amount(0, layer, count, theta, window / costs_.load);
      if (m > most) {
        most = m;
        experts[layer] = theta > 0 ? count : 0;
      }
    }
    windows[layer] = window;
    loaded[layer] = most;
    const Outcome here = times(most);
    exposed[layer] = here.exposed;
    window = here.window;
  }
}

void LayerPlan::option_costs(const std::int64_t* experts, const double* theta, std::int64_t pairs,
                             const double* windows, const double* prices, double tie, double* out) const {
  for (std::int64_t layer = 0; layer < tables_.layers; ++layer) {
    const double reach = windows[layer] / costs_.load;
    const double price = layer + 1 < tables_.layers ? prices[layer + 1] : 0;
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      const Outcome here = mean(layer, experts[pair], theta[pair], reach);
      out[layer * pairs + pair] = here.exposed - price * here.window + tie * (costs_.top_k - here.loaded);
    }
  }
}

}  // namespace moechat
