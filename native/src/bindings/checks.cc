// Checksums of records, and guards of mapped files.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "memory/crc32c.h"
#include "memory/mapped_guard.h"

namespace moechat {
namespace {

CrcWay way_of(const std::string& name) {
  if (name.empty()) return crc_ways().back();
  for (const CrcWay way : crc_ways()) {
    if (name == crc_way_name(way)) return way;
  }
  refuse("way is '" + name + "', which this processor does not have");
}

std::vector<std::string> crc32c_ways_py() {
  std::vector<std::string> names;
  for (const CrcWay way : crc_ways()) names.emplace_back(crc_way_name(way));
  return names;
}

std::uint32_t crc32c_py(const py::array& data, std::uint32_t before, const std::string& way) {
  const auto* const bytes = checked<std::uint8_t>("data", data, shape_of(data));
  const auto count = static_cast<std::size_t>(data.nbytes());
  const CrcWay chosen = way_of(way);
  const ReleaseGil released;
  return crc32c_by(chosen, bytes, count, before);
}

py::array_t<std::uint32_t> record_checksums_py(const py::array& data, std::int64_t record_bytes) {
  const auto* const bytes = checked<std::uint8_t>("data", data, shape_of(data));
  if (record_bytes < 1 || data.nbytes() % record_bytes != 0) {
    refuse("data has " + std::to_string(data.nbytes()) + " bytes, not whole records of " +
           std::to_string(record_bytes));
  }
  const std::int64_t records = data.nbytes() / record_bytes;
  py::array_t<std::uint32_t> result(records);
  auto* const values = result.mutable_data();
  const ReleaseGil released;
  for (std::int64_t i = 0; i < records; ++i) {
    values[i] = crc32c(bytes + i * record_bytes, static_cast<std::size_t>(record_bytes));
  }
  return result;
}

std::unique_ptr<MappedGuard> guard_of(const py::buffer& memory) {
  const py::buffer_info info = memory.request();
  return std::make_unique<MappedGuard>(info.ptr, static_cast<std::size_t>(info.size * info.itemsize));
}

}  // namespace

void bind_checks(py::module_& m) {
  m.def("crc32c_ways", &crc32c_ways_py);
  m.def("crc32c", &crc32c_py, py::arg("data"), py::arg("before") = 0, py::arg("way") = "");
  m.def("record_checksums", &record_checksums_py, py::arg("data"), py::arg("record_bytes"));
  m.def("mapping_losses", &mapping_losses);
  py::class_<MappedGuard>(m, "MappedGuard")
      .def(py::init(&guard_of), py::arg("memory"))
      .def("lost", &MappedGuard::lost);
}

}  // namespace moechat
