// The executors of a simulation: they compute nothing and move a clock by what computing costs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "offload/layer_executor.h"
#include "offload/layer_schedule.h"
#include "simulate/virtual_link.h"

namespace moechat {

// Seconds of the thread that launches on a card, of the card between kernels, and of the small copies between
// both. All 0: calls take no time.
struct CallCosts {
  double dense = 0;   // host: from the last call of a layer to the first kernel of the next dense part
  double choice = 0;  // from the end of a dense part until the host has its choice, and a link's calls begin
  double clear = 0;   // host: of a layer that the far tier may compute a part of
  double lists = 0;   // host: to give the lists of a launch to the card
  double list_latency = 0;  // from there until they may move
  double list_copy = 0;     // link: they move; 0: they do not pass over it
  double launch = 0;        // from there until the first kernel may begin
  double launch_host = 0;   // host: the launch
  double event = 0;         // card: from the end of a copy to the kernel that waits for it
  double sum = 0;           // host: the sum of a layer
  double sum_card = 0;      // card: the same
};

// Seconds.
struct ComputeCosts {
  double call = 0;              // near tier: for computing anything at all
  std::vector<double> compute;  // [n - 1]: near tier: n (token, block) pairs; beyond, the last step repeats
  double far_block = 0;         // far tier: one block for one token
  double far_block_shared = 0;  // the same while the link is busy
  std::int64_t far_threads = 1;
  double far_call = 0;       // of a layer: handing its input to the far tier and the sums back
  double near_slowdown = 1;  // factor of the near tier's times while the link is busy
  CallCosts calls;           // of a card
};

// As HostExecutor: the clock stands at the end of whatever was computed or waited for last.
class HostClock : public LayerExecutor {
 public:
  // group_items: (token, expert) pairs of a group; 0: all rows are one group, as they are while the far tier
  // computes a part. All pointers outlive this.
  HostClock(const ComputeCosts& costs, std::int64_t group_items, const LayerSchedule* schedule,
            VirtualLink* link, double* now)
      : costs_(costs), group_items_(group_items), schedule_(schedule), link_(link), now_(now) {}

  // From now on nothing takes time, or everything does.
  void hurry(bool on) { hurried_ = on; }
  // A layer begins; shares: the far tier may compute a part of it.
  virtual void start(bool shares) {
    static_cast<void>(shares);
    first_ = end_ = 0;
  }
  // The layer without its experts, or the head.
  virtual void compute_dense(double seconds) { spend(seconds); }
  // Every block of the layer was launched. Returns the moment at which its sum is there.
  virtual double end_layer() { return *now_; }
  // Seconds that the near tier has computed.
  double compute_seconds() const { return compute_seconds_; }

  bool next_group() override;
  std::int32_t first_row() const override { return first_; }
  std::int32_t end_row() const override { return end_; }
  std::int64_t work_of_call() const override;
  std::int64_t work_of_row() const override;
  void add(std::int32_t row, std::int32_t block, PageId page, bool landed) override;
  std::int64_t pending() const override { return pending_; }
  std::int64_t compute() override;
  void drop() override;
  void finish_group() override {}
  std::int64_t far_threads() const override { return costs_.far_threads; }
  void far_compute(const std::vector<FarPiece>& pieces) override;
  double now() override { return *now_; }
  bool wait() override;

 protected:
  double cost() const;           // of the blocks that were added
  double spend(double seconds);  // moves the clock; returns by how much

  const ComputeCosts costs_;
  const std::int64_t group_items_;
  const LayerSchedule* const schedule_;
  VirtualLink* const link_;
  double* const now_;
  std::int32_t first_ = 0;
  std::int32_t end_ = 0;
  bool hurried_ = false;
  std::int64_t pending_ = 0;  // (token, block) pairs added
  std::int64_t blocks_ = 0;   // blocks added
  double compute_seconds_ = 0;
};

// As DeviceExecutor over a CudaLink, called as GraphDecoder and GpuExpertLayer do: the clock is that of the
// thread that launches. The card works through the launches one after another, each behind its lists and the
// copies that it reads; a copy that starts later moves behind the kernels that read its page. Lists, and the
// far tier's sums, pass over the link between the transfers.
class CardClock final : public HostClock {
 public:
  using HostClock::HostClock;

  void start(bool shares) override;
  void compute_dense(double seconds) override;
  double end_layer() override;
  void far_compute(const std::vector<FarPiece>& pieces) override;

  bool next_group() override;
  std::int64_t work_of_call() const override;
  std::int64_t work_of_row() const override { return work_of_call(); }
  void add(std::int32_t row, std::int32_t block, PageId page, bool landed) override;
  std::int64_t compute() override;
  void drop() override;
  bool orders_copies() const override { return true; }
  bool follow_copies() override;

 private:
  double small_copy();
  void pay_link();

  double busy_until_ = 0;    // the card
  bool far_sums_ = false;    // the far tier has computed a part of the layer
  double copied_until_ = 0;  // the copies of the blocks that were added
  std::vector<PageId> pages_;
  std::vector<PageId> flying_;  // of these, those that have not landed
};

// A card that holds every block and runs ahead of the host, as offload/run_ahead.py lets it: a token is two
// graphs. The clock is the card's; the host's part of a token is in the times of the head.
class GraphClock final : public HostClock {
 public:
  using HostClock::HostClock;

  double end_layer() override;
  std::int64_t work_of_call() const override;
  std::int64_t work_of_row() const override { return work_of_call(); }
};

}  // namespace moechat
