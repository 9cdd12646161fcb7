#include "memory/slab.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>

namespace moechat {
namespace {

constexpr std::int64_t kSmallPage = 4096;
constexpr std::int64_t kHugePage = std::int64_t{1} << 21;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 46;  // half of the address space of a process

// Sum of one field ("Rss:", in kB) over the mappings inside [begin, end).
std::int64_t sum_of_field(const unsigned char* begin, std::int64_t bytes, const char* field) {
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  const std::uintptr_t last = first + static_cast<std::uintptr_t>(bytes);
  const std::size_t length = std::strlen(field);
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  std::int64_t sum = 0;
  while (std::getline(smaps, line)) {
    unsigned long long from = 0, to = 0, kilobytes = 0;
    char dash = 0;
    if (std::sscanf(line.c_str(), "%llx%c%llx ", &from, &dash, &to) == 3 && dash == '-') {
      inside = from >= first && to <= last;
    } else if (inside && line.compare(0, length, field) == 0 &&
               std::sscanf(line.c_str() + length, "%llu", &kilobytes) == 1) {
      sum += static_cast<std::int64_t>(kilobytes) * 1024;
    }
  }
  return sum;
}

}  // namespace

Slab::Slab(std::int64_t pages, std::int64_t page_bytes, unsigned char* memory)
    : pages_(pages), page_bytes_(page_bytes), base_(memory), process_(getpid()) {
  if (page_bytes < 1 || (memory == nullptr && page_bytes % kSmallPage != 0)) {
    throw std::invalid_argument("pages of " + std::to_string(page_bytes) +
                                " bytes; it must be a positive multiple of 4096");
  }
  if (pages < 1 || pages >= kNoPage || pages > kMostBytes / page_bytes) {
    throw std::invalid_argument(std::to_string(pages) + " pages of " + std::to_string(page_bytes) +
                                " bytes; there must be at least 1, fewer than 2^32, and at most 2^46 bytes");
  }
  if (memory == nullptr) map();
  // Allocated after the checks: for more pages than the system has memory for, these lists alone would take
  // gigabytes.
  try {
    const auto count = static_cast<std::size_t>(pages);
    owner_.assign(count, kNoOwner);
    generation_.assign(count, 0);
    free_.resize(count);
    for (std::size_t i = 0; i < count; ++i) free_[i] = static_cast<PageId>(count - 1 - i);
  } catch (...) {
    if (mapping_ != nullptr) munmap(mapping_, static_cast<std::size_t>(mapped_bytes_));
    throw;
  }
}

unsigned char* Slab::no_memory() { return reinterpret_cast<unsigned char*>(kSmallPage); }

void Slab::map() {
  // The pages start at the boundary of a huge page, between two inaccessible ranges: no neighbour is merged
  // into their mapping, and a write beyond the end faults.
  const std::int64_t bytes = pages_ * page_bytes_;
  mapped_bytes_ = bytes + kHugePage + 2 * kSmallPage;
  void* const whole = mmap(nullptr, static_cast<std::size_t>(mapped_bytes_), PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  bool refused = whole == MAP_FAILED;
  if (!refused) {
    mapping_ = static_cast<unsigned char*>(whole);
    const auto huge = static_cast<std::uintptr_t>(kHugePage);
    const std::uintptr_t start =
        (reinterpret_cast<std::uintptr_t>(whole) + static_cast<std::uintptr_t>(kSmallPage) + huge - 1) /
        huge * huge;
    base_ = reinterpret_cast<unsigned char*>(start);
    // A separate mapping, so that the system counts its size and can refuse it.
    refused = mmap(base_, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED;
  }
  if (refused) {
    const int error = errno;
    if (mapping_ != nullptr) munmap(mapping_, static_cast<std::size_t>(mapped_bytes_));
    throw std::runtime_error("the system refused memory for " + std::to_string(pages_) + " pages of " +
                             std::to_string(page_bytes_) + " bytes, " + std::to_string(bytes) +
                             " bytes in all: " + std::strerror(error));
  }
  // Both calls are hints. A child process does not need the pages. If it shared them, every later write would
  // copy a page, and a read in flight could end in the wrong copy.
  madvise(base_, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
  madvise(base_, static_cast<std::size_t>(bytes), MADV_DONTFORK);
}

Slab::~Slab() {
  // In a child process other memory may be at these addresses.
  if (mapping_ != nullptr && !leaked_ && getpid() == process_) {
    munmap(mapping_, static_cast<std::size_t>(mapped_bytes_));
  }
}

PageId Slab::add_outside(const unsigned char* record) {
  const std::int64_t number = pages_ + static_cast<std::int64_t>(outside_.size());
  if (number >= kNoPage) throw std::invalid_argument("there are too many records outside of the slab");
  outside_.push_back(record);
  return static_cast<PageId>(number);
}

PageId Slab::take(std::uint32_t owner) {
  if (owner == kNoOwner) throw std::logic_error("a page needs an owner");
  if (free_.empty()) return kNoPage;
  const PageId page = free_.back();
  free_.pop_back();
  owner_[page] = owner;
  ++generation_[page];
  return page;
}

void Slab::give(PageId page) {
  if (page >= pages_) {
    throw std::logic_error("page " + std::to_string(page) + " does not exist; the slab has " +
                           std::to_string(pages_));
  }
  if (owner_[page] == kNoOwner) {
    throw std::logic_error("page " + std::to_string(page) + " is free already");
  }
  owner_[page] = kNoOwner;
  free_.push_back(page);
}

void Slab::discard(PageId page) {
  if (mapping_ != nullptr) madvise(data(page), static_cast<std::size_t>(page_bytes_), MADV_DONTNEED);
}

void Slab::take_next(const std::vector<PageId>& pages) {
  std::vector<std::uint8_t> named(static_cast<std::size_t>(pages_));
  for (const PageId page : pages) {
    if (page >= pages_ || owner_[page] != kNoOwner || named[page] != 0) {
      throw std::invalid_argument("page " + std::to_string(page) + " is not free, or named twice");
    }
    named[page] = 1;
  }
  free_.erase(std::remove_if(free_.begin(), free_.end(), [&](PageId page) { return named[page] != 0; }),
              free_.end());
  free_.insert(free_.end(), pages.rbegin(), pages.rend());
}

void Slab::populate() {
  if (mapping_ != nullptr) std::memset(base_, 0, static_cast<std::size_t>(pages_ * page_bytes_));
}

std::int64_t Slab::resident_bytes() const {
  return mapping_ == nullptr ? 0 : sum_of_field(base_, pages_ * page_bytes_, "Rss:");
}

std::int64_t Slab::huge_bytes() const {
  return mapping_ == nullptr ? 0 : sum_of_field(base_, pages_ * page_bytes_, "AnonHugePages:");
}

}  // namespace moechat
