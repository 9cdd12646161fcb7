// Owners of what the driver gives out. Each makes its context current to give it back; where that fails the
// context is gone, and what it owned with it.
#pragma once

#include <cstddef>
#include <utility>

#include "cuda/driver.h"
#include "memory/huge_memory.h"

namespace moechat::cuda {

// Calls `give_back` in a context; errors are of no use to anybody then.
template <class Call>
void in_context(Context context, const Call& give_back) {
  if (driver().push_context(context) != kSuccess) return;
  static_cast<void>(give_back());
  Context popped = nullptr;
  static_cast<void>(driver().pop_context(&popped));
}

class OwnEvent {
 public:
  // Without times; waiting for it sleeps. Throws Error.
  explicit OwnEvent(Context context) : context_(context) {
    const Current current(context_);
    check(driver().event_create(&event_, kEventBlockingSync | kEventDisableTiming), "cuEventCreate");
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

// A stream that goes before others and does not wait for the default one.
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

// Host memory of its own, all 0, that the driver has pinned.
class PinnedMemory {
 public:
  // Throws Error where the driver or the system refuses to pin, std::bad_alloc.
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

 private:
  Context context_;
  HugeMemory memory_;
  bool pinned_ = false;
};

}  // namespace moechat::cuda
