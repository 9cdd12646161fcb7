#include "offload/far_share.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels/thread_pool.h"

namespace moechat {
namespace {

// Until pieces have been timed: two channels of DDR4.
constexpr double kAssumedRate = 20e9;
// Of a link that has not moved anything yet.
constexpr double kAssumedLink = 10e9;
// Weight of the newest piece.
constexpr double kNewest = 0.25;
// Of the CPU's part of what is left, so that the last pieces are small.
constexpr std::int64_t kPieces = 4;
// Smaller ones are not worth the call: about ten microseconds of a core.
constexpr std::int64_t kLeastBytes = 192 << 10;

}  // namespace

FarShare::FarShare(const BlockLayout& layout, const ActivationSpec& activation, int activation_bits,
                   std::vector<const unsigned char*> records)
    : layout_(layout),
      activation_(activation),
      activation_bits_(activation_bits),
      records_(std::move(records)),
      rates_{kAssumedRate, kAssumedRate / 2} {}

void FarShare::begin(std::int32_t layer, const Grouped* rows, const double* keys, std::int64_t tokens) {
  layer_ = layer;
  rows_ = rows;
  tokens_ = tokens;
  computed_ = 0;
  records_of_.clear();
  blocks_of_.clear();
  row_of_.clear();
  taken_.clear();
  order_.resize(at(rows->rows()));
  for (std::int32_t row = 0; row < rows->rows(); ++row) order_[at(row)] = row;
  // Rows of few tokens first, since the CPU pays for tokens and the link does not; of equal ones those that
  // are least worth a page.
  std::sort(order_.begin(), order_.end(), [&](std::int32_t a, std::int32_t b) {
    const std::int32_t items_a = rows->tokens_of[at(a)];
    const std::int32_t items_b = rows->tokens_of[at(b)];
    if (items_a != items_b) return items_a < items_b;
    const double key_a = keys[rows->experts[at(a)]];
    const double key_b = keys[rows->experts[at(b)]];
    return key_a != key_b ? key_a < key_b : a > b;
  });
}

std::int64_t FarShare::of_link(std::int64_t left, double bandwidth) const {
  const double link = bandwidth > 0 ? bandwidth : kAssumedLink;
  return std::llround(static_cast<double>(left) * link / (link + rate()));
}

std::int64_t FarShare::piece(std::int64_t open) const {
  const std::int64_t least =
      std::max<std::int64_t>(1, kLeastBytes * ThreadPool::num_threads() / layout_.record_bytes);
  return std::min(open, std::max(least, (open + kPieces - 1) / kPieces));
}

void FarShare::take(std::int32_t row, std::int32_t begin, std::int32_t end) {
  const unsigned char* const expert =
      records_[at(layer_)] + std::int64_t{rows_->experts[at(row)]} * layout_.blocks * layout_.record_bytes;
  for (std::int32_t block = begin; block < end; ++block) {
    records_of_.push_back(reinterpret_cast<std::uintptr_t>(expert + block * layout_.record_bytes));
    blocks_of_.push_back(block);
    row_of_.push_back(static_cast<std::int32_t>(taken_.size()));
  }
  taken_.push_back(row);
}

std::int64_t FarShare::compute(const float* x, float* out) {
  const Clock::time_point begun = Clock::now();
  const auto count = static_cast<std::int64_t>(records_of_.size());
  const std::int64_t hidden = layout_.hidden_size;
  if (computed_ == 0) std::fill_n(out, tokens_ * hidden, 0.0f);
  start_.assign(1, 0);
  token_.clear();
  out_row_.clear();
  weight_.clear();
  std::int64_t items = 0;
  for (const std::int32_t row : taken_) items += rows_->tokens_of[at(row)];
  // A kernel call prepares every row of x that it is given. Gathered, a token is several where it chose
  // several experts, so that the order of its sum depends on how the call is cut.
  const bool gather = tokens_ > items;
  if (gather) inputs_.resize(at(items * hidden));
  for (const std::int32_t row : taken_) {
    for (std::int32_t item = rows_->start[at(row)]; item < rows_->start[at(row + 1)]; ++item) {
      const std::int32_t token = rows_->token[at(item)];
      const auto place = static_cast<std::int32_t>(token_.size());
      if (gather) {
        std::memcpy(inputs_.data() + place * hidden, x + token * hidden, at(hidden) * sizeof(float));
      }
      token_.push_back(gather ? place : token);
      out_row_.push_back(token);
      weight_.push_back(rows_->weight[at(item)]);
    }
    start_.push_back(static_cast<std::int32_t>(token_.size()));
  }
  ForwardCall call{};
  call.layout = &layout_;
  call.activation = activation_;
  call.x = gather ? inputs_.data() : x;
  call.tokens = gather ? items : tokens_;
  call.block_ptr = records_of_.data();
  call.block_index = blocks_of_.data();
  call.block_row = row_of_.data();
  call.entries = count;
  call.row_start = start_.data();
  call.row_token = token_.data();
  call.row_out = out_row_.data();
  call.row_weight = weight_.data();
  call.rows = static_cast<std::int64_t>(taken_.size());
  call.nonzeros = static_cast<std::int64_t>(token_.size());
  call.out = out;
  call.out_rows = tokens_;
  call.activation_bits = activation_bits_;
  moe_forward(call);
  records_of_.clear();
  blocks_of_.clear();
  row_of_.clear();
  taken_.clear();
  computed_ += count;
  const double time = std::chrono::duration<double>(Clock::now() - begun).count();
  if (time > 0) rate() += kNewest * (static_cast<double>(count * layout_.record_bytes) / time - rate());
  return count;
}

}  // namespace moechat
