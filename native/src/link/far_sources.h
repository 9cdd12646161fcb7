// Where the records of a far tier lie: in host memory, pinned or not, and in files, piece by piece.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "link/descriptor.h"
#include "link/link.h"
#include "link/record_checksums.h"

namespace moechat {

// The next `bytes` of a region.
struct RegionPart {
  std::int64_t bytes = 0;
  const unsigned char* data = nullptr;  // host memory, kept alive by the caller; or null: read the file
  // All of `data` was registered with the driver, by one call: a copy that reaches from one registration into
  // the next is refused by the driver.
  bool pinned = false;
};

struct CudaRegion {
  std::vector<RegionPart> parts;  // in order
  std::string path;               // of the parts in the file; also for messages
  std::int64_t offset = 0;        // of the region in it
  // Of the records, for those that are read from the file: transfers that touch it are whole records then.
  RecordChecksums checksums{};

  std::int64_t bytes() const;
};

// Immutable, so it may be used by any thread.
class FarSources {
 public:
  // Opens the files. Throws FileError for a file that cannot be opened, std::invalid_argument for a part with
  // neither memory nor a file, and for a region that ends beyond its file.
  explicit FarSources(std::vector<CudaRegion> regions);

  std::int32_t regions() const { return static_cast<std::int32_t>(sources_.size()); }
  std::int64_t bytes(std::int32_t region) const { return source(region).starts.back(); }
  // "FILE at byte N"
  std::string describe(std::int32_t region, std::int64_t offset) const;
  // Throws std::invalid_argument for a transfer of a region with checksums that is not whole records.
  void require_whole(const Transfer& transfer) const {
    source(transfer.region).region.checksums.require_whole(transfer.offset, transfer.bytes);
  }
  // Whether some part is not pinned.
  bool staged() const { return staged_; }

  // The pinned memory that holds all bytes of a transfer; null: there is none.
  const unsigned char* pinned(const Transfer& transfer) const;
  // Whether two transfers, the second of which continues the first in pinned memory, lie in one registration.
  bool together(const Transfer& first, const Transfer& next) const;
  // Copies or reads the bytes of a transfer; returns 0 or an errno. May take as long as a disk does. A record
  // from the file that does not have its checksum is read once more; then it is kRecordDamaged.
  int fill(const Transfer& transfer, unsigned char* to) const;

 private:
  struct Source {
    CudaRegion region;
    std::vector<std::int64_t> starts;  // of each part in the region, and its end
    Descriptor file;
  };

  const Source& source(std::int32_t region) const { return sources_[static_cast<std::size_t>(region)]; }
  // The part that holds the byte at this offset. REQUIRES: there is such a byte.
  static std::size_t part_at(const Source& source, std::int64_t offset);
  // As fill, without a look at checksums; `reads` tells whether bytes came from the file.
  static int copy(const Source& from, const Transfer& transfer, unsigned char* to, bool* reads);

  std::vector<Source> sources_;
  bool staged_ = false;
};

}  // namespace moechat
