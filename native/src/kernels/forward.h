// Partial outputs of a list of blocks, added to the outputs of their tokens.
#pragma once

#include <cstdint>

#include "kernels/block_layout.h"
#include "kernels/kernel_api.h"

namespace moechat {

// Tokens of a call, the block list, and for every row (an expert slot) its tokens with router weights as CSR.
struct ForwardCall {
  const BlockLayout* layout;
  ActivationSpec activation;
  const float* x;  // [tokens, hidden]
  std::int64_t tokens;
  const std::uint64_t* block_ptr;   // [entries] addresses of records
  const std::int32_t* block_index;  // [entries] which block of its expert, 0..blocks-1
  const std::int32_t* block_row;    // [entries] which row of the CSR
  std::int64_t entries;
  const std::int32_t* row_start;  // [rows + 1]
  const std::int32_t* row_token;  // [nonzeros]
  const float* row_weight;        // [nonzeros]
  std::int64_t rows;
  std::int64_t nonzeros;
  float* out;  // [tokens, hidden], accumulated in place
};

// For every entry in order and every token t of its row: out[t] += weight * (partial output of the block for
// x[t]).
//
// Every element of out is one chain out = fma(weight, partial, out) in list order, and a partial depends on
// nothing but the block and x[t]: results are bitwise equal for any number of threads, any grouping of tokens
// and any cut of the list into consecutive calls.
//
// Throws std::invalid_argument for an index out of range or a null address, before anything is computed.
void moe_forward(const ForwardCall& call);

}  // namespace moechat
