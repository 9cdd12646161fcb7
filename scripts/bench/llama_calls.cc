// The calls of llama.cpp that bench/cpu and gpu_check time, with plain arguments for ctypes. Compiled against the headers
// of the very release whose prebuilt libraries it is linked to, so that the layout of llama.cpp's structs is
// stated in one place: its own. No kernel is compiled here.

#include <cstdint>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

namespace {

// Errors, and lines that continue one, go to stderr; the rest is dropped.
void keep_errors(ggml_log_level level, const char* text, void*) {
  static ggml_log_level last = GGML_LOG_LEVEL_NONE;
  if (level != GGML_LOG_LEVEL_CONT) last = level;
  if (last == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

}  // namespace

extern "C" {

// Loads the CPU library `file`, or with an empty one the library of `directory` that llama.cpp scores highest
// for this processor. Returns the number of backends.
int peer_start(const char* directory, const char* file) {
  llama_log_set(keep_errors, nullptr);
  if (*file != '\0') {
    ggml_backend_load((std::string(directory) + "/" + file).c_str());
  } else {
    ggml_backend_load_all_from_path(directory);
  }
  llama_backend_init();
  return static_cast<int>(ggml_backend_reg_count());
}

const char* peer_system_info() { return llama_print_system_info(); }

// gpu_layers: layers on a GPU; of these, the experts of the first cpu_moe stay in host memory, as with -ncmoe.
llama_model* peer_load(const char* path, bool repack, int32_t gpu_layers, int32_t cpu_moe) {
  llama_model_params params = llama_model_default_params();
  params.use_extra_bufts = repack;
  params.n_gpu_layers = gpu_layers;
  std::vector<std::string> patterns;
  for (int32_t layer = 0; layer < cpu_moe; ++layer) {
    patterns.push_back("blk\\." + std::to_string(layer) + "\\.ffn_(up|down|gate|gate_up)_(ch|)exps");
  }
  std::vector<llama_model_tensor_buft_override> overrides;
  for (const std::string& pattern : patterns) {
    overrides.push_back({pattern.c_str(), ggml_backend_cpu_buffer_type()});
  }
  overrides.push_back({nullptr, nullptr});
  if (cpu_moe > 0) params.tensor_buft_overrides = overrides.data();
  return llama_model_load_from_file(path, params);
}

void peer_free(llama_model* model) { llama_model_free(model); }

void peer_free_context(llama_context* context) { llama_free(context); }

uint64_t peer_model_bytes(const llama_model* model) { return llama_model_size(model); }

int32_t peer_vocabulary(const llama_model* model) { return llama_vocab_n_tokens(llama_model_get_vocab(model)); }

// `attention` is -1 (llama.cpp's choice), 0 (plain) or 1 (flash). `batch`: tokens of a prompt computed at a time.
llama_context* peer_context(llama_model* model, uint32_t tokens, int32_t threads, int attention, uint32_t batch) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = tokens;
  params.n_batch = params.n_ubatch = batch;
  params.n_threads = params.n_threads_batch = threads;
  params.flash_attn_type = static_cast<llama_flash_attn_type>(attention);
  params.no_perf = true;
  return llama_init_from_model(model, params);
}

void peer_empty(llama_context* context, int32_t threads) {
  llama_memory_clear(llama_get_memory(context), false);
  llama_set_n_threads(context, threads, threads);
}

// Computes tokens after those that the context holds, in pieces of its batch, and waits for the logits.
// Returns the logits of the last one, or null.
const float* peer_feed(llama_context* context, int32_t* tokens, int32_t count) {
  const auto most = static_cast<int32_t>(llama_n_batch(context));
  for (int32_t done = 0; done < count;) {
    const int32_t piece = count - done < most ? count - done : most;
    if (llama_decode(context, llama_batch_get_one(tokens + done, piece)) != 0) return nullptr;
    done += piece;
  }
  return llama_get_logits_ith(context, -1);
}

}  // extern "C"
