// Partial outputs of a list of blocks, added to rows of an output matrix.
#pragma once

#include <cstdint>

#include "kernels/isa/kernel_api.h"
#include "kernels/layout/block_layout.h"

namespace moechat {

constexpr int kFloatActivations = 32;
constexpr int kDefaultActivationBits = 16;

// Tokens of a call, the block list, and the tokens with router weights of every row (an expert slot) as CSR.
struct ForwardCall {
  const BlockLayout* layout;
  GateSpec gate;
  const float* x;  // [tokens, hidden]
  std::int64_t tokens;
  const std::uint64_t* block_ptr;   // [entries] addresses of records
  const std::int32_t* block_index;  // [entries] index of the block in its expert, 0..blocks-1
  const std::int32_t* block_row;    // [entries] row of the CSR
  std::int64_t entries;
  const std::int32_t* row_start;  // [rows + 1]
  const std::int32_t* row_token;  // [nonzeros] row of x that is read
  const std::int32_t* row_out;    // [nonzeros] row of out that is added to; null: row_token
  const float* row_weight;        // [nonzeros]
  std::int64_t rows;
  std::int64_t nonzeros;
  float* out;             // [out_rows, hidden], accumulated in place
  std::int64_t out_rows;  // ignored if row_out is null: then it is tokens
  int most_threads;       // 0: no limit
  // 8, 16: inputs and activations are quantised to this number of bits, see kernel_api.h; 32: they stay fp32.
  // Weights of 16 bits always take fp32.
  int activation_bits = kDefaultActivationBits;
};

// Throws std::invalid_argument for other values than 8, 16 and 32.
void check_activation_bits(int bits);

// For every entry in order and every item of its row, of token t and output row o:
// out[o] += weight * (partial output of the block for x[t]).
//
// Every element of out is one chain out = fma(weight, partial, out) in list order, and a partial depends only
// on the block and x[t]. So results are bitwise equal for any number of threads, any grouping of tokens and
// any cut of the list into consecutive calls. With quantised activations they are also bitwise equal between
// all instruction sets except portable, which has no fused multiply-add. REQUIRES: no two tokens share an
// output row, because the order of such additions would depend on the cut.
//
// Throws std::invalid_argument for an index out of range or a null address, before anything is computed.
void moe_forward(const ForwardCall& call);

}  // namespace moechat
