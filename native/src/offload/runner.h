// Runs the experts of a layer over the cache and a link: what is resident is computed while what is missing
// arrives. One native object an engine; every call of a pass takes microseconds, but `finish`, which
// computes.
//
// Order of calls, for each layer of a pass:
//   begin(layer, ...)     the router has spoken: stale prefetches are cancelled, demand fetches queued
//   prefetch(layer, ...)  any number of times: speculation for layers to come
//   finish(x, out)        compute, add up, release; or finish_on_device, where the pages lie in a GPU's
//   memory
// abort() drops a begun layer. begin() on a begun layer aborts it first: an exception between the two
// (Ctrl-C) leaves the runner usable. The sum that finish computes is that of expert_sum.h, bit by bit.
//
// On a device. The runner says which blocks can be computed, the caller launches kernels on a stream. Where
// the link orders its copies and the kernels on the card (StreamOrder), nothing waits for anything here:
// blocks that are still on their way are launched after those that are there, their kernels behind their
// copies; pages go to the next block as soon as the kernels that read them are launched, the copies behind
// the kernels. With any other link a block is launched once it has landed, and `launch` returns when its
// kernels are done.
//
// Where far_records are given, begin can say that the CPU computes a part of what is missing (far_share.h):
// finish_on_device then launches what is there, computes that part while the link brings the rest, and
// launches that. Without pages for the rest the CPU computes it too.
//
// Calls from several threads are safe: they take turns, a `finish` being one turn. A call from within the
// `interrupted` of another (a signal handler) throws std::logic_error, any call in a forked child
// std::runtime_error; only the destructor is allowed there.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cache/policy.h"
#include "cache/routing_counter.h"
#include "cache/split_cache.h"
#include "kernels/block_layout.h"
#include "kernels/forward.h"
#include "link/link.h"
#include "memory/slab.h"
#include "offload/block_sink.h"
#include "offload/expert_sum.h"
#include "offload/far_share.h"
#include "offload/transfers.h"

namespace moechat {

// A demand fetch failed, or nothing has arrived for the stall limit. The layer was aborted; the runner stays
// usable.
class LinkError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The link into a device has failed, so that nothing can be computed there any more. The runner stays usable
// for nothing but its destructor.
class DeviceLostError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct RunnerOptions {
  BlockLayout layout{};
  ActivationSpec activation{};
  int activation_bits = kDefaultActivationBits;  // as ForwardCall::activation_bits
  // Expert layers, numbered from 0; region i of the link holds the [experts, blocks] records of layer i.
  std::int32_t layers = 0;
  std::int32_t experts = 0;
  std::int32_t top_k = 1;  // experts that a token uses; decides how much of a prediction is counted
  std::int64_t pages = 0;
  std::vector<LayerTarget> targets;
  std::int64_t reserve = 1;
  double stall_seconds = 30;
  std::int64_t accumulator_bytes = ExpertSum::kBytes;
  bool whole_experts = false;  // as most published systems: an expert is computed once all of it has arrived
  bool populate = false;       // commit all pages at once, not one by one as they are first filled
  // Pages lie there, [pages, record_bytes]; it outlives the runner and everything that the link has in
  // flight. Null: host memory of the runner's own. Only finish_on_device can compute from memory of a device.
  unsigned char* near_memory = nullptr;
  // [layers] records [experts, blocks] of each layer in memory of the host, which outlive the runner; none:
  // the CPU does not compute what is missing on a device.
  std::vector<const unsigned char*> far_records;
};

struct RunnerStats {
  CacheCounters cache;
  LinkStats link;
  double compute_seconds = 0;  // in kernels, and adding up
  double stall_seconds = 0;    // in finish, with nothing to compute: the link was waited for
  double begin_seconds = 0;    // bookkeeping: begin and prefetch
  std::int64_t layers_run = 0;
  std::int64_t activations = 0;     // (token, expert) pairs computed
  std::int64_t bytes_computed = 0;  // of block records walked
  std::int64_t kernel_calls = 0;
  std::int64_t blocks_staged = 0;  // computed from pages that belong to no expert
  std::int64_t blocks_far = 0;     // computed by the CPU where they lie
  double far_seconds = 0;          // that took
  std::int64_t pages = 0;
  std::int64_t pages_peak = 0;  // most pages not free at a time
  std::int64_t page_bytes = 0;
};

class ExpertRunner {
 public:
  using Interrupted = std::function<void()>;

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
  // Queues missing blocks of experts of `layer` in descending score (of equal ones, and those that are not a
  // number last, the lower index first): of the best `experts`, and at most `max_blocks` blocks. scores null:
  // ascending order, the whole layer. An expert that is resident in part gets what is missing of it. Only
  // pages that are free or surplus are used. Returns the number of blocks queued; 0 when the link has failed
  // (the next demand will say so).
  // What finds no page yet is queued by `finish`, as the experts at work give theirs back; the last prefetch
  // that was cut short in this way goes on, until the next begin.
  std::int64_t prefetch(std::int32_t layer, const float* scores, std::int32_t experts,
                        std::int64_t max_blocks, Priority priority);
  // x, out [tokens, hidden], not overlapping; out is overwritten. `interrupted` is called a few times a
  // second; it may throw, and the layer is aborted. Throws LinkError, std::logic_error when no layer has
  // begun, std::invalid_argument when `tokens` is not that of begin (the layer stays begun).
  // Returns the bytes of block records that were walked.
  std::int64_t finish(const float* x, std::int64_t tokens, float* out, const Interrupted& interrupted);
  // The same on a device. `launch` is called with blocks of the begun layer, each once, those of an expert in
  // ascending order; `work` is the most (token, block) pairs of a call. stream: CUstream, for links that
  // order. Blocks that the CPU computes are not launched: far_blocks() says afterwards how many.
  std::int64_t finish_on_device(void* stream, std::int64_t tokens, std::int64_t work,
                                const DeviceSink::Launch& launch, const Interrupted& interrupted,
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

  void set_targets(const std::vector<LayerTarget>& targets);
  RunnerStats stats() const;
  void reset_stats();
  // What routing has been like since the last reset; see routing_counter.h.
  RoutingCounts routing_counts() const;
  void reset_routing_counts();
  // Waits until nothing is queued or in flight (tests, end of a measurement). Throws LinkError at a stall.
  void drain(const Interrupted& interrupted);
  void hurry_link(bool on);                     // as Link::hurry
  std::vector<std::int16_t> residency() const;  // [layers * experts] resident blocks
  // Empty, or what is inconsistent. For tests; slow.
  std::string check() const;
  const RunnerOptions& options() const { return options_; }
  std::int64_t huge_bytes() const;
  std::int64_t resident_bytes() const;

 private:
  using Clock = std::chrono::steady_clock;

  // One call's turn. Refuses children of the process and calls from within a call.
  class Turn {
   public:
    explicit Turn(const ExpertRunner* runner);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    const ExpertRunner* runner_;
    std::unique_lock<std::mutex> lock_;
  };

  struct Staged {
    PageId page;
    bool landed;
  };
  struct Step {
    std::int32_t row;
    std::int32_t blocks;
  };
  // One expert of the begun layer. Pinned from begin until it is done or had to be let go: then its blocks
  // may be taken by others, and those that are not there any more when their turn comes pass through staging
  // pages.
  struct Row {
    std::int32_t next = 0;       // blocks [0, next) have been computed, or handed to the device
    std::int32_t link_end = 0;   // blocks [0, link_end) are there, or the link brings them
    std::int32_t far_begin = 0;  // blocks [far_begin, B) are the CPU's; those between the two nobody's yet
    bool pinned = false;         // else done, or let go
    std::vector<Staged> staged;  // of blocks next, next + 1, ...; empty while pinned
  };

  // A prefetch that has not found pages for all it wants.
  struct Ahead {
    std::int32_t layer = 0;
    std::int64_t blocks = 0;  // that it may still queue; 0: nothing is left to do
    std::vector<std::int32_t> ranked;
  };

  void settle();
  void abort_now();
  std::int64_t fetch_ahead(Ahead* ahead);
  bool stalled(Clock::duration slice);
  std::int64_t blocks() const { return options_.layout.blocks; }
  static bool done(const Row& row) { return row.next == row.far_begin; }

  void divide();
  std::int64_t open() const;
  std::int64_t on_the_way() const;
  void give_link(std::int64_t count);
  void take_in();
  void take_back();
  void share(const Interrupted& interrupted);
  void end_row(std::int32_t index);
  std::int64_t acquire();
  std::int64_t stage(std::int32_t index);
  void note_refusal();
  void collect(bool flying);
  std::int32_t add_ready(std::int32_t index, bool flying);
  void add(std::int32_t row, std::int32_t block, PageId page, bool landed);
  bool follow_fills(const Interrupted& interrupted);
  void mark_reads();
  [[noreturn]] void give_up() const;
  void compute();
  void check_finish(std::int64_t tokens) const;
  std::int64_t finish_with(BlockSink* sink, const Interrupted& interrupted);
  void run_group(const Interrupted& interrupted);
  bool group_done() const;
  bool group_pending() const;
  bool make_room();
  bool others_in_flight() const;
  bool let_one_go();
  void wait(const Interrupted& interrupted);
  bool wait_for_link(const Interrupted& interrupted);
  void ask(const Interrupted& interrupted, Clock::time_point now);
  std::string missing_block() const;
  std::string not_arrived() const;

  const RunnerOptions options_;
  const int process_;
  mutable std::mutex mutex_;
  mutable std::atomic<std::thread::id> holder_{};

  // The link goes first: it writes into the slab.
  std::unique_ptr<EvictionPolicy> policy_;
  Slab slab_;
  SplitExpertCache cache_;
  std::unique_ptr<Link> link_;
  Transfers transfers_;
  RoutingCounter routing_;

  // The begun layer.
  bool active_ = false;
  std::int32_t layer_;  // or the one before it
  std::int64_t tokens_ = 0;
  std::uint64_t pass_ = 0;
  Grouped grouped_;
  std::vector<Row> rows_;
  HostSink host_;
  DeviceSink device_;
  FarShare far_;
  Miss miss_ = Miss::kFetch;
  bool sharing_ = false;   // the CPU computes a part of the begun layer
  bool launched_ = false;  // while sharing: what was there at first
  FarPart far_part_;
  BlockSink* sink_ = nullptr;     // of the layer that is being finished
  StreamOrder* order_ = nullptr;  // of the link, while a layer is finished on a device
  void* stream_ = nullptr;
  std::int32_t first_ = 0;  // the group at work is rows [first_, end_)
  std::int32_t end_ = 0;
  std::int32_t let_go_ = 0;  // rows that are neither done nor pinned
  bool starved_ = false;     // some row, pinned or let go and in the group, waits for pages
  bool freed_ = false;       // there may be more pages than at the last acquire
  bool lost_ = false;        // some transfer has failed since this was last set to false
  std::string failure_;      // of a demand
  Clock::time_point idle_since_{};
  Clock::duration waited_{};  // in vain, since something arrived or was computed
  std::thread::id begun_by_{};
  Clock::time_point asked_{};  // when `interrupted` was last called

  std::vector<Step> steps_;     // what the blocks added to sink_ complete
  std::vector<PageId> read_;    // with order_: pages that they are read from
  std::vector<PageId> flying_;  // of these, those that have not landed
  Plan plan_;                   // scratch
  std::vector<std::int32_t> wanted_;
  std::vector<std::int32_t> wanted_ends_;
  std::vector<std::uint64_t> sortable_;
  Ahead ahead_[kPriorities];  // by priority; demands have none

  RunnerStats own_;      // the runner's own figures
  LinkStats link_base_;  // the link's at the last reset
};

}  // namespace moechat
