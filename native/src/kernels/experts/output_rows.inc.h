// Parts shared by the kernels: prefetching, and adding or storing 16 output rows.
// Included inside the anonymous namespace of one instruction set.

MOECHAT_INLINE void prefetch_bytes(const unsigned char* at, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 3);
}

// add_output() for the last tile of a row. Not inlined, so that every instantiation calls the same code.
__attribute__((noinline)) void add_last_output(float* out, std::int64_t valid, float weight,
                                               const float (&partial)[16]) {
  float lanes[16] = {};
  for (std::int64_t i = 0; i < valid; ++i) lanes[i] = out[i];
  store(lanes, fma(set1(weight), load(partial), load(lanes)));
  for (std::int64_t i = 0; i < valid; ++i) out[i] = lanes[i];
}

// out[0, 16) += weight * partial for one item; only the first `valid` rows exist.
MOECHAT_INLINE void add_output(float* out, std::int64_t valid, float weight, Vec partial) {
  if (valid >= kTileRows) {
    store(out, fma(set1(weight), partial, load(out)));
    return;
  }
  float lanes[16];
  store(lanes, partial);
  add_last_output(out, valid, weight, lanes);
}

// Where the outputs of a block go, for tokens of one row of the list: either they are added to rows of the
// result, times the weight of each token, or they are stored as they are, see ForwardTask::partials.
struct OutputRows {
  float* out;  // [rows, stride]
  std::int64_t stride;
  const std::int32_t* rows;  // null: stored, token t to row t
  const float* weights;

  MOECHAT_INLINE OutputRows from(std::int64_t token) const {
    return rows == nullptr ? OutputRows{out + token * stride, stride, nullptr, nullptr}
                           : OutputRows{out, stride, rows + token, weights + token};
  }
  MOECHAT_INLINE void put(int token, std::int64_t row, Vec partial) const {
    if (rows == nullptr) return store(out + token * stride + row, partial);
    add_output(out + rows[token] * stride + row, stride - row, weights[token], partial);
  }
};

MOECHAT_INLINE std::int64_t output_tiles(const BlockLayout& layout) {
  return (layout.hidden_size + kTileRows - 1) / kTileRows;
}

// A list entry: its record and block, the items of its row (from `item` on) and its slots.
struct Entry {
  const unsigned char* record;
  std::int64_t block;
  std::int64_t item;
  std::int64_t slot;
  std::int64_t count;
};

MOECHAT_INLINE Entry entry_of(const ForwardTask& task, std::int64_t entry) {
  const std::int64_t local = entry - task.entry_begin;
  const std::int64_t slot = task.slot_start[local];
  return {reinterpret_cast<const unsigned char*>(task.block_ptr[entry]), task.block_index[entry],
          task.row_start[task.block_row[entry]] + task.part_begin, slot, task.slot_start[local + 1] - slot};
}

// Where the outputs of a list entry go: to the result, or to be kept.
MOECHAT_INLINE OutputRows result_rows(const ForwardTask& task, std::int64_t entry) {
  const std::int64_t item = entry_of(task, entry).item;
  return {task.out, task.layout->hidden_size, task.row_out + item, task.row_weight + item};
}
MOECHAT_INLINE OutputRows partial_rows(const ForwardTask& task, std::int64_t slot) {
  const std::int64_t stride = task.layout->hidden_padded;
  return {task.partials + (slot - task.partial_slot) * stride, stride, nullptr, nullptr};
}

// Stores rows [row, row + 16) of a linear_forward for one token; the last tile may have fewer rows.
void store_rows(const LinearTask& task, std::int64_t token, std::int64_t row, Vec value) {
  float* out = task.out + token * task.rows + row;
  const std::int64_t valid = task.rows - row;
  if (valid >= kTileRows) {
    store(out, task.bias != nullptr ? add(value, load(task.bias + row)) : value);
    return;
  }
  float lanes[16];
  store(lanes, value);
  for (std::int64_t i = 0; i < valid; ++i)
    out[i] = task.bias != nullptr ? lanes[i] + task.bias[row + i] : lanes[i];
}
