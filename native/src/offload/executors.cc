#include "offload/executors.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "cuda/virtual_clock.h"
#include "kernels/threads/thread_pool.h"
#include "link/mutation.h"

namespace moechat {
namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

}  // namespace

RealTimeExecutor::RealTimeExecutor(Link* link, double wait_seconds)
    : link_(link),
      wait_(std::min(std::chrono::duration_cast<std::chrono::microseconds>(kSlice),
                     std::chrono::duration_cast<std::chrono::microseconds>(
                         std::chrono::duration<double>(std::min(wait_seconds, 1.0))))) {}

void RealTimeExecutor::start(const Interrupted* interrupted) {
  interrupted_ = interrupted;
  called_ = now();
}

double RealTimeExecutor::now() { return seconds_now(); }

bool RealTimeExecutor::wait() {
  // Wait 25: for the link.
  bool arrived = false;
  MOECHAT_WAIT(25, arrived = link_->wait(wait_));
  if (!arrived && virtual_clock() != nullptr) {
    throw std::logic_error("a block is waited for, and nothing is on its way");
  }
  return arrived;
}

void RealTimeExecutor::poll_interrupt() {
  if (interrupted_ == nullptr || !*interrupted_) return;
  const double time = now();
  if (time - called_ < std::chrono::duration<double>(kSlice).count()) return;
  called_ = time;
  (*interrupted_)();
}

// ---- on a device

void DeviceExecutor::start(const Interrupted* interrupted, const Grouped* rows, void* stream,
                           std::int64_t work, const Launch* launch) {
  RealTimeExecutor::start(interrupted);
  rows_ = rows;
  stream_ = stream;
  work_ = work;
  launch_ = launch;
  opened_ = false;
  drop();
}

bool DeviceExecutor::next_group() {
  if (opened_ || rows_->rows() == 0) return false;
  opened_ = true;
  return true;
}

void DeviceExecutor::add(std::int32_t row, std::int32_t block, PageId page, bool landed) {
  if (row_blocks_[at(row)]++ == 0) row_block_[at(row)] = block;
  page_.push_back(page);
  if (!landed) flying_.push_back(page);
  pending_ += rows_->tokens_of[at(row)];
}

bool DeviceExecutor::follow_copies() {
  if (flying_.empty()) return true;
  const auto count = static_cast<std::int64_t>(flying_.size());
  try {
    return order_->fills_first(stream_, flying_.data(), count, kSlice);
  } catch (const std::exception& error) {
    throw LinkFailure(error.what());
  }
}

std::int64_t DeviceExecutor::compute() {
  const auto count = static_cast<std::int64_t>(page_.size());
  row_entry_.assign(1, 0);
  for (const std::int32_t blocks : row_blocks_) row_entry_.push_back(row_entry_.back() + blocks);
  const auto mark_reads = [&] {
    if (order_ == nullptr) return;
    try {
      order_->reads_first(stream_, page_.data(), count);
    } catch (const std::exception& error) {
      throw LinkFailure(error.what());
    }
  };
  try {
    (*launch_)({page_.data(), row_entry_.data(), row_block_.data(), count, rows_->rows(), rows_});
  } catch (...) {
    // Some of the kernels may have been launched: they read all the same.
    mark_reads();
    throw;
  }
  mark_reads();
  drop();
  return count;
}

void DeviceExecutor::drop() {
  page_.clear();
  flying_.clear();
  row_block_.assign(at(rows_->rows()), 0);
  row_blocks_.assign(at(rows_->rows()), 0);
  pending_ = 0;
}

void DeviceExecutor::far_compute(const std::vector<FarPiece>& pieces) {
  const VirtualClock* const clock = virtual_clock();
  if (clock == nullptr) {
    far_.compute(pieces);
    return;
  }
  double pairs = 0;
  for (const FarPiece& piece : pieces) {
    pairs += static_cast<double>(rows_->tokens_of[at(piece.row)]) * (piece.end - piece.begin);
  }
  clock->compute(pairs * static_cast<double>(far_.record_bytes()));
}

std::int64_t DeviceExecutor::far_threads() const { return ThreadPool::num_threads(); }

}  // namespace moechat
