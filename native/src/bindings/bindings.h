// The functions that add the parts of the module, one for each source file here.
#pragma once

#include <pybind11/pybind11.h>

namespace moechat {

void bind_checks(pybind11::module_& m);
void bind_kept(pybind11::module_& m);
void bind_linear(pybind11::module_& m);
void bind_link(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_device_layers(pybind11::module_& m);
void bind_cache(pybind11::module_& m);
void bind_offload(pybind11::module_& m);
void bind_routing(pybind11::module_& m);
void bind_simulate(pybind11::module_& m);
void bind_draws(pybind11::module_& m);
void bind_layer_plan(pybind11::module_& m);
void bind_dense(pybind11::module_& m);
void bind_decode(pybind11::module_& m);
void bind_layer_step(pybind11::module_& m);
void bind_token_pass(pybind11::module_& m);

}  // namespace moechat
