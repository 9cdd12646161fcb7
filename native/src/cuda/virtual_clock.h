// The clock of links and executors: the system's, or one that a stand-in for the driver keeps.
//
// A stand-in that models a GPU (native/tests/timed_cuda.cc) moves a clock of its own instead of sleeping. It
// exports the functions below beside the driver's. While such a driver is loaded
// - times are read from it;
// - links have no threads: whoever waits moves the clock, and the stand-in calls a link whenever its thread
//   would have woken up;
// - the CPU computes no experts, but spends the time that they take.
// So the decisions of links and schedules are those of a real run, and every run of a test takes the same.
#pragma once

#include <cstdint>

namespace moechat {

struct VirtualClock {
  double (*now)();  // seconds
  // Moves the clock to the next moment at which anything changes; 0: nothing ever will.
  int (*step)();
  // Calls pump(link, 1) whenever a thread that waits for the GPU would wake up, until `unwatch`. It returns
  // how many transfers the link has still to make; pump(link, 0) does nothing else.
  void (*watch)(std::int64_t (*pump)(void*, int act), void* link);
  void (*unwatch)(void* link);
  // Spends the time that the CPU takes for experts of so many bytes.
  void (*compute)(double bytes);
};

// Null: the system's clock. REQUIRES of `set_virtual_clock`: no link is open; the clock lives to the end.
const VirtualClock* virtual_clock();
void set_virtual_clock(const VirtualClock* clock);

// Seconds since some moment, never falling.
double seconds_now();

}  // namespace moechat
