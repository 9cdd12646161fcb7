#include "kernels/threads/wait_word.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace moechat {

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t) &&
                  std::atomic<std::uint32_t>::is_always_lock_free,
              "the kernel reads the number where it lies");

void FutexWaitWord::wait(std::uint32_t seen) {
  syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void FutexWaitWord::wake(int most) {
  syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0);
}

}  // namespace moechat
#endif
