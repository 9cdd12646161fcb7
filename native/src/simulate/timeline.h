// Decoding over a near tier on a clock of its own: what ExpertRunner would do with a trace, and when.
//
// Cache, policy, transfers and their order are the engine's own code (SplitExpertCache, Transfers); what a
// layer does with them repeats ExpertRunner step by step (begin, prefetch, finish: see offload/runner.h,
// which says why each step is there). Only time is different: computing moves the clock by what it costs,
// waiting moves it to the next arrival. So, where time cannot change a decision, blocks moved and hits are
// those of the engine, one by one; a test holds this.
//
// Beyond the engine of today the far tier may compute (`miss`): the blocks of an expert that are neither
// resident nor on their way are computed where they lie, all of them or a share, while the link brings the
// others and the near tier computes what is there.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cache/policy.h"
#include "cache/split_cache.h"
#include "memory/slab.h"
#include "offload/expert_sum.h"
#include "offload/transfers.h"
#include "simulate/virtual_link.h"

namespace moechat {

enum class Miss : std::uint8_t { kFetch, kCompute, kBoth };
enum class Ahead : std::uint8_t { kNone, kRanked, kWholeLayer };

struct TimelineOptions {
  std::int32_t layers = 0;
  std::int32_t experts = 0;
  std::int32_t blocks = 0;  // of an expert
  std::int64_t pages = 0;
  std::vector<LayerTarget> targets;
  std::int64_t reserve = 1;
  bool whole_experts = false;
  Miss miss = Miss::kFetch;
  Ahead ahead = Ahead::kNone;
  std::int32_t lookahead = 1;
  std::int32_t ahead_experts = 0;
  std::int64_t ahead_blocks = 0;   // most blocks to fetch ahead for a layer
  std::int64_t stream_tokens = 0;  // passes of so many tokens fetch the whole next layer ahead; 0: none do
  std::int64_t group_items = 0;    // (token, expert) pairs whose sums fit in memory at a time; 0: all

  // Seconds.
  double attention = 0;         // a layer without its experts
  double head = 0;              // once a pass
  double call = 0;              // near tier: for computing anything at all
  std::vector<double> compute;  // [n - 1]: near tier: n (token, block) pairs; beyond, the last step repeats
  double far_block = 0;         // far tier: one block
  double far_block_shared = 0;  // the same while the link is busy
  VirtualLinkOptions link;
};

// Passes over the model, in order: pass p is the tokens starts[p] to starts[p + 1] - 1.
struct Passes {
  const std::int32_t* experts = nullptr;  // [tokens, layers, k]
  std::int64_t tokens = 0;
  std::int32_t k = 0;
  const std::int64_t* starts = nullptr;  // [passes + 1]
  std::int64_t passes = 0;
  // [depths, tokens, layers, width]: experts that were expected of this token and layer, best first, one,
  // two,
  // ... layers before; -1 for none. Null: no predictions.
  const std::int32_t* rankings = nullptr;
  std::int32_t depths = 0;
  std::int32_t width = 0;
};

struct PassFigures {
  double seconds;
  double stall;  // nothing to compute in the near tier: link or far tier was waited for
  double demand_bytes;
  double prefetch_bytes;
};

struct TimelineStats {
  CacheCounters cache;
  LinkStats link;
  double now = 0;
  double compute_seconds = 0;  // near tier, experts
  double stall_seconds = 0;
  double far_seconds = 0;            // the far tier computed
  std::int64_t far_blocks = 0;       // so many blocks
  std::int64_t blocks_computed = 0;  // in the near tier
  std::int64_t blocks_staged = 0;
  std::int64_t kernel_calls = 0;
  std::int64_t pages_peak = 0;
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
  // Passes [from, to) of `passes`; those after `to` are only looked at by predictions. out [to - from].
  // `hurried`: transfers take no time, nor do the layers' other parts. `interrupted` is called a few times a
  // second and may throw: the timeline can then only be destroyed.
  void run(const Passes& passes, std::int64_t from, std::int64_t to, bool hurried, PassFigures* out,
           const Interrupted& interrupted);
  // Lets everything that is on its way arrive.
  void drain();

  TimelineStats stats() const;
  void reset_stats();
  std::vector<std::int16_t> residency() const;  // [layers * experts] resident blocks
  // Empty, or what is inconsistent. For tests; slow.
  std::string check() const { return cache_.check(); }
  const TimelineOptions& options() const { return options_; }

 private:
  struct Staged {
    PageId page;
    bool landed;
  };
  struct Step {
    std::int32_t row;
    std::int32_t blocks;
  };
  // As ExpertRunner::Row.
  struct Row {
    std::int32_t next = 0;  // blocks [0, next) have been computed
    std::int32_t near = 0;  // blocks [0, near) are the near tier's to compute
    bool pinned = false;
    std::vector<Staged> staged;
  };
  struct Prefetch {
    std::int32_t layer = 0;
    std::int64_t blocks = 0;
    std::vector<std::int32_t> ranked;
  };

  bool done(const Row& row) const { return row.next == row.near; }
  void begin(std::int32_t layer, std::int64_t tokens);
  void share_out(std::int64_t tokens);
  void speculate(const Passes& passes, std::int64_t last_token, std::int64_t tokens);
  void prefetch(Priority priority);
  void finish();

  void settle();
  std::int64_t acquire();
  std::int64_t stage(std::int32_t index);
  std::int64_t fetch_ahead(Prefetch* ahead);
  void run_group();
  void collect();
  std::int32_t ready(std::int32_t index) const;
  void compute();
  bool group_done() const;
  bool group_pending() const;
  bool make_room();
  bool others_in_flight() const;
  bool let_one_go();
  void wait_until(double moment);

  const TimelineOptions options_;
  double now_ = 0;
  std::unique_ptr<EvictionPolicy> policy_;
  Slab slab_;
  SplitExpertCache cache_;
  VirtualLink link_;
  Transfers transfers_;

  // The begun layer.
  bool hurried_ = false;
  std::int32_t layer_;
  std::int64_t tokens_ = 0;
  std::uint64_t pass_ = 0;
  bool active_ = false;
  Grouped grouped_;
  std::vector<Row> rows_;
  std::int32_t first_ = 0;
  std::int32_t end_ = 0;
  std::int32_t let_go_ = 0;
  bool starved_ = false;
  bool freed_ = false;
  std::int64_t pending_ = 0;  // (token, block) pairs of steps_
  std::vector<Step> steps_;
  double far_until_ = 0;  // the far tier computes until then

  Plan plan_;  // scratch
  std::vector<std::int32_t> wanted_;
  std::vector<std::int32_t> order_;  // rows in the order in which their blocks are fetched
  std::vector<std::int64_t> index_;
  std::vector<float> weight_;
  Prefetch ahead_[kPriorities];

  TimelineStats own_;
  LinkStats link_base_;
};

}  // namespace moechat
