// A model of a GPU in time: the part of NVIDIA's driver that moechat calls, on a virtual clock. Nothing is
// copied or computed, and nothing sleeps; an operation only takes its time. See
// native/src/cuda/virtual_clock.h.
//
// The model. A stream is a queue of operations: kernels, copies, records of events, waits for events. One
// engine computes, one copies to the GPU, one from it; an engine serves one operation at a time, of those at
// the head of a stream and ready the one that was given first ("turns" 1: the stream that waits longest). The
// host is one thread: a call takes host time, and an operation cannot begin before it was given, and its
// latency has passed. While the CPU computes experts, copies to the GPU and the CPU slow each other down.
//
// timed_set(name, value): seconds
//   copy_call       host: one copy, or one batch of them
//   batch_copy      host: each copy of a batch
//   event_call      host: to record, query or wait for an event
//   copy_latency    from the call of a copy to its first byte, on an idle engine
//   copy_overhead   engine: each copy, besides its bytes
//   launch_latency  from the launch of a kernel or graph to its begin, on an idle GPU
//   event_latency   GPU: from a completed event to the begin of what waits for it in another stream
//   wake_spin, wake_link  host: from a completed event to the thread that waits for it, and to a link's
//   thread
// and bytes a second: h2d, h2d_together (while the CPU computes), d2h, cpu, cpu_together (while copies run).
//
// timed_get(name): counts of launches, graphs, copies (of the link), batches, small_copies, to_host, waits
// (of streams), wakes (of the host); bytes (of the link); and seconds since timed_reset: h2d_busy, drained
// (the engine idle while the link had transfers to make), gpu_busy, gpu_held (idle, waiting for copies),
// gpu_starved (idle, waiting for the host), host_waited (for the GPU), cpu_busy (computing experts).
// model: processor time of this model.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <queue>
#include <set>
#include <string>
#include <vector>

namespace {

using Result = int;
constexpr Result kSuccess = 0, kInvalidValue = 1, kInvalidDevice = 101, kInvalidHandle = 400, kNotReady = 600;
constexpr double kNever = std::numeric_limits<double>::infinity();
// Moments that differ by less are the same: sums of times round.
constexpr double kSame = 1e-12;

enum class Kind { kCompute, kToDevice, kToHost, kRecord, kWait };
constexpr int kEngines = 3;  // the first three kinds

struct Event {
  std::uint64_t recorded = 0;
  std::uint64_t completed = 0;
  double moment = 0;  // of the last completion
};

struct Operation {
  Kind kind;
  std::uint64_t number;  // in the order of calls
  double ready;          // not before
  double seconds = 0;    // of an engine at full speed
  std::shared_ptr<Event> event;
  std::uint64_t record = 0;
};

struct Stream {
  bool of_link = false;  // of the highest priority, as the links' streams are
  std::deque<Operation> queue;
  bool running = false;  // the first of the queue
  std::uint64_t served = 0;
};

struct Engine {
  Stream* stream = nullptr;  // whose operation runs
  double left = 0;           // seconds at full speed
};

// A kernel, made by the caller. One of its parameters may be a list with the first entry of each of `rows`
// rows, and the number of entries behind them.
struct TimedKernel {
  std::uint64_t parameters;
  std::uint64_t sizes[64];
  double host;           // seconds of the host's thread
  double seconds;        // of the GPU
  double entry_seconds;  // and for each entry
  std::int64_t list;     // number of that parameter; -1: it has none
  std::int64_t rows;
};

struct Watcher {
  std::int64_t (*pump)(void*, int);
  void* link;
};

struct World {
  double now = 0;
  std::map<std::string, double> figures;
  std::map<std::string, double> counts;
  std::uint64_t calls = 0;
  std::uint64_t services = 0;
  std::set<Stream*> streams;
  std::map<const void*, std::shared_ptr<Event>> events;
  Engine engines[kEngines];
  std::vector<Watcher> watchers;
  std::priority_queue<double, std::vector<double>, std::greater<>> wakes;  // of the links' threads
  std::int64_t pending = 0;  // transfers that the links have still to make
  bool pumping = false;
  double aside = 0;  // host time of a link's thread, while it is pumped
  bool cpu_computes = false;
  const void* computing = nullptr;  // the stream that kernels were given to last
  std::uintptr_t next_address = std::uintptr_t{1} << 44;
  int context = 0;
};

World& world() {
  static World* const one = new World;
  return *one;
}

double figure(const char* name) { return world().figures[name]; }

double speed(Kind kind) {
  World& all = world();
  if (kind != Kind::kToDevice || !all.cpu_computes) return 1;
  const double alone = all.figures["h2d"];
  return alone > 0 ? all.figures["h2d_together"] / alone : 1;
}

// Whether the first operation of a queue may begin, apart from its engine.
bool ready(const Stream& stream) {
  const Operation& first = stream.queue.front();
  if (first.ready > world().now + kSame) return false;
  return first.kind != Kind::kWait || first.event->completed >= first.record;
}

// Ends records and waits that are due, and gives operations to idle engines.
void settle() {
  World& all = world();
  for (bool again = true; again;) {
    again = false;
    Stream* best[kEngines] = {};
    for (Stream* const stream : all.streams) {
      while (!stream->running && !stream->queue.empty() && ready(*stream)) {
        Operation& first = stream->queue.front();
        if (first.kind == Kind::kRecord) {
          Event& event = *first.event;
          event.completed = std::max(event.completed, first.record);
          event.moment = all.now;
          if (stream->of_link) all.wakes.push(all.now + figure("wake_link"));
        } else if (first.kind == Kind::kWait) {
          const double begin = first.event->moment + figure("event_latency");
          if (begin > all.now + kSame) {
            first.ready = begin;
            break;
          }
        } else {
          break;
        }
        stream->queue.pop_front();
        again = true;
      }
      if (stream->running || stream->queue.empty() || !ready(*stream)) continue;
      const Operation& first = stream->queue.front();
      if (first.kind == Kind::kRecord || first.kind == Kind::kWait) continue;
      Stream*& chosen = best[static_cast<int>(first.kind)];
      const bool turns = all.figures["turns"] > 0;
      const auto key = [&](const Stream* one) { return turns ? one->served : one->queue.front().number; };
      if (chosen == nullptr || key(stream) < key(chosen)) chosen = stream;
    }
    if (again) continue;
    for (int kind = 0; kind < kEngines; ++kind) {
      Engine& engine = all.engines[kind];
      if (engine.stream != nullptr || best[kind] == nullptr) continue;
      engine.stream = best[kind];
      engine.left = engine.stream->queue.front().seconds;
      engine.stream->running = true;
      engine.stream->served = ++all.services;
      again = engine.left <= kSame;
    }
    for (Engine& engine : all.engines) {
      if (engine.stream == nullptr || engine.left > kSame) continue;
      engine.stream->queue.pop_front();
      engine.stream->running = false;
      engine.stream = nullptr;
      again = true;
    }
  }
}

// When anything changes by itself.
double next_change(bool wakes) {
  World& all = world();
  double next = kNever;
  for (int kind = 0; kind < kEngines; ++kind) {
    const Engine& engine = all.engines[kind];
    if (engine.stream != nullptr)
      next = std::min(next, all.now + engine.left / speed(static_cast<Kind>(kind)));
  }
  for (const Stream* const stream : all.streams) {
    if (stream->running || stream->queue.empty()) continue;
    const double moment = stream->queue.front().ready;
    if (moment > all.now + kSame) next = std::min(next, moment);
  }
  if (wakes && !all.wakes.empty()) next = std::min(next, std::max(all.now, all.wakes.top()));
  return next;
}

// Counts what everything did for so long.
void count(double seconds) {
  World& all = world();
  std::map<std::string, double>& counts = all.counts;
  const bool copies = all.engines[static_cast<int>(Kind::kToDevice)].stream != nullptr;
  if (copies) counts["h2d_busy"] += seconds;
  if (!copies && all.pending > 0) counts["drained"] += seconds;
  if (all.engines[static_cast<int>(Kind::kCompute)].stream != nullptr) {
    counts["gpu_busy"] += seconds;
    return;
  }
  const auto* const stream = static_cast<const Stream*>(all.computing);
  const bool held = stream != nullptr && all.streams.count(const_cast<Stream*>(stream)) > 0 &&
                    !stream->queue.empty() && stream->queue.front().kind != Kind::kCompute;
  counts[held ? "gpu_held" : "gpu_starved"] += seconds;
}

void pump_all() {
  World& all = world();
  if (all.pumping) return;
  all.pumping = true;
  all.aside = 0;
  for (std::size_t i = 0; i < all.watchers.size(); ++i) all.watchers[i].pump(all.watchers[i].link, 1);
  all.pumping = false;
  all.aside = 0;
}

// How many transfers the links have still to make. REQUIRES: the caller holds no link's mutex.
void look() {
  World& all = world();
  if (all.pumping) return;
  all.pending = 0;
  for (const Watcher& one : all.watchers) all.pending += one.pump(one.link, 0);
}

// Moves the clock. wakes: the links' threads may run: not while the caller holds a link's mutex.
void run_to(double moment, bool wakes) {
  World& all = world();
  for (;;) {
    settle();
    if (wakes && !all.wakes.empty() && all.wakes.top() <= all.now + kSame) {
      while (!all.wakes.empty() && all.wakes.top() <= all.now + kSame) all.wakes.pop();
      ++all.counts["wakes"];
      pump_all();
      continue;
    }
    if (wakes) look();
    const double next = std::min(moment, next_change(wakes));
    const double seconds = next - all.now;
    if (seconds > 0) {
      count(seconds);
      for (int kind = 0; kind < kEngines; ++kind) {
        if (all.engines[kind].stream != nullptr)
          all.engines[kind].left -= seconds * speed(static_cast<Kind>(kind));
      }
      all.now = next;
    }
    if (next >= moment) {
      settle();
      return;
    }
  }
}

// Host time of a call of the driver.
void charge(double seconds) {
  World& all = world();
  if (all.pumping) {
    all.aside += seconds;
  } else {
    run_to(all.now + seconds, false);
  }
}

// Host time between calls of the driver: links' threads run meanwhile.
void spend(double seconds) { run_to(world().now + seconds, true); }

double called() { return world().now + world().aside; }

void give(Stream* stream, Operation operation) {
  World& all = world();
  operation.number = ++all.calls;
  // Operations of a stream begin in order.
  stream->queue.push_back(std::move(operation));
  settle();
}

double copy_seconds(std::size_t bytes, const char* rate) {
  const double bandwidth = figure(rate);
  return figure("copy_overhead") + (bandwidth > 0 ? static_cast<double>(bytes) / bandwidth : 0);
}

// Counts the processor time of the model itself, so that its callers' can be told apart.
class Spent {
 public:
  Spent() { ++depth_; }
  Spent(const Spent&) = delete;
  Spent& operator=(const Spent&) = delete;
  ~Spent() {
    if (--depth_ > 0) return;
    world().counts["model"] += now() - begun_;
  }

 private:
  static double now() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }

  static int depth_;
  const double begun_ = now();
};
int Spent::depth_ = 0;

std::shared_ptr<Event> event_at(const void* event) {
  const auto found = world().events.find(event);
  return found == world().events.end() ? nullptr : found->second;
}

Stream* stream_at(void* stream) {
  auto* const one = static_cast<Stream*>(stream);
  return world().streams.count(one) > 0 ? one : nullptr;
}

Result copy_many(const std::size_t* bytes, std::size_t many, void* stream) {
  const Spent spent;
  Stream* const one = stream_at(stream);
  if (one == nullptr || many == 0) return kInvalidValue;
  World& all = world();
  ++all.counts["batches"];
  charge(figure("copy_call") + static_cast<double>(many) * figure("batch_copy"));
  for (std::size_t i = 0; i < many; ++i) {
    ++all.counts["copies"];
    all.counts["bytes"] += static_cast<double>(bytes[i]);
    give(one,
         {Kind::kToDevice, 0, called() + figure("copy_latency"), copy_seconds(bytes[i], "h2d"), nullptr, 0});
  }
  return kSuccess;
}

// Waits on the host until a condition holds that the GPU will bring about.
template <class Condition>
bool wait_for(const Condition& holds) {
  World& all = world();
  const double begun = all.now;
  settle();
  while (!holds()) {
    const double next = next_change(true);
    if (next == kNever) return false;
    run_to(next, true);
  }
  all.counts["host_waited"] += all.now - begun;
  return true;
}

// A call that takes the host's thread for `host` seconds and the GPU for `device`.
void compute(const char* counter, void* stream, double host, double device) {
  const Spent spent;
  World& all = world();
  ++all.counts[counter];
  spend(host);
  all.computing = stream;
  give(static_cast<Stream*>(stream),
       {Kind::kCompute, 0, all.now + figure("launch_latency"), device, nullptr, 0});
}

}  // namespace

extern "C" {

void timed_set(const char* name, double value) { world().figures[name] = value; }
double timed_get(const char* name) { return world().counts[name]; }
double timed_now() { return world().now; }
void timed_reset() { world().counts.clear(); }
void timed_spend(double seconds) {
  const Spent spent;
  spend(seconds);
}
void timed_launch(void* stream, double host, double device) { compute("launches", stream, host, device); }
void timed_graph(void* stream, double host, double device) { compute("graphs", stream, host, device); }
// A copy of the host's thread, beside the link.
void timed_copy(void* stream, double bytes, int to_host) {
  const Spent spent;
  World& all = world();
  ++all.counts[to_host != 0 ? "to_host" : "small_copies"];
  spend(figure("copy_call"));
  give(static_cast<Stream*>(stream),
       {to_host != 0 ? Kind::kToHost : Kind::kToDevice, 0, all.now + figure("copy_latency"),
        copy_seconds(static_cast<std::size_t>(bytes), to_host != 0 ? "d2h" : "h2d"), nullptr, 0});
}
// Waits, spinning, for everything that a stream was given.
int timed_finish(void* stream) {
  const Spent spent;
  const auto* const one = static_cast<const Stream*>(stream);
  if (!wait_for([&] { return one->queue.empty(); })) return 1;
  spend(figure("wake_spin"));
  return 0;
}

// Waits for an event, spinning.
int timed_wait(void* event) {
  const Spent spent;
  const std::shared_ptr<Event> one = event_at(event);
  if (!one || !wait_for([&] { return one->completed >= one->recorded; })) return 1;
  spend(figure("wake_spin"));
  return 0;
}

// ---- the clock

double moechat_clock_now() { return called(); }
int moechat_clock_step() {
  const Spent spent;
  const double next = next_change(true);
  if (next == kNever) return 0;
  run_to(next, true);
  return 1;
}
void moechat_clock_watch(std::int64_t (*pump)(void*, int), void* link) {
  world().watchers.push_back({pump, link});
}
void moechat_clock_unwatch(void* link) {
  std::vector<Watcher>& all = world().watchers;
  all.erase(std::remove_if(all.begin(), all.end(), [&](const Watcher& one) { return one.link == link; }),
            all.end());
}
void moechat_clock_compute(double bytes) {
  const Spent spent;
  World& all = world();
  const double begun = all.now;
  double left = bytes;
  all.cpu_computes = true;
  while (left > 0) {
    settle();
    const bool copies = all.engines[static_cast<int>(Kind::kToDevice)].stream != nullptr;
    const double rate = figure(copies ? "cpu_together" : "cpu");
    const double moment = std::min(all.now + left / rate, next_change(true));
    const double before = all.now;
    run_to(moment, true);
    left -= rate * (moment - before);
    if (left < 1) left = 0;
  }
  all.cpu_computes = false;
  all.counts["cpu_busy"] += all.now - begun;
}

// ---- the driver

Result cuInit(unsigned) { return kSuccess; }
Result cuDriverGetVersion(int* version) {
  *version = 12080;
  return kSuccess;
}
Result cuGetErrorName(Result, const char** text) {
  *text = "CUDA_ERROR_OF_THE_MODEL";
  return kSuccess;
}
Result cuGetErrorString(Result, const char** text) {
  *text = "an error";
  return kSuccess;
}
Result cuDeviceGetCount(int* many) {
  *many = 1;
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
Result cuCtxPushCurrent_v2(void*) { return kSuccess; }
Result cuCtxPopCurrent_v2(void** context) {
  *context = &world().context;
  return kSuccess;
}
Result cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  *free = *total = static_cast<std::size_t>(figure("vram"));
  return kSuccess;
}
Result cuMemAlloc_v2(unsigned long long* at, std::size_t bytes) {
  World& all = world();
  *at = all.next_address;
  all.next_address += (bytes + 4095) / 4096 * 4096;
  return kSuccess;
}
Result cuMemFree_v2(unsigned long long) { return kSuccess; }
Result cuMemHostRegister_v2(void*, std::size_t, unsigned) { return kSuccess; }
Result cuMemHostUnregister(void*) { return kSuccess; }
Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return kSuccess;
}
Result cuStreamCreateWithPriority(void** stream, unsigned, int priority) {
  auto* const made = new Stream;
  made->of_link = priority < 0;
  world().streams.insert(made);
  *stream = made;
  return kSuccess;
}
Result cuStreamDestroy_v2(void* stream) {
  Stream* const one = stream_at(stream);
  if (one == nullptr) return kInvalidHandle;
  if (!wait_for([&] { return one->queue.empty(); })) return kInvalidHandle;
  world().streams.erase(one);
  delete one;
  return kSuccess;
}
Result cuStreamWaitEvent(void* stream, void* event, unsigned) {
  const Spent spent;
  Stream* const one = stream_at(stream);
  const std::shared_ptr<Event> awaited = event_at(event);
  if (one == nullptr || !awaited) return kInvalidHandle;
  ++world().counts["waits"];
  charge(figure("event_call"));
  give(one, {Kind::kWait, 0, called(), 0, awaited, awaited->recorded});
  return kSuccess;
}
Result cuStreamSynchronize(void* stream) {
  const Spent spent;
  const Stream* const one = stream_at(stream);
  if (one == nullptr || !wait_for([&] { return one->queue.empty(); })) return kInvalidHandle;
  return kSuccess;
}
Result cuEventCreate(void** event, unsigned) {
  const auto made = std::make_shared<Event>();
  *event = made.get();
  world().events[made.get()] = made;
  return kSuccess;
}
Result cuEventDestroy_v2(void* event) { return world().events.erase(event) > 0 ? kSuccess : kInvalidHandle; }
Result cuEventRecord(void* event, void* stream) {
  const Spent spent;
  Stream* const one = stream_at(stream);
  const std::shared_ptr<Event> recorded = event_at(event);
  if (one == nullptr || !recorded) return kInvalidHandle;
  charge(figure("event_call"));
  give(one, {Kind::kRecord, 0, called(), 0, recorded, ++recorded->recorded});
  return kSuccess;
}
Result cuEventQuery(void* event) {
  const Spent spent;
  const std::shared_ptr<Event> one = event_at(event);
  if (!one) return kInvalidHandle;
  charge(figure("event_call"));
  return one->completed >= one->recorded ? kSuccess : kNotReady;
}
// Outside of links' streams: a list of the host's thread, which kernels' times depend on.
Result cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, std::size_t bytes, void* stream) {
  const Stream* const one = stream_at(stream);
  if (one == nullptr) return kInvalidHandle;
  if (one->of_link) return copy_many(&bytes, 1, stream);
  timed_copy(stream, static_cast<double>(bytes), 0);
  std::memcpy(reinterpret_cast<void*>(static_cast<std::uintptr_t>(to)), from, bytes);
  return kSuccess;
}
Result cuFuncGetParamInfo(void* function, std::size_t index, std::size_t* offset, std::size_t* size) {
  const auto* const kernel = static_cast<const TimedKernel*>(function);
  if (index >= kernel->parameters) return kInvalidValue;
  *offset = 0;
  *size = kernel->sizes[index];
  return kSuccess;
}
Result cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      void* stream, void** parameters, void**) {
  const auto* const kernel = static_cast<const TimedKernel*>(function);
  double device = kernel->seconds;
  if (kernel->list >= 0) {
    unsigned long long address = 0;
    std::memcpy(&address, parameters[kernel->list], sizeof(address));
    const auto* const first = reinterpret_cast<const std::int32_t*>(static_cast<std::uintptr_t>(address));
    device += kernel->entry_seconds * first[kernel->rows];
  }
  compute("launches", stream, kernel->host, device);
  return kSuccess;
}
Result cuMemcpyBatchAsync(unsigned long long*, unsigned long long*, std::size_t* bytes, std::size_t many,
                          void*, std::size_t*, std::size_t, std::size_t*, void* stream) {
  return copy_many(bytes, many, stream);
}
}
