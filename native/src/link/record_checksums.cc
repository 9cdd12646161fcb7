#include "link/record_checksums.h"

#include <cstddef>
#include <stdexcept>

#include "memory/crc32c.h"

namespace moechat {

bool RecordChecksums::fit(const unsigned char* data, std::int64_t offset, std::int64_t bytes) const {
  auto record = static_cast<std::size_t>(offset / record_bytes);
  for (std::int64_t at = 0; at < bytes; at += record_bytes, ++record) {
    if (crc32c(data + at, static_cast<std::size_t>(record_bytes)) != values[record]) return false;
  }
  return true;
}

void RecordChecksums::require(std::int64_t bytes, const std::string& where) const {
  if (!checked()) return;
  if (record_bytes < 1 || bytes % record_bytes != 0 ||
      bytes / record_bytes != static_cast<std::int64_t>(values.size())) {
    throw std::invalid_argument(std::to_string(values.size()) + " checksums of records of " +
                                std::to_string(record_bytes) + " bytes for a region of " +
                                std::to_string(bytes) + " bytes of " + where);
  }
}

void RecordChecksums::require_whole(std::int64_t offset, std::int64_t bytes) const {
  if (!checked() || (offset % record_bytes == 0 && bytes % record_bytes == 0)) return;
  throw std::invalid_argument(
      "a transfer of " + std::to_string(bytes) + " bytes from offset " + std::to_string(offset) +
      " of a region with checksums is not whole records of " + std::to_string(record_bytes) + " bytes");
}

}  // namespace moechat
