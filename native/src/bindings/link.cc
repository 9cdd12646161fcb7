// Python bindings of links. Python owns a link until a runner takes it.
#include "link/link.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/checksums.h"
#include "bindings/gil.h"
#include "bindings/link_holder.h"
#include "link/file_link.h"
#include "link/sim_link.h"

namespace moechat {
namespace {

// Converts seconds to the link's duration type; infinity becomes its longest duration.
template <class Duration>
Duration limit_of(double seconds) {
  constexpr double kMost = 1e7;
  if (std::isnan(seconds) || seconds < 0) {
    refuse("seconds is " + std::to_string(seconds) + "; it must not be negative");
  }
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(std::min(seconds, kMost)));
}

Priority priority_of(int value) {
  if (value < 0 || value >= kPriorities) {
    refuse("priority is " + std::to_string(value) + "; it must be 0 (demand), 1 (near) or 2 (far)");
  }
  return static_cast<Priority>(value);
}

std::unique_ptr<LinkHolder> file_link(
    const std::vector<std::tuple<std::string, std::int64_t, std::int64_t>>& regions, const std::string& io,
    bool direct, std::int64_t in_flight_bytes, std::int64_t operation_bytes, int reader_threads,
    const std::vector<py::object>& checksums, std::int64_t record_bytes) {
  FileLinkOptions options;
  if (io == "uring") {
    options.io = FileIo::kUring;
  } else if (io == "threads") {
    options.io = FileIo::kThreads;
  } else if (io != "auto") {
    refuse("io is '" + io + "'; it must be 'auto', 'uring' or 'threads'");
  }
  options.direct = direct;
  options.in_flight_bytes = in_flight_bytes;
  options.operation_bytes = operation_bytes;
  options.reader_threads = reader_threads;
  std::vector<FileRegion> files;
  require_checksums(checksums, regions.size());
  for (const auto& [path, offset, bytes] : regions) {
    const std::size_t index = files.size();
    files.push_back({path, offset, bytes, checksums_of(checksums, index, record_bytes)});
  }
  std::unique_ptr<Link> link;
  try {
    const ReleaseGil released;
    link = make_file_link(files, options);
  } catch (const FileError& error) {
    raise_os_error(error.code().value(), error.path());
  } catch (const std::system_error& error) {
    raise_os_error(error.code().value(), "io_uring");
  }
  return std::make_unique<LinkHolder>(std::move(link), std::vector<py::object>());
}

std::unique_ptr<LinkHolder> sim_link(const std::vector<py::array>& regions, double bandwidth, double latency,
                                     double jitter, std::uint64_t seed, int reorder,
                                     std::int64_t in_flight_bytes, bool copy, double fault_rate,
                                     std::int64_t fail_after, std::int64_t stall_after) {
  SimLinkOptions options;
  options.bandwidth = bandwidth;
  options.latency = latency;
  options.jitter = jitter;
  options.seed = seed;
  options.reorder = reorder;
  options.in_flight_bytes = in_flight_bytes;
  options.copy = copy;
  options.fault_rate = fault_rate;
  options.fail_after = fail_after;
  options.stall_after = stall_after;
  std::vector<SimRegion> memory;
  std::vector<py::object> alive;
  for (const py::array& region : regions) {
    memory.push_back({checked<std::uint8_t>("a region", region, shape_of(region)), region.nbytes()});
    alive.push_back(region);
  }
  return std::make_unique<LinkHolder>(make_sim_link(memory, options), std::move(alive));
}

void submit(
    LinkHolder& holder,
    const std::vector<std::tuple<std::int64_t, std::int32_t, std::int64_t, std::int64_t, int>>& transfers,
    py::array target) {
  require_type<std::uint8_t>("target", target);
  if (target.ndim() != 2)
    refuse("target has shape " + shape_text(shape_of(target)) + "; it must be [slots, page_bytes]");
  auto* const pages = checked_writable<std::uint8_t>("target", target, shape_of(target));
  std::vector<Transfer> list;
  for (const auto& [slot, region, offset, bytes, priority] : transfers) {
    if (slot < 0 || slot >= target.shape(0)) {
      refuse("slot is " + std::to_string(slot) + ", but target has " + std::to_string(target.shape(0)) +
             " pages");
    }
    if (bytes > target.shape(1)) {
      refuse("a transfer has " + std::to_string(bytes) + " bytes, but a page has " +
             std::to_string(target.shape(1)));
    }
    list.push_back({static_cast<std::uint32_t>(slot), region, offset, bytes, pages + slot * target.shape(1),
                    priority_of(priority)});
  }
  holder.keep_target(target);
  const ReleaseGil released;
  holder.get().submit(list.data(), static_cast<std::int64_t>(list.size()));
}

StreamOrder& order_of(const LinkHolder& holder) {
  StreamOrder* const order = holder.get().stream_order();
  if (order == nullptr) refuse("this link copies into host memory and has no stream ordering");
  return *order;
}

// Calls order(stream, slots, count) without the GIL.
template <class Call>
auto order_slots(const LinkHolder& holder, std::uintptr_t stream, const py::array& slots, const Call& call) {
  StreamOrder& order = order_of(holder);
  const auto* const list = checked<std::uint32_t>("slots", slots, shape_of(slots));
  const auto count = static_cast<std::int64_t>(slots.size());
  const ReleaseGil released;
  return call(order, reinterpret_cast<void*>(stream), list, count);
}

py::dict stats(const LinkHolder& holder) {
  LinkStats stats;
  {
    const ReleaseGil released;
    stats = holder.get().stats();
  }
  static const char* const kNames[kPriorities] = {"demand", "next", "later"};
  py::dict result;
  for (int i = 0; i < kPriorities; ++i) {
    result[(std::string("bytes_") + kNames[i]).c_str()] = stats.bytes[i];
    result[(std::string("transfers_") + kNames[i]).c_str()] = stats.transfers[i];
  }
  result["operations"] = stats.operations;
  result["errors"] = stats.errors;
  result["rereads"] = stats.rereads;
  result["cancelled"] = stats.cancelled;
  result["queued"] = stats.queued;
  result["in_flight"] = stats.in_flight;
  result["busy_seconds"] = stats.busy_seconds;
  result["bandwidth"] = stats.bandwidth;
  return result;
}

}  // namespace

void bind_link(py::module_& m) {
  m.attr("DEMAND") = static_cast<int>(Priority::kDemand);
  m.attr("NEXT") = static_cast<int>(Priority::kNext);
  m.attr("LATER") = static_cast<int>(Priority::kLater);
  py::class_<LinkHolder>(m, "Link")
      .def("name", [](const LinkHolder& self) { return self.get().name(); })
      .def(
          "describe",
          [](const LinkHolder& self, std::int32_t region, std::int64_t offset) {
            return self.get().describe(region, offset);
          },
          py::arg("region"), py::arg("offset"))
      .def("regions", [](const LinkHolder& self) { return self.get().regions(); })
      .def(
          "region_bytes",
          [](const LinkHolder& self, std::int32_t region) { return self.get().region_bytes(region); },
          py::arg("region"))
      .def(
          "open",
          [](const LinkHolder& self, std::int64_t slots) {
            if (slots < 1 || slots >= 0xffffffff) {
              refuse("slots is " + std::to_string(slots) + "; it must be from 1 to 2^32 - 2");
            }
            self.get().open(static_cast<std::uint32_t>(slots));
          },
          py::arg("slots"))
      .def("submit", &submit, py::arg("transfers"), py::arg("target"))
      .def(
          "cancel",
          [](const LinkHolder& self, std::uint32_t slot) {
            const ReleaseGil released;
            return self.get().cancel(slot);
          },
          py::arg("slot"))
      .def(
          "promote",
          [](const LinkHolder& self, std::uint32_t slot, int priority) {
            const Priority wanted = priority_of(priority);
            const ReleaseGil released;
            self.get().promote(slot, wanted);
          },
          py::arg("slot"), py::arg("priority"))
      .def("poll",
           [](const LinkHolder& self) {
             std::vector<Completion> done;
             {
               const ReleaseGil released;
               self.get().poll(&done);
             }
             std::vector<std::pair<std::uint32_t, int>> result;
             for (const Completion& completion : done) result.emplace_back(completion.slot, completion.error);
             return result;
           })
      .def(
          "wait",
          [](const LinkHolder& self, double seconds) {
            const auto limit = limit_of<std::chrono::microseconds>(seconds);
            const ReleaseGil released;
            return self.get().wait(limit);
          },
          py::arg("seconds"))
      .def("failure",
           [](const LinkHolder& self) {
             const ReleaseGil released;
             return self.get().failure();
           })
      .def("stats", &stats)
      .def(
          "fills_first",
          [](const LinkHolder& self, std::uintptr_t stream, const py::array& slots, double seconds) {
            const auto limit = limit_of<std::chrono::microseconds>(seconds);
            return order_slots(
                self, stream, slots,
                [limit](StreamOrder& order, void* at, const std::uint32_t* list, std::int64_t count) {
                  return order.fills_first(at, list, count, limit);
                });
          },
          py::arg("stream"), py::arg("slots"), py::arg("seconds"))
      .def(
          "reads_first",
          [](const LinkHolder& self, std::uintptr_t stream, const py::array& slots) {
            order_slots(self, stream, slots,
                        [](StreamOrder& order, void* at, const std::uint32_t* list, std::int64_t count) {
                          order.reads_first(at, list, count);
                        });
          },
          py::arg("stream"), py::arg("slots"))
      .def(
          "stop",
          [](const LinkHolder& self, double seconds) {
            const auto limit = limit_of<std::chrono::milliseconds>(seconds);
            const ReleaseGil released;
            return self.get().stop(limit);
          },
          py::arg("seconds"));
  m.def("file_link", &file_link, py::arg("regions"), py::arg("io") = "auto", py::arg("direct") = true,
        py::arg("in_flight_bytes") = 0, py::arg("operation_bytes") = 0, py::arg("reader_threads") = 0,
        py::arg("checksums") = std::vector<py::object>(), py::arg("record_bytes") = 0);
  m.def("sim_link", &sim_link, py::arg("regions"), py::arg("bandwidth") = 0.0, py::arg("latency") = 0.0,
        py::arg("jitter") = 0.0, py::arg("seed") = 0, py::arg("reorder") = 1, py::arg("in_flight_bytes") = 0,
        py::arg("copy") = true, py::arg("fault_rate") = 0.0, py::arg("fail_after") = -1,
        py::arg("stall_after") = -1);
}

}  // namespace moechat
