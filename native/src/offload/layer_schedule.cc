#include "offload/layer_schedule.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "link/mutation.h"

namespace moechat {
namespace {

// A process that is stopped and continued, or a machine that slept, has not waited all that time: a wait
// counts for so many seconds at most.
constexpr double kMostWaited = 0.2;
// A block has landed recently if it did not three layers ago: a device that runs ahead would have missed it.
constexpr std::uint64_t kRecent = 3;

// Passes of so many tokens launch all blocks that are on their way together. The blocks of an expert are read
// once by the kernel for few tokens up to here.
constexpr std::int64_t kTokensOfOneLaunch = 8;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

std::string decimal(double value) {
  std::string text = std::to_string(value);
  text.erase(text.find('.') + 2);
  return text;
}

ScheduleOptions checked(ScheduleOptions options, const EvictionPolicy* policy, const Link* link) {
  const auto refuse = [](const std::string& message) { throw std::invalid_argument(message); };
  if (policy == nullptr || link == nullptr) refuse("a schedule needs a policy and a link");
  if (options.layers < 1 || options.experts < 1 || options.blocks < 1) {
    refuse("layers, experts and blocks are " + std::to_string(options.layers) + ", " +
           std::to_string(options.experts) + " and " + std::to_string(options.blocks) +
           "; each must be at least 1");
  }
  if (policy->layers() != options.layers || policy->experts() != options.experts) {
    refuse("the policy is for " + std::to_string(policy->layers()) + " layers of " +
           std::to_string(policy->experts()) + " experts, the model has " + std::to_string(options.layers) +
           " of " + std::to_string(options.experts));
  }
  if (options.pages < 1 || options.pages >= kNoPage) {
    refuse("pages is " + std::to_string(options.pages) + "; it must be from 1 to " +
           std::to_string(kNoPage - 1));
  }
  if (!options.mapped_records.empty()) {
    if (options.near_memory != nullptr) refuse("mapped experts are for pages in memory of the host");
    if (options.mapped_records.size() != at(std::int64_t{options.layers} * options.experts)) {
      refuse("mapped_records has " + std::to_string(options.mapped_records.size()) +
             " experts; there must be one entry for each of " + std::to_string(options.layers) +
             " layers of " + std::to_string(options.experts));
    }
  }
  if (!(options.stall_seconds > 0)) {
    refuse("stall_seconds is " + std::to_string(options.stall_seconds) + "; it must be positive");
  }
  return options;
}

}  // namespace

LayerSchedule::LayerSchedule(ScheduleOptions options, std::unique_ptr<EvictionPolicy> policy,
                             std::unique_ptr<Link> link, RoutingCounter* routing)
    : options_(checked(std::move(options), policy.get(), link.get())),
      policy_(std::move(policy)),
      slab_(options_.pages, options_.record_bytes, options_.near_memory),
      cache_(options_.layers, options_.experts, options_.blocks, &slab_, policy_.get(), options_.targets,
             options_.reserve, options_.rules),
      link_(std::move(link)),
      transfers_(&cache_, &slab_, link_.get()),
      far_(options_.record_bytes),
      routing_(routing),
      layer_(options_.layers - 1),
      pass_(kRecent),
      landed_(at(std::int64_t{options_.layers} * options_.experts)),
      far_used_(landed_.size()),
      step_(options_.adaptive > 0
                ? std::make_unique<AdaptiveStep>(options_.layers, options_.experts,
                                                 static_cast<double>(options_.blocks * options_.record_bytes),
                                                 options_.adaptive, AdaptiveStep::kStalls,
                                                 AdaptiveStep::kReady, options_.adaptive_most)
                : nullptr),
      windows_(at(std::int64_t{2} * options_.layers)) {
  std::vector<PageId> pages(at(options_.blocks));
  for (std::size_t place = 0; place < options_.mapped_records.size(); ++place) {
    const unsigned char* record = options_.mapped_records[place];
    if (record == nullptr) continue;
    for (PageId& page : pages) {
      page = slab_.add_outside(record);
      record += options_.record_bytes;
    }
    const auto number = static_cast<std::int64_t>(place);
    cache_.fix(static_cast<std::int32_t>(number / options_.experts),
               static_cast<std::int32_t>(number % options_.experts), pages);
  }
}

void LayerSchedule::check_layer(std::int32_t layer) const {
  if (layer >= 0 && layer < options_.layers) return;
  throw std::invalid_argument("layer is " + std::to_string(layer) + "; it must be from 0 to " +
                              std::to_string(options_.layers - 1));
}

// ---- kernels that look pages up

bool LayerSchedule::keep_page_table() {
  if (link_->stream_order() == nullptr) return false;
  if (table_ == nullptr) {
    table_ = std::make_unique<PageTable>(&cache_, slab_.pages());
    transfers_.follow_readers(table_.get());
  }
  return true;
}

bool LayerSchedule::ready(std::int32_t layer, const std::int32_t* experts, std::int64_t count) const {
  return std::all_of(experts, experts + count,
                     [&](std::int32_t expert) { return cache_.resident(layer, expert) == options_.blocks; });
}

// ---- a layer

void LayerSchedule::begin(std::int32_t layer, const std::int64_t* index, const float* weight,
                          std::int64_t tokens, std::int64_t k, Miss miss) {
  check_layer(layer);
  if (tokens < 0 || k < 0) throw std::invalid_argument("tokens and k cannot be negative");
  if (active_) abort();
  group_by_expert(index, weight, tokens, k, options_.experts, &grouped_);
  if (rows_.size() < grouped_.experts.size()) rows_.resize(grouped_.experts.size());
  settle();
  close_window();
  if (step_ != nullptr) {
    measure_step(tokens == 1);
    if (tokens == 1) {
      step_->needed(layer, grouped_.experts.data(), grouped_.rows(),
                    [&](std::int32_t expert) { return cache_.resident(layer, expert) == options_.blocks; });
    }
  }
  // What the CPU can compute is not worth waiting for in a queue. What is needed is divided anew below.
  if (miss != Miss::kFetch && tokens <= FarShare::kMostItems) transfers_.cancel_stale(layer);
  const std::int32_t* const experts = grouped_.experts.data();
  const std::int32_t rows = grouped_.rows();
  if (tokens > 0) {
    if (routing_ != nullptr) routing_->access(layer, policy_->keys(layer), experts, rows, tokens);
    cache_.access(layer, experts, grouped_.tokens_of.data(), rows, tokens, nullptr);
    if (routing_ != nullptr) routing_->keep(layer, policy_->keys(layer), experts, rows);
  }
  active_ = true;
  layer_ = layer;
  tokens_ = tokens;
  ++pass_;
  failure_.clear();
  is_damaged_ = false;
  starved_ = freed_ = false;
  for (Prefetch& prefetch : prefetches_) prefetch.blocks = 0;
  if (!ahead_.stays) ahead_.blocks = 0;
  unpinned_rows_ = 0;
  first_ = end_ = 0;
  far_blocks_ = 0;
  bool complete = true;  // every block has a page
  bool ready = true;     // every block is there
  for (std::int32_t i = 0; i < rows; ++i) {
    Row& row = row_at(i);
    row.next = 0;
    row.pinned = true;
    row.link_end = row.far_begin = options_.blocks;
    far_used_[place(layer, expert_of(i))] = 0;
    complete = complete && cache_.assigned(layer, expert_of(i)) == options_.blocks;
    ready = ready && cache_.resident(layer, expert_of(i)) == options_.blocks;
  }
  undisturbed_ = ready && std::none_of(experts, experts + rows, [&](std::int32_t expert) {
                   return landed_[place(layer, expert)] + kRecent > pass_;
                 });
  try {
    if (transfers_.cancel_stale(layer) > 0) freed_ = true;
    if (cache_.in_flight() > 0) {
      for (const std::int32_t expert : grouped_.experts) transfers_.promote(layer, expert, Priority::kDemand);
    }
    miss_ = miss;
    sharing_ = !ready && miss != Miss::kFetch;
    if (sharing_) divide();
    if (!complete) {
      acquire();
    } else {
      settle();  // promoted transfers may start
    }
    if (!sharing_) open_window();
  } catch (...) {
    abort();
    throw;
  }
}

void LayerSchedule::finish(LayerExecutor* executor) {
  executor_ = executor;
  waited_ = 0;
  resident_launched_ = false;
  try {
    while (executor_->next_group()) run_group();
  } catch (...) {
    abort();
    throw;
  }
  active_ = false;
  ++own_.layers_run;
  own_.activations += grouped_.items();
}

// Every expert is released first: only then may its queued blocks be cancelled.
void LayerSchedule::abort() {
  if (!active_) return;
  active_ = false;
  for (std::int32_t i = 0; i < grouped_.rows(); ++i) {
    Row& row = row_at(i);
    if (row.pinned) cache_.release(layer_, expert_of(i));
    row.pinned = false;
    for (const Staged& staged : row.staged) {
      if (!staged.landed) transfers_.cancel(staged.page);
      transfers_.give_staging(staged.page);
    }
    row.staged.clear();
  }
  for (const std::int32_t expert : grouped_.experts) transfers_.cancel_queued(layer_, expert);
  unpinned_rows_ = 0;
}

// ---- arrivals

// Passes arrivals to the cache and to the rows. The failure of a demand goes to failure_; a prefetch that
// failed has only not arrived, and will be demanded if its expert is needed.
void LayerSchedule::settle() {
  const std::vector<Transfers::Arrival>& arrivals = transfers_.poll();
  if (arrivals.empty()) return;
  waited_ = 0;
  for (const Transfers::Arrival& arrival : arrivals) {
    const Transfers::Flight& flight = arrival.flight;
    if (arrival.owned && arrival.error == 0) landed_[place(flight.layer, flight.expert)] = pass_;
    const bool of_pass = active_ && flight.pass == pass_;
    bool demanded = of_pass && arrival.owned && flight.kind == Transfers::Kind::kDemand;
    if (of_pass && flight.kind == Transfers::Kind::kStaging) {
      const auto found = std::lower_bound(grouped_.experts.begin(), grouped_.experts.end(), flight.expert);
      for (Staged& staged : rows_[at(found - grouped_.experts.begin())].staged) {
        if (staged.page == arrival.page) staged.landed = demanded = true;
      }
    }
    if (arrival.error != 0 && demanded && failure_.empty()) {
      is_damaged_ = arrival.error == kRecordDamaged;
      damaged_ = flight;
      failure_ = transfers_.describe(flight.layer, flight.expert, flight.block) +
                 (is_damaged_ ? " is damaged: it does not have its checksum"
                              : " could not be read: " + std::generic_category().message(arrival.error));
      const std::string whole = link_->failure();
      if (!whole.empty()) failure_ += " (" + whole + ")";
    }
    const bool held = arrival.owned && arrival.error == 0 && cache_.pins(flight.layer, flight.expert) > 0;
    if (!held) freed_ = true;
    if (arrival.error != 0) starved_ = transfer_failed_ = true;
  }
}

void LayerSchedule::note_refusal() {
  if (transfers_.refusal().empty()) return;
  if (failure_.empty()) failure_ = "the link takes no more reads: " + transfers_.refusal();
  transfers_.forget_refusal();
}

// ---- computing

// Adds the ready blocks of the group to the executor, whole rows until there is enough for one call;
// `flying`: also those on their way.
void LayerSchedule::collect(bool flying) {
  steps_.clear();
  for (std::int32_t i = first_; i < end_ && executor_->pending() < executor_->work_of_call(); ++i) {
    if (done(row_at(i))) continue;
    const std::int32_t added = add_ready(i, flying);
    if (added > 0) steps_.push_back({i, added});
  }
}

std::int32_t LayerSchedule::add_ready(std::int32_t index, bool flying) {
  const Row& row = row_at(index);
  const std::int64_t items = grouped_.tokens_of[at(index)];
  const std::int64_t most =
      std::max<std::int64_t>(1, (executor_->work_of_row() - executor_->pending()) / items);
  std::int32_t block = row.next;
  if (!row.staged.empty()) {
    for (const Staged& staged : row.staged) {
      if (block - row.next == most) break;
      // Wait 23: for a staging page to be filled.
      bool ready = true;
      MOECHAT_WAIT(23, ready = staged.landed || flying);
      if (!ready) break;
      executor_->add(index, block++, staged.page, staged.landed);
    }
    return block - row.next;
  }
  const std::int32_t expert = expert_of(index);
  // Wait 24: for a page to be filled.
  std::int32_t landed = cache_.assigned(layer_, expert);
  MOECHAT_WAIT(24, landed = cache_.resident(layer_, expert));
  std::int32_t end = flying ? cache_.assigned(layer_, expert) : landed;
  // An unpinned row may never be whole.
  if (options_.whole_experts && row.pinned && end < row.far_begin) return 0;
  end = static_cast<std::int32_t>(std::min<std::int64_t>({end, row.link_end, block + most}));
  for (; block < end; ++block) {
    executor_->add(index, block, cache_.page(layer_, expert, block), block < landed);
  }
  return block - row.next;
}

// Puts the collected blocks behind their copies. False: look again, one of the copies has failed.
bool LayerSchedule::follow_copies() {
  transfer_failed_ = false;
  for (bool ordered = false; !ordered && failure_.empty();) {
    const double begun = executor_->now();
    try {
      ordered = executor_->follow_copies();
    } catch (const LinkFailure& error) {
      failure_ = error.what();
    }
    const double waited = executor_->now() - begun;
    own_.stall_seconds += waited;
    executor_->poll_interrupt();
    if (!ordered && failure_.empty() && stalled(waited)) failure_ = not_arrived();
  }
  // A copy that failed before it was given to the card has been reported by now, also that of a prefetch: its
  // page holds nothing, and the cache has forgotten the block.
  settle();
  if (failure_.empty() && !transfer_failed_) return true;
  executor_->drop();
  steps_.clear();
  return false;
}

void LayerSchedule::compute() {
  const double begun = executor_->now();
  try {
    own_.bytes_computed += executor_->compute() * options_.record_bytes;
  } catch (const LinkFailure& error) {
    failure_ = error.what();
    give_up();
  }
  ++own_.kernel_calls;
  waited_ = 0;
  own_.compute_seconds += executor_->now() - begun;
  for (const Step& step : steps_) {
    Row& row = row_at(step.row);
    row.next += step.blocks;
    if (!row.staged.empty()) {
      for (std::int32_t i = 0; i < step.blocks; ++i) transfers_.give_staging(row.staged[at(i)].page);
      row.staged.erase(row.staged.begin(), row.staged.begin() + step.blocks);
      own_.blocks_staged += step.blocks;
      freed_ = true;
    }
    if (done(row)) end_row(step.row);
  }
  executor_->poll_interrupt();
}

// Every block of a row has been computed or launched.
void LayerSchedule::end_row(std::int32_t index) {
  Row& row = row_at(index);
  if (row.pinned) {
    row.pinned = false;
    cache_.release(layer_, expert_of(index));
  } else {
    --unpinned_rows_;
  }
  freed_ = true;
}

bool LayerSchedule::group_done() const {
  return std::all_of(rows_.begin() + first_, rows_.begin() + end_, done);
}

// Something is on its way that the group can compute.
bool LayerSchedule::group_pending() const {
  for (std::int32_t i = first_; i < end_; ++i) {
    if (done(row_at(i))) continue;
    if (!row_at(i).staged.empty()) return true;  // its landed blocks would have been computed
    const std::int32_t expert = expert_of(i);
    if (cache_.assigned(layer_, expert) > cache_.resident(layer_, expert)) return true;
  }
  return false;
}

// Computes the rows of one group, each as far as it is there, in any order.
//
// Why it ends. An iteration computes something, or waits for a transfer of this group (which ends, or fails,
// or stalls: then the pass ends), or calls `make_room`, which
//   1. queues fetches for the group if there is any page to be had: acquire() serves the group before all
//      rows after it, so the next iteration waits for a transfer of the group;
//   2. else cancels prefetches that have not started, or reports that some transfer that is not of a pinned
//      row is under way: when it ends its page is free or surplus;
//   3. else unpins the last row that holds pages which could be taken, from the end of the layer down to the
//      group itself.
// Each happens a bounded number of times without a block being computed. When none of them is left, all pages
// are free, surplus or protected, nothing is under way, and the cache has promised that targets leave
// `reserve` pages, at least one: so 1 would have found a page. An unpinned row computes its blocks in the
// cache, then passes the rest through as few as one staging page; that never depends on a page that another
// row holds. Its blocks are computed before anything else is fetched (the order in the loop below), so they
// are not evicted, and fetched, over and over.
void LayerSchedule::run_group() {
  first_ = executor_->first_row();
  end_ = executor_->end_row();
  if (unpinned_rows_ > 0) starved_ = freed_ = true;
  for (;;) {
    settle();
    if (failure_.empty() && unpinned_rows_ == 0 && starved_ && freed_) {
      acquire();
      freed_ = !starved_;  // there may be pages left over
    }
    if (sharing_ && resident_launched_ && unassigned() == 0 && window_opened_ < 0) {
      open_window();
      freed_ = freed_ || window_opened_ >= 0;
    }
    if (freed_ && !starved_ && unpinned_rows_ == 0 && !(sharing_ && unassigned() > 0)) {
      freed_ = false;
      for (int priority = 0; priority < kPriorities; ++priority) {
        continue_prefetch(&prefetches_[priority], static_cast<Priority>(priority));
      }
      continue_ahead();
    }
    if (!failure_.empty()) give_up();
    if (sharing_) absorb_landed();
    if (sharing_ && resident_launched_) {
      if (starved_) reopen_without_pages();
      divide_again();
      if (!failure_.empty()) continue;
      if (unassigned() > 0) {
        share();
        if (!starved_) continue;
        // Landed blocks are launched now, so that their pages become free and the link goes on.
        settle();
      }
    }
    const bool first = !resident_launched_;
    resident_launched_ = true;
    // For few tokens the kernels take less time than launching them: one launch for what is resident, then
    // one for everything that is on its way. With many, landed blocks are computed while others are copied.
    const bool dividing = sharing_ && unassigned() > 0;
    bool flying = executor_->orders_copies() && !first && !dividing && tokens_ <= kTokensOfOneLaunch;
    collect(flying);
    if (sharing_ && steps_.empty() && (first || dividing)) continue;
    if (steps_.empty() && !flying && executor_->orders_copies()) {
      flying = true;
      collect(true);
    }
    if (flying && !steps_.empty() && !follow_copies()) continue;
    if (!steps_.empty()) {
      compute();
      continue;
    }
    if (group_done()) break;
    if (unpinned_rows_ > 0 && starved_ && freed_ && acquire() > 0) continue;
    if (!group_pending() && make_room()) continue;
    if (failure_.empty()) wait();
  }
  const double begun = executor_->now();
  executor_->finish_group();
  own_.compute_seconds += executor_->now() - begun;
}

// ---- waiting and failing

void LayerSchedule::wait() {
  const double begun = executor_->now();
  const bool arrived = executor_->wait();
  executor_->poll_interrupt();
  const double waited = executor_->now() - begun;
  own_.stall_seconds += waited;
  if (arrived || !stalled(waited)) return;
  throw LinkError(not_arrived() + "; check the disk that holds the store, then try again");
}

// After a slice of waiting in vain.
bool LayerSchedule::stalled(double slice) {
  waited_ += std::min(slice, kMostWaited);
  return waited_ >= options_.stall_seconds;
}

std::string LayerSchedule::not_arrived() const {
  return missing_block() + " has not arrived, and nothing else has, for " + decimal(waited_) +
         " seconds (the limit is " + decimal(options_.stall_seconds) + ")";
}

std::string LayerSchedule::missing_block() const {
  for (std::int32_t i = first_; i < end_; ++i) {
    if (!done(row_at(i))) return transfers_.describe(layer_, expert_of(i), row_at(i).next);
  }
  return "a block";
}

void LayerSchedule::give_up() const {
  if (link_->stream_order() != nullptr && !link_->failure().empty()) throw DeviceLostError(link_->failure());
  if (is_damaged_) throw DamagedRecordError(failure_, damaged_.layer, damaged_.expert, damaged_.block);
  throw LinkError(failure_ + "; check the store's files and their disk, then try again");
}

void LayerSchedule::drain(LayerExecutor* executor) {
  waited_ = 0;
  for (;;) {
    settle();
    // Wait 26: for everything under way.
    bool idle = true;
    MOECHAT_WAIT(26, idle = cache_.in_flight() == 0);
    if (idle) return;
    const double begun = executor->now();
    const bool arrived = executor->wait();
    executor->poll_interrupt();
    if (arrived || !stalled(executor->now() - begun)) continue;
    throw LinkError(std::to_string(cache_.in_flight()) +
                    " blocks are on their way, but none has arrived for " + decimal(options_.stall_seconds) +
                    " seconds; check the disk that holds the store");
  }
}

// ---- figures

void LayerSchedule::set_targets(const std::vector<LayerTarget>& targets) {
  cache_.set_targets(targets);
  freed_ = true;
}

ScheduleStats LayerSchedule::stats() const {
  ScheduleStats stats = own_;
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

void LayerSchedule::reset_stats() {
  own_ = {};
  cache_.reset_counters();
  link_base_ = link_->stats();
  transfers_.reset_peak();
}

std::vector<double> LayerSchedule::keys() const {
  std::vector<double> found;
  found.reserve(at(std::int64_t{options_.layers} * options_.experts));
  for (std::int32_t layer = 0; layer < options_.layers; ++layer) {
    const double* const keys = policy_->keys(layer);
    found.insert(found.end(), keys, keys + options_.experts);
  }
  return found;
}

std::vector<std::int16_t> LayerSchedule::residency() const {
  std::vector<std::int16_t> blocks;
  blocks.reserve(at(std::int64_t{options_.layers} * options_.experts));
  for (std::int32_t layer = 0; layer < options_.layers; ++layer) {
    for (std::int32_t expert = 0; expert < options_.experts; ++expert) {
      blocks.push_back(static_cast<std::int16_t>(cache_.resident(layer, expert)));
    }
  }
  return blocks;
}

ExpertPlaces LayerSchedule::places() const {
  ExpertPlaces found{residency(), {}, far_used_};
  found.assigned.reserve(found.resident.size());
  for (std::int32_t layer = 0; layer < options_.layers; ++layer) {
    for (std::int32_t expert = 0; expert < options_.experts; ++expert) {
      found.assigned.push_back(static_cast<std::int16_t>(cache_.assigned(layer, expert)));
    }
  }
  return found;
}

}  // namespace moechat
