// Attention of one token over latents, which are not expanded to keys and values of every head: each head's
// query is projected to a query for latents, and its weighted sum of latents to its value (DeepSeek-V2,
// arXiv:2405.04434, section 2.1.2). All queries share the latents, as those of one key head.
#pragma once

#include <cstdint>

#include "kernels/decode/decode.h"
#include "kernels/decode/step_memory.h"
#include "kernels/dense/linear.h"

namespace moechat {

// Invariants of packed weights, which check_latents() verifies: a row for each of plain + value_dim of a
// head, both whole tiles, so that no tile has rows of two kinds; codes of 4, 6 or 8 bits.
struct LatentAttention {
  ElementType type;
  std::int64_t heads, plain, rotated, rank, value_dim;  // a query has plain + rotated elements
  const void* weight;                                   // elements as in LatentTask, or packed
  float scale;                                          // of the products of queries and keys
  bool packed = false;
  LinearLayout layout{};    // if packed: [heads * (plain + value_dim), rank]
  int activation_bits = 0;  // if packed: of the sums of latents that are multiplied to values
};

// Throws std::invalid_argument for packed weights that do not fit the heads.
void check_latents(const LatentAttention& attention);

struct LatentCall {
  const void* query;  // [heads, plain + rotated] by the heads' stride, in elements
  std::int64_t query_head;
  // The cache: latents [context, rank] and rotated parts of keys [context, rotated], by strides in elements.
  const void* latents;
  std::int64_t latent_token;
  const void* turned;
  std::int64_t turned_token;
  std::int64_t context;
  void* out;  // [heads, value_dim]
};

// The result does not depend on the number of threads.
void attend_latents(const LatentAttention& attention, const LatentCall& call);

// The same in memory of a step: so many bytes.
std::int64_t latent_bytes(const LatentAttention& attention);
void attend_latents_in(Arena& arena, const LatentAttention& attention, const LatentCall& call);

}  // namespace moechat
