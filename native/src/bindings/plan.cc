// Python bindings of the configurator's inner loops.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "plan/layer_plan.h"

namespace moechat {
namespace {

using Doubles = py::array_t<double>;
using Counts = py::array_t<std::int64_t>;

std::vector<double> copied(const char* name, const py::array& array, const std::vector<std::int64_t>& shape) {
  const double* data = checked<double>(name, array, shape);
  return {data, data + array.size()};
}

// A checked copy, since the caller's array may change in another thread.
std::vector<std::int64_t> numbers_of(const char* name, const py::array& array,
                                     const std::vector<std::int64_t>& shape, std::int64_t most) {
  const std::int64_t* data = checked<std::int64_t>(name, array, shape);
  std::vector<std::int64_t> copy(data, data + array.size());
  for (const std::int64_t value : copy) {
    if (value < 0 || value > most) {
      refuse(std::string(name) + " holds " + std::to_string(value) + "; it must be 0 to " +
             std::to_string(most));
    }
  }
  return copy;
}

LayerPlan make(int miss, int top_k, const std::vector<double>& times, double grain, const py::array& shares,
               const py::array& chances, const py::array& accuracy, const py::array& cached) {
  if (miss < 0 || miss > 3) refuse("miss is " + std::to_string(miss) + "; it must be 0 to 3");
  if (times.size() != 8) refuse("times has " + std::to_string(times.size()) + " entries; it must have 8");
  const auto shape = shape_of(cached);
  if (shape.size() != 4 || shape[2] < 2) {
    refuse("cached has shape " + shape_text(shape) + "; it must be [outcomes, layers, experts + 1, depth]");
  }
  const std::vector<std::int64_t> places{shape[0], shape[1], shape[2]};
  LayerTables tables{shape[0],
                     shape[1],
                     shape[2] - 1,
                     shape[3],
                     copied("shares", shares, places),
                     copied("chances", chances, places),
                     copied("accuracy", accuracy, {shape[1], shape[3]}),
                     copied("cached", cached, shape)};
  const LayerCosts costs{static_cast<MissModel>(miss),
                         top_k,
                         times[0],
                         times[1],
                         times[2],
                         times[3],
                         times[4],
                         times[5],
                         times[6],
                         times[7],
                         grain};
  return LayerPlan(costs, std::move(tables));
}

std::tuple<Doubles, Doubles, Doubles, Doubles> evaluate(const LayerPlan& plan, const py::array& experts,
                                                        const py::array& theta, double more) {
  const auto shape = shape_of(experts);
  if (shape.size() != 2 || shape[1] != plan.layers()) {
    refuse("experts has shape " + shape_text(shape) + "; it must be [candidates, " +
           std::to_string(plan.layers()) + "]");
  }
  if (!(more > 0)) refuse("more is " + std::to_string(more) + "; it must be above 0");
  const auto counts = numbers_of("experts", experts, shape, plan.experts());
  const auto shares = copied("theta", theta, shape);
  Doubles loaded(shape), exposed(shape), windows(shape), prices(shape);
  double* out[4] = {loaded.mutable_data(), exposed.mutable_data(), windows.mutable_data(),
                    prices.mutable_data()};
  {
    ReleaseGil released;
    for (std::int64_t i = 0; i < shape[0]; ++i) {
      const std::int64_t at = i * shape[1];
      plan.evaluate(counts.data() + at, shares.data() + at, more,
                    {out[0] + at, out[1] + at, out[2] + at, out[3] + at});
    }
  }
  return {loaded, exposed, windows, prices};
}

std::tuple<Counts, Doubles, Doubles, Doubles> split(const LayerPlan& plan, const py::array& volumes,
                                                    double theta) {
  const auto shape = shape_of(volumes);
  if (shape.size() != 2 || shape[1] != plan.layers()) {
    refuse("volumes has shape " + shape_text(shape) + "; it must be [variants, " +
           std::to_string(plan.layers()) + "]");
  }
  const auto held = copied("volumes", volumes, shape);
  Counts experts(shape);
  Doubles loaded(shape), exposed(shape), windows(shape);
  std::int64_t* counts = experts.mutable_data();
  double* out[3] = {loaded.mutable_data(), exposed.mutable_data(), windows.mutable_data()};
  {
    ReleaseGil released;
    for (std::int64_t i = 0; i < shape[0]; ++i) {
      const std::int64_t at = i * shape[1];
      plan.split(held.data() + at, theta, counts + at, out[0] + at, out[1] + at, out[2] + at);
    }
  }
  return {experts, loaded, exposed, windows};
}

Doubles option_costs(const LayerPlan& plan, const py::array& experts, const py::array& theta,
                     const py::array& windows, const py::array& prices, double tie) {
  const std::int64_t pairs = experts.size();
  const auto counts = numbers_of("experts", experts, {pairs}, plan.experts());
  const auto shares = copied("theta", theta, {pairs});
  const auto reach = copied("windows", windows, {plan.layers()});
  const auto worth = copied("prices", prices, {plan.layers()});
  Doubles out(std::vector<std::int64_t>{plan.layers(), pairs});
  double* data = out.mutable_data();
  {
    ReleaseGil released;
    plan.option_costs(counts.data(), shares.data(), pairs, reach.data(), worth.data(), tie, data);
  }
  return out;
}

}  // namespace

void bind_layer_plan(py::module_& m) {
  py::class_<LayerPlan>(m, "LayerPlan")
      .def(py::init(&make), py::arg("miss"), py::arg("top_k"), py::arg("times"), py::arg("grain"),
           py::arg("shares"), py::arg("chances"), py::arg("accuracy"), py::arg("cached"))
      .def("evaluate", &evaluate, py::arg("experts"), py::arg("theta"), py::arg("more"))
      .def("split", &split, py::arg("volumes"), py::arg("theta"))
      .def("option_costs", &option_costs, py::arg("experts"), py::arg("theta"), py::arg("windows"),
           py::arg("prices"), py::arg("tie"));
}

}  // namespace moechat
