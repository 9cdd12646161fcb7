// RAII owners of resources of the driver. Each destructor makes its context current. If that fails, the
// context is destroyed, and the resource with it.
#pragma once

#include <cstddef>
#include <utility>

#include "cuda/driver.h"
#include "memory/huge_memory.h"

namespace moechat::cuda {

// Calls `give_back` in a context. Ignores errors, because destructors cannot report them.
template <class Call>
void in_context(Context context, const Call& give_back) {
  if (driver().push_context(context) != kSuccess) return;
  static_cast<void>(give_back());
  Context popped = nullptr;
  static_cast<void>(driver().pop_context(&popped));
}

class OwnEvent {
 public:
  // Records no times. Throws Error.
  explicit OwnEvent(Context context) : context_(context) {
    const Current current(context_);
    check(driver().event_create(&event_, kEventDisableTiming), "cuEventCreate");
  }
  OwnEvent(OwnEvent&& other) noexcept
      : context_(other.context_), event_(std::exchange(other.event_, nullptr)) {}
  OwnEvent& operator=(OwnEvent&&) = delete;
  ~OwnEvent() {
    if (event_ != nullptr) in_context(context_, [this] { return driver().event_destroy(event_); });
  }
  Event get() const { return event_; }

 private:
  Context context_;
  Event event_ = nullptr;
};

// A stream of the highest priority that does not synchronise with the default stream.
class OwnStream {
 public:
  // Throws Error.
  explicit OwnStream(Context context) : context_(context) {
    const Current current(context_);
    int least = 0, greatest = 0;
    check(driver().stream_priorities(&least, &greatest), "cuCtxGetStreamPriorityRange");
    check(driver().stream_create(&stream_, kStreamNonBlocking, greatest), "cuStreamCreate");
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream() {
    if (stream_ != nullptr) in_context(context_, [this] { return driver().stream_destroy(stream_); });
  }
  Stream get() const { return stream_; }

 private:
  Context context_;
  Stream stream_ = nullptr;
};

// Zero-initialised host memory that the driver has pinned.
class PinnedMemory {
 public:
  // Throws Error if the driver or the system does not allow pinning, std::bad_alloc.
  PinnedMemory(Context context, std::size_t bytes) : context_(context), memory_(bytes) {
    if (bytes == 0) return;
    const Current current(context_);
    check(driver().host_register(memory_.data(), bytes, kHostRegisterPortable), "cuMemHostRegister");
    pinned_ = true;
  }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  ~PinnedMemory() {
    if (pinned_) in_context(context_, [this] { return driver().host_unregister(memory_.data()); });
  }
  unsigned char* data() const { return memory_.data(); }
  std::size_t bytes() const { return memory_.bytes(); }

 private:
  Context context_;
  HugeMemory memory_;
  bool pinned_ = false;
};

}  // namespace moechat::cuda
