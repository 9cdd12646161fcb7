#include "link/cuda_link.h"

#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>

#include "cuda/driver.h"
#include "cuda/handles.h"
#include "link/mutation.h"
#include "link/queued_link.h"

namespace moechat {
namespace {

// A demand waits for at most a third of it (transfer_queue.h), or two blocks: 4 MiB are 160 us of PCIe 4 x16,
// in batches of 1 MiB. When one of them ends, 120 us are left to notice it and to issue the next one.
constexpr std::int64_t kDefaultInFlight = std::int64_t{12} << 20;
constexpr std::int64_t kDefaultBuffer = std::int64_t{1} << 20;
constexpr int kDefaultBuffers = 16;
constexpr int kDefaultThreads = 2;
constexpr int kMostThreads = 64;
constexpr int kMostCopies = 64;
constexpr int kMostBuffers = 64;
constexpr std::size_t kBatches = 1024;  // under way at a time: 3 GiB of demands
constexpr std::size_t kReads = 64;      // events of readers; see reads_first
constexpr std::uint64_t kNotIssued = 0;
// Batches that a call of a caller issues, at least 100 us of work for the copy engine: its time is that of
// the pass. The link's thread issues the others meanwhile.
constexpr int kBatchesOfCaller = 2;
constexpr int kAllBatches = std::numeric_limits<int>::max();
// Between two looks at the events of the stream: a thread that sleeps is late by some microseconds, one that
// waits for the driver's interrupt by tens of them. A look costs about two.
constexpr std::chrono::microseconds kShortPause{10};  // while something is queued or awaited
constexpr std::chrono::microseconds kLeastPause{50};
constexpr std::chrono::microseconds kLongPause{100};
constexpr unsigned long kTimerSlack = 1000;  // ns, in place of the usual 50 us

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

// Pinned memory for so many buffers, or for fewer if the system refuses: one is enough to work.
cuda::PinnedMemory pinned_ring(cuda::Context context, int buffers, std::int64_t buffer_bytes) {
  for (;; buffers /= 2) {
    try {
      return cuda::PinnedMemory(context, at(buffers * buffer_bytes));
    } catch (const cuda::Error& error) {
      if (buffers <= 1 || error.sticky()) throw;
    }
  }
}

// Invariants, besides those of LinkEngine
// - One thread issues at a time, the one that set issuing_; it does not hold the mutex during calls of the
//   driver. What it leaves, and what came meanwhile, is issued by the link's thread, which looks again while
//   something is queued, or by the next caller.
// - Batches are numbered from 1 in the order in which they are issued to the stream; they end in that order.
//   running_ holds those that were issued and have not been reaped, at most kBatches: each has an event of
//   its own. `batch_of_[slot]` is the number of the batch that carries the slot's transfer, kNotIssued from
//   its begin until the batch was issued.
// - The copies of a batch follow the readers of their targets: before it is issued the stream waits
//   for the latest of `read_of_` of its slots, unless it waits for that one or a later one already.
// - A ring buffer is idle (in idle_), or belongs to a thread that fills it, or holds a transfer in filled_,
// or
//   belongs to a batch.
// - Between a failed call and the end of everything under way no slot is finished whose bytes may still move:
//   a batch that could not be issued whole is kept until the stream has ended or is known to be dead.
class CudaEngine final : public LinkEngine, public StreamOrder {
 public:
  CudaEngine(FarSources sources, cuda::Context context, const CudaLinkOptions& options, int buffers)
      : LinkEngine(options.in_flight_bytes > 0 ? options.in_flight_bytes : kDefaultInFlight, 1,
                   std::numeric_limits<std::int64_t>::max()),
        sources_(std::move(sources)),
        cuda_(cuda::driver()),
        context_(context),
        buffer_bytes_(options.buffer_bytes > 0 ? options.buffer_bytes : kDefaultBuffer),
        copies_(options.copies),
        stagers_(buffers == 0          ? 0
                 : options.threads > 0 ? options.threads
                                       : kDefaultThreads),
        ring_(pinned_ring(context, buffers, buffer_bytes_)),
        stream_(context),
        batches_(cuda_.copies_batches()) {
    for (std::size_t i = 0; i < kBatches; ++i) events_.emplace_back(context_);
    for (std::size_t i = 0; i < kReads; ++i) readers_.emplace_back(context_);
    const auto made = static_cast<int>(ring_.bytes() / at(buffer_bytes_));
    for (int i = 0; i < made; ++i) idle_.push_back(i);
  }

  const char* name() const override { return stagers_ > 0 ? "cuda (through pinned buffers)" : "cuda"; }
  std::string describe(std::int32_t region, std::int64_t offset) const override {
    return sources_.describe(checked(region), offset);
  }
  std::int32_t regions() const override { return sources_.regions(); }
  std::int64_t region_bytes(std::int32_t region) const override { return sources_.bytes(checked(region)); }
  StreamOrder* stream_order() override { return this; }
  bool fills_first(void* stream, const std::uint32_t* slots, std::int64_t count,
                   std::chrono::microseconds limit) override;
  void reads_first(void* stream, const std::uint32_t* slots, std::int64_t count) override;

 private:
  struct Load {
    std::uint32_t slot;
    int buffer;  // of the ring, which holds the bytes; -1: they are pinned where they lie
  };
  struct Batch {
    std::uint64_t number = 0;
    std::int64_t bytes = 0;
    double since = 0;  // it was issued, or the one before it ended
    std::vector<Load> loads;
  };

  int threads() const override { return 1 + stagers_; }
  void work(int thread) override { thread == 0 ? work_reaper() : work_stager(); }
  void reap() override;
  void start() override { issue_batches(kBatchesOfCaller); }
  void pump_as_thread() override {
    pump();
    if (!halted()) issue_batches(kAllBatches);
  }
  void wake() override {
    work_.notify_all();
    stage_.notify_all();
  }
  void abandon() override;
  void admit(const Transfer& transfer) const override;

  std::int32_t checked(std::int32_t region) const {
    return static_cast<std::int32_t>(index_of(region, at(sources_.regions())));
  }
  void size_lists();
  void work_reaper();
  void work_stager();
  std::chrono::nanoseconds pause() const;
  bool direct(std::uint32_t slot) const { return sources_.pinned(queue_[slot].transfer) != nullptr; }
  cuda::Event event_of(std::uint64_t number) const { return events_[number % kBatches].get(); }
  bool collect(Batch* batch);
  bool collect_filled(Batch* batch);
  void add(Batch* batch, std::uint32_t slot, int buffer);
  void begin_staging();
  void issue_batches(int most);
  void issue(Batch batch);
  cuda::Result enqueue(std::uint64_t number, std::uint64_t reader, const char** call);
  cuda::Result copy_all(const char** call);
  cuda::Result copy_once(const char** call);
  cuda::Result ended(std::uint64_t number) const;
  void gather_copies(const std::vector<Load>& loads);
  void end_batch(int error);
  void broken(cuda::Result result, const char* call);
  [[noreturn]] void give_up(cuda::Result result, const char* call);
  unsigned char* buffer_at(int index) const { return ring_.data() + index * buffer_bytes_; }

  const FarSources sources_;
  const cuda::Driver& cuda_;
  const cuda::Context context_;
  const std::int64_t buffer_bytes_;
  const int copies_;
  const int stagers_;
  // Given back from the last to the first: the stream ends before the memory that it reads.
  const cuda::PinnedMemory ring_;
  std::vector<cuda::OwnEvent> events_;   // [kBatches], by number
  std::vector<cuda::OwnEvent> readers_;  // [kReads], by number
  const cuda::OwnStream stream_;

  // Of the thread that issues.
  bool batches_;  // the driver takes many copies in one call
  std::vector<cuda::Pointer> to_, from_;
  std::vector<std::size_t> sizes_;
  std::uint64_t waited_ = 0;  // the latest reader that the stream waits for

  std::condition_variable work_;    // something is under way, or the threads shall end
  std::condition_variable stage_;   // a transfer to stage, a buffer to stage it in
  std::condition_variable issued_;  // a batch was issued, or transfers failed
  bool issuing_ = false;
  std::deque<Batch> running_;
  std::uint64_t last_ = 0;  // number of the last batch
  std::vector<std::uint64_t> batch_of_;
  std::vector<std::uint64_t> read_of_;
  std::uint64_t reads_ = 0;             // number of the last reader
  std::deque<std::uint32_t> to_stage_;  // by priority
  std::deque<Load> filled_;
  std::vector<int> idle_;
};

void CudaEngine::admit(const Transfer& transfer) const {
  sources_.require_whole(transfer);
  if (transfer.bytes <= buffer_bytes_ || sources_.pinned(transfer) != nullptr) return;
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
  const int error = failed() ? error_ : ECANCELED;
  for (const std::uint32_t slot : to_stage_) finish(slot, error);
  for (const Load& load : filled_) {
    idle_.push_back(load.buffer);
    finish(load.slot, error);
  }
  to_stage_.clear();
  filled_.clear();
  issued_.notify_all();
}

// ---- beginning; the mutex is held

void CudaEngine::issue_batches(int most) {
  size_lists();
  if (issuing_) return;
  issuing_ = true;
  for (Batch batch; most > 0 && !halted() && collect(&batch); batch = {}, --most) issue(std::move(batch));
  issuing_ = false;
}

// The next batch. False: there is no work for it.
bool CudaEngine::collect(Batch* batch) {
  if (running_.size() == kBatches) return false;
  begin_staging();
  // A demand that is pinned goes before prefetches that were staged.
  const bool demanded =
      queue_.front() != kNone && queue_[queue_.front()].transfer.priority == Priority::kDemand;
  if (!filled_.empty() &&
      (!demanded || queue_[filled_.front().slot].transfer.priority == Priority::kDemand)) {
    return collect_filled(batch);
  }
  if (!startable()) return !filled_.empty() && collect_filled(batch);
  std::uint32_t slots[kCudaBatchCopies];
  const std::int64_t most = queue_.batch_bytes(queue_[queue_.front()].transfer);
  const auto joins = [&](const Node&, const Node& next) { return direct(next.transfer.slot); };
  const std::size_t count = queue_.begin_run(slots, kCudaBatchCopies, most, seconds_now(), joins);
  for (std::size_t i = 0; i < count; ++i) add(batch, slots[i], -1);
  return true;
}

// Moves the transfers at the front of the queue that are not pinned to the threads that stage them.
void CudaEngine::begin_staging() {
  bool any = false;
  while (startable() && !direct(queue_.front())) {
    const std::uint32_t slot = queue_.front();
    queue_.begin(slot, seconds_now());
    batch_of_[slot] = kNotIssued;
    // Reading takes time: a demand goes before prefetches that have not been read.
    const Priority priority = queue_[slot].transfer.priority;
    const auto place = std::find_if(to_stage_.begin(), to_stage_.end(), [&](std::uint32_t other) {
      return queue_[other].transfer.priority > priority;
    });
    to_stage_.insert(place, slot);
    any = true;
  }
  if (any) stage_.notify_all();
}

bool CudaEngine::collect_filled(Batch* batch) {
  const std::int64_t most = queue_.batch_bytes(queue_[filled_.front().slot].transfer);
  do {
    const Load load = filled_.front();
    filled_.pop_front();
    add(batch, load.slot, load.buffer);
  } while (!filled_.empty() && batch->bytes + queue_[filled_.front().slot].transfer.bytes <= most);
  return true;
}

void CudaEngine::add(Batch* batch, std::uint32_t slot, int buffer) {
  batch_of_[slot] = kNotIssued;
  batch->loads.push_back({slot, buffer});
  batch->bytes += queue_[slot].transfer.bytes;
}

// Releases the mutex during calls of the driver. REQUIRES: issuing_ is this thread's.
void CudaEngine::issue(Batch batch) {
  batch.number = ++last_;
  std::uint64_t reader = 0;
  for (const Load& load : batch.loads) reader = std::max(reader, read_of_[load.slot]);
  gather_copies(batch.loads);
  const char* call = "";
  cuda::Result result = cuda::kSuccess;
  {
    const Unlocked unlocked(&mutex_);
    result = enqueue(batch.number, reader, &call);
  }
  for (std::size_t i = 0; i < to_.size(); ++i) queue_.operation_begun();
  for (const Load& load : batch.loads) batch_of_[load.slot] = batch.number;
  batch.since = seconds_now();
  running_.push_back(std::move(batch));
  if (result != cuda::kSuccess) broken(result, call);
  work_.notify_one();
  issued_.notify_all();
}

// The calls of a batch: the wait for readers, the copies, the event.
cuda::Result CudaEngine::enqueue(std::uint64_t number, std::uint64_t reader, const char** call) {
  *call = "cuCtxPushCurrent";
  try {
    const cuda::Current current(context_);
    cuda::Result result = cuda::kSuccess;
    if (reader > waited_) {
      *call = "cuStreamWaitEvent";
      // Wait 10: for the kernels that read the pages.
      MOECHAT_WAIT(10, result = cuda_.stream_wait_event(stream_.get(), readers_[reader % kReads].get(), 0));
      if (result == cuda::kSuccess) waited_ = reader;
    }
    if (result == cuda::kSuccess) result = copy_all(call);
    // Also after a failure: what was issued before it must end before anything is said to be over.
    const cuda::Result recorded = cuda_.event_record(event_of(number), stream_.get());
    if (recorded == cuda::kSuccess) return result;
    static_cast<void>(cuda_.stream_synchronize(stream_.get()));
    if (result == cuda::kSuccess) *call = "cuEventRecord";
    return result == cuda::kSuccess ? recorded : result;
  } catch (const cuda::Error& error) {
    return error.code();
  }
}

cuda::Result CudaEngine::copy_all(const char** call) {
  for (int i = 1; i < copies_; ++i) {
    const cuda::Result result = copy_once(call);
    if (result != cuda::kSuccess) return result;
  }
  return copy_once(call);
}

cuda::Result CudaEngine::copy_once(const char** call) {
  if (batches_ && to_.size() > 1) {
    const cuda::Result result =
        cuda_.copy_batch(to_.data(), from_.data(), sizes_.data(), to_.size(), stream_.get());
    if (result == cuda::kSuccess) return result;
    // What a driver does not do with these sources it does one by one; a lost GPU says so again below. To
    // copy a block twice in the stream's turn is harmless.
    batches_ = false;
  }
  *call = "cuMemcpyHtoDAsync";
  for (std::size_t i = 0; i < to_.size(); ++i) {
    const void* const from = reinterpret_cast<const void*>(static_cast<std::uintptr_t>(from_[i]));
    const cuda::Result result = cuda_.copy_to_device(to_[i], from, sizes_[i], stream_.get());
    if (result != cuda::kSuccess) return result;
  }
  return cuda::kSuccess;
}

// The copies of a batch in to_, from_ and sizes_; neighbours here and there are one.
void CudaEngine::gather_copies(const std::vector<Load>& loads) {
  to_.clear();
  from_.clear();
  sizes_.clear();
  for (std::size_t i = 0; i < loads.size();) {
    const Transfer& first = queue_[loads[i].slot].transfer;
    std::int64_t bytes = first.bytes;
    std::size_t end = i + 1;
    for (; end < loads.size() && loads[i].buffer < 0; ++end) {
      const Transfer& next = queue_[loads[end].slot].transfer;
      if (!TransferQueue::adjacent(queue_[loads[end - 1].slot].transfer, next) ||
          next.to != first.to + bytes || !sources_.together(first, next))
        break;
      bytes += next.bytes;
    }
    const unsigned char* const from =
        loads[i].buffer < 0 ? sources_.pinned(first) : buffer_at(loads[i].buffer);
    to_.push_back(static_cast<cuda::Pointer>(reinterpret_cast<std::uintptr_t>(first.to)));
    from_.push_back(static_cast<cuda::Pointer>(reinterpret_cast<std::uintptr_t>(from)));
    sizes_.push_back(at(bytes));
    i = end;
  }
}

// ---- ending; the mutex is held

// Releases the mutex during calls of the driver: another thread may have ended the batch meanwhile.
void CudaEngine::reap() {
  while (!running_.empty()) {
    const std::uint64_t number = running_.front().number;
    cuda::Result result = cuda::kSuccess;
    {
      const Unlocked unlocked(&mutex_);
      result = ended(number);
    }
    if (running_.empty() || running_.front().number != number) continue;
    if (result == cuda::kNotReady) return;
    if (result != cuda::kSuccess) broken(result, "cuEventQuery");
    end_batch(result == cuda::kSuccess && !failed() ? 0 : EIO);
  }
}

cuda::Result CudaEngine::ended(std::uint64_t number) const {
  try {
    const cuda::Current current(context_);
    return cuda_.event_query(event_of(number));
  } catch (const cuda::Error& error) {
    return error.code();
  }
}

void CudaEngine::end_batch(int error) {
  const Batch batch = std::move(running_.front());
  running_.pop_front();
  if (!running_.empty()) running_.front().since = std::max(running_.front().since, seconds_now());
  for (const Load& load : batch.loads) {
    if (load.buffer >= 0) idle_.push_back(load.buffer);
    finish(load.slot, error);
  }
  if (batch.loads.front().buffer >= 0) stage_.notify_all();
  if (error != 0) issued_.notify_all();
}

void CudaEngine::broken(cuda::Result result, const char* call) {
  fail(EIO, cuda::explain(result, call));
  abandon();
}

// ---- threads

void CudaEngine::work_reaper() {
#if defined(__linux__)
  prctl(PR_SET_TIMERSLACK, kTimerSlack, 0, 0, 0);
#endif
  Lock lock(mutex_);
  while (!ending_) {
    pump_as_thread();
    if (running_.empty()) {
      // Wait 11: for something to be under way.
      MOECHAT_WAIT(11, work_.wait(lock, [this] { return ending_ || !running_.empty(); }));
      continue;
    }
    const std::chrono::nanoseconds time = pause();
    lock.unlock();
    std::this_thread::sleep_for(time);
    lock.lock();
  }
}

// How long to sleep before the next look at the oldest batch: half of the time that it should still take,
// since the rate is an estimate; ever longer once it is late, for example behind kernels that read its pages.
std::chrono::nanoseconds CudaEngine::pause() const {
  const Batch& batch = running_.front();
  const double rate = queue_.bandwidth();
  const double whole = rate > 0 ? static_cast<double>(batch.bytes) / rate : 0;
  const double gone = seconds_now() - batch.since;
  const auto half = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(std::abs(whole - gone) / 2));
  const bool busy = queue_.queued() > 0 || !filled_.empty() || awaited();
  return std::clamp<std::chrono::nanoseconds>(half, busy ? kShortPause : kLeastPause, kLongPause);
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
    const int error = sources_.fill(transfer, buffer_at(buffer));
    lock.lock();
    // A link that is stopping may have been given up: its targets are not its own any more.
    if (error != 0 || halted()) {
      idle_.push_back(buffer);
      finish(slot, error != 0 ? error : failed() ? error_ : ECANCELED);
      issued_.notify_all();
      continue;
    }
    filled_.push_back({slot, buffer});
    issue_batches(kAllBatches);
  }
}

// ---- order on the GPU

void CudaEngine::give_up(cuda::Result result, const char* call) {
  const Lock lock(mutex_);
  broken(result, call);
  throw std::runtime_error(why());
}

bool CudaEngine::fills_first(void* stream, const std::uint32_t* slots, std::int64_t count,
                             std::chrono::microseconds limit) {
  const Clock::time_point until = Clock::now() + std::min<Clock::duration>(limit, std::chrono::hours(1));
  std::uint64_t latest = 0;
  {
    Lock lock(mutex_);
    pump();
    const auto pending = [&](std::uint32_t slot) {
      if (slot >= queue_.slots()) throw std::out_of_range("slot " + std::to_string(slot));
      const State state = queue_[slot].state;
      return state == State::kQueued || (state == State::kStarted && batch_of_[slot] == kNotIssued);
    };
    const auto issued = [&] {
      if (!halted()) issue_batches(kAllBatches);
      return halted() || std::none_of(slots, slots + count, pending);
    };
    const VirtualClock* const clock = virtual_clock();
    // Wait 13: for transfers that have not been given to the stream.
    bool all = true;
    MOECHAT_WAIT(13, all = clock == nullptr ? issued_.wait_until(lock, until, issued)
                                            : step_until(*clock, &lock, issued));
    if (failed()) throw std::runtime_error(why());
    if (stopping_) throw std::runtime_error("the link was stopped");
    if (!all) return false;
    for (std::int64_t i = 0; i < count; ++i) {
      if (queue_[slots[i]].state == State::kStarted) latest = std::max(latest, batch_of_[slots[i]]);
    }
  }
  if (latest == 0) return true;
  const cuda::Current current(context_);
  // Wait 14: for the fills, on the GPU. If the batch has ended meanwhile, its event may stand for a later
  // one: the wait is then longer than it need be, never shorter.
  cuda::Result result = cuda::kSuccess;
  MOECHAT_WAIT(14, result = cuda_.stream_wait_event(stream, event_of(latest), 0));
  if (result != cuda::kSuccess) give_up(result, "cuStreamWaitEvent");
  return true;
}

// Readers are numbered; the events of the last kReads are kept. Of an earlier one the event stands for a
// later reader of the same stream, which ends later still: the wait is longer than it need be, never shorter.
void CudaEngine::reads_first(void* stream, const std::uint32_t* slots, std::int64_t count) {
  std::uint64_t number = 0;
  {
    const Lock lock(mutex_);
    if (failed()) throw std::runtime_error(why());
    size_lists();
    for (std::int64_t i = 0; i < count; ++i) {
      if (slots[i] >= read_of_.size()) throw std::out_of_range("slot " + std::to_string(slots[i]));
    }
    number = ++reads_;
  }
  {
    const cuda::Current current(context_);
    const cuda::Result result = cuda_.event_record(readers_[number % kReads].get(), stream);
    if (result != cuda::kSuccess) give_up(result, "cuEventRecord");
  }
  const Lock lock(mutex_);
  for (std::int64_t i = 0; i < count; ++i) read_of_[slots[i]] = number;
}

}  // namespace

std::unique_ptr<Link> make_cuda_link(std::vector<CudaRegion> regions, const CudaLinkOptions& options) {
  const auto require = [](bool right, const char* name, std::int64_t value, const char* range) {
    if (right) return;
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be " + range);
  };
  require(options.in_flight_bytes >= 0, "in_flight_bytes", options.in_flight_bytes, "0 or positive");
  require(options.buffer_bytes >= 0, "buffer_bytes", options.buffer_bytes, "0 or positive");
  require(options.buffers >= 0 && options.buffers <= kMostBuffers, "buffers", options.buffers,
          "from 0 to 64");
  require(options.threads >= 0 && options.threads <= kMostThreads, "threads", options.threads,
          "from 0 to 64");
  require(options.copies >= 1 && options.copies <= kMostCopies, "copies", options.copies, "from 1 to 64");
  const cuda::Context context = cuda::primary_context(options.device);  // loads the driver
  FarSources sources(std::move(regions));
  require(!sources.staged() || virtual_clock() == nullptr, "pinned", 0, "1 on a virtual clock");
  const int buffers = !sources.staged() ? 0 : options.buffers > 0 ? options.buffers : kDefaultBuffers;
  return std::make_unique<QueuedLink>(
      std::make_unique<CudaEngine>(std::move(sources), context, options, buffers));
}

}  // namespace moechat
