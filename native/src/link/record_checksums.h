// Checksums of the block records that a region consists of, to compare them with when they are read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moechat {

struct RecordChecksums {
  std::int64_t record_bytes = 0;
  std::vector<std::uint32_t> values;  // crc32c of each record; empty: the region is not checked

  bool checked() const { return !values.empty(); }
  // Whether these bytes, whole records from `offset` of the region on, have their checksums. REQUIRES:
  // checked().
  bool fit(const unsigned char* data, std::int64_t offset, std::int64_t bytes) const;
  // Throws std::invalid_argument unless there is one for each record of a region of so many bytes.
  void require(std::int64_t bytes, const std::string& where) const;
  // Throws std::invalid_argument for a part of a checked region that is not whole records.
  void require_whole(std::int64_t offset, std::int64_t bytes) const;
};

}  // namespace moechat
