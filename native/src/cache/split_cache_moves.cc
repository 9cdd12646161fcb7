// Planning, and what becomes of pages: the part of the cache that moves blocks.
#include <algorithm>
#include <cstddef>
#include <limits>
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
  if (want.preload) return 0;
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
  plan->preload = want.preload;
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

// The surplus expert of a layer with the lowest key; of equal ones the lowest number. Number -1: there is
// none.
SplitExpertCache::Candidate SplitExpertCache::lowest(std::int32_t layer) const {
  Candidate& found = lowest_[size_of(layer)];
  const std::uint64_t stamp = policy_->stamp(layer) + 1;
  if (known_[size_of(layer)] == stamp) return found;
  known_[size_of(layer)] = stamp;
  found = {0, -1};
  if (layer_surplus_[size_of(layer)] == 0) return found;
  const double* keys = policy_->keys(layer);
  const Expert* const experts = state_.data() + place(layer, 0);
  for (std::int32_t expert = 0; expert < experts_; ++expert) {
    if (experts[expert].surplus > 0 && (found.expert < 0 || keys[expert] < found.key)) {
      found = {keys[expert], expert};
    }
  }
  return found;
}

// The same of those that this want may take and has not taken yet.
SplitExpertCache::Candidate SplitExpertCache::lowest_left(const Want& want, std::int32_t layer) const {
  const Candidate first = lowest(layer);
  if (first.expert < 0 ||
      (may_rob(want, layer, first.expert) && taken_[place(layer, first.expert)] != taking_)) {
    return first;
  }
  Candidate found{0, -1};
  const double* keys = policy_->keys(layer);
  for (std::int32_t expert = 0; expert < experts_; ++expert) {
    if (taken_[place(layer, expert)] == taking_ || !may_rob(want, layer, expert)) continue;
    if (found.expert < 0 || keys[expert] < found.key) found = {keys[expert], expert};
  }
  return found;
}

// Lists the layers that the want may take from. The layer at work comes first: its next turn is a whole pass
// away.
void SplitExpertCache::list_layers(const Want& want) const {
  if (++taking_ == 0) {
    std::fill(taken_.begin(), taken_.end(), 0);
    taking_ = 1;
  }
  reach_.clear();
  left_.clear();
  std::int32_t layer = want.at;
  for (std::int32_t count = 0; count < layers_; ++count, layer = next_farthest(layer)) {
    if (layer_surplus_[size_of(layer)] > 0) {
      const Candidate found = lowest_left(want, layer);
      if (found.expert >= 0) {
        reach_.push_back(layer);
        left_.push_back(found);
      }
    }
    if (want.prefetch && layer == want.layer) return;
  }
}

// REQUIRES: there is one, and list_layers has been called.
Victim SplitExpertCache::next_victim(const Want& want) const {
  std::size_t chosen = 0;
  if (policy_->comparable() || rules_.lowest_victims) {
    std::size_t cheapest = 0;
    for (std::size_t i = 1; i < left_.size(); ++i) {
      if (left_[i].key < left_[cheapest].key) cheapest = i;
    }
    const double clear = rules_.lowest_victims ? 0 : kClear;
    if (left_[cheapest].key + clear < left_[0].key) chosen = cheapest;
  }
  const std::int32_t layer = reach_[chosen];
  const std::int32_t expert = left_[chosen].expert;
  taken_[place(layer, expert)] = taking_;
  left_[chosen] = lowest_left(want, layer);
  if (left_[chosen].expert < 0) {
    reach_.erase(reach_.begin() + static_cast<std::ptrdiff_t>(chosen));
    left_.erase(left_.begin() + static_cast<std::ptrdiff_t>(chosen));
  }
  return {layer, expert, at(layer, expert).surplus};
}

void SplitExpertCache::choose_victims(const Want& want, std::int64_t need, Plan* plan) const {
  if (need <= 0) return;
  list_layers(want);
  while (need > 0) {
    Victim victim = next_victim(want);
    victim.blocks = static_cast<std::int32_t>(std::min<std::int64_t>(need, victim.blocks));
    plan->victims.push_back(victim);
    need -= victim.blocks;
  }
}

double SplitExpertCache::cheapest(std::int32_t at_layer) const {
  check_layer("at", at_layer);
  if (surplus_ == 0) return std::numeric_limits<double>::infinity();
  list_layers({at_layer, at_layer, nullptr, 0, false, 1});
  const Victim victim = next_victim({at_layer, at_layer, nullptr, 0, false, 1});
  return policy_->keys(victim.layer)[victim.expert];
}

void SplitExpertCache::commit(Plan* plan) {
  if (plan->version != version_) {
    throw std::logic_error("the cache has changed since the plan was made; plan again");
  }
  ++version_;
  for (const Victim& victim : plan->victims) evict(victim);
  const auto flags = static_cast<std::uint8_t>(
      (plan->prefetch ? kFilling | kFresh | kSpeculative : kFilling) | (plan->preload ? kPreload : 0));
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

std::int64_t SplitExpertCache::give_up(std::int32_t layer, std::int32_t expert, std::int32_t from) {
  check_layer("layer", layer);
  mark(&expert, 1);
  if (from < 0) throw std::invalid_argument("from is " + std::to_string(from) + "; it cannot be negative");
  const std::size_t where = place(layer, expert);
  const Expert& state = state_[where];
  if (state.pins > 0 || state.assigned <= from || state.resident != state.assigned) return 0;
  ++version_;
  for (std::int32_t slot = 0; from == 0 && state.kept && slot < kept_count_[size_of(layer)]; ++slot) {
    if (kept_[place(layer, slot)] == expert) unkeep(layer, slot);
  }
  const std::int32_t freed = state.assigned - from;
  evict({layer, expert, freed});
  return freed;
}

// The layer that gives up its lowest surplus expert next; -1: none has any. after: the one that did so last.
std::int32_t SplitExpertCache::next_to_give(std::int32_t after) const {
  std::int32_t found = -1;
  for (std::int32_t step = 1; step <= layers_; ++step) {
    const std::int32_t layer = (after + step) % layers_;
    if (layer_surplus_[size_of(layer)] == 0) continue;
    if (!policy_->comparable()) return layer;
    if (found < 0 || lowest(layer).key < lowest(found).key) found = layer;
  }
  return found;
}

std::int64_t SplitExpertCache::withhold(std::int64_t pages) {
  if (pages < 0) {
    throw std::invalid_argument(std::to_string(pages) + " pages cannot be withheld");
  }
  check_targets(targets_, slab_->pages() - pages);
  ++version_;
  while (withheld() > pages) {
    slab_->give(withheld_.back());
    withheld_.pop_back();
  }
  std::int32_t layer = layers_ - 1;
  while (slab_->free_pages() < pages - withheld()) {
    layer = next_to_give(layer);
    if (layer < 0) break;
    const std::int32_t expert = lowest(layer).expert;
    const std::int64_t lacks = pages - withheld() - slab_->free_pages();
    const std::int32_t surplus = at(layer, expert).surplus;
    evict({layer, expert, static_cast<std::int32_t>(std::min<std::int64_t>(lacks, surplus))});
  }
  while (withheld() < pages && slab_->free_pages() > 0) {
    withheld_.push_back(slab_->take(kWithheld));
    slab_->discard(withheld_.back());
  }
  return withheld();
}

// Takes `block` and all behind it from the expert.
void SplitExpertCache::drop_from(std::size_t where, std::int32_t block) {
  Expert& expert = state_[where];
  while (expert.assigned > block) {
    PageId& slot = pages_[spot(where, --expert.assigned)];
    const PageId page = slot;
    slot = kNoPage;
    if ((flags_[page] & kFresh) != 0) {
      counters_.prefetch_wasted += (flags_[page] & kPreload) == 0 ? 1 : 0;
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
    ++((flags_[page] & kPreload) != 0       ? counters_.preloaded
       : (flags_[page] & kSpeculative) != 0 ? counters_.fetched_prefetch
                                            : counters_.fetched_demand);
  }
  const std::uint32_t owner = slab_->owner(page);
  if (owner == kStaging || owner == Slab::kNoOwner) return false;
  if ((flags_[page] & kPreload) != 0) clear_fresh(page, owner);
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
