// The schedule of expert layers over a cache and a link: resident blocks are computed while missing ones
// arrive, and the CPU may compute a part of the missing ones where they lie.
//
// There is one schedule. It runs on a LayerExecutor: the host's kernels, a device's, or the clock of a
// simulation. So a simulation makes the same decisions as the engine.
//
// Order of calls, for each layer of a pass:
//   begin(layer, ...)     after the router: cancels stale prefetches, queues demand fetches
//   prefetch(layer, ...)  any number of times: speculation for later layers
//   finish(executor)      computes, and releases the experts
// abort() drops a begun layer. begin() on a begun layer aborts it first: an exception between the two leaves
// the schedule usable.
//
// Launching behind copies. Where the executor orders copies and kernels, landed blocks are launched first,
// then all that are still on their way, their kernels behind their copies; no thread waits. Pages go to the
// next block as soon as the kernels that read them are launched. With any other executor a block is computed
// once it has landed.
//
// Sharing with the far tier (far_share.h). The near tier first gets the blocks that are there; then the CPU
// computes its part, piece by piece, while the link brings the rest. A block is the CPU's if the CPU has it
// sooner, also when it is on its way: it then still arrives, and fills its page. Without pages for the rest
// the CPU computes it too.
//
// Prefetching, where the CPU computes what is missing, takes only time that nobody else needs: from the
// moment at which a layer of a decoded token lacks nothing any more to the next router, and no more blocks
// than the link moves in that window. At the router the rest is cancelled.
//
// Not thread-safe; the owner serialises.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cache/policy.h"
#include "cache/routing_counter.h"
#include "cache/split_cache.h"
#include "link/link.h"
#include "memory/slab.h"
#include "offload/adaptive_step.h"
#include "offload/expert_sum.h"
#include "offload/far_share.h"
#include "offload/layer_executor.h"
#include "offload/page_table.h"
#include "offload/speculation.h"
#include "offload/transfers.h"

namespace moechat {

// A demand fetch failed, or nothing has arrived for the stall limit. The layer was aborted; the schedule
// stays usable.
class LinkError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The same for a record that does not have its checksum, read twice: the file is damaged.
class DamagedRecordError : public LinkError {
 public:
  DamagedRecordError(const std::string& what, std::int32_t of_layer, std::int32_t of_expert,
                     std::int32_t number)
      : LinkError(what), layer(of_layer), expert(of_expert), block(number) {}
  const std::int32_t layer;  // number among the expert layers
  const std::int32_t expert;
  const std::int32_t block;
};

// The link into a device has failed, so that nothing can be computed there any more. Only the destructor may
// follow.
class DeviceLostError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct ScheduleOptions {
  // Expert layers, numbered from 0; region i of the link holds the [experts, blocks] records of layer i.
  std::int32_t layers = 0;
  std::int32_t experts = 0;       // of a layer
  std::int32_t blocks = 0;        // of an expert
  std::int64_t record_bytes = 0;  // of a block, and of a page
  std::int64_t pages = 0;
  std::vector<LayerTarget> targets;
  std::int64_t reserve = 1;  // pages that the targets leave for blocks on their way
  // As most published systems: an expert is computed once all of it has arrived.
  bool whole_experts = false;
  CacheRules rules;
  double adaptive = 0;  // experts that are fetched ahead of a layer by an adaptive step; 0: there is none
  std::int32_t adaptive_most = AdaptiveStep::kMost;  // layers ahead
  double stall_seconds = 30;                         // how long nothing may arrive before a pass gives up
  // [layers, experts] whether the CPU can compute an expert where it lies; empty: all of them.
  std::vector<std::uint8_t> far_experts;
  // Memory of the pages, [pages, record_bytes]; it must outlive the schedule and all transfers in flight.
  // Null: the schedule allocates host memory.
  unsigned char* near_memory = nullptr;
  // [layers, experts] records [blocks] of experts that are read where they lie, in memory of the host that
  // outlives the schedule, and never get a page; null: an expert in pages. Empty: all are in pages.
  std::vector<const unsigned char*> mapped_records;

  // Whole experts of a layer that fit if every layer gets as many.
  std::int64_t even_share() const {
    const std::int64_t whole = std::int64_t{layers} * blocks;
    const auto mapped = std::count_if(mapped_records.begin(), mapped_records.end(),
                                      [](const unsigned char* records) { return records != nullptr; });
    return whole > 0 && pages > reserve ? (pages - reserve + mapped * blocks) / whole : 0;
  }
};

// Where the experts of all layers are, [layers * experts] each. A block that has landed counts from the next
// begin or finish.
struct ExpertPlaces {
  std::vector<std::int16_t> resident;  // leading blocks that are ready
  std::vector<std::int16_t> assigned;  // the same, and those on their way
  std::vector<std::uint8_t> far;       // 1: at its last use the CPU computed a part of it where it lies
};

// Figures since the last reset.
struct ScheduleStats {
  CacheCounters cache;
  LinkStats link;
  double compute_seconds = 0;  // in near-tier computing, and adding up
  double stall_seconds = 0;    // in finish, with nothing to compute: waiting for the link
  double begin_seconds = 0;    // bookkeeping: begin and prefetch
  std::int64_t layers_run = 0;
  std::int64_t activations = 0;     // (token, expert) pairs computed
  std::int64_t bytes_computed = 0;  // of block records, in the near tier
  std::int64_t kernel_calls = 0;
  std::int64_t blocks_staged = 0;  // computed from pages that belong to no expert
  std::int64_t blocks_far = 0;     // computed by the CPU where they lie
  double far_seconds = 0;          // in that
  std::int64_t pages = 0;
  std::int64_t pages_peak = 0;  // most pages not free at a time
  std::int64_t page_bytes = 0;
};

class LayerSchedule {
 public:
  // `routing`, which may be null, counts every access. Throws std::invalid_argument for sizes that do not fit
  // together, std::runtime_error when memory is refused.
  LayerSchedule(ScheduleOptions options, std::unique_ptr<EvictionPolicy> policy, std::unique_ptr<Link> link,
                RoutingCounter* routing);
  LayerSchedule(const LayerSchedule&) = delete;
  LayerSchedule& operator=(const LayerSchedule&) = delete;

  // index, weight [tokens, k]; copied. Throws std::invalid_argument, and nothing has changed.
  void begin(std::int32_t layer, const std::int64_t* index, const float* weight, std::int64_t tokens,
             std::int64_t k, Miss miss);
  // Queues missing blocks of these experts of `layer`, in this order, at most `max_blocks`. An expert that is
  // resident in part gets its missing blocks. Only pages that are free or surplus are used. Returns the
  // number of blocks queued; 0 when the link has failed (the next demand reports it). If pages run out, or
  // the CPU still has to compute a part of the layer, `finish` queues the rest later, until the next begin.
  // It does so for the last prefetch of each priority.
  std::int64_t prefetch(std::int32_t layer, const std::int32_t* ranked, std::int64_t count,
                        std::int64_t max_blocks, Priority priority);
  // Tells the policy, and the adaptive step, what a predictor expects at the next access of `layer`, best
  // first.
  void predict(std::int32_t layer, const std::int32_t* experts, std::int64_t count);
  // Queues missing blocks of these experts, in this order across layers, in place of what an earlier call has
  // queued and the link has not started. A few experts are queued at a time, the others as those arrive,
  // until the next begin. Else as `prefetch`. Throws std::invalid_argument, and nothing has changed.
  // stays: until the next call, over all begins.
  std::int64_t prefetch_ahead(const AheadExpert* experts, std::int64_t count, std::int64_t max_blocks,
                              bool stays = false);
  // The passes that follow belong to another request.
  void begin_request();
  // Where the step is adaptive: the layers that are to be predicted after the router of the begun one, in a
  // pass of one token. Those `prefetch` calls that follow are for them.
  std::vector<Prediction> adaptive_layers();
  // Null: it is not adaptive.
  AdaptiveStep* step() { return step_.get(); }
  const AdaptiveStep* step() const { return step_.get(); }
  // As EvictionPolicy::expect, for all layers: shares [layers * experts]. Throws std::invalid_argument.
  void expect(const std::vector<double>& shares);
  // Queues missing blocks of these experts (pairs of layer and expert, in this order), at most `most` at a
  // time, behind everything else on the link and into free pages beyond the reserve. To be called again and
  // again between passes. Returns how many pairs at the front are done with: resident, or on their way. All
  // of them if there are no pages left, or if the link has failed. replaceable: experts that give up their
  // pages for these, in this order; none of them is one of `experts`. to_targets: no expert gets more blocks
  // than its target; those that have more give them up for others.
  std::int64_t preload(const std::vector<std::pair<std::int32_t, std::int32_t>>& experts, std::int64_t most,
                       const std::vector<std::pair<std::int32_t, std::int32_t>>& replaceable = {},
                       bool to_targets = false);
  // Cancels what has not started of it; so does the next access of each layer.
  void stop_preload();
  // Throws LinkError, DeviceLostError, and what the executor throws; the layer was aborted.
  // REQUIRES: a layer has begun.
  void finish(LayerExecutor* executor);
  void abort();
  // Waits until nothing is queued or in flight. Throws LinkError at a stall.
  void drain(LayerExecutor* executor);

  // ---- kernels that look pages up (page_table.h)
  // Keeps a table of the pages from now on. False: the link does not order copies and kernels.
  bool keep_page_table();
  PageTable* page_table() const { return table_.get(); }
  // Passes arrivals on, so that the table has them.
  void poll() { settle(); }
  // Every block of these experts is ready.
  bool ready(std::int32_t layer, const std::int32_t* experts, std::int64_t count) const;

  // ---- the begun layer
  // At its begin every block was ready, and had been for some layers.
  bool undisturbed() const { return undisturbed_; }
  bool active() const { return active_; }
  std::int32_t layer() const { return layer_; }  // or the one before it
  std::int64_t tokens() const { return tokens_; }
  const Grouped& rows() const { return grouped_; }
  // The CPU computes a part of it; the executor's far_compute will be called.
  bool sharing() const { return sharing_; }
  // Of the last layer: blocks that the CPU computed where they lie.
  std::int64_t far_blocks() const { return far_blocks_; }

  void set_targets(const std::vector<LayerTarget>& targets);
  // As SplitExpertCache, between passes: a begun layer is aborted. Cancels preloads that have not started;
  // what is on its way keeps its page.
  std::int64_t withhold(std::int64_t pages);
  ScheduleStats stats() const;
  std::int64_t bytes_computed() const { return own_.bytes_computed; }
  void reset_stats();
  std::vector<double> keys() const;             // [layers * experts], of the policy
  std::vector<std::int16_t> residency() const;  // [layers * experts] resident blocks
  ExpertPlaces places() const;
  std::string check() const { return cache_.check(); }
  const ScheduleOptions& options() const { return options_; }
  SplitExpertCache& cache() { return cache_; }
  const SplitExpertCache& cache() const { return cache_; }
  const EvictionPolicy& policy() const { return *policy_; }
  EvictionPolicy& policy() { return *policy_; }
  Slab& slab() { return slab_; }
  const Slab& slab() const { return slab_; }
  Link& link() { return *link_; }
  void check_layer(std::int32_t layer) const;
  void check_expert(std::int32_t layer, std::int32_t expert) const;

 private:
  struct Staged {
    PageId page;
    bool landed;
  };
  struct Step {
    std::int32_t row;
    std::int32_t blocks;
  };
  // One expert of the begun layer. Pinned from begin until it is done or was unpinned to make room: then its
  // blocks may be evicted, and those that are gone when their turn comes pass through staging pages.
  //   blocks [0, next)                 were computed, or handed to the device
  //          [next, link_end)          are there, or the link brings them
  //          [link_end, far_begin)     are unassigned: link or CPU; the link may be moving some of them
  //          [far_begin, blocks)       are the CPU's
  struct Row {
    std::int32_t next = 0;
    std::int32_t link_end = 0;
    std::int32_t far_begin = 0;
    bool pinned = false;         // else done, or unpinned
    std::vector<Staged> staged;  // of blocks next, next + 1, ...; empty while pinned
  };
  // A prefetch that has not found pages for all its blocks.
  struct Prefetch {
    std::int32_t layer = 0;
    std::int64_t blocks = 0;  // that it may still queue; 0: it is done
    std::vector<std::int32_t> ranked;
  };

  // The same over layers.
  struct AheadQueue {
    std::vector<AheadExpert> experts;
    std::size_t next = 0;  // the first that may lack blocks
    std::int64_t blocks = 0;
    bool stays = false;
  };

  static bool done(const Row& row) { return row.next == row.far_begin; }
  Row& row_at(std::int32_t index) { return rows_[static_cast<std::size_t>(index)]; }
  const Row& row_at(std::int32_t index) const { return rows_[static_cast<std::size_t>(index)]; }
  std::size_t place(std::int32_t layer, std::int32_t expert) const {
    return static_cast<std::size_t>(std::int64_t{layer} * options_.experts + expert);
  }
  std::int32_t expert_of(std::int32_t index) const {
    return grouped_.experts[static_cast<std::size_t>(index)];
  }

  // Arrivals and pages.
  void settle();
  std::int64_t acquire();
  std::int64_t stage(std::int32_t index);
  void note_refusal();
  std::int64_t continue_prefetch(Prefetch* prefetch, Priority priority);
  std::int64_t continue_ahead();
  bool guesses_wait() const;
  std::int64_t room_of_guesses(std::int64_t blocks) const;
  void measure_step(bool one_token);
  void open_window();
  void close_window();
  bool make_room();
  bool others_in_flight() const;
  bool unpin_one();

  // Computing.
  void run_group();
  void collect(bool flying);
  std::int32_t add_ready(std::int32_t index, bool flying);
  bool follow_copies();
  void compute();
  void end_row(std::int32_t index);
  bool group_done() const;
  bool group_pending() const;

  // Sharing.
  void divide();
  void admit(const double* keys);
  bool of_target(const double* keys, std::int32_t expert) const;
  void admit_targets(const double* keys);
  void admit_what_pays(const double* keys);
  void admit_seldom(const double* keys);
  std::int64_t unassigned() const;
  std::int64_t on_the_way() const;
  std::int64_t part_of_link(std::int64_t unassigned, std::int64_t coming) const;
  void assign_to_link(std::int64_t count);
  void absorb_landed();
  void take_from_link(std::int64_t count);
  void divide_again();
  void reopen_without_pages();
  void share();

  // Waiting and failing.
  void wait();
  bool stalled(double slice);
  std::string missing_block() const;
  std::string not_arrived() const;
  [[noreturn]] void give_up() const;

  const ScheduleOptions options_;
  // The link goes first: it writes into the slab.
  std::unique_ptr<EvictionPolicy> policy_;
  Slab slab_;
  SplitExpertCache cache_;
  std::unique_ptr<Link> link_;
  std::unique_ptr<PageTable> table_;
  Transfers transfers_;
  FarShare far_;
  RoutingCounter* const routing_;

  // ---- the begun layer
  bool active_ = false;
  std::int32_t layer_;
  std::int64_t tokens_ = 0;
  std::uint64_t pass_ = 0;
  Grouped grouped_;
  std::vector<Row> rows_;
  LayerExecutor* executor_ = nullptr;  // in finish
  std::int32_t first_ = 0;             // the group at work is rows [first_, end_)
  std::int32_t end_ = 0;
  std::int32_t unpinned_rows_ = 0;  // rows that are neither done nor pinned
  // starved_: some row, pinned or (unpinned and in the group), waits for pages.
  // freed_: there may be more pages than at the last acquire.
  bool starved_ = false;
  bool freed_ = false;
  bool transfer_failed_ = false;  // a transfer has failed since this was last reset
  std::string failure_;           // of a demand
  Transfers::Flight damaged_{};   // that demand, where its record is damaged
  bool is_damaged_ = false;
  std::vector<std::uint64_t> landed_;   // [layers, experts]: pass in which a block last landed; 0: none has
  std::vector<std::uint8_t> far_used_;  // [layers, experts]: see ExpertPlaces::far
  bool undisturbed_ = false;
  Miss miss_ = Miss::kFetch;
  bool sharing_ = false;
  bool resident_launched_ = false;  // while sharing: the blocks that were there at first
  std::int64_t far_blocks_ = 0;
  double upload_credit_ = 0;          // below 1: part of a block that the link had time for, in layers so far
  double waited_ = 0;                 // seconds in vain, since something arrived or was computed
  Prefetch prefetches_[kPriorities];  // by priority; the entry of demands stays empty

  AheadQueue ahead_;
  std::unique_ptr<AdaptiveStep> step_;
  std::int32_t reached_ = 1;  // the step at the last call of adaptive_layers
  double begun_at_ = -1;      // link's clock, at the begin of the layer before; -1: it was of another kind

  // A window is the time from the moment at which a layer of a decoded token lacks nothing any more to the
  // router of the next layer: the link has nothing better to do than to prefetch.
  std::vector<double> windows_;     // [layers, 2]: seconds, moving estimates, of layers that were complete at
                                    // once and of others; 0: not known yet
  double window_opened_ = -1;       // -1: it is closed
  std::int64_t window_blocks_ = 0;  // that may still be queued in it

  // ---- scratch
  std::vector<Step> steps_;  // the rows that the blocks added to the executor belong to
  Plan plan_;
  std::vector<std::int32_t> wanted_;
  std::vector<std::int32_t> wanted_ends_;
  std::vector<std::uint8_t> named_;
  std::vector<FarPiece> pieces_;

  ScheduleStats own_;    // all figures except those of cache, link and pages
  LinkStats link_base_;  // the link's at the last reset
};

}  // namespace moechat
