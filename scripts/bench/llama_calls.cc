// The calls of llama.cpp that bench/cpu times, with plain arguments for ctypes. Compiled against the headers
// of the very release whose prebuilt libraries it is linked to, so that the layout of llama.cpp's structs is
// stated in one place: its own. No kernel is compiled here.

#include <cstdint>
#include <string>

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

llama_model* peer_load(const char* path, bool repack) {
  llama_model_params params = llama_model_default_params();
  params.use_extra_bufts = repack;
  return llama_model_load_from_file(path, params);
}

uint64_t peer_model_bytes(const llama_model* model) { return llama_model_size(model); }

int32_t peer_vocabulary(const llama_model* model) { return llama_vocab_n_tokens(llama_model_get_vocab(model)); }

// `attention` is -1 (llama.cpp's choice), 0 (plain) or 1 (flash).
llama_context* peer_context(llama_model* model, uint32_t tokens, int32_t threads, int attention) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = tokens;
  params.n_batch = params.n_ubatch = 512;
  params.n_threads = params.n_threads_batch = threads;
  params.flash_attn_type = static_cast<llama_flash_attn_type>(attention);
  params.no_perf = true;
  return llama_init_from_model(model, params);
}

void peer_empty(llama_context* context, int32_t threads) {
  llama_memory_clear(llama_get_memory(context), false);
  llama_set_n_threads(context, threads, threads);
}

// Computes tokens after those that the context holds, at most 512 in one piece, and waits for the logits.
// Returns the logits of the last one, or null.
const float* peer_feed(llama_context* context, int32_t* tokens, int32_t count) {
  for (int32_t done = 0; done < count;) {
    const int32_t piece = count - done < 512 ? count - done : 512;
    if (llama_decode(context, llama_batch_get_one(tokens + done, piece)) != 0) return nullptr;
    done += piece;
  }
  return llama_get_logits_ith(context, -1);
}

}  // extern "C"
