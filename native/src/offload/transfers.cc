#include "offload/transfers.h"

#include <algorithm>
#include <cerrno>
#include <exception>

#include "link/mutation.h"

namespace moechat {

Transfers::Transfers(SplitExpertCache* cache, Slab* slab, Link* link)
    : cache_(cache), slab_(slab), link_(link), flights_(static_cast<std::size_t>(slab->pages())) {
  link_->open(static_cast<std::uint32_t>(slab->pages()));
  // Between a commit and its transfers nothing may fail for want of memory.
  queue_.reserve(flights_.size());
  completions_.reserve(flights_.size());
  arrivals_.reserve(flights_.size());
}

std::int64_t Transfers::offset(std::int32_t expert, std::int32_t block) const {
  return (std::int64_t{expert} * cache_->blocks() + block) * slab_->page_bytes();
}

std::string Transfers::describe(std::int32_t layer, std::int32_t expert, std::int32_t block) const {
  return "block " + std::to_string(block) + " of expert " + std::to_string(expert) + " of expert layer " +
         std::to_string(layer) + " (" + link_->describe(layer, offset(expert, block)) + ")";
}

Transfer Transfers::transfer(PageId page, const Flight& flight, Priority priority) {
  flights_[page] = flight;
  return {page,    flight.layer, offset(flight.expert, flight.block), slab_->page_bytes(), slab_->data(page),
          priority};
}

bool Transfers::submit() {
  try {
    follow_readers();
    link_->submit(queue_.data(), static_cast<std::int64_t>(queue_.size()));
    return true;
  } catch (const std::exception& error) {
    refusal_ = error.what();
    return false;
  }
}

void Transfers::follow_readers() {
  if (table_ == nullptr || !table_->is_open()) return;
  read_.clear();
  for (const Transfer& transfer : queue_) {
    if (table_->exposed(transfer.slot)) read_.push_back(transfer.slot);
  }
  if (read_.empty()) return;
  // Wait 27: for kernels that look pages up.
  MOECHAT_WAIT(27, link_->stream_order()->reads_first(table_->stream(), read_.data(),
                                                      static_cast<std::int64_t>(read_.size())));
}

void Transfers::note_peak() {
  peak_ = std::max(peak_, slab_->pages() - slab_->free_pages() - cache_->withheld());
}

std::int64_t Transfers::fetch(Plan* plan, Priority priority, std::uint64_t pass) {
  cache_->commit(plan);
  note_peak();
  const Kind kind = plan->prefetch ? Kind::kPrefetch : Kind::kDemand;
  queue_.clear();
  for (const Fetch& fetch : plan->fetches) {
    queue_.push_back(transfer(fetch.page, {kind, fetch.layer, fetch.expert, fetch.block, pass}, priority));
  }
  if (queue_.empty() || submit()) return static_cast<std::int64_t>(queue_.size());
  // As if they had failed: that is allowed for pinned experts too. The last block first, so that each is the
  // last of its expert.
  for (auto fetch = plan->fetches.rbegin(); fetch != plan->fetches.rend(); ++fetch) {
    flights_[fetch->page].kind = Kind::kNone;
    cache_->landed(fetch->page, ECANCELED);
  }
  return 0;
}

PageId Transfers::stage(std::int32_t layer, std::int32_t expert, std::int32_t block, std::uint64_t pass) {
  const PageId page = cache_->take_staging(layer);
  if (page == kNoPage) return kNoPage;
  note_peak();
  queue_.assign(1, transfer(page, {Kind::kStaging, layer, expert, block, pass}, Priority::kDemand));
  if (submit()) return page;
  flights_[page].kind = Kind::kNone;
  cache_->landed(page, ECANCELED);
  cache_->give_staging(page);
  return kNoPage;
}

const std::vector<Transfers::Arrival>& Transfers::poll() {
  arrivals_.clear();
  if (cache_->in_flight() == 0) return arrivals_;
  completions_.clear();
  link_->poll(&completions_);
  for (const Completion& completion : completions_) {
    Flight& flight = flights_[completion.slot];
    const bool owned = cache_->landed(completion.slot, completion.error);
    arrivals_.push_back({completion.slot, completion.error, owned, flight});
    flight.kind = Kind::kNone;
  }
  return arrivals_;
}

bool Transfers::cancel(PageId page) {
  // Wait 20: for a transfer that has started.
  bool stopped = true;
  MOECHAT_WAIT(20, stopped = link_->cancel(page));
  if (!stopped) return false;
  flights_[page].kind = Kind::kNone;
  cache_->cancelled(page);
  return true;
}

std::int64_t Transfers::cancel_stale(std::int32_t layer, const std::uint8_t* keep) {
  if (cache_->in_flight() == 0) return 0;
  cache_->stale_prefetches(layer, &stale_);
  std::int64_t count = 0;
  std::int32_t refused = -1;
  for (const Fetch& fetch : stale_) {
    if (fetch.expert == refused || (keep != nullptr && keep[fetch.expert] != 0)) continue;
    if (cancel(fetch.page)) {
      ++count;
    } else {
      refused = fetch.expert;
    }
  }
  return count;
}

void Transfers::cancel_queued(std::int32_t layer, std::int32_t expert) {
  for (std::int32_t block = cache_->assigned(layer, expert); block-- > cache_->resident(layer, expert);) {
    const PageId page = cache_->page(layer, expert, block);
    if (!cache_->filling(page) || !cancel(page)) return;
  }
}

void Transfers::promote(std::int32_t layer, std::int32_t expert, Priority priority) {
  const std::int32_t end = cache_->assigned(layer, expert);
  for (std::int32_t block = cache_->resident(layer, expert); block < end; ++block) {
    const PageId page = cache_->page(layer, expert, block);
    if (cache_->filling(page)) link_->promote(page, priority);
  }
}

}  // namespace moechat
