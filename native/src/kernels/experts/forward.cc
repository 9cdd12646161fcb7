#include "kernels/experts/forward.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/isa/dispatch.h"
#include "kernels/threads/thread_pool.h"
#include "kernels/threads/work_ranges.h"

namespace moechat {
namespace {

// Work is divided so that scratch stays bounded for any number of tokens: into at most kTokenBytes of
// prepared inputs (with many tokens, times one more than the experts per token, because they are also
// gathered by expert), then into at most kMaxSlots activations (a slot is one block for one token). Both
// divisions keep the list order of every token.
constexpr std::int64_t kTokenBytes = std::int64_t{14} << 20;
constexpr std::int64_t kMaxSlots =
    (std::int64_t{14} << 20) / ((kBlockNeurons + kTilesPerBlock) * sizeof(float) + 2 * kBlockNeurons);
constexpr std::int64_t kBytesPerThread =
    1 << 16;                            // of weights; below, waking one more thread costs more than it saves
constexpr std::int64_t kTileGrain = 8;  // least output tiles per thread
// Few tokens are computed in whole blocks: a thread reads each record from its beginning to its end. Memory
// serves that a fifth faster than the gate and up projections of all blocks first and all down projections
// afterwards. REQUIRES: enough blocks to share them evenly.
constexpr std::int64_t kLeastBlocks = 4;                       // per thread
constexpr std::int64_t kFewTokens = 4;                         // of an expert, on average
constexpr std::int64_t kPartialBytes = std::int64_t{8} << 20;  // of outputs that are kept

enum Scratch : int {
  kInputs,
  kInputSums,
  kActivations,
  kActivationSums,
  kPlanes,
  kScales,
  kPlaneSums,
  kManyInputs,
  kManySlots,
  kActivationPlanes,
  kActivationScales,
  kActivationPlaneSums,
  kTilesDone,
  kUnitRanges,
  kTileRanges,
  kSlotStarts,
  kRowStarts,
  kRowTokens,
  kRowOuts,
  kRowWeights,
  kRunBegins,
  kRunEnds,
  kSeenRows,
  kPartials,
  kBlockRanges,
  kChains,
  kKept
};

[[noreturn]] void refuse(const char* name, std::int64_t at, std::int64_t value, std::int64_t low,
                         std::int64_t high) {
  throw std::invalid_argument(std::string(name) + "[" + std::to_string(at) + "] is " + std::to_string(value) +
                              "; it must be between " + std::to_string(low) + " and " + std::to_string(high));
}

void check(const ForwardCall& call) {
  check_activation_bits(call.activation_bits);
  if (call.gate.gated != call.layout->gated) {
    throw std::invalid_argument(call.gate.gated ? "the gate multiplies by up, which the layout lacks"
                                                : "the layout has up, which the gate ignores");
  }
  for (std::int64_t i = 0; i < call.entries; ++i) {
    if (call.block_ptr[i] == 0) {
      throw std::invalid_argument("block_ptr[" + std::to_string(i) + "] is null");
    }
    if (call.block_index[i] < 0 || call.block_index[i] >= call.layout->blocks) {
      refuse("block_index", i, call.block_index[i], 0, call.layout->blocks - 1);
    }
    if (call.block_row[i] < 0 || call.block_row[i] >= call.rows) {
      refuse("block_row", i, call.block_row[i], 0, call.rows - 1);
    }
  }
  if (call.row_start[0] != 0) refuse("row_start", 0, call.row_start[0], 0, 0);
  for (std::int64_t r = 0; r < call.rows; ++r) {
    if (call.row_start[r + 1] < call.row_start[r] || call.row_start[r + 1] > call.nonzeros) {
      refuse("row_start", r + 1, call.row_start[r + 1], call.row_start[r], call.nonzeros);
    }
  }
  if (call.row_start[call.rows] != call.nonzeros) {
    refuse("row_start", call.rows, call.row_start[call.rows], call.nonzeros, call.nonzeros);
  }
  for (std::int64_t i = 0; i < call.nonzeros; ++i) {
    if (call.row_token[i] < 0 || call.row_token[i] >= call.tokens) {
      refuse("row_token", i, call.row_token[i], 0, call.tokens - 1);
    }
  }
  if (call.row_out == nullptr) return;
  for (std::int64_t i = 0; i < call.nonzeros; ++i) {
    if (call.row_out[i] < 0 || call.row_out[i] >= call.out_rows) {
      refuse("row_out", i, call.row_out[i], 0, call.out_rows - 1);
    }
  }
}

// Keeps the tokens in [first, last) of every row, in their order.
void filter_rows(ThreadPool::Session& session, const ForwardCall& call, std::int64_t first, std::int64_t last,
                 ForwardTask* task) {
  auto* start = session.scratch<std::int32_t>(kRowStarts, call.rows + 1);
  auto* token = session.scratch<std::int32_t>(kRowTokens, call.nonzeros);
  auto* out = call.row_out != nullptr ? session.scratch<std::int32_t>(kRowOuts, call.nonzeros) : token;
  auto* weight = session.scratch<float>(kRowWeights, call.nonzeros);
  std::int32_t kept = 0;
  for (std::int64_t r = 0; r < call.rows; ++r) {
    start[r] = kept;
    for (std::int32_t i = call.row_start[r]; i < call.row_start[r + 1]; ++i) {
      if (call.row_token[i] < first || call.row_token[i] >= last) continue;
      token[kept] = call.row_token[i];
      if (call.row_out != nullptr) out[kept] = call.row_out[i];
      weight[kept] = call.row_weight[i];
      ++kept;
    }
  }
  start[call.rows] = kept;
  task->row_start = start;
  task->row_token = token;
  task->row_out = out;
  task->row_weight = weight;
}

// Finds runs: consecutive entries of the chunk in one row. Returns the longest run of a row of many tokens.
std::int64_t find_runs(ThreadPool::Session& session, ForwardTask* task) {
  const std::int64_t entries = task->entry_end - task->entry_begin;
  auto* begin = session.scratch<std::int32_t>(kRunBegins, entries);
  auto* end = session.scratch<std::int32_t>(kRunEnds, entries);
  const std::int32_t* row = task->block_row + task->entry_begin;
  std::int64_t longest = 0;
  for (std::int64_t first = 0; first < entries;) {
    std::int64_t last = first + 1;
    while (last < entries && row[last] == row[first]) ++last;
    std::fill(begin + first, begin + last, static_cast<std::int32_t>(first));
    std::fill(end + first, end + last, static_cast<std::int32_t>(last));
    if (task->slot_start[first + 1] - task->slot_start[first] >= task->many->threshold) {
      longest = std::max(longest, last - first);
    }
    first = last;
  }
  task->run_begin = begin;
  task->run_end = end;
  return longest;
}

const IntegerKernels& integers_of(const KernelTable& kernel, const BlockLayout& layout) {
  return layout.kept ? *kernel.kept : *kernel.integer;
}

// Allocates scratch for the activations of `slots` slots.
void need_slots(ThreadPool::Session& session, std::int64_t slots, ForwardTask* task) {
  task->activations = session.scratch<float>(kActivations, slots * kBlockNeurons);
  if (task->activation_bits == kFloatActivations) {
    task->activation_sums = session.scratch<float>(kActivationSums, slots * kTilesPerBlock);
    return;
  }
  task->quantised.planes = session.scratch<std::int8_t>(kActivationPlanes, slots * 8 * task->activation_bits);
  task->quantised.scales = session.scratch<float>(kActivationScales, slots);
  task->quantised.sums = session.scratch<InputSums>(kActivationPlaneSums, slots);
  if (task->many_x == nullptr) return;
  // A row of n groups takes at most the space of n rows of one group.
  const std::int64_t bytes = task->many->row_bytes(task->layout->down_encoding, task->activation_bits, 1);
  const std::int64_t after = task->many->rows_after * find_runs(session, task);
  task->many_slots = session.scratch<unsigned char>(kManySlots, (slots + after) * bytes);
}

// Whether the chunk is computed in whole blocks.
bool has_whole_blocks(const ForwardTask& task, std::int64_t threads) {
  const std::int64_t entries = task.entry_end - task.entry_begin;
  if (entries < kLeastBlocks * threads || task.slot_start[entries] > kFewTokens * entries) return false;
  if (task.many_x == nullptr) return true;
  for (std::int64_t i = 0; i < entries; ++i) {
    if (task.slot_start[i + 1] - task.slot_start[i] >= task.many->threshold) return false;
  }
  return true;
}

// How an entry continues the sums of those before it in the same part of the chunk. Every element of out is
// one chain of additions in list order. A thread adds the outputs of an entry to out if it has added all of
// the chain before; otherwise they are kept, and added in order when all threads are done.
enum class Chain : unsigned char { kStarts, kContinues, kBroken };

// Whether no two list rows share an output row: then the entries of each row are chains of their own.
bool has_disjoint_rows(ThreadPool::Session& session, const ForwardTask& task, std::int64_t rows,
                       std::int64_t out_rows) {
  if (rows < 2) return true;
  auto* seen = session.scratch<std::int32_t>(kSeenRows, out_rows);
  std::fill_n(seen, out_rows, -1);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int32_t i = task.row_start[row]; i < task.row_start[row + 1]; ++i) {
      std::int32_t& first = seen[task.row_out[i]];
      if (first >= 0 && first != row) return false;
      first = static_cast<std::int32_t>(row);
    }
  }
  return true;
}

void find_chains(const std::int32_t* row, std::int64_t entries, bool disjoint, Chain* chains) {
  for (std::int64_t i = 0; i < entries; ++i) {
    if (i == 0) {
      chains[i] = Chain::kStarts;
    } else if (!disjoint || row[i] == row[i - 1]) {
      chains[i] = Chain::kContinues;
    } else {
      chains[i] = std::find(row, row + i, row[i]) == row + i ? Chain::kStarts : Chain::kBroken;
    }
  }
}

// Computes the chunk in whole blocks, as many at a time as there is room for their outputs.
void run_whole_blocks(ThreadPool::Session& session, const KernelTable& kernel, ForwardTask* task,
                      std::int64_t threads, bool disjoint) {
  const BlockLayout& layout = *task->layout;
  const bool integer = task->activation_bits != kFloatActivations;
  const auto block = integer ? integers_of(kernel, layout).block : kernel.block;
  const std::int64_t entries = task->entry_end - task->entry_begin;
  const std::int64_t tiles = (layout.hidden_size + kTileRows - 1) / kTileRows;
  const std::int64_t room = kPartialBytes / (layout.hidden_padded * static_cast<std::int64_t>(sizeof(float)));
  const std::uint64_t* records = task->block_ptr + task->entry_begin;
  for (std::int64_t first = 0; first < entries;) {
    const std::int64_t slot = task->slot_start[first];
    std::int64_t last = first + 1;
    while (last < entries && task->slot_start[last + 1] - slot <= room) ++last;
    task->partials =
        session.scratch<float>(kPartials, (task->slot_start[last] - slot) * layout.hidden_padded);
    task->partial_slot = slot;
    auto* chains = session.scratch<Chain>(kChains, last - first);
    auto* kept = session.scratch<unsigned char>(kKept, last - first);
    find_chains(task->block_row + task->entry_begin + first, last - first, disjoint, chains);
    WorkRanges block_ranges(session.scratch<WorkRanges::Range>(kBlockRanges, threads), threads, last - first,
                            1);
    session.parallel(static_cast<int>(threads), [&](int thread, int) {
      std::int64_t added = -2;  // the last entry that this thread added to out
      block_ranges.work(thread, [&](std::int64_t begin, std::int64_t end, bool) {
        for (std::int64_t i = begin; i < end; ++i) {
          const bool adds = chains[i] == Chain::kStarts || (chains[i] == Chain::kContinues && added == i - 1);
          kept[i] = adds ? 0 : 1;
          if (adds) added = i;
          const std::int64_t next = first + i + (first + i + 1 < last ? 1 : 0);
          block(*task, first + i, !adds, reinterpret_cast<const unsigned char*>(records[next]));
        }
      });
    });
    if (std::find(kept, kept + last - first, 1) != kept + last - first) {
      WorkRanges tile_ranges(session.scratch<WorkRanges::Range>(kTileRanges, threads), threads, tiles,
                             kTileGrain);
      session.parallel(static_cast<int>(threads), [&](int thread, int) {
        tile_ranges.work(thread, [&](std::int64_t begin, std::int64_t end, bool) {
          for (std::int64_t i = 0; i < last - first; ++i) {
            if (kept[i] != 0) kernel.add_partials(*task, first + i, begin, end);
          }
        });
      });
    }
    first = last;
  }
}

// Runs both phases for the entries and slots of the task.
void run_chunk(ThreadPool::Session& session, const KernelTable& kernel, ForwardTask* task,
               std::int64_t threads, std::int64_t rows, std::int64_t out_rows) {
  const BlockLayout& layout = *task->layout;
  const std::int64_t entries = task->entry_end - task->entry_begin;
  const std::int64_t limit =
      std::clamp<std::int64_t>(entries * layout.payload_bytes / kBytesPerThread, std::int64_t{1}, threads);
  if (has_whole_blocks(*task, limit)) {
    return run_whole_blocks(session, kernel, task, limit, has_disjoint_rows(session, *task, rows, out_rows));
  }
  const bool integer = task->activation_bits != kFloatActivations;
  if (integer) {
    task->tiles_done = session.scratch<std::int32_t>(kTilesDone, entries);
    std::fill_n(task->tiles_done, entries, 0);
  }

  const std::int64_t tiles = (layout.hidden_size + kTileRows - 1) / kTileRows;
  WorkRanges unit_ranges(session.scratch<WorkRanges::Range>(kUnitRanges, limit), limit,
                         entries * kTilesPerBlock, 1);
  WorkRanges tile_ranges(session.scratch<WorkRanges::Range>(kTileRanges, limit), limit, tiles, kTileGrain);
  session.parallel(static_cast<int>(limit), [&](int thread, int) {
    unit_ranges.work(thread, [&](std::int64_t begin, std::int64_t end, bool last) {
      if (!integer) return kernel.neurons(*task, begin, end);
      integers_of(kernel, layout).neurons(*task, begin, end, last ? tile_ranges.begin_of(thread) : -1);
    });
  });
  session.parallel(static_cast<int>(limit), [&](int thread, int) {
    tile_ranges.work(thread, [&](std::int64_t begin, std::int64_t end, bool) {
      integer ? integers_of(kernel, layout).outputs(*task, begin, end) : kernel.outputs(*task, begin, end);
    });
  });
}

// Prepares float or quantised inputs of tokens [first, first + count).
void prepare(ThreadPool::Session& session, const KernelTable& kernel, const ForwardCall& call,
             std::int64_t first, std::int64_t count, std::int64_t threads, ForwardTask* task) {
  const BlockLayout& layout = *call.layout;
  const float* from = call.x + first * layout.hidden_size;
  const std::int64_t grain =
      std::max<std::int64_t>(1, kBytesPerThread / (std::int64_t{sizeof(float)} * layout.hidden_padded));
  task->token_base = first;
  if (task->activation_bits == kFloatActivations) {
    auto* inputs = session.scratch<float>(kInputs, count * layout.hidden_padded);
    auto* sums = session.scratch<float>(kInputSums, count * layout.groups * 2);
    session.parallel_for(static_cast<int>(threads), count, grain, [&](std::int64_t begin, std::int64_t end) {
      kernel.prepare_tokens(layout.kept ? 16 : layout.bits, from + begin * layout.hidden_size,
                            layout.hidden_size, end - begin, inputs + begin * layout.hidden_padded,
                            sums + begin * layout.groups * 2);
    });
    task->x = inputs;
    task->x_sums = sums;
    return;
  }
  const std::int64_t bytes = layout.groups * 8 * task->activation_bits;
  const QuantisedRows rows{session.scratch<std::int8_t>(kPlanes, count * bytes),
                           session.scratch<float>(kScales, count * layout.groups),
                           session.scratch<InputSums>(kPlaneSums, count * layout.groups)};
  session.parallel_for(static_cast<int>(threads), count, grain, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t at = begin * layout.groups;
    integers_of(kernel, layout)
        .quantise_rows(layout.encoding, task->activation_bits, from + begin * layout.hidden_size,
                       layout.hidden_size, end - begin,
                       {rows.planes + begin * bytes, rows.scales + at, rows.sums + at});
  });
  task->x_quantised = rows;
}

// Gathers a row of inputs per item for the many-token path; does nothing if no row has many tokens.
void gather_many(ThreadPool::Session& session, const ForwardCall& call, std::int64_t threads,
                 ForwardTask* task) {
  task->many_x = nullptr;
  if (task->activation_bits == kFloatActivations || task->many == nullptr) return;
  const ManyTokens& many = *task->many;
  const std::int32_t* start = task->row_start;
  const auto is_many = [&](std::int64_t row) { return start[row + 1] - start[row] >= many.threshold; };
  std::int64_t row = 0;
  while (row < call.rows && !is_many(row)) ++row;
  if (row == call.rows) return;
  // The sums of a run are kept apart from its output rows, so a row may have only one item per output row.
  const std::int64_t out_rows = call.row_out != nullptr ? call.out_rows : call.tokens;
  auto* seen = session.scratch<std::int32_t>(kSeenRows, out_rows);
  std::fill_n(seen, out_rows, -1);
  for (; row < call.rows; ++row) {
    if (!is_many(row)) continue;
    for (std::int32_t i = start[row]; i < start[row + 1]; ++i) {
      std::int32_t& last = seen[task->row_out[i]];
      if (last == row) return;
      last = static_cast<std::int32_t>(row);
    }
  }

  const BlockLayout& layout = *call.layout;
  const std::int64_t items = start[call.rows];
  const std::int64_t bytes = many.row_bytes(layout.encoding, task->activation_bits, layout.groups);
  task->many_x = session.scratch<unsigned char>(kManyInputs, (items + many.rows_after) * bytes);
  const std::int64_t grain = std::max<std::int64_t>(1, kBytesPerThread / bytes);
  session.parallel_for(static_cast<int>(threads), items, grain, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t at = std::upper_bound(start, start + call.rows + 1, begin) - start - 1;
    while (begin < end) {
      const std::int64_t stop = std::min<std::int64_t>(end, start[at + 1]);
      if (is_many(at)) {
        many.gather(layout.encoding, task->activation_bits, task->x_quantised, layout.groups,
                    task->row_token + begin, task->token_base, stop - begin, task->many_x + begin * bytes);
      }
      begin = stop;
      ++at;
    }
  });
}

}  // namespace

void check_activation_bits(int bits) {
  if (bits == 8 || bits == 16 || bits == kFloatActivations) return;
  throw std::invalid_argument("activations of " + std::to_string(bits) +
                              " bits are not supported; choose 8, 16 or 32");
}

void moe_forward(const ForwardCall& call) {
  check(call);
  const KernelTable& kernel = kernels();
  if (call.entries == 0 || call.nonzeros == 0) return;
  const BlockLayout& layout = *call.layout;

  ThreadPool::Session session;
  ForwardTask task{};
  task.layout = call.layout;
  task.gate = call.gate;
  task.activation_bits = layout.quantised() ? call.activation_bits : kFloatActivations;
  task.reading = weight_reading();
  task.many = integers_of(kernel, layout).many;
  task.block_ptr = call.block_ptr;
  task.block_index = call.block_index;
  task.block_row = call.block_row;
  task.list_end = call.entries;
  task.row_start = call.row_start;
  task.row_token = call.row_token;
  task.row_out = call.row_out != nullptr ? call.row_out : call.row_token;
  task.row_weight = call.row_weight;
  task.out = call.out;

  const std::int64_t out_rows = call.row_out != nullptr ? call.out_rows : call.tokens;
  const std::int64_t available = ThreadPool::num_threads();
  const std::int64_t threads =
      call.most_threads > 0 ? std::min<std::int64_t>(call.most_threads, available) : available;
  const auto token_bytes = static_cast<std::int64_t>(sizeof(float)) * (layout.hidden_padded + layout.groups);
  const std::int64_t token_step = std::max<std::int64_t>(1, kTokenBytes / token_bytes);
  for (std::int64_t first = 0; first < call.tokens; first += token_step) {
    const std::int64_t count = std::min(token_step, call.tokens - first);
    if (count < call.tokens) filter_rows(session, call, first, first + count, &task);
    prepare(session, kernel, call, first, count, threads, &task);
    gather_many(session, call, threads, &task);

    const auto tokens_of = [&](std::int64_t entry) -> std::int64_t {
      const std::int32_t row = task.block_row[entry];
      return task.row_start[row + 1] - task.row_start[row];
    };
    auto* slot_start = session.scratch<std::int64_t>(kSlotStarts, call.entries + 1);
    task.slot_start = slot_start;
    std::int64_t entry = 0;
    while (entry < call.entries) {
      // Takes as many whole entries as there are slots for, or a part of a single one.
      task.entry_begin = entry;
      task.part_begin = 0;
      std::int64_t slots = 0;
      slot_start[0] = 0;
      while (entry < call.entries && slots + tokens_of(entry) <= kMaxSlots) {
        slots += tokens_of(entry);
        ++entry;
        slot_start[entry - task.entry_begin] = slots;
      }
      if (entry > task.entry_begin) {
        if (slots == 0) continue;
        task.entry_end = entry;
        need_slots(session, slots, &task);
        run_chunk(session, kernel, &task, threads, call.rows, out_rows);
        continue;
      }
      task.entry_end = entry + 1;
      for (; task.part_begin < tokens_of(entry); task.part_begin += kMaxSlots) {
        slot_start[1] = std::min(kMaxSlots, tokens_of(entry) - task.part_begin);
        need_slots(session, slot_start[1], &task);
        run_chunk(session, kernel, &task, threads, call.rows, out_rows);
      }
      ++entry;
    }
  }
}

}  // namespace moechat
