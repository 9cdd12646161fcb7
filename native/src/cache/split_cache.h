// The split-expert cache: which blocks of which experts lie in the near tier, and which page holds them.
//
// Invariants (`check` verifies them all)
// - Of every expert the pages cover a prefix of its blocks: [0, resident) are ready, [resident, assigned) are
//   being filled or wait, ready, for a block before them. No block has two pages.
// - A page is free, owned by one block of one expert, a staging page, or an orphan (its transfer could not be
//   cancelled, and its block is not wanted any more), or withheld; free + owned + staging + orphans +
//   withheld = all pages of the slab. Orphans and staging pages in flight become free only after their
//   transfer has finished.
// - A pinned expert loses no block that is resident or on its way. A page whose transfer has not finished is
//   never a victim.
// - `plan` is pure: it changes nothing and decides everything. `commit` does what a plan says and refuses a
//   plan made before the last change. Neither starts a transfer: the caller hands the fetches to a link and
//   reports what became of them through `landed` and `cancelled`.
//
// Protection. The *target* of a layer is C and theta. Of its admitted experts (see `release`), the C with the
// highest keys of the policy are *protected*: the first b = round(theta * B) blocks of each are not evicted.
// Resident blocks that are not protected are *surplus*: they stay, and count as hits, until a page is needed.
// Victims are taken from the layer whose next turn is farthest away (the one at work first, then backwards
// from it), there from the expert with the lowest key, last block first; but, where the policy's keys are
// comparable across layers, from another layer if its lowest key is below that one by more than kClear. So no
// page stays unused, surplus goes to whom the routing demands, and a smaller target costs nothing until its
// pages are wanted. A prefetch takes free and surplus pages only, and never those of layers whose turn comes
// before its own layer's; in its own layer, never those of experts that it names or that hold blocks of an
// earlier prefetch.
//
// Why only surplus moves, and by kClear. In simulations with half of C protected, whole experts of one layer
// took the place of parts of many, which costs time where the target is small and misses are fetched; without
// kClear pages move on the noise of keys. To compare builds: scripts/bench/slab.
//
// A *preload* brings experts that earlier runs have used into free pages while nothing else is done. It is a
// prefetch that takes no page of another expert and is never wasted: once landed, its blocks count as
// resident. While nothing is done an expert can also be *given up*, protected or not, for one that is used
// more in the long run.
//
// A *fixed* expert is ready from the beginning to the end, from records outside of the slab. It is pinned for
// good, takes no part in protection, and its accesses are hits; targets and pages are for the others.
//
// *Withheld* pages hold nothing, and their memory is the system's, until they are needed again: so memory
// goes back and forth between experts and what else the budget is for. Targets leave them out.
//
// Not thread-safe; the schedule's owner serialises.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "cache/demand.h"
#include "cache/policy.h"
#include "memory/slab.h"

namespace moechat {

struct LayerTarget {
  std::int32_t experts;  // C, 0..experts of a layer
  std::int32_t blocks;   // b, 1..blocks of an expert (ignored when experts is 0)
};

// Which experts are protected, and in which order pages are taken.
struct CacheRules {
  Admission admission = Admission::kKey;
  // Of all layers within reach, the expert with the lowest key loses its pages: one pool for all layers, as
  // in systems whose keys are one order over the whole model. False: see above.
  bool lowest_victims = false;
};

enum class HitKind : std::uint8_t {
  kFull,      // all blocks were ready, none of them brought by a prefetch since the last access
  kPrefetch,  // all blocks were ready or on their way, at least one brought by a prefetch
  kTop,       // some blocks were ready or on their way
  kMiss       // nothing was there
};

struct Fetch {
  PageId page;
  std::int32_t layer;
  std::int32_t expert;  // also for staging pages
  std::int32_t block;
};

struct Victim {
  std::int32_t layer;
  std::int32_t expert;
  std::int32_t blocks;  // how many, from the end of its resident blocks
};

// A request for the missing blocks of these experts, in this order.
struct Want {
  std::int32_t layer;  // whose experts
  std::int32_t at;     // the layer at work, from which "farthest" is counted
  const std::int32_t* experts;
  std::int64_t count;
  bool prefetch;                       // false: demand; the experts must be pinned
  std::int64_t max_blocks;             // stop after that many fetches
  bool whole = true;                   // an expert gets pages for all its missing blocks, or none
  const std::int32_t* ends = nullptr;  // [count] blocks [0, end) are wanted; null: all
  bool preload = false;                // a prefetch into free pages
};

struct Plan {
  std::uint64_t version = 0;
  bool prefetch = false;
  bool preload = false;
  std::vector<Victim> victims;
  std::vector<Fetch> fetches;  // page is kNoPage until commit
  // Leading experts of the want that have all their blocks once this is committed.
  std::int64_t satisfied = 0;
};

// A prefetched block is *used* by the next access of its expert, or by the release of an expert that was
// pinned when it arrived.
struct CacheCounters {
  std::int64_t hits[4] = {};           // by HitKind: (expert, pass) pairs of passes with one token
  std::int64_t prefill_hits[4] = {};   // the same for longer passes
  std::int64_t blocks_wanted = 0;      // blocks of accessed experts, passes with one token
  std::int64_t blocks_resident = 0;    // of these: ready at access and not brought by a prefetch
  std::int64_t blocks_prefetched = 0;  // of these: ready or on their way through a prefetch
  std::int64_t fetched_demand = 0;     // blocks that landed without an error, all passes, staging included
  std::int64_t fetched_prefetch = 0;   // the same, by what they were committed as
  std::int64_t prefetch_wasted = 0;  // prefetched blocks evicted, failed or dropped without having been used
                                     // (not those cancelled before their transfer started)
  std::int64_t evicted = 0;          // blocks
  std::int64_t admitted = 0;         // experts that became protected
  std::int64_t preloaded = 0;        // blocks that landed without an error; not among the prefetched ones
};

class SplitExpertCache {
 public:
  // Difference of comparable keys (log-odds of the policy `forecast`) from which an expert of another layer
  // is clearly worth less.
  static constexpr double kClear = 1;

  // `slab` (all its pages free) and `policy` outlive the cache. Throws std::invalid_argument: sizes out of
  // range, or targets that take more than slab.pages() - reserve pages, where reserve is what must stay for
  // blocks on their way (at least 1).
  SplitExpertCache(std::int32_t layers, std::int32_t experts, std::int32_t blocks, Slab* slab,
                   EvictionPolicy* policy, const std::vector<LayerTarget>& targets, std::int64_t reserve,
                   const CacheRules& rules = {});

  std::int32_t layers() const { return layers_; }
  std::int32_t experts() const { return experts_; }
  std::int32_t blocks() const { return blocks_; }

  // Makes an expert fixed; `pages`, of its blocks, are outside of the slab. To be called before the first
  // access. Throws std::invalid_argument: a number out of range, an expert that has blocks, other pages.
  void fix(std::int32_t layer, std::int32_t expert, const std::vector<PageId>& pages);

  // ---- looking (never changes anything)
  std::int32_t resident(std::int32_t layer, std::int32_t expert) const { return at(layer, expert).resident; }
  std::int32_t assigned(std::int32_t layer, std::int32_t expert) const { return at(layer, expert).assigned; }
  bool is_protected(std::int32_t layer, std::int32_t expert) const { return at(layer, expert).kept; }
  bool is_fixed(std::int32_t layer, std::int32_t expert) const { return at(layer, expert).fixed; }
  std::int32_t pins(std::int32_t layer, std::int32_t expert) const { return at(layer, expert).pins; }
  // Page of a block below assigned(); kNoPage above.
  PageId page(std::int32_t layer, std::int32_t expert, std::int32_t block) const {
    return pages_[spot(place(layer, expert), block)];
  }
  // Pages that a demand could have at this moment without waiting: free, or surplus of unpinned experts.
  std::int64_t available() const { return slab_->free_pages() + surplus_; }
  // Key of the expert that would lose the next page to a demand of the layer at work; infinite: none would.
  double cheapest(std::int32_t at) const;
  std::int64_t in_flight() const { return in_flight_; }  // committed or staging, and not reported back
  // Of these, the ones that a prefetch is bringing, and that no access has used yet.
  std::int64_t guesses_in_flight() const {
    return std::accumulate(layer_pending_.begin(), layer_pending_.end(), std::int64_t{0});
  }
  std::int64_t staging() const { return staging_; }
  std::int64_t orphans() const { return orphans_; }
  std::uint64_t version() const { return version_; }  // rises with every change
  const CacheCounters& counters() const { return counters_; }
  const std::vector<LayerTarget>& targets() const { return targets_; }
  // Empty, or the inconsistency: every invariant above, recounted from scratch. For tests; slow.
  std::string check() const;

  // ---- an access: the router of a layer has chosen
  // Updates the policy, counts the hits, and pins the experts. Every expert of an access must be released.
  // Throws std::invalid_argument, and nothing has changed: a number out of range, an expert named twice.
  void access(std::int32_t layer, const std::int32_t* experts, const std::int32_t* tokens, std::int64_t count,
              std::int64_t pass_tokens, HitKind* kinds /* [count], may be null */);
  // The blocks of one expert of the access have been used, or the access was aborted. Unpins the expert. If
  // it holds blocks and its key is above the lowest key of the C admitted experts (of equal keys, the higher
  // number wins), it is admitted in place of that one; see Admission for the other rules. Nothing is copied.
  // Throws std::logic_error if the expert is not pinned.
  void release(std::int32_t layer, std::int32_t expert);

  // ---- moving blocks
  // Throws std::invalid_argument: a number out of range, an expert named twice, a demand for one not pinned.
  void plan(const Want& want, Plan* plan) const;
  // Frees the victims, takes the pages (fills in Plan::fetches[].page), marks them as being filled. Throws
  // std::logic_error if anything has changed since the plan.
  void commit(Plan* plan);
  // Frees the blocks of an expert from number `from` on, protected or not; if that is 0, it is protected no
  // longer. Returns how many; 0, and nothing has changed, if it is pinned, or if a block of it is on its way.
  // Throws std::invalid_argument for a number out of range.
  std::int64_t give_up(std::int32_t layer, std::int32_t expert, std::int32_t from = 0);
  // Withholds so many pages in all, if there are enough that are free or surplus: those with the lowest keys
  // go first, of one layer after the other where keys of layers cannot be compared. Returns how many are
  // withheld now. Throws std::invalid_argument for a negative number, or if the targets need more than the
  // others; nothing has changed then.
  std::int64_t withhold(std::int64_t pages);
  std::int64_t withheld() const { return static_cast<std::int64_t>(withheld_.size()); }
  // A page that belongs to no expert, for a block of an expert that is larger than all there is; kNoPage when
  // none is available. It counts as in flight until `landed` or `cancelled`, and as staging until
  // `give_staging`. Given back while it is in flight it becomes an orphan.
  PageId take_staging(std::int32_t at);
  void give_staging(PageId page);
  // The transfer into `page` has finished (error: errno or 0), or was cancelled before it started. After an
  // error, as after a cancelled transfer, the expert loses the block and all blocks behind it (those in
  // flight become orphans). landed returns false if the page was an orphan or staging. Both throw
  // std::logic_error for a page that is not being filled.
  bool landed(PageId page, int error);
  void cancelled(PageId page);
  bool filling(PageId page) const { return (flags_[page] & kFilling) != 0; }

  // Pages of `layer` that a prefetch is filling for experts that are not pinned, in the order in which
  // cancelling keeps prefixes: per expert from the last block down. Stop with an expert at its first page
  // that cannot be cancelled. Blocks whose expert has been accessed since they were queued are not listed.
  void stale_prefetches(std::int32_t layer, std::vector<Fetch>* out) const;

  // ---- re-planning, without a stop: no block moves, protection follows at once (the C highest keys among
  // the protected experts and those that hold blocks), pages follow as they are wanted. Throws
  // std::invalid_argument as the constructor; nothing has changed then.
  void set_targets(const std::vector<LayerTarget>& targets);
  // The policy has new keys by `expect`.
  void keys_changed() {
    ++version_;
    known_.assign(known_.size(), 0);
  }
  // Takes over what another cache has found out about rules of admission, and, in layers whose C is the same,
  // which experts are protected. REQUIRES: the same layers and experts, and all of its blocks are here.
  void protect_like(const SplitExpertCache& other);
  void reset_counters() { counters_ = {}; }

  // ---- watching (page_table.h)
  // From now on experts are noted when the pages of their ready blocks may have changed; all are at first.
  void watch();
  // One of them, as layer * experts + expert, each once until it changes again; -1: there is none.
  std::int64_t next_changed();

 private:
  // Owners in the slab: place() of an expert, or one of these.
  static constexpr std::uint32_t kStaging = 0xfffffffeu;
  static constexpr std::uint32_t kOrphan = 0xfffffffdu;
  static constexpr std::uint32_t kWithheld = 0xfffffffcu;
  // Flags of a page.
  static constexpr std::uint8_t kFilling = 1;
  static constexpr std::uint8_t kFresh = 2;        // brought by a prefetch, not used since
  static constexpr std::uint8_t kSpeculative = 4;  // its transfer was committed as a prefetch
  static constexpr std::uint8_t kPreload = 8;      // its transfer was committed as a preload

  struct Expert {
    std::int32_t layer = 0;
    std::int32_t resident = 0;
    std::int32_t assigned = 0;
    std::int32_t pins = 0;
    std::int32_t surplus = 0;  // blocks that may be taken: none while pinned or being filled
    std::int32_t fresh = 0;    // pages with kFresh
    std::uint64_t access = 0;  // number of the last access, from 1
    bool kept = false;         // protected
    bool fixed = false;
  };
  struct Candidate {
    double key;
    std::int32_t expert;
  };

  static std::size_t size_of(std::int64_t value) { return static_cast<std::size_t>(value); }
  static std::string name_of(std::int32_t layer, std::int32_t expert);
  std::size_t place(std::int32_t layer, std::int32_t expert) const {
    return static_cast<std::size_t>(layer) * static_cast<std::size_t>(experts_) +
           static_cast<std::size_t>(expert);
  }
  std::size_t spot(std::size_t place, std::int32_t block) const {
    return place * static_cast<std::size_t>(blocks_) + static_cast<std::size_t>(block);
  }
  const Expert& at(std::int32_t layer, std::int32_t expert) const { return state_[place(layer, expert)]; }
  std::int32_t next_farthest(std::int32_t layer) const { return layer == 0 ? layers_ - 1 : layer - 1; }

  void check_targets(const std::vector<LayerTarget>& targets, std::int64_t pages) const;
  void check_layer(const char* name, std::int32_t layer) const;
  void mark(const std::int32_t* experts, std::int64_t count) const;
  bool marked(std::int32_t expert) const { return marks_[static_cast<std::size_t>(expert)] == mark_; }
  bool may_rob(const Want& want, std::int32_t layer, std::int32_t expert) const;
  std::int64_t within_reach(const Want& want, std::int64_t enough) const;
  Candidate lowest(std::int32_t layer) const;
  Candidate lowest_left(const Want& want, std::int32_t layer) const;
  Victim next_victim(const Want& want) const;
  void list_layers(const Want& want) const;
  void choose_victims(const Want& want, std::int64_t need, Plan* plan) const;
  bool admits_always(std::int32_t layer) const;
  void update_surplus(std::size_t place);
  void keep(std::int32_t layer, std::int32_t expert);
  void unkeep(std::int32_t layer, std::int32_t slot);
  void clear_fresh(PageId page, std::size_t place);
  void drop_from(std::size_t place, std::int32_t block);
  void evict(const Victim& victim);
  std::int32_t next_to_give(std::int32_t after) const;
  void finish_transfer(PageId page);

  std::int32_t layers_;
  std::int32_t experts_;
  std::int32_t blocks_;
  Slab* slab_;
  EvictionPolicy* policy_;
  std::vector<LayerTarget> targets_;
  std::int64_t reserve_;
  CacheRules rules_;
  std::uint64_t version_;

  std::vector<Expert> state_;                // [layers * experts]
  std::vector<PageId> pages_;                // [layers * experts * blocks]
  std::vector<std::int32_t> block_;          // [pages of the slab]: which block of its owner
  std::vector<std::uint8_t> flags_;          // [pages of the slab]
  std::vector<std::int32_t> kept_;           // [layers, experts]: protected experts, from the left
  std::vector<std::int32_t> kept_count_;     // [layers]
  std::vector<std::uint64_t> accesses_;      // [layers]: how many there were
  std::vector<AdmissionTrial> trials_;       // [layers] with Admission::kBest, else empty
  std::vector<std::int64_t> layer_surplus_;  // [layers]
  std::vector<std::int64_t> layer_pending_;  // [layers]: pages both kFilling and kFresh
  std::int64_t surplus_ = 0;
  std::int64_t in_flight_ = 0;
  std::int64_t staging_ = 0;
  std::int64_t orphans_ = 0;
  CacheCounters counters_;
  bool watched_ = false;
  std::vector<std::uint8_t> noted_;  // [layers * experts]: is in changed_
  std::vector<std::uint32_t> changed_;

  // Scratch of `plan`; what it holds between calls means nothing.
  mutable std::vector<std::uint32_t> marks_;  // [experts]
  mutable std::uint32_t mark_ = 0;
  std::vector<Candidate> candidates_;
  // Of each layer, its surplus expert with the lowest key, or number -1; known_ is the policy's stamp
  // of the layer plus 1 where it is up to date.
  mutable std::vector<Candidate> lowest_;     // [layers]
  mutable std::vector<std::uint64_t> known_;  // [layers]
  // The want at work: the layers that it may take from, in the order of turns, with the lowest expert that is
  // left of each; and what it has taken already.
  mutable std::vector<std::int32_t> reach_;
  mutable std::vector<Candidate> left_;
  mutable std::vector<std::uint32_t> taken_;  // [layers * experts]
  mutable std::uint32_t taking_ = 0;
  std::vector<PageId> withheld_;
  std::vector<std::int32_t> in_pages_;  // of an access, the experts that are not fixed
  Plan staging_plan_;
};

}  // namespace moechat
