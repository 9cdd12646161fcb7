#include "link/sim_link.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "link/mutation.h"
#include "link/queued_link.h"

namespace moechat {
namespace {

constexpr std::int64_t kDefaultInFlight = std::int64_t{2} << 20;
constexpr double kMostSeconds = 3600;
constexpr std::size_t kReserved = 1024;  // transfers under way before anything is allocated

// Transfers end at moments of a timeline, not when a thread happens to wake: each holder of the mutex ends
// the transfers that are due, and the next transfers begin, on the timeline, at the moment that made room for
// them. So a late thread delays a completion but not the ones after it, and the speed is the one that was
// asked for.
class SimEngine final : public LinkEngine {
 public:
  SimEngine(const std::vector<SimRegion>& memory, const SimLinkOptions& options)
      : LinkEngine(options.in_flight_bytes > 0 ? options.in_flight_bytes : kDefaultInFlight, 1),
        memory_(memory),
        options_(options),
        random_(options.seed) {
    ends_.reserve(kReserved);
    running_.reserve(kReserved);
  }

  const char* name() const override { return "sim"; }
  std::string describe(std::int32_t region, std::int64_t offset) const override {
    index_of(region, memory_.size());
    return "simulated region " + std::to_string(region) + " at byte " + std::to_string(offset);
  }
  std::int32_t regions() const override { return static_cast<std::int32_t>(memory_.size()); }
  std::int64_t region_bytes(std::int32_t region) const override {
    return memory_[index_of(region, memory_.size())].bytes;
  }
  void hurry(bool on) override {
    const Lock lock(mutex_);
    hurried_ = on;
  }

 private:
  struct Running {
    std::uint32_t slot;
    bool copied;
    bool faulty;  // ends with EIO, with half of its bytes written
  };

  int threads() const override { return 1; }
  void work(int) override;
  void reap() override;
  void start() override;
  void wake() override { work_.notify_all(); }
  void abandon() override;

  bool stalled() const { return options_.stall_after >= 0 && ended_ >= options_.stall_after; }
  bool due(Clock::time_point now) const { return !ends_.empty() && !stalled() && ends_.front() <= now; }
  Clock::duration span(double time) const {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(time));
  }
  double draw() { return std::uniform_real_distribution<double>()(random_); }
  void give_up_all(int error);
  bool copy_one(Lock* lock);

  const std::vector<SimRegion> memory_;
  const SimLinkOptions options_;
  std::mt19937_64 random_;
  std::condition_variable work_;
  // Moments at which transfers end, ascending, and the transfers under way in the order in which they began:
  // the same number, but which transfer ends at a moment is drawn when it has come.
  std::vector<Clock::time_point> ends_;
  std::vector<Running> running_;
  std::size_t drawn_ = 0;  // index into running_ of the one to end next, if is_drawn_
  bool is_drawn_ = false;
  std::uint32_t copying_ = kNone;  // slot that the thread is copying, without the mutex
  bool giving_up_ = false;
  bool hurried_ = false;
  Clock::time_point busy_until_{};
  Clock::time_point room_since_{};
  std::int64_t ended_ = 0;
};

void SimEngine::start() {
  bool begun = false;
  while (startable()) {
    const std::uint32_t slot = queue_.front();
    const Node& node = queue_[slot];
    const Clock::time_point moment = std::max(Clock::time_point(span(node.queued)), room_since_);
    const double bytes = static_cast<double>(node.transfer.bytes);
    const double wait = hurried_ ? 0 : options_.latency + options_.jitter * draw();
    const double moving = options_.bandwidth > 0 && !hurried_ ? bytes / options_.bandwidth : 0;
    busy_until_ = std::max(busy_until_, moment + span(wait)) + span(moving);
    queue_.begin(slot, seconds_now());
    queue_.operation_begun();
    ends_.push_back(busy_until_);
    running_.push_back({slot, !options_.copy, draw() < options_.fault_rate});
    begun = true;
  }
  if (begun) work_.notify_one();
}

void SimEngine::reap() {
  const Clock::time_point now = Clock::now();
  while (due(now)) {
    if (options_.fail_after >= 0 && ended_ >= options_.fail_after) {
      fail(EIO, "the simulated link failed after " + std::to_string(ended_) + " transfers");
      give_up_all(EIO);
      return;
    }
    if (!is_drawn_) {
      const std::size_t choices = std::min(running_.size(), static_cast<std::size_t>(options_.reorder));
      drawn_ = choices < 2 ? 0 : static_cast<std::size_t>(draw() * static_cast<double>(choices));
      is_drawn_ = true;
    }
    const Running chosen = running_[drawn_];
    if (!chosen.copied || chosen.slot == copying_) return;  // the thread ends it
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(drawn_));
    is_drawn_ = false;
    room_since_ = ends_.front();
    ends_.erase(ends_.begin());
    ++ended_;
    finish(chosen.slot, chosen.faulty ? EIO : 0);
    if (!halted()) start();
  }
}

// Everything under way ends now; a transfer that is being copied, after its copy.
void SimEngine::give_up_all(int error) {
  giving_up_ = true;
  is_drawn_ = false;
  std::vector<Running> kept;
  for (const Running& one : running_) {
    if (one.slot == copying_) {
      kept.push_back(one);
    } else {
      finish(one.slot, error);
    }
  }
  running_ = std::move(kept);
  ends_.assign(running_.size(), Clock::time_point{});
}

// A stalled link ends by stopping; otherwise the transfers under way arrive in their time.
void SimEngine::abandon() {
  if (stalled()) give_up_all(ECANCELED);
}

// Copies one transfer that is under way, if there is one; the mutex is free meanwhile.
bool SimEngine::copy_one(Lock* lock) {
  std::size_t index = is_drawn_ ? drawn_ : 0;
  if (index >= running_.size() || running_[index].copied) {
    index = 0;
    while (index < running_.size() && running_[index].copied) ++index;
  }
  if (index == running_.size()) return false;
  const Running one = running_[index];
  const Transfer transfer = queue_[one.slot].transfer;
  copying_ = one.slot;
  lock->unlock();
  const unsigned char* from = memory_[static_cast<std::size_t>(transfer.region)].data + transfer.offset;
  std::memcpy(transfer.to, from, static_cast<std::size_t>(one.faulty ? transfer.bytes / 2 : transfer.bytes));
  lock->lock();
  copying_ = kNone;
  for (Running& each : running_) {
    if (each.slot == one.slot) each.copied = true;
  }
  if (giving_up_) give_up_all(failed() ? error_ : ECANCELED);
  return true;
}

void SimEngine::work(int) {
  // Sleep to the moment, not up to 50 us longer.
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  Lock lock(mutex_);
  while (!ending_) {
    pump();
    if (copy_one(&lock)) continue;
    if (ends_.empty() || stalled()) {
      // Wait 4: for something to do.
      MOECHAT_WAIT(4, work_.wait(lock, [this] { return ending_ || (!ends_.empty() && !stalled()); }));
    } else {
      // Wait 5: for the next transfer to end. One that begins meanwhile ends later but may need to be copied.
      const Clock::time_point until = ends_.front();
      MOECHAT_WAIT(5, work_.wait_until(lock, until));
    }
  }
}

void require(bool right, const char* option, double value, const char* range) {
  if (right) return;
  throw std::invalid_argument(std::string(option) + " is " + std::to_string(value) + "; it must be " + range);
}

}  // namespace

std::unique_ptr<Link> make_sim_link(const std::vector<SimRegion>& regions, const SimLinkOptions& options) {
  const auto time = [](const char* name, double value) {
    require(value >= 0 && value <= kMostSeconds, name, value, "from 0 to 3600 seconds");
  };
  require(options.bandwidth >= 0 && std::isfinite(options.bandwidth), "bandwidth", options.bandwidth,
          "0 (as fast as memory) or bytes a second");
  require(options.bandwidth == 0 || options.bandwidth >= 1, "bandwidth", options.bandwidth,
          "0 (as fast as memory) or at least 1 byte a second");
  time("latency", options.latency);
  time("jitter", options.jitter);
  require(options.reorder >= 1, "reorder", options.reorder, "at least 1");
  require(options.in_flight_bytes >= 0, "in_flight_bytes", static_cast<double>(options.in_flight_bytes),
          "0 (default) or a positive number");
  require(options.fault_rate >= 0 && options.fault_rate <= 1, "fault_rate", options.fault_rate,
          "from 0 to 1");
  for (const SimRegion& region : regions) {
    if (region.data == nullptr || region.bytes < 0) {
      throw std::invalid_argument("a region of a simulated link has no memory");
    }
  }
  return std::make_unique<QueuedLink>(std::make_unique<SimEngine>(regions, options));
}

}  // namespace moechat
