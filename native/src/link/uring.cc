#include "link/uring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

namespace moechat {

#if defined(__NR_io_uring_setup) && defined(IORING_FEAT_SUBMIT_STABLE)

namespace {

[[noreturn]] void give_up(int error, const char* call) {
  throw std::system_error(error, std::generic_category(), call);
}

template <class T>
T* at(void* base, std::uint32_t offset) {
  return reinterpret_cast<T*>(static_cast<unsigned char*>(base) + offset);
}

}  // namespace

Uring::Uring(unsigned entries, int event_fd) {
  io_uring_params params{};
  fd_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
  if (fd_ < 0) give_up(errno, "io_uring_setup");
  // One mapping for both rings, and no lost results: since Linux 5.5.
  constexpr unsigned kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_SUBMIT_STABLE;
  if ((params.features & kNeeded) != kNeeded) {
    close_all();
    give_up(ENOSYS, "io_uring_setup");
  }
  const std::size_t submit_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
  const std::size_t result_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  const auto map = [this](std::size_t bytes, long offset, Mapping* mapping) {
    void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                            static_cast<off_t>(offset));
    if (data == MAP_FAILED) {
      const int error = errno;
      close_all();
      give_up(error, "mmap of an io_uring");
    }
    // A child process has no business with the ring.
    madvise(data, bytes, MADV_DONTFORK);
    *mapping = {data, bytes};
  };
  map(submit_bytes > result_bytes ? submit_bytes : result_bytes, IORING_OFF_SQ_RING, &rings_);
  map(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES, &entries_);
  submit_tail_ = at<unsigned>(rings_.data, params.sq_off.tail);
  submit_array_ = at<unsigned>(rings_.data, params.sq_off.array);
  mask_ = *at<unsigned>(rings_.data, params.sq_off.ring_mask);
  result_head_ = at<unsigned>(rings_.data, params.cq_off.head);
  result_tail_ = at<unsigned>(rings_.data, params.cq_off.tail);
  result_mask_ = *at<unsigned>(rings_.data, params.cq_off.ring_mask);
  results_ = at<void>(rings_.data, params.cq_off.cqes);
  if (syscall(__NR_io_uring_register, fd_, IORING_REGISTER_EVENTFD, &event_fd, 1) < 0) {
    const int error = errno;
    close_all();
    give_up(error, "io_uring_register");
  }
}

Uring::~Uring() { close_all(); }

void Uring::close_all() {
  if (entries_.data != nullptr) munmap(entries_.data, entries_.bytes);
  if (rings_.data != nullptr) munmap(rings_.data, rings_.bytes);
  if (fd_ >= 0) close(fd_);
  entries_ = rings_ = {};
  fd_ = -1;
}

void Uring::prepare(int fd, const iovec* vectors, unsigned count, std::int64_t offset, std::uint64_t tag,
                    bool detached) {
  const unsigned tail = *submit_tail_;  // only we write it
  io_uring_sqe* const entry = static_cast<io_uring_sqe*>(entries_.data) + (tail & mask_);
  std::memset(entry, 0, sizeof *entry);
  entry->opcode = IORING_OP_READV;
  entry->flags = detached ? IOSQE_ASYNC : 0;
  entry->fd = fd;
  entry->off = static_cast<std::uint64_t>(offset);
  entry->addr = reinterpret_cast<std::uintptr_t>(vectors);
  entry->len = count;
  entry->user_data = tag;
  submit_array_[tail & mask_] = tail & mask_;
  __atomic_store_n(submit_tail_, tail + 1, __ATOMIC_RELEASE);
  ++prepared_;
}

int Uring::submit() {
  while (prepared_ > 0) {
    const long taken = syscall(__NR_io_uring_enter, fd_, prepared_, 0, 0, nullptr, 0);
    if (taken > 0) {
      prepared_ -= static_cast<unsigned>(taken);
    } else if (taken == 0) {
      return EAGAIN;
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

std::uint64_t Uring::withdraw() {
  const unsigned tail = *submit_tail_ - 1;
  const std::uint64_t tag = static_cast<io_uring_sqe*>(entries_.data)[tail & mask_].user_data;
  __atomic_store_n(submit_tail_, tail, __ATOMIC_RELEASE);
  --prepared_;
  return tag;
}

bool Uring::take(Result* result) {
  const unsigned head = *result_head_;  // only we write it
  if (head == __atomic_load_n(result_tail_, __ATOMIC_ACQUIRE)) return false;
  const io_uring_cqe& entry = static_cast<io_uring_cqe*>(results_)[head & result_mask_];
  *result = {entry.user_data, entry.res};
  __atomic_store_n(result_head_, head + 1, __ATOMIC_RELEASE);
  return true;
}

#else  // headers from before io_uring

Uring::Uring(unsigned, int) { throw std::system_error(ENOSYS, std::generic_category(), "io_uring_setup"); }
Uring::~Uring() = default;
void Uring::prepare(int, const iovec*, unsigned, std::int64_t, std::uint64_t, bool) {}
int Uring::submit() { return ENOSYS; }
std::uint64_t Uring::withdraw() { return 0; }
bool Uring::take(Result*) { return false; }

#endif

}  // namespace moechat
