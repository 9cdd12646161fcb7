#include "link/far_sources.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "link/file_link.h"

namespace moechat {
namespace {

// Reads all bytes; returns 0 or an errno.
int read_file(int file, unsigned char* to, std::int64_t bytes, std::int64_t offset) {
  for (std::int64_t done = 0; done < bytes;) {
    const ssize_t count = pread(file, to + done, static_cast<std::size_t>(bytes - done), offset + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    if (count == 0) return kFileEnded;
    done += count;
  }
  return 0;
}

Descriptor open_file(const CudaRegion& region) {
  Descriptor file(open(region.path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status{};
  if (file.get() < 0 || fstat(file.get(), &status) != 0) throw FileError(errno, region.path);
  if (region.offset > status.st_size - region.bytes()) {
    throw std::invalid_argument(region.path + " has " + std::to_string(status.st_size) +
                                " bytes; a region ends at byte " +
                                std::to_string(region.offset + region.bytes()));
  }
  return file;
}

}  // namespace

std::int64_t CudaRegion::bytes() const {
  std::int64_t sum = 0;
  for (const RegionPart& part : parts) sum += part.bytes;
  return sum;
}

FarSources::FarSources(std::vector<CudaRegion> regions) {
  for (CudaRegion& region : regions) {
    if (region.offset < 0) {
      throw std::invalid_argument("offset of a region is " + std::to_string(region.offset) +
                                  "; it must be 0 or positive");
    }
    std::vector<std::int64_t> starts{0};
    bool reads = false;
    for (const RegionPart& part : region.parts) {
      if (part.bytes < 0) {
        throw std::invalid_argument("bytes of a region is " + std::to_string(part.bytes) +
                                    "; it must be 0 or positive");
      }
      if (part.data == nullptr && (region.path.empty() || part.pinned)) {
        throw std::invalid_argument("a region has neither memory nor a file");
      }
      reads = reads || part.data == nullptr;
      staged_ = staged_ || !part.pinned;
      starts.push_back(starts.back() + part.bytes);
    }
    region.checksums.require(starts.back(), region.path);
    Descriptor file = reads ? open_file(region) : Descriptor(-1);
    sources_.push_back({std::move(region), std::move(starts), std::move(file)});
  }
}

std::string FarSources::describe(std::int32_t region, std::int64_t offset) const {
  const CudaRegion& one = source(region).region;
  const std::string where = one.path.empty() ? "memory region " + std::to_string(region) : one.path;
  return where + " at byte " + std::to_string(one.offset + offset);
}

std::size_t FarSources::part_at(const Source& source, std::int64_t offset) {
  const auto next = std::upper_bound(source.starts.begin(), source.starts.end(), offset);
  return static_cast<std::size_t>(next - source.starts.begin()) - 1;
}

const unsigned char* FarSources::pinned(const Transfer& transfer) const {
  const Source& from = source(transfer.region);
  const std::size_t index = part_at(from, transfer.offset);
  const RegionPart& part = from.region.parts[index];
  if (!part.pinned || transfer.offset + transfer.bytes > from.starts[index + 1]) return nullptr;
  return part.data + (transfer.offset - from.starts[index]);
}

bool FarSources::together(const Transfer& first, const Transfer& next) const {
  const Source& from = source(first.region);
  return part_at(from, first.offset) == part_at(from, next.offset);
}

int FarSources::copy(const Source& from, const Transfer& transfer, unsigned char* to, bool* reads) {
  const std::int64_t end = transfer.offset + transfer.bytes;
  std::int64_t offset = transfer.offset;
  for (std::size_t index = part_at(from, offset); offset < end; ++index) {
    const RegionPart& part = from.region.parts[index];
    const std::int64_t bytes = std::min(end, from.starts[index + 1]) - offset;
    if (part.data != nullptr) {
      std::memcpy(to, part.data + (offset - from.starts[index]), static_cast<std::size_t>(bytes));
    } else {
      *reads = true;
      const int error = read_file(from.file.get(), to, bytes, from.region.offset + offset);
      if (error != 0) return error;
    }
    to += bytes;
    offset += bytes;
  }
  return 0;
}

int FarSources::fill(const Transfer& transfer, unsigned char* to) const {
  const Source& from = source(transfer.region);
  const RecordChecksums& checksums = from.region.checksums;
  for (int tries = 0; tries < 2; ++tries) {
    bool reads = false;
    const int error = copy(from, transfer, to, &reads);
    if (error != 0) return error;
    if (!reads || !checksums.checked() || checksums.fit(to, transfer.offset, transfer.bytes)) return 0;
    posix_fadvise(from.file.get(), from.region.offset + transfer.offset, transfer.bytes, POSIX_FADV_DONTNEED);
  }
  return kRecordDamaged;
}

}  // namespace moechat
