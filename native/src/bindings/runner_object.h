// The Python object of an expert runner, which several binding files use.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/gil.h"
#include "bindings/link_holder.h"
#include "bindings/policy_holder.h"
#include "offload/runner.h"

namespace moechat {

namespace py = pybind11;

// A runner and the objects that its link reads. Any thread that has the GIL may drop the last reference.
struct RunnerParts {
  RunnerParts(RunnerOptions options, PolicyHolder& policy, LinkHolder& link)
      : alive(link.alive()),
        runner(std::make_unique<ExpertRunner>(std::move(options), policy.take(), link.take())) {}
  ~RunnerParts() {
    const ReleaseGil released;  // stopping the link waits
    runner.reset();
  }
  RunnerParts(const RunnerParts&) = delete;
  RunnerParts& operator=(const RunnerParts&) = delete;

  std::vector<py::object> alive;
  std::unique_ptr<ExpertRunner> runner;
};

// Arguments of account and begin_token; see moechat/_native.pyi. Throws std::invalid_argument.
Prefetching prefetching(const RunnerOptions& options, std::int32_t predicted, std::int32_t experts,
                        std::optional<std::int64_t> max_bytes, const std::string& ahead,
                        std::int32_t lookahead, std::int64_t stream_tokens);

// Calls that run in other threads during close() hold references to the parts.
class RunnerObject {
 public:
  RunnerObject(const BlockLayout& layout, const GateSpec& gate, std::int32_t layers, std::int32_t experts,
               std::int64_t pages, const py::array& targets, std::int64_t reserve, PolicyHolder& policy,
               LinkHolder& link, double stall_seconds, bool whole_experts, bool populate, std::int32_t top_k,
               int activation_bits, std::uintptr_t near_memory, const std::vector<py::array>& far_records,
               const std::vector<py::array>& far_experts, std::vector<BlockLayout> layer_layouts,
               std::vector<GateSpec> layer_gates, const std::string& admit, const std::string& victims,
               double adaptive, std::int32_t adaptive_most, const std::vector<py::array>& mapped_records,
               const std::vector<py::array>& mapped_experts);

  std::shared_ptr<RunnerParts> parts() const {
    if (!parts_) throw std::runtime_error("the expert cache is closed");
    return parts_;
  }
  // Waits for calls in other threads: the caller may free all memory that it gave afterwards.
  void close();

  // Calls body(runner) without the GIL.
  template <class Body>
  auto call(const Body& body) const {
    const std::shared_ptr<RunnerParts> parts = this->parts();
    const ReleaseGil released;
    return body(*parts->runner);
  }

 private:
  std::shared_ptr<RunnerParts> parts_;
};

}  // namespace moechat
