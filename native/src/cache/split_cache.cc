#include "cache/split_cache.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <stdexcept>

namespace moechat {
namespace {

// Versions of two caches never meet, so that a plan of one is refused by the other.
std::uint64_t first_version() {
  static std::atomic<std::uint64_t> caches{0};
  return (++caches << 40) + 1;
}

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

}  // namespace

std::string SplitExpertCache::name_of(std::int32_t layer, std::int32_t expert) {
  return "expert " + std::to_string(expert) + " of layer " + std::to_string(layer);
}

SplitExpertCache::SplitExpertCache(std::int32_t layers, std::int32_t experts, std::int32_t blocks, Slab* slab,
                                   EvictionPolicy* policy, const std::vector<LayerTarget>& targets,
                                   std::int64_t reserve, const CacheRules& rules)
    : layers_(layers),
      experts_(experts),
      blocks_(blocks),
      slab_(slab),
      policy_(policy),
      targets_(targets),
      reserve_(reserve),
      rules_(rules),
      version_(first_version()) {
  constexpr std::int64_t kMost = std::int64_t{1} << 28;
  if (layers < 1 || experts < 1 || blocks < 1 || std::int64_t{layers} * experts > kMost / blocks) {
    refuse("layers, experts and blocks are " + std::to_string(layers) + ", " + std::to_string(experts) +
           " and " + std::to_string(blocks) + "; each must be at least 1 and their product at most " +
           std::to_string(kMost));
  }
  if (policy->layers() != layers || policy->experts() != experts) {
    refuse("the policy is for " + std::to_string(policy->layers()) + " layers of " +
           std::to_string(policy->experts()) + " experts; the cache has " + std::to_string(layers) + " of " +
           std::to_string(experts));
  }
  if (slab->free_pages() != slab->pages()) refuse("the slab has pages in use");
  check_targets(targets, slab->pages());
  const std::size_t all = size_of(layers) * size_of(experts);
  state_.resize(all);
  for (std::size_t where = 0; where < all; ++where) {
    state_[where].layer = static_cast<std::int32_t>(where / size_of(experts));
  }
  pages_.resize(all * size_of(blocks), kNoPage);
  block_.resize(size_of(slab->pages()));
  flags_.resize(size_of(slab->pages()));
  kept_.resize(all);
  kept_count_.resize(size_of(layers));
  accesses_.resize(size_of(layers));
  if (rules.admission == Admission::kBest) trials_.assign(size_of(layers), AdmissionTrial(experts));
  layer_surplus_.resize(size_of(layers));
  layer_pending_.resize(size_of(layers));
  marks_.resize(size_of(experts));
  candidates_.reserve(size_of(experts));
  lowest_.resize(size_of(layers));
  known_.resize(size_of(layers));
  reach_.reserve(size_of(layers));
  left_.reserve(size_of(layers));
  taken_.resize(all);
  staging_plan_.victims.reserve(1);
}

void SplitExpertCache::fix(std::int32_t layer, std::int32_t expert, const std::vector<PageId>& pages) {
  check_layer("layer", layer);
  mark(&expert, 1);
  const std::size_t where = place(layer, expert);
  Expert& fixed = state_[where];
  if (fixed.assigned > 0 || fixed.fixed) refuse(name_of(layer, expert) + " has blocks already");
  const bool outside = std::all_of(pages.begin(), pages.end(),
                                   [&](PageId page) { return page >= slab_->pages() && page != kNoPage; });
  if (pages.size() != size_of(blocks_) || !outside) {
    refuse(name_of(layer, expert) + " needs a page outside of the slab for each of its blocks");
  }
  ++version_;
  std::copy(pages.begin(), pages.end(), pages_.begin() + static_cast<std::ptrdiff_t>(spot(where, 0)));
  fixed.resident = fixed.assigned = blocks_;
  fixed.pins = 1;
  fixed.fixed = true;
  update_surplus(where);
}

void SplitExpertCache::check_targets(const std::vector<LayerTarget>& targets, std::int64_t pages) const {
  if (reserve_ < 1) refuse("reserve is " + std::to_string(reserve_) + "; it must be at least 1");
  if (targets.size() != size_of(layers_)) {
    refuse("there are targets for " + std::to_string(targets.size()) + " layers; the cache has " +
           std::to_string(layers_));
  }
  std::int64_t wanted = 0;
  for (std::int32_t layer = 0; layer < layers_; ++layer) {
    const LayerTarget& target = targets[size_of(layer)];
    if (target.experts < 0 || target.experts > experts_ ||
        (target.experts > 0 && (target.blocks < 1 || target.blocks > blocks_))) {
      refuse("the target of layer " + std::to_string(layer) + " is " + std::to_string(target.experts) +
             " experts of " + std::to_string(target.blocks) + " blocks; it must be 0 to " +
             std::to_string(experts_) + " experts of 1 to " + std::to_string(blocks_) + " blocks");
    }
    if (target.experts > 0) wanted += std::int64_t{target.experts} * target.blocks;
  }
  if (wanted > pages - reserve_) {
    refuse("the targets take " + std::to_string(wanted) + " pages; of " + std::to_string(pages) + " pages " +
           std::to_string(reserve_) +
           " are reserved for blocks on their way. Lower the targets or raise the budget");
  }
}

void SplitExpertCache::check_layer(const char* name, std::int32_t layer) const {
  if (layer < 0 || layer >= layers_) {
    refuse(std::string(name) + " is " + std::to_string(layer) + "; layers are 0 to " +
           std::to_string(layers_ - 1));
  }
}

// Marks these experts, and no others, until the next call.
void SplitExpertCache::mark(const std::int32_t* experts, std::int64_t count) const {
  if (++mark_ == 0) {
    std::fill(marks_.begin(), marks_.end(), 0);
    mark_ = 1;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t expert = experts[i];
    if (expert < 0 || expert >= experts_) {
      refuse("expert is " + std::to_string(expert) + "; a layer has experts 0 to " +
             std::to_string(experts_ - 1));
    }
    if (marked(expert)) refuse("expert " + std::to_string(expert) + " is named twice");
    marks_[size_of(expert)] = mark_;
  }
}

// ---- an access

void SplitExpertCache::access(std::int32_t layer, const std::int32_t* experts, const std::int32_t* tokens,
                              std::int64_t count, std::int64_t pass_tokens, HitKind* kinds) {
  check_layer("layer", layer);
  mark(experts, count);
  if (pass_tokens < 1) refuse("pass_tokens is " + std::to_string(pass_tokens) + "; it must be at least 1");
  for (std::int64_t i = 0; i < count; ++i) {
    if (tokens[i] < 1) {
      refuse("expert " + std::to_string(experts[i]) + " is chosen by " + std::to_string(tokens[i]) +
             " tokens; it must be at least 1");
    }
  }
  ++version_;
  policy_->access(layer, experts, tokens, count, pass_tokens);
  if (pass_tokens == 1 && !trials_.empty()) {
    in_pages_.clear();
    std::copy_if(experts, experts + count, std::back_inserter(in_pages_),
                 [&](std::int32_t expert) { return !is_fixed(layer, expert); });
    trials_[size_of(layer)].access(in_pages_.data(), static_cast<std::int64_t>(in_pages_.size()),
                                   policy_->keys(layer), targets_[size_of(layer)].experts);
  }
  known_[size_of(layer)] = 0;
  const std::uint64_t number = ++accesses_[size_of(layer)];
  std::int64_t* hits = pass_tokens == 1 ? counters_.hits : counters_.prefill_hits;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::size_t where = place(layer, experts[i]);
    Expert& expert = state_[where];
    const std::int32_t fresh = expert.fresh;
    HitKind kind = HitKind::kMiss;
    if (expert.assigned == blocks_ && fresh > 0) {
      kind = HitKind::kPrefetch;
    } else if (expert.resident == blocks_) {
      kind = HitKind::kFull;
    } else if (expert.assigned > 0) {
      kind = HitKind::kTop;
    }
    // Ready blocks that no prefetch has brought: a count from the pages only where it is not obvious.
    std::int32_t ready = expert.resident;
    if (fresh > 0 || expert.resident != expert.assigned) {
      ready = 0;
      for (std::int32_t block = 0; block < expert.assigned; ++block) {
        const PageId page = pages_[spot(where, block)];
        if ((flags_[page] & (kFilling | kFresh)) == 0) ++ready;
        clear_fresh(page, where);
      }
    }
    ++hits[static_cast<int>(kind)];
    if (pass_tokens == 1) {
      counters_.blocks_wanted += blocks_;
      counters_.blocks_resident += ready;
      counters_.blocks_prefetched += fresh;
    }
    ++expert.pins;
    expert.access = number;
    update_surplus(where);
    if (kinds != nullptr) kinds[i] = kind;
  }
}

void SplitExpertCache::release(std::int32_t layer, std::int32_t expert) {
  check_layer("layer", layer);
  mark(&expert, 1);
  const std::size_t where = place(layer, expert);
  Expert& released = state_[where];
  if (released.pins == (released.fixed ? 1 : 0)) {
    throw std::logic_error(name_of(layer, expert) + " is not pinned");
  }
  ++version_;
  --released.pins;
  if (released.fresh > 0) {
    for (std::int32_t block = 0; block < released.resident; ++block) {
      clear_fresh(pages_[spot(where, block)], where);
    }
  }
  const std::int32_t room = targets_[size_of(layer)].experts;
  if (!released.kept && !released.fixed && room > 0 && released.assigned > 0) {
    if (kept_count_[size_of(layer)] < room) {
      keep(layer, expert);
    } else {
      // Of equal keys the higher number stays, as among victims: else the order in which blocks happen to
      // arrive, and with it their experts are released, would decide.
      const double* keys = policy_->keys(layer);
      const std::uint64_t now = accesses_[size_of(layer)];
      const bool always = admits_always(layer);
      const auto below = [&](std::int32_t one, std::int32_t other) {
        if (always) {
          const bool kept = at(layer, one).access == now;
          if (kept != (at(layer, other).access == now)) return !kept;
        }
        return keys[one] != keys[other] ? keys[one] < keys[other] : one < other;
      };
      std::int32_t lowest = 0;
      for (std::int32_t slot = 1; slot < room; ++slot) {
        if (below(kept_[place(layer, slot)], kept_[place(layer, lowest)])) lowest = slot;
      }
      if (below(kept_[place(layer, lowest)], expert)) {
        unkeep(layer, lowest);
        keep(layer, expert);
      }
    }
  }
  update_surplus(where);
}

bool SplitExpertCache::admits_always(std::int32_t layer) const {
  if (rules_.admission == Admission::kBest) return trials_[size_of(layer)].always();
  return rules_.admission == Admission::kAlways;
}

void SplitExpertCache::keep(std::int32_t layer, std::int32_t expert) {
  kept_[place(layer, kept_count_[size_of(layer)]++)] = expert;
  state_[place(layer, expert)].kept = true;
  update_surplus(place(layer, expert));
  ++counters_.admitted;
}

void SplitExpertCache::unkeep(std::int32_t layer, std::int32_t slot) {
  const std::size_t where = place(layer, kept_[place(layer, slot)]);
  kept_[place(layer, slot)] = kept_[place(layer, --kept_count_[size_of(layer)])];
  state_[where].kept = false;
  update_surplus(where);
}

void SplitExpertCache::protect_like(const SplitExpertCache& other) {
  ++version_;
  if (!trials_.empty() && !other.trials_.empty()) trials_ = other.trials_;
  for (std::int32_t layer = 0; layer < layers_; ++layer) {
    if (targets_[size_of(layer)].experts != other.targets_[size_of(layer)].experts) continue;
    for (std::int32_t slot = kept_count_[size_of(layer)]; slot-- > 0;) unkeep(layer, slot);
    for (std::int32_t slot = 0; slot < other.kept_count_[size_of(layer)]; ++slot) {
      keep(layer, other.kept_[place(layer, slot)]);
    }
  }
}

// To be called after every change of a field that surplus depends on, `resident` among them.
void SplitExpertCache::update_surplus(std::size_t where) {
  if (watched_ && noted_[where] == 0) {
    noted_[where] = 1;
    changed_.push_back(static_cast<std::uint32_t>(where));
  }
  Expert& expert = state_[where];
  const std::int32_t layer = expert.layer;
  std::int32_t surplus = 0;
  if (expert.pins == 0 && expert.resident == expert.assigned) {
    const std::int32_t floor = expert.kept ? targets_[size_of(layer)].blocks : 0;
    surplus = std::max(0, expert.resident - floor);
  }
  if (surplus != expert.surplus) known_[size_of(layer)] = 0;
  layer_surplus_[size_of(layer)] += surplus - expert.surplus;
  surplus_ += surplus - expert.surplus;
  expert.surplus = surplus;
}

void SplitExpertCache::clear_fresh(PageId page, std::size_t where) {
  if ((flags_[page] & kFresh) == 0) return;
  if ((flags_[page] & kFilling) != 0) --layer_pending_[size_of(state_[where].layer)];
  flags_[page] = static_cast<std::uint8_t>(flags_[page] & ~kFresh);
  --state_[where].fresh;
}

// ---- watching

void SplitExpertCache::watch() {
  watched_ = true;
  noted_.assign(state_.size(), 1);
  changed_.clear();
  changed_.reserve(state_.size());
  for (std::size_t where = state_.size(); where-- > 0;) changed_.push_back(static_cast<std::uint32_t>(where));
}

std::int64_t SplitExpertCache::next_changed() {
  if (changed_.empty()) return -1;
  const std::uint32_t where = changed_.back();
  changed_.pop_back();
  noted_[where] = 0;
  return where;
}

// ---- re-planning

void SplitExpertCache::set_targets(const std::vector<LayerTarget>& targets) {
  check_targets(targets, slab_->pages() - withheld());
  ++version_;
  targets_ = targets;
  const auto better = [](const Candidate& a, const Candidate& b) {
    return a.key != b.key ? a.key > b.key : a.expert > b.expert;
  };
  for (std::int32_t layer = 0; layer < layers_; ++layer) {
    const double* keys = policy_->keys(layer);
    candidates_.clear();
    for (std::int32_t expert = 0; expert < experts_; ++expert) {
      const Expert& state = at(layer, expert);
      if (!state.fixed && (state.kept || state.assigned > 0)) candidates_.push_back({keys[expert], expert});
    }
    const std::size_t room = std::min(size_of(targets[size_of(layer)].experts), candidates_.size());
    std::sort(candidates_.begin(), candidates_.end(), better);
    mark(nullptr, 0);
    for (std::size_t i = 0; i < room; ++i) marks_[size_of(candidates_[i].expert)] = mark_;
    for (std::int32_t slot = kept_count_[size_of(layer)]; slot-- > 0;) {
      if (!marked(kept_[place(layer, slot)])) unkeep(layer, slot);
    }
    for (std::size_t i = 0; i < room; ++i) {
      if (!at(layer, candidates_[i].expert).kept) keep(layer, candidates_[i].expert);
    }
    // The number of protected blocks may have changed for those that stay, too.
    for (std::int32_t slot = 0; slot < kept_count_[size_of(layer)]; ++slot) {
      update_surplus(place(layer, kept_[place(layer, slot)]));
    }
  }
}

}  // namespace moechat
