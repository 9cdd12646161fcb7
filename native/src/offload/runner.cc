#include "offload/runner.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "link/mutation.h"

namespace moechat {
namespace {

constexpr std::chrono::milliseconds kStopLimit{2000};

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

// The best experts, in descending score; of equal ones, and those that are not a number last, the lower
// number first. Sorted as whole numbers, which takes a third of the time.
void rank_best(const float* scores, std::int32_t experts, std::int32_t count,
               std::vector<std::uint64_t>* sortable, std::vector<std::int32_t>* ranked) {
  sortable->resize(at(experts));
  for (std::int32_t expert = 0; expert < experts; ++expert) {
    const float score = scores[expert];
    // + 0: there are two zeros.
    const float known = std::isnan(score) ? -std::numeric_limits<float>::infinity() : score + 0.0f;
    std::uint32_t bits;
    std::memcpy(&bits, &known, sizeof bits);
    // Positive numbers are ordered by their bits, negative ones the other way round. The largest goes first.
    const std::uint32_t descending = (bits >> 31) != 0 ? bits : ~(bits | 0x80000000u);
    (*sortable)[at(expert)] = std::uint64_t{descending} << 32 | static_cast<std::uint32_t>(expert);
  }
  const auto end = sortable->begin() + count;
  if (count < experts) std::nth_element(sortable->begin(), end, sortable->end());
  std::sort(sortable->begin(), end);
  ranked->resize(at(count));
  for (std::int32_t place = 0; place < count; ++place) {
    (*ranked)[at(place)] = static_cast<std::int32_t>((*sortable)[at(place)] & 0xffffffffu);
  }
}

// How many of the best experts make up a share of the distribution that the scores are the logarithms of, up
// to a constant.
std::int32_t experts_of_share(const float* scores, std::int32_t experts, double share,
                              std::vector<double>* weights) {
  weights->assign(scores, scores + experts);
  double highest = -std::numeric_limits<double>::infinity();
  for (const double score : *weights) highest = score > highest ? score : highest;
  double sum = 0;
  for (double& weight : *weights) {
    weight = std::isnan(weight) ? 0 : std::exp(weight - highest);
    sum += weight;
  }
  std::sort(weights->begin(), weights->end(), std::greater<double>());
  double covered = 0;
  for (std::int32_t count = 1; count <= experts; ++count) {
    covered += (*weights)[at(count - 1)];
    if (!(covered < share * sum)) return count;
  }
  return experts;
}

RunnerOptions checked(RunnerOptions options, const Link* link) {
  const auto refuse = [](const std::string& message) { throw std::invalid_argument(message); };
  check_activation_bits(options.activation_bits);
  options.blocks = static_cast<std::int32_t>(options.layout.blocks);
  options.record_bytes = options.layout.record_bytes;
  const auto check_layers = [&](const char* name, std::size_t count) {
    if (count == 0 || count == at(options.layers)) return;
    refuse(std::string(name) + " has " + std::to_string(count) + " layers of " +
           std::to_string(options.layers));
  };
  check_layers("layer_layouts", options.layouts.size());
  check_layers("layer_gates", options.gates.size());
  for (const BlockLayout& layout : options.layouts) {
    if (layout.hidden_size != options.layout.hidden_size ||
        layout.intermediate_size != options.layout.intermediate_size ||
        layout.record_bytes != options.layout.record_bytes) {
      refuse("the layouts of all layers must have the same sizes and record_bytes");
    }
  }
  if (options.near_memory != nullptr && options.pages > std::numeric_limits<std::int32_t>::max()) {
    refuse("pages is " + std::to_string(options.pages) + "; on a device it must be below 2^31");
  }
  if (!std::isfinite(options.stall_seconds)) refuse("stall_seconds must be finite");
  const std::int64_t all = std::int64_t{options.layers} * options.experts;
  if (!options.far_records.empty() && options.far_records.size() != at(all)) {
    refuse("far_records has " + std::to_string(options.far_records.size()) + " experts of " +
           std::to_string(all));
  }
  options.far_experts.clear();
  for (const unsigned char* const records : options.far_records) {
    options.far_experts.push_back(records == nullptr ? 0 : 1);
  }
  if (link == nullptr) return options;  // the schedule refuses it
  if (link->regions() != options.layers) {
    refuse("the link has " + std::to_string(link->regions()) + " regions for " +
           std::to_string(options.layers) + " layers");
  }
  const std::int64_t bytes = options.experts * options.layout.blocks * options.layout.record_bytes;
  for (std::int32_t layer = 0; layer < options.layers; ++layer) {
    if (link->region_bytes(layer) == bytes) continue;
    refuse("region " + std::to_string(layer) + " of the link has " +
           std::to_string(link->region_bytes(layer)) + " bytes; the records of a layer have " +
           std::to_string(bytes));
  }
  return options;
}

}  // namespace

// ---- one call at a time

ExpertRunner::ApiLock::ApiLock(const ExpertRunner* runner)
    : runner_(runner), lock_(runner->mutex_, std::defer_lock) {
  if (getpid() != runner->process_) {
    throw std::runtime_error("the expert cache belongs to process " + std::to_string(runner->process_) +
                             "; a forked child cannot use it: load the model there");
  }
  if (runner->holder_.load(std::memory_order_relaxed) == std::this_thread::get_id()) {
    throw std::logic_error("the expert cache is in use by this very thread (a signal handler?)");
  }
  // Wait 21: for the other threads.
  MOECHAT_WAIT(21, lock_.lock());
  runner->holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

ExpertRunner::ApiLock::~ApiLock() { runner_->holder_.store(std::thread::id(), std::memory_order_relaxed); }

ExpertRunner::ExpertRunner(RunnerOptions options, std::unique_ptr<EvictionPolicy> policy,
                           std::unique_ptr<Link> link)
    : options_(checked(std::move(options), link.get())),
      process_(getpid()),
      routing_(options_.layers, options_.experts, options_.top_k, options_.even_share()),
      schedule_(options_, std::move(policy), std::move(link), &routing_),
      host_(&schedule_.link(), options_.stall_seconds, &schedule_.slab()),
      device_(&schedule_.link(), options_.stall_seconds,
              FarKernels(options_, options_.activation_bits, options_.experts, options_.far_records)),
      computed_(&schedule_.link()),
      mapped_(options_.mapped_records.size()) {
  if (options_.populate) schedule_.slab().populate();
}

ExpertRunner::~ExpertRunner() {
  if (getpid() != process_) return;
  // Wait 22: for transfers that still write into pages.
  bool stopped = true;
  MOECHAT_WAIT(22, stopped = schedule_.link().stop(kStopLimit));
  if (!stopped) schedule_.slab().leak();
}

// ---- a layer

void ExpertRunner::begin(std::int32_t layer, const std::int64_t* index, const float* weight,
                         std::int64_t tokens, std::int64_t k, Miss miss) {
  const ApiLock lock(this);
  const Stopwatch watch(&begin_seconds_);
  begin_layer(layer, index, weight, tokens, k, options_.far_records.empty() ? Miss::kFetch : miss);
}

std::int64_t ExpertRunner::prefetch(std::int32_t layer, const float* scores, std::int32_t experts,
                                    std::int64_t max_blocks, Priority priority) {
  const ApiLock lock(this);
  const Stopwatch watch(&begin_seconds_);
  schedule_.check_layer(layer);
  return prefetch_layer(layer, scores, experts, max_blocks, priority);
}

std::int64_t ExpertRunner::prefetch_layer(std::int32_t layer, const float* scores, std::int32_t experts,
                                          std::int64_t max_blocks, Priority priority) {
  std::int32_t best = options_.experts;
  if (scores == nullptr) {
    ranked_.resize(at(best));
    std::iota(ranked_.begin(), ranked_.end(), 0);
  } else {
    best = std::clamp(experts, 0, options_.experts);
    const std::int32_t counted = priority == Priority::kNext ? routing_.depth() : 0;
    rank_best(scores, options_.experts, std::max(best, counted), &sortable_, &ranked_);
    if (counted > 0) routing_.predict(layer, ranked_.data(), counted);
    if (schedule_.step() != nullptr) {
      schedule_.step()->want(
          experts_of_share(scores, options_.experts, AdaptiveStep::kShare, &distribution_));
    }
    schedule_.predict(layer, ranked_.data(), best);
  }
  return schedule_.prefetch(layer, ranked_.data(), best, max_blocks, priority);
}

void ExpertRunner::prefetch_places(std::int32_t layer, const Prefetching& rules, const Prediction* place,
                                   std::int64_t places, const float* scores) {
  const ApiLock lock(this);
  const Stopwatch watch(&begin_seconds_);
  fetch_places(layer, rules, place, places, scores);
}

void ExpertRunner::fetch_places(std::int32_t layer, const Prefetching& rules, const Prediction* place,
                                std::int64_t places, const float* scores) {
  const bool adaptive = rules.speculation.ahead == Ahead::kAdaptive;
  const std::vector<Prediction> wanted = adaptive ? schedule_.adaptive_layers() : std::vector<Prediction>{};
  const auto predicted = [&](std::int32_t distance) {
    if (!adaptive) return distance >= 1 && distance <= rules.predicted;
    return std::any_of(wanted.begin(), wanted.end(),
                       [&](const Prediction& one) { return one.ahead == distance; });
  };
  for (std::int64_t number = 0; number < places; ++number) {
    const Prediction& one = place[number];
    if (!predicted(one.ahead)) continue;
    schedule_.check_layer(one.layer);
    prefetch_layer(one.layer, scores + number * options_.experts, rules.experts, rules.max_blocks,
                   one.ahead > 1 ? Priority::kLater : Priority::kNext);
  }
  const std::int32_t whole = plan_speculation(rules.speculation, layer, options_.layers, 1).whole;
  if (whole >= 0) prefetch_layer(whole, nullptr, options_.experts, rules.max_blocks, Priority::kNext);
}

std::int64_t ExpertRunner::prefetch_ahead(const std::vector<AheadExpert>& experts, std::int64_t max_blocks,
                                          bool stays) {
  const ApiLock lock(this);
  const Stopwatch watch(&begin_seconds_);
  return schedule_.prefetch_ahead(experts.data(), static_cast<std::int64_t>(experts.size()), max_blocks,
                                  stays);
}

std::vector<Prediction> ExpertRunner::adaptive_layers() {
  const ApiLock lock(this);
  return schedule_.adaptive_layers();
}

void ExpertRunner::begin_request() {
  const ApiLock lock(this);
  schedule_.begin_request();
}

std::pair<std::int32_t, double> ExpertRunner::adaptive_step() const {
  const ApiLock lock(this);
  const AdaptiveStep* const step = schedule_.step();
  return step == nullptr ? std::pair{0, 0.0} : std::pair{step->step(), step->estimate()};
}

std::int64_t ExpertRunner::finish(const float* x, std::int64_t tokens, float* out,
                                  const Interrupted& interrupted) {
  const ApiLock lock(this);
  check_finish(tokens);
  if (schedule_.sharing()) throw std::logic_error("the CPU's part of a layer is for finish_on_device");
  if (options_.near_memory != nullptr) throw std::logic_error("the pages lie in memory of a device");
  const std::int32_t layer = schedule_.layer();
  host_.sum().start(options_.layout_of(layer), options_.gate_of(layer), schedule_.rows(), x, tokens, out,
                    options_.accumulator_bytes, options_.activation_bits);
  host_.start(&interrupted);
  read_mapped();
  return finish_with(&host_);
}

std::int64_t ExpertRunner::finish_on_device(void* stream, std::int64_t tokens, std::int64_t work,
                                            const DeviceExecutor::Launch& launch,
                                            const Interrupted& interrupted, const FarPart& far) {
  const ApiLock lock(this);
  check_finish(tokens);
  if (schedule_.sharing() && (far.x == nullptr || far.out == nullptr)) {
    throw std::invalid_argument("the CPU computes a part of this layer and was given no x and out");
  }
  if (!mapped_.empty()) throw std::logic_error("mapped experts are computed by finish");
  if (work < 1) throw std::invalid_argument("work is " + std::to_string(work) + "; it must be at least 1");
  device_.far().begin(schedule_.layer(), &schedule_.rows(), tokens, far);
  device_.start(&interrupted, &schedule_.rows(), stream, work, &launch);
  return finish_with(&device_);
}

// Reads mapped experts of the begun layer as wholes, where kernels would fault them in page by page.
void ExpertRunner::read_mapped() {
  if (mapped_.empty()) return;
  mapped_.begin();
  const std::int64_t bytes = options_.blocks * options_.record_bytes;
  for (const std::int32_t expert : schedule_.rows().experts) {
    const std::size_t place = at(std::int64_t{schedule_.layer()} * options_.experts + expert);
    const unsigned char* const records = options_.mapped_records[place];
    if (records != nullptr && mapped_.first_use(place)) read_ahead(records, at(bytes));
  }
}

void ExpertRunner::check_finish(std::int64_t tokens) const {
  if (!schedule_.active()) throw std::logic_error("finish without begin");
  if (begun_by_ != std::this_thread::get_id()) {
    throw std::logic_error("finish by another thread than the one that began the layer: passes have met");
  }
  if (tokens != schedule_.tokens()) {
    throw std::invalid_argument("finish was given " + std::to_string(tokens) + " tokens, begin " +
                                std::to_string(schedule_.tokens()));
  }
}

std::int64_t ExpertRunner::finish_with(LayerExecutor* executor) {
  const std::int64_t before = schedule_.bytes_computed();
  schedule_.finish(executor);
  return schedule_.bytes_computed() - before;
}

void ExpertRunner::check_begun() const {
  if (!schedule_.active()) throw std::logic_error("no layer has begun");
}

std::int64_t ExpertRunner::far_blocks() const {
  const ApiLock lock(this);
  return schedule_.far_blocks();
}

Grouped ExpertRunner::rows() const {
  const ApiLock lock(this);
  check_begun();
  return schedule_.rows();
}

void ExpertRunner::with_rows(const std::function<void(const Grouped&, std::int64_t)>& body) const {
  const ApiLock lock(this);
  check_begun();
  body(schedule_.rows(), schedule_.tokens());
}

void ExpertRunner::abort() {
  const ApiLock lock(this);
  schedule_.abort();
}

void ExpertRunner::drain(const Interrupted& interrupted) {
  const ApiLock lock(this);
  host_.start(&interrupted);
  schedule_.drain(&host_);
}

// ---- figures

void ExpertRunner::rest() const { const ApiLock lock(this); }

std::int64_t ExpertRunner::begun_tokens() const {
  const ApiLock lock(this);
  return schedule_.active() ? schedule_.tokens() : -1;
}

void ExpertRunner::set_targets(const std::vector<LayerTarget>& targets) {
  const ApiLock lock(this);
  schedule_.set_targets(targets);
}

std::int64_t ExpertRunner::withhold(std::int64_t pages) {
  const ApiLock lock(this);
  return schedule_.withhold(pages);
}

void ExpertRunner::expect(const std::vector<double>& shares) {
  const ApiLock lock(this);
  schedule_.expect(shares);
}

std::int64_t ExpertRunner::preload(const std::vector<std::pair<std::int32_t, std::int32_t>>& experts,
                                   std::int64_t most,
                                   const std::vector<std::pair<std::int32_t, std::int32_t>>& replaceable,
                                   bool to_targets) {
  const ApiLock lock(this);
  return schedule_.preload(experts, most, replaceable, to_targets);
}

std::vector<double> ExpertRunner::keys() const {
  const ApiLock lock(this);
  return schedule_.keys();
}

void ExpertRunner::stop_preload() {
  const ApiLock lock(this);
  schedule_.stop_preload();
}

ScheduleStats ExpertRunner::stats() const {
  const ApiLock lock(this);
  ScheduleStats stats = schedule_.stats();
  stats.begin_seconds = begin_seconds_;
  return stats;
}

void ExpertRunner::reset_stats() {
  const ApiLock lock(this);
  begin_seconds_ = 0;
  schedule_.reset_stats();
}

RoutingCounts ExpertRunner::routing_counts() const {
  const ApiLock lock(this);
  return routing_.counts();
}

std::int64_t ExpertRunner::hard_activations() const {
  const ApiLock lock(this);
  return routing_.hard();
}

void ExpertRunner::reset_routing_counts() {
  const ApiLock lock(this);
  routing_.reset();
}

void ExpertRunner::hurry_link(bool on) {
  const ApiLock lock(this);
  schedule_.link().hurry(on);
}

std::vector<std::int16_t> ExpertRunner::residency() const {
  const ApiLock lock(this);
  return schedule_.residency();
}

ExpertPlaces ExpertRunner::places() const {
  const ApiLock lock(this);
  return schedule_.places();
}

std::pair<std::int64_t, std::vector<std::int64_t>> ExpertRunner::activations() const {
  const ApiLock lock(this);
  return {routing_.counts().tokens, routing_.counts().activations};
}

std::string ExpertRunner::check() const {
  const ApiLock lock(this);
  return schedule_.check();
}

std::int64_t ExpertRunner::huge_bytes() const {
  const ApiLock lock(this);
  return schedule_.slab().huge_bytes();
}

std::int64_t ExpertRunner::resident_bytes() const {
  const ApiLock lock(this);
  return schedule_.slab().resident_bytes();
}

}  // namespace moechat
