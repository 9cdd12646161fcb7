#include "offload/runner.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <system_error>
#include <utility>

#include "link/mutation.h"

namespace moechat {
namespace {

constexpr std::chrono::milliseconds kSlice{50};  // of waiting, between two looks at signals
constexpr std::chrono::milliseconds kStopLimit{2000};

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

double seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

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

std::string decimal(double value) {
  std::string text = std::to_string(value);
  text.erase(text.find('.') + 2);
  return text;
}

RunnerOptions checked(RunnerOptions options, const EvictionPolicy* policy, const Link* link) {
  const auto refuse = [](const std::string& message) { throw std::invalid_argument(message); };
  check_activation_bits(options.activation_bits);
  if (policy == nullptr || link == nullptr) refuse("a runner needs a policy and a link");
  if (options.layers < 1 || options.experts < 1) {
    refuse("a runner needs at least one layer and one expert, not " + std::to_string(options.layers) +
           " and " + std::to_string(options.experts));
  }
  if (policy->layers() != options.layers || policy->experts() != options.experts) {
    refuse("the policy is for " + std::to_string(policy->layers()) + " layers of " +
           std::to_string(policy->experts()) + " experts, the runner for " + std::to_string(options.layers) +
           " of " + std::to_string(options.experts));
  }
  if (options.pages < 1 || options.pages >= kNoPage) {
    refuse("pages is " + std::to_string(options.pages) + "; it must be from 1 to " +
           std::to_string(kNoPage - 1));
  }
  if (options.near_memory != nullptr && options.pages > std::numeric_limits<std::int32_t>::max()) {
    refuse("pages is " + std::to_string(options.pages) + "; on a device it must be below 2^31");
  }
  if (!(options.stall_seconds > 0) || !std::isfinite(options.stall_seconds)) {
    refuse("stall_seconds is " + std::to_string(options.stall_seconds) + "; it must be positive");
  }
  if (link->regions() != options.layers) {
    refuse("the link has " + std::to_string(link->regions()) + " regions for " +
           std::to_string(options.layers) + " layers");
  }
  if (!options.far_records.empty() && options.far_records.size() != at(options.layers)) {
    refuse("far_records has " + std::to_string(options.far_records.size()) + " layers of " +
           std::to_string(options.layers));
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

// ---- turns

ExpertRunner::Turn::Turn(const ExpertRunner* runner)
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

ExpertRunner::Turn::~Turn() { runner_->holder_.store(std::thread::id(), std::memory_order_relaxed); }

ExpertRunner::ExpertRunner(RunnerOptions options, std::unique_ptr<EvictionPolicy> policy,
                           std::unique_ptr<Link> link)
    : options_(checked(std::move(options), policy.get(), link.get())),
      process_(getpid()),
      policy_(std::move(policy)),
      slab_(options_.pages, options_.layout.record_bytes, options_.near_memory),
      cache_(options_.layers, options_.experts, static_cast<std::int32_t>(options_.layout.blocks), &slab_,
             policy_.get(), options_.targets, options_.reserve),
      link_(std::move(link)),
      transfers_(&cache_, &slab_, link_.get()),
      routing_(options_.layers, options_.experts, options_.top_k),
      layer_(options_.layers - 1),
      host_(&slab_),
      far_(options_.layout, options_.activation, options_.activation_bits, options_.far_records) {
  if (options_.populate) slab_.populate();
}

ExpertRunner::~ExpertRunner() {
  if (getpid() != process_) return;
  // Wait 22: for what still writes into pages.
  bool stopped = true;
  MOECHAT_WAIT(22, stopped = link_->stop(kStopLimit));
  if (!stopped) slab_.leak();
}

// ---- a layer

void ExpertRunner::begin(std::int32_t layer, const std::int64_t* index, const float* weight,
                         std::int64_t tokens, std::int64_t k, Miss miss) {
  const Turn turn(this);
  const Clock::time_point begun = Clock::now();
  if (layer < 0 || layer >= options_.layers) {
    throw std::invalid_argument("layer is " + std::to_string(layer) + "; it must be from 0 to " +
                                std::to_string(options_.layers - 1));
  }
  if (tokens < 0 || k < 0) throw std::invalid_argument("tokens and k cannot be negative");
  if (active_) abort_now();
  group_by_expert(index, weight, tokens, k, options_.experts, &grouped_);
  if (rows_.size() < grouped_.experts.size()) rows_.resize(grouped_.experts.size());
  settle();
  if (tokens > 0) {
    routing_.access(layer, policy_->keys(layer), grouped_.experts.data(), grouped_.rows(), tokens);
    cache_.access(layer, grouped_.experts.data(), grouped_.tokens_of.data(), grouped_.rows(), tokens,
                  nullptr);
    routing_.keep(layer, policy_->keys(layer), grouped_.experts.data(), grouped_.rows());
  }
  active_ = true;
  begun_by_ = std::this_thread::get_id();
  layer_ = layer;
  tokens_ = tokens;
  ++pass_;
  failure_.clear();
  starved_ = freed_ = false;
  for (Ahead& ahead : ahead_) ahead.blocks = 0;
  let_go_ = 0;
  first_ = end_ = 0;
  bool complete = true;
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) {
    rows_[at(i)].next = 0;
    rows_[at(i)].pinned = true;
    rows_[at(i)].link_end = rows_[at(i)].far_begin = static_cast<std::int32_t>(blocks());
    const std::int32_t expert = grouped_.experts[at(i)];
    complete = complete && cache_.assigned(layer, expert) == blocks();
  }
  try {
    if (transfers_.cancel_stale(layer) > 0) freed_ = true;
    if (cache_.in_flight() > 0) {
      for (const std::int32_t expert : grouped_.experts) transfers_.promote(layer, expert, Priority::kDemand);
    }
    miss_ = miss;
    sharing_ = !complete && miss != Miss::kFetch && far_.possible();
    if (sharing_) divide();
    if (!complete) {
      acquire();
    } else {
      settle();  // what has been promoted may start
    }
  } catch (...) {
    abort_now();
    throw;
  }
  own_.begin_seconds += seconds(Clock::now() - begun);
}

std::int64_t ExpertRunner::finish(const float* x, std::int64_t tokens, float* out,
                                  const Interrupted& interrupted) {
  const Turn turn(this);
  check_finish(tokens);
  if (sharing_) throw std::logic_error("the CPU's part of a layer is for finish_on_device");
  if (options_.near_memory != nullptr) throw std::logic_error("the pages lie in memory of a device");
  host_.sum().start(options_.layout, options_.activation, grouped_, x, tokens, out,
                    options_.accumulator_bytes, options_.activation_bits);
  return finish_with(&host_, interrupted);
}

std::int64_t ExpertRunner::finish_on_device(void* stream, std::int64_t tokens, std::int64_t work,
                                            const DeviceSink::Launch& launch, const Interrupted& interrupted,
                                            const FarPart& far) {
  const Turn turn(this);
  check_finish(tokens);
  if (sharing_ && (far.x == nullptr || far.out == nullptr)) {
    throw std::invalid_argument("the CPU computes a part of this layer and was given no x and out");
  }
  far_part_ = far;
  launched_ = false;
  if (work < 1) throw std::invalid_argument("work is " + std::to_string(work) + "; it must be at least 1");
  order_ = link_->stream_order();
  stream_ = stream;
  device_.start(&grouped_, work, launch);
  return finish_with(&device_, interrupted);
}

std::int64_t ExpertRunner::far_blocks() const {
  const Turn turn(this);
  return sharing_ ? far_.computed() : 0;
}

Grouped ExpertRunner::rows() const {
  const Turn turn(this);
  if (!active_) throw std::logic_error("no layer has begun");
  return grouped_;
}

void ExpertRunner::with_rows(const std::function<void(const Grouped&, std::int64_t)>& body) const {
  const Turn turn(this);
  if (!active_) throw std::logic_error("no layer has begun");
  body(grouped_, tokens_);
}

void ExpertRunner::check_finish(std::int64_t tokens) const {
  if (!active_) throw std::logic_error("finish without begin");
  if (begun_by_ != std::this_thread::get_id()) {
    throw std::logic_error("finish by another thread than the one that began the layer: passes have met");
  }
  if (tokens != tokens_) {
    throw std::invalid_argument("finish was given " + std::to_string(tokens) + " tokens, begin " +
                                std::to_string(tokens_));
  }
}

std::int64_t ExpertRunner::finish_with(BlockSink* sink, const Interrupted& interrupted) {
  const std::int64_t walked = own_.bytes_computed;
  idle_since_ = asked_ = Clock::now();
  waited_ = Clock::duration::zero();
  sink_ = sink;
  try {
    while (sink_->next_group()) run_group(interrupted);
  } catch (...) {
    order_ = nullptr;
    abort_now();
    throw;
  }
  order_ = nullptr;
  active_ = false;
  ++own_.layers_run;
  own_.activations += grouped_.items();
  return own_.bytes_computed - walked;
}

void ExpertRunner::abort() {
  const Turn turn(this);
  if (active_) abort_now();
}

// Every expert is released first: only then may what is queued for it be cancelled.
void ExpertRunner::abort_now() {
  active_ = false;
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) {
    Row& row = rows_[at(i)];
    if (row.pinned) cache_.release(layer_, grouped_.experts[at(i)]);
    row.pinned = false;
    for (const Staged& staged : row.staged) {
      if (!staged.landed) transfers_.cancel(staged.page);
      transfers_.give_staging(staged.page);
    }
    row.staged.clear();
  }
  for (const std::int32_t expert : grouped_.experts) transfers_.cancel_queued(layer_, expert);
  let_go_ = 0;
}

// What has arrived goes to the cache and to the rows. A demand that failed is noted in failure_; a prefetch
// that failed is only not there, and will be demanded if its expert is needed.
void ExpertRunner::settle() {
  const std::vector<Transfers::Arrival>& arrivals = transfers_.poll();
  if (arrivals.empty()) return;
  idle_since_ = Clock::now();
  waited_ = Clock::duration::zero();
  for (const Transfers::Arrival& arrival : arrivals) {
    const Transfers::Flight& flight = arrival.flight;
    const bool of_pass = active_ && flight.pass == pass_;
    bool demanded = of_pass && arrival.owned && flight.kind == Transfers::Kind::kDemand;
    if (of_pass && flight.kind == Transfers::Kind::kStaging) {
      const auto found = std::lower_bound(grouped_.experts.begin(), grouped_.experts.end(), flight.expert);
      for (Staged& staged : rows_[at(found - grouped_.experts.begin())].staged) {
        if (staged.page == arrival.page) staged.landed = demanded = true;
      }
    }
    if (arrival.error != 0 && demanded && failure_.empty()) {
      failure_ = transfers_.describe(flight.layer, flight.expert, flight.block) +
                 " could not be read: " + std::generic_category().message(arrival.error);
      const std::string whole = link_->failure();
      if (!whole.empty()) failure_ += " (" + whole + ")";
    }
    const bool held = arrival.owned && arrival.error == 0 && cache_.pins(flight.layer, flight.expert) > 0;
    if (!held) freed_ = true;
    if (arrival.error != 0) starved_ = lost_ = true;
  }
}

void ExpertRunner::note_refusal() {
  if (transfers_.refusal().empty()) return;
  if (failure_.empty()) failure_ = "the link takes no more reads: " + transfers_.refusal();
  transfers_.forget_refusal();
}

// ---- pages for what is missing

// Queues fetches, in the order in which the rows will be computed, as far as there are pages: for the rows of
// the group that were let go, then for all that are pinned. Returns how many blocks.
std::int64_t ExpertRunner::acquire() {
  starved_ = freed_ = false;
  std::int64_t count = 0;
  for (std::int32_t i = first_; let_go_ > 0 && i < end_; ++i) count += stage(i);
  std::int64_t missing = 0;
  wanted_.clear();
  wanted_ends_.clear();
  const std::int32_t rows = grouped_.rows();
  for (std::int32_t place = first_; place < rows; ++place) {
    // All rows are one group on a device.
    const std::int32_t i = sharing_ ? far_.order()[at(rows - 1 - place)] : place;
    if (!rows_[at(i)].pinned) continue;
    const std::int32_t expert = grouped_.experts[at(i)];
    const std::int64_t lacks = rows_[at(i)].link_end - cache_.assigned(layer_, expert);
    if (lacks <= 0) continue;
    missing += lacks;
    wanted_.push_back(expert);
    wanted_ends_.push_back(rows_[at(i)].link_end);
  }
  if (missing > 0) {
    const Want want{layer_, layer_,  wanted_.data(), static_cast<std::int64_t>(wanted_.size()),
                    false,  missing, false,          wanted_ends_.data()};
    cache_.plan(want, &plan_);
    const std::int64_t fetched = transfers_.fetch(&plan_, Priority::kDemand, pass_);
    if (fetched < missing) starved_ = true;
    count += fetched;
  }
  note_refusal();
  return count;
}

// For a row that was let go: staging pages for the blocks that the cache does not have any more.
std::int64_t ExpertRunner::stage(std::int32_t index) {
  Row& row = rows_[at(index)];
  if (row.pinned || done(row)) return 0;
  const std::int32_t expert = grouped_.experts[at(index)];
  // What of it is there, or on its way, comes first.
  if (row.staged.empty() && row.next < cache_.assigned(layer_, expert)) {
    starved_ = true;
    return 0;
  }
  std::int64_t count = 0;
  for (;;) {
    const std::int32_t block = row.next + static_cast<std::int32_t>(row.staged.size());
    if (block == row.far_begin) return count;
    row.staged.reserve(row.staged.size() + 1);
    const PageId page = transfers_.stage(layer_, expert, block, pass_);
    if (page == kNoPage) break;
    row.staged.push_back({page, false});
    ++count;
  }
  starved_ = true;
  return count;
}

// ---- computing what is there

// Adds to sink_ what of the group is ready, whole rows until there is enough for one call; `flying`: or on
// its way.
void ExpertRunner::collect(bool flying) {
  steps_.clear();
  read_.clear();
  flying_.clear();
  for (std::int32_t i = first_; i < end_ && sink_->pending() < sink_->work_of_call(); ++i) {
    if (done(rows_[at(i)])) continue;
    const std::int32_t added = add_ready(i, flying);
    if (added > 0) steps_.push_back({i, added});
  }
}

std::int32_t ExpertRunner::add_ready(std::int32_t index, bool flying) {
  const Row& row = rows_[at(index)];
  const std::int64_t items = grouped_.tokens_of[at(index)];
  const std::int64_t most = std::max<std::int64_t>(1, (sink_->work_of_row() - sink_->pending()) / items);
  std::int32_t block = row.next;
  if (!row.staged.empty()) {
    for (const Staged& staged : row.staged) {
      if (block - row.next == most) break;
      // Wait 23: for a staging page to be filled.
      bool ready = true;
      MOECHAT_WAIT(23, ready = staged.landed || flying);
      if (!ready) break;
      add(index, block++, staged.page, staged.landed);
    }
    return block - row.next;
  }
  const std::int32_t expert = grouped_.experts[at(index)];
  // Wait 24: for a page to be filled.
  std::int32_t landed = cache_.assigned(layer_, expert);
  MOECHAT_WAIT(24, landed = cache_.resident(layer_, expert));
  std::int32_t end = flying ? cache_.assigned(layer_, expert) : landed;
  // A row that was let go may never be whole.
  if (options_.whole_experts && row.pinned && end < row.far_begin) return 0;
  end = static_cast<std::int32_t>(std::min<std::int64_t>({end, row.link_end, block + most}));
  for (; block < end; ++block) add(index, block, cache_.page(layer_, expert, block), block < landed);
  return block - row.next;
}

void ExpertRunner::add(std::int32_t row, std::int32_t block, PageId page, bool landed) {
  sink_->add(row, block, page);
  if (order_ == nullptr) return;
  read_.push_back(page);
  if (!landed) flying_.push_back(page);
}

// Puts the stream behind the copies of what was collected. False: look again, one of them has failed.
bool ExpertRunner::follow_fills(const Interrupted& interrupted) {
  if (flying_.empty()) return true;
  lost_ = false;
  for (bool ordered = false; !ordered && failure_.empty();) {
    const Clock::time_point begun = Clock::now();
    try {
      ordered =
          order_->fills_first(stream_, flying_.data(), static_cast<std::int64_t>(flying_.size()), kSlice);
    } catch (const std::exception& error) {
      failure_ = error.what();
    }
    const Clock::time_point now = Clock::now();
    own_.stall_seconds += seconds(now - begun);
    ask(interrupted, now);
    if (!ordered && failure_.empty() && stalled(now - begun)) failure_ = not_arrived();
  }
  // A copy that failed before it was given to the card has been reported by now, also one that was asked for
  // by a prefetch: its page holds nothing, and the cache has forgotten the block.
  settle();
  if (failure_.empty() && !lost_) return true;
  sink_->drop();
  steps_.clear();
  return false;
}

void ExpertRunner::mark_reads() {
  if (order_ == nullptr) return;
  try {
    order_->reads_first(stream_, read_.data(), static_cast<std::int64_t>(read_.size()));
  } catch (const std::exception& error) {
    failure_ = error.what();
    give_up();
  }
}

void ExpertRunner::give_up() const {
  if (link_->stream_order() != nullptr && !link_->failure().empty()) throw DeviceLostError(link_->failure());
  throw LinkError(failure_ + "; check the store's files and their disk, then try again");
}

void ExpertRunner::compute() {
  const Clock::time_point begun = Clock::now();
  try {
    own_.bytes_computed += sink_->compute() * options_.layout.record_bytes;
  } catch (...) {
    // Some of the kernels may have been launched: they read all the same.
    mark_reads();
    throw;
  }
  mark_reads();
  ++own_.kernel_calls;
  idle_since_ = Clock::now();
  waited_ = Clock::duration::zero();
  own_.compute_seconds += seconds(idle_since_ - begun);
  for (const Step& step : steps_) {
    Row& row = rows_[at(step.row)];
    row.next += step.blocks;
    if (!row.staged.empty()) {
      for (std::int32_t i = 0; i < step.blocks; ++i) transfers_.give_staging(row.staged[at(i)].page);
      row.staged.erase(row.staged.begin(), row.staged.begin() + step.blocks);
      own_.blocks_staged += step.blocks;
      freed_ = true;
    }
    if (done(row)) end_row(step.row);
  }
}

// Nothing of a row is left to be launched.
void ExpertRunner::end_row(std::int32_t index) {
  Row& row = rows_[at(index)];
  if (row.pinned) {
    row.pinned = false;
    cache_.release(layer_, grouped_.experts[at(index)]);
  } else {
    --let_go_;
  }
  freed_ = true;
}

// ---- what the CPU computes where it lies

// Leaves open what the CPU may compute of a layer that begins.
void ExpertRunner::divide() {
  const double* const keys = policy_->keys(layer_);
  far_.begin(layer_, &grouped_, keys, tokens_);
  const LayerTarget target = cache_.targets()[at(layer_)];
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) {
    if (!far_.eligible(i)) continue;
    Row& row = rows_[at(i)];
    const std::int32_t expert = grouped_.experts[at(i)];
    std::int32_t brought = 0;
    if (miss_ == Miss::kCompute) {
      // What a target keeps comes in once; nothing else would bring it.
      const double* const end = keys + options_.experts;
      const auto above = std::count_if(keys, end, [&](double key) { return key > keys[expert]; });
      if (above < target.experts) brought = target.blocks;
    }
    row.link_end = std::max(brought, cache_.assigned(layer_, expert));
  }
  if (miss_ == Miss::kBoth) give_link(far_.of_link(open(), link_->stats().bandwidth));
}

std::int64_t ExpertRunner::open() const {
  std::int64_t count = 0;
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) {
    count += rows_[at(i)].far_begin - rows_[at(i)].link_end;
  }
  return count;
}

// Blocks of the layer that the link was given and that have not landed.
std::int64_t ExpertRunner::on_the_way() const {
  std::int64_t count = 0;
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) {
    const std::int32_t expert = grouped_.experts[at(i)];
    if (!done(rows_[at(i)])) count += std::max(0, rows_[at(i)].link_end - cache_.resident(layer_, expert));
  }
  return count;
}

// Makes so many open blocks the link's; acquire() asks for them.
void ExpertRunner::give_link(std::int64_t count) {
  for (auto place = far_.order().rbegin(); place != far_.order().rend() && count > 0; ++place) {
    Row& row = rows_[at(*place)];
    const std::int64_t given = std::min<std::int64_t>(count, row.far_begin - row.link_end);
    row.link_end += static_cast<std::int32_t>(given);
    count -= given;
  }
}

// A prefetch of this very layer may have brought what was open.
void ExpertRunner::take_in() {
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) {
    Row& row = rows_[at(i)];
    if (!row.pinned) continue;
    const std::int32_t held = cache_.assigned(layer_, grouped_.experts[at(i)]);
    row.link_end = std::max(row.link_end, std::min(held, row.far_begin));
  }
}

// What has no page yet of the rows that the CPU may compute is open again.
void ExpertRunner::take_back() {
  for (const std::int32_t index : far_.order()) {
    if (!far_.eligible(index)) continue;
    Row& row = rows_[at(index)];
    if (row.pinned) {
      row.link_end = std::min(row.far_begin, cache_.assigned(layer_, grouped_.experts[at(index)]));
    }
  }
}

// One round: the link gets its part of what is left, the CPU computes a piece of its own. There is an open
// block, and after finitely many rounds there is none: each takes at least one.
void ExpertRunner::share(const Interrupted& interrupted) {
  const std::int64_t left = open();
  if (miss_ == Miss::kBoth && !starved_) {
    const std::int64_t coming = on_the_way();
    const std::int64_t part = far_.of_link(left + coming, link_->stats().bandwidth) - coming;
    if (part > 0) {
      give_link(std::min(part, left - 1));
      acquire();
      if (!failure_.empty()) return;
    }
  }
  std::int64_t piece = far_.piece(open());
  for (const std::int32_t index : far_.order()) {
    if (piece == 0) break;
    Row& row = rows_[at(index)];
    const auto taken = static_cast<std::int32_t>(std::min<std::int64_t>(piece, row.far_begin - row.link_end));
    if (taken == 0) continue;
    far_.take(index, row.far_begin - taken, row.far_begin);
    row.far_begin -= taken;
    piece -= taken;
  }
  const Clock::time_point begun = Clock::now();
  own_.blocks_far += far_.compute(far_part_.x, far_part_.out);
  const Clock::time_point now = Clock::now();
  own_.far_seconds += seconds(now - begun);
  for (const std::int32_t index : far_.order()) {
    const Row& row = rows_[at(index)];
    if (row.pinned && done(row)) end_row(index);
  }
  idle_since_ = now;
  waited_ = Clock::duration::zero();
  ask(interrupted, now);
}

bool ExpertRunner::group_done() const {
  return std::all_of(rows_.begin() + first_, rows_.begin() + end_,
                     [this](const Row& row) { return done(row); });
}

// Something is on its way that the group can compute.
bool ExpertRunner::group_pending() const {
  for (std::int32_t i = first_; i < end_; ++i) {
    const Row& row = rows_[at(i)];
    if (done(row)) continue;
    if (!row.staged.empty()) return true;  // what has landed of it would have been computed
    const std::int32_t expert = grouped_.experts[at(i)];
    if (cache_.assigned(layer_, expert) > cache_.resident(layer_, expert)) return true;
  }
  return false;
}

// Computes the rows of one group, each as far as it is there, in any order.
//
// Why it ends. A turn of the loop computes something, or waits for a transfer of this group (which ends, or
// fails, or stalls: then the pass ends), or `make_room` is asked, which
//   1. queues fetches for the group if there is any page to be had: acquire() serves the group before all
//      rows after it, so the next turn waits for a transfer of the group;
//   2. else cancels prefetches that have not started, or says that some transfer that is not of a pinned row
//      is under way: when it ends its page is free or surplus;
//   3. else lets the last row go that holds pages which could be taken, from the end of the layer down to the
//      group itself.
// Each happens a bounded number of times without a block being computed. When none of them is left, all pages
// are free, surplus or protected, nothing is under way, and the cache has promised that targets leave
// `reserve` pages, at least one: so 1 would have found a page. A row that was let go computes what is left of
// it in the cache, then passes the rest through as few as one staging page; that never depends on a page that
// another row holds. Its blocks are computed before anything else is fetched (the order in the loop below),
// so they are not taken, and fetched, over and over.
void ExpertRunner::run_group(const Interrupted& interrupted) {
  first_ = sink_->first_row();
  end_ = sink_->end_row();
  if (let_go_ > 0) starved_ = freed_ = true;
  for (;;) {
    settle();
    if (failure_.empty() && let_go_ == 0 && starved_ && freed_) {
      acquire();
      freed_ = !starved_;  // there may be pages left over
    }
    if (freed_ && !starved_ && let_go_ == 0) {
      freed_ = false;
      for (Ahead& ahead : ahead_) fetch_ahead(&ahead);
    }
    if (!failure_.empty()) {
      give_up();
    }
    if (sharing_) take_in();
    if (sharing_ && launched_) {
      // No page is left for what the link was given: the CPU computes that too.
      if (starved_) take_back();
      if (open() > 0) {
        share(interrupted);
        if (!starved_) continue;
        // What has landed is launched now, so that its pages come back and the link goes on.
        settle();
      }
    }
    launched_ = true;
    collect(false);
    if (sharing_ && steps_.empty() && open() > 0) continue;
    if (steps_.empty() && order_ != nullptr) {
      collect(true);
      if (!follow_fills(interrupted)) continue;
    }
    if (!steps_.empty()) {
      compute();
      ask(interrupted, idle_since_);
      continue;
    }
    if (group_done()) break;
    if (let_go_ > 0 && starved_ && freed_ && acquire() > 0) continue;
    if (!group_pending() && make_room()) continue;
    if (failure_.empty()) wait(interrupted);
  }
  const Clock::time_point begun = Clock::now();
  sink_->finish_group();
  own_.compute_seconds += seconds(Clock::now() - begun);
}

// True: look again. False: wait.
bool ExpertRunner::make_room() {
  if (acquire() > 0 || !failure_.empty()) return true;
  for (std::int32_t i = 1; i <= options_.layers; ++i) {
    // The layer whose turn is farthest away first.
    const std::int32_t layer = (layer_ + options_.layers + 1 - i) % options_.layers;
    if (transfers_.cancel_stale(layer) > 0) return true;
  }
  if (others_in_flight()) return false;
  if (let_one_go()) return true;
  throw std::logic_error("no page for " + missing_block() + ", although nothing is in flight: " +
                         std::to_string(cache_.available()) + " of " + std::to_string(slab_.pages()) +
                         " pages are available; the cache says: " + cache_.check());
}

bool ExpertRunner::others_in_flight() const {
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

bool ExpertRunner::let_one_go() {
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

// ---- waiting

void ExpertRunner::wait(const Interrupted& interrupted) {
  const Clock::time_point begun = Clock::now();
  const bool arrived = wait_for_link(interrupted);
  const Clock::time_point now = Clock::now();
  own_.stall_seconds += seconds(now - begun);
  if (arrived || !stalled(now - begun)) return;
  throw LinkError(not_arrived() + "; check the disk that holds the store, then try again");
}

std::string ExpertRunner::not_arrived() const {
  return missing_block() + " has not arrived, and nothing else has, for " + decimal(seconds(waited_)) +
         " seconds (the limit is " + decimal(options_.stall_seconds) + ")";
}

// After a slice of waiting in vain. A process that is stopped and continued, or a machine that slept, has not
// waited all that time: a slice counts for a few times its length at most.
bool ExpertRunner::stalled(Clock::duration slice) {
  waited_ += std::min<Clock::duration>(slice, 4 * kSlice);
  return seconds(waited_) >= options_.stall_seconds;
}

// One slice; true when something has arrived.
bool ExpertRunner::wait_for_link(const Interrupted& interrupted) {
  const std::chrono::duration<double> limit(options_.stall_seconds);
  const auto slice = std::min(std::chrono::duration_cast<std::chrono::microseconds>(kSlice),
                              std::chrono::duration_cast<std::chrono::microseconds>(
                                  std::min(limit, std::chrono::duration<double>(1.0))));
  // Wait 25: for the link.
  bool arrived = false;
  MOECHAT_WAIT(25, arrived = link_->wait(slice));
  ask(interrupted, Clock::now());
  return arrived;
}

void ExpertRunner::ask(const Interrupted& interrupted, Clock::time_point now) {
  if (!interrupted || now - asked_ < kSlice) return;
  asked_ = now;
  interrupted();
}

std::string ExpertRunner::missing_block() const {
  for (std::int32_t i = first_; i < end_; ++i) {
    if (!done(rows_[at(i)])) return transfers_.describe(layer_, grouped_.experts[at(i)], rows_[at(i)].next);
  }
  return "a block";
}

void ExpertRunner::drain(const Interrupted& interrupted) {
  const Turn turn(this);
  idle_since_ = asked_ = Clock::now();
  waited_ = Clock::duration::zero();
  for (;;) {
    settle();
    // Wait 26: for all that is under way.
    bool idle = true;
    MOECHAT_WAIT(26, idle = cache_.in_flight() == 0);
    if (idle) return;
    const Clock::time_point begun = Clock::now();
    if (wait_for_link(interrupted) || !stalled(Clock::now() - begun)) continue;
    throw LinkError(std::to_string(cache_.in_flight()) +
                    " blocks are on their way, but none has arrived for " + decimal(options_.stall_seconds) +
                    " seconds; check the disk that holds the store");
  }
}

// ---- speculation

std::int64_t ExpertRunner::prefetch(std::int32_t layer, const float* scores, std::int32_t experts,
                                    std::int64_t max_blocks, Priority priority) {
  const Turn turn(this);
  const Clock::time_point begun = Clock::now();
  if (layer < 0 || layer >= options_.layers) {
    throw std::invalid_argument("layer is " + std::to_string(layer) + "; it must be from 0 to " +
                                std::to_string(options_.layers - 1));
  }
  settle();
  Ahead& ahead = ahead_[static_cast<int>(priority)];
  std::vector<std::int32_t>& ranked = ahead.ranked;
  if (scores == nullptr) {
    ranked.resize(at(options_.experts));
    for (std::int32_t expert = 0; expert < options_.experts; ++expert) ranked[at(expert)] = expert;
  } else {
    const std::int32_t best = std::clamp(experts, 0, options_.experts);
    const std::int32_t counted = priority == Priority::kNear ? routing_.depth() : 0;
    rank_best(scores, options_.experts, std::max(best, counted), &sortable_, &ranked);
    if (counted > 0) routing_.predict(layer, ranked.data(), counted);
    ranked.resize(at(best));
    policy_->predict(layer, ranked.data(), best);
  }
  ahead.layer = layer;
  ahead.blocks = std::max<std::int64_t>(max_blocks, 0);
  const bool nearer = priority == Priority::kNear && cache_.in_flight() > 0;
  if (nearer) {
    for (const std::int32_t expert : ranked) transfers_.promote(layer, expert, priority);
  }
  // Pages that have become free since the layer began are its own first.
  if (active_ && starved_ && freed_ && failure_.empty()) acquire();
  const std::int64_t count = active_ && starved_ ? 0 : fetch_ahead(&ahead);
  own_.begin_seconds += seconds(Clock::now() - begun);
  return count;
}

// Queues what of a prefetch has a page. Returns how many blocks. The experts that lack nothing are named too:
// a prefetch takes no page from what it names.
std::int64_t ExpertRunner::fetch_ahead(Ahead* ahead) {
  if (ahead->blocks == 0) return 0;
  std::int64_t missing = 0;
  for (const std::int32_t expert : ahead->ranked) missing += blocks() - cache_.assigned(ahead->layer, expert);
  if (missing == 0 || !link_->failure().empty()) {
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
  transfers_.forget_refusal();
  ahead->blocks = count == missing ? 0 : ahead->blocks - count;
  return count;
}

// ---- figures

void ExpertRunner::rest() const { const Turn turn(this); }

std::int64_t ExpertRunner::begun_tokens() const {
  const Turn turn(this);
  return active_ ? tokens_ : -1;
}

void ExpertRunner::set_targets(const std::vector<LayerTarget>& targets) {
  const Turn turn(this);
  cache_.set_targets(targets);
  freed_ = true;
}

RunnerStats ExpertRunner::stats() const {
  const Turn turn(this);
  RunnerStats stats = own_;
  stats.cache = cache_.counters();
  stats.link = link_->stats();
  for (int priority = 0; priority < kPriorities; ++priority) {
    stats.link.bytes[priority] -= link_base_.bytes[priority];
    stats.link.transfers[priority] -= link_base_.transfers[priority];
  }
  stats.link.operations -= link_base_.operations;
  stats.link.errors -= link_base_.errors;
  stats.link.cancelled -= link_base_.cancelled;
  stats.link.busy_seconds -= link_base_.busy_seconds;
  stats.pages = slab_.pages();
  stats.pages_peak = transfers_.pages_peak();
  stats.page_bytes = slab_.page_bytes();
  return stats;
}

void ExpertRunner::reset_stats() {
  const Turn turn(this);
  own_ = {};
  cache_.reset_counters();
  link_base_ = link_->stats();
  transfers_.reset_peak();
}

RoutingCounts ExpertRunner::routing_counts() const {
  const Turn turn(this);
  return routing_.counts();
}

void ExpertRunner::reset_routing_counts() {
  const Turn turn(this);
  routing_.reset();
}

void ExpertRunner::hurry_link(bool on) {
  const Turn turn(this);
  link_->hurry(on);
}

std::vector<std::int16_t> ExpertRunner::residency() const {
  const Turn turn(this);
  std::vector<std::int16_t> blocks;
  blocks.reserve(at(std::int64_t{options_.layers} * options_.experts));
  for (std::int32_t layer = 0; layer < options_.layers; ++layer) {
    for (std::int32_t expert = 0; expert < options_.experts; ++expert) {
      blocks.push_back(static_cast<std::int16_t>(cache_.resident(layer, expert)));
    }
  }
  return blocks;
}

std::string ExpertRunner::check() const {
  const Turn turn(this);
  return cache_.check();
}

std::int64_t ExpertRunner::huge_bytes() const {
  const Turn turn(this);
  return slab_.huge_bytes();
}

std::int64_t ExpertRunner::resident_bytes() const {
  const Turn turn(this);
  return slab_.resident_bytes();
}

}  // namespace moechat
