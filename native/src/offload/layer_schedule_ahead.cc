// Speculation: fetching ahead of the routers, in the time and the pages that nothing else needs.
#include <algorithm>
#include <stdexcept>

#include "offload/layer_schedule.h"

namespace moechat {
namespace {

// Weight of the newest window in its estimate.
constexpr double kNewest = 0.1;
// Experts of a queue over layers that are given to the link at a time: it stays busy from one layer to the
// next, and little has to be taken back when the next prediction comes.
constexpr std::int64_t kAheadExperts = 4;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

}  // namespace

// A layer lacks nothing any more but what is on its way.
void LayerSchedule::open_window() {
  if (window_opened_ >= 0 || miss_ == Miss::kFetch || tokens_ != 1) return;
  window_opened_ = link_->now();
  const LinkStats link = link_->stats();
  const double seconds = windows_[at(2 * layer_ + (sharing_ ? 1 : 0))];
  const double bytes = seconds * FarShare::link_rate(link) - static_cast<double>(link.in_flight);
  window_blocks_ = std::max<std::int64_t>(0, static_cast<std::int64_t>(bytes) / options_.record_bytes);
}

// The router of the next layer has chosen, or another pass has begun.
void LayerSchedule::close_window() {
  if (window_opened_ < 0) return;
  double& kept = windows_[at(2 * layer_ + (sharing_ ? 1 : 0))];
  const double seconds = link_->now() - window_opened_;
  // At most twice the estimate counts: a user may have thought in between.
  kept = kept == 0 ? seconds : kept + kNewest * (std::min(seconds, 2 * kept) - kept);
  window_opened_ = -1;
}

std::int64_t LayerSchedule::prefetch(std::int32_t layer, const std::int32_t* ranked, std::int64_t count,
                                     std::int64_t max_blocks, Priority priority) {
  check_layer(layer);
  settle();
  Prefetch& prefetch = prefetches_[static_cast<int>(priority)];
  prefetch.layer = layer;
  prefetch.blocks = std::max<std::int64_t>(max_blocks, 0);
  prefetch.ranked.assign(ranked, ranked + count);
  if (priority == Priority::kNext && cache_.in_flight() > 0) {
    for (const std::int32_t expert : prefetch.ranked) transfers_.promote(layer, expert, priority);
  }
  // What moves while the CPU computes takes memory bandwidth from it: a guess is not worth that.
  if (active_ && sharing_ && window_opened_ < 0) return 0;
  // Pages that have become free since the layer began are its own first.
  if (active_ && starved_ && freed_ && failure_.empty()) acquire();
  return active_ && starved_ ? 0 : continue_prefetch(&prefetch, priority);
}

// Queues the blocks of a prefetch that there are pages for. Returns how many. Experts that lack nothing are
// named too: a prefetch takes no page from an expert that it names.
std::int64_t LayerSchedule::continue_prefetch(Prefetch* prefetch, Priority priority) {
  if (prefetch->blocks == 0) return 0;
  std::int64_t missing = 0;
  for (const std::int32_t expert : prefetch->ranked) {
    missing += options_.blocks - cache_.assigned(prefetch->layer, expert);
  }
  if (missing == 0 || !link_->failure().empty()) {
    prefetch->blocks = 0;
    return 0;
  }
  const std::int64_t most = room_of_guesses(prefetch->blocks);
  if (most == 0) return 0;
  const Want want{prefetch->layer,
                  layer_,
                  prefetch->ranked.data(),
                  static_cast<std::int64_t>(prefetch->ranked.size()),
                  true,
                  most,
                  options_.whole_experts};
  cache_.plan(want, &plan_);
  const std::int64_t count = transfers_.fetch(&plan_, priority, pass_);
  transfers_.forget_refusal();
  if (guesses_wait()) window_blocks_ -= count;
  prefetch->blocks = count == missing ? 0 : prefetch->blocks - count;
  return count;
}

// Where the CPU computes what is missing, a guess may only take time that nobody else needs.
bool LayerSchedule::guesses_wait() const { return active_ && miss_ != Miss::kFetch && tokens_ == 1; }

// Of so many blocks of a guess, those that may be queued now.
std::int64_t LayerSchedule::room_of_guesses(std::int64_t blocks) const {
  if (!guesses_wait()) return blocks;
  return window_opened_ < 0 ? 0 : std::min(blocks, window_blocks_);
}

void LayerSchedule::predict(std::int32_t layer, const std::int32_t* experts, std::int64_t count) {
  policy_->predict(layer, experts, count);
  if (step_ != nullptr) step_->predicted(layer, experts, count);
}

std::int64_t LayerSchedule::prefetch_ahead(const AheadExpert* experts, std::int64_t count,
                                           std::int64_t max_blocks, bool stays) {
  for (std::int64_t i = 0; i < count; ++i) {
    check_layer(experts[i].layer);
    if (experts[i].expert < 0 || experts[i].expert >= options_.experts) {
      throw std::invalid_argument("expert is " + std::to_string(experts[i].expert) +
                                  "; it must be from 0 to " + std::to_string(options_.experts - 1));
    }
  }
  settle();
  policy_->predict_ahead(experts, count);
  ahead_.experts.assign(experts, experts + count);
  ahead_.next = 0;
  ahead_.stays = stays;
  ahead_.blocks = std::max<std::int64_t>(max_blocks, 0);
  if (cache_.in_flight() > 0) {
    named_.assign(at(std::int64_t{options_.layers} * options_.experts), 0);
    for (const AheadExpert& each : ahead_.experts) named_[place(each.layer, each.expert)] = 1;
    for (std::int32_t layer = 0; layer < options_.layers; ++layer) {
      if (transfers_.cancel_stale(layer, named_.data() + place(layer, 0)) > 0) freed_ = true;
    }
  }
  if (active_ && sharing_ && window_opened_ < 0) return 0;
  if (active_ && starved_ && freed_ && failure_.empty()) acquire();
  return active_ && starved_ ? 0 : continue_ahead();
}

// Queues experts of the list that there are pages for, as far as few are on their way. Returns how many
// blocks.
std::int64_t LayerSchedule::continue_ahead() {
  if (ahead_.blocks == 0 || !link_->failure().empty()) return 0;
  std::int64_t count = 0;
  const std::int64_t most_flying = kAheadExperts * options_.blocks;
  while (ahead_.next < ahead_.experts.size() && ahead_.blocks > 0) {
    const AheadExpert& each = ahead_.experts[ahead_.next];
    const std::int64_t lacks = options_.blocks - cache_.assigned(each.layer, each.expert);
    if (lacks == 0) {
      ++ahead_.next;
      continue;
    }
    const std::int64_t room =
        room_of_guesses(std::min(ahead_.blocks, most_flying - cache_.guesses_in_flight()));
    if (room < 1 || (options_.whole_experts && room < lacks)) break;
    const Want want{each.layer, layer_, &each.expert, 1, true, room, options_.whole_experts};
    cache_.plan(want, &plan_);
    const std::int64_t fetched = transfers_.fetch(&plan_, Priority::kLater, pass_);
    transfers_.forget_refusal();
    if (guesses_wait()) window_blocks_ -= fetched;
    ahead_.blocks -= fetched;
    count += fetched;
    // Without a page for this one a later layer may still find some: that of a layer due before it.
    if (fetched < lacks && room >= lacks) ++ahead_.next;
    if (fetched < lacks && room < lacks) break;
  }
  return count;
}

void LayerSchedule::begin_request() {
  settle();
  policy_->begin_request();
}

// ---- the adaptive step

// A layer of a decoded token begins: the time since the one before it began is that of a layer.
void LayerSchedule::measure_step(bool one_token) {
  const double now = link_->now();
  if (one_token) step_->measure(begun_at_ < 0 ? 0 : now - begun_at_, FarShare::link_rate(link_->stats()));
  begun_at_ = one_token ? now : -1;
}

std::vector<Prediction> LayerSchedule::adaptive_layers() {
  std::vector<Prediction> found;
  if (step_ == nullptr || tokens_ != 1) return found;
  const std::int32_t step = step_->step();
  if (step != reached_) policy_->reach(layer_, step);
  // Where the step has grown, the layers in between would not be predicted at all.
  for (std::int32_t ahead = std::min(step, reached_ + 1); ahead <= step; ++ahead) {
    found.push_back({ahead, (layer_ + ahead) % options_.layers});
  }
  reached_ = step;
  return found;
}

}  // namespace moechat
