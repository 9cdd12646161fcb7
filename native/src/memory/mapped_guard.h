// Keeps the process alive when a mapped file can no longer be read: others have cut it short, or its disk
// fails.
//
// A load from such a page raises SIGBUS in the thread that made it. For ranges that are guarded the handler
// puts zeros in the place of the page and of all behind it in its range, and notes the loss; then the load
// goes on, in whichever thread it was. So what was computed since is worthless: whoever uses mapped data asks
// before using its result. Other faults go to the handler that was installed before.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moechat {

// Guards a range of a mapping. Not movable: the handler knows it by its place in a list.
class MappedGuard {
 public:
  // Nothing is dereferenced. REQUIRES: [data, data + bytes) stays mapped from one mapping until the guard is
  // gone. Throws std::invalid_argument for no bytes, std::system_error if the handler cannot be installed.
  MappedGuard(const void* data, std::size_t bytes);
  ~MappedGuard();
  MappedGuard(const MappedGuard&) = delete;
  MappedGuard& operator=(const MappedGuard&) = delete;

  // Offset of the first byte that was lost, which is where a page begins; -1: nothing was.
  std::int64_t lost() const;

  struct Range;

 private:
  Range* range_;
};

// Losses in all guarded ranges since the process began, whether or not their guards still exist.
std::int64_t mapping_losses();

}  // namespace moechat
