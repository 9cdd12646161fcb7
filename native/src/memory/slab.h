// The near tier's memory: one range of pages of equal size, in an anonymous mapping or in the caller's memory
// (for example VRAM). A page holds one block record.
//
// - Pages are identified by number; the mapping never moves or grows.
// - Every page is free or has one owner (a number that the caller chooses). Only `take` and `give` change
//   this. Each `take` increments the page's generation, so that the holder of an old number can detect a
//   change of owner.
// - Not thread-safe: only the cache that owns the slab calls it. A link may write the bytes of a page, and
//   kernels may read them, on other threads; the cache decides who may do so at which time.
// - After fork() a child process does not have the pages; any access to them there faults.
// - Numbers from pages() on are *outside*: records that lie elsewhere, such as in a mapped file. Nobody
//   writes, takes or gives them.
#pragma once

#include <cstdint>
#include <vector>

namespace moechat {

using PageId = std::uint32_t;
constexpr PageId kNoPage = 0xffffffffu;

class Slab {
 public:
  static constexpr std::uint32_t kNoOwner = 0xffffffffu;

  // `memory` null: reserves pages * page_bytes of address space, in huge pages if the system provides them.
  // The first write to memory commits it. REQUIRES: page_bytes is a positive multiple of 4096.
  // Otherwise pages lie in `memory`, which must outlive the slab; the slab never accesses it.
  // Throws std::invalid_argument for sizes out of range, std::runtime_error with both numbers if the system
  // refuses.
  Slab(std::int64_t pages, std::int64_t page_bytes) : Slab(pages, page_bytes, nullptr) {}
  Slab(std::int64_t pages, std::int64_t page_bytes, unsigned char* memory);
  ~Slab();
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  // An inaccessible address to pass as `memory`, for simulations that use only page numbers.
  static unsigned char* no_memory();

  std::int64_t pages() const { return pages_; }
  std::int64_t page_bytes() const { return page_bytes_; }
  std::int64_t free_pages() const { return static_cast<std::int64_t>(free_.size()); }
  unsigned char* data(PageId page) const {
    return reinterpret_cast<unsigned char*>(reinterpret_cast<std::uintptr_t>(base_) +
                                            page * static_cast<std::uintptr_t>(page_bytes_));
  }

  // What a page holds, also one that is outside.
  const unsigned char* record(PageId page) const {
    return page < pages_ ? data(page) : outside_[page - static_cast<std::size_t>(pages_)];
  }
  // The number of a record outside, which must outlive the slab. Throws std::invalid_argument: no number is
  // left.
  PageId add_outside(const unsigned char* record);

  // Returns a free page, now owned by `owner` (not kNoOwner); kNoPage if none is free.
  PageId take(std::uint32_t owner);
  // Returns a page to the free list. Throws std::logic_error if the page is free already.
  void give(PageId page);
  // Gives the memory of a page back to the system; its contents are lost. The next write allocates it anew.
  // REQUIRES: nothing reads or writes it. Does nothing for the caller's memory.
  void discard(PageId page);
  // Lets the next calls of `take` return these pages, in this order. Throws std::invalid_argument if one of
  // them is not free or is named twice; nothing has changed then.
  void take_next(const std::vector<PageId>& pages);
  std::uint32_t owner(PageId page) const { return owner_[page]; }
  void set_owner(PageId page, std::uint32_t owner) { owner_[page] = owner; }
  std::uint32_t generation(PageId page) const { return generation_[page]; }

  // Writes to all pages, so that none of them faults later. Does nothing for the caller's memory.
  void populate();

  // Bytes of the mapping that are in memory, and of these in huge pages, as the system reports them; 0 if it
  // does not report them, and for the caller's memory. Slow (reads /proc/self/smaps): for reports.
  std::int64_t resident_bytes() const;
  std::int64_t huge_bytes() const;

  // Makes the destructor keep the mapping, because a transfer that could not be waited for may still write to
  // it.
  void leak() { leaked_ = true; }

 private:
  void map();

  std::int64_t pages_;
  std::int64_t page_bytes_;
  unsigned char* base_ = nullptr;  // page 0
  // base_ and the inaccessible ranges around it; null: the caller's memory
  unsigned char* mapping_ = nullptr;
  std::int64_t mapped_bytes_ = 0;
  int process_ = 0;  // the process that made the mapping; a child after fork() does not have the pages
  bool leaked_ = false;
  std::vector<PageId> free_;  // a stack, initially with page 0 on top
  std::vector<std::uint32_t> owner_;
  std::vector<std::uint32_t> generation_;
  std::vector<const unsigned char*> outside_;
};

}  // namespace moechat
