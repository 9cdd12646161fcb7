// What computes the blocks that a runner finds ready: the CPU, or a GPU.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "memory/slab.h"
#include "offload/expert_sum.h"

namespace moechat {

// One pass over one layer. Rows are those of Grouped; they are taken in groups of neighbours, and within a
// group in any order, each from its first block to its last.
class BlockSink {
 public:
  virtual ~BlockSink() = default;

  // Opens the next group; false when there is none.
  virtual bool next_group() = 0;
  virtual std::int32_t first_row() const = 0;
  virtual std::int32_t end_row() const = 0;
  // (token, block) pairs from which a call has enough work, rows being whole, and at which a row is cut.
  virtual std::int64_t work_of_call() const = 0;
  virtual std::int64_t work_of_row() const = 0;

  // The next block of a row. Rows of one call in ascending order, blocks of a row in ascending order.
  virtual void add(std::int32_t row, std::int32_t block, PageId page) = 0;
  // (token, block) pairs added since the last `compute`.
  virtual std::int64_t pending() const = 0;
  // Runs what was added; returns how many blocks.
  virtual std::int64_t compute() = 0;
  // Forgets what was added.
  virtual void drop() = 0;
  // Every row of the group has been computed.
  virtual void finish_group() = 0;
};

// Computes on the CPU, from pages in its memory.
class HostSink final : public BlockSink {
 public:
  explicit HostSink(const Slab* slab) : slab_(slab) {}
  ExpertSum& sum() { return sum_; }

  bool next_group() override { return sum_.next_group(); }
  std::int32_t first_row() const override { return sum_.first_row(); }
  std::int32_t end_row() const override { return sum_.end_row(); }
  // Some milliseconds: so pages come back, and the link gets new work, while a long pass computes.
  std::int64_t work_of_call() const override { return 1024; }
  // Some tenths of a second. Not finer: each call prepares its inputs anew.
  std::int64_t work_of_row() const override { return 16384; }
  void add(std::int32_t row, std::int32_t block, PageId page) override {
    sum_.add(row, block, slab_->data(page));
  }
  std::int64_t pending() const override { return sum_.pending(); }
  std::int64_t compute() override { return sum_.compute(); }
  void drop() override { sum_.drop(); }
  void finish_group() override { sum_.finish_group(); }

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

// Hands the blocks over. All rows are one group: what is added up lies on the GPU.
class DeviceSink final : public BlockSink {
 public:
  using Launch = std::function<void(const DeviceLaunch&)>;

  // `launch` puts kernels into the stream and returns. work: the most (token, block) pairs of a call, for
  // which it has memory; a row with more is cut.
  void start(const Grouped* rows, std::int64_t work, Launch launch);

  bool next_group() override;
  std::int32_t first_row() const override { return 0; }
  std::int32_t end_row() const override { return rows_->rows(); }
  std::int64_t work_of_call() const override { return work_; }
  std::int64_t work_of_row() const override { return work_; }
  void add(std::int32_t row, std::int32_t block, PageId page) override;
  std::int64_t pending() const override { return pending_; }
  std::int64_t compute() override;
  void drop() override;
  void finish_group() override {}

 private:
  const Grouped* rows_ = nullptr;
  Launch launch_;
  std::int64_t work_ = 0;
  bool opened_ = false;
  std::int64_t pending_ = 0;
  std::vector<PageId> page_;
  std::vector<std::int32_t> row_block_;
  std::vector<std::int32_t> row_blocks_;  // [rows] blocks added
  std::vector<std::int32_t> row_entry_;
};

}  // namespace moechat
