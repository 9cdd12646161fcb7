// The executor of a layer that a device has already computed: the schedule accounts for it as for any other.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "offload/executors.h"

namespace moechat {

class ComputedExecutor final : public RealTimeExecutor {
 public:
  explicit ComputedExecutor(Link* link) : RealTimeExecutor(link, 0.0) {}

  void start(std::int32_t rows) {
    RealTimeExecutor::start(nullptr);
    rows_ = rows;
    opened_ = rows == 0;
    added_ = 0;
  }

  bool next_group() override {
    const bool first = !opened_;
    opened_ = true;
    return first;
  }
  std::int32_t first_row() const override { return 0; }
  std::int32_t end_row() const override { return rows_; }
  std::int64_t work_of_call() const override { return std::numeric_limits<std::int32_t>::max(); }
  std::int64_t work_of_row() const override { return std::numeric_limits<std::int32_t>::max(); }
  void add(std::int32_t, std::int32_t, PageId, bool) override { ++added_; }
  std::int64_t pending() const override { return added_; }
  std::int64_t compute() override {
    const std::int64_t blocks = added_;
    added_ = 0;
    return blocks;
  }
  void drop() override { added_ = 0; }
  void finish_group() override {}
  // Blocks that are on their way again (their expert was evicted after the device had read it) are not needed
  // here: nothing waits for them.
  bool orders_copies() const override { return true; }
  std::int64_t far_threads() const override { return 1; }
  void far_compute(const std::vector<FarPiece>&) override {}

 private:
  std::int32_t rows_ = 0;
  bool opened_ = true;
  std::int64_t added_ = 0;
};

}  // namespace moechat
