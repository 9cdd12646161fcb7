// Expert layers of decoded tokens on a GPU, launched without Python in between.
#include "offload/device_layers.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/kernel_values.h"
#include "bindings/runner_object.h"
#include "bindings/schedule.h"

namespace moechat {
namespace {

// A value is a number, or the name of what goes there at the launch.
PreparedLaunch prepared(const cuda::Kernel& kernel, const std::array<unsigned, 3>& grid,
                        const py::list& given) {
  const std::string& kinds = kernel.kinds();
  std::vector<cuda::Kernel::Value> values(given.size());
  std::vector<std::pair<std::size_t, Blank>> blanks;
  for (std::size_t at = 0; at < given.size(); ++at) {
    const py::handle value = given[at];
    if (py::isinstance<py::str>(value)) {
      blanks.emplace_back(at, blank_of(value.cast<std::string>()));
    } else if (at < kinds.size()) {
      values[at] = value_of(kinds[at], value);
    }
  }
  return PreparedLaunch(kernel, {grid[0], grid[1], grid[2]}, std::move(values), std::move(blanks));
}

// Request, places (distance and layer), whether it has inputs, and the launches.
using Layer = std::tuple<py::array, std::vector<std::pair<std::int32_t, std::int32_t>>, bool, PreparedLaunch,
                         PreparedLaunch, std::optional<PreparedLaunch>>;

class LayersObject {
 public:
  LayersObject(py::object runner, int device, std::int64_t picks, std::int64_t work, py::array lists,
               std::uint64_t lists_there, std::int64_t launch_size, std::optional<py::array> far_out,
               std::uint64_t far_there, const std::vector<Layer>& layers)
      : runner_(std::move(runner)),
        layers_(memory_of(device, picks, work, lists, lists_there, launch_size, far_out, far_there),
                layers_of(picks, layers)) {
    alive_.push_back(lists);
    if (far_out) alive_.push_back(*far_out);
    for (const Layer& layer : layers) alive_.push_back(std::get<0>(layer));
  }

  void begin_token(std::uintptr_t stream, std::int32_t predicted, std::int32_t experts,
                   std::optional<std::int64_t> max_bytes, const std::string& ahead, std::int32_t lookahead,
                   std::int64_t stream_tokens, const std::string& miss) {
    layers_.begin_token(
        {reinterpret_cast<void*>(stream),
         prefetching(options(), predicted, experts, max_bytes, ahead, lookahead, stream_tokens),
         miss_of(miss)});
  }

  // clocks: has begin_launch(bytes) and end_launch(), or None.
  std::int64_t run(std::int32_t layer, const py::object& clocks) {
    LaunchHooks hooks;
    if (!clocks.is_none()) {
      hooks.begin = [&](std::int64_t bytes) {
        const py::gil_scoped_acquire held;
        clocks.attr("begin_launch")(bytes);
      };
      hooks.end = [&] {
        const py::gil_scoped_acquire held;
        clocks.attr("end_launch")();
      };
    }
    return object().call(
        [&](ExpertRunner& runner) { return layers_.run(&runner, layer, check_signals, hooks); });
  }

 private:
  const RunnerObject& object() const { return runner_.cast<const RunnerObject&>(); }
  const RunnerOptions& options() const { return object().parts()->runner->options(); }

  DeviceMemory memory_of(int device, std::int64_t picks, std::int64_t work, py::array& lists,
                         std::uint64_t lists_there, std::int64_t launch_size,
                         std::optional<py::array>& far_out, std::uint64_t far_there) const {
    if (lists.ndim() != 1) refuse("lists must be [n]");
    const std::int64_t hidden = options().layout.hidden_size;
    return {device,      picks,
            work,        checked_writable<std::int32_t>("lists", lists, {lists.shape(0)}),
            lists_there, lists.shape(0),
            launch_size, far_out ? checked_writable<float>("far_out", *far_out, {1, hidden}) : nullptr,
            far_there,   hidden};
  }

  std::vector<DeviceLayer> layers_of(std::int64_t picks, const std::vector<Layer>& layers) const {
    const RunnerOptions& of = options();
    if (layers.size() != static_cast<std::size_t>(of.layers)) {
      refuse(std::to_string(layers.size()) + " layers were given for " + std::to_string(of.layers));
    }
    std::vector<DeviceLayer> made;
    for (const auto& [packed, places, inputs, blocks, sum, far] : layers) {
      std::vector<Prediction> predictions;
      for (const auto& [ahead, layer] : places) {
        if (layer < 0 || layer >= of.layers) refuse("scores are for layer " + std::to_string(layer));
        predictions.push_back({ahead, layer});
      }
      const std::int64_t words = 2 * picks + static_cast<std::int64_t>(places.size()) * of.experts +
                                 (inputs ? of.layout.hidden_size : 0);
      made.push_back({checked<std::int32_t>("packed", packed, {words}), std::move(predictions), inputs,
                      blocks, sum, far});
    }
    return made;
  }

  py::object runner_;
  std::vector<py::object> alive_;
  DeviceLayers layers_;
};

}  // namespace

void bind_device_layers(py::module_& m) {
  py::class_<PreparedLaunch>(m, "PreparedLaunch")
      .def(py::init(&prepared), py::arg("kernel"), py::arg("grid"), py::arg("values"))
      .def(
          "__call__",
          [](const PreparedLaunch& launch, std::uintptr_t stream) {
            if (launch.has_blanks()) refuse("the launch has arguments that are not known yet");
            launch.launch(reinterpret_cast<void*>(stream), {});
          },
          py::arg("stream"));
  py::class_<LayersObject>(m, "DeviceLayers")
      .def(py::init<py::object, int, std::int64_t, std::int64_t, py::array, std::uint64_t, std::int64_t,
                    std::optional<py::array>, std::uint64_t, const std::vector<Layer>&>(),
           py::arg("runner"), py::kw_only(), py::arg("device"), py::arg("picks"), py::arg("work"),
           py::arg("lists"), py::arg("lists_there"), py::arg("launch_size"), py::arg("far_out"),
           py::arg("far_there"), py::arg("layers"))
      .def("begin_token", &LayersObject::begin_token, py::arg("stream"), py::kw_only(), py::arg("predicted"),
           py::arg("experts"), py::arg("max_bytes"), py::arg("ahead"), py::arg("lookahead"),
           py::arg("stream_tokens"), py::arg("miss"))
      .def("run", &LayersObject::run, py::arg("layer"), py::arg("clocks") = py::none());
}

}  // namespace moechat
