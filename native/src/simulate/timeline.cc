#include "simulate/timeline.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace moechat {
namespace {

constexpr std::chrono::milliseconds kSlice{50};  // between two calls of `interrupted`

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

void check_time(const char* name, double value) {
  if (!(value >= 0) || !std::isfinite(value)) {
    refuse(std::string(name) + " is " + std::to_string(value) + "; a time is finite and at least 0");
  }
}

void check_loading(const Loading& loading) {
  if (loading.speculation.lookahead < 1 || loading.ahead_experts < 0 || loading.ahead_blocks < 0) {
    refuse("lookahead must be at least 1, ahead_experts and ahead_blocks at least 0");
  }
}

TimelineOptions checked(TimelineOptions options) {
  check_loading(options.loading);
  if (options.costs.compute.empty()) refuse("compute is empty");
  for (const double value : options.costs.compute) check_time("compute", value);
  check_time("attention", options.attention);
  check_time("head", options.head);
  check_time("call", options.costs.call);
  check_time("far_block", options.costs.far_block);
  check_time("far_block_shared", options.costs.far_block_shared);
  check_time("far_call", options.costs.far_call);
  if (!(options.costs.near_slowdown >= 1) || !std::isfinite(options.costs.near_slowdown)) {
    refuse("near_slowdown is " + std::to_string(options.costs.near_slowdown) + "; it must be at least 1");
  }
  const CallCosts& calls = options.costs.calls;
  for (const double value : {calls.dense, calls.choice, calls.clear, calls.lists, calls.list_latency,
                             calls.list_copy, calls.launch, calls.launch_host, calls.event, calls.sum,
                             calls.sum_card, options.link.call, options.link.call_copy, options.link.wake}) {
    check_time("calls", value);
  }
  if (options.costs.far_threads < 1) {
    refuse("far_threads is " + std::to_string(options.costs.far_threads) + "; it must be at least 1");
  }
  options.near_memory = Slab::no_memory();
  options.stall_seconds = std::numeric_limits<double>::infinity();
  return options;
}

}  // namespace

Timeline::Timeline(TimelineOptions options, std::unique_ptr<EvictionPolicy> policy)
    : options_(checked(std::move(options))),
      loading_(options_.loading),
      targets_(options_.targets),
      link_(new VirtualLink(options_.layers, options_.link, &now_)),
      // Nothing asks for the predictions' places, so it does not matter how many a token uses.
      routing_(options_.counts_hard ? std::make_unique<RoutingCounter>(options_.layers, options_.experts, 1,
                                                                       options_.even_share())
                                    : nullptr),
      schedule_(options_, std::move(policy), std::unique_ptr<Link>(link_), routing_.get()) {
  if (options_.launch == LaunchPattern::kCard) {
    clock_ = std::make_unique<CardClock>(options_.costs, 0, &schedule_, link_, &now_);
  } else if (options_.launch == LaunchPattern::kGraphs) {
    clock_ = std::make_unique<GraphClock>(options_.costs, 0, &schedule_, link_, &now_);
  } else {
    clock_ = std::make_unique<HostClock>(options_.costs, options_.group_items, &schedule_, link_, &now_);
  }
}

std::int64_t Timeline::preload(std::int32_t layer, const std::int32_t* experts, std::int64_t count,
                               std::int32_t blocks) {
  const std::vector<std::int32_t> once(at(count), 1);
  if (blocks < 1 || blocks > options_.blocks) {
    refuse("blocks is " + std::to_string(blocks) + "; it must be from 1 to " +
           std::to_string(options_.blocks));
  }
  SplitExpertCache& cache = schedule_.cache();
  Plan plan;
  cache.access(layer, experts, once.data(), count, 1, nullptr);
  std::int64_t loaded = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t lacks = blocks - cache.assigned(layer, experts[i]);
    const std::int64_t most = std::min(lacks, schedule_.slab().free_pages());
    if (most > 0) {
      cache.plan({layer, layer, &experts[i], 1, false, most, false}, &plan);
      cache.commit(&plan);
      for (const Fetch& fetch : plan.fetches) cache.landed(fetch.page, 0);
      loaded += static_cast<std::int64_t>(plan.fetches.size());
    }
    cache.release(layer, experts[i]);
  }
  return loaded;
}

void Timeline::start_warm(const std::vector<double>& shares,
                          const std::vector<std::pair<std::int32_t, std::int32_t>>& experts,
                          const std::vector<std::pair<std::int32_t, std::int32_t>>& replaceable) {
  schedule_.expect(shares);
  link_->hurry(true);
  schedule_.preload(experts, schedule_.slab().pages(), replaceable);
  drain();
  link_->hurry(hurried_);
}

void Timeline::start_like(const Timeline& other) {
  const TimelineOptions& theirs = other.options_;
  if (theirs.layers != options_.layers || theirs.experts != options_.experts ||
      theirs.blocks != options_.blocks || theirs.pages != options_.pages) {
    refuse("the other timeline has " + std::to_string(theirs.pages) + " pages for " +
           std::to_string(theirs.layers) + " layers of " + std::to_string(theirs.experts) + " experts of " +
           std::to_string(theirs.blocks) + " blocks; this one has " + std::to_string(options_.pages) + ", " +
           std::to_string(options_.layers) + ", " + std::to_string(options_.experts) + " and " +
           std::to_string(options_.blocks));
  }
  const SplitExpertCache& source = other.schedule_.cache();
  SplitExpertCache& cache = schedule_.cache();
  if (schedule_.slab().free_pages() < options_.pages) refuse("something is loaded here already");
  if (source.in_flight() > 0) refuse("blocks of the other timeline are on their way");
  const auto each_expert = [this](const auto& body) {
    for (std::int32_t layer = 0; layer < options_.layers; ++layer) {
      for (std::int32_t expert = 0; expert < options_.experts; ++expert) body(layer, expert);
    }
  };
  std::vector<PageId> pages;
  pages.reserve(at(options_.pages));
  each_expert([&](std::int32_t layer, std::int32_t expert) {
    for (std::int32_t block = 0; block < source.assigned(layer, expert); ++block) {
      pages.push_back(source.page(layer, expert, block));
    }
  });
  schedule_.slab().take_next(pages);
  Plan plan;
  each_expert([&](std::int32_t layer, std::int32_t expert) {
    Want want{layer, layer, &expert, 1, true, source.assigned(layer, expert), false};
    want.preload = true;
    cache.plan(want, &plan);
    cache.commit(&plan);
    for (const Fetch& fetch : plan.fetches) cache.landed(fetch.page, 0);
  });
  schedule_.set_targets(targets_);  // of the experts that are there now, those with the highest keys stay
  cache.protect_like(source);
}

void Timeline::switch_to(const Loading& loading, const std::vector<LayerTarget>& targets) {
  check_loading(loading);
  const auto same = [](const LayerTarget& one, const LayerTarget& other) {
    return one.experts == other.experts && one.blocks == other.blocks;
  };
  // As the engine, which leaves targets alone that stay.
  if (!std::equal(targets.begin(), targets.end(), targets_.begin(), targets_.end(), same)) {
    schedule_.set_targets(targets);
    targets_ = targets;
  }
  loading_ = loading;
}

void Timeline::run(const Passes& passes, std::int64_t from, std::int64_t to, bool hurried, PassFigures* out,
                   const Interrupted& interrupted) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point called = Clock::now();
  hurried_ = hurried;
  link_->hurry(hurried);
  clock_->hurry(hurried);
  for (std::int64_t pass = from; pass < to; ++pass) {
    const std::int64_t first = passes.starts[pass];
    const std::int64_t tokens = passes.starts[pass + 1] - first;
    const double begun = now_;
    const double stalled = stall_seconds_;
    const LinkStats moved = link_->stats();
    const std::int64_t hard = routing_ ? routing_->hard() : 0;
    const std::int64_t* const requests = passes.requests + passes.request_count;
    if (std::binary_search(passes.requests, requests, first)) schedule_.begin_request();
    if (passes.queues != nullptr && tokens == 1) prefetch_queued(passes, first, 0);
    for (std::int32_t layer = 0; layer < options_.layers; ++layer) run_layer(passes, layer, first, tokens);
    clock_->compute_dense(options_.head);
    const LinkStats after = link_->stats();
    const auto bytes = [&](Priority priority) {
      const int which = static_cast<int>(priority);
      return static_cast<double>(after.bytes[which] - moved.bytes[which]);
    };
    out[pass - from] = {now_ - begun, stall_seconds_ - stalled, bytes(Priority::kDemand),
                        bytes(Priority::kNext) + bytes(Priority::kLater),
                        static_cast<double>((routing_ ? routing_->hard() : 0) - hard)};
    if (interrupted && Clock::now() - called >= kSlice) {
      called = Clock::now();
      interrupted();
    }
  }
}

void Timeline::run_layer(const Passes& passes, std::int32_t layer, std::int64_t first, std::int64_t tokens) {
  clock_->compute_dense(options_.attention);
  index_.clear();
  for (std::int64_t token = first; token < first + tokens; ++token) {
    const std::int32_t* chosen = passes.experts + (token * options_.layers + layer) * passes.k;
    index_.insert(index_.end(), chosen, chosen + passes.k);
  }
  weight_.assign(index_.size(), 1.0f);
  schedule_.begin(layer, index_.data(), weight_.data(), tokens, passes.k,
                  hurried_ ? Miss::kFetch : loading_.miss);
  speculate(passes, first + tokens - 1, tokens);
  const double begun = now_;
  const double computed = clock_->compute_seconds();
  clock_->start(!hurried_ && loading_.miss != Miss::kFetch);
  schedule_.finish(clock_.get());
  const double ended = clock_->end_layer();
  stall_seconds_ += std::max(0.0, ended - begun - (clock_->compute_seconds() - computed));
}

void Timeline::speculate(const Passes& passes, std::int64_t last_token, std::int64_t tokens) {
  const SpeculationPlan plan =
      plan_speculation(loading_.speculation, schedule_.layer(), options_.layers, tokens);
  if (plan.whole >= 0) {
    ranked_.resize(at(options_.experts));
    std::iota(ranked_.begin(), ranked_.end(), 0);
    schedule_.prefetch(plan.whole, ranked_.data(), options_.experts, loading_.ahead_blocks, Priority::kNext);
  }
  if (loading_.speculation.ahead == Ahead::kQueued) {
    if (tokens == 1 && passes.queues != nullptr) {
      prefetch_queued(passes, last_token, schedule_.layer() + 1);
    }
    return;
  }
  if (passes.rankings == nullptr || passes.width < 1) return;
  if (loading_.speculation.ahead == Ahead::kAdaptive) {
    for (const Prediction& each : schedule_.adaptive_layers()) prefetch_ranked(passes, last_token, each);
  }
  for (const Prediction& prediction : plan.ranked) prefetch_ranked(passes, last_token, prediction);
}

void Timeline::prefetch_queued(const Passes& passes, std::int64_t token, std::int32_t slot) {
  const std::int64_t begin = (token * (options_.layers + 1) + slot) * passes.queued;
  queue_.clear();
  for (std::int64_t i = begin; i < begin + passes.queued && passes.queues[i] >= 0; ++i) {
    const float score = passes.queue_scores == nullptr ? 0 : passes.queue_scores[i];
    queue_.push_back({passes.queues[i] / options_.experts, passes.queues[i] % options_.experts, score});
  }
  if (queue_.empty() && slot == 0) return;
  schedule_.prefetch_ahead(queue_.data(), static_cast<std::int64_t>(queue_.size()), loading_.ahead_blocks);
}

void Timeline::prefetch_ranked(const Passes& passes, std::int64_t last_token, const Prediction& prediction) {
  const auto [ahead, layer] = prediction;
  const std::int64_t token = last_token + (schedule_.layer() + ahead) / options_.layers;
  if (ahead > passes.depths || token >= passes.tokens) return;
  const std::int32_t* ranking =
      passes.rankings +
      (((ahead - 1) * passes.tokens + token) * options_.layers + layer) * std::int64_t{passes.width};
  if (ranking[0] < 0) return;  // nothing was predicted
  ranked_.clear();
  for (std::int32_t i = 0; i < std::min(passes.width, loading_.ahead_experts) && ranking[i] >= 0; ++i) {
    if (ranking[i] >= options_.experts) {
      refuse("a ranking of layer " + std::to_string(layer) + " names expert " + std::to_string(ranking[i]) +
             "; a layer has experts 0 to " + std::to_string(options_.experts - 1));
    }
    ranked_.push_back(ranking[i]);
  }
  const auto count = static_cast<std::int64_t>(ranked_.size());
  schedule_.predict(layer, ranked_.data(), count);
  schedule_.prefetch(layer, ranked_.data(), count, loading_.ahead_blocks,
                     ahead > 1 ? Priority::kLater : Priority::kNext);
}

// ---- figures

ScheduleStats Timeline::stats() const {
  ScheduleStats stats = schedule_.stats();
  stats.compute_seconds = clock_->compute_seconds() - compute_base_;
  stats.stall_seconds = stall_seconds_;
  return stats;
}

void Timeline::reset_stats() {
  schedule_.reset_stats();
  stall_seconds_ = 0;
  compute_base_ = clock_->compute_seconds();
}

}  // namespace moechat
