// Checks of array arguments; a failed check raises ValueError with the name of the argument.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

namespace moechat {

namespace py = pybind11;

[[noreturn]] inline void refuse(const std::string& message) { throw py::value_error(message); }

inline std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

inline std::vector<std::int64_t> shape_of(const py::array& array) {
  return {array.shape(), array.shape() + array.ndim()};
}

inline void require_shape(const char* name, const py::array& array, const std::vector<std::int64_t>& shape) {
  if (shape_of(array) != shape) {
    refuse(std::string(name) + " has shape " + shape_text(shape_of(array)) + "; it must be " +
           shape_text(shape));
  }
}

template <class T>
void require_type(const char* name, const py::array& array) {
  if (!py::isinstance<py::array_t<T>>(array)) {
    refuse(std::string(name) + " has dtype " + py::str(array.dtype()).cast<std::string>() + "; it must be " +
           py::str(py::dtype::of<T>()).cast<std::string>());
  }
}

// Checks type, shape and contiguity; returns the data.
template <class T>
const T* checked(const char* name, const py::array& array, const std::vector<std::int64_t>& shape) {
  require_type<T>(name, array);
  require_shape(name, array, shape);
  if (!(array.flags() & py::array::c_style)) refuse(std::string(name) + " is not C-contiguous");
  return static_cast<const T*>(array.data());
}

template <class T>
T* checked_writable(const char* name, py::array& array, const std::vector<std::int64_t>& shape) {
  checked<T>(name, array, shape);
  if (!array.writeable()) refuse(std::string(name) + " is read-only");
  return static_cast<T*>(array.mutable_data());
}

// Checks that an input array does not overlap `out`.
inline void refuse_overlap(const char* name, const py::array& array, const py::array& out) {
  const auto* from = static_cast<const char*>(array.data());
  const auto* to = static_cast<const char*>(out.data());
  if (from < to + out.nbytes() && to < from + array.nbytes()) {
    refuse("out overlaps " + std::string(name));
  }
}

}  // namespace moechat
