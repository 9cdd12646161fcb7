#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "cuda/virtual_clock.h"

namespace moechat::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr const char* kOverride = "MOECHAT_CUDA_DRIVER";
constexpr int kLeastVersion = 12000;
constexpr int kFirstWithBatches = 12080;
constexpr int kBatchesOf13 = 13000;

template <class Function>
void find(void* library, const char* symbol, Function* function) {
  void* const found = dlsym(library, symbol);
  if (found == nullptr) {
    throw Unavailable(std::string("the NVIDIA driver has no ") + symbol +
                      "; moechat needs one for CUDA 12.0 or newer");
  }
  *function = reinterpret_cast<Function>(found);
}

Driver load(void* library) {
  Driver found{};
  find(library, "cuInit", &found.init);
  find(library, "cuDriverGetVersion", &found.driver_version);
  find(library, "cuGetErrorName", &found.error_name);
  find(library, "cuGetErrorString", &found.error_string);
  find(library, "cuDeviceGetCount", &found.device_count);
  find(library, "cuDeviceGet", &found.device_get);
  find(library, "cuDevicePrimaryCtxRetain", &found.primary_retain);
  find(library, "cuCtxPushCurrent_v2", &found.push_context);
  find(library, "cuCtxPopCurrent_v2", &found.pop_context);
  find(library, "cuMemGetInfo_v2", &found.memory_info);
  find(library, "cuMemAlloc_v2", &found.memory_alloc);
  find(library, "cuMemFree_v2", &found.memory_free);
  find(library, "cuMemHostRegister_v2", &found.host_register);
  find(library, "cuMemHostUnregister", &found.host_unregister);
  find(library, "cuCtxGetStreamPriorityRange", &found.stream_priorities);
  find(library, "cuStreamCreateWithPriority", &found.stream_create);
  find(library, "cuStreamDestroy_v2", &found.stream_destroy);
  find(library, "cuStreamWaitEvent", &found.stream_wait_event);
  find(library, "cuStreamSynchronize", &found.stream_synchronize);
  find(library, "cuEventCreate", &found.event_create);
  find(library, "cuEventDestroy_v2", &found.event_destroy);
  find(library, "cuEventRecord", &found.event_record);
  find(library, "cuEventQuery", &found.event_query);
  find(library, "cuMemcpyHtoDAsync_v2", &found.copy_to_device);
  return found;
}

template <class Function>
void find_if_any(void* library, const char* symbol, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, symbol));
}

// Of a stand-in that keeps the time; no driver has these.
void take_clock(void* library) {
  static VirtualClock clock{};
  find_if_any(library, "moechat_clock_now", &clock.now);
  if (clock.now == nullptr) return;
  find(library, "moechat_clock_step", &clock.step);
  find(library, "moechat_clock_watch", &clock.watch);
  find(library, "moechat_clock_unwatch", &clock.unwatch);
  find(library, "moechat_clock_compute", &clock.compute);
  set_virtual_clock(&clock);
}

std::string text_of(const Driver& from, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (from.error_name(result, &name) != kSuccess || name == nullptr) name = "unknown error";
  if (from.error_string(result, &text) != kSuccess || text == nullptr) text = "no explanation";
  return std::string(name) + " (" + std::to_string(result) + "): " + text;
}

Driver open() {
  const char* const named = std::getenv(kOverride);
  const std::string path = named != nullptr && *named != '\0' ? named : kLibrary;
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    throw Unavailable("no NVIDIA driver can be opened: " + std::string(why == nullptr ? path.c_str() : why));
  }
  Driver found{};
  int version = 0;
  try {
    found = load(library);
    const Result initialised = found.init(0);
    if (initialised != kSuccess) {
      throw Unavailable("the NVIDIA driver cannot be initialised: cuInit: " + text_of(found, initialised));
    }
    if (found.driver_version(&version) != kSuccess || version < kLeastVersion) {
      throw Unavailable("the NVIDIA driver is for CUDA " + std::to_string(version / 1000) + "." +
                        std::to_string(version % 1000 / 10) + "; moechat needs one for 12.0 or newer");
    }
    find_if_any(library, "cuLaunchKernel", &found.launch_kernel);  // stand-ins for the driver run no kernels
    find_if_any(library, "cuFuncGetParamInfo", &found.parameter_info);
    if (version >= kBatchesOf13) {
      find_if_any(library, "cuMemcpyBatchAsync_v2", &found.copy_batch_13);
    } else if (version >= kFirstWithBatches) {
      find_if_any(library, "cuMemcpyBatchAsync", &found.copy_batch_12);
    }
    take_clock(library);
  } catch (...) {
    dlclose(library);
    throw;
  }
  return found;  // the library stays loaded until the process ends
}

}  // namespace

const Driver& driver() {
  static const Driver opened = open();  // if open() throws, the next call tries again
  return opened;
}

Result Driver::copy_batch(Pointer* to, Pointer* from, std::size_t* bytes, std::size_t count,
                          Stream stream) const {
  CopyAttributes attributes{};
  attributes.source_order = kSourceInStreamOrder;
  std::size_t first = 0;
  if (copy_batch_13 != nullptr) {
    return copy_batch_13(to, from, bytes, count, &attributes, &first, 1, stream);
  }
  std::size_t failed = 0;
  return copy_batch_12(to, from, bytes, count, &attributes, &first, 1, &failed, stream);
}

bool Error::sticky() const {
  switch (code_) {
    case 214:  // CUDA_ERROR_ECC_UNCORRECTABLE
    case 220:  // CUDA_ERROR_NVLINK_UNCORRECTABLE
    case 226:  // CUDA_ERROR_CONTAINED
    case 700:  // CUDA_ERROR_ILLEGAL_ADDRESS
    case 702:  // CUDA_ERROR_LAUNCH_TIMEOUT
    case 709:  // CUDA_ERROR_CONTEXT_IS_DESTROYED
    case 710:  // CUDA_ERROR_ASSERT
    case 714:  // CUDA_ERROR_HARDWARE_STACK_ERROR
    case 715:  // CUDA_ERROR_ILLEGAL_INSTRUCTION
    case 716:  // CUDA_ERROR_MISALIGNED_ADDRESS
    case 717:  // CUDA_ERROR_INVALID_ADDRESS_SPACE
    case 718:  // CUDA_ERROR_INVALID_PC
    case 719:  // CUDA_ERROR_LAUNCH_FAILED
    case 721:  // CUDA_ERROR_TENSOR_MEMORY_LEAK
    case 999:  // CUDA_ERROR_UNKNOWN
      return true;
    default:
      return false;
  }
}

std::string explain(Result result, const char* call) {
  return std::string(call) + ": " + text_of(driver(), result);
}

void check(Result result, const char* call) {
  if (result != kSuccess) throw Error(result, explain(result, call));
}

Context primary_context(int ordinal) {
  static std::mutex mutex;
  static std::map<int, Context> retained;
  const Driver& cuda = driver();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = retained.find(ordinal);
  if (known != retained.end()) return known->second;
  int count = 0;
  check(cuda.device_count(&count), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count) {
    throw Unavailable("there is no GPU " + std::to_string(ordinal) + ": the driver knows " +
                      std::to_string(count));
  }
  Device device = 0;
  Context context = nullptr;
  check(cuda.device_get(&device, ordinal), "cuDeviceGet");
  check(cuda.primary_retain(&context, device), "cuDevicePrimaryCtxRetain");
  retained.emplace(ordinal, context);
  return context;
}

Current::Current(Context context) { check(driver().push_context(context), "cuCtxPushCurrent"); }

Current::~Current() {
  Context popped = nullptr;
  static_cast<void>(driver().pop_context(&popped));
}

}  // namespace moechat::cuda
