// Between the cache and the link: queues the blocks that the cache has committed, reports arrivals back.
//
// Invariants
// - Each page has a record of its transfer's purpose, from `fetch` or `stage` until the cache has handled its
//   landing or cancellation. Slots of the link are page numbers.
// - A page is released only once the link confirms that its transfer has not started and never will.
//
// Not thread-safe; the schedule's owner serialises.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache/split_cache.h"
#include "link/link.h"
#include "memory/slab.h"
#include "offload/page_table.h"

namespace moechat {

class Transfers {
 public:
  enum class Kind : std::uint8_t { kNone, kPrefetch, kDemand, kStaging };

  struct Flight {
    Kind kind = Kind::kNone;
    std::int32_t layer = 0;
    std::int32_t expert = 0;
    std::int32_t block = 0;
    std::uint64_t pass = 0;  // which began when it was queued
  };
  struct Arrival {
    PageId page;
    int error;
    bool owned;  // an expert of the cache has, or has just lost, the page
    Flight flight;
  };

  // Region i of the link holds [experts, blocks] records of layer i. Opens the link. All three outlive this.
  Transfers(SplitExpertCache* cache, Slab* slab, Link* link);

  // Commits the plan and queues its fetches; returns how many. When the link refuses, the cache has forgotten
  // them again, `refusal` says why, and 0 is returned.
  std::int64_t fetch(Plan* plan, Priority priority, std::uint64_t pass);
  // Takes a staging page and queues a demand for one block into it; kNoPage when there is no page or the link
  // refuses (see `refusal`).
  PageId stage(std::int32_t layer, std::int32_t expert, std::int32_t block, std::uint64_t pass);
  // From now on transfers into pages that kernels may look up in `table` are put behind them. It outlives
  // this. REQUIRES: the link orders copies and kernels (StreamOrder).
  void follow_readers(PageTable* table) { table_ = table; }
  const std::string& refusal() const { return refusal_; }
  void forget_refusal() { refusal_.clear(); }

  // Passes all arrivals to the cache. Valid until the next call.
  const std::vector<Arrival>& poll();

  // False: it has started, and the page keeps its state until it has landed.
  bool cancel(PageId page);
  // Cancels the prefetches of a layer for experts that are not pinned; returns how many could be cancelled.
  // keep: [experts of a layer], not 0 for those that are left alone; null: none is.
  std::int64_t cancel_stale(std::int32_t layer, const std::uint8_t* keep = nullptr);
  // Cancels the queued blocks of one expert, from its last block down.
  void cancel_queued(std::int32_t layer, std::int32_t expert);
  // Moves the queued blocks of one expert to a higher priority.
  void promote(std::int32_t layer, std::int32_t expert, Priority priority);
  void give_staging(PageId page) { cache_->give_staging(page); }

  // Most pages that were not free at a time.
  std::int64_t pages_peak() const { return peak_; }
  void reset_peak() { peak_ = slab_->pages() - slab_->free_pages(); }
  std::string describe(std::int32_t layer, std::int32_t expert, std::int32_t block) const;

 private:
  Transfer transfer(PageId page, const Flight& flight, Priority priority);
  std::int64_t offset(std::int32_t expert, std::int32_t block) const;
  bool submit();
  void follow_readers();
  void note_peak();

  SplitExpertCache* cache_;
  Slab* slab_;
  Link* link_;
  PageTable* table_ = nullptr;   // null: no kernels look pages up
  std::vector<Flight> flights_;  // [pages]
  std::vector<Transfer> queue_;  // scratch
  std::vector<Completion> completions_;
  std::vector<Arrival> arrivals_;
  std::vector<Fetch> stale_;
  std::vector<std::uint32_t> read_;
  std::string refusal_;
  std::int64_t peak_ = 0;
};

}  // namespace moechat
