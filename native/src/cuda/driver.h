// Loads NVIDIA's driver at run time, so that building and installing need no part of CUDA.
//
// Declares only the functions that moechat calls, with the types of the driver's binary interface (CUDA
// 12.0). Symbols are looked up with their version suffix, so that a newer driver returns the same functions.
// The environment variable MOECHAT_CUDA_DRIVER names another library to load (tests use one that computes in
// host memory).
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace moechat::cuda {

using Result = int;  // CUresult
using Device = int;
using Context = void*;
using Stream = void*;
using Event = void*;
using Pointer = unsigned long long;  // CUdeviceptr

constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostRegisterPortable = 1;

// CUmemcpyAttributes: how the sources of a batch are read.
struct CopyAttributes {
  int source_order;    // CUmemcpySrcAccessOrder
  int source_hint[2];  // CUmemLocation; zeros: none
  int target_hint[2];
  unsigned flags;
};
constexpr int kSourceInStreamOrder = 1;

struct Driver {
  Result (*init)(unsigned flags);
  Result (*driver_version)(int* version);
  Result (*error_name)(Result error, const char** text);
  Result (*error_string)(Result error, const char** text);
  Result (*device_count)(int* count);
  Result (*device_get)(Device* device, int ordinal);
  Result (*primary_retain)(Context* context, Device device);
  Result (*push_context)(Context context);
  Result (*pop_context)(Context* context);
  Result (*memory_info)(std::size_t* free, std::size_t* total);
  Result (*memory_alloc)(Pointer* at, std::size_t bytes);
  Result (*memory_free)(Pointer at);
  Result (*host_register)(void* at, std::size_t bytes, unsigned flags);
  Result (*host_unregister)(void* at);
  Result (*stream_priorities)(int* least, int* greatest);
  Result (*stream_create)(Stream* stream, unsigned flags, int priority);
  Result (*stream_destroy)(Stream stream);
  Result (*stream_wait_event)(Stream stream, Event event, unsigned flags);
  Result (*stream_synchronize)(Stream stream);
  Result (*event_create)(Event* event, unsigned flags);
  Result (*event_destroy)(Event event);
  Result (*event_record)(Event event, Stream stream);
  Result (*event_query)(Event event);
  Result (*copy_to_device)(Pointer to, const void* from, std::size_t bytes, Stream stream);
  Result (*launch_kernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream,
                          void** parameters, void** extra);
  // Null before CUDA 12.4. It returns an error past the last parameter.
  Result (*parameter_info)(void* function, std::size_t index, std::size_t* offset, std::size_t* size);
  // Null if the driver has no batches: they exist from CUDA 12.8; since 13.0 without the index of a failure.
  Result (*copy_batch_12)(Pointer* to, Pointer* from, std::size_t* bytes, std::size_t count,
                          CopyAttributes* attributes, std::size_t* attributes_from,
                          std::size_t attributes_count, std::size_t* failed, Stream stream);
  Result (*copy_batch_13)(const Pointer* to, const Pointer* from, const std::size_t* bytes, std::size_t count,
                          const CopyAttributes* attributes, const std::size_t* attributes_from,
                          std::size_t attributes_count, Stream stream);
  bool copies_batches() const { return copy_batch_12 != nullptr || copy_batch_13 != nullptr; }
  // Enqueues copies from pinned memory, which run in any order among themselves.
  Result copy_batch(Pointer* to, Pointer* from, std::size_t* bytes, std::size_t count, Stream stream) const;
};

// There is no driver or no GPU, or the driver cannot be used; what() says which.
class Unavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A call failed.
class Error : public std::runtime_error {
 public:
  Error(Result code, const std::string& text) : std::runtime_error(text), code_(code) {}
  Result code() const { return code_; }
  // Whether this process cannot compute on the GPU any more (CUDA Driver API, CUresult: "the process must be
  // terminated").
  bool sticky() const;

 private:
  Result code_;
};

// Returns the driver; the first call loads and initialises it. Throws Unavailable; later calls try again.
const Driver& driver();
// Throws Error with the name of the call and the driver's name and explanation of the error, unless result is
// success.
void check(Result result, const char* call);
// Returns text such as "cuMemcpyHtoDAsync: CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was
// encountered".
std::string explain(Result result, const char* call);

// Returns the primary context of a GPU, which torch uses too. It is kept until the process ends, because
// releasing it would reset the GPU under torch. Throws Unavailable if there is no such GPU, Error.
Context primary_context(int ordinal);

// Makes a context current for a scope and restores the previous one. Throws Error.
class Current {
 public:
  explicit Current(Context context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

}  // namespace moechat::cuda
