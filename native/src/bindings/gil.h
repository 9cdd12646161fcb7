// Dropping the GIL around calls that compute or wait, and taking it to look for signals.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace moechat {

// Drops the GIL for a scope. While the interpreter shuts down, a daemon thread cannot reacquire the GIL:
// Python before 3.14 ends it by pthread_exit, whose unwinding may not leave a destructor and would run other
// destructors without the GIL. Such a thread waits here until the process ends, as Python 3.14 makes it do.
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

// Called on a thread without the GIL during a long wait; raises a pending Ctrl-C as KeyboardInterrupt.
inline void check_signals() {
  const pybind11::gil_scoped_acquire held;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace moechat
