#include "simulate/timeline.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

namespace moechat {
namespace {

// As in runner.cc.
constexpr std::int64_t kWorkOfCall = 1024;
constexpr std::int64_t kWorkOfRow = 16384;
// Nothing is ever written into the pages: only their numbers count.
constexpr std::int64_t kPageBytes = 4096;
constexpr std::chrono::milliseconds kSlice{50};  // between two looks at signals

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

void check_time(const char* name, double value) {
  if (!(value >= 0) || !std::isfinite(value)) {
    refuse(std::string(name) + " is " + std::to_string(value) + "; a time is finite and at least 0");
  }
}

TimelineOptions checked(TimelineOptions options, const EvictionPolicy* policy) {
  if (policy == nullptr) refuse("a timeline needs a policy");
  if (options.layers < 1 || options.experts < 1 || options.blocks < 1) {
    refuse("layers, experts and blocks are " + std::to_string(options.layers) + ", " +
           std::to_string(options.experts) + " and " + std::to_string(options.blocks) +
           "; each must be at least 1");
  }
  if (policy->layers() != options.layers || policy->experts() != options.experts) {
    refuse("the policy is for " + std::to_string(policy->layers()) + " layers of " +
           std::to_string(policy->experts()) + " experts, the timeline for " +
           std::to_string(options.layers) + " of " + std::to_string(options.experts));
  }
  if (options.pages < 1 || options.pages >= (std::int64_t{1} << 31)) {
    refuse("pages is " + std::to_string(options.pages) + "; it must be from 1 to 2147483647");
  }
  if (options.lookahead < 1 || options.ahead_experts < 0 || options.ahead_blocks < 0) {
    refuse("lookahead must be at least 1, ahead_experts and ahead_blocks at least 0");
  }
  if (options.compute.empty()) refuse("compute is empty");
  for (const double value : options.compute) check_time("compute", value);
  check_time("attention", options.attention);
  check_time("head", options.head);
  check_time("call", options.call);
  if (options.miss != Miss::kFetch) {
    check_time("far_block", options.far_block);
    check_time("far_block_shared", options.far_block_shared);
  }
  return options;
}

}  // namespace

Timeline::Timeline(TimelineOptions options, std::unique_ptr<EvictionPolicy> policy)
    : options_(checked(std::move(options), policy.get())),
      policy_(std::move(policy)),
      slab_(options_.pages, kPageBytes),
      cache_(options_.layers, options_.experts, options_.blocks, &slab_, policy_.get(), options_.targets,
             options_.reserve),
      link_(options_.layers, options_.link, &now_),
      transfers_(&cache_, &slab_, &link_),
      layer_(options_.layers - 1) {}

std::int64_t Timeline::preload(std::int32_t layer, const std::int32_t* experts, std::int64_t count,
                               std::int32_t blocks) {
  const std::vector<std::int32_t> once(at(count), 1);
  if (blocks < 1 || blocks > options_.blocks) {
    refuse("blocks is " + std::to_string(blocks) + "; it must be from 1 to " +
           std::to_string(options_.blocks));
  }
  cache_.access(layer, experts, once.data(), count, 1, nullptr);
  std::int64_t loaded = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t lacks = blocks - cache_.assigned(layer, experts[i]);
    const std::int64_t most = std::min(lacks, slab_.free_pages());
    if (most > 0) {
      cache_.plan({layer, layer, &experts[i], 1, false, most, false}, &plan_);
      cache_.commit(&plan_);
      for (const Fetch& fetch : plan_.fetches) cache_.landed(fetch.page, 0);
      loaded += static_cast<std::int64_t>(plan_.fetches.size());
    }
    cache_.release(layer, experts[i]);
  }
  return loaded;
}

void Timeline::run(const Passes& passes, std::int64_t from, std::int64_t to, bool hurried, PassFigures* out,
                   const Interrupted& interrupted) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point asked = Clock::now();
  hurried_ = hurried;
  link_.hurry(hurried);
  index_.resize(0);
  for (std::int64_t pass = from; pass < to; ++pass) {
    const std::int64_t first = passes.starts[pass];
    const std::int64_t tokens = passes.starts[pass + 1] - first;
    const double begun = now_;
    const double stalled = own_.stall_seconds;
    const LinkStats moved = link_.stats();
    for (std::int32_t layer = 0; layer < options_.layers; ++layer) {
      if (!hurried_) now_ += options_.attention;
      index_.clear();
      for (std::int64_t token = first; token < first + tokens; ++token) {
        const std::int32_t* chosen = passes.experts + (token * options_.layers + layer) * passes.k;
        index_.insert(index_.end(), chosen, chosen + passes.k);
      }
      weight_.assign(index_.size(), 1.0f);
      group_by_expert(index_.data(), weight_.data(), tokens, passes.k, options_.experts, &grouped_);
      begin(layer, tokens);
      speculate(passes, first + tokens - 1, tokens);
      finish();
    }
    if (!hurried_) now_ += options_.head;
    const LinkStats after = link_.stats();
    const auto bytes = [&](Priority priority) {
      const int which = static_cast<int>(priority);
      return static_cast<double>(after.bytes[which] - moved.bytes[which]);
    };
    out[pass - from] = {now_ - begun, own_.stall_seconds - stalled, bytes(Priority::kDemand),
                        bytes(Priority::kNear) + bytes(Priority::kFar)};
    if (interrupted && Clock::now() - asked >= kSlice) {
      asked = Clock::now();
      interrupted();
    }
  }
}

void Timeline::drain() {
  for (;;) {
    settle();
    if (cache_.in_flight() == 0) return;
    now_ = std::max(now_, link_.next_end());
  }
}

// ---- a layer

void Timeline::begin(std::int32_t layer, std::int64_t tokens) {
  if (rows_.size() < grouped_.experts.size()) rows_.resize(grouped_.experts.size());
  settle();
  cache_.access(layer, grouped_.experts.data(), grouped_.tokens_of.data(), grouped_.rows(), tokens, nullptr);
  active_ = true;
  layer_ = layer;
  tokens_ = tokens;
  ++pass_;
  starved_ = freed_ = false;
  for (Prefetch& ahead : ahead_) ahead.blocks = 0;
  let_go_ = 0;
  first_ = end_ = 0;
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) {
    rows_[at(i)].next = 0;
    rows_[at(i)].near = options_.blocks;
    rows_[at(i)].pinned = true;
  }
  if (transfers_.cancel_stale(layer) > 0) freed_ = true;
  if (cache_.in_flight() > 0) {
    for (const std::int32_t expert : grouped_.experts) transfers_.promote(layer, expert, Priority::kDemand);
  }
  share_out(tokens);
  bool complete = true;
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) {
    complete = complete && cache_.assigned(layer, grouped_.experts[at(i)]) >= rows_[at(i)].near;
  }
  if (!complete) {
    acquire();
  } else {
    settle();  // what has been promoted may start
  }
}

// Decides which missing blocks the far tier computes, so that it is done when the link is.
void Timeline::share_out(std::int64_t tokens) {
  order_.resize(at(grouped_.rows()));
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) order_[at(i)] = i;
  far_until_ = 0;
  if (options_.miss == Miss::kFetch || hurried_) return;
  std::int64_t missing = 0;
  for (const std::int32_t expert : grouped_.experts)
    missing += options_.blocks - cache_.assigned(layer_, expert);
  if (missing == 0) return;

  std::int64_t fetched = 0;
  if (options_.miss == Miss::kBoth) {
    const double start = link_.backlog();
    const double each = link_.block_seconds(true);
    const double work = options_.far_block_shared * static_cast<double>(tokens);
    while (fetched < missing &&
           start + each * static_cast<double>(fetched + 1) <= work * static_cast<double>(missing - fetched)) {
      ++fetched;
    }
  }
  // What is fetched may stay: so of the missing experts those that the policy would keep come first.
  const double* keys = policy_->keys(layer_);
  std::stable_sort(order_.begin(), order_.end(), [&](std::int32_t a, std::int32_t b) {
    return keys[grouped_.experts[at(a)]] > keys[grouped_.experts[at(b)]];
  });
  std::int64_t left = fetched;
  double pairs = 0;
  for (const std::int32_t i : order_) {
    const std::int32_t assigned = cache_.assigned(layer_, grouped_.experts[at(i)]);
    const auto taken = static_cast<std::int32_t>(std::min<std::int64_t>(left, options_.blocks - assigned));
    rows_[at(i)].near = assigned + taken;
    left -= taken;
    pairs += static_cast<double>(grouped_.tokens_of[at(i)]) * (options_.blocks - assigned - taken);
  }
  own_.far_blocks += missing - fetched;
  // Slower while the link is busy, faster after it.
  const bool busy = fetched > 0 || cache_.in_flight() > 0;
  const double together =
      busy ? link_.backlog() + link_.block_seconds(true) * static_cast<double>(fetched) : 0;
  const double all_together = pairs * options_.far_block_shared;
  double work = all_together;
  if (all_together > together && options_.far_block_shared > 0) {
    work = together + (all_together - together) * options_.far_block / options_.far_block_shared;
  }
  far_until_ = now_ + work;
  own_.far_seconds += work;
  link_.share_until(far_until_);
}

void Timeline::speculate(const Passes& passes, std::int64_t last_token, std::int64_t tokens) {
  if (options_.ahead == Ahead::kNone) return;
  const std::int32_t depth = std::min(options_.lookahead, options_.layers - 1);
  const bool last = layer_ == options_.layers - 1;
  const bool stream = options_.stream_tokens > 0 && tokens >= options_.stream_tokens && !last;
  if (options_.ahead == Ahead::kWholeLayer || stream) {
    if (depth < 1) return;
    Prefetch& near = ahead_[static_cast<int>(Priority::kNear)];
    near.layer = (layer_ + 1) % options_.layers;
    near.ranked.resize(at(options_.experts));
    for (std::int32_t expert = 0; expert < options_.experts; ++expert) near.ranked[at(expert)] = expert;
    prefetch(Priority::kNear);
    return;
  }
  if (passes.rankings == nullptr || (tokens > 1 && !last)) return;
  for (std::int32_t ahead = 1; ahead <= std::min(depth, passes.depths); ++ahead) {
    const std::int64_t turns = (layer_ + ahead) / options_.layers;
    const std::int32_t layer = (layer_ + ahead) % options_.layers;
    const std::int64_t token = last_token + turns;
    if (token >= passes.tokens) continue;
    const std::int32_t* ranking =
        passes.rankings +
        (((ahead - 1) * passes.tokens + token) * options_.layers + layer) * std::int64_t{passes.width};
    if (passes.width < 1 || ranking[0] < 0) continue;  // nothing was expected
    const Priority priority = ahead > 1 ? Priority::kFar : Priority::kNear;
    Prefetch& one = ahead_[static_cast<int>(priority)];
    one.ranked.clear();
    for (std::int32_t i = 0; i < std::min(passes.width, options_.ahead_experts) && ranking[i] >= 0; ++i) {
      if (ranking[i] >= options_.experts) {
        refuse("a ranking of layer " + std::to_string(layer) + " names expert " + std::to_string(ranking[i]) +
               "; a layer has experts 0 to " + std::to_string(options_.experts - 1));
      }
      one.ranked.push_back(ranking[i]);
    }
    one.layer = layer;
    policy_->predict(layer, one.ranked.data(), static_cast<std::int64_t>(one.ranked.size()));
    prefetch(priority);
  }
}

void Timeline::prefetch(Priority priority) {
  settle();
  Prefetch& ahead = ahead_[static_cast<int>(priority)];
  ahead.blocks = options_.ahead_blocks;
  if (priority == Priority::kNear && cache_.in_flight() > 0) {
    for (const std::int32_t expert : ahead.ranked) transfers_.promote(ahead.layer, expert, priority);
  }
  if (starved_ && freed_) acquire();
  if (!starved_) fetch_ahead(&ahead);
}

std::int64_t Timeline::fetch_ahead(Prefetch* ahead) {
  if (ahead->blocks == 0) return 0;
  std::int64_t missing = 0;
  for (const std::int32_t expert : ahead->ranked) {
    missing += options_.blocks - cache_.assigned(ahead->layer, expert);
  }
  if (missing == 0) {
    ahead->blocks = 0;
    return 0;
  }
  const Want want{
      ahead->layer, layer_,        ahead->ranked.data(),  static_cast<std::int64_t>(ahead->ranked.size()),
      true,         ahead->blocks, options_.whole_experts};
  cache_.plan(want, &plan_);
  const Priority priority =
      ahead == &ahead_[static_cast<int>(Priority::kFar)] ? Priority::kFar : Priority::kNear;
  const std::int64_t count = transfers_.fetch(&plan_, priority, pass_);
  ahead->blocks = count == missing ? 0 : ahead->blocks - count;
  return count;
}

void Timeline::finish() {
  while (end_ < grouped_.rows()) {
    first_ = end_;
    std::int64_t items = grouped_.tokens_of[at(end_++)];
    while (end_ < grouped_.rows() &&
           (options_.group_items == 0 || items + grouped_.tokens_of[at(end_)] <= options_.group_items)) {
      items += grouped_.tokens_of[at(end_++)];
    }
    run_group();
  }
  if (far_until_ > now_) {
    own_.stall_seconds += far_until_ - now_;
    now_ = far_until_;
  }
  active_ = false;
}

// ---- as ExpertRunner, one by one

void Timeline::settle() {
  for (const Transfers::Arrival& arrival : transfers_.poll()) {
    const Transfers::Flight& flight = arrival.flight;
    if (active_ && flight.pass == pass_ && flight.kind == Transfers::Kind::kStaging) {
      const auto found = std::lower_bound(grouped_.experts.begin(), grouped_.experts.end(), flight.expert);
      for (Staged& staged : rows_[at(found - grouped_.experts.begin())].staged) {
        if (staged.page == arrival.page) staged.landed = true;
      }
    }
    if (!(arrival.owned && cache_.pins(flight.layer, flight.expert) > 0)) freed_ = true;
  }
}

std::int64_t Timeline::acquire() {
  starved_ = freed_ = false;
  std::int64_t count = 0;
  for (std::int32_t i = first_; let_go_ > 0 && i < end_; ++i) count += stage(i);
  std::int64_t missing = 0;
  wanted_.clear();
  for (const std::int32_t i : order_) {
    if (i < first_ || !rows_[at(i)].pinned) continue;
    const std::int32_t expert = grouped_.experts[at(i)];
    const std::int64_t lacks = rows_[at(i)].near - cache_.assigned(layer_, expert);
    if (lacks <= 0) continue;
    missing += lacks;
    wanted_.push_back(expert);
  }
  if (missing > 0) {
    const Want want{layer_, layer_,  wanted_.data(), static_cast<std::int64_t>(wanted_.size()),
                    false,  missing, false};
    cache_.plan(want, &plan_);
    const std::int64_t fetched = transfers_.fetch(&plan_, Priority::kDemand, pass_);
    if (fetched < missing) starved_ = true;
    count += fetched;
  }
  return count;
}

std::int64_t Timeline::stage(std::int32_t index) {
  Row& row = rows_[at(index)];
  if (row.pinned || done(row)) return 0;
  const std::int32_t expert = grouped_.experts[at(index)];
  if (row.staged.empty() && row.next < cache_.assigned(layer_, expert)) {
    starved_ = true;
    return 0;
  }
  std::int64_t count = 0;
  for (;;) {
    const std::int32_t block = row.next + static_cast<std::int32_t>(row.staged.size());
    if (block == row.near) return count;
    const PageId page = transfers_.stage(layer_, expert, block, pass_);
    if (page == kNoPage) break;
    row.staged.push_back({page, false});
    ++count;
  }
  starved_ = true;
  return count;
}

void Timeline::collect() {
  steps_.clear();
  pending_ = 0;
  for (std::int32_t i = first_; i < end_ && pending_ < kWorkOfCall; ++i) {
    if (done(rows_[at(i)])) continue;
    const std::int32_t blocks = ready(i);
    if (blocks == 0) continue;
    steps_.push_back({i, blocks});
    pending_ += std::int64_t{blocks} * grouped_.tokens_of[at(i)];
  }
}

// Blocks of a row that can be computed now.
std::int32_t Timeline::ready(std::int32_t index) const {
  const Row& row = rows_[at(index)];
  const std::int64_t most =
      std::max<std::int64_t>(1, (kWorkOfRow - pending_) / grouped_.tokens_of[at(index)]);
  std::int64_t blocks = 0;
  if (!row.staged.empty()) {
    while (blocks < std::min(most, static_cast<std::int64_t>(row.staged.size())) &&
           row.staged[at(blocks)].landed) {
      ++blocks;
    }
    return static_cast<std::int32_t>(blocks);
  }
  const std::int32_t end = std::min(cache_.resident(layer_, grouped_.experts[at(index)]), row.near);
  if (options_.whole_experts && row.pinned && end < row.near) return 0;
  blocks = std::min<std::int64_t>(end - row.next, most);
  return static_cast<std::int32_t>(std::max<std::int64_t>(blocks, 0));
}

void Timeline::compute() {
  if (!hurried_) {
    const auto known = static_cast<std::int64_t>(options_.compute.size());
    double seconds = options_.call + options_.compute[at(std::min(pending_, known) - 1)];
    if (pending_ > known) {
      const double step =
          known > 1 ? options_.compute.back() - options_.compute[at(known - 2)] : options_.compute.back();
      seconds += step * static_cast<double>(pending_ - known);
    }
    now_ += seconds;
    own_.compute_seconds += seconds;
  }
  ++own_.kernel_calls;
  for (const Step& step : steps_) {
    Row& row = rows_[at(step.row)];
    row.next += step.blocks;
    own_.blocks_computed += step.blocks;
    if (!row.staged.empty()) {
      for (std::int32_t i = 0; i < step.blocks; ++i) transfers_.give_staging(row.staged[at(i)].page);
      row.staged.erase(row.staged.begin(), row.staged.begin() + step.blocks);
      own_.blocks_staged += step.blocks;
      freed_ = true;
    }
    if (!done(row)) continue;
    if (row.pinned) {
      row.pinned = false;
      cache_.release(layer_, grouped_.experts[at(step.row)]);
    } else {
      --let_go_;
    }
    freed_ = true;
  }
}

bool Timeline::group_done() const {
  return std::all_of(rows_.begin() + first_, rows_.begin() + end_,
                     [this](const Row& row) { return done(row); });
}

bool Timeline::group_pending() const {
  for (std::int32_t i = first_; i < end_; ++i) {
    const Row& row = rows_[at(i)];
    if (done(row)) continue;
    if (!row.staged.empty()) return true;
    const std::int32_t expert = grouped_.experts[at(i)];
    if (cache_.assigned(layer_, expert) > cache_.resident(layer_, expert)) return true;
  }
  return false;
}

void Timeline::run_group() {
  // Rows of which the far tier computes everything.
  for (std::int32_t i = first_; i < end_; ++i) {
    Row& row = rows_[at(i)];
    if (row.near > 0 || !row.pinned) continue;
    row.pinned = false;
    cache_.release(layer_, grouped_.experts[at(i)]);
  }
  if (let_go_ > 0) starved_ = freed_ = true;
  for (;;) {
    settle();
    if (let_go_ == 0 && starved_ && freed_) {
      acquire();
      freed_ = !starved_;
    }
    if (freed_ && !starved_ && let_go_ == 0) {
      freed_ = false;
      for (Prefetch& ahead : ahead_) fetch_ahead(&ahead);
    }
    collect();
    if (!steps_.empty()) {
      compute();
      continue;
    }
    if (group_done()) return;
    if (let_go_ > 0 && starved_ && freed_ && acquire() > 0) continue;
    if (!group_pending() && make_room()) continue;
    wait_until(link_.next_end());
  }
}

void Timeline::wait_until(double moment) {
  if (!std::isfinite(moment)) {
    throw std::logic_error("a block is waited for, and nothing is on its way: " + cache_.check());
  }
  if (moment <= now_) return;
  own_.stall_seconds += moment - now_;
  now_ = moment;
}

bool Timeline::make_room() {
  if (acquire() > 0) return true;
  for (std::int32_t i = 1; i <= options_.layers; ++i) {
    const std::int32_t layer = (layer_ + options_.layers + 1 - i) % options_.layers;
    if (transfers_.cancel_stale(layer) > 0) return true;
  }
  if (others_in_flight()) return false;
  if (let_one_go()) return true;
  throw std::logic_error("no page for a block, although nothing is in flight: " + cache_.check());
}

bool Timeline::others_in_flight() const {
  std::int64_t held = 0;
  for (std::int32_t i = first_; i < grouped_.rows(); ++i) {
    if (!rows_[at(i)].pinned) continue;
    const std::int32_t expert = grouped_.experts[at(i)];
    const std::int32_t end = cache_.assigned(layer_, expert);
    for (std::int32_t block = cache_.resident(layer_, expert); block < end; ++block) {
      if (cache_.filling(cache_.page(layer_, expert, block))) ++held;
    }
  }
  return cache_.in_flight() > held;
}

bool Timeline::let_one_go() {
  const std::int32_t protected_blocks = cache_.targets()[at(layer_)].blocks;
  for (std::int32_t i = grouped_.rows(); i-- > first_;) {
    Row& row = rows_[at(i)];
    const std::int32_t expert = grouped_.experts[at(i)];
    const std::int32_t kept = cache_.is_protected(layer_, expert) ? protected_blocks : 0;
    if (!row.pinned || cache_.assigned(layer_, expert) <= kept) continue;
    row.pinned = false;
    cache_.release(layer_, expert);
    ++let_go_;
    starved_ = freed_ = true;
    return true;
  }
  return false;
}

// ---- figures

TimelineStats Timeline::stats() const {
  TimelineStats stats = own_;
  stats.cache = cache_.counters();
  stats.now = now_;
  stats.link = link_.stats();
  for (int priority = 0; priority < kPriorities; ++priority) {
    stats.link.bytes[priority] -= link_base_.bytes[priority];
    stats.link.transfers[priority] -= link_base_.transfers[priority];
  }
  stats.link.operations -= link_base_.operations;
  stats.link.cancelled -= link_base_.cancelled;
  stats.link.busy_seconds -= link_base_.busy_seconds;
  stats.pages_peak = transfers_.pages_peak();
  return stats;
}

void Timeline::reset_stats() {
  own_ = {};
  cache_.reset_counters();
  link_base_ = link_.stats();
  transfers_.reset_peak();
}

std::vector<std::int16_t> Timeline::residency() const {
  std::vector<std::int16_t> blocks;
  blocks.reserve(at(std::int64_t{options_.layers} * options_.experts));
  for (std::int32_t layer = 0; layer < options_.layers; ++layer) {
    for (std::int32_t expert = 0; expert < options_.experts; ++expert) {
      blocks.push_back(static_cast<std::int16_t>(cache_.resident(layer, expert)));
    }
  }
  return blocks;
}

}  // namespace moechat
