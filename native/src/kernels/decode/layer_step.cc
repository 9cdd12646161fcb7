#include "kernels/decode/layer_step.h"

#include <cstddef>
#include <cstring>

#include "kernels/decode/step_memory.h"
#include "kernels/isa/dispatch.h"

namespace moechat {

void check_layer_step(const LayerStep& step) {
  const AttendTask& heads = step.attention;
  const std::int64_t query_cols = heads.kv_heads * heads.group * heads.key_dim;
  const std::int64_t key_cols = heads.kv_heads * heads.key_dim;
  const std::int64_t value_cols = heads.kv_heads * heads.group * heads.value_dim;
  require_fit(heads.type == step.type && step.before.type == step.type && step.feed.after.type == step.type,
              "the parts have several types");
  require_fit(heads.tail_dim == 0, "keys in two parts");
  require_fit(step.before.cols == step.hidden && step.feed.after.cols == step.hidden, "norm and hidden size");
  require_fit(step.query.cols == step.hidden && step.key.cols == step.hidden, "projections and hidden size");
  require_fit(step.query.rows == query_cols + (step.gated ? value_cols : 0) && step.key.rows == key_cols,
              "projections and heads");
  if (step.shares_keys) {
    require_fit(heads.key_dim == heads.value_dim, "keys as values");
  } else {
    require_fit(step.value.cols == step.hidden && step.value.rows == heads.kv_heads * heads.value_dim,
                "values and heads");
  }
  require_fit(
      step.output.rows == step.hidden && step.output.cols == heads.kv_heads * heads.group * heads.value_dim,
      "output projection and heads");
  if (step.norms_heads) {
    require_fit(step.query_norm.type == step.type && step.key_norm.type == step.type,
                "type of a head's norm");
    require_fit(step.query_norm.cols == heads.key_dim || step.query_norm.cols == query_cols,
                "norm of queries");
    require_fit(step.key_norm.cols == heads.key_dim || step.key_norm.cols == key_cols, "norm of keys");
  }
  if (step.value_norm) {
    require_fit(step.value_norm->type == step.type && step.value_norm->cols == heads.value_dim,
                "norm of values");
  }
  if (step.output_norm) {
    require_fit(step.output_norm->type == step.type && step.output_norm->cols == step.hidden,
                "norm of the output");
  }
  const bool still = step.width == 0 && step.angles == 0;
  require_fit(still || (step.width >= 2 && step.width % 2 == 0 && step.width <= heads.key_dim &&
                        (step.angles == step.width || 2 * step.angles == step.width)),
              "angles and heads");
  if (step.gated) require_fit(heads.key_dim == heads.value_dim, "gates of heads");
  if (step.gate) {
    const StepProduct& gate = step.gate->product;
    require_fit(!step.gated, "two kinds of gates");
    require_fit(gate.cols == step.hidden, "gates and hidden size");
    require_fit(gate.rows == heads.kv_heads * heads.group || gate.rows == value_cols, "gates and heads");
  }
  check_feed_step(step.feed);
}

constexpr std::int64_t kSharedSums = 8 << 20;  // bytes of attention's sums that several tokens may have

void layer_step(const LayerStep& step, const LayerStepCall& call) {
  require_step_tokens(call.tokens);
  StepClock clock(step.times);
  const DecodeKernels& kernel = *kernels().decode;
  const ElementType type = step.type;
  const AttendTask& shape = step.attention;
  const std::int64_t tokens = call.tokens;
  const std::int64_t size = element_bytes(type);
  const std::int64_t heads = shape.kv_heads * shape.group;
  // Elements of a token.
  const std::int64_t query_cols = heads * shape.key_dim;
  const std::int64_t key_cols = shape.kv_heads * shape.key_dim;
  const std::int64_t value_cols = shape.kv_heads * shape.value_dim;
  const std::int64_t mixed_cols = heads * shape.value_dim;
  // Elements of all tokens.
  const std::int64_t hidden = tokens * step.hidden;
  const std::int64_t queries = tokens * query_cols;
  const std::int64_t keys = tokens * key_cols;
  const std::int64_t values = tokens * value_cols;
  const std::int64_t mixes = tokens * mixed_cols;
  const std::int64_t own_gates = step.gate ? tokens * step.gate->product.rows : 0;
  const std::int64_t gates = step.gated ? mixes : 0;
  const std::int64_t widest = hidden > mixes ? hidden : mixes;

  Arena arena(
      Arena::bytes_of(hidden * size) + Arena::bytes_of(widest * 4) + Arena::bytes_of((queries + gates) * 4) +
      Arena::bytes_of(keys * 4) + Arena::bytes_of(values * 4) + Arena::bytes_of(hidden * 4) +
      2 * (Arena::bytes_of(queries * size) + Arena::bytes_of(keys * size)) + Arena::bytes_of(values * size) +
      Arena::bytes_of(mixes * size) + Arena::bytes_of((queries + gates) * size) +
      Arena::bytes_of(gates * size) + Arena::bytes_of(gates * 4) + 2 * Arena::bytes_of(own_gates * 4) +
      Arena::bytes_of(own_gates * size));
  void* rows = arena.take(hidden * size);
  auto* wide = arena.take<float>(widest * 4);
  auto* query_sums = arena.take<float>((queries + gates) * 4);
  auto* key_sums = arena.take<float>(keys * 4);
  auto* value_sums = arena.take<float>(values * 4);
  auto* output_sums = arena.take<float>(hidden * 4);
  auto* query = arena.take<unsigned char>(queries * size);
  auto* turned_query = arena.take<unsigned char>(queries * size);
  void* key = arena.take(keys * size);
  auto* turned_key = arena.take<unsigned char>(keys * size);
  auto* value = arena.take<unsigned char>(values * size);
  auto* mixed = arena.take<unsigned char>(mixes * size);
  auto* both = arena.take<unsigned char>((queries + gates) * size);  // queries and gates of each head
  auto* gate_rows = arena.take<unsigned char>(gates * size);
  auto* gate_values = arena.take<float>(gates * 4);
  auto* own_values = arena.take<float>(own_gates * 4);
  auto* own_factors = arena.take<float>(own_gates * 4);
  void* own_rows = arena.take(own_gates * size);

  const auto normalise = [&](const NormTask& norm, const void* x, void* out, std::int64_t elements) {
    NormTask task = norm;
    task.x = x;
    task.out = out;
    rms_norm(task, elements / norm.cols);
  };
  normalise(step.before, call.hidden, rows, hidden);
  kernel.widen(type, rows, hidden, wide);
  clock.add(&StepTimes::norms);
  multiply(step.query, wide, tokens, query_sums);
  multiply(step.key, wide, tokens, key_sums);
  if (!step.shares_keys) multiply(step.value, wide, tokens, value_sums);
  if (step.gate) {
    multiply(step.gate->product, wide, tokens, own_values);
    kernel.narrow(type, own_values, own_gates, own_rows);
    kernel.widen(type, own_rows, own_gates, own_values);
  }
  if (step.gated) {
    kernel.narrow(type, query_sums, queries + gates, both);
    const std::int64_t bytes = shape.key_dim * size;
    for (std::int64_t h = 0; h < tokens * heads; ++h) {
      std::memcpy(query + h * bytes, both + 2 * h * bytes, static_cast<std::size_t>(bytes));
      std::memcpy(gate_rows + h * bytes, both + (2 * h + 1) * bytes, static_cast<std::size_t>(bytes));
    }
  } else {
    kernel.narrow(type, query_sums, queries, query);
  }
  kernel.narrow(type, key_sums, keys, key);
  kernel.narrow(type, step.shares_keys ? key_sums : value_sums, values, value);
  clock.add(&StepTimes::projections);
  if (step.norms_heads) {
    // A norm may overwrite its input, because it sums a row before it writes any element of it.
    normalise(step.query_norm, query, query, queries);
    normalise(step.key_norm, key, key, keys);
  }
  if (step.value_norm) normalise(*step.value_norm, value, value, values);
  clock.add(&StepTimes::norms);
  RotateTask turn{};
  turn.type = type;
  turn.tokens = tokens;
  turn.dim = shape.key_dim;
  turn.head_stride = shape.key_dim;
  turn.cos = call.cos;
  turn.sin = call.sin;
  turn.angles = step.angles;
  turn.width = step.width;
  turn.x = query;
  turn.out = turned_query;
  turn.heads = heads;
  turn.token_stride = query_cols;
  kernel.rotate(turn);
  turn.x = key;
  turn.out = turned_key;
  turn.heads = shape.kv_heads;
  turn.token_stride = key_cols;
  kernel.rotate(turn);

  const auto keep = [&](bool packed, std::int64_t held, void* from, void* cache, std::int64_t head_stride,
                        std::int64_t dim) {
    if (packed) {
      auto* to = static_cast<std::uint8_t*>(cache) + held * packed_row_bytes(dim);
      return pack_rows({type, shape.kv_heads, 1, dim, from, dim, dim, to, head_stride});
    }
    for (std::int64_t h = 0; h < shape.kv_heads; ++h) {
      std::memcpy(static_cast<unsigned char*>(cache) + (h * head_stride + held * dim) * size,
                  static_cast<const unsigned char*>(from) + h * dim * size,
                  static_cast<std::size_t>(dim * size));
    }
  };
  for (std::int64_t t = 0; t < tokens; ++t) {
    const CachePlace& place = call.places[t];
    keep(place.packed, place.held, turned_key + t * key_cols * size, place.keys, place.key_head,
         shape.key_dim);
    keep(place.packed, place.held, value + t * value_cols * size, place.values, place.value_head,
         shape.value_dim);
  }
  clock.add(&StepTimes::cache);

  // Successive tokens of one cache read its keys and values once, as far as their sums take little memory.
  const auto follows = [&](const CachePlace& first, std::int64_t t, std::int64_t count) {
    const CachePlace& place = call.places[t + count];
    const std::int64_t units = (first.held + tokens) / kAttendKeys + 1;
    const std::int64_t sums =
        (count + 1) * heads * units * (shape.value_dim + 16) * std::int64_t{sizeof(float)};
    return sums <= kSharedSums && place.keys == first.keys && place.values == first.values &&
           place.held == first.held + count && place.packed == first.packed;
  };
  for (std::int64_t t = 0, count = 1; t < tokens; t += count) {
    const CachePlace& place = call.places[t];
    for (count = 1; t + count < tokens && follows(place, t, count); ++count) {
    }
    AttendTask task = shape;
    task.packed = place.packed;
    task.tokens = count;
    task.causal = count > 1;
    task.context = place.held + count;
    task.query = turned_query + t * query_cols * size;
    task.query_head = shape.key_dim;
    task.query_token = query_cols;
    task.key = place.keys;
    task.key_head = place.key_head;
    task.key_token = place.packed ? packed_row_bytes(shape.key_dim) : shape.key_dim;
    task.value = place.values;
    task.value_head = place.value_head;
    task.value_token = place.packed ? packed_row_bytes(shape.value_dim) : shape.value_dim;
    task.out = mixed + t * mixed_cols * size;
    attend(task);
  }
  clock.add(&StepTimes::attention);

  kernel.widen(type, mixed, mixes, wide);
  if (step.gated) {
    kernel.widen(type, gate_rows, gates, gate_values);
    rounded_sigmoids(type, gates, gate_values, query_sums, both);
    for (std::int64_t i = 0; i < gates; ++i) wide[i] *= gate_values[i];
    kernel.narrow(type, wide, mixes, mixed);
    kernel.widen(type, mixed, mixes, wide);
  } else if (step.gate) {
    if (step.gate->softplus) {
      rounded_softplus(type, own_gates, own_values, own_rows);
    } else {
      rounded_sigmoids(type, own_gates, own_values, own_factors, own_rows);
    }
    const std::int64_t each = mixes / own_gates;  // elements of a gate
    for (std::int64_t i = 0; i < mixes; ++i) wide[i] *= own_values[i / each];
    kernel.narrow(type, wide, mixes, mixed);
    kernel.widen(type, mixed, mixes, wide);
  }
  multiply(step.output, wide, tokens, output_sums);
  clock.add(&StepTimes::projections);
  if (step.output_norm) {
    kernel.narrow(type, output_sums, hidden, rows);
    normalise(*step.output_norm, rows, rows, hidden);
    kernel.widen(type, rows, hidden, output_sums);
  }
  std::memcpy(call.residual, call.hidden, static_cast<std::size_t>(hidden * size));
  scale_rounded(type, step.scale, hidden, output_sums, rows);
  kernel.add(type, output_sums, hidden, call.residual);
  clock.add(&StepTimes::norms);

  FeedRows feed = call.rows;
  feed.residual = call.residual;
  feed_step(step.feed, tokens, feed, clock);
}

}  // namespace moechat
