#include "kernels/decode/latent_step.h"

#include <cstddef>
#include <cstring>

#include "kernels/decode/step_memory.h"
#include "kernels/isa/dispatch.h"

namespace moechat {
namespace {

void copy(void* to, const void* from, std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

// Moves the first elements of all pairs before the second ones, in `count` rows of `dim` elements that lie
// `stride` bytes apart. `row` holds one of them.
void part_pairs(unsigned char* rows, std::int64_t count, std::int64_t stride, std::int64_t dim,
                std::int64_t size, unsigned char* row) {
  for (std::int64_t r = 0; r < count; ++r) {
    unsigned char* at = rows + r * stride;
    copy(row, at, dim * size);
    for (std::int64_t i = 0; i < dim; ++i) {
      const std::int64_t to = i % 2 * (dim / 2) + i / 2;
      copy(at + to * size, row + i * size, size);
    }
  }
}

}  // namespace

void check_latent_step(const LatentStep& step) {
  const LatentAttention& heads = step.attention;
  const ElementType type = heads.type;
  require_fit(step.before.type == type && step.feed.after.type == type && step.latent_norm.type == type,
              "the parts have several types");
  require_fit(step.before.cols == step.hidden && step.feed.after.cols == step.hidden, "norm and hidden size");
  const std::int64_t queries = heads.heads * (heads.plain + heads.rotated);
  require_fit(step.query.rows == queries, "projections and heads");
  if (step.shortens) {
    require_fit(step.short_norm.type == type, "the parts have several types");
    require_fit(step.short_query.cols == step.hidden, "projections and hidden size");
    require_fit(step.short_query.rows == step.short_norm.cols && step.query.cols == step.short_norm.cols,
                "both projections of queries");
  } else {
    require_fit(step.query.cols == step.hidden, "projections and hidden size");
  }
  require_fit(step.latent.cols == step.hidden, "projections and hidden size");
  require_fit(step.latent.rows == heads.rank + heads.rotated && step.latent_norm.cols == heads.rank,
              "latents");
  require_fit(step.output.rows == step.hidden && step.output.cols == heads.heads * heads.value_dim,
              "output projection and heads");
  require_fit(heads.rotated % 2 == 0 && (step.angles == heads.rotated || 2 * step.angles == heads.rotated),
              "angles and heads");
  check_latents(heads);
  check_feed_step(step.feed);
}

void latent_step(const LatentStep& step, const LayerStepCall& call) {
  require_step_tokens(call.tokens);
  StepClock clock(step.times);
  const DecodeKernels& kernel = *kernels().decode;
  const LatentAttention& shape = step.attention;
  const ElementType type = shape.type;
  const std::int64_t size = element_bytes(type), tokens = call.tokens;
  const std::int64_t rank = shape.rank, rotated = shape.rotated, each = shape.plain + rotated;
  // Elements of all tokens.
  const std::int64_t hidden = tokens * step.hidden, queries = tokens * step.query.rows;
  const std::int64_t shorts = step.shortens ? tokens * step.short_query.rows : 0;
  const std::int64_t latents = tokens * rank, both = tokens * step.latent.rows;
  const std::int64_t turned = tokens * rotated, mixes = tokens * step.output.cols;
  std::int64_t widest = hidden;
  for (const std::int64_t count : {shorts, mixes}) widest = count > widest ? count : widest;
  std::int64_t most = hidden;
  for (const std::int64_t count : {shorts, queries, both}) most = count > most ? count : most;

  Arena arena(Arena::bytes_of(hidden * size) + Arena::bytes_of(widest * 4) + Arena::bytes_of(most * 4) +
              Arena::bytes_of(shorts * size) + 2 * Arena::bytes_of(queries * size) +
              Arena::bytes_of(both * size) + Arena::bytes_of(latents * size) +
              4 * Arena::bytes_of(turned * size) + Arena::bytes_of(rotated * size) +
              Arena::bytes_of(mixes * size) + tokens * latent_bytes(shape));
  void* rows = arena.take(hidden * size);
  auto* wide = arena.take<float>(widest * 4);
  auto* sums = arena.take<float>(most * 4);
  void* short_rows = arena.take(shorts * size);
  auto* query = arena.take<unsigned char>(queries * size);
  auto* turned_query = arena.take<unsigned char>(queries * size);
  auto* made = arena.take<unsigned char>(both * size);
  auto* latent = arena.take<unsigned char>(latents * size);
  auto* key = arena.take<unsigned char>(turned * size);
  auto* turned_key = arena.take<unsigned char>(turned * size);
  auto* pairs = arena.take<unsigned char>(rotated * size);
  auto* mixed = arena.take<unsigned char>(mixes * size);
  auto* cos = arena.take<unsigned char>(turned * size);
  auto* sin = arena.take<unsigned char>(turned * size);

  const auto normalise = [&](const NormTask& norm, const void* x, void* out) {
    NormTask task = norm;
    task.x = x;
    task.out = out;
    rms_norm(task, tokens);
  };
  const auto project = [&](const StepProduct& product, const float* x, void* out) {
    multiply(product, x, tokens, sums);
    kernel.narrow(type, sums, tokens * product.rows, out);
  };
  normalise(step.before, call.hidden, rows);
  kernel.widen(type, rows, hidden, wide);
  clock.add(&StepTimes::norms);
  project(step.latent, wide, made);
  if (step.shortens) {
    project(step.short_query, wide, short_rows);
    normalise(step.short_norm, short_rows, short_rows);
    kernel.widen(type, short_rows, shorts, wide);
  }
  project(step.query, wide, query);
  clock.add(&StepTimes::projections);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const unsigned char* row = made + t * step.latent.rows * size;
    copy(latent + t * rank * size, row, rank * size);
    copy(key + t * rotated * size, row + rank * size, rotated * size);
  }
  normalise(step.latent_norm, latent, latent);
  clock.add(&StepTimes::norms);

  unsigned char* rotating = query + shape.plain * size;
  if (step.neighbours) {
    part_pairs(rotating, tokens * shape.heads, each * size, rotated, size, pairs);
    part_pairs(key, tokens, rotated * size, rotated, size, pairs);
  }
  RotateTask turn{};
  turn.type = type;
  turn.tokens = tokens;
  turn.dim = turn.width = rotated;
  turn.cos = call.cos;
  turn.sin = call.sin;
  turn.angles = step.angles;
  if (step.neighbours && step.angles == rotated) {
    // Pairs have one angle, the first half of them.
    turn.angles = rotated / 2;
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::int64_t from = t * rotated * size, to = t * turn.angles * size;
      copy(cos + to, static_cast<const unsigned char*>(call.cos) + from, turn.angles * size);
      copy(sin + to, static_cast<const unsigned char*>(call.sin) + from, turn.angles * size);
    }
    turn.cos = cos;
    turn.sin = sin;
  }
  turn.x = rotating;
  turn.out = turned_query;
  turn.heads = shape.heads;
  turn.head_stride = each;
  turn.token_stride = step.query.rows;
  kernel.rotate(turn);
  turn.x = key;
  turn.out = turned_key;
  turn.heads = 1;
  turn.head_stride = turn.token_stride = rotated;
  kernel.rotate(turn);
  for (std::int64_t h = 0; h < tokens * shape.heads; ++h) {
    copy(rotating + h * each * size, turned_query + h * rotated * size, rotated * size);
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    const CachePlace& place = call.places[t];
    copy(static_cast<unsigned char*>(place.keys) + place.held * rank * size, latent + t * rank * size,
         rank * size);
    copy(static_cast<unsigned char*>(place.values) + place.held * rotated * size,
         turned_key + t * rotated * size, rotated * size);
  }
  clock.add(&StepTimes::cache);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const CachePlace& place = call.places[t];
    attend_latents_in(arena, shape,
                      {query + t * step.query.rows * size, each, place.keys, rank, place.values, rotated,
                       place.held + 1, mixed + t * step.output.cols * size});
  }
  clock.add(&StepTimes::attention);

  kernel.widen(type, mixed, mixes, wide);
  multiply(step.output, wide, tokens, sums);
  copy(call.residual, call.hidden, hidden * size);
  kernel.add(type, sums, hidden, call.residual);
  clock.add(&StepTimes::projections);
  FeedRows feed = call.rows;
  feed.residual = call.residual;
  feed_step(step.feed, tokens, feed, clock);
}

}  // namespace moechat
