// Decoding over a near tier on a clock of its own: the engine's schedule (layer_schedule.h) with a
// VirtualLink and an executor that only moves the clock. Every decision is the engine's; only time differs.
// So, where time cannot change a decision, blocks moved and hits are those of the engine, one by one; tests
// hold this.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cache/policy.h"
#include "cache/routing_counter.h"
#include "offload/layer_schedule.h"
#include "offload/speculation.h"
#include "simulate/clocks.h"
#include "simulate/virtual_link.h"

namespace moechat {

// How missing experts are fetched ahead, and what happens to those that are missing all the same.
struct Loading {
  Miss miss = Miss::kFetch;
  Speculation speculation;
  std::int32_t ahead_experts = 0;
  std::int64_t ahead_blocks = 0;  // most blocks to fetch ahead for a layer
};

// kGraphs: a card that runs ahead of the host; every block has to be there before the first pass.
enum class LaunchPattern : std::uint8_t { kHost, kCard, kGraphs };

// near_memory and stall_seconds are the timeline's own.
struct TimelineOptions : ScheduleOptions {
  Loading loading;
  LaunchPattern launch = LaunchPattern::kHost;  // of a card: link.card must be set too
  bool counts_hard = false;                     // hard activations are counted (routing_counter.h)
  std::int64_t group_items = 0;  // (token, expert) pairs whose sums fit in memory at a time; 0: all

  // Seconds.
  double attention = 0;  // a layer without its experts
  double head = 0;       // once a pass
  ComputeCosts costs;
  VirtualLinkOptions link;
};

// Passes over the model, in order: pass p is the tokens starts[p] to starts[p + 1] - 1.
struct Passes {
  const std::int32_t* experts = nullptr;  // [tokens, layers, k]
  std::int64_t tokens = 0;
  std::int32_t k = 0;
  const std::int64_t* starts = nullptr;  // [passes + 1]
  std::int64_t passes = 0;
  // [depths, tokens, layers, width]: experts that were predicted for this token and layer, best first, one,
  // two, ... layers before; -1 for none. Null: no predictions.
  const std::int32_t* rankings = nullptr;
  std::int32_t depths = 0;
  std::int32_t width = 0;
  // [tokens, 1 + layers, queued]: experts that a predictor queued before the first layer of this token, and
  // after the router of each layer, as layer * experts + expert, most urgent first; -1 for none. Their
  // scores, or null. Null: no queues.
  const std::int32_t* queues = nullptr;
  const float* queue_scores = nullptr;
  std::int32_t queued = 0;
  // First tokens of requests, ascending.
  const std::int64_t* requests = nullptr;
  std::int64_t request_count = 0;
};

struct PassFigures {
  double seconds;
  double stall;  // the near tier waited for link or far tier
  double demand_bytes;
  double prefetch_bytes;
  double hard;  // hard activations; 0 unless they are counted
};

class Timeline {
 public:
  using Interrupted = std::function<void()>;

  // Throws std::invalid_argument for sizes or times out of range.
  Timeline(TimelineOptions options, std::unique_ptr<EvictionPolicy> policy);
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Puts the first `blocks` blocks of these experts into the near tier, in this order and in no time, as far
  // as there are free pages; they are accessed once for it. Returns how many blocks.
  std::int64_t preload(std::int32_t layer, const std::int32_t* experts, std::int64_t count,
                       std::int32_t blocks);
  // As the engine after a start with statistics, or at any time between passes: as LayerSchedule::expect and
  // ::preload, in no time.
  void start_warm(const std::vector<double>& shares,
                  const std::vector<std::pair<std::int32_t, std::int32_t>>& experts,
                  const std::vector<std::pair<std::int32_t, std::int32_t>>& replaceable = {});
  // Takes over, in no time, which blocks lie in which pages of another timeline, where nothing may be on its
  // way. Protection is the other's in layers with the same C; else it follows this one's policy. REQUIRES:
  // nothing has been loaded here. Throws std::invalid_argument if their sizes differ.
  void start_like(const Timeline& other);
  // Passes [from, to) of `passes`; predictions may name tokens of later ones. out [to - from].
  // `hurried`: transfers take no time, nor do the layers' other parts. `interrupted` is called a few times a
  // second and may throw: the timeline can then only be destroyed.
  void run(const Passes& passes, std::int64_t from, std::int64_t to, bool hurried, PassFigures* out,
           const Interrupted& interrupted);
  // Goes on from the next pass with other targets and another way to load, as ExpertTier::switch does. Throws
  // std::invalid_argument, and nothing has changed.
  void switch_to(const Loading& loading, const std::vector<LayerTarget>& targets);
  // Lets everything that is on its way arrive.
  void drain() { schedule_.drain(clock_.get()); }

  double now() const { return now_; }
  const EvictionPolicy& policy() const { return schedule_.policy(); }
  // compute_seconds: of the near tier; stall_seconds: the rest of the layers' experts.
  ScheduleStats stats() const;
  void reset_stats();
  std::vector<std::int16_t> residency() const { return schedule_.residency(); }
  // As ExpertRunner.
  std::pair<std::int32_t, double> adaptive_step() const {
    const AdaptiveStep* const step = schedule_.step();
    return step == nullptr ? std::pair{0, 0.0} : std::pair{step->step(), step->estimate()};
  }
  std::string check() const { return schedule_.check(); }
  const TimelineOptions& options() const { return options_; }

 private:
  void run_layer(const Passes& passes, std::int32_t layer, std::int64_t first, std::int64_t tokens);
  void speculate(const Passes& passes, std::int64_t last_token, std::int64_t tokens);
  void prefetch_queued(const Passes& passes, std::int64_t token, std::int32_t slot);
  void prefetch_ranked(const Passes& passes, std::int64_t last_token, const Prediction& prediction);

  const TimelineOptions options_;
  Loading loading_;
  std::vector<LayerTarget> targets_;
  double now_ = 0;
  VirtualLink* link_;                        // the schedule's
  std::unique_ptr<RoutingCounter> routing_;  // null: nothing is counted
  LayerSchedule schedule_;
  std::unique_ptr<HostClock> clock_;
  bool hurried_ = false;
  double stall_seconds_ = 0;
  double compute_base_ = 0;  // the clock's at the last reset

  std::vector<std::int64_t> index_;  // scratch
  std::vector<float> weight_;
  std::vector<std::int32_t> ranked_;
  std::vector<AheadExpert> queue_;
};

}  // namespace moechat
