#include "memory/mapped_guard.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>

namespace moechat {

// A node of a list that only grows, so that the handler may walk it at any time; nodes of guards that are
// gone are used again.
struct MappedGuard::Range {
  std::atomic<std::uintptr_t> begin{0};  // 0: not in use
  std::atomic<std::uintptr_t> end{0};
  std::atomic<std::int64_t> lost{-1};
  Range* next = nullptr;
};

namespace {

// The handler uses nothing else: no lock, no allocation.
std::atomic<MappedGuard::Range*> ranges{nullptr};
std::atomic<std::int64_t> losses{0};
std::atomic<int> passing{0};  // handlers inside pass_on
std::uintptr_t page_bytes = 0;
struct sigaction before{};
static_assert(std::atomic<std::uintptr_t>::is_always_lock_free &&
              std::atomic<std::int64_t>::is_always_lock_free);

std::mutex& registering() {
  static auto* const mutex = new std::mutex;  // guards may be destroyed after statics
  return *mutex;
}
std::int64_t guards = 0;  // with the mutex

// Whether the fault was in a guarded range, which has zeros from there on now.
bool take_over(std::uintptr_t fault) {
  for (MappedGuard::Range* range = ranges.load(std::memory_order_acquire); range != nullptr;
       range = range->next) {
    const std::uintptr_t begin = range->begin.load(std::memory_order_acquire);
    const std::uintptr_t end = range->end.load(std::memory_order_acquire);
    if (begin == 0 || fault < begin || fault >= end) continue;
    const std::uintptr_t first = fault / page_bytes * page_bytes;
    const std::uintptr_t last = (end + page_bytes - 1) / page_bytes * page_bytes;
    void* const zeros = mmap(reinterpret_cast<void*>(first), last - first, PROT_READ,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    if (zeros == MAP_FAILED) return false;
    const std::int64_t offset = first < begin ? 0 : static_cast<std::int64_t>(first - begin);
    std::int64_t known = range->lost.load();
    while ((known < 0 || offset < known) && !range->lost.compare_exchange_weak(known, offset)) {
    }
    losses.fetch_add(1);
    return true;
  }
  return false;
}

// A handler that was put before ours later, and calls ours in turn, would go round in circles: then the
// default follows.
void pass_on(int signal, siginfo_t* info, void* context) {
  const bool again = passing.fetch_add(1) > 0;
  if (!again && (before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
    before.sa_sigaction(signal, info, context);
  } else if (!again && (before.sa_flags & SA_SIGINFO) == 0 && before.sa_handler != SIG_DFL &&
             before.sa_handler != SIG_IGN) {
    before.sa_handler(signal);
  } else {
    // The instruction is tried again, and the system does what it does by default.
    struct sigaction standard{};
    standard.sa_handler = SIG_DFL;
    sigaction(signal, &standard, nullptr);
    // A signal that was sent has no instruction to try again.
    if (info->si_code <= 0) raise(signal);
  }
  passing.fetch_sub(1);
}

void on_bus_error(int signal, siginfo_t* info, void* context) {
  // A handler that was put before ours later, such as Python's faulthandler, has put ours back and raised the
  // signal: the instruction is tried again, and comes here with its address.
  if (info->si_code == SI_TKILL && info->si_pid == getpid()) return;
  const int error = errno;
  const bool ours = info->si_code == BUS_ADRERR && take_over(reinterpret_cast<std::uintptr_t>(info->si_addr));
  errno = error;
  if (!ours) pass_on(signal, info, context);
}

void install() {
  page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  struct sigaction action{};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  if (sigaction(SIGBUS, nullptr, &before) != 0 || sigaction(SIGBUS, &action, nullptr) != 0) {
    throw std::system_error(errno, std::generic_category(), "sigaction(SIGBUS)");
  }
}

// Unless another handler has been put before ours meanwhile, which may call it.
void uninstall() {
  struct sigaction now{};
  if (sigaction(SIGBUS, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 &&
      now.sa_sigaction == on_bus_error) {
    sigaction(SIGBUS, &before, nullptr);
  }
}

bool is_installed() {
  struct sigaction now{};
  return sigaction(SIGBUS, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 &&
         now.sa_sigaction == on_bus_error;
}

}  // namespace

MappedGuard::MappedGuard(const void* data, std::size_t bytes) {
  if (data == nullptr || bytes == 0) throw std::invalid_argument("a guarded range must have bytes");
  const std::lock_guard<std::mutex> lock(registering());
  // Asked each time: others may have put theirs back meanwhile, which they had kept from before ours.
  if (!is_installed()) install();
  Range* range = ranges.load(std::memory_order_relaxed);
  while (range != nullptr && range->begin.load(std::memory_order_relaxed) != 0) range = range->next;
  const bool is_new = range == nullptr;
  if (is_new) range = new Range;
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  range->lost.store(-1);
  range->end.store(begin + bytes, std::memory_order_release);
  range->begin.store(begin, std::memory_order_release);
  if (is_new) {
    range->next = ranges.load(std::memory_order_relaxed);
    ranges.store(range, std::memory_order_release);
  }
  range_ = range;
  ++guards;
}

MappedGuard::~MappedGuard() {
  const std::lock_guard<std::mutex> lock(registering());
  range_->begin.store(0, std::memory_order_release);
  range_->end.store(0, std::memory_order_release);
  if (--guards == 0) uninstall();
}

std::int64_t MappedGuard::lost() const { return range_->lost.load(); }

std::int64_t mapping_losses() { return losses.load(); }

}  // namespace moechat
