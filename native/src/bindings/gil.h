// Dropping the GIL around calls that compute or wait.
#pragma once

#include <Python.h>
#include <unistd.h>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace moechat {

// Drops the GIL for a scope. A daemon thread that comes back while the interpreter shuts down never gets the
// GIL again: Python before 3.14 ends it by pthread_exit, whose unwinding may not leave a destructor and would
// run others without the GIL. Such a thread waits here for the end of the process instead, as it does from
// Python 3.14 on.
class ReleaseGil {
 public:
  ReleaseGil() : state_(PyEval_SaveThread()) {}
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;
  ~ReleaseGil() {
#if defined(__GLIBCXX__)
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
#else
    PyEval_RestoreThread(state_);
#endif
  }

 private:
  PyThreadState* state_;
};

}  // namespace moechat
