// Signals and threads of our own.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace moechat {

// While it exists, threads that are started get no signals that others send: these belong to the
// interpreter's threads. Faults of the thread itself are not blocked, for the system ends the process where
// they are, and a read of a mapped file may raise one that is survived (memory/mapped_guard.h).
class SentSignalsBlocked {
 public:
  SentSignalsBlocked() {
    sigset_t sent;
    sigfillset(&sent);
    for (const int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&sent, fault);
    pthread_sigmask(SIG_SETMASK, &sent, &before_);
  }
  ~SentSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SentSignalsBlocked(const SentSignalsBlocked&) = delete;
  SentSignalsBlocked& operator=(const SentSignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace moechat
