#include "offload/far_kernels.h"

#include <algorithm>
#include <cstring>

namespace moechat {
namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

}  // namespace

void FarKernels::begin(std::int32_t layer, const Grouped* rows, std::int64_t tokens, const FarPart& part) {
  layer_ = layer;
  rows_ = rows;
  tokens_ = tokens;
  part_ = part;
  first_ = true;
}

void FarKernels::add_records(const std::vector<FarPiece>& pieces) {
  block_ptr_.clear();
  block_index_.clear();
  block_row_.clear();
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const FarPiece& piece = pieces[i];
    const unsigned char* const expert =
        records_[at(std::int64_t{layer_} * experts_ + rows_->experts[at(piece.row)])];
    for (std::int32_t block = piece.begin; block < piece.end; ++block) {
      block_ptr_.push_back(reinterpret_cast<std::uintptr_t>(expert + block * forms_.layout.record_bytes));
      block_index_.push_back(block);
      block_row_.push_back(static_cast<std::int32_t>(i));
    }
  }
}

// gather: copies the rows of x that are read into inputs_, one for each item.
void FarKernels::add_items(const std::vector<FarPiece>& pieces, bool gather) {
  const std::int64_t hidden = forms_.layout.hidden_size;
  start_.assign(1, 0);
  token_.clear();
  out_row_.clear();
  weight_.clear();
  for (const FarPiece& piece : pieces) {
    for (std::int32_t item = rows_->start[at(piece.row)]; item < rows_->start[at(piece.row + 1)]; ++item) {
      const std::int32_t token = rows_->token[at(item)];
      const auto place = static_cast<std::int32_t>(token_.size());
      if (gather) {
        std::memcpy(inputs_.data() + place * hidden, part_.x + token * hidden, at(hidden) * sizeof(float));
      }
      token_.push_back(gather ? place : token);
      out_row_.push_back(token);
      weight_.push_back(rows_->weight[at(item)]);
    }
    start_.push_back(static_cast<std::int32_t>(token_.size()));
  }
}

void FarKernels::compute(const std::vector<FarPiece>& pieces) {
  const std::int64_t hidden = forms_.layout.hidden_size;
  if (first_) std::fill_n(part_.out, tokens_ * hidden, 0.0f);
  first_ = false;
  std::int64_t items = 0;
  for (const FarPiece& piece : pieces) items += rows_->tokens_of[at(piece.row)];
  // A kernel call prepares every row of x that it is given. Gathered, a token is several where it chose
  // several experts, so that the order of its sum depends on how the call is cut.
  const bool gather = tokens_ > items;
  if (gather) inputs_.resize(at(items * hidden));
  add_records(pieces);
  add_items(pieces, gather);
  ForwardCall call{};
  call.layout = &forms_.layout_of(layer_);
  call.gate = forms_.gate_of(layer_);
  call.x = gather ? inputs_.data() : part_.x;
  call.tokens = gather ? items : tokens_;
  call.block_ptr = block_ptr_.data();
  call.block_index = block_index_.data();
  call.block_row = block_row_.data();
  call.entries = static_cast<std::int64_t>(block_ptr_.size());
  call.row_start = start_.data();
  call.row_token = token_.data();
  call.row_out = out_row_.data();
  call.row_weight = weight_.data();
  call.rows = static_cast<std::int64_t>(pieces.size());
  call.nonzeros = items;
  call.out = part_.out;
  call.out_rows = tokens_;
  call.activation_bits = activation_bits_;
  moe_forward(call);
}

}  // namespace moechat
