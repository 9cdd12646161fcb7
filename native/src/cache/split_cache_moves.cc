// Planning, and what becomes of pages: the part of the cache that moves blocks.
#include <algorithm>
#include <stdexcept>

#include "cache/split_cache.h"

namespace moechat {

// A prefetch takes nothing that an earlier one has brought for the same layer, nor what it wants itself.
bool SplitExpertCache::may_rob(const Want& want, std::int32_t layer, std::int32_t expert) const {
  const Expert& state = at(layer, expert);
  return state.surplus > 0 && !(want.prefetch && layer == want.layer && (state.fresh > 0 || marked(expert)));
}

// Surplus blocks that this want may take; at least `enough` when there are more.
std::int64_t SplitExpertCache::within_reach(const Want& want, std::int64_t enough) const {
  if (!want.prefetch) return surplus_;
  std::int64_t found = 0;
  for (std::int32_t layer = want.at; layer != want.layer && found < enough; layer = next_farthest(layer)) {
    found += layer_surplus_[size_of(layer)];
  }
  for (std::int32_t expert = 0; expert < experts_ && found < enough; ++expert) {
    if (may_rob(want, want.layer, expert)) found += at(want.layer, expert).surplus;
  }
  return found;
}

void SplitExpertCache::plan(const Want& want, Plan* plan) const {
  check_layer("layer", want.layer);
  check_layer("at", want.at);
  mark(want.experts, want.count);
  plan->version = version_;
  plan->prefetch = want.prefetch;
  plan->victims.clear();
  plan->fetches.clear();
  plan->satisfied = 0;
  const auto lack = [&](std::int64_t i) {
    const std::int32_t end = want.ends == nullptr ? blocks_ : std::min(want.ends[i], blocks_);
    return std::max(0, end - at(want.layer, want.experts[i]).assigned);
  };
  std::int64_t missing = 0;
  for (std::int64_t i = 0; i < want.count; ++i) {
    const Expert& expert = at(want.layer, want.experts[i]);
    if (!want.prefetch && expert.pins == 0) {
      throw std::invalid_argument(name_of(want.layer, want.experts[i]) +
                                  " is demanded but not pinned; access it first");
    }
    missing += lack(i);
  }
  if (missing == 0) {
    plan->satisfied = want.count;
    return;
  }

  const std::int64_t most = std::min(missing, std::max<std::int64_t>(0, want.max_blocks));
  const std::int64_t free = slab_->free_pages();
  std::int64_t left = most <= free ? most : std::min(most, free + within_reach(want, most - free));
  bool leading = true;
  for (std::int64_t i = 0; i < want.count; ++i) {
    const std::int32_t expert = want.experts[i];
    const std::int32_t assigned = at(want.layer, expert).assigned;
    const std::int32_t lacks = lack(i);
    std::int32_t taken = static_cast<std::int32_t>(std::min<std::int64_t>(lacks, left));
    if (want.whole && taken < lacks) taken = 0;
    for (std::int32_t block = assigned; block < assigned + taken; ++block) {
      plan->fetches.push_back({kNoPage, want.layer, expert, block});
    }
    left -= taken;
    leading = leading && taken == lacks;
    if (leading) ++plan->satisfied;
  }
  choose_victims(want, static_cast<std::int64_t>(plan->fetches.size()) - free, plan);
}

void SplitExpertCache::choose_victims(const Want& want, std::int64_t need, Plan* plan) const {
  const auto later = [](const Candidate& a, const Candidate& b) {
    return a.key != b.key ? a.key > b.key : a.expert > b.expert;
  };
  // The layer at work comes first: its next turn is a whole pass away.
  for (std::int32_t layer = want.at; need > 0; layer = next_farthest(layer)) {
    if (layer_surplus_[size_of(layer)] == 0) continue;
    const double* keys = policy_->keys(layer);
    candidates_.clear();
    for (std::int32_t expert = 0; expert < experts_; ++expert) {
      if (may_rob(want, layer, expert)) candidates_.push_back({keys[expert], expert});
    }
    std::make_heap(candidates_.begin(), candidates_.end(), later);
    while (need > 0 && !candidates_.empty()) {
      const std::int32_t expert = candidates_.front().expert;
      std::pop_heap(candidates_.begin(), candidates_.end(), later);
      candidates_.pop_back();
      const std::int32_t blocks =
          static_cast<std::int32_t>(std::min<std::int64_t>(need, at(layer, expert).surplus));
      plan->victims.push_back({layer, expert, blocks});
      need -= blocks;
    }
  }
}

void SplitExpertCache::commit(Plan* plan) {
  if (plan->version != version_) {
    throw std::logic_error("the cache has changed since the plan was made; plan again");
  }
  ++version_;
  for (const Victim& victim : plan->victims) evict(victim);
  const auto flags = static_cast<std::uint8_t>(plan->prefetch ? kFilling | kFresh | kSpeculative : kFilling);
  for (std::size_t i = 0; i < plan->fetches.size();) {
    const Fetch first = plan->fetches[i];
    const std::size_t where = place(first.layer, first.expert);
    Expert& expert = state_[where];
    for (; i < plan->fetches.size() && plan->fetches[i].expert == first.expert; ++i) {
      Fetch& fetch = plan->fetches[i];
      fetch.page = slab_->take(static_cast<std::uint32_t>(where));
      pages_[spot(where, expert.assigned)] = fetch.page;
      block_[fetch.page] = expert.assigned++;
      flags_[fetch.page] = flags;
      ++in_flight_;
      if (plan->prefetch) {
        ++expert.fresh;
        ++layer_pending_[size_of(first.layer)];
      }
    }
    update_surplus(where);
  }
}

void SplitExpertCache::evict(const Victim& victim) {
  const std::size_t where = place(victim.layer, victim.expert);
  counters_.evicted += victim.blocks;
  drop_from(where, state_[where].assigned - victim.blocks);
}

// Takes `block` and all behind it from the expert.
void SplitExpertCache::drop_from(std::size_t where, std::int32_t block) {
  Expert& expert = state_[where];
  while (expert.assigned > block) {
    PageId& slot = pages_[spot(where, --expert.assigned)];
    const PageId page = slot;
    slot = kNoPage;
    if ((flags_[page] & kFresh) != 0) {
      ++counters_.prefetch_wasted;
      clear_fresh(page, where);
    }
    if ((flags_[page] & kFilling) != 0) {
      slab_->set_owner(page, kOrphan);
      ++orphans_;
    } else {
      slab_->give(page);
    }
  }
  expert.resident = std::min(expert.resident, block);
  update_surplus(where);
}

PageId SplitExpertCache::take_staging(std::int32_t at_layer) {
  check_layer("at", at_layer);
  if (available() == 0) return kNoPage;
  ++version_;
  if (slab_->free_pages() == 0) {
    const Want want{at_layer, at_layer, nullptr, 0, false, 1};
    staging_plan_.victims.clear();
    choose_victims(want, 1, &staging_plan_);
    evict(staging_plan_.victims.front());
  }
  const PageId page = slab_->take(kStaging);
  flags_[page] = kFilling;
  ++in_flight_;
  ++staging_;
  return page;
}

void SplitExpertCache::give_staging(PageId page) {
  if (page >= slab_->pages() || slab_->owner(page) != kStaging) {
    throw std::logic_error("page " + std::to_string(page) + " is not a staging page");
  }
  ++version_;
  --staging_;
  if ((flags_[page] & kFilling) != 0) {
    slab_->set_owner(page, kOrphan);
    ++orphans_;
  } else {
    slab_->give(page);
  }
}

void SplitExpertCache::finish_transfer(PageId page) {
  if (page >= slab_->pages() || !filling(page)) {
    throw std::logic_error("page " + std::to_string(page) + " is not being filled");
  }
  ++version_;
  --in_flight_;
  const std::uint32_t owner = slab_->owner(page);
  if ((flags_[page] & kFresh) != 0) --layer_pending_[size_of(state_[owner].layer)];
  flags_[page] = static_cast<std::uint8_t>(flags_[page] & ~kFilling);
  if (owner == kOrphan) {
    slab_->give(page);
    --orphans_;
  }
}

bool SplitExpertCache::landed(PageId page, int error) {
  finish_transfer(page);
  if (error == 0) {
    ++((flags_[page] & kSpeculative) != 0 ? counters_.fetched_prefetch : counters_.fetched_demand);
  }
  const std::uint32_t owner = slab_->owner(page);
  if (owner == kStaging || owner == Slab::kNoOwner) return false;
  if (error != 0) {
    drop_from(owner, block_[page]);
    return true;
  }
  Expert& expert = state_[owner];
  if (block_[page] == expert.resident) {
    while (expert.resident < expert.assigned && !filling(pages_[spot(owner, expert.resident)])) {
      ++expert.resident;
    }
    update_surplus(owner);
  }
  return true;
}

void SplitExpertCache::cancelled(PageId page) {
  finish_transfer(page);
  const std::uint32_t owner = slab_->owner(page);
  if (owner == kStaging || owner == Slab::kNoOwner) return;
  clear_fresh(page, owner);  // nothing was moved, so nothing was wasted
  drop_from(owner, block_[page]);
}

void SplitExpertCache::stale_prefetches(std::int32_t layer, std::vector<Fetch>* out) const {
  check_layer("layer", layer);
  out->clear();
  if (layer_pending_[size_of(layer)] == 0) return;
  for (std::int32_t expert = 0; expert < experts_; ++expert) {
    const Expert& state = at(layer, expert);
    if (state.pins > 0 || state.fresh == 0) continue;
    for (std::int32_t block = state.assigned; block-- > state.resident;) {
      const PageId page = pages_[spot(place(layer, expert), block)];
      if (!filling(page)) continue;
      // Cancelling anything before a block that was demanded would take that block too.
      if ((flags_[page] & kFresh) == 0) break;
      out->push_back({page, layer, expert, block});
    }
  }
}

}  // namespace moechat
