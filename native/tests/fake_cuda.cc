// Implements the part of NVIDIA's driver that moechat calls, in host memory: a library with the same symbols,
// for tests on machines without a GPU. Asynchronous calls are asynchronous here too: every stream is a
// thread that executes its operations in order, with delays and faults that a test sets.
//
// Stricter than the driver, to detect mistakes: copies from unpinned memory, copies into anything but device
// memory, and destroyed streams are refused. Device memory is memory from cuMemAlloc, or memory registered by
// fake_cuda_adopt.
//
// Copies of all streams go through one engine, one after another: each begins when the one before has ended,
// its call was made and what its stream waits for has ended. These moments are computed, so that late threads
// of this process do not add up.
//
//   fake_cuda_set(name, value): bandwidth (bytes/s, 0: none), latency and jitter (s), seed, vram and
//   pin_limit (bytes), fail_after (copies, after which the context is dead), piece (bytes copied at a time,
//   with a pause between), version, no_batches (1: batches are refused), gate (copies that may begin in all,
//   -1: any), call (s that a call for copies blocks), no_bytes (1: copies take their time and move nothing),
//   at_once (1: what an idle stream is given is done by the caller),
//   refuse_pins (so many of the next registrations are refused), refuse_with (their error), busy (0: begins
//   to count busy and idle anew)
//
//   fake_cuda_get(name): number of copies, batches, waits, streams, events; bytes copied (bytes), pinned and
//   allocated (in bytes); busy and idle (s in which the engine copied, and between two copies). Copies
//   between two records of an event in their stream are a group: groups (how many), largest_group (bytes),
//   groups_now (not ended), most_groups (at a time), emptied (how often one ended with no other behind it)
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Result = int;
constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101,
                 kInvalidContext = 201, kInvalidHandle = 400, kAlreadyRegistered = 712, kNotRegistered = 713,
                 kNotReady = 600, kNotSupported = 801, kIllegalAddress = 700;

// As tests make it: eight-byte words, in this order.
struct FakeKernel {
  std::uint64_t parameters;
  std::uint64_t launches;
  std::uint64_t launched[6];  // grid, threads, shared memory, stream
  std::uint64_t sizes[64];
  std::uint64_t values[64];
  void (*run)();  // what it does, at once; null: nothing
};

struct Event {
  std::uint64_t recorded = 0;
  std::uint64_t completed = 0;
};

std::map<std::string, double> initial_settings() {
  return {{"vram", 8e9}, {"pin_limit", 1e18}, {"fail_after", -1},
          {"gate", -1},  {"version", 12080},  {"refuse_with", kOutOfMemory}};
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, double> settings = initial_settings();
  std::map<std::string, double> counts;
  double free_at = 0;                            // when the engine has made all copies that have begun
  std::map<std::uintptr_t, std::size_t> device;  // ranges
  std::map<std::uintptr_t, std::size_t> pinned;
  std::set<const void*> streams;  // not destroyed
  std::map<const void*, std::shared_ptr<Event>> events;
  std::mt19937_64 random{1};
  Result dead = kSuccess;
  int context = 0;
};

// Never destroyed: threads of streams use it to the end of the process.
World& world() {
  static World* const one = new World;
  return *one;
}

thread_local int current_depth = 0;
thread_local double unblocked = 0;  // of the thread of a stream: when it last had to wait for an event

struct Stream {
  std::deque<std::function<void()>> work;
  bool busy = false;
  bool ending = false;
  std::size_t group = 0;  // bytes of copies since the last record of an event
  std::thread thread;
};

using Lock = std::unique_lock<std::mutex>;

bool within(const std::map<std::uintptr_t, std::size_t>& ranges, const void* at, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(at);
  auto next = ranges.upper_bound(begin);
  if (next == ranges.begin()) return false;
  --next;
  return begin + bytes <= next->first + next->second;
}

bool overlaps(const std::map<std::uintptr_t, std::size_t>& ranges, const void* at, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(at);
  return std::any_of(ranges.begin(), ranges.end(), [&](const auto& range) {
    return range.first < begin + bytes && begin < range.first + range.second;
  });
}

void run(Stream* stream) {
  prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
  World& all = world();
  Lock lock(all.mutex);
  for (;;) {
    all.changed.wait(lock, [&] { return stream->ending || !stream->work.empty(); });
    if (stream->work.empty()) return;
    const std::function<void()> next = std::move(stream->work.front());
    stream->work.pop_front();
    stream->busy = true;
    lock.unlock();
    next();
    lock.lock();
    stream->busy = false;
    all.changed.notify_all();
  }
}

void sleep_for(double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

void copy(void* to, const void* from, std::size_t bytes, double called) {
  World& all = world();
  double end = 0;
  std::size_t piece = bytes;
  bool fails = false;
  bool no_bytes = false;
  {
    Lock lock(all.mutex);
    double begin = std::max({all.free_at, called, unblocked});
    const auto may_begin = [&] {
      const double gate = all.settings["gate"];
      return gate < 0 || all.counts["copies"] < gate || all.dead != kSuccess;
    };
    if (!may_begin()) {
      ++all.counts["held"];
      all.changed.wait(lock, may_begin);
      --all.counts["held"];
      begin = now();
    }
    if (all.dead != kSuccess) return;
    const double bandwidth = all.settings["bandwidth"];
    const double delay = all.settings["latency"] +
                         (bandwidth > 0 ? static_cast<double>(bytes) / bandwidth : 0) +
                         all.settings["jitter"] * std::uniform_real_distribution<double>()(all.random);
    if (all.free_at > 0) all.counts["idle"] += begin - all.free_at;
    all.counts["busy"] += delay;
    all.free_at = end = begin + delay;
    if (all.settings["piece"] > 0) piece = static_cast<std::size_t>(all.settings["piece"]);
    const double copies = all.counts["copies"]++;
    no_bytes = all.settings["no_bytes"] > 0;
    fails = all.settings["fail_after"] >= 0 && copies >= all.settings["fail_after"];
    if (!fails) all.counts["bytes"] += static_cast<double>(bytes);
  }
  sleep_for(end - now());
  const std::size_t moved = no_bytes ? 0 : fails ? bytes / 2 : bytes;
  for (std::size_t done = 0; done < moved; done += piece) {
    std::memcpy(static_cast<char*>(to) + done, static_cast<const char*>(from) + done,
                std::min(piece, bytes - done));
    if (piece < bytes) std::this_thread::yield();
  }
  if (!fails) return;
  const Lock lock(all.mutex);
  all.dead = kIllegalAddress;
  all.changed.notify_all();
}

// As in the driver, an event may be destroyed while streams still wait for it. Null: no event.
std::shared_ptr<Event> event_at(const void* event) {
  World& all = world();
  const Lock lock(all.mutex);
  const auto found = all.events.find(event);
  return found == all.events.end() ? nullptr : found->second;
}

Result give(void* stream, std::function<void()> work) {
  World& all = world();
  {
    const Lock lock(all.mutex);
    if (all.streams.count(stream) == 0) return kInvalidHandle;
    auto* const one = static_cast<Stream*>(stream);
    if (all.settings["at_once"] == 0 || one->busy || !one->work.empty()) {
      one->work.push_back(std::move(work));
      all.changed.notify_all();
      return kSuccess;
    }
  }
  work();
  return kSuccess;
}

// A call for copies of so many bytes, with `work` for the stream.
Result give_copies(void* stream, std::size_t bytes, std::function<void()> work) {
  World& all = world();
  double blocks = 0;
  {
    const Lock lock(all.mutex);
    blocks = all.settings["call"];
    if (all.streams.count(stream) != 0) static_cast<Stream*>(stream)->group += bytes;
  }
  sleep_for(blocks);
  return give(stream, std::move(work));
}

// A record in the stream ends a group, if there were copies. Returns whether it does.
bool end_group(void* stream) {
  World& all = world();
  const Lock lock(all.mutex);
  if (all.streams.count(stream) == 0) return false;
  const std::size_t bytes = std::exchange(static_cast<Stream*>(stream)->group, 0);
  if (bytes == 0) return false;
  std::map<std::string, double>& counts = all.counts;
  ++counts["groups"];
  counts["largest_group"] = std::max(counts["largest_group"], static_cast<double>(bytes));
  counts["most_groups"] = std::max(counts["most_groups"], ++counts["groups_now"]);
  return true;
}

Result usable() {
  World& all = world();
  const Lock lock(all.mutex);
  if (all.dead != kSuccess) return all.dead;
  return current_depth > 0 ? kSuccess : kInvalidContext;
}

Result copyable(unsigned long long to, const void* from, std::size_t bytes) {
  const Result state = usable();
  if (state != kSuccess) return state;
  World& all = world();
  const Lock lock(all.mutex);
  const void* const target = reinterpret_cast<const void*>(static_cast<std::uintptr_t>(to));
  return within(all.device, target, bytes) && within(all.pinned, from, bytes) ? kSuccess : kInvalidValue;
}

// CUmemcpyAttributes.
struct CopyAttributes {
  int source_order;
  int source_hint[2];
  int target_hint[2];
  unsigned flags;
};

// Makes the copies of a batch in random order; the batch as a whole keeps its place in the stream.
Result copy_batch(const unsigned long long* to, const unsigned long long* from, const std::size_t* bytes,
                  std::size_t count, const CopyAttributes* attributes, const std::size_t* attributes_from,
                  std::size_t attributes_count, std::size_t* failed, void* stream) {
  World& all = world();
  struct One {
    void* to;
    const void* from;
    std::size_t bytes;
  };
  std::vector<One> copies;
  std::size_t sum = 0;
  {
    const Lock lock(all.mutex);
    ++all.counts["batches"];
    if (all.settings["no_batches"] > 0) return kNotSupported;
  }
  if (stream == nullptr || count == 0 || attributes_count != 1 || attributes_from[0] != 0 ||
      attributes[0].source_order < 1 || attributes[0].source_order > 3 || attributes[0].flags > 1) {
    return kInvalidValue;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const void* const source = reinterpret_cast<const void*>(static_cast<std::uintptr_t>(from[i]));
    const Result state = copyable(to[i], source, bytes[i]);
    if (failed != nullptr) *failed = i;
    if (state != kSuccess) return state;
    copies.push_back({reinterpret_cast<void*>(static_cast<std::uintptr_t>(to[i])), source, bytes[i]});
    sum += bytes[i];
  }
  {
    const Lock lock(all.mutex);
    std::shuffle(copies.begin(), copies.end(), all.random);
  }
  return give_copies(stream, sum, [copies = std::move(copies), called = now()] {
    for (const One& one : copies) copy(one.to, one.from, one.bytes, called);
  });
}

}  // namespace

extern "C" {

void fake_cuda_set(const char* name, double value) {
  World& all = world();
  const Lock lock(all.mutex);
  all.settings[name] = value;
  if (std::string(name) == "seed") all.random.seed(static_cast<std::uint64_t>(value));
  if (std::string(name) == "busy") all.free_at = all.counts["busy"] = all.counts["idle"] = 0;
  all.changed.notify_all();
}
double fake_cuda_get(const char* name) {
  World& all = world();
  const Lock lock(all.mutex);
  return all.counts[name];
}
// Replaces overlapping earlier ranges: their memory must have been freed.
void fake_cuda_adopt(void* at, std::size_t bytes) {
  World& all = world();
  const Lock lock(all.mutex);
  const auto begin = reinterpret_cast<std::uintptr_t>(at);
  for (auto range = all.device.begin(); range != all.device.end();) {
    const bool apart = range->first + range->second <= begin || begin + bytes <= range->first;
    range = apart ? std::next(range) : all.device.erase(range);
  }
  all.device[begin] = bytes;
}
// Pinned memory of another library, such as torch: copies may read it, and it does not count.
void fake_cuda_pin(void* at, std::size_t bytes) {
  World& all = world();
  const Lock lock(all.mutex);
  all.pinned[reinterpret_cast<std::uintptr_t>(at)] = bytes;
}
void fake_cuda_unpin(void* at) {
  World& all = world();
  const Lock lock(all.mutex);
  all.pinned.erase(reinterpret_cast<std::uintptr_t>(at));
}
void fake_cuda_disown(void* at) {
  World& all = world();
  const Lock lock(all.mutex);
  all.device.erase(reinterpret_cast<std::uintptr_t>(at));
}
// Restores the initial state and settings. REQUIRES: no operation is in progress.
void fake_cuda_reset() {
  World& all = world();
  const Lock lock(all.mutex);
  all.dead = kSuccess;
  all.settings = initial_settings();
  all.free_at = 0;
  for (const char* const name : {"copies", "batches", "bytes", "waits", "busy", "idle", "groups",
                                 "largest_group", "most_groups", "emptied"}) {
    all.counts[name] = 0;
  }
}

Result cuInit(unsigned) { return kSuccess; }
Result cuDriverGetVersion(int* version) {
  World& all = world();
  const Lock lock(all.mutex);
  *version = static_cast<int>(all.settings["version"]);
  return kSuccess;
}
Result cuGetErrorName(Result error, const char** text) {
  *text = error == kOutOfMemory      ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                     : "CUDA_ERROR_OF_THE_FAKE";
  return kSuccess;
}
Result cuGetErrorString(Result error, const char** text) {
  *text = error == kIllegalAddress ? "an illegal memory access was encountered" : "an error";
  return kSuccess;
}
Result cuDeviceGetCount(int* count) {
  *count = 1;
  return kSuccess;
}
Result cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? kSuccess : kInvalidDevice;
}
Result cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &world().context;
  return kSuccess;
}
Result cuCtxPushCurrent_v2(void* context) {
  if (context != &world().context) return kInvalidContext;
  ++current_depth;
  return kSuccess;
}
Result cuCtxPopCurrent_v2(void** context) {
  if (current_depth == 0) return kInvalidContext;
  --current_depth;
  *context = &world().context;
  return kSuccess;
}
Result cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  World& all = world();
  const Lock lock(all.mutex);
  *total = static_cast<std::size_t>(all.settings["vram"]);
  *free = *total - static_cast<std::size_t>(all.counts["allocated"]);
  return kSuccess;
}
Result cuMemAlloc_v2(unsigned long long* at, std::size_t bytes) {
  const Result state = usable();
  if (state != kSuccess) return state;
  World& all = world();
  const Lock lock(all.mutex);
  if (all.counts["allocated"] + static_cast<double>(bytes) > all.settings["vram"]) return kOutOfMemory;
  void* const memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (memory == nullptr) return kOutOfMemory;
  all.device[reinterpret_cast<std::uintptr_t>(memory)] = bytes;
  all.counts["allocated"] += static_cast<double>(bytes);
  *at = reinterpret_cast<std::uintptr_t>(memory);
  return kSuccess;
}
Result cuMemFree_v2(unsigned long long at) {
  World& all = world();
  const Lock lock(all.mutex);
  const auto found = all.device.find(static_cast<std::uintptr_t>(at));
  if (found == all.device.end()) return kInvalidValue;
  all.counts["allocated"] -= static_cast<double>(found->second);
  all.device.erase(found);
  std::free(reinterpret_cast<void*>(static_cast<std::uintptr_t>(at)));
  return kSuccess;
}
Result cuMemHostRegister_v2(void* at, std::size_t bytes, unsigned) {
  const Result state = usable();
  if (state != kSuccess) return state;
  World& all = world();
  const Lock lock(all.mutex);
  if (all.settings["refuse_pins"] > 0) {
    --all.settings["refuse_pins"];
    return static_cast<Result>(all.settings["refuse_with"]);
  }
  if (overlaps(all.pinned, at, bytes)) return kAlreadyRegistered;
  if (all.counts["pinned"] + static_cast<double>(bytes) > all.settings["pin_limit"]) return kOutOfMemory;
  all.pinned[reinterpret_cast<std::uintptr_t>(at)] = bytes;
  all.counts["pinned"] += static_cast<double>(bytes);
  return kSuccess;
}
Result cuMemHostUnregister(void* at) {
  World& all = world();
  const Lock lock(all.mutex);
  const auto found = all.pinned.find(reinterpret_cast<std::uintptr_t>(at));
  if (found == all.pinned.end()) return kNotRegistered;
  all.counts["pinned"] -= static_cast<double>(found->second);
  all.pinned.erase(found);
  return all.dead;
}
Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return usable();
}
Result cuStreamCreateWithPriority(void** stream, unsigned, int) {
  const Result state = usable();
  if (state != kSuccess) return state;
  auto* const made = new Stream;
  made->thread = std::thread(run, made);
  *stream = made;
  World& all = world();
  const Lock lock(all.mutex);
  all.streams.insert(made);
  ++all.counts["streams"];
  return kSuccess;
}
// As in the driver, queued operations still finish.
Result cuStreamDestroy_v2(void* stream) {
  World& all = world();
  auto* const one = static_cast<Stream*>(stream);
  {
    const Lock lock(all.mutex);
    if (all.streams.erase(stream) == 0) return kInvalidHandle;
    one->ending = true;
    --all.counts["streams"];
    all.changed.notify_all();
  }
  one->thread.join();
  delete one;
  return kSuccess;
}
Result cuStreamWaitEvent(void* stream, void* event, unsigned) {
  const Result state = usable();
  if (state != kSuccess) return state;
  World& all = world();
  const std::shared_ptr<Event> awaited = event_at(event);
  if (!awaited) return kInvalidHandle;
  std::uint64_t number = 0;
  {
    const Lock lock(all.mutex);
    number = awaited->recorded;
    ++all.counts["waits"];
  }
  return give(stream, [awaited, number, &all] {
    Lock lock(all.mutex);
    const auto ready = [&] { return awaited->completed >= number || all.dead != kSuccess; };
    if (ready()) return;
    all.changed.wait(lock, ready);
    unblocked = now();
  });
}
Result cuStreamSynchronize(void* stream) {
  World& all = world();
  const auto* const one = static_cast<const Stream*>(stream);
  Lock lock(all.mutex);
  if (all.streams.count(stream) == 0) return kInvalidHandle;
  all.changed.wait(lock, [&] { return one->work.empty() && !one->busy; });
  return all.dead;
}
Result cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  const Result state = usable();
  return state == kSuccess ? give(stream, [function, data] { function(data); }) : state;
}
Result cuEventCreate(void** event, unsigned) {
  const Result state = usable();
  if (state != kSuccess) return state;
  const auto made = std::make_shared<Event>();
  *event = made.get();
  World& all = world();
  const Lock lock(all.mutex);
  all.events[made.get()] = made;
  ++all.counts["events"];
  return kSuccess;
}
Result cuEventDestroy_v2(void* event) {
  World& all = world();
  const Lock lock(all.mutex);
  if (all.events.erase(event) == 0) return kInvalidHandle;
  --all.counts["events"];
  return kSuccess;
}
Result cuEventRecord(void* event, void* stream) {
  const Result state = usable();
  if (state != kSuccess) return state;
  World& all = world();
  const std::shared_ptr<Event> recorded = event_at(event);
  if (!recorded) return kInvalidHandle;
  std::uint64_t number = 0;
  {
    const Lock lock(all.mutex);
    number = ++recorded->recorded;
  }
  const bool ends_group = end_group(stream);
  return give(stream, [recorded, number, ends_group, &all] {
    const Lock lock(all.mutex);
    if (ends_group && --all.counts["groups_now"] == 0) ++all.counts["emptied"];
    recorded->completed = std::max(recorded->completed, number);
    all.changed.notify_all();
  });
}
Result cuEventQuery(void* event) {
  const std::shared_ptr<Event> asked = event_at(event);
  if (!asked) return kInvalidHandle;
  World& all = world();
  const Lock lock(all.mutex);
  if (all.dead != kSuccess) return all.dead;
  return asked->completed >= asked->recorded ? kSuccess : kNotReady;
}
Result cuEventSynchronize(void* event) {
  const std::shared_ptr<Event> awaited = event_at(event);
  if (!awaited) return kInvalidHandle;
  World& all = world();
  Lock lock(all.mutex);
  const std::uint64_t number = awaited->recorded;
  all.changed.wait(lock, [&] { return awaited->completed >= number || all.dead != kSuccess; });
  return all.dead;
}
Result cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, std::size_t bytes, void* stream) {
  const Result state = copyable(to, from, bytes);
  if (state != kSuccess) return state;
  void* const target = reinterpret_cast<void*>(static_cast<std::uintptr_t>(to));
  return give_copies(stream, bytes,
                     [target, from, bytes, called = now()] { copy(target, from, bytes, called); });
}
// A "function" is a FakeKernel, made by the test: a launch copies the parameters into it.
Result cuFuncGetParamInfo(void* function, std::size_t index, std::size_t* offset, std::size_t* size) {
  const auto* const kernel = static_cast<const FakeKernel*>(function);
  if (index >= kernel->parameters) return kInvalidValue;
  *offset = 0;
  for (std::size_t at = 0; at < index; ++at) *offset += kernel->sizes[at];
  *size = kernel->sizes[index];
  return kSuccess;
}
Result cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned, unsigned, unsigned shared_bytes, void* stream, void** parameters, void**) {
  auto* const kernel = static_cast<FakeKernel*>(function);
  if (grid_x == 0 || grid_y == 0 || grid_z == 0) return kInvalidValue;
  const std::uint64_t launched[] = {grid_x,  grid_y,       grid_z,
                                    block_x, shared_bytes, reinterpret_cast<std::uintptr_t>(stream)};
  std::memcpy(kernel->launched, launched, sizeof(launched));
  for (std::size_t at = 0; at < kernel->parameters; ++at) {
    kernel->values[at] = 0;
    std::memcpy(&kernel->values[at], parameters[at], kernel->sizes[at]);
  }
  ++kernel->launches;
  if (kernel->run != nullptr) kernel->run();
  return kSuccess;
}
Result cuMemcpyBatchAsync(unsigned long long* to, unsigned long long* from, std::size_t* bytes,
                          std::size_t count, CopyAttributes* attributes, std::size_t* attributes_from,
                          std::size_t attributes_count, std::size_t* failed, void* stream) {
  return copy_batch(to, from, bytes, count, attributes, attributes_from, attributes_count, failed, stream);
}
Result cuMemcpyBatchAsync_v2(const unsigned long long* to, const unsigned long long* from,
                             const std::size_t* bytes, std::size_t count, const CopyAttributes* attributes,
                             const std::size_t* attributes_from, std::size_t attributes_count, void* stream) {
  return copy_batch(to, from, bytes, count, attributes, attributes_from, attributes_count, nullptr, stream);
}
}
