// Partial outputs of a list of blocks, added to rows of an output matrix.
#pragma once

#include <cstdint>

#include "kernels/block_layout.h"
#include "kernels/kernel_api.h"

namespace moechat {

constexpr int kFloatActivations = 32;
constexpr int kDefaultActivationBits = 16;

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
  const std::int32_t* row_token;  // [nonzeros] whose x is read
  const std::int32_t* row_out;    // [nonzeros] which row of out is added to; null: row_token
  const float* row_weight;        // [nonzeros]
  std::int64_t rows;
  std::int64_t nonzeros;
  float* out;             // [out_rows, hidden], accumulated in place
  std::int64_t out_rows;  // ignored when row_out is null: tokens
  int most_threads;       // 0: as many as there is work for
  // 8, 16: inputs and activations are quantised to so many bits, see kernel_api.h; 32: they stay fp32.
  // Weights of 16 bits always take fp32.
  int activation_bits = kDefaultActivationBits;
};

// Throws std::invalid_argument unless it is 8, 16 or 32.
void check_activation_bits(int bits);

// For every entry in order and every item of its row, of token t and output row o:
// out[o] += weight * (partial output of the block for x[t]).
//
// Every element of out is one chain out = fma(weight, partial, out) in list order, and a partial depends on
// nothing but the block and x[t]: results are bitwise equal for any number of threads, any grouping of tokens
// and any cut of the list into consecutive calls. With quantised activations all instruction sets but the
// portable one, which has no fused multiply-add, agree bit by bit as well. One output row must not be shared
// by items of different tokens: the order of such additions would depend on how the tokens are cut.
//
// Throws std::invalid_argument for an index out of range or a null address, before anything is computed.
void moe_forward(const ForwardCall& call);

}  // namespace moechat
