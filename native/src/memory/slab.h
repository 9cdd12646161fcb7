// The near tier's memory: one piece of equal pages, an anonymous mapping of its own or memory that the caller
// has (VRAM, say). A page holds one block record.
//
// - Pages are named by number; the mapping never moves and never grows.
// - Every page is free or has one owner (a number that means something to the caller). `take` and `give` are
//   the only ways between the two. A page's generation rises each time it is taken, so that whoever kept a
//   number can tell that the page has changed hands.
// - Not thread-safe: the cache that owns the slab is the only one to call it. The bytes of a page may be
//   written by a link and read by kernels on other threads; who may do so when is the cache's business.
// - A child process after fork() does not have the pages: any access to them there is a fault.
#pragma once

#include <cstdint>
#include <vector>

namespace moechat {

using PageId = std::uint32_t;
constexpr PageId kNoPage = 0xffffffffu;

class Slab {
 public:
  static constexpr std::uint32_t kNoOwner = 0xffffffffu;

  // Reserves pages * page_bytes of address space, in huge pages where the system gives them; memory is
  // committed by the first write to it. page_bytes must be a positive multiple of 4096.
  // Throws std::invalid_argument for sizes out of range, std::runtime_error with both numbers when the system
  // refuses.
  Slab(std::int64_t pages, std::int64_t page_bytes) : Slab(pages, page_bytes, nullptr) {}
  // Unless it is null, pages lie in `memory`, which outlives the slab and is not touched by it.
  Slab(std::int64_t pages, std::int64_t page_bytes, unsigned char* memory);
  ~Slab();
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  std::int64_t pages() const { return pages_; }
  std::int64_t page_bytes() const { return page_bytes_; }
  std::int64_t free_pages() const { return static_cast<std::int64_t>(free_.size()); }
  unsigned char* data(PageId page) const { return base_ + static_cast<std::int64_t>(page) * page_bytes_; }

  // A free page, now owned by `owner` (not kNoOwner); kNoPage when none is free.
  PageId take(std::uint32_t owner);
  // Back to the free list. Throws std::logic_error if the page is free already.
  void give(PageId page);
  std::uint32_t owner(PageId page) const { return owner_[page]; }
  void set_owner(PageId page, std::uint32_t owner) { owner_[page] = owner; }
  std::uint32_t generation(PageId page) const { return generation_[page]; }

  // Writes to all pages, so that none of them costs a fault later. Nothing for memory of the caller's.
  void populate();

  // Bytes of the mapping that lie in memory, and of these in huge pages, as the system reports them; 0 where
  // it does not, or in memory of the caller's. Slow (reads /proc/self/smaps): for reports.
  std::int64_t resident_bytes() const;
  std::int64_t huge_bytes() const;

  // The destructor will leave the mapping in place: a transfer that could not be waited for may still write.
  void leak() { leaked_ = true; }

 private:
  void map();

  std::int64_t pages_;
  std::int64_t page_bytes_;
  unsigned char* base_ = nullptr;  // page 0
  // base_ with what cannot be touched around it; null: the caller's memory
  unsigned char* mapping_ = nullptr;
  std::int64_t mapped_bytes_ = 0;
  int process_ = 0;  // a child after fork() does not have the pages
  bool leaked_ = false;
  std::vector<PageId> free_;  // a stack; at first page 0 is on top
  std::vector<std::uint32_t> owner_;
  std::vector<std::uint32_t> generation_;
};

}  // namespace moechat
