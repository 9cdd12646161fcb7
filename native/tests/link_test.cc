// Stress tests of the links, for runs under sanitizers (see scripts/sanitize):
//
//   native_link_test [--seconds N] [--seed N] [--alarm N]
//
// Random operations on many kinds of link are compared with the expected content of every page; then each
// guarantee of link.h has a test of its own. Pages are poisoned before a transfer is submitted and after it
// has been checked: a byte that changes without a transfer, or that a transfer leaves unchanged, is an error.
// An alarm ends a run that hangs.
#include "link/link.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "link/file_link.h"
#include "link/sim_link.h"
#include "memory/crc32c.h"
#include "memory/slab.h"

#if defined(__has_include)
#if __has_include(<linux/userfaultfd.h>)
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#endif
#endif

namespace moechat {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kPage = 4096;
constexpr unsigned char kPoison = 0xa5;

std::atomic<std::int64_t> operations{0};
std::atomic<std::int64_t> allocations{0};

#define EXPECT(condition)                                                  \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                       \
    }                                                                      \
  } while (false)

template <class Exception, class Body>
std::string expect_throw(const Body& body) {
  try {
    body();
  } catch (const Exception& error) {
    return error.what();
  }
  std::fprintf(stderr, "an exception was expected\n");
  std::_Exit(1);
}

// True when the page holds these bytes; for pages that an abandoned link may be writing.
__attribute__((no_sanitize("thread"))) bool holds_unsynchronised(const volatile unsigned char* page,
                                                                 const unsigned char* expected) {
  for (std::int64_t i = 0; i < kPage; ++i) {
    if (page[i] != expected[i]) return false;
  }
  return true;
}

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto time = [](const timeval& value) {
    return static_cast<double>(value.tv_sec) + 1e-6 * static_cast<double>(value.tv_usec);
  };
  return time(usage.ru_utime) + time(usage.ru_stime);
}

// ---- Far tiers: every byte encodes its region and offset.

unsigned char far_byte(std::int32_t region, std::int64_t offset) {
  std::uint64_t word = static_cast<std::uint64_t>(offset) / 8 * 0x9e3779b97f4a7c15u +
                       static_cast<std::uint64_t>(region + 1) * 0xbf58476d1ce4e5b9u;
  word ^= word >> 29;
  return static_cast<unsigned char>(word >> (8 * (static_cast<std::uint64_t>(offset) % 8)));
}

std::vector<unsigned char> far_bytes(std::int32_t region, std::int64_t bytes) {
  std::vector<unsigned char> data(static_cast<std::size_t>(bytes));
  for (std::int64_t i = 0; i < bytes; ++i) data[static_cast<std::size_t>(i)] = far_byte(region, i);
  return data;
}

constexpr std::int32_t kRegions = 3;
constexpr std::int64_t kRegionPages = 96;

const std::vector<std::vector<unsigned char>>& memory() {
  // Never destroyed: the test leaves links behind that are still running.
  static const auto* const data = [] {
    auto* const made = new std::vector<std::vector<unsigned char>>;
    for (std::int32_t region = 0; region < kRegions; ++region) {
      made->push_back(far_bytes(region, kRegionPages * kPage));
    }
    return made;
  }();
  return *data;
}

std::vector<SimRegion> sim_regions() {
  std::vector<SimRegion> regions;
  for (const auto& data : memory()) regions.push_back({data.data(), static_cast<std::int64_t>(data.size())});
  return regions;
}

// A directory that disappears with its files.
class Directory {
 public:
  explicit Directory(const std::string& parent) : path_(parent + "/link_test.XXXXXX") {
    EXPECT(mkdtemp(path_.data()) != nullptr);
  }
  ~Directory() {
    for (const std::string& file : files_) unlink(file.c_str());
    rmdir(path_.c_str());
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  std::string write(const std::string& name, const std::vector<unsigned char>& data) {
    files_.push_back(path_ + "/" + name);
    std::FILE* const file = std::fopen(files_.back().c_str(), "wb");
    EXPECT(file != nullptr && std::fwrite(data.data(), 1, data.size(), file) == data.size());
    EXPECT(std::fclose(file) == 0);
    return files_.back();
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::vector<std::string> files_;
};

// Two regions share a file, so that adjacent reads meet at a region border, over which they may not merge.
std::vector<FileRegion> file_regions(Directory* directory) {
  std::vector<unsigned char> both(memory()[0]);
  both.insert(both.end(), memory()[1].begin(), memory()[1].end());
  const std::string first = directory->write("first", both);
  const std::string second = directory->write("second", memory()[2]);
  constexpr std::int64_t kBytes = kRegionPages * kPage;
  return {{first, 0, kBytes}, {first, kBytes, kBytes}, {second, 0, kBytes}};
}

std::string temporary() {
  const char* const set = std::getenv("TMPDIR");
  return set != nullptr && *set != 0 ? set : "/tmp";
}

// ---- Random operations.

// Pages of a caller and their expected content.
class Desk {
 public:
  Desk(Link* link, std::uint32_t first_slot, std::uint32_t slots, std::int64_t most_pages, unsigned seed,
       bool faults)
      : link_(link),
        first_(first_slot),
        slab_(static_cast<std::int64_t>(slots), most_pages * kPage),
        entries_(slots),
        most_pages_(most_pages),
        faults_(faults),
        random_(seed) {
    for (std::uint32_t i = 0; i < slots; ++i) poison(i);
  }

  // Records a completion; the page must equal the far tier's bytes, with no byte written beyond them.
  void land(std::uint32_t slot, int error) {
    Entry& entry = entries_[slot - first_];
    EXPECT(entry.busy);
    entry.busy = false;
    if (error == 0) {
      ++landed_;
      EXPECT(std::memcmp(page(slot - first_), far(entry.transfer), size(entry.transfer.bytes)) == 0);
    } else {
      EXPECT(faults_);
      ++failed_;
    }
    expect_poison(slot - first_, entry.transfer.bytes);
    poison(slot - first_);
    entry.poisoned = true;
  }

  void step() {
    ++operations;
    const unsigned kind = static_cast<unsigned>(random_() % 16);
    const std::uint32_t index = static_cast<std::uint32_t>(random_() % entries_.size());
    Entry& entry = entries_[index];
    if (kind < 8) {
      submit_run(index);
    } else if (kind < 11) {
      if (link_->cancel(first_ + index)) {
        EXPECT(entry.busy);
        entry.busy = false;
        expect_poison(index, 0);
        ++cancelled_;
      }
    } else if (kind < 13) {
      link_->promote(first_ + index, any_priority());
    } else if (kind == 13 && !entry.busy) {
      expect_poison(index, 0);  // unchanged since its completion
    } else if (kind == 14) {
      link_->stats();
    }
  }

  bool idle() const {
    return std::none_of(entries_.begin(), entries_.end(), [](const Entry& entry) { return entry.busy; });
  }
  void check_all_poison() {
    for (std::uint32_t i = 0; i < entries_.size(); ++i) expect_poison(i, 0);
  }
  bool owns(std::uint32_t slot) const { return slot >= first_ && slot < first_ + entries_.size(); }
  std::int64_t landed() const { return landed_; }
  std::int64_t failed() const { return failed_; }
  std::int64_t cancelled() const { return cancelled_; }
  std::int64_t submitted() const { return submitted_; }

 private:
  struct Entry {
    Transfer transfer{};
    bool busy = false;
    bool poisoned = true;
  };

  static std::size_t size(std::int64_t bytes) { return static_cast<std::size_t>(bytes); }
  static const unsigned char* far(const Transfer& transfer) {
    return memory()[static_cast<std::size_t>(transfer.region)].data() + transfer.offset;
  }
  unsigned char* page(std::uint32_t index) { return slab_.data(index); }
  void poison(std::uint32_t index) { std::memset(page(index), kPoison, size(most_pages_ * kPage)); }
  void expect_poison(std::uint32_t index, std::int64_t from) {
    const unsigned char* const data = page(index);
    const std::int64_t bytes = most_pages_ * kPage;
    EXPECT(from == bytes ||
           (data[from] == kPoison && std::memcmp(data + from, data + from + 1, size(bytes - from - 1)) == 0));
  }
  Priority any_priority() { return static_cast<Priority>(random_() % kPriorities); }

  // A few transfers at once, often neighbours.
  void submit_run(std::uint32_t index) {
    const auto region = static_cast<std::int32_t>(random_() % kRegions);
    const auto bytes = static_cast<std::int64_t>(1 + random_() % static_cast<unsigned>(most_pages_)) * kPage;
    std::int64_t offset = static_cast<std::int64_t>(random_() % kRegionPages) * kPage;
    const Priority priority = any_priority();
    const bool neighbours = random_() % 4 != 0;
    std::vector<Transfer> transfers;
    for (unsigned length = 1 + static_cast<unsigned>(random_() % 8); length > 0; --length) {
      if (index >= entries_.size() || entries_[index].busy || offset + bytes > kRegionPages * kPage) break;
      entries_[index].transfer = {first_ + index, region, offset, bytes, page(index), priority};
      entries_[index].busy = true;
      transfers.push_back(entries_[index].transfer);
      ++index;
      offset = neighbours ? offset + bytes : static_cast<std::int64_t>(random_() % kRegionPages) * kPage;
    }
    submitted_ += static_cast<std::int64_t>(transfers.size());
    link_->submit(transfers.data(), static_cast<std::int64_t>(transfers.size()));
  }

  Link* const link_;
  const std::uint32_t first_;
  Slab slab_;
  std::vector<Entry> entries_;
  const std::int64_t most_pages_;
  const bool faults_;
  std::mt19937 random_;
  std::int64_t landed_ = 0, failed_ = 0, cancelled_ = 0, submitted_ = 0;
};

// Several callers with slots of their own run concurrently; each poll passes completions to the slots'
// owners.
void random_operations(std::unique_ptr<Link> link, unsigned seed, double time, bool faults = false,
                       std::int64_t most_pages = 4) {
  constexpr std::uint32_t kCallers = 2, kSlots = 24;
  link->open(kCallers * kSlots);
  std::mutex mutexes[kCallers];
  std::vector<std::unique_ptr<Desk>> desks;
  for (std::uint32_t i = 0; i < kCallers; ++i) {
    desks.push_back(std::make_unique<Desk>(link.get(), i * kSlots, kSlots, most_pages, seed + i, faults));
  }
  std::atomic<bool> draining{false};
  std::atomic<int> idle{0};
  const Clock::time_point start = Clock::now();
  const auto collect = [&](std::vector<Completion>* scratch) {
    scratch->clear();
    const std::int64_t count = link->poll(scratch);
    EXPECT(count == static_cast<std::int64_t>(scratch->size()));
    for (const Completion& completion : *scratch) {
      for (std::uint32_t i = 0; i < kCallers; ++i) {
        const std::lock_guard<std::mutex> lock(mutexes[i]);
        if (desks[i]->owns(completion.slot)) desks[i]->land(completion.slot, completion.error);
      }
    }
  };
  const auto caller = [&](std::uint32_t number) {
    std::mt19937 random(seed * 31 + number);
    std::vector<Completion> scratch;
    for (int round = 0; round < 20 || since(start) < time; ++round) {
      for (int i = 0; i < 20; ++i) {
        const std::lock_guard<std::mutex> lock(mutexes[number]);
        desks[number]->step();
      }
      if (random() % 4 == 0) link->wait(std::chrono::microseconds(random() % 2000));
      collect(&scratch);
    }
    draining = true;
    bool mine = false;
    while (idle < static_cast<int>(kCallers)) {
      link->wait(milliseconds(1));
      collect(&scratch);
      const std::lock_guard<std::mutex> lock(mutexes[number]);
      if (!mine && desks[number]->idle()) {
        mine = true;
        ++idle;
      }
      EXPECT(since(start) < time + 15);
    }
  };
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < kCallers; ++i) threads.emplace_back(caller, i);
  for (std::thread& thread : threads) thread.join();

  std::int64_t landed = 0, failed = 0, cancelled = 0, submitted = 0;
  for (const auto& desk : desks) {
    landed += desk->landed();
    failed += desk->failed();
    cancelled += desk->cancelled();
    submitted += desk->submitted();
    desk->check_all_poison();
  }
  const LinkStats stats = link->stats();
  EXPECT(stats.transfers[0] + stats.transfers[1] + stats.transfers[2] == landed);
  EXPECT(stats.errors == failed && stats.cancelled == cancelled && landed + failed + cancelled == submitted);
  EXPECT(stats.queued == 0 && stats.in_flight == 0);
  EXPECT(landed > 0);
  EXPECT(stats.bandwidth > 0 && stats.busy_seconds > 0);
  EXPECT(stats.operations <= landed + failed);
  EXPECT(link->stop(milliseconds(1000)));
  for (const auto& desk : desks) desk->check_all_poison();
}

// ---- One guarantee at a time.

using Made = std::unique_ptr<Link>;

SimLinkOptions sim_options() {
  SimLinkOptions options;
  options.latency = 1e-3;
  return options;
}

Made sim(const SimLinkOptions& options) { return make_sim_link(sim_regions(), options); }

// Pages for tests of single transfers.
class Pages {
 public:
  explicit Pages(std::int64_t count) : slab_(count, kPage) {
    std::memset(slab_.data(0), kPoison, static_cast<std::size_t>(count * kPage));
  }
  Transfer transfer(std::uint32_t slot, std::int64_t far_page, Priority priority, std::int32_t region = 0) {
    return {slot, region, far_page * kPage, kPage, slab_.data(slot), priority};
  }
  bool holds(std::uint32_t slot, std::int64_t far_page, std::int32_t region = 0) const {
    return std::memcmp(slab_.data(slot), memory()[static_cast<std::size_t>(region)].data() + far_page * kPage,
                       static_cast<std::size_t>(kPage)) == 0;
  }
  bool untouched(std::uint32_t slot) const {
    const unsigned char* const data = slab_.data(slot);
    return data[0] == kPoison && std::memcmp(data, data + 1, static_cast<std::size_t>(kPage - 1)) == 0;
  }
  Slab& slab() { return slab_; }

 private:
  Slab slab_;
};

void submit(Link* link, const std::vector<Transfer>& transfers) {
  link->submit(transfers.data(), static_cast<std::int64_t>(transfers.size()));
  operations += static_cast<std::int64_t>(transfers.size());
}

// Returns completions in order, waiting for at least `count`.
std::vector<Completion> collect(Link* link, std::size_t count) {
  std::vector<Completion> all;
  const Clock::time_point start = Clock::now();
  while (all.size() < count) {
    link->wait(milliseconds(100));
    link->poll(&all);
    EXPECT(since(start) < 10);
  }
  return all;
}

std::vector<std::uint32_t> slots_of(const std::vector<Completion>& completions) {
  std::vector<std::uint32_t> slots;
  for (const Completion& completion : completions) slots.push_back(completion.slot);
  return slots;
}

void slab_tracks_pages_and_memory() {
  Slab slab(5, 8192);
  EXPECT(slab.pages() == 5 && slab.free_pages() == 5 && slab.page_bytes() == 8192);
  EXPECT(slab.data(3) - slab.data(0) == 3 * 8192);
  EXPECT(slab.resident_bytes() == 0);
  const PageId first = slab.take(7);
  EXPECT(first == 0 && slab.owner(first) == 7 && slab.generation(first) == 1 && slab.free_pages() == 4);
  std::memset(slab.data(first), 1, 8192);
  EXPECT(slab.resident_bytes() >= 8192 && slab.resident_bytes() <= 5 * 8192);
  EXPECT(slab.huge_bytes() == 0);
  slab.give(first);
  EXPECT(slab.owner(first) == Slab::kNoOwner);
  EXPECT(slab.take(8) == first && slab.generation(first) == 2);
  for (std::uint32_t i = 1; i < 5; ++i) EXPECT(slab.take(i) == i);
  EXPECT(slab.take(9) == kNoPage && slab.free_pages() == 0);
  slab.give(3);
  expect_throw<std::logic_error>([&] { slab.give(3); });
  expect_throw<std::logic_error>([&] { slab.give(5); });
  expect_throw<std::logic_error>([&] { slab.take(Slab::kNoOwner); });
  expect_throw<std::invalid_argument>([] { Slab(0, 4096); });
  expect_throw<std::invalid_argument>([] { Slab(1, 4095); });
  expect_throw<std::invalid_argument>([] { Slab(std::int64_t{1} << 40, std::int64_t{1} << 40); });
  const std::string refused =
      expect_throw<std::runtime_error>([] { Slab(std::int64_t{1} << 25, std::int64_t{1} << 20); });
  EXPECT(refused.find("33554432 pages of 1048576 bytes") != std::string::npos);

  const std::int64_t large = std::int64_t{32} << 20;
  Slab big(large / 4096, 4096);
  std::memset(big.data(0), 1, static_cast<std::size_t>(large));
  EXPECT(big.resident_bytes() == large);
  EXPECT(big.huge_bytes() <= large);
}

void priorities_and_overtaking() {
  Pages pages(64);
  SimLinkOptions options;
  options.latency = 4e-3;
  options.in_flight_bytes = kPage;
  const Made link = sim(options);
  link->open(64);
  std::vector<Transfer> transfers;
  const Priority order[] = {Priority::kLater, Priority::kNext, Priority::kDemand};
  for (std::uint32_t i = 0; i < 9; ++i) transfers.push_back(pages.transfer(i, i, order[i / 3]));
  submit(link.get(), transfers);
  EXPECT((slots_of(collect(link.get(), 9)) == std::vector<std::uint32_t>{6, 7, 8, 3, 4, 5, 0, 1, 2}));
  for (std::uint32_t i = 0; i < 9; ++i) EXPECT(pages.holds(i, i));

  // A demand overtakes queued transfers.
  transfers.clear();
  for (std::uint32_t i = 0; i < 24; ++i) transfers.push_back(pages.transfer(i, i, Priority::kLater));
  submit(link.get(), transfers);
  std::vector<Completion> done = collect(link.get(), 1);
  submit(link.get(), {pages.transfer(50, 7, Priority::kDemand)});
  const std::vector<Completion> rest = collect(link.get(), 25 - done.size());
  EXPECT(done.size() + rest.size() == 25 && rest.back().slot != 50);
  const LinkStats stats = link->stats();
  EXPECT(stats.transfers[0] == 4 && stats.bytes[0] == 4 * kPage);
  EXPECT(link->stop(milliseconds(1000)));
}

void cancel_and_promote() {
  Pages pages(8);
  SimLinkOptions options = sim_options();
  options.latency = 20e-3;
  options.in_flight_bytes = kPage;
  const Made link = sim(options);
  link->open(8);
  std::vector<Transfer> transfers;
  for (std::uint32_t i = 0; i < 6; ++i) transfers.push_back(pages.transfer(i, 10 + i, Priority::kLater));
  submit(link.get(), transfers);
  EXPECT(!link->cancel(0));  // started
  EXPECT(link->cancel(1));
  EXPECT(!link->cancel(1));
  EXPECT(!link->cancel(7) && !link->cancel(1000));
  link->promote(4, Priority::kNext);
  link->promote(5, Priority::kDemand);
  link->promote(5, Priority::kNext);  // already has a higher priority
  link->promote(0, Priority::kDemand);
  link->promote(1000, Priority::kDemand);
  submit(link.get(), {pages.transfer(1, 30, Priority::kLater)});  // the slot is free again
  EXPECT((slots_of(collect(link.get(), 6)) == std::vector<std::uint32_t>{0, 5, 4, 2, 3, 1}));
  EXPECT(pages.holds(1, 30) && pages.holds(5, 15));
  EXPECT(!link->cancel(0));
  const LinkStats stats = link->stats();
  EXPECT(stats.cancelled == 1 && stats.transfers[0] == 1 && stats.transfers[1] == 1 &&
         stats.transfers[2] == 4);
}

void impossible_transfers_are_rejected() {
  Pages pages(4);
  const Made link = sim(sim_options());
  expect_throw<std::logic_error>([&] { submit(link.get(), {pages.transfer(0, 0, Priority::kDemand)}); });
  expect_throw<std::invalid_argument>([&] { link->open(0); });
  link->open(4);
  expect_throw<std::logic_error>([&] { link->open(4); });
  expect_throw<std::out_of_range>([&] { link->region_bytes(kRegions); });
  EXPECT(link->regions() == kRegions && link->region_bytes(1) == kRegionPages * kPage);
  const Transfer good = pages.transfer(1, 1, Priority::kDemand);
  const auto refused = [&](const std::function<void(Transfer*)>& spoil) {
    Transfer bad = pages.transfer(2, 1, Priority::kNext);
    spoil(&bad);
    expect_throw<std::invalid_argument>([&] { submit(link.get(), {good, bad}); });
    const LinkStats stats = link->stats();
    EXPECT(stats.queued == 0 && stats.in_flight == 0);
  };
  refused([](Transfer* bad) { bad->slot = 4; });
  refused([](Transfer* bad) { bad->slot = 1; });
  refused([](Transfer* bad) { bad->region = -1; });
  refused([](Transfer* bad) { bad->region = kRegions; });
  refused([](Transfer* bad) { bad->offset = -1; });
  refused([](Transfer* bad) { bad->offset = kRegionPages * kPage - kPage + 1; });
  refused([](Transfer* bad) { bad->bytes = 0; });
  refused([](Transfer* bad) { bad->bytes = INT64_MAX; });
  refused([](Transfer* bad) { bad->to = nullptr; });
  refused([](Transfer* bad) { bad->priority = static_cast<Priority>(3); });
  submit(link.get(), {good});
  expect_throw<std::invalid_argument>([&] { submit(link.get(), {good}); });
  EXPECT(link->wait(milliseconds(5000)));
  expect_throw<std::invalid_argument>(
      [&] { submit(link.get(), {good}); });  // its completion has not been polled yet
  EXPECT(collect(link.get(), 1)[0].error == 0);
  EXPECT(link->stop(milliseconds(1000)) && link->stop(milliseconds(0)));
  expect_throw<std::runtime_error>([&] { submit(link.get(), {good}); });

  const auto wrong = [](const std::function<void(SimLinkOptions*)>& spoil) {
    SimLinkOptions options;
    spoil(&options);
    expect_throw<std::invalid_argument>([&] { sim(options); });
  };
  wrong([](SimLinkOptions* options) { options->bandwidth = -1; });
  wrong([](SimLinkOptions* options) { options->latency = -1; });
  wrong([](SimLinkOptions* options) { options->jitter = 1e9; });
  wrong([](SimLinkOptions* options) { options->reorder = 0; });
  wrong([](SimLinkOptions* options) { options->fault_rate = 1.5; });
  wrong([](SimLinkOptions* options) { options->in_flight_bytes = -1; });
}

void faults_affect_only_their_transfer() {
  Pages pages(200);
  SimLinkOptions options;
  options.fault_rate = 0.5;
  options.seed = 3;
  const Made link = sim(options);
  link->open(200);
  std::vector<Transfer> transfers;
  for (std::uint32_t i = 0; i < 200; ++i) transfers.push_back(pages.transfer(i, i % 96, Priority::kDemand));
  submit(link.get(), transfers);
  int failed = 0;
  for (const Completion& completion : collect(link.get(), 200)) {
    EXPECT(completion.error == 0 || completion.error == EIO);
    EXPECT((completion.error == 0) == pages.holds(completion.slot, completion.slot % 96));
    failed += completion.error != 0;
  }
  EXPECT(failed > 50 && failed < 150);
  EXPECT(link->stats().errors == failed && link->failure().empty());
}

void a_failed_link_wakes_its_waiters() {
  for (const bool copy : {true, false}) {
    Pages pages(32);
    SimLinkOptions options = sim_options();
    options.latency = 30e-3;
    options.in_flight_bytes = 2 * kPage;
    options.fail_after = 2;
    options.copy = copy;
    const Made link = sim(options);
    link->open(32);
    std::atomic<bool> woken{false};
    std::vector<Transfer> transfers;
    for (std::uint32_t i = 0; i < 32; ++i) transfers.push_back(pages.transfer(i, i, Priority::kNext));
    submit(link.get(), transfers);
    EXPECT(collect(link.get(), 2).size() == 2);
    std::thread waiter([&] {
      EXPECT(link->wait(milliseconds(8000)));
      woken = true;
    });
    const Clock::time_point start = Clock::now();
    const std::vector<Completion> rest = [&] {
      waiter.join();
      return collect(link.get(), 30);
    }();
    EXPECT(woken && since(start) < 5);
    for (const Completion& completion : rest) EXPECT(completion.error == EIO);
    EXPECT(link->failure().find("failed after 2") != std::string::npos);
    const std::string why = expect_throw<std::runtime_error>([&] { submit(link.get(), {transfers[0]}); });
    EXPECT(why.find("failed after 2") != std::string::npos);
    // Later waits return at once.
    const Clock::time_point again = Clock::now();
    EXPECT(!link->wait(milliseconds(8000)) && since(again) < 5);
    EXPECT(link->stats().queued == 0 && link->stats().in_flight == 0);
    EXPECT(link->stop(milliseconds(1000)));
  }
}

void prefetches_leave_capacity_for_demands() {
  Pages pages(32);
  SimLinkOptions options;
  options.latency = 20e-3;
  options.in_flight_bytes = 9 * kPage;
  const Made link = sim(options);
  link->open(32);
  std::vector<Transfer> transfers;
  for (std::uint32_t i = 0; i < 16; ++i) transfers.push_back(pages.transfer(i, i, Priority::kNext));
  submit(link.get(), transfers);
  EXPECT(link->stats().in_flight == 3 * kPage);
  for (Transfer& transfer : transfers) transfer = pages.transfer(transfer.slot + 16, 0, Priority::kDemand);
  submit(link.get(), transfers);
  EXPECT(link->stats().in_flight == 9 * kPage);
  EXPECT(collect(link.get(), 32).size() == 32);
}

void a_stalled_link_stops() {
  Pages pages(32);
  SimLinkOptions options;
  options.stall_after = 3;
  options.in_flight_bytes = 4 * kPage;
  const Made link = sim(options);
  link->open(32);
  std::vector<Transfer> transfers;
  for (std::uint32_t i = 0; i < 32; ++i) transfers.push_back(pages.transfer(i, i, Priority::kDemand));
  submit(link.get(), transfers);
  EXPECT(collect(link.get(), 3).size() == 3);
  const Clock::time_point start = Clock::now();
  EXPECT(!link->wait(milliseconds(50)));
  EXPECT(since(start) > 0.045);
  EXPECT(link->stats().in_flight > 0 && link->stats().queued > 0);
  std::thread waiter([&] { link->wait(milliseconds(8000)); });
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT(link->stop(milliseconds(2000)));
  waiter.join();
  EXPECT(since(start) < 5);
  for (const Completion& completion : collect(link.get(), 4)) EXPECT(completion.error == ECANCELED);
  EXPECT(!link->wait(milliseconds(8000)) && since(start) < 5);
  EXPECT(link->stats().cancelled == 25);
}

void completions_out_of_order() {
  for (const int reorder : {1, 8}) {
    Pages pages(64);
    SimLinkOptions options;
    options.latency = 1e-3;
    options.jitter = 1e-3;
    options.bandwidth = 1e9;
    options.reorder = reorder;
    options.seed = 5;
    const Made link = sim(options);
    link->open(64);
    std::vector<Transfer> transfers;
    for (std::uint32_t i = 0; i < 64; ++i) transfers.push_back(pages.transfer(i, i, Priority::kDemand));
    submit(link.get(), transfers);
    const std::vector<std::uint32_t> slots = slots_of(collect(link.get(), 64));
    EXPECT(std::is_sorted(slots.begin(), slots.end()) == (reorder == 1));
    for (std::uint32_t i = 0; i < 64; ++i) EXPECT(pages.holds(i, i));
  }
}

void stop_waits_for_transfers_in_flight() {
  Pages pages(4);
  SimLinkOptions options;
  options.latency = 0.3;
  options.in_flight_bytes = kPage;
  const Made link = sim(options);
  link->open(4);
  const Clock::time_point start = Clock::now();
  submit(link.get(), {pages.transfer(0, 0, Priority::kDemand), pages.transfer(1, 1, Priority::kDemand)});
  EXPECT(!link->wait(milliseconds(10)));
  EXPECT(!link->stop(milliseconds(10)) && since(start) < 0.25);
  EXPECT(link->stop(milliseconds(5000)));
  EXPECT(since(start) > 0.29 && link->stats().in_flight == 0);
  EXPECT(pages.holds(0, 0) && pages.untouched(1));
  const std::vector<Completion> done = collect(link.get(), 1);
  EXPECT(done[0].slot == 0 && done[0].error == 0 && link->stats().cancelled == 1);
}

// The memory that such a link writes to is leaked.
void a_link_that_does_not_stop_is_leaked() {
  Pages pages(4);
  SimLinkOptions options;
  options.latency = 2.0;
  Made link = sim(options);
  link->open(4);
  submit(link.get(), {pages.transfer(0, 0, Priority::kDemand)});
  const Clock::time_point start = Clock::now();
  link.reset();
  EXPECT(since(start) < 1.9);
  pages.slab().leak();
}

void wait_honours_its_limit() {
  const Made link = sim(sim_options());
  link->open(4);
  for (const int limit : {0, 30}) {
    const Clock::time_point start = Clock::now();
    EXPECT(!link->wait(milliseconds(limit)));
    EXPECT(since(start) > 1e-3 * limit - 1e-3 && since(start) < 5);
  }
  Pages pages(4);
  const Clock::time_point start = Clock::now();
  submit(link.get(), {pages.transfer(0, 0, Priority::kDemand)});
  EXPECT(link->wait(std::chrono::microseconds::max()) && since(start) < 5);
  EXPECT(link->wait(milliseconds(-5)));
}

void simulated_speed() {
  Pages pages(96);
  SimLinkOptions options;
  options.bandwidth = 8e6;  // 96 pages in 49 ms
  options.copy = false;
  options.in_flight_bytes = 3 * kPage;
  const Made link = sim(options);
  link->open(96);
  std::vector<Transfer> transfers;
  for (std::uint32_t i = 0; i < 96; ++i) transfers.push_back(pages.transfer(i, i, Priority::kDemand));
  const double ideal = 96 * kPage / options.bandwidth;
  double best = 1e9;
  for (int attempt = 0; attempt < 20 && best > 1.1 * ideal; ++attempt) {
    const Clock::time_point start = Clock::now();
    submit(link.get(), transfers);
    collect(link.get(), 96);
    const double time = since(start);
    EXPECT(time > ideal);
    best = std::min(best, time);
  }
  EXPECT(best < 1.1 * ideal);
  const double estimate = link->stats().bandwidth / options.bandwidth;
  EXPECT(estimate > 0.5 && estimate < 1.1);
  EXPECT(pages.untouched(0));
}

void nothing_is_allocated(Made link, bool merge) {
  Pages pages(64);
  link->open(64);
  std::vector<Transfer> transfers;
  for (std::uint32_t i = 0; i < 64; ++i) {
    transfers.push_back(pages.transfer(i, merge ? i : 95 - i, Priority::kNext));
  }
  std::vector<Completion> done;
  done.reserve(64);
  std::int64_t before = 0;
  for (int round = 0; round < 4; ++round) {
    if (round == 1) before = allocations;
    submit(link.get(), transfers);
    link->promote(63, Priority::kDemand);
    for (done.clear(); done.size() < 64; link->poll(&done)) link->wait(milliseconds(100));
  }
  EXPECT(allocations == before);
}

// ---- Files.

struct Way {
  const char* name;
  FileIo io;
  bool direct;
};

FileLinkOptions file_options(const Way& way) {
  FileLinkOptions options;
  options.io = way.io;
  options.direct = way.direct;
  return options;
}

void merged_reads(const Way& way, Directory* directory) {
  const std::vector<FileRegion> regions = file_regions(directory);
  FileLinkOptions options = file_options(way);
  options.in_flight_bytes = 64 * kPage;
  options.operation_bytes = 8 * kPage;
  options.reader_threads = 1;
  const auto count = [&](const std::vector<Transfer>& transfers, Pages* pages) {
    const Made link = make_file_link(regions, options);
    link->open(64);
    submit(link.get(), transfers);
    for (const Completion& completion : collect(link.get(), transfers.size())) EXPECT(completion.error == 0);
    for (const Transfer& transfer : transfers) {
      EXPECT(pages->holds(transfer.slot, transfer.offset / kPage, transfer.region));
    }
    EXPECT(link->describe(1, kPage) ==
           regions[1].path + " at byte " + std::to_string((kRegionPages + 1) * kPage));
    return link->stats().operations;
  };
  Pages pages(64);
  std::vector<Transfer> transfers;
  for (std::uint32_t i = 0; i < 16; ++i) transfers.push_back(pages.transfer(63 - i, 5 + i, Priority::kNext));
  EXPECT(count(transfers, &pages) == 2);
  transfers[3].priority = Priority::kLater;  // leaves a hole: 3 | 4..11 | 12..15 | the later one
  EXPECT(count(transfers, &pages) == 4);
  for (std::uint32_t i = 0; i < 8; ++i) {
    // The end of one region and the start of the next one are neighbours in the file.
    transfers[i] = pages.transfer(i, i < 4 ? kRegionPages - 4 + i : i - 4, Priority::kDemand, i < 4 ? 0 : 1);
  }
  transfers.resize(8);
  EXPECT(count(transfers, &pages) == 2);
}

void reads_beyond_a_truncated_file_fail(const Way& way, Directory* directory) {
  const std::vector<FileRegion> regions = file_regions(directory);
  FileLinkOptions options = file_options(way);
  const Made link = make_file_link(regions, options);
  link->open(64);
  Pages pages(64);
  EXPECT(truncate(regions[2].path.c_str(), 5 * kPage + 1000) == 0);
  std::vector<Transfer> transfers;
  for (std::uint32_t i = 0; i < 8; ++i) transfers.push_back(pages.transfer(i, i, Priority::kDemand, 2));
  transfers.push_back(pages.transfer(8, 50, Priority::kDemand, 2));
  transfers.push_back(pages.transfer(9, 50, Priority::kDemand, 1));
  submit(link.get(), transfers);
  for (const Completion& completion : collect(link.get(), 10)) {
    const bool there = completion.slot < 5 || completion.slot == 9;
    EXPECT(completion.error == (there ? 0 : kFileEnded));
    if (there) {
      EXPECT(pages.holds(completion.slot, completion.slot == 9 ? 50 : completion.slot,
                         completion.slot == 9 ? 1 : 2));
    }
  }
  EXPECT(link->failure().empty());
  submit(link.get(), {pages.transfer(8, 3, Priority::kDemand, 2)});
  EXPECT(collect(link.get(), 1)[0].error == 0 && pages.holds(8, 3, 2));
}

// As file_regions, with the checksum of each page.
std::vector<FileRegion> checked_regions(Directory* directory) {
  std::vector<FileRegion> regions = file_regions(directory);
  for (std::size_t i = 0; i < regions.size(); ++i) {
    RecordChecksums& checksums = regions[i].checksums;
    checksums.record_bytes = kPage;
    for (std::int64_t at = 0; at < regions[i].bytes; at += kPage) {
      checksums.values.push_back(crc32c(memory()[i].data() + at, kPage));
    }
  }
  return regions;
}

// XORs a byte of a file, as rotting media do; the size stays.
void flip(const std::string& path, std::int64_t at, unsigned char bits) {
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  unsigned char byte = 0;
  EXPECT(file >= 0 && pread(file, &byte, 1, at) == 1);
  byte = static_cast<unsigned char>(byte ^ bits);
  EXPECT(pwrite(file, &byte, 1, at) == 1 && fsync(file) == 0 && close(file) == 0);
}

void damaged_records_fail_alone(const Way& way, Directory* directory) {
  const std::vector<FileRegion> regions = checked_regions(directory);
  const Made link = make_file_link(regions, file_options(way));
  link->open(32);
  Pages pages(32);
  const std::int64_t damaged[] = {7, 8, 15};
  for (const std::int64_t page : damaged) {
    flip(regions[1].path, regions[1].offset + page * kPage + 100 * page, 0x10);
  }
  std::vector<Transfer> transfers;
  for (std::uint32_t i = 0; i < 16; ++i) transfers.push_back(pages.transfer(i, i, Priority::kDemand, 1));
  submit(link.get(), transfers);
  for (const Completion& completion : collect(link.get(), 16)) {
    const bool is_damaged =
        std::find(std::begin(damaged), std::end(damaged), completion.slot) != std::end(damaged);
    EXPECT(completion.error == (is_damaged ? kRecordDamaged : 0));
    if (!is_damaged) EXPECT(pages.holds(completion.slot, completion.slot, 1));
  }
  EXPECT(link->failure().empty());
  EXPECT(link->stats().rereads == 3 && link->stats().errors == 3);
  for (const std::int64_t page : damaged) {
    flip(regions[1].path, regions[1].offset + page * kPage + 100 * page, 0x10);
  }
  // The file is whole again, and the slots remember nothing.
  submit(link.get(), transfers);
  for (const Completion& completion : collect(link.get(), 16)) {
    EXPECT(completion.error == 0 && pages.holds(completion.slot, completion.slot, 1));
  }
  EXPECT(link->stats().rereads == 3);
}

void checksums_must_fit_their_regions(Directory* directory) {
  std::vector<FileRegion> regions = checked_regions(directory);
  const FileLinkOptions options;
  const Made link = make_file_link(regions, options);
  for (const std::int64_t bytes : {std::int64_t{0}, kPage - 1, 2 * kPage}) {
    regions[0].checksums.record_bytes = bytes;
    expect_throw<std::invalid_argument>([&] { make_file_link(regions, options); });
  }
  regions[0].checksums.record_bytes = 2 * kPage;
  regions[0].checksums.values.resize(static_cast<std::size_t>(regions[0].bytes / (2 * kPage)));
  const Made pairs = make_file_link(regions, options);
  pairs->open(1);
  Pages pages(1);
  expect_throw<std::invalid_argument>(
      [&] { submit(pairs.get(), {pages.transfer(0, 0, Priority::kDemand)}); });
}

void checksums_are_the_same_in_every_way(unsigned seed) {
  const char* const known = "123456789";
  const std::vector<unsigned char> zeros(32, 0), ones(32, 0xff);
  std::mt19937 random(seed);
  std::vector<unsigned char> data(70'000);
  for (unsigned char& byte : data) byte = static_cast<unsigned char>(random());
  for (const CrcWay way : crc_ways()) {
    EXPECT(crc32c_by(way, reinterpret_cast<const unsigned char*>(known), 9) == 0xe3069283u);
    EXPECT(crc32c_by(way, zeros.data(), 32) == 0x8a9136aau);  // RFC 3720, B.4
    EXPECT(crc32c_by(way, ones.data(), 32) == 0x62a8ab43u);
    EXPECT(crc32c_by(way, data.data(), 0) == 0);
    for (int i = 0; i < 300; ++i) {
      const std::size_t from = random() % 64, bytes = random() % (data.size() - 64),
                        cut = random() % (bytes + 1);
      const std::uint32_t whole = crc32c_by(crc_ways().front(), data.data() + from, bytes);
      EXPECT(crc32c_by(way, data.data() + from, bytes) == whole);
      EXPECT(crc32c_by(way, data.data() + from + cut, bytes - cut, crc32c_by(way, data.data() + from, cut)) ==
             whole);
    }
  }
}

void unaligned_targets(const Way& way, Directory* directory) {
  const Made link = make_file_link(file_regions(directory), file_options(way));
  link->open(4);
  std::vector<unsigned char> target(3 * kPage, kPoison);
  const std::vector<Transfer> odd = {{0, 0, 0, kPage, target.data() + 1, Priority::kDemand},
                                     {1, 0, kPage, kPage, target.data() + 1 + kPage, Priority::kDemand}};
  submit(link.get(), odd);
  for (const Completion& completion : collect(link.get(), 2)) EXPECT(completion.error == 0);
  EXPECT(std::memcmp(target.data() + 1, memory()[0].data(), 2 * kPage) == 0);
  EXPECT(target[0] == kPoison && target[2 * kPage + 1] == kPoison);
}

void threads_that_begin_reads_may_end(const Way& way, Directory* directory) {
  const Made link = make_file_link(file_regions(directory), file_options(way));
  link->open(64);
  Pages pages(64);
  for (std::uint32_t round = 0; round < 16; ++round) {
    std::thread([&] {
      std::vector<Transfer> transfers;
      for (std::uint32_t i = 0; i < 4; ++i) {
        transfers.push_back(pages.transfer(round * 4 + i, round * 5 + i, Priority::kDemand));
      }
      submit(link.get(), transfers);
    }).join();
  }
  for (const Completion& completion : collect(link.get(), 64)) EXPECT(completion.error == 0);
  for (std::uint32_t i = 0; i < 64; ++i) EXPECT(pages.holds(i, i / 4 * 5 + i % 4));
}

void unusable_files_are_rejected(Directory* directory) {
  const std::string there = directory->write("there", std::vector<unsigned char>(2 * kPage));
  const FileLinkOptions options;
  const std::string missing = directory->path() + "/missing";
  const std::string why =
      expect_throw<FileError>([&] { make_file_link({{there, 0, kPage}, {missing, 0, kPage}}, options); });
  EXPECT(why.find(missing) != std::string::npos);
  expect_throw<FileError>([&] { make_file_link({{directory->path(), 0, kPage}}, options); });
  const std::int64_t wrong[][2] = {{1, kPage}, {0, kPage + 1}, {-kPage, kPage}, {0, 0}, {kPage, 2 * kPage}};
  for (const auto& one : wrong) {
    const std::string text =
        expect_throw<std::invalid_argument>([&] { make_file_link({{there, one[0], one[1]}}, options); });
    EXPECT(text.find(there) != std::string::npos);
  }
  FileLinkOptions negative;
  negative.in_flight_bytes = -1;
  expect_throw<std::invalid_argument>([&] { make_file_link({{there, 0, kPage}}, negative); });
  const Made link = make_file_link({{there, 0, 2 * kPage}}, options);
  link->open(1);
  Pages pages(1);
  Transfer odd = pages.transfer(0, 0, Priority::kDemand);
  odd.offset = 512;
  expect_throw<std::invalid_argument>([&] { submit(link.get(), {odd}); });
}

// A read that never ends: its target is userfaultfd memory whose pages the test does not provide. Without
// userfaultfd, the test prints a message and does nothing.
void hung_reads(const Way& way, Directory* directory) {
#if defined(UFFDIO_REGISTER) && defined(__NR_userfaultfd)
  const int fault_fd = static_cast<int>(syscall(__NR_userfaultfd, O_CLOEXEC | O_NONBLOCK));
  uffdio_api api{};
  api.api = UFFD_API;
  if (fault_fd < 0 || ioctl(fault_fd, UFFDIO_API, &api) != 0) {
    std::printf("hung reads were not tested: userfaultfd: %s\n", std::strerror(errno));
    if (fault_fd >= 0) close(fault_fd);
    return;
  }
  Slab slab(1, kPage);
  uffdio_register range{};
  range.range = {reinterpret_cast<std::uintptr_t>(slab.data(0)), static_cast<std::uint64_t>(kPage)};
  range.mode = UFFDIO_REGISTER_MODE_MISSING;
  EXPECT(ioctl(fault_fd, UFFDIO_REGISTER, &range) == 0);
  Made link = make_file_link(file_regions(directory), file_options(way));
  link->open(8);
  const Clock::time_point start = Clock::now();
  submit(link.get(), {{0, 0, 0, kPage, slab.data(0), Priority::kDemand}});
  EXPECT(!link->wait(milliseconds(30)));
  // Other transfers finish in the meantime.
  Pages pages(8);
  submit(link.get(), {pages.transfer(1, 1, Priority::kDemand), pages.transfer(2, 2, Priority::kDemand)});
  EXPECT(collect(link.get(), 2).size() == 2 && pages.holds(2, 2));
  EXPECT(!link->stop(milliseconds(50)));
  link.reset();
  EXPECT(since(start) < 3);
  EXPECT(ioctl(fault_fd, UFFDIO_UNREGISTER, &range.range) == 0);  // the read ends now
  close(fault_fd);
  while (!holds_unsynchronised(slab.data(0), memory()[0].data())) {
    EXPECT(since(start) < 10);
    std::this_thread::sleep_for(milliseconds(1));
  }
#else
  static_cast<void>(way);
  static_cast<void>(directory);
#endif
}

// ---- All kinds of link.

void an_idle_link_sleeps(const std::function<Made()>& make, bool busy) {
  Pages pages(4);
  const Made link = make();
  link->open(4);
  if (busy) submit(link.get(), {pages.transfer(0, 0, Priority::kDemand)});
  link->wait(milliseconds(20));
  const double before = cpu_seconds();
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT(cpu_seconds() - before < 0.01);
  std::vector<Completion> done;
  link->poll(&done);
  EXPECT(link->stop(milliseconds(1000)));
}

void a_child_process_does_not_use_the_link(const std::function<Made()>& make) {
#if !defined(__SANITIZE_THREAD__)  // tsan does not support threads in a forked child
  Pages pages(4);
  Made link = make();
  link->open(4);
  submit(link.get(), {pages.transfer(0, 0, Priority::kDemand), pages.transfer(1, 1, Priority::kDemand)});
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    const Clock::time_point start = Clock::now();
    link.reset();
    {
      const Slab another(4, kPage);
    }
    _exit(since(start) < 0.45 ? 0 : 1);
  }
  int status = 1;
  EXPECT(waitpid(child, &status, 0) == child && status == 0);
  for (const Completion& completion : collect(link.get(), 2)) EXPECT(completion.error == 0);
  EXPECT(pages.holds(0, 0) && pages.holds(1, 1));
#else
  static_cast<void>(make);
#endif
}

void stop_under_load(Made link, unsigned seed) {
  constexpr std::uint32_t kSlots = 64;
  Pages pages(kSlots);
  link->open(kSlots);
  std::atomic<bool> stopped{false};
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < 2; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937 random(seed + number);
      std::vector<Completion> done;
      while (!stopped) {
        ++operations;
        const auto slot = static_cast<std::uint32_t>(random() % kSlots);
        try {
          submit(link.get(), {pages.transfer(slot, slot, static_cast<Priority>(random() % kPriorities))});
        } catch (const std::invalid_argument&) {  // the slot is taken
          link->cancel(slot);
        } catch (const std::runtime_error&) {  // the link was stopped
          break;
        }
        if (random() % 8 == 0) link->poll(&done);
      }
      while (link->wait(milliseconds(2000))) link->poll(&done);
      for (const Completion& completion : done) {
        EXPECT(completion.error == 0 || completion.error == ECANCELED || completion.error == EIO);
      }
    });
  }
  std::this_thread::sleep_for(milliseconds(10 + seed % 20));
  EXPECT(link->stop(milliseconds(5000)));
  std::vector<unsigned char> before(pages.slab().data(0), pages.slab().data(0) + kSlots * kPage);
  stopped = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT(std::memcmp(before.data(), pages.slab().data(0), before.size()) == 0);
  const LinkStats stats = link->stats();
  EXPECT(stats.in_flight == 0 && stats.queued == 0);
}

void run(double time, unsigned seed) {
  slab_tracks_pages_and_memory();
  a_link_that_does_not_stop_is_leaked();
  priorities_and_overtaking();
  cancel_and_promote();
  impossible_transfers_are_rejected();
  faults_affect_only_their_transfer();
  a_failed_link_wakes_its_waiters();
  prefetches_leave_capacity_for_demands();
  a_stalled_link_stops();
  completions_out_of_order();
  stop_waits_for_transfers_in_flight();
  wait_honours_its_limit();
  simulated_speed();
  nothing_is_allocated(sim({}), false);
  an_idle_link_sleeps([] { return sim({}); }, false);
  for (const bool stall : {false, true}) {
    an_idle_link_sleeps(
        [stall] {
          SimLinkOptions options;
          options.latency = stall ? 0 : 0.2;
          options.stall_after = stall ? 0 : -1;
          return sim(options);
        },
        true);
  }
  a_child_process_does_not_use_the_link([] {
    SimLinkOptions options;
    options.latency = 0.1;
    return sim(options);
  });

  Directory directory(temporary());
  std::vector<Way> ways = {{"threads", FileIo::kThreads, true}, {"threads, cached", FileIo::kThreads, false}};
  try {
    make_file_link(file_regions(&directory), file_options({"", FileIo::kUring, true}));
    ways.push_back({"io_uring", FileIo::kUring, true});
    ways.push_back({"io_uring, cached", FileIo::kUring, false});
  } catch (const std::system_error& error) {
    std::printf("io_uring was not tested: %s\n", error.what());
  }
  unusable_files_are_rejected(&directory);
  checksums_must_fit_their_regions(&directory);
  checksums_are_the_same_in_every_way(seed);
  for (const Way& way : ways) {
    merged_reads(way, &directory);
    damaged_records_fail_alone(way, &directory);
    reads_beyond_a_truncated_file_fail(way, &directory);
    unaligned_targets(way, &directory);
    threads_that_begin_reads_may_end(way, &directory);
    const auto make = [&] { return make_file_link(file_regions(&directory), file_options(way)); };
    nothing_is_allocated(make(), true);
    an_idle_link_sleeps(make, false);
    a_child_process_does_not_use_the_link(make);
    stop_under_load(make(), seed);
    if (!way.direct) hung_reads(way, &directory);
  }

  const auto one_sim = [&](unsigned kind) {
    SimLinkOptions options;
    options.seed = seed + kind;
    options.reorder = kind % 2 == 0 ? 1 : 4;
    options.in_flight_bytes = (1 + kind % 5) * 3 * kPage;
    if (kind % 3 != 0) options.jitter = 100e-6;
    if (kind % 4 != 0) options.bandwidth = 2e9;
    if (kind % 3 == 2) options.fault_rate = 0.1;
    return options;
  };
  const double share = time / static_cast<double>(6 + 2 * ways.size());
  for (unsigned kind = 0; kind < 6; ++kind) {
    const SimLinkOptions options = one_sim(kind);
    random_operations(sim(options), seed + kind, share, options.fault_rate > 0);
    stop_under_load(sim(options), seed + kind);
  }
  for (const Way& way : ways) {
    for (const std::int64_t in_flight : {std::int64_t{0}, 6 * kPage}) {
      FileLinkOptions options = file_options(way);
      options.in_flight_bytes = in_flight;
      if (in_flight > 0) options.operation_bytes = 3 * kPage;
      random_operations(
          make_file_link(in_flight > 0 ? checked_regions(&directory) : file_regions(&directory), options),
          seed, share);
    }
  }
}

}  // namespace
}  // namespace moechat

__attribute__((noinline)) void* operator new(std::size_t bytes) {
  ++moechat::allocations;
  if (void* const memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

int main(int count, char** arguments) {
  double time = 1.0;
  unsigned seed = 1;
  int limit = 20;  // seconds, beyond --seconds
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = arguments[i];
    if (name == "--seconds") {
      time = std::atof(arguments[i + 1]);
    } else if (name == "--seed") {
      seed = static_cast<unsigned>(std::atoi(arguments[i + 1]));
    } else if (name == "--alarm") {
      limit = std::atoi(arguments[i + 1]);
    } else {
      std::fprintf(stderr, "usage: %s [--seconds N] [--seed N] [--alarm N]\n", arguments[0]);
      return 2;
    }
  }
  alarm(static_cast<unsigned>(limit + static_cast<int>(time)));
  moechat::run(time, seed);
  std::printf("operations %lld\n", static_cast<long long>(moechat::operations.load()));
  return 0;
}
