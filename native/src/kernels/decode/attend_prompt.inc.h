// Attention of many tokens; see PromptTask in decode_api.h. Included inside the anonymous namespace of the
// files isa/*.cc, after attend.inc.h.
//
// Sixteen tokens of one head lie in the lanes of a Vec, so the softmax needs no sums across lanes, and every
// element of a key or value is multiplied with all of them at once.

#if defined(__AVX512F__)
constexpr int kPromptVecs = 2;    // vectors of tokens that share the elements of keys and values
constexpr int kPromptAtOnce = 8;  // keys, or elements of values, in registers
#else
constexpr int kPromptVecs = 1;
constexpr int kPromptAtOnce = 4;
#endif
constexpr float kPromptHidden = -3.0e38f;

// Sixteen tokens of one head: where their numbers lie in the scratch, and the keys that any of them sees.
struct PromptLanes {
  float* query;  // [query_width][16], times the scale
  float* out;    // [value_width][16], not yet divided by the sum
  float* state;  // [4][16]: maximum, sum, first and end of the keys
  std::int64_t begin;
  std::int64_t end;
  std::int64_t all_begin;  // keys that all of them see
  std::int64_t all_end;
};

template <ElementType kType>
PromptLanes prompt_lanes_of(const PromptTask& task, std::int64_t head, std::int64_t token, float* scratch) {
  using Storage = typename Elements<kType>::Storage;
  const AttendTask& attend = task.attend;
  const std::int64_t query_width = (attend.key_dim + 15) / 16 * 16;
  const std::int64_t value_width = (attend.value_dim + 15) / 16 * 16;
  PromptLanes lanes{scratch,
                    scratch + 16 * query_width,
                    scratch + 16 * (query_width + value_width),
                    attend.context,
                    0,
                    0,
                    attend.context};
  const float sink = attend.sinks != nullptr ? attend.sinks[head] : kPromptHidden;
  float row[1024];
  for (int lane = 0; lane < 16; ++lane) {
    // Lanes past the last token repeat it; their results are not stored.
    const std::int64_t t = token + lane < attend.tokens ? token + lane : attend.tokens - 1;
    const Storage* from =
        static_cast<const Storage*>(attend.query) + head * attend.query_head + t * attend.query_token;
    for (std::int64_t first = 0; first < attend.key_dim; first += 1024) {
      const std::int64_t count = attend.key_dim - first < 1024 ? attend.key_dim - first : 1024;
      widen<kType>(from + first, count, row, (count + 15) / 16 * 16);
      for (std::int64_t d = 0; d < count; ++d) lanes.query[(first + d) * 16 + lane] = row[d] * attend.scale;
    }
    for (std::int64_t d = attend.key_dim; d < query_width; ++d) lanes.query[d * 16 + lane] = 0.0f;
    lanes.state[lane] = sink;
    lanes.state[16 + lane] = attend.sinks != nullptr ? 1.0f : 0.0f;
    lanes.state[32 + lane] = static_cast<float>(task.first[t]);
    lanes.state[48 + lane] = static_cast<float>(task.end[t]);
    if (task.first[t] < lanes.begin) lanes.begin = task.first[t];
    if (task.end[t] > lanes.end) lanes.end = task.end[t];
    if (task.first[t] > lanes.all_begin) lanes.all_begin = task.first[t];
    if (task.end[t] < lanes.all_end) lanes.all_end = task.end[t];
  }
  for (std::int64_t d = 0; d < value_width; ++d) store(lanes.out + d * 16, zero());
  return lanes;
}

// Keys [begin, begin + kPromptKeys): their scores, then the softmax so far, then the values.
template <int kVecs>
MOECHAT_INLINE void attend_keys(PromptLanes* const (&lanes)[kVecs], std::int64_t begin, const float* keys,
                                std::int64_t query_width, const float* values, std::int64_t value_width,
                                float* weights) {
  Vec most[kVecs];
  for (int v = 0; v < kVecs; ++v) most[v] = load(lanes[v]->state);
  for (std::int64_t k = 0; k < kPromptKeys; k += kPromptAtOnce) {
    Vec scores[kPromptAtOnce][kVecs];
    for (int i = 0; i < kPromptAtOnce; ++i) {
      for (int v = 0; v < kVecs; ++v) scores[i][v] = zero();
    }
    const float* key = keys + k * query_width;
    for (std::int64_t d = 0; d < query_width; ++d) {
      Vec query[kVecs];
      for (int v = 0; v < kVecs; ++v) query[v] = load(lanes[v]->query + d * 16);
#pragma GCC unroll 8
      for (int i = 0; i < kPromptAtOnce; ++i) {
        const Vec element = set1(key[i * query_width + d]);
        for (int v = 0; v < kVecs; ++v) scores[i][v] = fma(element, query[v], scores[i][v]);
      }
    }
    for (int i = 0; i < kPromptAtOnce; ++i) {
      const std::int64_t index = begin + k + i;
      for (int v = 0; v < kVecs; ++v) {
        if (index < lanes[v]->all_begin || index >= lanes[v]->all_end) {
          const Vec place = set1(static_cast<float>(index));
          const Mask seen =
              both(negate(less(place, load(lanes[v]->state + 32))), less(place, load(lanes[v]->state + 48)));
          scores[i][v] = select(seen, scores[i][v], set1(kPromptHidden));
        }
        most[v] = max(most[v], scores[i][v]);
        store(weights + ((k + i) * kVecs + v) * 16, scores[i][v]);
      }
    }
  }
  Vec factor[kVecs];
  for (int v = 0; v < kVecs; ++v) {
    float* state = lanes[v]->state;
    factor[v] = exp(sub(load(state), most[v]));
    Vec sum = mul(load(state + 16), factor[v]);
    for (std::int64_t k = 0; k < kPromptKeys; ++k) {
      float* at = weights + (k * kVecs + v) * 16;
      const Vec score = load(at);
      // exp() never returns 0, so hidden keys get weight 0 explicitly.
      const Vec weight = select(equal(score, set1(kPromptHidden)), zero(), exp(sub(score, most[v])));
      store(at, weight);
      sum = add(sum, weight);
    }
    store(state, most[v]);
    store(state + 16, sum);
  }
  for (std::int64_t d = 0; d < value_width; d += kPromptAtOnce) {
    Vec sums[kPromptAtOnce][kVecs];
    for (int i = 0; i < kPromptAtOnce; ++i) {
      for (int v = 0; v < kVecs; ++v) sums[i][v] = mul(load(lanes[v]->out + (d + i) * 16), factor[v]);
    }
    for (std::int64_t k = 0; k < kPromptKeys; ++k) {
      Vec weight[kVecs];
      for (int v = 0; v < kVecs; ++v) weight[v] = load(weights + (k * kVecs + v) * 16);
      const float* value = values + k * value_width + d;
#pragma GCC unroll 8
      for (int i = 0; i < kPromptAtOnce; ++i) {
        const Vec element = set1(value[i]);
        for (int v = 0; v < kVecs; ++v) sums[i][v] = fma(element, weight[v], sums[i][v]);
      }
    }
    for (int i = 0; i < kPromptAtOnce; ++i) {
      for (int v = 0; v < kVecs; ++v) store(lanes[v]->out + (d + i) * 16, sums[i][v]);
    }
  }
}

template <ElementType kType>
void store_prompt_of(const PromptTask& task, const PromptLanes& lanes, std::int64_t head,
                     std::int64_t token) {
  using Storage = typename Elements<kType>::Storage;
  const AttendTask& attend = task.attend;
  const std::int64_t heads = attend.kv_heads * attend.group;
  const Vec sum = load(lanes.state + 16);
  // If every key is hidden the output is 0, as in torch.
  const Vec inverse = select(equal(sum, zero()), zero(), div(set1(1.0f), sum));
  for (std::int64_t first = 0; first < attend.value_dim; first += 16) {
    float rows[16][16];
    for (int d = 0; d < 16; ++d) {
      float column[16];
      store(column, mul(load(lanes.out + (first + d) * 16), inverse));
      for (int lane = 0; lane < 16; ++lane) rows[lane][d] = column[lane];
    }
    const std::int64_t count = attend.value_dim - first < 16 ? attend.value_dim - first : 16;
    for (int lane = 0; lane < 16 && token + lane < attend.tokens; ++lane) {
      Storage* to =
          static_cast<Storage*>(attend.out) + ((token + lane) * heads + head) * attend.value_dim + first;
      if (count == 16) {
        Elements<kType>::put(to, load(rows[lane]));
      } else {
        put_part<kType>(to, load(rows[lane]), count);
      }
    }
  }
}

// Sixteen tokens from `token` on, or twice as many, of all heads of key head `kv_head`.
template <ElementType kType>
void attend_prompt_of(const PromptTask& task, std::int64_t kv_head, std::int64_t token, std::int64_t blocks,
                      float* scratch) {
  using Storage = typename Elements<kType>::Storage;
  const AttendTask& attend = task.attend;
  const std::int64_t query_width = (attend.key_dim + 15) / 16 * 16;
  const std::int64_t value_width = (attend.value_dim + 15) / 16 * 16;
  float* keys = scratch;
  float* values = keys + kPromptKeys * query_width;
  float* weights = values + kPromptKeys * value_width;
  float* each = weights + kPromptKeys * kPromptVecs * 16;
  PromptLanes lanes[kMostPromptLanes];
  const std::int64_t count = attend.group * blocks;
  std::int64_t begin = attend.context;
  std::int64_t end = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    lanes[i] = prompt_lanes_of<kType>(task, kv_head * attend.group + i / blocks, token + i % blocks * 16,
                                      each + i * 16 * (query_width + value_width + 4));
    begin = lanes[i].begin < begin ? lanes[i].begin : begin;
    end = lanes[i].end > end ? lanes[i].end : end;
  }
  // Blocks of keys begin at multiples of their size, so that results do not depend on how a prompt is cut.
  for (std::int64_t k = begin / kPromptKeys * kPromptKeys; k < end; k += kPromptKeys) {
    for (std::int64_t i = 0; i < kPromptKeys; ++i) {
      float* key = keys + i * query_width;
      float* value = values + i * value_width;
      if (k + i < attend.context) {
        widen<kType>(
            static_cast<const Storage*>(attend.key) + kv_head * attend.key_head + (k + i) * attend.key_token,
            attend.key_dim, key, query_width);
        widen<kType>(static_cast<const Storage*>(attend.value) + kv_head * attend.value_head +
                         (k + i) * attend.value_token,
                     attend.value_dim, value, value_width);
      } else {
        for (std::int64_t d = 0; d < query_width; d += 16) store(key + d, zero());
        for (std::int64_t d = 0; d < value_width; d += 16) store(value + d, zero());
      }
    }
    const auto sees = [&](std::int64_t i) {
      return i < count && lanes[i].begin < k + kPromptKeys && k < lanes[i].end;
    };
    for (std::int64_t i = 0; i < count; ++i) {
      if (!sees(i)) continue;
      if constexpr (kPromptVecs == 2) {
        if (sees(i + 1)) {
          PromptLanes* const two[2] = {&lanes[i], &lanes[i + 1]};
          attend_keys<2>(two, k, keys, query_width, values, value_width, weights);
          ++i;
          continue;
        }
      }
      PromptLanes* const one[1] = {&lanes[i]};
      attend_keys<1>(one, k, keys, query_width, values, value_width, weights);
    }
  }
  for (std::int64_t i = 0; i < count; ++i) {
    store_prompt_of<kType>(task, lanes[i], kv_head * attend.group + i / blocks, token + i % blocks * 16);
  }
}

void attend_prompt(const PromptTask& task, std::int64_t kv_head, std::int64_t token, std::int64_t blocks,
                   float* scratch) {
  for_type(task.attend.type,
           [&](auto tag) { attend_prompt_of<decltype(tag)::kType>(task, kv_head, token, blocks, scratch); });
}
