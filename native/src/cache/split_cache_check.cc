// Recounts everything that the cache keeps count of. Slow, for tests.
#include <algorithm>

#include "cache/split_cache.h"

namespace moechat {
namespace {

// The first thing found wrong.
class Findings {
 public:
  void expect(bool holds, const std::string& what) {
    if (!holds && text_.empty()) text_ = what;
  }
  void equal(std::int64_t kept, std::int64_t counted, const std::string& what) {
    expect(kept == counted,
           what + " is " + std::to_string(kept) + ", but " + std::to_string(counted) + " were counted");
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace

std::string SplitExpertCache::check() const {
  Findings found;
  const auto layers = static_cast<std::size_t>(layers_);
  std::vector<std::int64_t> surplus(layers), pending(layers), kept(layers);
  std::int64_t owned = 0;
  for (std::size_t where = 0; where < state_.size(); ++where) {
    const Expert& expert = state_[where];
    const auto layer = where / static_cast<std::size_t>(experts_);
    const std::string name = "layer " + std::to_string(layer) + ", expert " +
                             std::to_string(where % static_cast<std::size_t>(experts_));
    const bool ordered =
        0 <= expert.resident && expert.resident <= expert.assigned && expert.assigned <= blocks_;
    found.expect(ordered, name + ": resident " + std::to_string(expert.resident) + " and assigned " +
                              std::to_string(expert.assigned) + " are out of order");
    found.expect(expert.layer == static_cast<std::int32_t>(layer) && expert.pins >= 0,
                 name + ": wrong layer or negative pins");
    if (!ordered) return found.text();
    if (expert.fixed) {
      found.expect(expert.resident == blocks_ && expert.pins > 0 && !expert.kept && expert.surplus == 0,
                   name + ": fixed, and not whole, not pinned or not apart");
      for (std::int32_t block = 0; block < blocks_; ++block) {
        const PageId page = pages_[spot(where, block)];
        found.expect(page >= slab_->pages() && page != kNoPage, name + ": fixed, with a page of the slab");
      }
      continue;
    }
    std::int32_t fresh = 0;
    for (std::int32_t block = 0; block < blocks_; ++block) {
      const PageId page = pages_[spot(where, block)];
      const std::string place_name = name + ", block " + std::to_string(block);
      if (block >= expert.assigned) {
        found.expect(page == kNoPage, place_name + ": has a page beyond what is assigned");
        continue;
      }
      if (page >= slab_->pages()) return place_name + ": has no page";
      ++owned;
      // Owner and block of a page are single values, so no page can serve two blocks.
      found.expect(slab_->owner(page) == where && block_[page] == block,
                   place_name + ": its page is another's");
      found.expect(block >= expert.resident || !filling(page), place_name + ": resident but being filled");
      found.expect(block != expert.resident || filling(page), place_name + ": ready but not resident");
      if ((flags_[page] & kFresh) != 0) {
        ++fresh;
        pending[layer] += filling(page) ? 1 : 0;
        found.expect((flags_[page] & kSpeculative) != 0, place_name + ": fresh but not from a prefetch");
      }
    }
    found.equal(expert.fresh, fresh, name + ": fresh");
    const std::int32_t floor = expert.kept ? targets_[layer].blocks : 0;
    const bool locked = expert.pins > 0 || expert.resident != expert.assigned;
    found.equal(expert.surplus, locked ? 0 : std::max(0, expert.resident - floor), name + ": surplus");
    surplus[layer] += expert.surplus;
    kept[layer] += expert.kept ? 1 : 0;
  }

  std::int64_t total = 0, protected_pages = 0;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const std::string name = "layer " + std::to_string(layer);
    found.equal(layer_surplus_[layer], surplus[layer], name + ": surplus");
    found.equal(layer_pending_[layer], pending[layer], name + ": prefetches on their way");
    found.equal(kept_count_[layer], kept[layer], name + ": protected experts");
    found.expect(kept[layer] <= targets_[layer].experts, name + ": more protected experts than its target");
    std::vector<bool> seen(static_cast<std::size_t>(experts_));
    for (std::int32_t slot = 0; slot < kept_count_[layer]; ++slot) {
      const std::int32_t expert = kept_[place(static_cast<std::int32_t>(layer), slot)];
      found.expect(
          at(static_cast<std::int32_t>(layer), expert).kept && !seen[static_cast<std::size_t>(expert)],
          name + ": the list of protected experts is wrong");
      seen[static_cast<std::size_t>(expert)] = true;
    }
    total += surplus[layer];
    if (targets_[layer].experts > 0)
      protected_pages += std::int64_t{targets_[layer].experts} * targets_[layer].blocks;
  }
  found.equal(surplus_, total, "surplus");
  found.expect(protected_pages <= slab_->pages() - withheld() - reserve_,
               "the targets take more than the pages without reserve");

  std::int64_t free = 0, staging = 0, orphans = 0, withheld_pages = 0, moving = 0, theirs = 0;
  for (PageId page = 0; page < slab_->pages(); ++page) {
    const std::uint32_t owner = slab_->owner(page);
    const std::string name = "page " + std::to_string(page);
    moving += filling(page) ? 1 : 0;
    if (owner == Slab::kNoOwner) {
      ++free;
      found.expect(!filling(page), name + ": free but being filled");
    } else if (owner == kStaging) {
      ++staging;
    } else if (owner == kWithheld) {
      ++withheld_pages;
      found.expect(!filling(page), name + ": withheld but being filled");
    } else if (owner == kOrphan) {
      ++orphans;
      found.expect(filling(page), name + ": an orphan that nothing fills");
    } else {
      ++theirs;
      found.expect(owner < state_.size(), name + ": its owner does not exist");
    }
  }
  found.equal(slab_->free_pages(), free, "free pages");
  found.equal(staging_, staging, "staging pages");
  found.equal(withheld(), withheld_pages, "withheld pages");
  found.equal(orphans_, orphans, "orphans");
  found.equal(in_flight_, moving, "pages in flight");
  // With the pages of experts counted from both sides, free + owned + staging + orphans is the slab.
  found.equal(owned, theirs, "pages held by experts");
  return found.text();
}

}  // namespace moechat
