#include "offload/block_sink.h"

#include <utility>

namespace moechat {
namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

}  // namespace

void DeviceSink::start(const Grouped* rows, std::int64_t work, Launch launch) {
  rows_ = rows;
  work_ = work;
  launch_ = std::move(launch);
  opened_ = false;
  drop();
}

bool DeviceSink::next_group() {
  if (opened_ || rows_->rows() == 0) return false;
  opened_ = true;
  return true;
}

void DeviceSink::add(std::int32_t row, std::int32_t block, PageId page) {
  if (row_blocks_[at(row)]++ == 0) row_block_[at(row)] = block;
  page_.push_back(page);
  pending_ += rows_->tokens_of[at(row)];
}

std::int64_t DeviceSink::compute() {
  const auto count = static_cast<std::int64_t>(page_.size());
  if (count == 0) return 0;
  row_entry_.assign(1, 0);
  for (const std::int32_t blocks : row_blocks_) row_entry_.push_back(row_entry_.back() + blocks);
  launch_({page_.data(), row_entry_.data(), row_block_.data(), count, rows_->rows(), rows_});
  drop();
  return count;
}

void DeviceSink::drop() {
  page_.clear();
  row_block_.assign(at(rows_->rows()), 0);
  row_blocks_.assign(at(rows_->rows()), 0);
  pending_ = 0;
}

}  // namespace moechat
