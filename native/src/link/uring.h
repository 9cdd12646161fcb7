// A ring of asynchronous reads: the few system calls of io_uring that a link needs, and nothing of liburing.
//
// Not thread-safe: its owner serialises. Memory that a read was prepared with (the iovecs and what
// they point to) belongs to the kernel until its result has been taken.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace moechat {

class Uring {
 public:
  struct Result {
    std::uint64_t tag;
    std::int32_t value;  // bytes read, or minus an errno
  };

  // Room for `entries` reads at a time. Every result makes `event_fd` readable. Throws std::system_error
  // where io_uring is not to be had: not in this kernel (ENOSYS), forbidden (EPERM, EACCES).
  Uring(unsigned entries, int event_fd);
  ~Uring();
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  // Puts a read into the ring; the kernel sees it at the next `submit`. At most `entries` reads may be
  // without a taken result. `detached`: the kernel shall not even try to read while it is being submitted.
  void prepare(int fd, const iovec* vectors, unsigned count, std::int64_t offset, std::uint64_t tag,
               bool detached);
  // Hands prepared reads to the kernel. Returns 0, or an errno; reads that the kernel did not take stay
  // prepared.
  int submit();
  unsigned prepared() const { return prepared_; }
  // Takes back the read that was prepared last and is not yet with the kernel.
  std::uint64_t withdraw();
  // The next result; false when there is none.
  bool take(Result* result);

 private:
  struct Mapping {
    void* data = nullptr;
    std::size_t bytes = 0;
  };
  void close_all();

  int fd_ = -1;
  Mapping rings_;
  Mapping entries_;
  unsigned prepared_ = 0;
  unsigned mask_ = 0;
  unsigned* submit_tail_ = nullptr;
  unsigned* submit_array_ = nullptr;
  unsigned* result_head_ = nullptr;
  unsigned* result_tail_ = nullptr;
  unsigned result_mask_ = 0;
  void* results_ = nullptr;
};

}  // namespace moechat
