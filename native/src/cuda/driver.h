// NVIDIA's driver, opened while the program runs: building and installing need nothing of CUDA, and a machine
// without a card loses nothing.
//
// Only what moechat calls is declared, with the types of the driver's binary interface (CUDA 12.0). Symbols
// with a version at their end are asked for by that name, so that a newer driver gives the same functions.
// MOECHAT_CUDA_DRIVER names another library to open (tests bring one that computes in host memory).
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
constexpr unsigned kEventBlockingSync = 1;
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
  Result (*event_synchronize)(Event event);
  Result (*copy_to_device)(Pointer to, const void* from, std::size_t bytes, Stream stream);
  // Null where the driver has none: from CUDA 12.8, and since 13.0 without the place of a failure.
  Result (*copy_batch_12)(Pointer* to, Pointer* from, std::size_t* bytes, std::size_t count,
                          CopyAttributes* attributes, std::size_t* attributes_from,
                          std::size_t attributes_count, std::size_t* failed, Stream stream);
  Result (*copy_batch_13)(const Pointer* to, const Pointer* from, const std::size_t* bytes, std::size_t count,
                          const CopyAttributes* attributes, const std::size_t* attributes_from,
                          std::size_t attributes_count, Stream stream);
  bool copies_batches() const { return copy_batch_12 != nullptr || copy_batch_13 != nullptr; }
  // Copies from pinned memory, in any order, in the stream's turn.
  Result copy_batch(Pointer* to, Pointer* from, std::size_t* bytes, std::size_t count, Stream stream) const;
};

// There is no driver, no card, or the driver cannot be used; what() says which.
class Unavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A call failed.
class Error : public std::runtime_error {
 public:
  Error(Result code, const std::string& text) : std::runtime_error(text), code_(code) {}
  Result code() const { return code_; }
  // Nothing can be computed on the card any more by this process (CUDA Driver API, CUresult: "the process
  // must be terminated").
  bool sticky() const;

 private:
  Result code_;
};

// The driver, opened and initialised by the first call. Throws Unavailable, every time anew.
const Driver& driver();
// Throws Error with the name of the call, and the driver's name and explanation of the error.
void check(Result result, const char* call);
// "cuMemcpyHtoDAsync: CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered"
std::string explain(Result result, const char* call);

// The primary context of a card, which torch uses too. Kept until the process ends: releasing it would reset
// the card under torch. Throws Unavailable for a card that is not there, Error.
Context primary_context(int ordinal);

// Makes a context current for a scope, whatever was current before. Throws Error.
class Current {
 public:
  explicit Current(Context context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

}  // namespace moechat::cuda
