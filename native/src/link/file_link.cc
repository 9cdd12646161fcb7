#include "link/file_link.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "link/descriptor.h"
#include "link/mutation.h"
#include "link/queued_link.h"
#include "link/uring.h"

namespace moechat {
namespace {

constexpr std::int64_t kAlignment = 4096;
// The least that keeps 95 % of the best bandwidth. Measured with records of 221,184 bytes in runs of 12 at
// random places of a 3 GB file on a virtual disk, io_uring, reads of up to 1 MiB, medians of 7 runs:
//   MiB in flight                           1.5    2     3     4     6     8
//   GB/s                                    4.3   4.5   4.9   5.1   5.2   5.4
//   ms of a demand behind a full queue      0.74  0.88  1.26  1.55  2.35  3.0
// Runs scatter by up to 7 %. From 3 MiB on the size of reads (0.22 to 1 MiB) matters less; larger ones need
// fewer calls.
constexpr std::int64_t kDefaultInFlight = std::int64_t{6} << 20;
constexpr std::int64_t kDefaultOperation = std::int64_t{1} << 20;
constexpr int kDefaultReaders = 4;
constexpr int kMostReaders = 64;
constexpr unsigned kMostOperations = 64;  // at a time
constexpr std::size_t kMostVectors = 64;  // transfers in one read
constexpr int kMostRetries = 1000;        // of one read, for reasons that pass by themselves

struct File {
  Descriptor descriptor;
  bool direct;
};

struct Region {
  std::size_t file;
  std::string path;
  std::int64_t offset;
  std::int64_t bytes;
  RecordChecksums checksums;
};

// One read under way: neighbouring pieces of a file, scattered to the targets of `count` transfers.
struct Operation {
  iovec vectors[kMostVectors];
  std::uint32_t slots[kMostVectors];
  std::size_t count = 0;
  std::size_t first = 0;  // the first vector that is not full; it has been cut to the missing bytes
  std::size_t file = 0;
  std::int64_t offset = 0;   // in the file, of the first byte that is missing
  std::int64_t missing = 0;  // bytes
  bool direct = false;       // how it was issued
  int retries = 0;
};

enum class Verdict { kDone, kAgain };

class FileEngine final : public LinkEngine {
 public:
  FileEngine(std::vector<Region> regions, std::vector<File> files, const FileLinkOptions& options,
             std::int64_t in_flight, std::int64_t operation, int readers)
      : LinkEngine(in_flight, kAlignment),
        regions_(std::move(regions)),
        files_(std::move(files)),
        operation_bytes_(operation),
        readers_(readers),
        event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (event_.get() < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    if (options.io != FileIo::kThreads) {
      try {
        ring_ = std::make_unique<Uring>(kMostOperations, event_.get());
      } catch (const std::system_error&) {
        if (options.io == FileIo::kUring) throw;
      }
    }
    operations_.resize(ring_ ? kMostOperations : static_cast<std::size_t>(readers_));
    for (std::size_t i = 0; i < operations_.size(); ++i) free_.push_back(i);
  }

  const char* name() const override { return ring_ ? "file (io_uring)" : "file (threads)"; }
  std::string describe(std::int32_t region, std::int64_t offset) const override {
    const Region& one = regions_[index_of(region, regions_.size())];
    return one.path + " at byte " + std::to_string(one.offset + offset);
  }
  std::int32_t regions() const override { return static_cast<std::int32_t>(regions_.size()); }
  std::int64_t region_bytes(std::int32_t region) const override {
    return regions_[index_of(region, regions_.size())].bytes;
  }

 private:
  int threads() const override { return ring_ ? 1 : readers_; }
  void admit(const Transfer& transfer) const override {
    regions_[static_cast<std::size_t>(transfer.region)].checksums.require_whole(transfer.offset,
                                                                                transfer.bytes);
  }
  void work(int) override { ring_ ? work_ring() : work_reader(); }
  void reap() override;
  void start() override;
  void wake() override;

  void work_ring();
  void work_reader();
  void sleep_until_event(int milliseconds);
  void hand_over();
  void issue(std::size_t index);

  void take(Operation* operation);
  Verdict judge(Operation* operation, std::int64_t result);
  Verdict give_up(Operation* operation, int error);
  void finish_read(const Operation& operation, std::size_t count);
  void read_again(std::uint32_t slot);

  const std::vector<Region> regions_;
  std::vector<File> files_;
  const std::int64_t operation_bytes_;
  const int readers_;
  Descriptor event_;
  std::unique_ptr<Uring> ring_;  // null: reader threads
  bool retrying_ = false;        // the kernel did not take a read for want of something
  std::vector<Operation> operations_;
  std::vector<std::size_t> free_;  // indices of operations_
  std::condition_variable work_;   // for reader threads
};

// Makes a read of the next transfer and of those right behind it, in the queue and in the file.
void FileEngine::take(Operation* operation) {
  const Node& first = queue_[queue_.front()];
  const Region& region = regions_[static_cast<std::size_t>(first.transfer.region)];
  operation->first = 0;
  operation->file = region.file;
  operation->offset = region.offset + first.transfer.offset;
  operation->missing = first.transfer.bytes;
  operation->retries = 0;
  const auto joins = [&](const Node& last, const Node& next) {
    if (next.alone || !TransferQueue::adjacent(last.transfer, next.transfer) ||
        operation->missing + next.transfer.bytes > operation_bytes_) {
      return false;
    }
    operation->missing += next.transfer.bytes;
    return true;
  };
  operation->count = queue_.begin_run(operation->slots, first.alone ? 1 : kMostVectors, seconds_now(), joins);
  for (std::size_t i = 0; i < operation->count; ++i) {
    const Transfer& transfer = queue_[operation->slots[i]].transfer;
    operation->vectors[i] = {transfer.to, static_cast<std::size_t>(transfer.bytes)};
  }
  queue_.operation_begun();
}

// Handles the result of a read: bytes, or minus an errno.
Verdict FileEngine::judge(Operation* operation, std::int64_t result) {
  if (result == 0) return give_up(operation, kFileEnded);
  if (result < 0) {
    const int error = static_cast<int>(-result);
    // ECANCELED: the thread that began the read has ended.
    if ((error == EINTR || error == EAGAIN || error == ECANCELED) && ++operation->retries < kMostRetries) {
      return Verdict::kAgain;
    }
    if (error == EINVAL && operation->direct) {
      File& file = files_[operation->file];
      const int fd = file.descriptor.get();
      file.direct = false;
      const int flags = fcntl(fd, F_GETFL);
      if (flags >= 0 && fcntl(fd, F_SETFL, flags & ~O_DIRECT) == 0) return Verdict::kAgain;
    }
    return give_up(operation, error);
  }
  operation->retries = 0;
  operation->offset += result;
  operation->missing -= result;
  auto rest = static_cast<std::size_t>(result);
  while (rest > 0) {
    iovec& vector = operation->vectors[operation->first];
    const std::size_t part = std::min(rest, vector.iov_len);
    vector.iov_base = static_cast<unsigned char*>(vector.iov_base) + part;
    vector.iov_len -= part;
    rest -= part;
    if (vector.iov_len == 0) ++operation->first;
  }
  if (operation->missing > 0) return Verdict::kAgain;
  finish_read(*operation, operation->count);
  return Verdict::kDone;
}

// Finishes the first `count` transfers of a read, which are complete, after a look at their checksums. The
// mutex is released meanwhile: the transfers are still started, and the operation is not free yet.
void FileEngine::finish_read(const Operation& operation, std::size_t count) {
  static_assert(kMostVectors <= 64, "one bit for each transfer of a read");
  std::uint64_t damaged = 0;
  // All transfers of a read are of one region.
  const std::int32_t number = count == 0 ? 0 : queue_[operation.slots[0]].transfer.region;
  const RecordChecksums& checksums = regions_[static_cast<std::size_t>(number)].checksums;
  if (count > 0 && checksums.checked()) {
    Transfer transfers[kMostVectors];
    for (std::size_t i = 0; i < count; ++i) {
      transfers[i] = queue_[operation.slots[i]].transfer;
      queue_.landed(operation.slots[i]);
    }
    // The next reads go on meanwhile.
    if (!halted()) start();
    const Unlocked released(&mutex_);
    for (std::size_t i = 0; i < count; ++i) {
      const Transfer& transfer = transfers[i];
      if (!checksums.fit(transfer.to, transfer.offset, transfer.bytes)) damaged |= std::uint64_t{1} << i;
    }
  }
  const auto is_damaged = [&](std::size_t i) { return (damaged >> i & 1) != 0; };
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t slot = operation.slots[i];
    if (!is_damaged(i)) {
      finish(slot, 0);
    } else if (queue_[slot].again) {
      finish(slot, kRecordDamaged);
    }
  }
  for (std::size_t i = count; i-- > 0;) {
    const std::uint32_t slot = operation.slots[i];
    if (is_damaged(i) && queue_[slot].state == State::kStarted) read_again(slot);
  }
}

// Reads a record once more that does not have its checksum: what was wrong may have been the way, not the
// disk.
void FileEngine::read_again(std::uint32_t slot) {
  const Transfer& transfer = queue_[slot].transfer;
  const Region& region = regions_[static_cast<std::size_t>(transfer.region)];
  const File& file = files_[region.file];
  if (!file.direct) {
    posix_fadvise(file.descriptor.get(), region.offset + transfer.offset, transfer.bytes,
                  POSIX_FADV_DONTNEED);
  }
  queue_.note_reread(slot);
  put_back(slot);
}

// A transfer fails alone: those that are complete have arrived, the others of a merged read are tried again,
// each by itself.
Verdict FileEngine::give_up(Operation* operation, int error) {
  const std::size_t complete = operation->first;
  finish_read(*operation, complete);
  if (operation->count == 1) {
    finish(operation->slots[0], error);
  } else {
    for (std::size_t i = operation->count; i-- > complete;) put_back(operation->slots[i]);
  }
  return Verdict::kDone;
}

// ---- io_uring

void FileEngine::issue(std::size_t index) {
  Operation& operation = operations_[index];
  const File& file = files_[operation.file];
  operation.direct = file.direct;
  // A read through the page cache could copy right away, in the caller's time: that is left to the kernel.
  ring_->prepare(file.descriptor.get(), operation.vectors + operation.first,
                 static_cast<unsigned>(operation.count - operation.first), operation.offset, index,
                 !file.direct);
}

void FileEngine::hand_over() {
  const int error = ring_->submit();
  if (error == EAGAIN || error == EBUSY || error == ENOMEM) {
    // These pass: the thread, which may be asleep for long, tries again every millisecond.
    if (!retrying_) wake();
    retrying_ = true;
    return;
  }
  retrying_ = false;
  if (error == 0) return;
  fail(error, std::string("io_uring_enter: ") + std::strerror(error));
  while (ring_->prepared() > 0) {
    const std::size_t index = static_cast<std::size_t>(ring_->withdraw());
    Operation& operation = operations_[index];
    for (std::size_t i = 0; i < operation.count; ++i) finish(operation.slots[i], error);
    free_.push_back(index);
  }
}

void FileEngine::reap() {
  if (!ring_) return;
  Uring::Result result;
  while (ring_->take(&result)) {
    const auto index = static_cast<std::size_t>(result.tag);
    if (judge(&operations_[index], result.value) == Verdict::kAgain) {
      issue(index);
    } else {
      free_.push_back(index);
    }
  }
  if (ring_->prepared() > 0) hand_over();
}

void FileEngine::start() {
  if (!ring_) {
    if (startable()) work_.notify_one();
    return;
  }
  while (!free_.empty() && startable()) {
    const std::size_t index = free_.back();
    free_.pop_back();
    take(&operations_[index]);
    issue(index);
  }
  if (ring_->prepared() > 0) hand_over();
}

void FileEngine::wake() {
  if (ring_) {
    const std::uint64_t one = 1;
    // It can only fail when the counter is full, and then the thread is awake.
    static_cast<void>(!write(event_.get(), &one, sizeof one));
  } else {
    work_.notify_all();
  }
}

void FileEngine::sleep_until_event(int milliseconds) {
  pollfd event{event_.get(), POLLIN, 0};
  static_cast<void>(!::poll(&event, 1, milliseconds));
  std::uint64_t count = 0;
  static_cast<void>(!read(event_.get(), &count, sizeof count));
}

void FileEngine::work_ring() {
  Lock lock(mutex_);
  while (!ending_) {
    pump();
    const int limit = ring_->prepared() > 0 ? 1 : -1;
    lock.unlock();
    // Wait 6: for reads to end, or for wake().
    MOECHAT_WAIT(6, sleep_until_event(limit));
    lock.lock();
  }
}

// ---- reader threads

void FileEngine::work_reader() {
  Lock lock(mutex_);
  for (;;) {
    // Wait 7: for something to read.
    MOECHAT_WAIT(7, work_.wait(lock, [this] { return ending_ || startable(); }));
    if (ending_) return;
    if (!startable()) continue;
    const std::size_t index = free_.back();
    free_.pop_back();
    Operation& operation = operations_[index];
    take(&operation);
    if (startable()) work_.notify_one();
    for (;;) {
      const File& file = files_[operation.file];
      operation.direct = file.direct;
      const int fd = file.descriptor.get();
      lock.unlock();
      const ssize_t count = preadv(fd, operation.vectors + operation.first,
                                   static_cast<int>(operation.count - operation.first), operation.offset);
      const std::int64_t result = count < 0 ? -errno : count;
      lock.lock();
      if (judge(&operation, result) == Verdict::kDone) break;
    }
    free_.push_back(index);
  }
}

std::vector<Region> open_files(const std::vector<FileRegion>& regions, bool direct,
                               std::vector<File>* files) {
  std::vector<Region> result;
  std::vector<std::pair<std::string, std::int64_t>> opened;  // path and size, as *files
  for (const FileRegion& region : regions) {
    auto known =
        std::find_if(opened.begin(), opened.end(), [&](const auto& one) { return one.first == region.path; });
    if (known == opened.end()) {
      int fd = direct ? open(region.path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT) : -1;
      const bool is_direct = fd >= 0;
      if (fd < 0 && (!direct || errno == EINVAL)) fd = open(region.path.c_str(), O_RDONLY | O_CLOEXEC);
      if (fd < 0) throw FileError(errno, region.path);
      files->push_back({Descriptor(fd), is_direct});
      struct stat status;
      if (fstat(fd, &status) != 0) throw FileError(errno, region.path);
      if (S_ISDIR(status.st_mode)) throw FileError(EISDIR, region.path);
      opened.emplace_back(region.path, status.st_size);
      known = opened.end() - 1;
    }
    if (region.offset < 0 || region.bytes < 1 || region.offset % kAlignment != 0 ||
        region.bytes % kAlignment != 0) {
      throw std::invalid_argument("region of " + std::to_string(region.bytes) + " bytes from byte " +
                                  std::to_string(region.offset) + " of " + region.path +
                                  ": both must be multiples of 4096");
    }
    if (region.bytes > known->second || region.offset > known->second - region.bytes) {
      throw std::invalid_argument("region of " + std::to_string(region.bytes) + " bytes from byte " +
                                  std::to_string(region.offset) + " of " + region.path + ": the file has " +
                                  std::to_string(known->second) + " bytes");
    }
    region.checksums.require(region.bytes, region.path);
    result.push_back({static_cast<std::size_t>(known - opened.begin()), region.path, region.offset,
                      region.bytes, region.checksums});
  }
  return result;
}

std::int64_t bytes_or(std::int64_t value, std::int64_t fallback, const char* option) {
  if (value < 0) {
    throw std::invalid_argument(std::string(option) + " is " + std::to_string(value) +
                                "; it must be 0 (default) or a positive number");
  }
  return value == 0 ? fallback : value;
}

}  // namespace

std::unique_ptr<Link> make_file_link(const std::vector<FileRegion>& regions, const FileLinkOptions& options) {
  const std::int64_t in_flight = bytes_or(options.in_flight_bytes, kDefaultInFlight, "in_flight_bytes");
  const std::int64_t operation = bytes_or(options.operation_bytes, kDefaultOperation, "operation_bytes");
  const auto readers = bytes_or(options.reader_threads, kDefaultReaders, "reader_threads");
  if (readers > kMostReaders) {
    throw std::invalid_argument("reader_threads is " + std::to_string(readers) + "; it must be at most " +
                                std::to_string(kMostReaders));
  }
  std::vector<File> files;
  std::vector<Region> opened = open_files(regions, options.direct, &files);
  return std::make_unique<QueuedLink>(std::make_unique<FileEngine>(
      std::move(opened), std::move(files), options, in_flight, operation, static_cast<int>(readers)));
}

}  // namespace moechat
