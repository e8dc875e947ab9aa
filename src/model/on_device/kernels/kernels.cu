// Kernels of a decoder layer on a GPU. The Rust files beside it launch them and compute the same on the CPU; `mod.rs` has the formulas.
//
// A matrix is row-major and without gaps. Arithmetic is f32 (sums over columns: f64), and a result is rounded once, when it is stored.
// Blocks are one-dimensional with a power of two of threads, from 1 on. The host's compiler builds this file, too: tests/it/on_device/kernels.rs
// runs it with threads of the CPU.

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef __nv_bfloat16 bf16;
typedef __half f16;
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(f16 x) { return __half2float(x); }
__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void store(float *to, float x) { *to = x; }
__device__ __forceinline__ void store(f16 *to, float x) { *to = __float2half_rn(x); }
__device__ __forceinline__ void store(bf16 *to, float x) { *to = __float2bfloat16_rn(x); }
#endif

// The most threads of a block.
#define THREADS 1024

// Scores of a row that a thread keeps in registers.
#define OF_THREAD 8

// The largest of some numbers, and the sum of 2^(number − largest).
struct Softmax {
  float largest, sum;
};

__device__ Softmax merged(Softmax a, Softmax b) {
  const float largest = fmaxf(a.largest, b.largest);
  if (largest == -INFINITY)
    return {largest, 0.0f};
  return {largest, a.sum * exp2f(a.largest - largest) + b.sum * exp2f(b.largest - largest)};
}

// The numbers of all threads together, for every thread. `of_threads` has a place for each.
__device__ Softmax over_block(Softmax own, Softmax *of_threads) {
  of_threads[threadIdx.x] = own;
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half)
      of_threads[threadIdx.x] = merged(of_threads[threadIdx.x], of_threads[threadIdx.x + half]);
    __syncthreads();
  }
  return of_threads[0];
}

// log2 of e^s with the score s = scale·x of a product x of query and key, or s = cap·tanh(scale·x / cap). e^x is 2^(x / ln 2), for which
// there is an instruction.
template <bool BOUNDED> __device__ float power(float x, float scale, float cap) {
  const float per = 1.4426950408889634f;
  return BOUNDED ? cap * per * tanhf(scale / cap * x) : scale * per * x;
}

// scores[r][c] <- exp(s_c − max s) / Σ exp(s_c − max s) over the keys c a query sees, and 0 for the others. A block has one row. Row r
// of `queries` rows is the query at position `first` + r among the keys, which sees the last `window` keys up to itself.
template <bool BOUNDED, typename T>
__device__ void soften(T *scores, int queries, int keys, int first, int window, float scale, float cap) {
  __shared__ Softmax of_threads[THREADS];
  T *row = scores + (size_t)blockIdx.x * keys;
  const int position = first + (int)(blockIdx.x % queries);
  const int begin = position - window + 1;
  const int seen = position + 1 < keys ? position + 1 : keys;
  Softmax own = {-INFINITY, 0.0f};
  if (keys <= OF_THREAD * (int)blockDim.x) {
    float powers[OF_THREAD];
#pragma unroll
    for (int at = 0; at < OF_THREAD; at++) {
      const int key = threadIdx.x + at * blockDim.x;
      powers[at] = key >= begin && key < seen ? power<BOUNDED>(widen(row[key]), scale, cap) : -INFINITY;
      own.largest = fmaxf(own.largest, powers[at]);
    }
#pragma unroll
    for (int at = 0; at < OF_THREAD; at++) {
      powers[at] = own.largest == -INFINITY ? 0.0f : exp2f(powers[at] - own.largest);
      own.sum += powers[at];
    }
    const Softmax all = over_block(own, of_threads);
    const float share = exp2f(own.largest - all.largest) / all.sum;
#pragma unroll
    for (int at = 0; at < OF_THREAD; at++) {
      const int key = threadIdx.x + at * blockDim.x;
      if (key < keys)
        store(row + key, powers[at] * share);
    }
    return;
  }
  for (int key = threadIdx.x; key < seen; key += blockDim.x)
    if (key >= begin)
      own = merged(own, {power<BOUNDED>(widen(row[key]), scale, cap), 1.0f});
  const Softmax all = over_block(own, of_threads);
  for (int key = threadIdx.x; key < keys; key += blockDim.x) {
    const bool visible = key >= begin && key < seen;
    store(row + key, visible ? exp2f(power<BOUNDED>(widen(row[key]), scale, cap) - all.largest) / all.sum : 0.0f);
  }
}

// out[h][t] <- x[t][h], rotated: a and b of the first and the second `half` elements of a head become a·cos − b·sin and b·cos + a·sin; the
// elements after them stay. x is [tokens][heads][head_dim], out [heads][tokens][head_dim], the tables [tokens][half].
template <typename T>
__device__ void rotate_heads(const T *x, const T *cos, const T *sin, int tokens, int heads, int half, int head_dim, T *out) {
  const unsigned steps = head_dim - half, all = (unsigned)tokens * heads * steps;
  for (unsigned at = blockIdx.x * blockDim.x + threadIdx.x; at < all; at += gridDim.x * blockDim.x) {
    const unsigned column = at % steps, head = at / steps % heads, token = at / steps / heads;
    const T *from = x + (token * heads + head) * head_dim + column;
    T *to = out + (head * tokens + token) * head_dim + column;
    if (column >= half) {
      to[half] = from[half];
      continue;
    }
    const float a = widen(from[0]), b = widen(from[half]);
    const float c = widen(cos[token * half + column]), s = widen(sin[token * half + column]);
    store(to, a * c - b * s);
    store(to + half, b * c + a * s);
  }
}

// out[h][t] <- x[t][h]. x is [tokens][heads][head_dim], out [heads][tokens][head_dim].
template <typename T> __device__ void heads_first(const T *x, int tokens, int heads, int head_dim, T *out) {
  const unsigned values = (unsigned)tokens * heads * head_dim;
  for (unsigned at = blockIdx.x * blockDim.x + threadIdx.x; at < values; at += gridDim.x * blockDim.x) {
    const unsigned column = at % head_dim, token = at / head_dim % tokens, head = at / head_dim / tokens;
    out[at] = x[((size_t)token * heads + head) * head_dim + column];
  }
}

// out[t][first + h·head_dim + d] <- x[h][t][d]: a part of the columns of the rows of `out`, which are `width` wide.
template <typename T>
__device__ void place(const T *x, int heads, int tokens, int head_dim, T *out, int width, int first) {
  const unsigned values = (unsigned)heads * tokens * head_dim;
  for (unsigned at = blockIdx.x * blockDim.x + threadIdx.x; at < values; at += gridDim.x * blockDim.x) {
    const unsigned column = at % head_dim, head = at / head_dim % heads, token = at / head_dim / heads;
    out[(size_t)token * width + first + head * head_dim + column] = x[(head * tokens + token) * head_dim + column];
  }
}

// gate <- silu(gate) · up, with silu(x) = x / (1 + e^−x).
template <typename T> __device__ void silu_times(T *gate, const T *up, unsigned values) {
  for (unsigned at = blockIdx.x * blockDim.x + threadIdx.x; at < values; at += gridDim.x * blockDim.x) {
    const float x = widen(gate[at]);
    store(gate + at, x / (1.0f + expf(-x)) * widen(up[at]));
  }
}

// gate <- gelu(gate) · up, with gelu(x) = x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³))).
template <typename T> __device__ void gelu_tanh_times(T *gate, const T *up, unsigned values) {
  for (unsigned at = blockIdx.x * blockDim.x + threadIdx.x; at < values; at += gridDim.x * blockDim.x) {
    const float x = widen(gate[at]);
    const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    store(gate + at, 0.5f * x * (1.0f + tanhf(inner)) * widen(up[at]));
  }
}

// x <- x + y
template <typename T> __device__ void add(T *x, const T *y, unsigned values) {
  for (unsigned at = blockIdx.x * blockDim.x + threadIdx.x; at < values; at += gridDim.x * blockDim.x)
    store(x + at, widen(x[at]) + widen(y[at]));
}

// out[0][j] <- Σ_t x_tj², out[1][j] <- Σ_t x_tj in f64. A block has up to 32 columns; its threads share the rows.
template <typename T> __device__ void column_sums(const T *x, int rows, int width, double *out) {
  __shared__ double squares[THREADS], values[THREADS];
  const int columns = blockDim.x < 32 ? blockDim.x : 32;
  const int parts = blockDim.x / columns;
  const int part = threadIdx.x / columns;
  const int column = blockIdx.x * columns + threadIdx.x % columns;
  double square = 0.0, value = 0.0;
  if (column < width) {
#pragma unroll 8
    for (int row = part; row < rows; row += parts) {
      const double of_row = (double)widen(x[(size_t)row * width + column]);
      square += of_row * of_row;
      value += of_row;
    }
  }
  squares[threadIdx.x] = square;
  values[threadIdx.x] = value;
  __syncthreads();
  if (part == 0 && column < width) {
    for (int other = 1; other < parts; other++) {
      square += squares[other * columns + threadIdx.x];
      value += values[other * columns + threadIdx.x];
    }
    out[column] = square;
    out[width + column] = value;
  }
}

// The bits of a score |w|·norm, which is not negative: they have the order of the scores.
template <typename T> __device__ unsigned key(T weight, float norm) { return __float_as_uint(fabsf(widen(weight)) * norm); }

// The first key that is not finite.
#define NOT_FINITE 0x7f800000u

// The most columns of a row, and the columns of a word of a mask.
#define COLUMNS 65536
#define WORD 32

// Bits of the `count` lowest keys of a row, of equal keys the lower columns: 1 = removed, the lowest bit first. A block has one row.
// `mask` has a last word more, which becomes 1 where a key is not finite.
template <typename T>
__device__ void lowest_of_rows(const T *weight, const float *norms, int columns, unsigned count, unsigned *mask, unsigned words) {
  __shared__ unsigned counts[256], found[2], ties[COLUMNS / WORD];
  const T *row = weight + (size_t)blockIdx.x * columns;
  const int of_row = columns / WORD;
  // The key of the last removed weight, byte by byte from the highest, and how many weights with this key are removed.
  unsigned known = 0, last = 0, left = count;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int at = threadIdx.x; at < 256; at += blockDim.x)
      counts[at] = 0;
    __syncthreads();
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
      const unsigned of_column = key(row[column], norms[column]);
      if (of_column >= NOT_FINITE)
        mask[words] = 1;
      if ((of_column & known) == last)
        atomicAdd(&counts[of_column >> shift & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned below = 0, byte = 0;
      while (byte < 255 && below + counts[byte] < left)
        below += counts[byte++];
      found[0] = last | byte << shift;
      found[1] = left - below;
    }
    __syncthreads();
    last = found[0];
    left = found[1];
    known |= 255u << shift;
    __syncthreads();
  }
  for (int word = threadIdx.x; word < of_row; word += blockDim.x) {
    unsigned equal = 0;
    for (int column = word * WORD; column < (word + 1) * WORD; column++)
      equal += key(row[column], norms[column]) == last;
    ties[word] = equal;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned before = 0;
    for (int word = 0; word < of_row; word++) {
      const unsigned equal = ties[word];
      ties[word] = before;
      before += equal;
    }
  }
  __syncthreads();
  for (int word = threadIdx.x; word < of_row; word += blockDim.x) {
    unsigned bits = 0, rank = ties[word];
    for (int place = 0; place < WORD; place++) {
      const unsigned of_column = key(row[word * WORD + place], norms[word * WORD + place]);
      if (of_column < last || (of_column == last && rank++ < left))
        bits |= 1u << place;
    }
    mask[(size_t)blockIdx.x * of_row + word] = bits;
  }
}

// The same for the `n` lowest of each group of `m` columns; m divides 32. A thread has a word.
template <typename T>
__device__ void lowest_of_groups(const T *weight, const float *norms, int columns, int n, int m, unsigned *mask, unsigned words) {
  for (unsigned word = blockIdx.x * blockDim.x + threadIdx.x; word < words; word += gridDim.x * blockDim.x) {
    const T *of_word = weight + (size_t)word * WORD;
    const float *norms_of_word = norms + (size_t)word * WORD % columns;
    unsigned keys[WORD], bits = 0;
    for (int place = 0; place < WORD; place++) {
      keys[place] = key(of_word[place], norms_of_word[place]);
      if (keys[place] >= NOT_FINITE)
        mask[words] = 1;
    }
    for (int place = 0; place < WORD; place++) {
      int lower = 0;
      for (int other = place / m * m; other < place / m * m + m; other++)
        lower += keys[other] < keys[place] || (keys[other] == keys[place] && other < place);
      if (lower < n)
        bits |= 1u << place;
    }
    mask[word] = bits;
  }
}

// w <- +0 where a bit of the mask is set.
template <typename T> __device__ void zero(T *weight, const unsigned *mask, unsigned values) {
  for (unsigned at = blockIdx.x * blockDim.x + threadIdx.x; at < values; at += gridDim.x * blockDim.x)
    if (mask[at / WORD] >> at % WORD & 1)
      store(weight + at, 0.0f);
}

#define OF_TYPE(T, NAME)                                                                                                       \
  extern "C" __global__ void soften_##NAME(T *scores, int queries, int keys, int first, int window, float scale, float cap) { \
    soften<false>(scores, queries, keys, first, window, scale, cap);                                                           \
  }                                                                                                                            \
  extern "C" __global__ void soften_bounded_##NAME(T *scores, int queries, int keys, int first, int window, float scale, float cap) { \
    soften<true>(scores, queries, keys, first, window, scale, cap);                                                            \
  }                                                                                                                            \
  extern "C" __global__ void rotate_heads_##NAME(const T *x, const T *cos, const T *sin, int tokens, int heads, int half, int head_dim, T *out) { \
    rotate_heads(x, cos, sin, tokens, heads, half, head_dim, out);                                                             \
  }                                                                                                                            \
  extern "C" __global__ void heads_first_##NAME(const T *x, int tokens, int heads, int head_dim, T *out) {                    \
    heads_first(x, tokens, heads, head_dim, out);                                                                              \
  }                                                                                                                            \
  extern "C" __global__ void place_##NAME(const T *x, int heads, int tokens, int head_dim, T *out, int width, int first) { \
    place(x, heads, tokens, head_dim, out, width, first);                                                               \
  }                                                                                                                            \
  extern "C" __global__ void silu_times_##NAME(T *gate, const T *up, unsigned values) { silu_times(gate, up, values); }          \
  extern "C" __global__ void gelu_tanh_times_##NAME(T *gate, const T *up, unsigned values) { gelu_tanh_times(gate, up, values); } \
  extern "C" __global__ void add_##NAME(T *x, const T *y, unsigned values) { add(x, y, values); }                                \
  extern "C" __global__ void column_sums_##NAME(const T *x, int rows, int width, double *out) { column_sums(x, rows, width, out); } \
  extern "C" __global__ void lowest_of_rows_##NAME(const T *weight, const float *norms, int columns, unsigned count, unsigned *mask, unsigned words) { \
    lowest_of_rows(weight, norms, columns, count, mask, words);                                                                \
  }                                                                                                                            \
  extern "C" __global__ void lowest_of_groups_##NAME(const T *weight, const float *norms, int columns, int n, int m, unsigned *mask, unsigned words) { \
    lowest_of_groups(weight, norms, columns, n, m, mask, words);                                                               \
  }                                                                                                                            \
  extern "C" __global__ void zero_##NAME(T *weight, const unsigned *mask, unsigned values) { zero(weight, mask, values); }

OF_TYPE(float, f32)
OF_TYPE(f16, f16)
OF_TYPE(bf16, bf16)
