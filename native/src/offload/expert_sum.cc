#include "offload/expert_sum.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "kernels/threads/thread_pool.h"

namespace moechat {
namespace {

constexpr std::int64_t kBytesPerThread =
    1 << 18;  // of additions; below, waking one more thread costs more than it saves
// (token, block) pairs that one thread computes faster than it wakes another: 20 us each against 50 to 100
// us.
constexpr std::int64_t kPairsAlone = 2;
constexpr std::int64_t kColumnStep = 512;  // columns that a thread adds at a time

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

}  // namespace

void group_by_expert(const std::int64_t* index, const float* weight, std::int64_t tokens, std::int64_t k,
                     std::int32_t experts, Grouped* out) {
  const std::int64_t picks = tokens * k;
  if (picks > std::numeric_limits<std::int32_t>::max()) {
    throw std::invalid_argument("a pass of " + std::to_string(tokens) + " tokens with " + std::to_string(k) +
                                " experts each is too long; cut the prompt");
  }
  out->counts.assign(at(experts), 0);
  std::int32_t items = 0;
  for (std::int64_t i = 0; i < picks; ++i) {
    if (index[i] < 0 || index[i] >= experts) continue;
    ++out->counts[at(index[i])];
    ++items;
  }
  out->experts.clear();
  out->tokens_of.clear();
  out->start.clear();
  out->start.push_back(0);
  for (std::int32_t expert = 0; expert < experts; ++expert) {
    const std::int32_t count = out->counts[at(expert)];
    if (count == 0) continue;
    out->experts.push_back(expert);
    out->tokens_of.push_back(count);
    out->counts[at(expert)] = out->start.back();  // from here on: index of the expert's next item
    out->start.push_back(out->start.back() + count);
  }
  out->token.resize(at(items));
  out->weight.resize(at(items));
  for (std::int64_t i = 0; i < picks; ++i) {
    if (index[i] < 0 || index[i] >= experts) continue;
    const std::int32_t item = out->counts[at(index[i])]++;
    out->token[at(item)] = static_cast<std::int32_t>(i / k);
    out->weight[at(item)] = weight[i];
  }
}

float* ExpertSum::Floats::need(std::int64_t count) {
  if (size < at(count)) {
    data.reset();
    size = 0;
    data.reset(new float[at(count)]);
    size = at(count);
  }
  return data.get();
}

// Frees the memory that an unusually long row needed.
void ExpertSum::Floats::shrink() {
  if (static_cast<std::int64_t>(size * sizeof(float)) <= kBytes) return;
  data.reset();
  size = 0;
}

std::int64_t ExpertSum::items_of(std::int32_t row) const {
  return rows_->start[at(row + 1)] - rows_->start[at(row)];
}

void ExpertSum::start(const BlockLayout& layout, const GateSpec& gate, const Grouped& rows, const float* x,
                      std::int64_t tokens, float* out, std::int64_t accumulator_bytes, int activation_bits) {
  layout_ = &layout;
  gate_ = gate;
  rows_ = &rows;
  x_ = x;
  tokens_ = tokens;
  out_ = out;
  accumulator_bytes_ = accumulator_bytes;
  activation_bits_ = activation_bits;
  first_ = end_ = 0;
  records_.clear();
  blocks_.clear();
  entry_rows_.clear();
  batch_.clear();
  pending_ = 0;
  std::fill_n(out, tokens * layout.hidden_size, 0.0f);
}

bool ExpertSum::next_group() {
  first_ = end_;
  if (first_ == rows_->rows()) return false;
  const std::int64_t fit =
      accumulator_bytes_ / (layout_->hidden_size * static_cast<std::int64_t>(sizeof(float)));
  std::int64_t items = items_of(end_++);
  while (end_ < rows_->rows() && items + items_of(end_) <= fit) items += items_of(end_++);
  const std::int64_t count = items * layout_->hidden_size;
  std::fill_n(accumulators_.need(count), count, 0.0f);
  copied_.assign(at(end_ - first_), 0);
  return true;
}

void ExpertSum::add(std::int32_t row, std::int32_t block, const unsigned char* record) {
  if (batch_.empty() || batch_.back() != row) batch_.push_back(row);
  records_.push_back(reinterpret_cast<std::uintptr_t>(record));
  blocks_.push_back(block);
  entry_rows_.push_back(static_cast<std::int32_t>(batch_.size()) - 1);
  pending_ += items_of(row);
}

// Returns the rows of x that the batch reads, one for each item of the group up to row_end. Rows outside the
// batch may be uninitialised.
const float* ExpertSum::gathered(std::int32_t row_end) {
  const std::int64_t hidden = layout_->hidden_size;
  const std::int64_t base = rows_->start[at(first_)];
  float* inputs = inputs_.need((rows_->start[at(end_)] - base) * hidden);
  for (std::int32_t row = batch_.front(); row < row_end; ++row) {
    unsigned char& copied = copied_[at(row - first_)];
    if (copied != 0) continue;
    copied = 1;
    for (std::int64_t item = rows_->start[at(row)]; item < rows_->start[at(row + 1)]; ++item) {
      std::memcpy(inputs + (item - base) * hidden, x_ + rows_->token[at(item)] * hidden,
                  at(hidden) * sizeof(float));
    }
  }
  return inputs;
}

std::int64_t ExpertSum::compute() {
  const auto entries = static_cast<std::int64_t>(records_.size());
  if (entries == 0) return 0;
  const std::int64_t hidden = layout_->hidden_size;
  const std::int32_t base = rows_->start[at(first_)];
  const std::int32_t from = rows_->start[at(batch_.front())];
  const std::int32_t to = rows_->start[at(batch_.back() + 1)];
  // A kernel call prepares every row of x that it gets. In a long prompt few tokens use a given expert, so
  // their rows are copied together first.
  const bool gather = tokens_ > to - from;

  batch_start_.clear();
  batch_start_.push_back(0);
  batch_token_.clear();
  batch_out_.clear();
  batch_weight_.clear();
  for (const std::int32_t row : batch_) {
    for (std::int32_t item = rows_->start[at(row)]; item < rows_->start[at(row + 1)]; ++item) {
      batch_token_.push_back(gather ? item - from : rows_->token[at(item)]);
      batch_out_.push_back(item - base);
      batch_weight_.push_back(rows_->weight[at(item)]);
    }
    batch_start_.push_back(static_cast<std::int32_t>(batch_token_.size()));
  }

  ForwardCall call{};
  call.layout = layout_;
  call.gate = gate_;
  call.x = gather ? gathered(batch_.back() + 1) + (from - base) * hidden : x_;
  call.tokens = gather ? to - from : tokens_;
  call.block_ptr = records_.data();
  call.block_index = blocks_.data();
  call.block_row = entry_rows_.data();
  call.entries = entries;
  call.row_start = batch_start_.data();
  call.row_token = batch_token_.data();
  call.row_out = batch_out_.data();
  call.row_weight = batch_weight_.data();
  call.rows = static_cast<std::int64_t>(batch_.size());
  call.nonzeros = static_cast<std::int64_t>(batch_token_.size());
  call.out = accumulators_.data.get();
  call.out_rows = rows_->start[at(end_)] - base;
  call.activation_bits = activation_bits_;
  call.most_threads = pending_ <= kPairsAlone ? 1 : 0;
  moe_forward(call);

  drop();
  return entries;
}

void ExpertSum::drop() {
  records_.clear();
  blocks_.clear();
  entry_rows_.clear();
  batch_.clear();
  pending_ = 0;
}

void ExpertSum::finish_group() {
  const std::int64_t hidden = layout_->hidden_size;
  const std::int32_t base = rows_->start[at(first_)];
  const std::int32_t last = rows_->start[at(end_)];
  const auto add_columns = [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t from = begin * kColumnStep;
    const std::int64_t count = std::min(end * kColumnStep, hidden) - from;
    for (std::int32_t item = base; item < last; ++item) {
      const float* more = accumulators_.data.get() + (item - base) * hidden + from;
      float* sum = out_ + rows_->token[at(item)] * hidden + from;
      for (std::int64_t c = 0; c < count; ++c) sum[c] += more[c];
    }
  };
  const std::int64_t steps = (hidden + kColumnStep - 1) / kColumnStep;
  const std::int64_t bytes = (last - base) * hidden * static_cast<std::int64_t>(sizeof(float));
  if (bytes < 2 * kBytesPerThread) {
    add_columns(0, steps);
  } else {
    ThreadPool::Session session;
    const std::int64_t limit = std::min<std::int64_t>(bytes / kBytesPerThread, ThreadPool::num_threads());
    session.parallel_for(static_cast<int>(limit), steps, 1, add_columns);
  }
  accumulators_.shrink();
  inputs_.shrink();
}

std::int64_t resident_forward(const BlockLayout& layout, const GateSpec& gate, const unsigned char* records,
                              std::int32_t experts, const float* x, const std::int64_t* index,
                              const float* weight, std::int64_t tokens, std::int64_t k, float* out,
                              int activation_bits) {
  // Kept between the calls of a thread, so that decoding does not allocate.
  static thread_local Grouped rows;
  static thread_local ExpertSum sum;
  group_by_expert(index, weight, tokens, k, experts, &rows);
  sum.start(layout, gate, rows, x, tokens, out, ExpertSum::kBytes, activation_bits);
  std::int64_t walked = 0;
  while (sum.next_group()) {
    for (std::int32_t row = sum.first_row(); row < sum.end_row(); ++row) {
      const unsigned char* expert = records + rows.experts[at(row)] * layout.blocks * layout.record_bytes;
      for (std::int32_t block = 0; block < layout.blocks; ++block) {
        sum.add(row, block, expert + block * layout.record_bytes);
      }
    }
    walked += sum.compute();
    sum.finish_group();
  }
  return walked * layout.record_bytes;
}

}  // namespace moechat
