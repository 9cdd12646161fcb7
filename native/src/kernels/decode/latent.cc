#include "kernels/decode/latent.h"

#include <atomic>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/isa/dispatch.h"
#include "kernels/threads/thread_pool.h"

namespace moechat {
namespace {

constexpr std::int64_t kLatentRows = 64;          // of a unit of latent_values
constexpr std::int64_t kLatentWeights = 1 << 16;  // work below which waking another thread costs more

// Calls run(head, begin, end) for all heads and parts of `count` with at most `each`.
template <class Run>
void for_parts(std::int64_t heads, std::int64_t count, std::int64_t each, std::int64_t weights,
               const Run& run) {
  const std::int64_t parts = (count + each - 1) / each, units = heads * parts;
  const auto part = [&](std::int64_t unit) {
    const std::int64_t begin = unit % parts * each, end = begin + each;
    run(unit / parts, begin, end < count ? end : count);
  };
  if (weights < kLatentWeights) {
    for (std::int64_t unit = 0; unit < units; ++unit) part(unit);
    return;
  }
  ThreadPool::Session session;
  std::atomic<std::int64_t> next{0};
  session.parallel(ThreadPool::num_threads(), [&](int, int) {
    for (;;) {
      const std::int64_t unit = next.fetch_add(1, std::memory_order_relaxed);
      if (unit >= units) return;
      part(unit);
    }
  });
}

}  // namespace

void check_latents(const LatentAttention& attention) {
  if (!attention.packed) return;
  const LinearLayout& layout = attention.layout;
  const auto require = [](bool fits, const char* what) {
    if (!fits) throw std::invalid_argument(std::string("packed weights of latent attention: ") + what);
  };
  require(!layout.kept() && (layout.bits == 4 || layout.bits == 6 || layout.bits == 8),
          "they must have 4, 6 or 8 bits");
  require(attention.plain % kTileRows == 0 && attention.value_dim % kTileRows == 0,
          "plain and value_dim must be multiples of 16");
  require(layout.rows == attention.heads * (attention.plain + attention.value_dim) &&
              layout.cols == attention.rank,
          "rows or columns do not fit the heads");
}

std::int64_t latent_bytes(const LatentAttention& attention) {
  const std::int64_t size = element_bytes(attention.type), heads = attention.heads, rank = attention.rank;
  const std::int64_t wide = attention.plain > rank ? attention.plain : rank;
  return Arena::bytes_of(heads * wide * 4) + Arena::bytes_of(heads * (rank + attention.rotated) * size) +
         Arena::bytes_of(heads * rank * size) +
         (attention.packed ? Arena::bytes_of(heads * attention.value_dim * 4) : 0);
}

void attend_latents(const LatentAttention& attention, const LatentCall& call) {
  Arena arena(latent_bytes(attention));
  attend_latents_in(arena, attention, call);
}

void attend_latents_in(Arena& arena, const LatentAttention& attention, const LatentCall& call) {
  const DecodeKernels& kernel = *kernels().decode;
  const ElementType type = attention.type;
  const std::int64_t size = element_bytes(type), heads = attention.heads, rank = attention.rank;
  const std::int64_t plain = attention.plain, rotated = attention.rotated, width = rank + rotated;
  const std::int64_t wide = plain > rank ? plain : rank;
  auto* floats = arena.take<float>(heads * wide * 4);
  auto* queries = arena.take<unsigned char>(heads * width * size);
  auto* sums = arena.take<unsigned char>(heads * rank * size);
  for (std::int64_t h = 0; h < heads; ++h) {
    const auto* query = static_cast<const unsigned char*>(call.query) + h * call.query_head * size;
    kernel.widen(type, query, plain, floats + h * plain);
    std::memcpy(queries + (h * width + rank) * size, query + plain * size,
                static_cast<std::size_t>(rotated * size));
  }
  LatentTask task{};
  task.type = type;
  task.heads = heads;
  task.plain = plain;
  task.value_dim = attention.value_dim;
  task.rank = rank;
  if (attention.packed) {
    const LinearLayout& layout = attention.layout;
    task.bits = layout.bits;
    task.groups = layout.groups;
    task.group_bytes = layout.group_bytes;
    task.q = static_cast<const unsigned char*>(attention.weight);
    task.sz = task.q + layout.sz;
  } else {
    task.weight = attention.weight;
  }
  task.x = floats;
  task.out = queries;
  task.out_head = width;
  for_parts(heads, rank, kLatentColumns, heads * plain * rank,
            [&](std::int64_t head, std::int64_t begin, std::int64_t end) {
              kernel.latent_queries(task, head, begin, end);
            });

  AttendTask attend_task{};
  attend_task.type = type;
  attend_task.kv_heads = 1;
  attend_task.group = heads;
  attend_task.tokens = 1;
  attend_task.context = call.context;
  attend_task.key_dim = rank;
  attend_task.tail_dim = rotated;
  attend_task.value_dim = rank;
  attend_task.query = queries;
  attend_task.query_head = attend_task.query_token = width;
  attend_task.key = attend_task.value = call.latents;
  attend_task.key_token = attend_task.value_token = call.latent_token;
  attend_task.tail = call.turned;
  attend_task.tail_token = call.turned_token;
  attend_task.scale = attention.scale;
  attend_task.out = sums;
  attend(attend_task);

  kernel.widen(type, sums, heads * rank, floats);
  if (attention.packed) {
    const std::int64_t count = heads * attention.value_dim;
    auto* values = arena.take<float>(count * 4);
    const auto* data = static_cast<const unsigned char*>(attention.weight);
    linear_blocks_forward({&attention.layout, data, heads, plain, plain + attention.value_dim,
                           attention.value_dim, floats, values, attention.activation_bits});
    kernel.narrow(type, values, count, call.out);
    return;
  }
  task.out = call.out;
  task.out_head = attention.value_dim;
  for_parts(heads, attention.value_dim, kLatentRows, heads * attention.value_dim * rank,
            [&](std::int64_t head, std::int64_t begin, std::int64_t end) {
              kernel.latent_values(task, head, begin, end);
            });
}

}  // namespace moechat
