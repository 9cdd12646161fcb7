// Runs expert layers for an engine: the layer schedule (layer_schedule.h) over a real link, with the kernels
// of the host or of a device, safe for several threads. One native object an engine; every call of a pass
// takes microseconds, except `finish`, which computes.
//
// For each layer of a pass: begin, any number of prefetches, then finish or, where the pages lie in a GPU's
// memory, finish_on_device; see layer_schedule.h. The sum that finish computes is that of expert_sum.h, bit
// by bit.
//
// Threads. Every call holds the runner's lock, a `finish` throughout. A call from within the `interrupted` of
// another (a signal handler) throws std::logic_error, any call in a forked child std::runtime_error; only the
// destructor is allowed there.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cache/policy.h"
#include "cache/routing_counter.h"
#include "kernels/experts/forward.h"
#include "link/link.h"
#include "memory/read_ahead.h"
#include "offload/computed_executor.h"
#include "offload/executors.h"
#include "offload/layer_forms.h"
#include "offload/layer_schedule.h"
#include "offload/speculation.h"

namespace moechat {

// `blocks` and `record_bytes` are those of `layout`.
struct RunnerOptions : ScheduleOptions, LayerForms {
  int activation_bits = kDefaultActivationBits;  // as ForwardCall::activation_bits
  std::int32_t top_k = 1;  // experts that a token uses; decides how much of a prediction is counted
  std::int64_t accumulator_bytes = ExpertSum::kBytes;
  bool populate = false;  // commit all pages at once, not one by one as they are first filled
  // [layers, experts] records [blocks] of each expert in memory of the host, which outlive the runner; null:
  // the CPU does not have that expert. None: the CPU does not compute what is missing on a device. Sets
  // far_experts.
  std::vector<const unsigned char*> far_records;
};

// How experts of later layers are fetched ahead of a decoded token.
struct Prefetching {
  std::int32_t predicted;  // layers ahead whose scores are used
  std::int32_t experts;    // of a layer, at most
  std::int64_t max_blocks;
  Speculation speculation;  // for whole layers
};

// Layers of a pass of one token that a device computed from the page table.
struct ComputedPass {
  std::int64_t first;
  std::int64_t count;
  // Of every layer: experts [picks], then as many words, then the bits of the scores float32 [experts] for
  // each of its places. A layer's report begins `stride` after that of the layer before it.
  const std::int32_t* reports;
  std::int64_t stride;
  std::int64_t picks;
  // [layers, places]: what the scores are for; distance 0: nothing.
  const Prediction* place;
  std::int64_t places;
  Prefetching prefetching;
  Miss miss;
};

class ExpertRunner {
 public:
  using Interrupted = RealTimeExecutor::Interrupted;

  // Throws std::invalid_argument for sizes that do not fit together (link regions included),
  // std::runtime_error when memory is refused.
  ExpertRunner(RunnerOptions options, std::unique_ptr<EvictionPolicy> policy, std::unique_ptr<Link> link);
  // Stops the link; leaks the slab if something in flight cannot be waited for (2 s).
  ~ExpertRunner();
  ExpertRunner(const ExpertRunner&) = delete;
  ExpertRunner& operator=(const ExpertRunner&) = delete;

  // index, weight [tokens, k]; copied. miss: of a layer that finish_on_device finishes; kFetch without
  // far_records. Throws std::invalid_argument, and nothing has changed.
  void begin(std::int32_t layer, const std::int64_t* index, const float* weight, std::int64_t tokens,
             std::int64_t k, Miss miss = Miss::kFetch);
  // As LayerSchedule::prefetch, for the `experts` with the highest scores (of equal ones, and those that are
  // not a number last, the lower index first). scores null: ascending order, the whole layer.
  std::int64_t prefetch(std::int32_t layer, const float* scores, std::int32_t experts,
                        std::int64_t max_blocks, Priority priority);
  // Of the begun layer of a decoded token. place, scores [places] and [places, experts]: those that are
  // predicted are fetched; distance 0: none.
  void prefetch_places(std::int32_t layer, const Prefetching& rules, const Prediction* place,
                       std::int64_t places, const float* scores);
  // As LayerSchedule.
  std::int64_t prefetch_ahead(const std::vector<AheadExpert>& experts, std::int64_t max_blocks, bool stays);
  std::vector<Prediction> adaptive_layers();
  void begin_request();
  // The step, and its estimate before rounding; 0 and 0 where it is not adaptive.
  std::pair<std::int32_t, double> adaptive_step() const;
  // x, out [tokens, hidden], not overlapping; out is overwritten. `interrupted` is called a few times a
  // second; it may throw, and the layer is aborted. Throws LinkError, std::logic_error when no layer has
  // begun, std::invalid_argument when `tokens` is not that of begin (the layer stays begun).
  // Returns the bytes of block records that were computed.
  std::int64_t finish(const float* x, std::int64_t tokens, float* out, const Interrupted& interrupted);
  // The same on a device. `launch` is called with blocks of the begun layer, each once, those of an expert in
  // ascending order; `work` is the most (token, block) pairs of a call. stream: CUstream, for links that
  // order. Blocks that the CPU computes are not launched: far_blocks() returns afterwards how many.
  std::int64_t finish_on_device(void* stream, std::int64_t tokens, std::int64_t work,
                                const DeviceExecutor::Launch& launch, const Interrupted& interrupted,
                                const FarPart& far = {});
  // Of the last layer: blocks that the CPU computed where they lie. 0: FarPart::out was not touched.
  std::int64_t far_blocks() const;
  // The rows of the begun layer, a copy. Throws std::logic_error when no layer has begun.
  Grouped rows() const;
  // Calls body(rows, tokens) with the rows of the begun layer; throws as above.
  void with_rows(const std::function<void(const Grouped&, std::int64_t)>& body) const;
  void abort();
  // Returns when no call is under way in another thread.
  void rest() const;
  std::int64_t begun_tokens() const;  // -1: no layer has begun

  // ---- a device that runs ahead of the host (page_table.h); all but the first call require a table
  // False, and there is none: the link does not order copies and kernels. least_share: look_ahead pays where
  // a layer has lately lacked nothing in that share of the decoded tokens. Harmless when repeated.
  bool keep_page_table(double least_share);
  // As PageTable::changes. To be given to the device before any kernel that looks pages up.
  std::int64_t page_changes(std::int32_t* index, std::int32_t* page, std::int64_t capacity);
  // Every block is ready, and in the table.
  bool complete() const;
  // Whether the device may compute `layer` of a token before the host knows what is missing: -1, it does not
  // pay. Else kernels of `stream` may look pages up until end_ahead, and the changes are those of
  // page_changes.
  std::int64_t look_ahead(std::int32_t layer, void* stream, std::int32_t* index, std::int32_t* page,
                          std::int64_t capacity);
  // Kernels that look pages up have ended, or will find that they must not.
  void end_ahead();
  // Makes the decisions of begin, prefetch and finish for layers that the device has computed. Returns bytes
  // as finish. Throws std::invalid_argument for an expert or layer that there is not; the layers before it
  // are accounted for.
  std::int64_t account(const ComputedPass& pass);

  void set_targets(const std::vector<LayerTarget>& targets);
  // As LayerSchedule.
  std::int64_t withhold(std::int64_t pages);
  // As EvictionPolicy::expect, for all layers: shares [layers * experts].
  void expect(const std::vector<double>& shares);
  // As LayerSchedule.
  std::int64_t preload(const std::vector<std::pair<std::int32_t, std::int32_t>>& experts, std::int64_t most,
                       const std::vector<std::pair<std::int32_t, std::int32_t>>& replaceable = {},
                       bool to_targets = false);
  // [layers * experts]: keys of the policy.
  std::vector<double> keys() const;
  void stop_preload();
  ScheduleStats stats() const;
  void reset_stats();
  // How routing has been since the last reset; see routing_counter.h.
  RoutingCounts routing_counts() const;
  void reset_routing_counts();
  // Hard activations so far, never reset.
  std::int64_t hard_activations() const;
  // Waits until nothing is queued or in flight (tests, end of a measurement). Throws LinkError at a stall.
  void drain(const Interrupted& interrupted);
  void hurry_link(bool on);                     // as Link::hurry
  std::vector<std::int16_t> residency() const;  // [layers * experts] resident blocks
  ExpertPlaces places() const;
  // [layers * experts] activations of routing_counts(), and its tokens.
  std::pair<std::int64_t, std::vector<std::int64_t>> activations() const;
  // Empty, or the inconsistency found. For tests; slow.
  std::string check() const;
  const RunnerOptions& options() const { return options_; }
  std::int64_t huge_bytes() const;
  std::int64_t resident_bytes() const;

 private:
  // Holds the lock during one call. Refuses children of the process and calls from within a call.
  class ApiLock {
   public:
    explicit ApiLock(const ExpertRunner* runner);
    ~ApiLock();
    ApiLock(const ApiLock&) = delete;
    ApiLock& operator=(const ApiLock&) = delete;

   private:
    const ExpertRunner* runner_;
    std::unique_lock<std::mutex> lock_;
  };

  // Adds the time of its life to a sum of seconds.
  class Stopwatch {
   public:
    explicit Stopwatch(double* sum) : sum_(sum), begun_(Clock::now()) {}
    ~Stopwatch() { *sum_ += std::chrono::duration<double>(Clock::now() - begun_).count(); }
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;

   private:
    using Clock = std::chrono::steady_clock;
    double* sum_;
    Clock::time_point begun_;
  };

  struct Estimate {
    double share;
    double tokens;  // that it stands for
  };
  // Those of begin, prefetch and prefetch_places, with the lock held.
  void begin_layer(std::int32_t layer, const std::int64_t* index, const float* weight, std::int64_t tokens,
                   std::int64_t k, Miss miss);
  std::int64_t prefetch_layer(std::int32_t layer, const float* scores, std::int32_t experts,
                              std::int64_t max_blocks, Priority priority);
  void fetch_places(std::int32_t layer, const Prefetching& rules, const Prediction* place,
                    std::int64_t places, const float* scores);
  void account_layer(const ComputedPass& pass, std::int32_t layer);
  PageTable& table() const;
  void check_begun() const;
  void check_finish(std::int64_t tokens) const;
  std::int64_t finish_with(LayerExecutor* executor);
  void read_mapped();

  const RunnerOptions options_;
  const int process_;
  mutable std::mutex mutex_;
  mutable std::atomic<std::thread::id> holder_{};

  RoutingCounter routing_;
  LayerSchedule schedule_;
  HostExecutor host_;
  DeviceExecutor device_;
  ComputedExecutor computed_;
  // [layers]: share of the decoded tokens that lacked nothing when a device would have looked; a moving
  // estimate. Empty
  // without a page table.
  std::vector<Estimate> undisturbed_;
  PartsInUse mapped_;  // [layers, experts] of mapped_records
  double least_share_ = 1;
  std::thread::id begun_by_{};
  double begin_seconds_ = 0;             // bookkeeping: begin and prefetch
  std::vector<std::uint64_t> sortable_;  // scratch
  std::vector<std::int32_t> ranked_;
  std::vector<double> distribution_;
  std::vector<std::int64_t> picks_;
  std::vector<float> weights_;
};

}  // namespace moechat
