#include "memory/read_ahead.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

namespace moechat {

void read_ahead(const unsigned char* data, std::size_t bytes) {
  constexpr std::uintptr_t kPage = 4096;
  // A request for more than the device takes at once is cut short; this much every device takes.
  constexpr std::uintptr_t kRequest = std::uintptr_t{128} << 10;
  const auto first = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t end = first + bytes;
  for (std::uintptr_t at = first / kPage * kPage; at < end; at += kRequest) {
    madvise(reinterpret_cast<void*>(at), std::min(kRequest, end - at), MADV_WILLNEED);
  }
}

}  // namespace moechat
