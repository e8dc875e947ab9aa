// Runs the kernels of src/model/on_device/kernels/kernels.cu on threads of the CPU, in blocks of 1 and of 64 threads, and compares them with the
// formulas in double precision. Prints a line per case, and ends with 1 where a case is wrong.

#include <algorithm>
#include <array>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

struct Index {
  unsigned x;
};
static thread_local Index threadIdx, blockIdx;
static Index blockDim, gridDim;
static std::barrier<> *barrier;

#define __global__
#define __device__
#define __shared__ static
static void __syncthreads() { barrier->arrive_and_wait(); }
static unsigned atomicAdd(unsigned *to, unsigned more) { return __atomic_fetch_add(to, more, __ATOMIC_RELAXED); }
static unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

typedef _Float16 f16;
struct bf16 {
  uint16_t bits;
};
static float widen(float x) { return x; }
static float widen(f16 x) { return (float)x; }
static float widen(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static void store(float *to, float x) { *to = x; }
static void store(f16 *to, float x) { *to = (f16)x; }
static void store(bf16 *to, float x) {
  const uint32_t bits = __float_as_uint(x);
  to->bits = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#include KERNELS

// Runs a kernel with `threads` threads in each of `blocks` blocks, one block after the other.
static void run(unsigned blocks, unsigned threads, const std::function<void()> &kernel) {
  blockDim.x = threads;
  gridDim.x = blocks;
  for (unsigned block = 0; block < blocks; block++) {
    std::barrier<> of_block(threads);
    barrier = &of_block;
    std::vector<std::thread> running;
    for (unsigned thread = 0; thread < threads; thread++)
      running.emplace_back([&, thread, block] {
        threadIdx.x = thread;
        blockIdx.x = block;
        kernel();
      });
    for (auto &thread : running)
      thread.join();
  }
}

static uint64_t state = 1;
static float noise() {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (float)((double)(state >> 40) / (1 << 23) - 1.0);
}
template <typename T> static std::vector<T> noises(size_t count, float scale) {
  std::vector<T> values(count);
  for (auto &value : values)
    store(&value, scale * noise());
  return values;
}

static int wrong = 0;
static void report(const char *kernel, const char *type, unsigned threads, double apart, double allowed) {
  const bool holds = apart <= allowed;
  wrong += !holds;
  std::printf("%s %s_%s, %u threads: off by %.1e, %.1e allowed\n", holds ? "ok" : "WRONG", kernel, type, threads, apart, allowed);
}

// `rounding` is the relative rounding of a stored value, and 2e-6 that of f32 arithmetic.
template <typename T> static void check(const char *type, double rounding, unsigned threads) {
  const double allowed = rounding + 2e-6;
  double apart = 0.0;
  for (bool bounded : {false, true}) {
    apart = 0.0;
    // Without a window the last number is larger than any position.
    for (auto [heads, queries, keys, first, window] :
         {std::array{3, 5, 12, 7, INT32_MAX}, {1, 1, 1, 0, INT32_MAX}, {2, 64, 67, 3, INT32_MAX}, {1, 3, 200, 150, INT32_MAX}, {1, 2, 700, 690, INT32_MAX},
          {3, 5, 12, 7, 4}, {2, 3, 9, 6, 1}, {2, 64, 67, 3, 33}, {1, 3, 200, 150, 100}, {1, 2, 700, 690, 500}, {1, 2, 700, 690, 20}}) {
      auto scores = noises<T>((size_t)heads * queries * keys, 30.0f);
      const auto before = scores;
      const float scale = 0.37f, cap = 5.0f;
      run(heads * queries, threads, [&] {
        if (bounded)
          soften<true>(scores.data(), queries, keys, first, window, scale, cap);
        else
          soften<false>(scores.data(), queries, keys, first, window, scale, 0.0f);
      });
      auto score = [&](int row, int key) {
        const double of_key = (double)scale * widen(before[row * keys + key]);
        return bounded ? cap * std::tanh(of_key / cap) : of_key;
      };
      for (int row = 0; row < heads * queries; row++) {
        const int position = first + row % queries;
        auto visible = [&](int key) { return key <= position && (int64_t)key > (int64_t)position - window; };
        double sum = 0.0, largest = -INFINITY;
        for (int key = 0; key < keys; key++)
          if (visible(key))
            largest = std::max(largest, score(row, key));
        for (int key = 0; key < keys; key++)
          if (visible(key))
            sum += std::exp(score(row, key) - largest);
        for (int key = 0; key < keys; key++) {
          const double weight = visible(key) ? std::exp(score(row, key) - largest) / sum : 0.0;
          apart = std::max(apart, std::abs(weight - widen(scores[row * keys + key])));
          if (std::isnan(widen(scores[row * keys + key])))
            apart = INFINITY;
        }
      }
    }
    report(bounded ? "soften_bounded" : "soften", type, threads, apart, allowed);
  }

  apart = 0.0;
  for (auto [tokens, heads, half, head_dim] : {std::array{5, 3, 4, 8}, {1, 1, 1, 2}, {33, 2, 7, 14}, {33, 2, 3, 14}, {5, 3, 1, 9}}) {
    const auto x = noises<T>((size_t)tokens * heads * head_dim, 1.0f), cos = noises<T>((size_t)tokens * half, 1.0f), sin = noises<T>((size_t)tokens * half, 1.0f);
    std::vector<T> out(x.size());
    run(2, threads, [&] { rotate_heads(x.data(), cos.data(), sin.data(), tokens, heads, half, head_dim, out.data()); });
    for (int token = 0; token < tokens; token++)
      for (int head = 0; head < heads; head++) {
        const T *from = &x[(token * heads + head) * head_dim], *to = &out[(head * tokens + token) * head_dim];
        for (int column = 0; column < half; column++) {
          const double a = widen(from[column]), b = widen(from[half + column]), c = widen(cos[token * half + column]), s = widen(sin[token * half + column]);
          apart = std::max({apart, std::abs(a * c - b * s - widen(to[column])), std::abs(b * c + a * s - widen(to[half + column]))});
        }
        for (int column = 2 * half; column < head_dim; column++)
          if (widen(from[column]) != widen(to[column]))
            apart = INFINITY;
      }
  }
  report("rotate_heads", type, threads, apart, 2.0 * allowed);

  apart = 0.0;
  for (auto [tokens, heads, head_dim] : {std::array{5, 3, 4}, {1, 1, 1}, {33, 2, 7}}) {
    const auto x = noises<T>((size_t)tokens * heads * head_dim, 1.0f);
    std::vector<T> out(x.size());
    run(2, threads, [&] { heads_first(x.data(), tokens, heads, head_dim, out.data()); });
    for (int at = 0; at < (int)x.size(); at++) {
      const T expected = x[(at / head_dim % tokens * heads + at / head_dim / tokens) * head_dim + at % head_dim];
      apart = std::max(apart, (double)std::abs(widen(expected) - widen(out[at])));
    }
  }
  report("heads_first", type, threads, apart, 0.0);

  apart = 0.0;
  {
    const int heads = 3, tokens = 5, head_dim = 6, width = 29, first = 4;
    const auto x = noises<T>(heads * tokens * head_dim, 1.0f);
    auto out = noises<T>(tokens * width, 1.0f);
    const auto before = out;
    run(2, threads, [&] { place(x.data(), heads, tokens, head_dim, out.data(), width, first); });
    for (int token = 0; token < tokens; token++)
      for (int column = 0; column < width; column++) {
        const int at = column - first;
        const bool inside = at >= 0 && at < heads * head_dim;
        const T expected = inside ? x[(at / head_dim * tokens + token) * head_dim + at % head_dim] : before[token * width + column];
        apart = std::max(apart, (double)std::abs(widen(expected) - widen(out[token * width + column])));
      }
  }
  report("place", type, threads, apart, 0.0);

  enum Elementwise { ADD, SILU, GELU };
  for (Elementwise kind : {ADD, SILU, GELU}) {
    apart = 0.0;
    auto x = noises<T>(131, 4.0f);
    const auto before = x, y = noises<T>(131, 1.0f);
    run(3, threads, [&] {
      switch (kind) {
      case ADD: return add(x.data(), y.data(), 131u);
      case SILU: return silu_times(x.data(), y.data(), 131u);
      case GELU: return gelu_tanh_times(x.data(), y.data(), 131u);
      }
    });
    for (int at = 0; at < 131; at++) {
      const double a = widen(before[at]), b = widen(y[at]);
      const double gelu = 0.5 * a * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (a + 0.044715 * a * a * a)));
      const double expected = kind == ADD ? a + b : kind == SILU ? a / (1.0 + std::exp(-a)) * b : gelu * b;
      apart = std::max(apart, std::abs(expected - widen(x[at])) / std::max(1.0, std::abs(expected)));
    }
    report(kind == ADD ? "add" : kind == SILU ? "silu_times" : "gelu_tanh_times", type, threads, apart, allowed);
  }

  apart = 0.0;
  for (auto [rows, width] : {std::array{37, 45}, {1, 1}, {100, 33}}) {
    const auto x = noises<T>((size_t)rows * width, 1.0f);
    std::vector<double> out(2 * width, NAN);
    const int columns = threads < 32 ? threads : 32;
    run((width + columns - 1) / columns, threads, [&] { column_sums(x.data(), rows, width, out.data()); });
    for (int column = 0; column < width; column++) {
      double square = 0.0, value = 0.0;
      for (int row = 0; row < rows; row++) {
        const double of_row = widen(x[row * width + column]);
        square += of_row * of_row;
        value += of_row;
      }
      apart = std::max({apart, std::abs(square - out[column]), std::abs(value - out[width + column])});
      if (std::isnan(out[column] + out[width + column]))
        apart = INFINITY;
    }
  }
  report("column_sums", type, threads, apart, 1e-12);

  // Few values, so that rows have many ties, among them zeros of both signs.
  double differing = 0.0;
  for (auto [rows, columns, count, m] : {std::array{5, 96, 41, 0}, {3, 32, 1, 0}, {2, 64, 64, 0}, {4, 64, 2, 4}, {2, 32, 5, 8}, {2, 64, 31, 32}}) {
    auto weight = noises<T>((size_t)rows * columns, 1.0f);
    for (auto &value : weight)
      store(&value, std::round(4.0f * widen(value)) / 4.0f);
    auto norms = noises<float>(columns, 1.0f);
    for (auto &norm : norms)
      norm = std::abs(norm) < 0.2f ? 0.0f : std::round(2.0f * std::abs(norm));
    const unsigned words = rows * columns / 32;
    std::vector<unsigned> mask(words + 1, 0);
    if (m == 0)
      run(rows, threads, [&] { lowest_of_rows(weight.data(), norms.data(), columns, (unsigned)count, mask.data(), words); });
    else
      run(2, threads, [&] { lowest_of_groups(weight.data(), norms.data(), columns, count, m, mask.data(), words); });
    const int group = m == 0 ? columns : m;
    for (int first = 0; first < rows * columns; first += group) {
      std::vector<int> order(group);
      for (int at = 0; at < group; at++)
        order[at] = at;
      auto score = [&](int at) { return std::abs(widen(weight[first + at])) * norms[(first + at) % columns]; };
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return score(a) < score(b); });
      for (int rank = 0; rank < group; rank++) {
        const int at = first + order[rank];
        differing += (mask[at / 32] >> at % 32 & 1) != (unsigned)(rank < count);
      }
    }
    differing += mask[words] != 0;
    auto kept = weight;
    run(2, threads, [&] { zero(kept.data(), mask.data(), (unsigned)kept.size()); });
    for (size_t at = 0; at < kept.size(); at++)
      differing += widen(kept[at]) != ((mask[at / 32] >> at % 32 & 1) ? 0.0f : widen(weight[at]));
    store(&weight[7], INFINITY);
    std::fill(mask.begin(), mask.end(), 0);
    norms[7] = 1.0f;
    if (m == 0)
      run(rows, threads, [&] { lowest_of_rows(weight.data(), norms.data(), columns, (unsigned)count, mask.data(), words); });
    else
      run(2, threads, [&] { lowest_of_groups(weight.data(), norms.data(), columns, count, m, mask.data(), words); });
    differing += mask[words] == 0;
  }
  report("lowest", type, threads, differing, 0.0);
}

int main() {
  for (unsigned threads : {1u, 64u}) {
    check<float>("f32", 0.0, threads);
    check<f16>("f16", 5e-4, threads);
    check<bf16>("bf16", 4e-3, threads);
  }
  return wrong != 0;
}
