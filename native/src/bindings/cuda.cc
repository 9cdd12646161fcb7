// The CUDA driver and the link into VRAM.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/checksums.h"
#include "bindings/gil.h"
#include "bindings/kernel_values.h"
#include "bindings/link_holder.h"
#include "cuda/driver.h"
#include "cuda/kernel.h"
#include "link/cuda_link.h"
#include "link/file_link.h"

namespace moechat {
namespace {

using Part = std::tuple<py::object, std::int64_t, bool>;
using Region = std::tuple<py::object, std::int64_t, bool, std::string, std::int64_t>;

RegionPart part_of(const py::object& data, std::int64_t bytes, bool pinned, std::vector<py::object>* alive) {
  RegionPart part{bytes, nullptr, pinned};
  if (data.is_none()) return part;
  if (!py::isinstance<py::array>(data)) refuse("a region is neither an array nor None");
  const auto array = data.cast<py::array>();
  part.data = checked<std::uint8_t>("a region", array, shape_of(array));
  if (array.nbytes() != bytes) {
    refuse("a region of " + std::to_string(bytes) + " bytes is an array of " +
           std::to_string(array.nbytes()));
  }
  alive->push_back(array);
  return part;
}

std::unique_ptr<LinkHolder> cuda_link(const std::vector<Region>& regions, int device,
                                      std::int64_t in_flight_bytes, std::int64_t buffer_bytes, int buffers,
                                      int threads, int copies, const std::vector<py::object>& checksums,
                                      std::int64_t record_bytes) {
  CudaLinkOptions options;
  options.device = device;
  options.in_flight_bytes = in_flight_bytes;
  options.buffer_bytes = buffer_bytes;
  options.buffers = buffers;
  options.threads = threads;
  options.copies = copies;
  require_checksums(checksums, regions.size());
  std::vector<CudaRegion> list;
  std::vector<py::object> alive;
  for (const auto& [data, bytes, pinned, path, offset] : regions) {
    CudaRegion region{{}, path, offset, checksums_of(checksums, list.size(), record_bytes)};
    if (py::isinstance<py::list>(data)) {
      for (const auto& [piece, size, fixed] : data.cast<std::vector<Part>>()) {
        region.parts.push_back(part_of(piece, size, fixed, &alive));
      }
      if (region.bytes() != bytes) {
        refuse("a region of " + std::to_string(bytes) + " bytes has parts of " +
               std::to_string(region.bytes()));
      }
    } else {
      region.parts.push_back(part_of(data, bytes, pinned, &alive));
    }
    list.push_back(std::move(region));
  }
  std::unique_ptr<Link> link;
  try {
    const ReleaseGil released;
    link = make_cuda_link(std::move(list), options);
  } catch (const FileError& error) {
    raise_os_error(error.code().value(), error.path());
  }
  return std::make_unique<LinkHolder>(std::move(link), std::move(alive));
}

std::pair<void*, std::size_t> bytes_of(py::array& array) {
  auto* const data = checked_writable<std::uint8_t>("memory", array, shape_of(array));
  return {data, static_cast<std::size_t>(array.nbytes())};
}

// Excludes pinned memory from forked children: they cannot use it, and copying gigabytes could exhaust
// memory.
void keep_from_children([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes,
                        [[maybe_unused]] bool keep) {
#if defined(MADV_DONTFORK)
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / page * page;
  // Errors are ignored: only forked children are affected.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, keep ? MADV_DONTFORK : MADV_DOFORK);
#endif
}

void pin(py::array array, int device) {
  const auto [data, bytes] = bytes_of(array);
  const ReleaseGil released;
  const cuda::Current current(cuda::primary_context(device));
  cuda::check(cuda::driver().host_register(data, bytes, cuda::kHostRegisterPortable), "cuMemHostRegister");
  keep_from_children(data, bytes, true);
}

void unpin(py::array array, int device) {
  const auto [data, bytes] = bytes_of(array);
  const ReleaseGil released;
  const cuda::Current current(cuda::primary_context(device));
  keep_from_children(data, bytes, false);
  cuda::check(cuda::driver().host_unregister(data), "cuMemHostUnregister");
}

std::pair<std::size_t, std::size_t> memory(int device) {
  std::size_t free = 0, total = 0;
  const ReleaseGil released;
  const cuda::Current current(cuda::primary_context(device));
  cuda::check(cuda::driver().memory_info(&free, &total), "cuMemGetInfo");
  return {free, total};
}

// Arguments: stream, grid x, y and z, then the kernel's. The GIL is kept: the driver only queues the kernel.
void launch(const cuda::Kernel& kernel, const py::args& given) {
  constexpr std::size_t kFirst = 4;
  const std::string& kinds = kernel.kinds();
  if (given.size() != kFirst + kinds.size()) {
    refuse("a kernel with " + std::to_string(kinds.size()) + " parameters was given " +
           std::to_string(given.size()) + " values; the stream and the grid are four more");
  }
  std::array<cuda::Kernel::Value, cuda::Kernel::kMostParameters> values;
  for (std::size_t at = 0; at < kinds.size(); ++at) values[at] = value_of(kinds[at], given[kFirst + at]);
  const auto number = [&](std::size_t at) { return given[at].cast<unsigned>(); };
  kernel.launch(reinterpret_cast<void*>(given[0].cast<std::uintptr_t>()), {number(1), number(2), number(3)},
                values.data());
}

// A thread may call these that has not computed on the GPU yet.
void copy_in(std::uintptr_t stream, std::uint64_t to, std::uintptr_t from, std::size_t bytes, int device) {
  const cuda::Current current(cuda::primary_context(device));
  cuda::check(cuda::driver().copy_to_device(to, reinterpret_cast<const void*>(from), bytes,
                                            reinterpret_cast<void*>(stream)),
              "cuMemcpyHtoDAsync");
}

void finish(std::uintptr_t stream, int device) {
  const ReleaseGil released;
  const cuda::Current current(cuda::primary_context(device));
  cuda::check(cuda::driver().stream_synchronize(reinterpret_cast<void*>(stream)), "cuStreamSynchronize");
}

int driver_version() {
  int version = 0;
  const ReleaseGil released;
  cuda::check(cuda::driver().driver_version(&version), "cuDriverGetVersion");
  return version;
}

}  // namespace

void bind_cuda(py::module_& m) {
  py::register_exception<cuda::Unavailable>(m, "CudaUnavailableError", PyExc_RuntimeError);
  // Never released: exceptions can be raised until the process ends.
  static py::handle error_type = py::exception<cuda::Error>(m, "CudaError", PyExc_RuntimeError).release();
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const cuda::Error& error) {
      py::object raised = error_type(error.what());
      raised.attr("code") = error.code();
      raised.attr("sticky") = error.sticky();
      PyErr_SetObject(error_type.ptr(), raised.ptr());
    }
  });
  py::class_<cuda::Kernel>(m, "CudaKernel")
      .def(py::init([](std::uintptr_t function, unsigned threads, unsigned shared_bytes, std::string kinds) {
             return cuda::Kernel(reinterpret_cast<void*>(function), threads, shared_bytes, std::move(kinds));
           }),
           py::arg("function"), py::arg("threads"), py::arg("shared_bytes"), py::arg("kinds"))
      .def("__call__", &launch);
  m.def("cuda_copy_in", &copy_in, py::arg("stream"), py::arg("to"), py::arg("source"), py::arg("nbytes"),
        py::arg("device") = 0);
  m.def("cuda_finish", &finish, py::arg("stream"), py::arg("device") = 0);
  m.def("cuda_driver_version", &driver_version);
  m.def("cuda_memory", &memory, py::arg("device") = 0);
  m.def("cuda_pin", &pin, py::arg("memory"), py::arg("device") = 0);
  m.def("cuda_unpin", &unpin, py::arg("memory"), py::arg("device") = 0);
  m.def("cuda_link", &cuda_link, py::arg("regions"), py::arg("device") = 0, py::arg("in_flight_bytes") = 0,
        py::arg("buffer_bytes") = 0, py::arg("buffers") = 0, py::arg("threads") = 0, py::arg("copies") = 1,
        py::arg("checksums") = std::vector<py::object>(), py::arg("record_bytes") = 0);
}

}  // namespace moechat
