// Checksums of the regions of a link, as Python gives them.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "link/record_checksums.h"

namespace moechat {

// Checks that there is none, or one entry for each region.
inline void require_checksums(const std::vector<py::object>& checksums, std::size_t regions) {
  if (!checksums.empty() && checksums.size() != regions) {
    refuse("checksums has " + std::to_string(checksums.size()) + " entries for " + std::to_string(regions) +
           " regions");
  }
}

// Those of one region: a uint32 array, copied; None, or no list: none.
inline RecordChecksums checksums_of(const std::vector<py::object>& checksums, std::size_t region,
                                    std::int64_t record_bytes) {
  RecordChecksums result;
  if (region >= checksums.size() || checksums[region].is_none()) return result;
  if (!py::isinstance<py::array>(checksums[region])) refuse("an entry of checksums is no array");
  const auto array = checksums[region].cast<py::array>();
  const auto* const values = checked<std::uint32_t>("checksums", array, shape_of(array));
  result.record_bytes = record_bytes;
  result.values.assign(values, values + array.size());
  return result;
}

}  // namespace moechat
