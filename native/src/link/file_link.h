// Reads block records from the store's files into pages, past the page cache (O_DIRECT) where the file system
// allows it, through io_uring or, where that is not to be had, reader threads.
#pragma once

#include <cerrno>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "link/link.h"
#include "link/record_checksums.h"

namespace moechat {

struct FileRegion {
  std::string path;
  std::int64_t offset;  // multiple of 4096
  std::int64_t bytes;   // multiple of 4096
  RecordChecksums checksums{};
};

// The error of a transfer whose file has become shorter than it was when the link was made.
constexpr int kFileEnded = ENODATA;

// A file could not be opened or looked at.
class FileError : public std::system_error {
 public:
  FileError(int error, const std::string& path)
      : std::system_error(error, std::generic_category(), path), path_(path) {}
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

enum class FileIo { kAuto, kUring, kThreads };

struct FileLinkOptions {
  FileIo io = FileIo::kAuto;  // kUring throws if io_uring is not to be had; kAuto falls back to threads
  bool direct = true;         // O_DIRECT; files that refuse it are read through the page cache
  // Most bytes in flight, and most bytes of one read (neighbouring transfers merge up to it); 0: a default
  // found by measurement.
  std::int64_t in_flight_bytes = 0;
  std::int64_t operation_bytes = 0;
  int reader_threads = 0;  // with threads; 0: default
};

// Where a region has checksums, each record is compared with its own after it was read and before its
// transfer finishes, by the thread that ends the read and without the link's mutex. A record that differs is
// read once more, past the page cache as far as that is possible; then its transfer fails with
// kRecordDamaged. Transfers of such regions are whole records.
//
// Offsets and sizes of transfers must be multiples of 4096. Targets should be, too: a file that refuses an
// unaligned one is read through the page cache from then on.
// Throws FileError for a file that cannot be opened, std::invalid_argument for a region that is not aligned
// or lies beyond its file, for checksums of another number, and for options out of range, std::system_error
// for kUring where it is not to be had.
std::unique_ptr<Link> make_file_link(const std::vector<FileRegion>& regions, const FileLinkOptions& options);

}  // namespace moechat
