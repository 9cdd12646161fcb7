// Clocks inside of a layer's step.
#pragma once

#include <cstdint>

#include "kernels/threads/spin.h"

namespace moechat {

// Nanoseconds in each part, summed over steps, for measurements. `cache`: rotary embedding, and appending
// keys and values. `attention`: linear attention too, without its projections.
struct StepTimes {
  std::int64_t norms, projections, cache, attention, router, shared;
};

// Adds the time since its last call, or since the start, to a part.
class StepClock {
 public:
  explicit StepClock(StepTimes* times) : times_(times), since_(times == nullptr ? 0 : now_ns()) {}
  void add(std::int64_t StepTimes::* part) {
    if (times_ == nullptr) return;
    const std::int64_t now = now_ns();
    times_->*part += now - since_;
    since_ = now;
  }

 private:
  StepTimes* times_;  // or null: not measured
  std::int64_t since_;
};

}  // namespace moechat
