#include "offload/page_table.h"

namespace moechat {
namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

}  // namespace

PageTable::PageTable(SplitExpertCache* cache, std::int64_t pages)
    : cache_(cache),
      entries_(at(std::int64_t{cache->layers()} * cache->experts() * cache->blocks()), kNone),
      exposed_(at(pages)),
      users_(at(pages)) {
  removed_.reserve(at(pages));
  cache_->watch();
}

std::int64_t PageTable::changes(std::int32_t* index, std::int32_t* page, std::int64_t capacity) {
  std::int64_t count = 0;
  if (place_ >= 0 && !refresh(at(place_), index, page, capacity, &count)) return count;
  for (;;) {
    place_ = cache_->next_changed();
    if (place_ < 0 || !refresh(at(place_), index, page, capacity, &count)) return count;
  }
}

// False: the room did not suffice.
bool PageTable::refresh(std::size_t place, std::int32_t* index, std::int32_t* page, std::int64_t capacity,
                        std::int64_t* count) {
  const auto layer = static_cast<std::int32_t>(place / at(cache_->experts()));
  const auto expert = static_cast<std::int32_t>(place % at(cache_->experts()));
  const std::int32_t resident = cache_->resident(layer, expert);
  for (std::int32_t block = 0; block < cache_->blocks(); ++block) {
    const std::size_t spot = place * at(cache_->blocks()) + at(block);
    const std::int32_t now =
        block < resident ? static_cast<std::int32_t>(cache_->page(layer, expert, block)) : kNone;
    std::int32_t& entry = entries_[spot];
    if (entry == now) continue;
    if (*count == capacity) return false;
    if (entry != kNone) {
      --present_;
      if (--users_[at(entry)] == 0) removed_.push_back(static_cast<PageId>(entry));
    }
    if (now != kNone) {
      ++present_;
      ++users_[at(now)];
      exposed_[at(now)] = 1;
    }
    entry = now;
    index[*count] = static_cast<std::int32_t>(spot);
    page[(*count)++] = now;
  }
  return true;
}

void PageTable::close() {
  open_ = false;
  for (const PageId page : removed_) {
    if (users_[page] == 0) exposed_[page] = 0;
  }
  removed_.clear();
}

}  // namespace moechat
