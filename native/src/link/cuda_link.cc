#include "link/cuda_link.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <limits>
#include <stdexcept>
#include <utility>

#include "cuda/driver.h"
#include "cuda/handles.h"
#include "link/descriptor.h"
#include "link/file_link.h"
#include "link/mutation.h"
#include "link/queued_link.h"

namespace moechat {
namespace {

// A demand waits for at most a third of it (queued_link.h), or two blocks: 4 MiB are 160 us of PCIe 4 x16.
constexpr std::int64_t kDefaultInFlight = std::int64_t{12} << 20;
constexpr std::int64_t kDefaultBuffer = std::int64_t{1} << 20;
constexpr int kDefaultBuffers = 16;
constexpr int kDefaultThreads = 2;
constexpr int kMostThreads = 64;
constexpr std::size_t kMostBuffers = 64;
constexpr std::size_t kBatches = 256;  // under way at a time
constexpr std::size_t kReads = 64;     // events of readers; see reads_first
constexpr std::uint64_t kNotIssued = 0;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

struct Source {
  CudaRegion region;
  Descriptor file;  // of one without data
};

// Invariants, besides those of LinkEngine
// - Batches are numbered from 1 in the order in which they were issued to the stream; they end in that order.
//   running_ holds those that have not been reaped. `batch_of_[slot]` is the number of the batch that carries
//   the slot's transfer, kNotIssued from its begin until then.
// - The copies of a batch follow the readers of their targets: before it is issued the stream waits
//   for the latest of `read_of_` of its slots, unless it waits for that one or a later one already.
// - A ring buffer is idle (in idle_), or belongs to a thread that fills it, or to a batch that is under way.
// So at
//   most kMostBuffers batches come from threads, and `start` leaves them room among the kBatches events.
// - Between a failed call and the end of everything under way no slot is finished whose bytes may still move:
//   a batch that could not be issued whole is kept until the stream has ended or is known to be dead.
class CudaEngine final : public LinkEngine, public StreamOrder {
 public:
  CudaEngine(std::vector<Source> sources, cuda::Context context, const CudaLinkOptions& options, int buffers)
      : LinkEngine(options.in_flight_bytes > 0 ? options.in_flight_bytes : kDefaultInFlight, 1,
                   std::numeric_limits<std::int64_t>::max()),
        sources_(std::move(sources)),
        cuda_(cuda::driver()),
        context_(context),
        buffer_bytes_(options.buffer_bytes > 0 ? options.buffer_bytes : kDefaultBuffer),
        stagers_(buffers == 0          ? 0
                 : options.threads > 0 ? options.threads
                                       : kDefaultThreads),
        ring_(context, at(buffers) * at(buffer_bytes_)),
        stream_(context),
        batches_(cuda_.copies_batches()) {
    for (std::size_t i = 0; i < kBatches; ++i) events_.emplace_back(context_);
    for (std::size_t i = 0; i < kReads; ++i) readers_.emplace_back(context_);
    for (int i = 0; i < buffers; ++i) idle_.push_back(i);
  }

  const char* name() const override { return stagers_ > 0 ? "cuda (through pinned buffers)" : "cuda"; }
  std::string describe(std::int32_t region, std::int64_t offset) const override {
    const CudaRegion& one = sources_[index_of(region, sources_.size())].region;
    const std::string where = one.path.empty() ? "memory region " + std::to_string(region) : one.path;
    return where + " at byte " + std::to_string(one.offset + offset);
  }
  std::int32_t regions() const override { return static_cast<std::int32_t>(sources_.size()); }
  std::int64_t region_bytes(std::int32_t region) const override {
    return sources_[index_of(region, sources_.size())].region.bytes;
  }
  StreamOrder* stream_order() override { return this; }
  bool fills_first(void* stream, const std::uint32_t* slots, std::int64_t count,
                   std::chrono::microseconds limit) override;
  void reads_first(void* stream, const std::uint32_t* slots, std::int64_t count) override;

 private:
  struct Batch {
    std::uint64_t number;
    std::vector<std::uint32_t> slots;
    int buffer;  // of the ring, or -1
  };

  int threads() const override { return 1 + stagers_; }
  void work(int thread) override { thread == 0 ? work_reaper() : work_stager(); }
  void reap() override;
  void start() override;
  void wake() override {
    work_.notify_all();
    stage_.notify_all();
  }

  void abandon() override;
  void admit(const Transfer& transfer) const override;

  void size_lists();
  void work_reaper();
  void work_stager();
  bool direct(std::uint32_t slot) const { return sources_[at(queue_[slot].transfer.region)].region.pinned; }
  cuda::Event event_of(std::uint64_t number) const { return events_[number % kBatches].get(); }
  void begin_batch();
  void issue(std::vector<std::uint32_t> slots, int buffer);
  cuda::Result copy_all(const std::vector<std::uint32_t>& slots, int buffer, const char** call);
  void gather_copies(const std::vector<std::uint32_t>& slots, int buffer);
  void end_batch(int error);
  void broken(cuda::Result result, const char* call);
  int fill(const Transfer& transfer, unsigned char* to) const;
  unsigned char* buffer_at(int index) const { return ring_.data() + index * buffer_bytes_; }

  const std::vector<Source> sources_;
  const cuda::Driver& cuda_;
  const cuda::Context context_;
  const std::int64_t buffer_bytes_;
  const int stagers_;
  // Given back from the last to the first: the stream ends before the memory that it reads.
  const cuda::PinnedMemory ring_;
  std::vector<cuda::OwnEvent> events_;   // [kBatches], by number
  std::vector<cuda::OwnEvent> readers_;  // [kReads], by number
  const cuda::OwnStream stream_;

  bool batches_;  // the driver takes many copies in one call
  std::vector<cuda::Pointer> to_, from_;
  std::vector<std::size_t> sizes_;

  std::condition_variable work_;    // something is under way, or the threads shall end
  std::condition_variable stage_;   // a transfer to stage, a buffer to stage it in
  std::condition_variable issued_;  // a batch was issued, or transfers failed
  std::deque<Batch> running_;
  std::uint64_t last_ = 0;  // number of the last batch
  std::vector<std::uint64_t> batch_of_;
  std::vector<std::uint64_t> read_of_;
  std::uint64_t reads_ = 0;   // number of the last reader
  std::uint64_t waited_ = 0;  // the latest reader that the stream waits for
  std::deque<std::uint32_t> to_stage_;
  std::vector<int> idle_;
};

void CudaEngine::admit(const Transfer& transfer) const {
  if (sources_[at(transfer.region)].region.pinned || transfer.bytes <= buffer_bytes_) return;
  throw std::invalid_argument("a transfer of " + std::to_string(transfer.bytes) +
                              " bytes does not fit into a pinned buffer of " + std::to_string(buffer_bytes_));
}

void CudaEngine::size_lists() {
  if (batch_of_.size() == queue_.slots()) return;
  batch_of_.resize(queue_.slots(), kNotIssued);
  read_of_.resize(queue_.slots(), 0);
}

// What has not been given to the stream never will be.
void CudaEngine::abandon() {
  while (!to_stage_.empty()) {
    finish(to_stage_.front(), failed() ? error_ : ECANCELED);
    to_stage_.pop_front();
  }
  issued_.notify_all();
}

// ---- beginning; the mutex is held

void CudaEngine::start() {
  size_lists();
  if (!startable()) return;
  try {
    const cuda::Current current(context_);
    while (startable() && running_.size() < kBatches - kMostBuffers) begin_batch();
  } catch (const cuda::Error& error) {
    broken(error.code(), "cuCtxPushCurrent");
  }
}

// The transfers at the front that have one priority and one path to the GPU.
void CudaEngine::begin_batch() {
  std::vector<std::uint32_t> slots(kCudaBatchCopies);
  const bool whole = direct(queue_.front());
  const auto joins = [&](const Node&, const Node& next) { return direct(next.transfer.slot) == whole; };
  slots.resize(queue_.begin_run(slots.data(), kCudaBatchCopies, seconds_now(), joins));
  for (const std::uint32_t slot : slots) batch_of_[slot] = kNotIssued;
  if (whole) {
    issue(std::move(slots), -1);
  } else {
    to_stage_.insert(to_stage_.end(), slots.begin(), slots.end());
    stage_.notify_all();
  }
}

void CudaEngine::issue(std::vector<std::uint32_t> slots, int buffer) {
  const std::uint64_t number = ++last_;
  for (const std::uint32_t slot : slots) batch_of_[slot] = number;
  const char* call = "";
  cuda::Result result = copy_all(slots, buffer, &call);
  running_.push_back({number, std::move(slots), buffer});
  // Also after a failure: what was issued before it must end before anything is said to be over.
  const cuda::Result recorded = cuda_.event_record(event_of(number), stream_.get());
  if (recorded != cuda::kSuccess) {
    if (result == cuda::kSuccess) call = "cuEventRecord";
    if (result == cuda::kSuccess) result = recorded;
    static_cast<void>(cuda_.stream_synchronize(stream_.get()));
  }
  if (result != cuda::kSuccess) broken(result, call);
  work_.notify_one();
  issued_.notify_all();
}

cuda::Result CudaEngine::copy_all(const std::vector<std::uint32_t>& slots, int buffer, const char** call) {
  std::uint64_t reader = 0;
  for (const std::uint32_t slot : slots) reader = std::max(reader, read_of_[slot]);
  if (reader > waited_) {
    *call = "cuStreamWaitEvent";
    // Wait 10: for the kernels that read the pages.
    cuda::Result result = cuda::kSuccess;
    MOECHAT_WAIT(10, result = cuda_.stream_wait_event(stream_.get(), readers_[reader % kReads].get(), 0));
    if (result != cuda::kSuccess) return result;
    waited_ = reader;
  }
  gather_copies(slots, buffer);
  if (batches_ && to_.size() > 1) {
    const cuda::Result result =
        cuda_.copy_batch(to_.data(), from_.data(), sizes_.data(), to_.size(), stream_.get());
    if (result == cuda::kSuccess) {
      for (std::size_t i = 0; i < to_.size(); ++i) queue_.operation_begun();
      return result;
    }
    // What a driver does not do with these sources it does one by one; a lost GPU says so again below. To
    // copy a block twice in the stream's turn is harmless.
    batches_ = false;
  }
  *call = "cuMemcpyHtoDAsync";
  for (std::size_t i = 0; i < to_.size(); ++i) {
    const void* const from = reinterpret_cast<const void*>(static_cast<std::uintptr_t>(from_[i]));
    const cuda::Result result = cuda_.copy_to_device(to_[i], from, sizes_[i], stream_.get());
    if (result != cuda::kSuccess) return result;
    queue_.operation_begun();
  }
  return cuda::kSuccess;
}

// The copies of a batch in to_, from_ and sizes_; neighbours here and there are one.
void CudaEngine::gather_copies(const std::vector<std::uint32_t>& slots, int buffer) {
  to_.clear();
  from_.clear();
  sizes_.clear();
  for (std::size_t i = 0; i < slots.size();) {
    const Transfer& first = queue_[slots[i]].transfer;
    std::int64_t bytes = first.bytes;
    std::size_t end = i + 1;
    for (; end < slots.size(); ++end) {
      const Transfer& next = queue_[slots[end]].transfer;
      if (!TransferQueue::adjacent(queue_[slots[end - 1]].transfer, next) || next.to != first.to + bytes)
        break;
      bytes += next.bytes;
    }
    const unsigned char* from =
        buffer >= 0 ? buffer_at(buffer) : sources_[at(first.region)].region.data + first.offset;
    to_.push_back(static_cast<cuda::Pointer>(reinterpret_cast<std::uintptr_t>(first.to)));
    from_.push_back(static_cast<cuda::Pointer>(reinterpret_cast<std::uintptr_t>(from)));
    sizes_.push_back(at(bytes));
    i = end;
  }
}

// ---- ending; the mutex is held

void CudaEngine::reap() {
  if (running_.empty()) return;
  try {
    const cuda::Current current(context_);
    while (!running_.empty()) {
      const cuda::Result result = cuda_.event_query(event_of(running_.front().number));
      if (result == cuda::kNotReady) return;
      if (result != cuda::kSuccess) broken(result, "cuEventQuery");
      end_batch(result == cuda::kSuccess && !failed() ? 0 : EIO);
    }
  } catch (const cuda::Error& error) {
    broken(error.code(), "cuCtxPushCurrent");
    while (!running_.empty()) end_batch(EIO);
  }
}

void CudaEngine::end_batch(int error) {
  const Batch batch = std::move(running_.front());
  running_.pop_front();
  if (batch.buffer >= 0) {
    idle_.push_back(batch.buffer);
    stage_.notify_one();
  }
  for (const std::uint32_t slot : batch.slots) finish(slot, error);
  if (error != 0) issued_.notify_all();
}

void CudaEngine::broken(cuda::Result result, const char* call) {
  fail(EIO, cuda::explain(result, call));
  abandon();
}

// ---- threads

void CudaEngine::work_reaper() {
  Lock lock(mutex_);
  while (!ending_) {
    pump();
    if (running_.empty()) {
      // Wait 11: for something to be under way.
      MOECHAT_WAIT(11, work_.wait(lock, [this] { return ending_ || !running_.empty(); }));
      continue;
    }
    // The event may be used again by a later batch meanwhile: then this wakes later, and callers, who poll,
    // do the work.
    const cuda::Event event = event_of(running_.front().number);
    lock.unlock();
    cuda::Result result = cuda::kSuccess;
    try {
      const cuda::Current current(context_);
      result = cuda_.event_synchronize(event);
    } catch (const cuda::Error& error) {
      result = error.code();
    }
    lock.lock();
    if (result != cuda::kSuccess) broken(result, "cuEventSynchronize");
  }
}

void CudaEngine::work_stager() {
  Lock lock(mutex_);
  for (;;) {
    // Wait 12: for a transfer and a buffer for it.
    MOECHAT_WAIT(12, stage_.wait(lock, [this] { return ending_ || (!to_stage_.empty() && !idle_.empty()); }));
    if (ending_) return;
    if (to_stage_.empty() || idle_.empty()) continue;
    const std::uint32_t slot = to_stage_.front();
    to_stage_.pop_front();
    const int buffer = idle_.back();
    idle_.pop_back();
    const Transfer transfer = queue_[slot].transfer;
    lock.unlock();
    const int error = fill(transfer, buffer_at(buffer));
    lock.lock();
    // A link that is stopping may have been given up: its targets are not its own any more.
    if (error != 0 || halted()) {
      idle_.push_back(buffer);
      finish(slot, error != 0 ? error : failed() ? error_ : ECANCELED);
      issued_.notify_all();
      continue;
    }
    try {
      const cuda::Current current(context_);
      issue({slot}, buffer);
    } catch (const cuda::Error& problem) {
      idle_.push_back(buffer);
      finish(slot, EIO);
      broken(problem.code(), "cuCtxPushCurrent");
    }
  }
}

int CudaEngine::fill(const Transfer& transfer, unsigned char* to) const {
  const Source& source = sources_[at(transfer.region)];
  if (source.region.data != nullptr) {
    std::memcpy(to, source.region.data + transfer.offset, at(transfer.bytes));
    return 0;
  }
  std::int64_t done = 0;
  while (done < transfer.bytes) {
    const ssize_t read = pread(source.file.get(), to + done, at(transfer.bytes - done),
                               source.region.offset + transfer.offset + done);
    if (read < 0 && errno == EINTR) continue;
    if (read < 0) return errno;
    if (read == 0) return kFileEnded;
    done += read;
  }
  return 0;
}

// ---- order on the GPU

bool CudaEngine::fills_first(void* stream, const std::uint32_t* slots, std::int64_t count,
                             std::chrono::microseconds limit) {
  const Clock::time_point until = Clock::now() + std::min<Clock::duration>(limit, std::chrono::hours(1));
  Lock lock(mutex_);
  pump();
  const auto pending = [&](std::uint32_t slot) {
    if (slot >= queue_.slots()) throw std::out_of_range("slot " + std::to_string(slot));
    const State state = queue_[slot].state;
    return state == State::kQueued || (state == State::kStarted && batch_of_[slot] == kNotIssued);
  };
  const auto ready = [&] {
    pump();
    return failed() || stopping_ || std::none_of(slots, slots + count, pending);
  };
  const auto all_ready = [&] {
    if (const VirtualClock* const clock = virtual_clock()) return step_until(*clock, &lock, ready);
    while (!ready()) {
      if (Clock::now() >= until) return false;
      issued_.wait_for(lock, std::chrono::milliseconds(1));
    }
    return true;
  };
  // Wait 13: for transfers that have not been given to the stream.
  bool all = true;
  MOECHAT_WAIT(13, all = all_ready());
  if (failed()) throw std::runtime_error(why());
  if (stopping_) throw std::runtime_error("the link was stopped");
  if (!all) return false;
  std::uint64_t latest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (queue_[slots[i]].state == State::kStarted) latest = std::max(latest, batch_of_[slots[i]]);
  }
  if (latest == 0) return true;
  const cuda::Current current(context_);
  // Wait 14: for the fills, on the GPU.
  cuda::Result result = cuda::kSuccess;
  MOECHAT_WAIT(14, result = cuda_.stream_wait_event(stream, event_of(latest), 0));
  if (result != cuda::kSuccess) {
    broken(result, "cuStreamWaitEvent");
    throw std::runtime_error(why());
  }
  return true;
}

// Readers are numbered; the events of the last kReads are kept. Of an earlier one the event stands for a
// later reader of the same stream, which ends later still: the wait is longer than it need be, never shorter.
void CudaEngine::reads_first(void* stream, const std::uint32_t* slots, std::int64_t count) {
  const Lock lock(mutex_);
  if (failed()) throw std::runtime_error(why());
  size_lists();
  const std::uint64_t number = ++reads_;
  const cuda::Current current(context_);
  const cuda::Result result = cuda_.event_record(readers_[number % kReads].get(), stream);
  if (result != cuda::kSuccess) {
    broken(result, "cuEventRecord");
    throw std::runtime_error(why());
  }
  for (std::int64_t i = 0; i < count; ++i) {
    if (slots[i] >= read_of_.size()) throw std::out_of_range("slot " + std::to_string(slots[i]));
    read_of_[slots[i]] = number;
  }
}

Descriptor open_file(const CudaRegion& region) {
  Descriptor file(open(region.path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status{};
  if (file.get() < 0 || fstat(file.get(), &status) != 0) throw FileError(errno, region.path);
  if (region.offset > status.st_size - region.bytes) {
    throw std::invalid_argument(region.path + " has " + std::to_string(status.st_size) +
                                " bytes; a region ends at byte " +
                                std::to_string(region.offset + region.bytes));
  }
  return file;
}

}  // namespace

std::unique_ptr<Link> make_cuda_link(const std::vector<CudaRegion>& regions, const CudaLinkOptions& options) {
  const auto require = [](bool right, const char* name, std::int64_t value, const char* range) {
    if (right) return;
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be " + range);
  };
  require(options.in_flight_bytes >= 0, "in_flight_bytes", options.in_flight_bytes, "0 or positive");
  require(options.buffer_bytes >= 0, "buffer_bytes", options.buffer_bytes, "0 or positive");
  require(options.buffers >= 0 && options.buffers <= static_cast<int>(kMostBuffers), "buffers",
          options.buffers, "from 0 to 64");
  require(options.threads >= 0 && options.threads <= kMostThreads, "threads", options.threads,
          "from 0 to 64");
  const cuda::Context context = cuda::primary_context(options.device);  // loads the driver
  for (const CudaRegion& region : regions) {
    require(region.pinned || virtual_clock() == nullptr, "pinned", 0, "1 on a virtual clock");
    require(region.bytes >= 0, "bytes of a region", region.bytes, "0 or positive");
    require(region.offset >= 0, "offset of a region", region.offset, "0 or positive");
    if (region.data == nullptr && (region.path.empty() || region.pinned)) {
      throw std::invalid_argument("a region has neither memory nor a file");
    }
  }
  std::vector<Source> sources;
  for (const CudaRegion& region : regions) {
    sources.push_back({region, region.data == nullptr ? open_file(region) : Descriptor(-1)});
  }
  const bool staged =
      std::any_of(regions.begin(), regions.end(), [](const CudaRegion& region) { return !region.pinned; });
  const int buffers = !staged ? 0 : options.buffers > 0 ? options.buffers : kDefaultBuffers;
  return std::make_unique<QueuedLink>(
      std::make_unique<CudaEngine>(std::move(sources), context, options, buffers));
}

}  // namespace moechat
