// Exercises packing, kernels and the thread pool without Python, for runs under the sanitizers:
//
//   cmake -S native -B build/asan -DMOECHAT_BUILD_TESTS=ON -DMOECHAT_SANITIZE=address,undefined
//   cmake --build build/asan && build/asan/native_selftest
//
// and the same with -DMOECHAT_SANITIZE=thread. The Python tests compare results with references; this program
// runs every encoding and size on heap blocks of exact size, so that the sanitizer detects an access one byte
// beyond, and from several threads at once, with a changing number of workers.
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kernels/decode/delta_mixer.h"
#include "kernels/decode/feed_step.h"
#include "kernels/decode/latent_step.h"
#include "kernels/decode/layer_step.h"
#include "kernels/decode/mamba_mixer.h"
#include "kernels/decode/short_conv.h"
#include "kernels/dense/linear.h"
#include "kernels/dense/rows16.h"
#include "kernels/experts/forward.h"
#include "kernels/experts/pack.h"
#include "kernels/isa/dispatch.h"
#include "kernels/layout/block_layout.h"
#include "kernels/layout/gguf_blocks.h"
#include "kernels/layout/kept_encodings.h"
#include "kernels/threads/spin.h"
#include "kernels/threads/stream_read.h"
#include "kernels/threads/thread_pool.h"
#include "kernels/threads/wait_word.h"

namespace moechat {
namespace {

#define EXPECT(condition)                                                  \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

std::atomic<std::int64_t> operations{0};  // kernel calls

std::vector<float> random_values(std::mt19937& generator, std::int64_t count) {
  std::normal_distribution<float> normal(0.0f, 0.1f);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

MatrixSource matrix(const std::vector<float>& values, std::int64_t rows, std::int64_t cols) {
  return {
      reinterpret_cast<const unsigned char*>(values.data()), rows, cols, cols * 4, 4, SourceType::kFloat32};
}

// One expert in records of exact size, and a call over all its blocks.
struct Case {
  BlockLayout layout;
  std::vector<std::unique_ptr<unsigned char[]>> records;
  std::vector<float> x;
  std::vector<std::uint64_t> block_ptr;
  std::vector<std::int32_t> block_index, block_row, row_start, row_token;
  std::vector<float> row_weight;

  Case(unsigned seed, std::int64_t hidden, std::int64_t neurons, int bits, bool fp16, bool bias, int tokens)
      : layout(make_block_layout(hidden, neurons, bits, fp16, bias)) {
    std::mt19937 generator(seed);
    const auto gate = random_values(generator, neurons * hidden);
    const auto up = random_values(generator, neurons * hidden);
    const auto down = random_values(generator, neurons * hidden);
    const auto gate_bias = random_values(generator, neurons);
    const auto up_bias = random_values(generator, neurons);
    const auto down_bias = random_values(generator, hidden);
    const ExpertBiases biases{gate_bias.data(), up_bias.data(), down_bias.data()};
    const ExpertSource source{matrix(gate, neurons, hidden), matrix(up, neurons, hidden),
                              matrix(down, hidden, neurons), bias ? &biases : nullptr};
    const auto size = static_cast<std::size_t>(layout.record_bytes);
    std::vector<unsigned char> packed(size * static_cast<std::size_t>(layout.blocks));
    pack_expert(layout, source, packed.data(), 0);

    std::vector<float> out_gate(gate.size()), out_up(up.size()), out_down(down.size());
    std::vector<float> out_gate_bias(gate_bias.size()), out_up_bias(up_bias.size()),
        out_down_bias(down_bias.size());
    unpack_expert(layout, packed.data(),
                  {out_gate.data(), out_up.data(), out_down.data(), out_gate_bias.data(), out_up_bias.data(),
                   out_down_bias.data()});
    double error = 0.0;
    for (std::size_t i = 0; i < gate.size(); ++i)
      error += std::fabs(gate[i] - out_gate[i]) + std::fabs(down[i] - out_down[i]);
    EXPECT(error / static_cast<double>(gate.size()) < 0.3 / bits);
    EXPECT(!bias || out_down_bias == down_bias);
    call_all(packed, tokens, &generator);
  }

  // Kept encodings: rows of a file whose bytes are random, with fp16 scales below 2.
  Case(unsigned seed, std::int64_t hidden, std::int64_t neurons, Encoding gate_up, Encoding down, bool bias,
       int tokens)
      : layout(make_kept_layout(hidden, neurons, gate_up, down, bias, 0)) {
    std::mt19937 generator(seed);
    std::uniform_int_distribution<int> bytes(0, 0x3f);
    const auto file_rows = [&](Encoding encoding, std::int64_t rows, std::int64_t cols) {
      std::vector<unsigned char> made(static_cast<std::size_t>(rows * file_row_bytes(encoding, cols)));
      for (unsigned char& byte : made) byte = static_cast<unsigned char>(bytes(generator));
      return made;
    };
    const auto gate = file_rows(gate_up, neurons, hidden);
    const auto up = file_rows(gate_up, neurons, hidden);
    const auto downs = file_rows(down, hidden, neurons);
    const auto neuron_bias = random_values(generator, neurons);
    const auto down_bias = random_values(generator, hidden);
    const ExpertBiases biases{neuron_bias.data(), neuron_bias.data(), down_bias.data()};
    const std::int64_t wide = file_row_bytes(gate_up, hidden);
    const FileExpert source{{gate.data(), wide},
                            {up.data(), wide},
                            {downs.data(), file_row_bytes(down, neurons)},
                            bias ? &biases : nullptr};
    std::vector<unsigned char> packed(static_cast<std::size_t>(layout.record_bytes * layout.blocks));
    pack_kept(layout, source, packed.data(), 0);
    call_all(packed, tokens, &generator);
  }

  // Copies records, and makes the call.
  void call_all(const std::vector<unsigned char>& packed, int tokens, std::mt19937* generator) {
    const std::int64_t hidden = layout.hidden_size;
    const auto size = static_cast<std::size_t>(layout.record_bytes);
    for (std::int64_t block = 0; block < layout.blocks; ++block) {
      // Without the padding to 4096 bytes, which kernels may not read.
      const auto payload = static_cast<std::size_t>(layout.payload_bytes);
      records.emplace_back(new unsigned char[payload]);
      const unsigned char* from = packed.data() + static_cast<std::size_t>(block) * size;
      std::copy(from, from + payload, records.back().get());
      block_ptr.push_back(reinterpret_cast<std::uint64_t>(records.back().get()));
      block_index.push_back(static_cast<std::int32_t>(block));
      block_row.push_back(0);
    }
    x = random_values(*generator, tokens * hidden);
    row_start = {0, tokens};
    for (int t = 0; t < tokens; ++t) {
      row_token.push_back(tokens - 1 - t);
      row_weight.push_back(0.5f + 0.1f * static_cast<float>(t));
    }
  }

  std::vector<float> run(const GateSpec& gate = GateSpec{},
                         int activation_bits = kDefaultActivationBits) const {
    std::vector<float> out(x.size());
    ForwardCall call{};
    call.layout = &layout;
    call.gate = gate;
    call.activation_bits = activation_bits;
    call.x = x.data();
    call.tokens = static_cast<std::int64_t>(row_token.size());
    call.block_ptr = block_ptr.data();
    call.block_index = block_index.data();
    call.block_row = block_row.data();
    call.entries = static_cast<std::int64_t>(block_ptr.size());
    call.row_start = row_start.data();
    call.row_token = row_token.data();
    call.row_weight = row_weight.data();
    call.rows = 1;
    call.nonzeros = call.tokens;
    call.out = out.data();
    moe_forward(call);
    ++operations;
    return out;
  }

  // Each token in a call of its own.
  std::vector<float> run_alone(int activation_bits) const {
    std::vector<float> all;
    const auto hidden = static_cast<std::size_t>(layout.hidden_size);
    for (std::size_t t = 0; t < row_token.size(); ++t) {
      const std::vector<float> one_x(x.begin() + static_cast<std::ptrdiff_t>(t * hidden),
                                     x.begin() + static_cast<std::ptrdiff_t>((t + 1) * hidden));
      std::vector<float> out(hidden);
      const std::int32_t starts[2] = {0, 1};
      const std::int32_t token = 0;
      // Item i of the row is token row_token[i], in descending order.
      const float weight = row_weight[row_token.size() - 1 - t];
      ForwardCall call{};
      call.layout = &layout;
      call.activation_bits = activation_bits;
      call.x = one_x.data();
      call.tokens = 1;
      call.block_ptr = block_ptr.data();
      call.block_index = block_index.data();
      call.block_row = block_row.data();
      call.entries = static_cast<std::int64_t>(block_ptr.size());
      call.row_start = starts;
      call.row_token = &token;
      call.row_weight = &weight;
      call.rows = 1;
      call.nonzeros = 1;
      call.out = out.data();
      moe_forward(call);
      ++operations;
      all.insert(all.end(), out.begin(), out.end());
    }
    return all;
  }
};

void encodings_and_sizes() {
  const struct {
    int bits;
    bool fp16;
  } encodings[] = {{2, false}, {3, false}, {4, false}, {8, false}, {16, false}, {16, true}};
  const std::int64_t sizes[][2] = {{64, 64}, {17, 5}, {80, 130}, {300, 200}};
  unsigned seed = 0;
  for (const auto& encoding : encodings) {
    for (const auto& size : sizes) {
      for (const bool bias : {false, true}) {
        const Case one(++seed, size[0], size[1], encoding.bits, encoding.fp16, bias, 7);
        for (const GateSpec& gate :
             {GateSpec{}, GateSpec{Activation::kGelu}, GateSpec{Activation::kGeluTanh},
              GateSpec{Activation::kRelu2}, GateSpec{Activation::kSilu, 1.702f, 7.0f, 1.0f},
              GateSpec{Activation::kSilu, 1.0f, 0.5f, 0.0f, true}}) {
          ThreadPool::set_num_threads(1);
          const auto expected = one.run(gate);
          for (const float value : expected) EXPECT(std::isfinite(value));
          ThreadPool::set_num_threads(3);
          EXPECT(one.run(gate) == expected);
        }
      }
    }
  }
}

void kept_encodings() {
  unsigned seed = 50;
  constexpr int kOfExperts = kKeptEncodings - 1;  // all but FP8, the last one
  for (int i = 0; i < kOfExperts; ++i) {
    const auto gate_up = static_cast<Encoding>(static_cast<int>(Encoding::kQ4_0) + i);
    const auto down = static_cast<Encoding>(static_cast<int>(Encoding::kQ4_0) + (i + 5) % kOfExperts);
    const std::int64_t blocks[] = {kept_form(gate_up).file_columns, kept_form(down).file_columns};
    const std::int64_t hidden = blocks[0] == 256 ? 256 : 3 * blocks[0];
    const std::int64_t neurons = blocks[1] == 256 ? 256 : 5 * blocks[1];
    for (const int tokens : {1, 13}) {
      const Case one(++seed, hidden, neurons, gate_up, down, tokens == 13, tokens);
      for (const int activation_bits : {8, 16, 32}) {
        ThreadPool::set_num_threads(1);
        const auto alone = one.run_alone(activation_bits);
        for (const float value : alone) EXPECT(std::isfinite(value));
        EXPECT(one.run(GateSpec{}, activation_bits) == alone);
        ThreadPool::set_num_threads(3);
        EXPECT(one.run(GateSpec{}, activation_bits) == alone);
      }
    }
  }
}

// Few and many tokens use different kernels; tokens are in memory of exact size.
void tokens_together_or_alone() {
  const std::int64_t sizes[][2] = {{17, 5}, {80, 130}, {300, 200}};
  unsigned seed = 100;
  for (const int bits : {2, 3, 4, 6, 8, 16}) {
    for (const auto& size : sizes) {
      for (const int tokens : {8, 13, 150}) {
        if (tokens == 150 && size[0] != 80) continue;
        const Case one(++seed, size[0], size[1], bits, false, tokens == 13, tokens);
        for (const int activation_bits : {8, 16, 32}) {
          ThreadPool::set_num_threads(1);
          const auto alone = one.run_alone(activation_bits);
          EXPECT(one.run(GateSpec{}, activation_bits) == alone);
          ThreadPool::set_num_threads(3);
          EXPECT(one.run(GateSpec{}, activation_bits) == alone);
        }
      }
    }
  }
}

// A packed matrix in memory of exact size.
struct Packed {
  LinearLayout layout;
  std::unique_ptr<unsigned char[]> data;

  Packed(std::mt19937& generator, std::int64_t rows, std::int64_t cols, int bits)
      : layout(make_linear_layout(rows, cols, bits)),
        data(new unsigned char[static_cast<std::size_t>(layout.nbytes)]) {
    const auto values = random_values(generator, rows * cols);
    pack_linear(layout, matrix(values, rows, cols), data.get(), 0);
  }

  std::vector<float> run(const float* x, std::int64_t tokens, const float* bias, int activation_bits) const {
    std::vector<float> out(static_cast<std::size_t>(tokens * layout.rows));
    linear_forward({&layout, data.get(), x, tokens, bias, out.data(), activation_bits});
    ++operations;
    return out;
  }
};

void packed_matrices() {
  std::mt19937 generator(12);
  for (const int bits : {2, 3, 4, 6, 8}) {
    for (const std::int64_t cols : {1, 63, 64, 200}) {
      for (const std::int64_t rows : {1, 16, 333}) {
        const Packed packed(generator, rows, cols, bits);
        const std::int64_t tokens = 21;
        const auto x = random_values(generator, tokens * cols);
        const auto bias = random_values(generator, rows);
        for (const int activation_bits : {8, 16, 32}) {
          std::vector<float> alone;
          for (std::int64_t t = 0; t < tokens; ++t) {
            ThreadPool::set_num_threads(t % 2 == 0 ? 1 : 3);
            const auto one = packed.run(x.data() + t * cols, 1, bias.data(), activation_bits);
            alone.insert(alone.end(), one.begin(), one.end());
          }
          EXPECT(packed.run(x.data(), tokens, bias.data(), activation_bits) == alone);
        }
      }
    }
  }
}

StepProduct product_of(const Packed& of) {
  return {of.layout.rows, of.layout.cols, of.data.get(), nullptr, true, of.layout, 16, false};
}

NormTask norm_of(const std::vector<float>& weight) {
  const auto cols = static_cast<std::int64_t>(weight.size());
  return {ElementType::kFloat32, nullptr, weight.data(), nullptr, cols, 1e-5f, 0.0f, true};
}

// A router and a gated shared expert behind a norm, with odd sizes, in memory of exact size.
struct SharedFeed {
  static constexpr std::int64_t kInner = 37, kExperts = 9, kChosen = 4;
  std::int64_t hidden;
  std::vector<float> norm, router;
  Packed gate, up, down, shared_gate;
  FeedStep step{};

  SharedFeed(std::mt19937& generator, std::int64_t width)
      : hidden(width),
        norm(random_values(generator, width)),
        router(random_values(generator, kExperts * width)),
        gate(generator, kInner, width, 8),
        up(generator, kInner, width, 8),
        down(generator, width, kInner, 8),
        shared_gate(generator, 1, width, 8) {
    step.after = norm_of(norm);
    step.routes = step.shares = step.gates = true;
    step.routing.type = step.routing.logits_type = ElementType::kFloat32;
    step.routing.weight = router.data();
    step.routing.experts = kExperts;
    step.routing.hidden = width;
    step.rule = {RouterScoring::kSoftmax, kChosen, nullptr, true, false, 1.0f, ElementType::kFloat32};
    step.shared.type = ElementType::kFloat32;
    step.shared.gated = true;
    step.shared.gate = product_of(gate);
    step.shared.up = product_of(up);
    step.shared.down = product_of(down);
    step.shared.activation = Activation::kSilu;
    step.gate = product_of(shared_gate);
  }
};

// Outputs of some tokens of a step, in memory of exact size.
struct FedTokens {
  std::int64_t tokens, hidden;
  std::vector<float> residual, x, weights, shared;
  std::vector<std::int64_t> index;

  FedTokens(std::int64_t count, std::int64_t width)
      : tokens(count),
        hidden(width),
        residual(static_cast<std::size_t>(count * width)),
        x(residual.size()),
        weights(static_cast<std::size_t>(count * SharedFeed::kChosen)),
        shared(residual.size()),
        index(weights.size()) {}

  FeedRows rows() { return {nullptr, x.data(), index.data(), weights.data(), shared.data(), nullptr}; }

  // Adds the experts' result, here their inputs, and appends what a token has to its sequence's values.
  void finish(const FeedStep& step, const std::vector<std::vector<float>*>& all) {
    add_experts(step, tokens, x.data(), shared.data(), residual.data());
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* row = residual.data() + t * hidden;
      const float* chosen = weights.data() + t * SharedFeed::kChosen;
      auto& values = *all[static_cast<std::size_t>(t)];
      values.insert(values.end(), row, row + hidden);
      values.insert(values.end(), chosen, chosen + SharedFeed::kChosen);
    }
    for (const std::int64_t expert : index) EXPECT(expert >= 0 && expert < SharedFeed::kExperts);
    ++operations;
  }
};

// Sequences of tokens that Layer::step computes, from several threads at once, alone and side by side, each a
// token behind the one before, so that they differ in length.
template <class Layer>
void sequences_of(const Layer& layer) {
  constexpr unsigned kSequences = 4;
  using Sequence = typename Layer::Sequence;
  const auto run = [&](std::vector<Sequence>& each) {
    std::vector<std::vector<float>> all(each.size());
    std::vector<std::mt19937> own;
    for (const Sequence& sequence : each) own.emplace_back(sequence.seed);
    const auto count = static_cast<std::int64_t>(each.size());
    for (std::int64_t round = 0; round < Layer::kCapacity + count - 1; ++round) {
      std::vector<Sequence*> running;
      std::vector<std::vector<float>*> values;
      std::vector<float> hidden;
      for (std::int64_t s = 0; s < count; ++s) {
        const auto at = static_cast<std::size_t>(s);
        if (round - s < 0 || round - s >= Layer::kCapacity) continue;
        running.push_back(&each[at]);
        values.push_back(&all[at]);
        const auto next = random_values(own[at], Layer::kHidden);
        hidden.insert(hidden.end(), next.begin(), next.end());
      }
      FedTokens fed(static_cast<std::int64_t>(running.size()), Layer::kHidden);
      layer.step(running, hidden, fed);
      fed.finish(layer.feed.step, values);
      for (Sequence* sequence : running) ++sequence->held;
    }
    return all;
  };
  const auto alone = [&](unsigned seed) {
    std::vector<Sequence> one;
    one.emplace_back(seed);
    return run(one)[0];
  };
  ThreadPool::set_num_threads(1);
  std::vector<std::vector<float>> expected;
  for (unsigned seed = 0; seed < kSequences; ++seed) expected.push_back(alone(seed));
  for (const int threads : {1, 3}) {
    ThreadPool::set_num_threads(threads);
    std::vector<Sequence> each;
    for (unsigned seed = 0; seed < kSequences; ++seed) each.emplace_back(seed);
    EXPECT(run(each) == expected);
  }
  std::vector<std::thread> callers;
  for (unsigned seed = 0; seed < kSequences; ++seed) {
    callers.emplace_back([&, seed] {
      for (int round = 0; round < 5; ++round) EXPECT(alone(seed) == expected[seed]);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

template <class Check>
void expect_refused(const Check& check) {
  bool caught = false;
  try {
    check();
  } catch (const std::invalid_argument&) {
    caught = true;
  }
  EXPECT(caught);
}

// Layers with gated attention.
struct AttentionLayer {
  static constexpr std::int64_t kHidden = 70, kKvHeads = 2, kGroup = 3, kDim = 22, kCapacity = 6;
  struct Sequence {
    unsigned seed;
    std::int64_t held = 0;
    std::vector<float> keys, values;
    explicit Sequence(unsigned own) : seed(own), keys(kKvHeads * kCapacity * kDim), values(keys.size()) {}
  };
  std::mt19937 generator{13};
  Packed query{generator, 2 * kKvHeads * kGroup * kDim, kHidden, 4};
  Packed key{generator, kKvHeads * kDim, kHidden, 8};
  Packed value{generator, kKvHeads * kDim, kHidden, 4};
  Packed output{generator, kHidden, kKvHeads * kGroup * kDim, 4};
  std::vector<float> norm = random_values(generator, kHidden), head_norm = random_values(generator, kDim);
  std::vector<float> angles = random_values(generator, kDim / 2);
  SharedFeed feed{generator, kHidden};
  LayerStep task{};

  AttentionLayer() {
    task.type = ElementType::kFloat32;
    task.hidden = kHidden;
    task.before = norm_of(norm);
    task.query = product_of(query);
    task.key = product_of(key);
    task.value = product_of(value);
    task.output = product_of(output);
    task.gated = task.norms_heads = true;
    task.query_norm = task.key_norm = norm_of(head_norm);
    task.attention.type = ElementType::kFloat32;
    task.attention.kv_heads = kKvHeads;
    task.attention.group = kGroup;
    task.attention.key_dim = task.attention.value_dim = kDim;
    task.attention.scale = 0.2f;
    task.angles = kDim / 2;
    task.width = kDim;
    task.feed = feed.step;
    check_layer_step(task);
  }
  void step(const std::vector<Sequence*>& running, const std::vector<float>& hidden, FedTokens& fed) const {
    std::vector<CachePlace> places;
    std::vector<float> turns;
    for (Sequence* one : running) {
      places.push_back(
          {one->keys.data(), kCapacity * kDim, one->values.data(), kCapacity * kDim, one->held, false});
      turns.insert(turns.end(), angles.begin(), angles.end());
    }
    layer_step(task, {fed.tokens, hidden.data(), turns.data(), turns.data(), places.data(),
                      fed.residual.data(), fed.rows()});
  }
};

// Layers with norms around all parts, whose values are their keys.
struct SurroundedLayer : AttentionLayer {
  Packed plain_query{generator, kKvHeads * kGroup * kDim, kHidden, 4};
  std::vector<float> factors = random_values(generator, SharedFeed::kExperts);

  SurroundedLayer() {
    feed.step.gates = false;
    feed.step.shared.activation = Activation::kGeluTanh;
    feed.step.scales = RouterScales{norm_of(norm), norm.data(), 0.3f, factors.data()};
    feed.step.norms = FeedNorms{norm_of(norm), norm_of(norm), norm_of(norm), norm_of(norm), factors.data()};
    task.query = product_of(plain_query);
    task.value = {};
    task.gated = false;
    task.shares_keys = true;
    task.value_norm = norm_of(head_norm);
    task.output_norm = norm_of(norm);
    task.feed = feed.step;
    check_layer_step(task);
  }
};

// Layers with latent attention whose queries are projected twice; its weights are packed in kBits, or 0:
// elements.
template <int kBits>
struct LatentLayer {
  static constexpr std::int64_t kPlain = kBits == 0 ? 19 : 32, kValue = kBits == 0 ? 13 : 16;
  static constexpr std::int64_t kHidden = 70, kHeads = 3, kRotated = 6, kRank = 41;
  static constexpr std::int64_t kShort = 29, kCapacity = 6;
  struct Sequence {
    unsigned seed;
    std::int64_t held = 0;
    std::vector<float> latents, turned;
    explicit Sequence(unsigned own) : seed(own), latents(kCapacity * kRank), turned(kCapacity * kRotated) {}
  };
  std::mt19937 generator{14};
  Packed short_query{generator, kShort, kHidden, 8};
  Packed query{generator, kHeads * (kPlain + kRotated), kShort, 8};
  Packed latent{generator, kRank + kRotated, kHidden, 8};
  Packed output{generator, kHidden, kHeads * kValue, 4};
  std::vector<float> norm = random_values(generator, kHidden), short_norm = random_values(generator, kShort);
  std::vector<float> latent_norm = random_values(generator, kRank);
  std::vector<float> weight = random_values(generator, kHeads*(kPlain + kValue) * kRank);
  std::optional<Packed> packed;
  std::vector<float> angles = random_values(generator, kRotated);
  SharedFeed feed{generator, kHidden};
  LatentStep task{};

  LatentLayer() {
    task.hidden = kHidden;
    task.before = norm_of(norm);
    task.shortens = true;
    task.short_query = product_of(short_query);
    task.short_norm = norm_of(short_norm);
    task.query = product_of(query);
    task.latent = product_of(latent);
    task.latent_norm = norm_of(latent_norm);
    task.attention = {ElementType::kFloat32, kHeads, kPlain, kRotated, kRank, kValue, weight.data(), 0.2f};
    if (kBits > 0) {
      packed.emplace(generator, kHeads * (kPlain + kValue), kRank, kBits);
      task.attention.packed = true;
      task.attention.layout = packed->layout;
      task.attention.weight = packed->data.get();
      task.attention.activation_bits = 8;
    }
    task.angles = kRotated;
    task.neighbours = true;
    task.output = product_of(output);
    task.feed = feed.step;
    check_latent_step(task);
  }
  void step(const std::vector<Sequence*>& running, const std::vector<float>& hidden, FedTokens& fed) const {
    std::vector<CachePlace> places;
    std::vector<float> turns;
    for (Sequence* one : running) {
      places.push_back({one->latents.data(), 0, one->turned.data(), 0, one->held, false});
      turns.insert(turns.end(), angles.begin(), angles.end());
    }
    latent_step(task, {fed.tokens, hidden.data(), turns.data(), turns.data(), places.data(),
                       fed.residual.data(), fed.rows()});
  }
};

// Layers with linear attention by the gated delta rule.
struct DeltaLayer {
  static constexpr std::int64_t kHidden = 70, kHeads = 2, kGroup = 2, kKey = 10, kValue = 16, kTaps = 3;
  static constexpr std::int64_t kKeys = kHeads * kKey, kValues = kHeads * kGroup * kValue;
  static constexpr std::int64_t kChannels = 2 * kKeys + kValues, kCapacity = 6;
  struct Sequence {
    unsigned seed;
    std::int64_t held = 0;
    std::vector<float> before, state;
    explicit Sequence(unsigned own)
        : seed(own), before(kChannels * kTaps), state(kHeads * kGroup * kKey * kValue) {}
  };
  std::mt19937 generator{15};
  Packed mixed{generator, kChannels, kHidden, 8}, gate{generator, kValues, kHidden, 8};
  Packed beta{generator, kHeads * kGroup, kHidden, 8}, decay{generator, kHeads * kGroup, kHidden, 8};
  Packed output{generator, kHidden, kValues, 8};
  std::vector<float> norm = random_values(generator, kHidden), own_norm = random_values(generator, kValue);
  std::vector<float> taps = random_values(generator, kChannels* kTaps);
  std::vector<float> rates = random_values(generator, kHeads* kGroup);
  SharedFeed feed{generator, kHidden};
  StateStep<DeltaMixer> task{};

  DeltaLayer() {
    DeltaTask& delta = task.mixer.task;
    delta.type = ElementType::kFloat32;
    delta.k_heads = kHeads;
    delta.group = kGroup;
    delta.k_dim = kKey;
    delta.v_dim = kValue;
    delta.taps = kTaps;
    delta.q = {0, kKey};
    delta.k = {kKeys, kKey};
    delta.v = {2 * kKeys, kGroup * kValue};
    delta.gate = {0, kGroup * kValue};
    delta.beta = delta.decay = {0, kGroup};
    delta.eps = 1e-6f;
    delta.weights = taps.data();
    delta.log_rates = delta.biases = rates.data();
    delta.norm = own_norm.data();
    task.before = norm_of(norm);
    task.mixer.inputs = {product_of(mixed), product_of(gate), product_of(beta), product_of(decay)};
    task.mixer.mixed = 0;
    task.mixer.gate = 1;
    task.mixer.beta = 2;
    task.mixer.decay = 3;
    task.mixer.output = product_of(output);
    task.feed = feed.step;
    check_state_step(task);
  }
  void step(const std::vector<Sequence*>& running, const std::vector<float>& hidden, FedTokens& fed) const {
    std::vector<MixerStates> states;
    for (Sequence* one : running) states.push_back({one->before.data(), one->state.data()});
    state_step(task, {fed.tokens, hidden.data(), states.data(), fed.residual.data(), fed.rows()});
  }
};

// Layers with a gated short convolution.
struct ConvLayer {
  static constexpr std::int64_t kHidden = 70, kChannels = 37, kTaps = 3, kCapacity = 6;
  struct Sequence {
    unsigned seed;
    std::int64_t held = 0;
    std::vector<float> before;
    explicit Sequence(unsigned own) : seed(own), before(kChannels * kTaps) {}
  };
  std::mt19937 generator{17};
  Packed input{generator, 3 * kChannels, kHidden, 8}, output{generator, kHidden, kChannels, 8};
  std::vector<float> norm = random_values(generator, kHidden);
  std::vector<float> taps = random_values(generator, kChannels* kTaps);
  std::vector<float> biases = random_values(generator, kChannels);
  SharedFeed feed{generator, kHidden};
  StateStep<ShortConvMixer> task{};

  ConvLayer() {
    task.before = norm_of(norm);
    task.mixer.task.type = ElementType::kFloat32;
    task.mixer.task.channels = kChannels;
    task.mixer.task.taps = kTaps;
    task.mixer.task.weights = taps.data();
    task.mixer.task.biases = biases.data();
    task.mixer.input = product_of(input);
    task.mixer.output = product_of(output);
    task.feed = feed.step;
    check_state_step(task);
  }
  void step(const std::vector<Sequence*>& running, const std::vector<float>& hidden, FedTokens& fed) const {
    std::vector<MixerStates> states;
    for (Sequence* one : running) states.push_back({one->before.data(), nullptr});
    state_step(task, {fed.tokens, hidden.data(), states.data(), fed.residual.data(), fed.rows()});
  }
};

// Layers with a Mamba-2 mixer and factors of results, whose shared expert has one first projection.
struct MambaLayer {
  static constexpr std::int64_t kHidden = 70, kHeads = 4, kDim = 6, kGroups = 2, kState = 21, kTaps = 4;
  static constexpr std::int64_t kInner = kHeads * kDim, kChannels = kInner + 2 * kGroups * kState;
  static constexpr std::int64_t kCapacity = 6;
  struct Sequence {
    unsigned seed;
    std::int64_t held = 0;
    std::vector<float> before, state;
    explicit Sequence(unsigned own) : seed(own), before(kChannels * kTaps), state(kInner * kState) {}
  };
  std::mt19937 generator{16};
  Packed input{generator, kInner + kChannels + kHeads, kHidden, 8}, output{generator, kHidden, kInner, 8};
  std::vector<float> taps = random_values(generator, kChannels* kTaps);
  std::vector<float> biases = random_values(generator, kChannels), heads = random_values(generator, kHeads);
  std::vector<float> norm = random_values(generator, kInner), before = random_values(generator, kHidden);
  SharedFeed feed{generator, kHidden};
  Packed joined{generator, 2 * SharedFeed::kInner, kHidden, 8};
  StateStep<MambaMixer> task{};

  MambaLayer() {
    MambaTask& mamba = task.mixer.task;
    mamba.type = ElementType::kFloat32;
    mamba.heads = kHeads;
    mamba.head_dim = kDim;
    mamba.groups = kGroups;
    mamba.state_size = kState;
    mamba.taps = kTaps;
    mamba.norm_group = kInner / kGroups;
    mamba.eps = 1e-5f;
    mamba.weights = taps.data();
    mamba.conv_biases = biases.data();
    mamba.log_rates = mamba.step_biases = mamba.skips = heads.data();
    mamba.norm = norm.data();
    task.before = norm_of(before);
    task.mixer.input = product_of(input);
    task.mixer.output = product_of(output);
    task.feed = feed.step;
    task.scale = 0.5f;
    task.feed.scale = 0.25f;
    task.feed.shared.joined = true;
    task.feed.shared.up = product_of(joined);
    check_state_step(task);
  }
  void step(const std::vector<Sequence*>& running, const std::vector<float>& hidden, FedTokens& fed) const {
    std::vector<MixerStates> states;
    for (Sequence* one : running) states.push_back({one->before.data(), one->state.data()});
    state_step(task, {fed.tokens, hidden.data(), states.data(), fed.residual.data(), fed.rows()});
  }
};

// Prompts in memory of exact size, with the results of their tokens one by one.
void prompts_of_states() {
  const MambaLayer layer;
  for (const std::int64_t tokens : {2, 33, 70}) {
    std::mt19937 generator{18};
    const MambaTask& kind = layer.task.mixer.task;
    const std::vector<float> rows = random_values(generator, tokens * mamba_cols(kind));
    std::vector<float> out[2], state[2], before[2];
    for (int alone = 0; alone < 2; ++alone) {
      out[alone].resize(static_cast<std::size_t>(tokens * MambaLayer::kInner));
      before[alone].resize(MambaLayer::kChannels * MambaLayer::kTaps, 0.5f);
      state[alone].resize(MambaLayer::kInner * MambaLayer::kState, 0.25f);
      MambaTask task = kind;
      task.before = before[alone].data();
      task.state = state[alone].data();
      task.tokens = alone == 0 ? tokens : 1;
      for (std::int64_t t = 0; t < tokens; t += task.tokens) {
        task.row = rows.data() + t * mamba_cols(kind);
        task.out = out[alone].data() + t * MambaLayer::kInner;
        mamba(task);
      }
    }
    EXPECT(out[0] == out[1] && state[0] == state[1] && before[0] == before[1]);
  }
  const DeltaLayer linear;
  for (const std::int64_t tokens : {2, 33, 70}) {
    std::mt19937 generator{19};
    const DeltaTask& kind = linear.task.mixer.task;
    std::vector<float> rows[4];
    std::int64_t cols[4];
    for (std::size_t i = 0; i < 4; ++i) {
      cols[i] = linear.task.mixer.inputs[i].rows;
      rows[i] = random_values(generator, tokens * cols[i]);
    }
    const std::int64_t heads = kind.k_heads * kind.group, made = heads * kind.v_dim;
    const std::int64_t channels = 2 * kind.k_heads * kind.k_dim + made;
    std::vector<float> out[2], state[2], before[2];
    for (int alone = 0; alone < 2; ++alone) {
      out[alone].resize(static_cast<std::size_t>(tokens * made));
      before[alone].resize(static_cast<std::size_t>(channels * kind.taps), 0.5f);
      state[alone].resize(static_cast<std::size_t>(made * kind.k_dim), 0.25f);
      DeltaTask task = kind;
      task.before = before[alone].data();
      task.state = state[alone].data();
      task.tokens = alone == 0 ? tokens : 1;
      task.mixed_cols = cols[0];
      task.gate_cols = cols[1];
      task.beta_cols = cols[2];
      task.decay_cols = cols[3];
      for (std::int64_t t = 0; t < tokens; t += task.tokens) {
        task.mixed = rows[0].data() + t * cols[0];
        task.gate_row = rows[1].data() + t * cols[1];
        task.beta_row = rows[2].data() + t * cols[2];
        task.decay_row = rows[3].data() + t * cols[3];
        task.out = out[alone].data() + t * made;
        delta(task);
      }
    }
    EXPECT(out[0] == out[1] && state[0] == state[1] && before[0] == before[1]);
  }
}

// Successive tokens of one sequence in one call, with copies of its states before each of the later ones:
// they are the states that the sequence had then, and the results those of single tokens.
template <class Layer>
void copies_of_states(const Layer& layer,
                      const std::function<std::vector<float>*(typename Layer::Sequence&)>& kept) {
  constexpr std::int64_t kTokens = 3;
  using Sequence = typename Layer::Sequence;
  std::mt19937 generator{19};
  const std::vector<float> hidden = random_values(generator, kTokens * Layer::kHidden);
  Sequence alone(0), together(0);
  std::vector<float> expected;
  std::vector<std::vector<float>> before_each, state_each;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    before_each.push_back(alone.before);
    state_each.push_back(kept(alone) == nullptr ? std::vector<float>() : *kept(alone));
    const std::vector<float> row(hidden.begin() + t * Layer::kHidden,
                                 hidden.begin() + (t + 1) * Layer::kHidden);
    FedTokens fed(1, Layer::kHidden);
    layer.step({&alone}, row, fed);
    expected.insert(expected.end(), fed.residual.begin(), fed.residual.end());
  }
  std::vector<float>* state = kept(together);
  std::vector<std::vector<float>> before_copies(kTokens, std::vector<float>(together.before.size()));
  std::vector<std::vector<float>> state_copies(kTokens,
                                               std::vector<float>(state == nullptr ? 0 : state->size()));
  std::vector<MixerStates> states;
  for (std::size_t t = 0; t < kTokens; ++t) {
    MixerStates each{together.before.data(), state == nullptr ? nullptr : state->data()};
    if (t > 0) {
      each.before_copy = before_copies[t].data();
      each.before_bytes = static_cast<std::int64_t>(together.before.size() * sizeof(float));
      each.state_copy = state == nullptr ? nullptr : state_copies[t].data();
      each.state_bytes = static_cast<std::int64_t>(state_copies[t].size() * sizeof(float));
    }
    states.push_back(each);
  }
  FedTokens fed(kTokens, Layer::kHidden);
  state_step(layer.task, {kTokens, hidden.data(), states.data(), fed.residual.data(), fed.rows()});
  EXPECT(fed.residual == expected);
  EXPECT(together.before == alone.before);
  for (std::size_t t = 1; t < kTokens; ++t) {
    EXPECT(before_copies[t] == before_each[t] && state_copies[t] == state_each[t]);
  }
}

void copied_bytes() {
  std::mt19937 generator{20};
  for (const std::int64_t count : {1, 1000, 300'001}) {
    const std::vector<float> from = random_values(generator, count);
    std::vector<float> to(from.size());
    copy_bytes(from.data(), count * 4, to.data());
    EXPECT(to == from);
  }
}

void steps_of_layers() {
  AttentionLayer attention;
  SurroundedLayer surrounded;
  ConvLayer conv;
  LatentLayer<0> latent;
  LatentLayer<4> latent4;
  LatentLayer<6> latent6;
  LatentLayer<8> latent8;
  DeltaLayer delta;
  MambaLayer mamba;
  sequences_of(attention);
  sequences_of(surrounded);
  sequences_of(conv);
  sequences_of(latent);
  sequences_of(latent4);
  sequences_of(latent6);
  sequences_of(latent8);
  sequences_of(delta);
  sequences_of(mamba);
  copies_of_states<DeltaLayer>(delta, [](auto& sequence) { return &sequence.state; });
  copies_of_states<MambaLayer>(mamba, [](auto& sequence) { return &sequence.state; });
  copies_of_states<ConvLayer>(conv, [](auto&) { return nullptr; });
  copied_bytes();
  attention.task.query.rows -= 1;
  surrounded.task.feed.norms->result.cols -= 1;
  conv.task.mixer.input.rows -= 1;
  latent.task.latent_norm.cols -= 1;
  latent6.task.attention.value_dim = 8;
  latent6.task.attention.plain = 40;
  delta.task.mixer.output.cols -= 1;
  mamba.task.mixer.input.rows -= 1;
  expect_refused([&] { check_layer_step(attention.task); });
  expect_refused([&] { check_layer_step(surrounded.task); });
  expect_refused([&] { check_state_step(conv.task); });
  expect_refused([&] { check_latent_step(latent.task); });
  expect_refused([&] { check_latents(latent6.task.attention); });
  expect_refused([&] { check_state_step(delta.task); });
  expect_refused([&] { check_state_step(mamba.task); });
}

void callers_at_once() {
  std::vector<std::unique_ptr<Case>> cases;
  std::vector<std::vector<float>> expected;
  for (unsigned i = 0; i < 4; ++i) {
    cases.push_back(std::make_unique<Case>(i, 600, 300, 4, false, true, 5));
    expected.push_back(cases.back()->run());
  }
  std::vector<std::thread> callers;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    callers.emplace_back([&, i] {
      for (int round = 0; round < 25; ++round) EXPECT(cases[i]->run() == expected[i]);
    });
  }
  for (int round = 0; round < 40; ++round) {
    ThreadPool::set_num_threads(1 + round % 4);
    std::this_thread::yield();
  }
  for (std::thread& caller : callers) caller.join();
}

void exceptions_are_rethrown_to_the_caller() {
  ThreadPool::set_num_threads(4);
  for (int thrower = 0; thrower < 4; ++thrower) {
    ThreadPool::Session session;
    std::atomic<int> ran{0};
    bool caught = false;
    try {
      session.parallel(4, [&](int thread, int) {
        ran.fetch_add(1);
        if (thread == thrower) throw std::runtime_error("expected");
      });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    EXPECT(caught);
    EXPECT(ran.load() == 4);
  }
  const Case one(1, 300, 200, 8, false, false, 3);
  EXPECT(one.run() == one.run());
}

void busy_for(std::int64_t ns) {
  for (const std::int64_t start = now_ns(); now_ns() - start < ns;) relax();
}

// With workers that spin, sleep, are about to sleep, and are woken early.
void every_part_runs_once() {
  std::mt19937 generator(7);
  std::atomic<bool> stop{false};
  std::thread waker([&] {
    while (!stop.load()) {
      ThreadPool::prewake();
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
  });
  for (const int threads : {2, 3, 5, 2, 8}) {
    ThreadPool::set_num_threads(threads);
    for (int round = 0; round < 300; ++round) {
      const int limit = 1 + static_cast<int>(generator() % 9);
      const int expected = limit < threads ? limit : threads;
      std::vector<int> ran(static_cast<std::size_t>(expected), 0);
      const std::int64_t work = generator() % 3 == 0 ? 20'000 : 0;
      {
        ThreadPool::Session session;
        session.parallel(limit, [&](int thread, int used) {
          EXPECT(used == expected && thread >= 0 && thread < expected);
          ++ran[static_cast<std::size_t>(thread)];
          busy_for(work);
        });
        for (const int times : ran) EXPECT(times == 1);
        std::vector<char> seen(1000, 0);
        const std::int64_t grain = 1 + static_cast<std::int64_t>(generator() % 200);
        session.parallel_for(limit, 1000, grain, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
        });
        for (const char times : seen) EXPECT(times == 1);
      }
      const auto pause = static_cast<std::int64_t>(generator() % 8);
      if (pause < 3) busy_for(pause * 20'000);
      if (pause == 7) std::this_thread::sleep_for(std::chrono::microseconds(generator() % 1500));
    }
  }
  stop.store(true);
  waker.join();
}

void nothing_spins_after_the_work() {
  for (const int threads : {2, 7}) {
    ThreadPool::set_num_threads(threads);
    for (int round = 0; round < 50; ++round) {
      ThreadPool::Session session;
      session.parallel(threads, [](int, int) { busy_for(50'000); });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    timespec before{};
    timespec after{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    const double used = static_cast<double>(after.tv_sec - before.tv_sec) +
                        1e-9 * static_cast<double>(after.tv_nsec - before.tv_nsec);
    EXPECT(used < 0.05);
  }
}

void spin_budgets_follow_the_gaps_between_calls() {
  constexpr std::int64_t kUs = 1000;
  SpinBudget budget;
  EXPECT(budget.budget() == SpinBudget::kShortest);
  budget.began(300 * kUs);
  EXPECT(budget.budget() == 600 * kUs);
  budget.began(2 * kUs);  // between the two phases of a layer
  EXPECT(budget.budget() > 500 * kUs);
  budget.began(800 * kUs);
  EXPECT(budget.budget() == SpinBudget::kLongest);
  for (int i = 0; i < 500; ++i) budget.began(20'000 * kUs);  // too long to spin for
  EXPECT(budget.budget() == SpinBudget::kShortest);

  // Spinning is limited to a share of the time worked.
  budget.began(400 * kUs);
  for (int i = 0; i < 10; ++i) budget.spun(budget.budget());
  EXPECT(budget.budget() == 0);
  budget.worked(50 * kUs);
  EXPECT(budget.budget() == SpinBudget::kShare * 50 * kUs);
  for (int i = 0; i < 100; ++i) budget.worked(1'000'000 * kUs);
  budget.began(400 * kUs);
  EXPECT(budget.budget() == 800 * kUs);
  for (int i = 0; i < 4; ++i) budget.spun(SpinBudget::kLongest);
  EXPECT(budget.budget() == 0);

  // No spinning on a core that other processes use.
  budget.worked(1'000'000 * kUs);
  budget.jumped();
  for (int i = 0; i < SpinBudget::kSkipped; ++i) {
    EXPECT(budget.budget() == SpinBudget::kShortest);
    budget.began(400 * kUs);
  }
  EXPECT(budget.budget() == 800 * kUs);
}

// Two threads pass a number back and forth; a missed wake would block them for ever.
template <class Word>
void no_wake_is_missed() {
  constexpr std::uint32_t kTurns = 20000;
  Word word;
  const auto play = [&word](std::uint32_t mine) {
    for (std::uint32_t turn = mine; turn < kTurns; turn += 2) {
      for (std::uint32_t now = word.value.load(); now != turn; now = word.value.load()) word.wait(now);
      word.value.store(turn + 1);
      word.wake(mine == 0 ? 1 : 2);
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
  EXPECT(word.value.load() == kTurns);
}

// Rows on heap blocks of exact size, with and without a remainder of columns; several tokens equal one by
// one.
void sixteen_bit_rows() {
  std::mt19937 generator(11);
  for (const std::int64_t cols : {1, 31, 32, 33, 200}) {
    for (const std::int64_t rows : {1, 17, 700}) {
      const auto count = static_cast<std::size_t>(rows * cols);
      const std::unique_ptr<std::uint16_t[]> weights(new std::uint16_t[count]);
      for (std::size_t i = 0; i < count; ++i) weights[i] = static_cast<std::uint16_t>(0x3f80 + i % 64);
      const std::vector<float> x = random_values(generator, kRows16MaxTokens * cols);
      const std::vector<float> bias = random_values(generator, rows);
      for (const bool fp16 : {false, true}) {
        std::vector<float> one(static_cast<std::size_t>(kRows16MaxTokens * rows));
        for (std::int64_t t = 0; t < kRows16MaxTokens; ++t) {
          rows16_forward(
              {weights.get(), rows, cols, fp16, x.data() + t * cols, 1, bias.data(), one.data() + t * rows});
        }
        std::vector<float> all(one.size());
        rows16_forward(
            {weights.get(), rows, cols, fp16, x.data(), kRows16MaxTokens, bias.data(), all.data()});
        EXPECT(one == all);
      }
    }
  }
  std::vector<float> none(1);
  try {
    rows16_forward({nullptr, 1, 1, false, none.data(), kRows16MaxTokens + 1, nullptr, none.data()});
    EXPECT(false);
  } catch (const std::invalid_argument&) {
  }
}

void stream_read_covers_the_last_cache_line() {
  ThreadPool::set_num_threads(3);
  for (const std::int64_t bytes : {4096, 4097, 8191, 70000, 300001}) {
    for (std::int64_t shift = 0; shift < 66; shift += 13) {
      if (bytes - shift < 4096) continue;
      const std::unique_ptr<unsigned char[]> data(new unsigned char[static_cast<std::size_t>(bytes)]());
      for (const int threads : {1, 2, 3, 8}) {
        int passes = 0;
        EXPECT(stream_read_rate(data.get() + shift, bytes - shift, threads, 0, [&] { ++passes; }) > 0);
        EXPECT(passes == 2);
      }
    }
  }
  const std::vector<unsigned char> data(5000);
  bool caught = false;
  try {
    stream_read_rate(data.data(), 5000, 2, 10, [] { throw std::runtime_error("expected"); });
  } catch (const std::runtime_error&) {
    caught = true;
  }
  EXPECT(caught);
}

void forked_children_can_compute() {
#if !defined(__SANITIZE_THREAD__)  // tsan does not support threads in a forked child
  const Case one(2, 600, 300, 4, false, false, 5);
  const auto expected = one.run();
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    _exit(one.run() == expected ? 0 : 1);
  }
  int status = 1;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT(status == 0);
#endif
}

}  // namespace
}  // namespace moechat

int main() {
  moechat::forked_children_can_compute();
  moechat::encodings_and_sizes();
  moechat::kept_encodings();
  moechat::tokens_together_or_alone();
  moechat::packed_matrices();
  moechat::steps_of_layers();
  moechat::prompts_of_states();
  moechat::exceptions_are_rethrown_to_the_caller();
  moechat::callers_at_once();
  moechat::every_part_runs_once();
  moechat::nothing_spins_after_the_work();
  moechat::spin_budgets_follow_the_gaps_between_calls();
  moechat::no_wake_is_missed<moechat::WaitWord>();
  moechat::no_wake_is_missed<moechat::PortableWaitWord>();
  moechat::stream_read_covers_the_last_cache_line();
  moechat::sixteen_bit_rows();
  std::printf("passed on %s\n", moechat::kernels().name);
  std::printf("operations %lld\n", static_cast<long long>(moechat::operations.load()));
  return 0;
}
