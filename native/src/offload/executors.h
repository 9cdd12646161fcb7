// The executors that compute: on the CPU from pages in its memory, and on a GPU by launching kernels.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "link/link.h"
#include "memory/slab.h"
#include "offload/expert_sum.h"
#include "offload/far_kernels.h"
#include "offload/layer_executor.h"

namespace moechat {

// Waits for a link and calls back on a real clock.
class RealTimeExecutor : public LayerExecutor {
 public:
  using Interrupted = std::function<void()>;

  // wait_seconds: longest wait, if that is shorter than the time between two calls of `interrupted`.
  RealTimeExecutor(Link* link, double wait_seconds);

  // From now on `interrupted` is called a few times a second; may be null. It outlives the pass.
  void start(const Interrupted* interrupted);

  double now() override;
  bool wait() override;
  void poll_interrupt() override;

 protected:
  static constexpr std::chrono::milliseconds kSlice{50};  // of waiting, between two calls of `interrupted`

  Link* const link_;

 private:
  const std::chrono::microseconds wait_;
  const Interrupted* interrupted_ = nullptr;
  double called_ = 0;  // when interrupted_ was last called
};

class HostExecutor final : public RealTimeExecutor {
 public:
  HostExecutor(Link* link, double wait_seconds, const Slab* slab)
      : RealTimeExecutor(link, wait_seconds), slab_(slab) {}
  ExpertSum& sum() { return sum_; }

  bool next_group() override { return sum_.next_group(); }
  std::int32_t first_row() const override { return sum_.first_row(); }
  std::int32_t end_row() const override { return sum_.end_row(); }
  // Some milliseconds: so pages come back, and the link gets new work, while a long pass computes.
  static constexpr std::int64_t kWorkOfCall = 1024;
  // Some tenths of a second. Not finer: each call prepares its inputs anew.
  static constexpr std::int64_t kWorkOfRow = 16384;
  std::int64_t work_of_call() const override { return kWorkOfCall; }
  std::int64_t work_of_row() const override { return kWorkOfRow; }
  void add(std::int32_t row, std::int32_t block, PageId page, bool) override {
    sum_.add(row, block, slab_->record(page));
  }
  std::int64_t pending() const override { return sum_.pending(); }
  std::int64_t compute() override { return sum_.compute(); }
  void drop() override { sum_.drop(); }
  void finish_group() override { sum_.finish_group(); }
  // The far tier of a host is a disk.
  std::int64_t far_threads() const override { return 1; }
  void far_compute(const std::vector<FarPiece>&) override {}

 private:
  const Slab* slab_;
  ExpertSum sum_;
};

// Blocks for one launch on a GPU, rows and blocks ascending.
struct DeviceLaunch {
  const PageId* page;             // [entries]
  const std::int32_t* row_entry;  // [rows + 1] first entry of each row
  const std::int32_t* row_block;  // [rows] number of the first block of each row here
  std::int64_t entries;
  std::int64_t rows;
  const Grouped* items;  // of the rows
};

// Launches kernels. All rows are one group: the sums lie on the GPU.
//
// Where the link orders its copies and the kernels on the GPU (StreamOrder), no thread waits: kernels are
// launched behind the copies into the pages that they read, and copies that start after a launch come behind
// its kernels. With any other link a block is launched once it has landed, and `launch` returns when its
// kernels are done.
class DeviceExecutor : public RealTimeExecutor {
 public:
  using Launch = std::function<void(const DeviceLaunch&)>;

  DeviceExecutor(Link* link, double wait_seconds, FarKernels far)
      : RealTimeExecutor(link, wait_seconds), order_(link->stream_order()), far_(std::move(far)) {}

  // `launch` puts kernels into the stream (a CUstream) and returns. work: the most (token, block) pairs of a
  // call, for which it has memory; a row with more is cut.
  void start(const Interrupted* interrupted, const Grouped* rows, void* stream, std::int64_t work,
             const Launch* launch);
  FarKernels& far() { return far_; }

  bool next_group() override;
  std::int32_t first_row() const override { return 0; }
  std::int32_t end_row() const override { return rows_->rows(); }
  std::int64_t work_of_call() const override { return work_; }
  std::int64_t work_of_row() const override { return work_; }
  void add(std::int32_t row, std::int32_t block, PageId page, bool landed) override;
  std::int64_t pending() const override { return pending_; }
  std::int64_t compute() override;
  void drop() override;
  void finish_group() override {}
  bool orders_copies() const override { return order_ != nullptr; }
  bool follow_copies() override;
  std::int64_t far_threads() const override;
  void far_compute(const std::vector<FarPiece>& pieces) override;

 private:
  StreamOrder* const order_;  // null: the link orders nothing
  FarKernels far_;
  const Grouped* rows_ = nullptr;
  void* stream_ = nullptr;
  const Launch* launch_ = nullptr;
  std::int64_t work_ = 0;
  bool opened_ = false;
  // Blocks that were added.
  std::int64_t pending_ = 0;
  std::vector<PageId> page_;
  std::vector<PageId> flying_;            // of these pages, those that have not landed
  std::vector<std::int32_t> row_block_;   // [rows] number of the first block
  std::vector<std::int32_t> row_blocks_;  // [rows] how many
  std::vector<std::int32_t> row_entry_;
};

}  // namespace moechat
