// The inner loops of the configurator: the cost of an allocation of the near tier, layer by layer.
//
// moechat/configurator/curves.py, exposure.py and expert_split.py define and explain the computation; a test
// verifies that both implementations agree. Times are seconds; windows are loads inside (multiples of
// T_load).
#pragma once

#include <cstdint>
#include <vector>

namespace moechat {

enum class MissModel : std::int32_t {
  kPaper = 0,  // MoEpic, equations 5 to 7
  kFetch = 1,  // this and the following: EngineModel
  kCompute = 2,
  kBoth = 3
};

struct LayerCosts {
  MissModel miss;
  std::int32_t top_k;
  double attention, moe, head, load, latency, far, link_together, far_together;
  double grain;
};

// Tables of H, P and PH. `outcomes` is 1, or 2 for tokens with few hits and tokens with many.
struct LayerTables {
  std::int64_t outcomes, layers, experts, depth;
  std::vector<double> shares;    // [outcomes, layers, experts + 1]
  std::vector<double> chances;   // [outcomes, layers, experts + 1]
  std::vector<double> accuracy;  // [layers, depth]
  std::vector<double> cached;    // [outcomes, layers, experts + 1, depth]
};

class LayerPlan {
 public:
  struct Outcome {
    double loaded, exposed, window;
  };
  // Results for one allocation, [layers] each.
  struct Evaluation {
    double *loaded, *exposed, *windows, *prices;
  };

  LayerPlan(const LayerCosts& costs, LayerTables tables);

  std::int64_t layers() const { return tables_.layers; }
  std::int64_t experts() const { return tables_.experts; }

  // Evaluates the layers in order; each passes its window to the next. `theta` is 0 where `experts` is.
  // Prices: exposed seconds, in this and later layers, that one more second of a layer's window would save,
  // if it is used by `more` more loads.
  void evaluate(const std::int64_t* experts, const double* theta, double more, const Evaluation& out) const;

  // Runs MoEpic's ExpertSplit for one set of volumes (in experts); `split` below 0: theta is free.
  void split(const double* volumes, double split, std::int64_t* experts, double* loaded, double* exposed,
             double* windows) const;

  // Computes the cost of every option of every layer for given windows (seconds): exposed time, less the
  // value of the remaining window, plus `tie` seconds for each missing expert. out [layers, pairs].
  void option_costs(const std::int64_t* experts, const double* theta, std::int64_t pairs,
                    const double* windows, const double* prices, double tie, double* out) const;

 private:
  double amount(std::int64_t outcome, std::int64_t layer, std::int64_t experts, double theta,
                double reach) const;
  Outcome times(double loaded) const;
  Outcome mean(std::int64_t layer, std::int64_t experts, double theta, double reach) const;

  LayerCosts costs_;
  LayerTables tables_;
};

}  // namespace moechat
