// Interface of the code compiled per instruction set for the small parts of a decoding step. Plain structs
// and function pointers, as in kernel_api.h.
//
// Elements are float32, bfloat16 or float16. All computation is in float32; results are rounded at the points
// that the tasks name. No result depends on how threads share the work.
#pragma once

#include <cstdint>
#include <limits>

namespace moechat {

enum class ElementType : int { kFloat32, kBfloat16, kFloat16 };

// out[r] = (offset + weight) * (x[r] / sqrt(mean(x[r]^2) + eps)), for contiguous rows of `cols` elements.
// With `round_first` the normalised row is rounded to the element type before it is multiplied.
struct NormTask {
  ElementType type;
  const void* x;
  const void* weight;
  void* out;
  std::int64_t cols;
  float eps;
  float offset;
  bool round_first;
};

// Rotates pairs (i, i + width / 2) of the first `width` elements of each head and copies the others; every
// product and every sum is rounded to the element type. Strides in elements.
struct RotateTask {
  ElementType type;
  const void* x;  // [tokens, heads, dim] by strides
  std::int64_t token_stride;
  std::int64_t head_stride;
  void* out;  // [tokens, heads, dim], contiguous
  std::int64_t tokens;
  std::int64_t heads;
  std::int64_t dim;
  const void* cos;  // [tokens, width], or [tokens, width / 2] if both elements of a pair share one value
  const void* sin;
  std::int64_t angles;  // width or width / 2
  std::int64_t width;
};

// A packed row: the elements of one key or value in 8 bits. One byte for every 32 elements, then one for each
// element. An element is its signed code, -127 to 127, times its group's unit, a power of two, whose byte is
// the exponent of that power as a float32; 255: the group held an infinity or NaN, and reads as NaN.
//
// A code has 7 significant bits and a unit is a power of two, so a row packed from float32, bfloat16 or
// float16 unpacks to that type without rounding. Attention over packed rows therefore sees the same numbers
// as over unpacked ones, and an unpacked row packs to the same bytes.
static constexpr std::int64_t kPackedGroup = 32;
static constexpr std::int64_t packed_groups(std::int64_t dim) {
  return (dim + kPackedGroup - 1) / kPackedGroup;
}
static constexpr std::int64_t packed_row_bytes(std::int64_t dim) { return packed_groups(dim) + dim; }

// Rows of elements and the same in 8 bits, one of which is made from the other.
struct PackTask {
  ElementType type;
  std::int64_t heads, tokens, dim;
  void* plain;  // [heads, tokens, dim] by strides in elements
  std::int64_t plain_head, plain_token;
  std::uint8_t* packed;  // [heads, tokens, packed_row_bytes(dim)] by its stride in bytes
  std::int64_t packed_head;
};

// Attention of few tokens over a context. Strides in elements, of packed rows in bytes; the last axis is
// contiguous.
struct AttendTask {
  ElementType type;  // of queries and results, and of keys and values unless `packed`
  bool packed;       // keys and values are packed rows; without a tail
  std::int64_t kv_heads;
  std::int64_t group;    // query heads of a key head
  std::int64_t tokens;   // query tokens
  std::int64_t context;  // keys
  std::int64_t key_dim;
  std::int64_t tail_dim;  // last elements of a key, which lie in `tail`, not in `key`; 0: none
  std::int64_t value_dim;
  const void* query;  // [heads, tokens, key_dim + tail_dim] by strides
  std::int64_t query_head, query_token;
  const void* key;
  std::int64_t key_head, key_token;
  const void* tail;
  std::int64_t tail_head, tail_token;
  const void* value;
  std::int64_t value_head, value_token;
  float scale;
  const unsigned char* visible;  // [tokens, context] by visible_token, 0: hidden; or null
  std::int64_t visible_token;
  bool causal;         // token t sees only the first context - tokens + 1 + t keys, with the results of alone
  const float* sinks;  // [heads], logits that only enter the sum of the softmax; or null
  void* out;           // [tokens, heads, value_dim], contiguous
};

// Keys of one unit of attention. A constant, because results depend on it: sums are added unit by unit, in
// order.
static constexpr std::int64_t kAttendKeys = 128;

// Sizes of the scratch of a unit in floats. All threads share the padded query rows; each has its own of the
// rest.
struct AttendShape {
  std::int64_t query_width;  // key_dim + tail_dim, a multiple of 16
  std::int64_t value_width;  // value_dim, a multiple of 16
  std::int64_t rows;         // group * tokens
  std::int64_t units;        // of each key head
  std::int64_t partial;      // floats of one row of a unit: value_width, then maximum and sum padded to 16
};

// Attention of the many tokens of a prompt. Token t sees the keys [first[t], end[t]) of the context; attend
// has no tail, no packed rows and no `visible`.
struct PromptTask {
  AttendTask attend;
  const std::int64_t* first;  // [tokens]
  const std::int64_t* end;
};

// Keys of a block of a prompt's attention, which begins at a multiple of this; results depend on it.
static constexpr std::int64_t kPromptKeys = 64;
static constexpr std::int64_t kPromptTokens = 16;     // of one head, side by side
static constexpr std::int64_t kMostPromptLanes = 64;  // such groups of tokens in one call

struct RouteTask {
  ElementType type;         // of x
  ElementType weight_type;  // of weight and bias: the same, or float32
  const void* x;            // [tokens, hidden], contiguous
  const void* weight;       // [experts, hidden], contiguous
  const void* bias;         // [experts] or null
  std::int64_t tokens;
  std::int64_t experts;
  std::int64_t hidden;
  ElementType logits_type;
  void* logits;  // [tokens, experts], rounded to logits_type: float32 or the type of x
};

static constexpr std::int64_t kMostTaps = 8;

// A short convolution over the last tokens of channels.
struct ConvolveTask {
  std::int64_t taps;    // tokens, the new one included: at most kMostTaps
  const void* row;      // elements of the new token
  const void* weights;  // [channels, taps]
  const void* biases;   // [channels] or null
  void* before;         // [channels, taps]: the last elements of each channel
};

// Tokens of linear attention by the gated delta rule, one after the other;
// moechat/models/decode/gated_delta.py has the formulas. Convolution, norms and rule are computed in float32
// and rounded to the element type after each. A token's results do not depend on how many are in a task.
//
// With `by_channel` each element of a key has a decay of its own, gates are sigmoids, and the norm is rounded
// once, behind its gate (Kimi Linear, arXiv:2510.26692, section 3).
struct DeltaTask {
  // Where something of the heads lies in its row: of the first head of keys, and to the next, in elements.
  struct Place {
    std::int64_t start, stride;
  };
  ElementType type;
  std::int64_t k_heads;  // of queries and of keys
  std::int64_t group;    // heads of values for each
  std::int64_t k_dim;
  std::int64_t v_dim;  // a multiple of 16
  std::int64_t taps;   // at most kMostTaps
  Place q, k, v, gate, beta, decay;
  bool by_channel;        // with one head of values for each of keys; rates and biases are float32 then
  float eps;              // of the norm
  const void* weights;    // [channels, taps]: of all queries, all keys, all values
  const void* log_rates;  // [k_heads * group]
  const void* biases;     // of the decays: [k_heads * group], or [k_heads, k_dim]
  const void* norm;       // [v_dim]
  // Rows of the first token; those of the next one are so many elements further. Of one token they are
  // unused.
  const void* mixed;  // with q, k and v
  const void* gate_row;
  const void* beta_row;
  const void* decay_row;
  std::int64_t mixed_cols, gate_cols, beta_cols, decay_cols;
  void* before;  // [channels, taps]: the last elements of each channel
  float* state;  // [k_heads * group, k_dim, v_dim]
  void* out;     // [tokens, k_heads * group * v_dim]
  std::int64_t tokens = 1;
};

// A token of a gated short convolution between its projections (LFM2): out = C * convolution(B * x), where
// each product and the convolution are rounded to the element type.
struct ShortConvTask {
  ElementType type;
  std::int64_t channels;
  std::int64_t taps;    // at most kMostTaps
  const void* weights;  // [channels, taps]
  const void* biases;   // [channels] or null
  const void* row;      // B, C and x, [channels] each
  void* before;         // [channels, taps]: the last products of each channel
  void* out;            // [channels]
};

static constexpr float kDeltaUnitEps = 1e-6f;  // added to the sum of squares of a query or a key

// Of several tokens, so many are computed at a time for a head, and for so many columns of its state, which
// then fit the first cache: 16 KiB for keys of 128 elements.
static constexpr std::int64_t kDeltaTokens = 32;
static constexpr std::int64_t kDeltaPart = 32;

static constexpr std::int64_t delta_scratch(const DeltaTask& task) {
  const std::int64_t tokens = task.tokens < kDeltaTokens ? task.tokens : kDeltaTokens;
  const std::int64_t part = task.tokens > 1 ? kDeltaPart * task.k_dim : 0;
  return part + tokens * (3 * task.k_dim + 2 * task.v_dim + 2) + 16;
}

// Tokens of a Mamba-2 mixer between its projections, one after the other; moechat/models/decode/mamba2.py has
// the formulas. The convolution is rounded to the element type before and after its activation, as are steps,
// what a state gives, and the norm; states are float32. A token's results do not depend on how many are in a
// task.
struct MambaTask {
  ElementType type;
  std::int64_t heads, head_dim;
  std::int64_t groups;      // of heads with the same keys and queries
  std::int64_t state_size;  // elements of a key
  std::int64_t taps;        // at most kMostTaps
  std::int64_t norm_group;  // elements that are normed together
  float eps;                // of the norm
  // Channels: all heads' elements, all groups' keys, all groups' queries.
  const void* weights;      // [channels, taps]
  const void* conv_biases;  // [channels] or null
  const void* log_rates;    // [heads]
  const void* step_biases;  // [heads]
  const void* skips;        // [heads]
  const void* norm;         // [heads * head_dim]
  const void* row;          // [tokens, ...]: gates [heads * head_dim], channels, steps [heads]
  void* before;             // [channels, taps]
  float* state;             // [heads, head_dim, state_size]
  float* mixed;             // [tokens, channels], scratch
  float* made;              // [tokens, heads * head_dim], scratch
  void* out;                // [tokens, heads * head_dim]
  std::int64_t tokens = 1;  // at most kMambaTokens in a call of the kernels
  // Of the steps, rounded to the element type.
  float least_step = 0.0f, most_step = std::numeric_limits<float>::infinity();
};

// Their keys and queries of 64 columns then fit the first cache.
static constexpr std::int64_t kMambaTokens = 32;
static constexpr std::int64_t mamba_inner(const MambaTask& task) { return task.heads * task.head_dim; }
static constexpr std::int64_t mamba_channels(const MambaTask& task) {
  return mamba_inner(task) + 2 * task.groups * task.state_size;
}
static constexpr std::int64_t mamba_scratch(const MambaTask& task) {
  return task.tokens * 2 * (task.state_size + task.head_dim);
}
// Elements of a row.
static constexpr std::int64_t mamba_cols(const MambaTask& task) {
  return mamba_inner(task) + mamba_channels(task) + task.heads;
}

// A product of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1.2) with the weights of its heads,
// each of which has `plain` rows that make keys of latents, then `value_dim` rows that make values. The rows
// are elements, or packed; latent_values takes elements only.
struct LatentTask {
  ElementType type;
  std::int64_t heads, plain, value_dim;
  std::int64_t rank;   // elements of a latent
  const void* weight;  // [heads, plain + value_dim, rank], or null: packed
  const float* x;      // of latent_queries: [heads, plain]; of latent_values: [heads, rank]
  void* out;           // of latent_queries: [heads, rank]; of latent_values: [heads, value_dim]; by out_head
  std::int64_t out_head;
  // Of packed rows, as in a LinearLayout: 4, 6 or 8 bits; plain and value_dim are multiples of 16.
  int bits;
  std::int64_t groups, group_bytes;
  const unsigned char* q;
  const unsigned char* sz;
};

// Most columns of a call of latent_queries; each call begins at a multiple of it.
static constexpr std::int64_t kLatentColumns = 256;

struct DecodeKernels {
  void (*rms_norm)(const NormTask& task, std::int64_t row_begin, std::int64_t row_end);
  void (*rotate)(const RotateTask& task);
  // float32 rows of the queries, padded with zeros: [heads * tokens, query_width], row = head * tokens +
  // token.
  void (*attend_queries)(const AttendTask& task, const AttendShape& shape, float* rows);
  // Computes unit `index` of key head `head`: rows * partial floats. `scratch` has attend_scratch(shape)
  // floats.
  void (*attend_unit)(const AttendTask& task, const AttendShape& shape, const float* queries,
                      std::int64_t head, std::int64_t index, float* scratch, float* partials);
  // Adds up the units of all rows, in order.
  void (*attend_sum)(const AttendTask& task, const AttendShape& shape, float* partials);
  // Tokens [token, token + blocks * kPromptTokens) of all heads of key head `kv_head`; group * blocks is at
  // most kMostPromptLanes. `scratch` has prompt_scratch(task, blocks) floats.
  void (*attend_prompt)(const PromptTask& task, std::int64_t kv_head, std::int64_t token, std::int64_t blocks,
                        float* scratch);
  // Rows [begin, end) of heads * tokens: makes the packed ones, or the plain ones.
  void (*pack_rows)(const PackTask& task, std::int64_t begin, std::int64_t end);
  void (*unpack_rows)(const PackTask& task, std::int64_t begin, std::int64_t end);
  // Logits of experts [begin, end).
  void (*route)(const RouteTask& task, std::int64_t begin, std::int64_t end);
  // x[i] = e^(x[i] - shift), for any count.
  void (*exponentials)(float* x, std::int64_t count, float shift);
  // Elements to float32; float32 to elements, rounded; out[i] = rounded(out[i] + rounded(x[i])).
  void (*widen)(ElementType type, const void* from, std::int64_t count, float* to);
  void (*narrow)(ElementType type, const float* from, std::int64_t count, void* to);
  void (*add)(ElementType type, const float* x, std::int64_t count, void* out);
  // Heads of keys [begin, end), and their heads of values. `scratch` has delta_scratch(task) floats.
  void (*delta)(const DeltaTask& task, std::int64_t begin, std::int64_t end, float* scratch);
  // Columns [begin, end) of what a head's plain query becomes for latents; rows [begin, end) of the values
  // that a head has of its sum of latents. Rounded to the element type.
  void (*latent_queries)(const LatentTask& task, std::int64_t head, std::int64_t begin, std::int64_t end);
  void (*latent_values)(const LatentTask& task, std::int64_t head, std::int64_t begin, std::int64_t end);
  // In this order: channels [begin, end), a multiple of 16 but for the last; heads, with mamba_scratch(task)
  // floats; groups of the norm, those of the first token, then those of the next.
  void (*mamba_convolve)(const MambaTask& task, std::int64_t begin, std::int64_t end);
  void (*mamba_heads)(const MambaTask& task, std::int64_t begin, std::int64_t end, float* scratch);
  void (*mamba_norm)(const MambaTask& task, std::int64_t begin, std::int64_t end);
  // Channels [begin, end), a multiple of 16 but for the last.
  void (*short_convolve)(const ShortConvTask& task, std::int64_t begin, std::int64_t end);
};

static constexpr std::int64_t attend_scratch(const AttendShape& shape) {
  return 16 * (shape.query_width + shape.value_width) + shape.rows * kAttendKeys;
}

static constexpr std::int64_t prompt_scratch(const AttendTask& task, std::int64_t blocks) {
  const std::int64_t width = (task.key_dim + 15) / 16 * 16 + (task.value_dim + 15) / 16 * 16;
  return kPromptKeys * (width + 2 * kPromptTokens) + task.group * blocks * kPromptTokens * (width + 4);
}

}  // namespace moechat
