// The Python object that owns a link until a runner takes it.
#pragma once

#include <pybind11/pybind11.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/gil.h"
#include "link/link.h"

namespace moechat {

// Raises OSError with the file's name.
[[noreturn]] inline void raise_os_error(int error, const std::string& path) {
  errno = error;
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
  throw pybind11::error_already_set();
}

class LinkHolder {
 public:
  // `alive`: Python objects whose memory the link reads (the arrays of a simulated link).
  LinkHolder(std::unique_ptr<Link> link, std::vector<pybind11::object> alive)
      : link_(std::move(link)), alive_(std::move(alive)) {}
  LinkHolder(const LinkHolder&) = delete;
  LinkHolder& operator=(const LinkHolder&) = delete;
  // If the link does not stop, its sources and targets are leaked, since it may still read and write them.
  ~LinkHolder() {
    if (!link_) return;
    bool stopped = false;
    {
      const ReleaseGil released;
      stopped = link_->stop(std::chrono::milliseconds(500));
      link_.reset();
    }
    if (stopped) return;
    for (pybind11::object& object : alive_) object.release();
    for (pybind11::object& object : targets_) object.release();
  }

  Link& get() const {
    if (!link_) throw std::invalid_argument("the link already belongs to a runner");
    return *link_;
  }
  std::unique_ptr<Link> take() {
    get();
    return std::move(link_);
  }
  // A new owner of the link must keep these alive as long as the link.
  const std::vector<pybind11::object>& alive() const { return alive_; }

  // The link writes into this array until it is stopped.
  void keep_target(const pybind11::object& target) {
    for (const pybind11::object& known : targets_) {
      if (known.is(target)) return;
    }
    targets_.push_back(target);
  }

 private:
  std::unique_ptr<Link> link_;
  std::vector<pybind11::object> alive_;
  std::vector<pybind11::object> targets_;
};

}  // namespace moechat
