// Layers that a device computes ahead of the host: when that pays, and their account afterwards.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "offload/runner.h"

namespace moechat {
namespace {

// Least weight of the newest token in a layer's estimate; the first tokens count alike. Where half of the
// tokens lack something, the estimate stays within 0.5 +- 0.09.
constexpr double kNewest = 1.0 / 16;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

}  // namespace

bool ExpertRunner::keep_page_table(double least_share) {
  const ApiLock lock(this);
  if (!(least_share >= 0 && least_share <= 1)) {
    throw std::invalid_argument("least_share is " + std::to_string(least_share) + "; it must be from 0 to 1");
  }
  if (!schedule_.keep_page_table()) return false;
  // A layer is tried once, and again when it has lacked nothing for a while.
  if (undisturbed_.empty()) undisturbed_.assign(at(options_.layers), {least_share, 1});
  least_share_ = least_share;
  return true;
}

std::int64_t ExpertRunner::page_changes(std::int32_t* index, std::int32_t* page, std::int64_t capacity) {
  const ApiLock lock(this);
  return table().changes(index, page, capacity);
}

bool ExpertRunner::complete() const {
  const ApiLock lock(this);
  return table().complete();
}

std::int64_t ExpertRunner::look_ahead(std::int32_t layer, void* stream, std::int32_t* index,
                                      std::int32_t* page, std::int64_t capacity) {
  const ApiLock lock(this);
  schedule_.check_layer(layer);
  if (undisturbed_[at(layer)].share < least_share_ && !table().complete()) return -1;
  schedule_.poll();
  const std::int64_t count = table().changes(index, page, capacity);
  table().open(stream);
  return count;
}

void ExpertRunner::end_ahead() {
  const ApiLock lock(this);
  table().close();
}

std::int64_t ExpertRunner::account(const ComputedPass& pass) {
  const ApiLock lock(this);
  const auto layers = std::int64_t{options_.layers};
  if (pass.first < 0 || pass.count < 0 || pass.first + pass.count > layers) {
    throw std::invalid_argument("layers " + std::to_string(pass.first) + " to " +
                                std::to_string(pass.first + pass.count) + " of " + std::to_string(layers));
  }
  weights_.assign(at(pass.picks), 1.0f);  // only the device's kernels read them
  const std::int64_t before = schedule_.bytes_computed();
  for (auto layer = static_cast<std::int32_t>(pass.first); layer < pass.first + pass.count; ++layer) {
    account_layer(pass, layer);
  }
  return schedule_.bytes_computed() - before;
}

// As the calls of a layer that the host launches: begin, prefetch, finish.
void ExpertRunner::account_layer(const ComputedPass& pass, std::int32_t layer) {
  const std::int32_t* const report = pass.reports + layer * pass.stride;
  for (std::int64_t pick = 0; pick < pass.picks; ++pick) {
    if (report[pick] < 0 || report[pick] >= options_.experts) {
      throw std::invalid_argument("layer " + std::to_string(layer) + " chose expert " +
                                  std::to_string(report[pick]) + " of " + std::to_string(options_.experts));
    }
  }
  {
    const Stopwatch watch(&begin_seconds_);
    picks_.assign(report, report + pass.picks);
    // What the cache has lost meanwhile needs no part of the CPU: the device has computed with it.
    const Miss miss = schedule_.ready(layer, report, pass.picks) && !options_.far_records.empty()
                          ? pass.miss
                          : Miss::kFetch;
    begin_layer(layer, picks_.data(), weights_.data(), 1, pass.picks, miss);
    fetch_places(layer, pass.prefetching, pass.place + layer * pass.places, pass.places,
                 reinterpret_cast<const float*>(report + 2 * pass.picks));
  }
  computed_.start(schedule_.rows().rows());
  schedule_.finish(&computed_);
}

void ExpertRunner::begin_layer(std::int32_t layer, const std::int64_t* index, const float* weight,
                               std::int64_t tokens, std::int64_t k, Miss miss) {
  schedule_.begin(layer, index, weight, tokens, k, miss);
  begun_by_ = std::this_thread::get_id();
  if (tokens != 1 || undisturbed_.empty()) return;
  Estimate& estimate = undisturbed_[at(layer)];
  const double newest = std::max(kNewest, 1.0 / ++estimate.tokens);
  estimate.share += newest * ((schedule_.undisturbed() ? 1.0 : 0.0) - estimate.share);
}

PageTable& ExpertRunner::table() const {
  PageTable* const table = schedule_.page_table();
  if (table == nullptr) throw std::logic_error("this runner keeps no page table");
  return *table;
}

}  // namespace moechat
