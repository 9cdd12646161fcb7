#include "kernels/stream_read.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string>

#include "kernels/cpu_info.h"
#include "kernels/thread_pool.h"

#if defined(MOECHAT_X86)
#include <immintrin.h>
#endif

namespace moechat {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kLine = 64;
// Parts begin at multiples of this, so that no two threads share a line or a page.
constexpr std::int64_t kPart = 4096;

// What was read goes here, so that no compiler can leave the reading out.
std::atomic<std::uint64_t> g_sink{0};

// Both read whole lines from the first aligned one on; data and bytes of a part are multiples of kLine.
std::uint64_t read_portable(const unsigned char* data, std::int64_t bytes) {
  std::uint64_t sums[8] = {};
  const auto* words = reinterpret_cast<const std::uint64_t*>(data);
  for (std::int64_t i = 0; i < bytes / 8; i += 8) {
    for (int lane = 0; lane < 8; ++lane) sums[lane] ^= words[i + lane];
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t lane : sums) sum ^= lane;
  return sum;
}

#if defined(MOECHAT_X86)
__attribute__((target("avx2"))) std::uint64_t read_avx2(const unsigned char* data, std::int64_t bytes) {
  __m256i sums[8];
  for (__m256i& sum : sums) sum = _mm256_setzero_si256();
  const auto* vectors = reinterpret_cast<const __m256i*>(data);
  const std::int64_t count = bytes / 32;
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane) {
      sums[lane] = _mm256_xor_si256(sums[lane], _mm256_load_si256(vectors + i + lane));
    }
  }
  for (; i < count; ++i) sums[0] = _mm256_xor_si256(sums[0], _mm256_load_si256(vectors + i));
  for (int lane = 1; lane < 8; ++lane) sums[0] = _mm256_xor_si256(sums[0], sums[lane]);
  alignas(32) std::uint64_t words[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), sums[0]);
  return words[0] ^ words[1] ^ words[2] ^ words[3];
}
#endif

std::uint64_t read_part(const unsigned char* data, std::int64_t bytes) {
#if defined(MOECHAT_X86)
  static const bool wide = cpu_runs_avx2();
  if (wide) return read_avx2(data, bytes);
#endif
  return read_portable(data, bytes);
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
      // Held for one pass only: other calls may want the pool meanwhile.
      ThreadPool::Session session;
      std::atomic<std::int64_t> read{0};
      before = Clock::now();
      session.parallel(threads, [&](int thread, int used) {
        // The pool may have fewer threads than were asked for.
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
