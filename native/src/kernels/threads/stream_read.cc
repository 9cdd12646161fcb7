#include "kernels/threads/stream_read.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string>

#include "kernels/threads/cpu_info.h"
#include "kernels/threads/thread_pool.h"

#if defined(MOECHAT_X86)
#include <immintrin.h>
#endif

namespace moechat {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kLine = 64;
// Parts begin at multiples of this, so that no two threads share a line or a page.
constexpr std::int64_t kPart = 4096;

// Receives the data read, so that the compiler cannot drop the reads.
std::atomic<std::uint64_t> g_sink{0};

// A part is read as this many streams side by side, in turns of kTurn bytes, each line asked for kAhead bytes
// early and into the second cache. Of a contiguous part read without that, the processor's own prefetching
// stops at every page: with AVX-512 and two threads of a Xeon (Emerald Rapids) that gave 17.7 GB/s where this
// gave 26.4, and 13.5 in an hour when this gave 15.4. Neither other distances from 2 KiB to 32 KiB nor a
// prefetch into the first cache were faster.
constexpr std::int64_t kStreams = 4;
constexpr std::int64_t kTurn = 512;
constexpr std::int64_t kAhead = 4096;

void ask_for(const unsigned char* line) { __builtin_prefetch(line + kAhead, 0, 2); }

std::int64_t stream_bytes(std::int64_t bytes) { return bytes / kStreams / kTurn * kTurn; }

// All read whole lines, from an aligned one on; data and bytes of a part are multiples of kLine.
std::uint64_t read_portable(const unsigned char* data, std::int64_t bytes) {
  std::uint64_t sums[8] = {};
  const auto add_line = [&sums](const unsigned char* line) {
    const auto* words = reinterpret_cast<const std::uint64_t*>(line);
    for (int lane = 0; lane < 8; ++lane) sums[lane] ^= words[lane];
  };
  const std::int64_t stream = stream_bytes(bytes);
  for (std::int64_t i = 0; i < stream; i += kTurn) {
    for (std::int64_t k = 0; k < kStreams; ++k) {
      for (std::int64_t turn = 0; turn < kTurn; turn += kLine) {
        const unsigned char* line = data + k * stream + i + turn;
        ask_for(line);
        add_line(line);
      }
    }
  }
  for (std::int64_t i = kStreams * stream; i < bytes; i += kLine) add_line(data + i);
  std::uint64_t sum = 0;
  for (const std::uint64_t lane : sums) sum ^= lane;
  return sum;
}

#if defined(MOECHAT_X86)
__attribute__((target("avx2"))) std::uint64_t read_avx2(const unsigned char* data, std::int64_t bytes) {
  __m256i sums[16];
  for (__m256i& sum : sums) sum = _mm256_setzero_si256();
  const std::int64_t stream = stream_bytes(bytes);
  for (std::int64_t i = 0; i < stream; i += kTurn) {
    for (std::int64_t k = 0; k < kStreams; ++k) {
      const unsigned char* turn = data + k * stream + i;
      for (int line = 0; line < kTurn / kLine; ++line) {
        const auto* vectors = reinterpret_cast<const __m256i*>(turn + line * kLine);
        ask_for(turn + line * kLine);
        sums[line] = _mm256_xor_si256(sums[line], _mm256_load_si256(vectors));
        sums[line + 8] = _mm256_xor_si256(sums[line + 8], _mm256_load_si256(vectors + 1));
      }
    }
  }
  for (std::int64_t i = kStreams * stream; i < bytes; i += 32) {
    sums[0] = _mm256_xor_si256(sums[0], _mm256_load_si256(reinterpret_cast<const __m256i*>(data + i)));
  }
  for (int lane = 1; lane < 16; ++lane) sums[0] = _mm256_xor_si256(sums[0], sums[lane]);
  alignas(32) std::uint64_t words[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), sums[0]);
  return words[0] ^ words[1] ^ words[2] ^ words[3];
}

__attribute__((target("avx512f"))) std::uint64_t read_avx512(const unsigned char* data, std::int64_t bytes) {
  __m512i sums[8];
  for (__m512i& sum : sums) sum = _mm512_setzero_si512();
  const std::int64_t stream = stream_bytes(bytes);
  for (std::int64_t i = 0; i < stream; i += kTurn) {
    for (std::int64_t k = 0; k < kStreams; ++k) {
      const unsigned char* turn = data + k * stream + i;
      for (int line = 0; line < kTurn / kLine; ++line) {
        ask_for(turn + line * kLine);
        sums[line] = _mm512_xor_si512(sums[line], _mm512_load_si512(turn + line * kLine));
      }
    }
  }
  for (std::int64_t i = kStreams * stream; i < bytes; i += kLine) {
    sums[0] = _mm512_xor_si512(sums[0], _mm512_load_si512(data + i));
  }
  for (int lane = 1; lane < 8; ++lane) sums[0] = _mm512_xor_si512(sums[0], sums[lane]);
  alignas(64) std::uint64_t words[8];
  _mm512_store_si512(words, sums[0]);
  std::uint64_t sum = 0;
  for (const std::uint64_t word : words) sum ^= word;
  return sum;
}
#endif

using Read = std::uint64_t (*)(const unsigned char*, std::int64_t);

Read widest_read() {
#if defined(MOECHAT_X86)
  if (cpu_runs_avx512()) return read_avx512;
  if (cpu_runs_avx2()) return read_avx2;
#endif
  return read_portable;
}

std::uint64_t read_part(const unsigned char* data, std::int64_t bytes) {
  static const Read read = widest_read();
  return read(data, bytes);
}

}  // namespace

double stream_read_rate(const unsigned char* data, std::int64_t bytes, int threads, double seconds,
                        const std::function<void()>& between) {
  if (bytes < kPart) {
    throw std::invalid_argument("there are " + std::to_string(bytes) +
                                " bytes to read; it must be at least " + std::to_string(kPart));
  }
  if (threads < 1 || threads > kMaxThreads) {
    throw std::invalid_argument("the number of threads is " + std::to_string(threads) +
                                "; it must be between 1 and " + std::to_string(kMaxThreads));
  }
  if (!std::isfinite(seconds) || seconds < 0) {
    throw std::invalid_argument("the seconds are not a finite number of at least 0");
  }
  const auto misfit = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data) % kLine);
  const std::int64_t skipped = misfit == 0 ? 0 : kLine - misfit;
  const std::int64_t whole = (bytes - skipped) / kLine * kLine;
  const std::int64_t part = (whole / threads + kPart - 1) / kPart * kPart;

  double best = 0;
  const Clock::time_point started = Clock::now();
  for (int pass = 0;; ++pass) {
    std::int64_t moved = 0;
    Clock::time_point before;
    Clock::time_point after;
    {
      // Held for one pass only, so that other calls can use the pool in between.
      ThreadPool::Session session;
      std::atomic<std::int64_t> read{0};
      before = Clock::now();
      session.parallel(threads, [&](int thread, int used) {
        // The pool may have fewer threads than requested.
        for (int piece = thread; piece < threads; piece += used) {
          const std::int64_t begin = std::min(whole, piece * part);
          const std::int64_t end = std::min(whole, begin + part);
          if (begin == end) continue;
          g_sink.fetch_xor(read_part(data + skipped + begin, end - begin), std::memory_order_relaxed);
          read.fetch_add(end - begin, std::memory_order_relaxed);
        }
      });
      after = Clock::now();
      moved = read.load();
    }
    const double took = std::chrono::duration<double>(after - before).count();
    if (took > 0) best = std::max(best, static_cast<double>(moved) / took);
    between();
    if (pass >= 1 && std::chrono::duration<double>(after - started).count() >= seconds) break;
  }
  return best;
}

}  // namespace moechat
