// The small parts of a decoding step, as the code compiled per instruction set offers them. Plain structs and
// function pointers, as in kernel_api.h.
//
// Elements are float32, bfloat16 or float16; everything is computed in float32, and rounded where the tasks
// say so. No result depends on how the work is shared among threads.
#pragma once

#include <cstdint>

namespace moechat {

enum class ElementType : int { kFloat32, kBfloat16, kFloat16 };

// out[r] = (offset + weight) * (x[r] / sqrt(mean(x[r]^2) + eps)), rows of `cols` elements without gaps. The
// normalised row is rounded to the element type before it is multiplied where `round_first` says so.
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
  void* out;  // [tokens, heads, dim] without gaps
  std::int64_t tokens;
  std::int64_t heads;
  std::int64_t dim;
  const void* cos;  // [tokens, width], or [tokens, width / 2] where both of a pair share one value
  const void* sin;
  std::int64_t angles;  // width or width / 2
  std::int64_t width;
};

// Attention of few tokens over a context. Strides in elements; the last axis has none.
struct AttendTask {
  ElementType type;
  std::int64_t kv_heads;
  std::int64_t group;    // query heads of a key head
  std::int64_t tokens;   // query tokens
  std::int64_t context;  // keys
  std::int64_t key_dim;
  std::int64_t tail_dim;  // elements of a key that lie in `tail`, behind the key_dim in `key`; 0: none
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
  const float* sinks;  // [heads], logits that take part in the sum of the softmax alone; or null
  void* out;           // [tokens, heads, value_dim] without gaps
};

// Keys that one unit of attention takes. A constant: the sums are made unit by unit, in order.
static constexpr std::int64_t kAttendKeys = 128;

// Scratch of a unit in floats: padded query rows are shared, the rest belongs to a thread.
struct AttendShape {
  std::int64_t query_width;  // key_dim + tail_dim, a multiple of 16
  std::int64_t value_width;  // value_dim, a multiple of 16
  std::int64_t rows;         // group * tokens
  std::int64_t units;        // of each key head
  std::int64_t partial;      // floats of one row of a unit: value_width, then maximum and sum padded to 16
};

struct RouteTask {
  ElementType type;
  const void* x;       // [tokens, hidden] without gaps
  const void* weight;  // [experts, hidden] without gaps
  const void* bias;    // [experts] or null
  std::int64_t tokens;
  std::int64_t experts;
  std::int64_t hidden;
  ElementType logits_type;
  void* logits;  // [tokens, experts], rounded to logits_type: float32 or the element type
};

struct DecodeKernels {
  void (*rms_norm)(const NormTask& task, std::int64_t row_begin, std::int64_t row_end);
  void (*rotate)(const RotateTask& task);
  // float32 rows of the queries, padded with zeros: [heads * tokens, query_width], row = head * tokens +
  // token.
  void (*attend_queries)(const AttendTask& task, const AttendShape& shape, float* rows);
  // Unit `index` of key head `head`: its rows * partial floats. `scratch` has attend_scratch(shape) floats.
  void (*attend_unit)(const AttendTask& task, const AttendShape& shape, const float* queries,
                      std::int64_t head, std::int64_t index, float* scratch, float* partials);
  // Adds up the units of all rows, in order.
  void (*attend_sum)(const AttendTask& task, const AttendShape& shape, float* partials);
  // Logits of experts [begin, end).
  void (*route)(const RouteTask& task, std::int64_t begin, std::int64_t end);
  // x[i] = e^(x[i] - shift), count any.
  void (*exponentials)(float* x, std::int64_t count, float shift);
  // Elements to float32; float32 to elements, rounded; out[i] = rounded(out[i] + rounded(x[i])).
  void (*widen)(ElementType type, const void* from, std::int64_t count, float* to);
  void (*narrow)(ElementType type, const float* from, std::int64_t count, void* to);
  void (*add)(ElementType type, const float* x, std::int64_t count, void* out);
};

static constexpr std::int64_t attend_scratch(const AttendShape& shape) {
  return 16 * (shape.query_width + shape.value_width) + shape.rows * kAttendKeys;
}

}  // namespace moechat
