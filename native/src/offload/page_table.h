// The page of every block that is ready, as kernels on a device look it up: what the device's copy of the
// table lacks, and which pages kernels that run ahead of the host may read.
//
// A device that runs ahead computes a layer from the table, before the host has seen what its router chose.
// So the host cannot know which pages are read. The rules that keep invariant 1 (a page is never refilled
// while anything may still read it, and never read before its fill has completed):
// - A block enters the table once its transfer has landed, and leaves it when it loses its page. Changes are
//   copied to the device in the order of its stream, before every kernel that reads the table.
// - While kernels that read the table are in flight (`open` to `close`), a page that the device's table has,
//   or has had since `open`, is *exposed*. Transfers puts the next transfer into an exposed page behind all
//   work of the stream so far. Kernels that were put into the stream later find another table.
//
// Not thread-safe; the schedule's owner serialises.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/split_cache.h"

namespace moechat {

class PageTable {
 public:
  // Of an empty table: every entry is kNone. `cache` outlives it; it has one table at most.
  PageTable(SplitExpertCache* cache, std::int64_t pages);

  static constexpr std::int32_t kNone = -1;

  // Writes entries of the device's table [layers, experts, blocks] that have to change, at most `capacity`,
  // as index and page; returns how many. Fewer than `capacity`: nothing else has to.
  std::int64_t changes(std::int32_t* index, std::int32_t* page, std::int64_t capacity);
  // Every block of every expert was in the table at the last `changes`.
  bool complete() const { return present_ == static_cast<std::int64_t>(entries_.size()); }

  // Kernels in `stream` (a CUstream) may read the table from now on. Repeated: another stream.
  void open(void* stream) {
    stream_ = stream;
    open_ = true;
  }
  // They have ended.
  void close();
  bool is_open() const { return open_; }
  void* stream() const { return stream_; }
  // While open: kernels in flight may read this page.
  bool exposed(PageId page) const { return exposed_[page] != 0; }

 private:
  bool refresh(std::size_t place, std::int32_t* index, std::int32_t* page, std::int64_t capacity,
               std::int64_t* count);

  SplitExpertCache* cache_;
  std::vector<std::int32_t> entries_;  // as on the device after the changes so far
  std::int64_t present_ = 0;           // entries that are not kNone
  std::vector<std::uint8_t> exposed_;  // [pages]
  std::vector<std::uint8_t> users_;    // [pages]: entries that name the page: 0 or 1, 2 within `changes`
  std::vector<PageId> removed_;        // exposed, and in the table no more
  std::int64_t place_ = -1;            // an expert whose entries did not all fit; -1: none
  void* stream_ = nullptr;
  bool open_ = false;
};

}  // namespace moechat
