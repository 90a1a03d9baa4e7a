// rope_vector.cu: rotary position embedding of q and k in 16-byte accesses.
//
//   y[first]  = x[first]  * cos - x[second] * sin        first, second: the channels of a pair,
//   y[second] = x[second] * cos + x[first]  * sin        (i, i + r) or (2i, 2i + 1), r = rotary / 2
//   inverse: the sine is negated, which is the transpose
//
// Shapes    as in rope.cu; every row of q, k and their outputs 16-byte aligned
// Grid      x: groups of tokens;  y: batch, at most 65,535
// Block     kThreads = tokens x 8 head slots x kLanes; a thread keeps the cosines and sines of its
//           kSize = 16 / sizeof(T) pairs in registers and rotates heads slot, slot + 8, ... of q,
//           then of k, as one list of heads
// Tile map  the two vectors of a thread, in one head, for kSize = 8:
//             half-split    [8 l, 8 l + 8)  and  [r + 8 l, r + 8 l + 8)
//             interleaved   [16 l, 16 l + 8)  and  [16 l + 8, 16 l + 16)      l < kLanes
// Pipeline  table row -> registers;  per kUnroll heads: all loads, then all rotations and stores
// Memory    each element is read once and written once, 2 * kUnroll vectors in flight a thread;
//           a table row is read once by each of the 8 head slots, from cache
// In place  a thread reads both vectors before it writes either
// Limits    rotary_dim = 2 * kLanes * kSize; the rest of the head a multiple of kSize
// Sources   Su et al., "RoFormer", 2021
//
// Predicted: the speed of a copy, since 40 heads of 256 channels keep 80 bytes in flight a thread
// and 160 KiB a multiprocessor, six times what latency times bandwidth asks for.
#include "common/params.cuh"
#include "common/rope.cuh"
#include "common/types.cuh"
#include "common/vector.cuh"

constexpr int kSlots = 8;  // heads that a block works on at a time

// The cosines or sines of kSize neighbouring pairs.
template <class A, int kSize, class Table>
__device__ void load_angles(A (&to)[kSize], const Table* row, int64 column_stride, int first_pair,
                            int table_step, bool vectors) {
  constexpr int kPerVector = Vector<Table>::kSize;
  if (vectors) {
#pragma unroll
    for (int i = 0; i < kSize; i += kPerVector) {
      const Vector<Table> v = load_vector(row + first_pair + i);
      for (int j = 0; j < kPerVector && i + j < kSize; ++j) {
        to[i + j] = A(widen(v.x[j]));
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      to[i] = A(widen(row[int64(first_pair + i) * table_step * column_stride]));
    }
  }
}

// Where head h of the list "q heads, then k heads" of a token is read and written.
template <class T>
struct Heads {
  const T *q, *k;
  T *q_out, *k_out;

  __device__ Heads(const RopeParams& p, int64 item, int64 token)
      : q(static_cast<const T*>(p.q) + item * p.q_stride[0] + token * p.q_stride[1]),
        k(static_cast<const T*>(p.k) + item * p.k_stride[0] + token * p.k_stride[1]),
        q_out(static_cast<T*>(p.q_out) + item * p.q_out_stride[0] + token * p.q_out_stride[1]),
        k_out(static_cast<T*>(p.k_out) + item * p.k_out_stride[0] + token * p.k_out_stride[1]) {}

  __device__ const T* from(const RopeParams& p, int h) const {
    return h < p.q_heads ? q + h * p.q_stride[2] : k + (h - p.q_heads) * p.k_stride[2];
  }
  __device__ T* to(const RopeParams& p, int h) const {
    return h < p.q_heads ? q_out + h * p.q_out_stride[2]
                         : k_out + (h - p.q_heads) * p.k_out_stride[2];
  }
};

// Rotate the pairs that two vectors hold: element i of both, or neighbours within them.
template <class Config, class T, class A, int kSize>
__device__ void rotate(Vector<T>& a, Vector<T>& b, const A (&c)[kSize], const A (&s)[kSize]) {
  for (int i = 0; i < kSize; ++i) {
    T& x = Config::kInterleaved ? (2 * i < kSize ? a : b).x[2 * i % kSize] : a.x[i];
    T& y = Config::kInterleaved ? (2 * i < kSize ? a : b).x[(2 * i + 1) % kSize] : b.x[i];
    A u = widen(x), v = widen(y);
    rotate_pair(u, v, c[i], s[i]);
    x = narrow<T>(u);
    y = narrow<T>(v);
  }
}

template <class Config>
__device__ void rope_vector(const RopeParams& p) {
  using T = typename Config::T;
  using Table = typename Config::Table;
  using A = Accumulator<T>;
  constexpr int kSize = Vector<T>::kSize, kLanes = Config::kLanes, kUnroll = Config::kUnroll;
  const int lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes % kSlots;
  const int64 item = blockIdx.y;
  const int64 token =
      blockIdx.x * int64(Config::kThreads / (kLanes * kSlots)) + threadIdx.x / (kLanes * kSlots);
  if (token >= p.seq) {
    return;
  }
  const int heads = p.q_heads + p.k_heads;
  const int first = lane * (Config::kInterleaved ? 2 * kSize : kSize);
  const int second = first + (Config::kInterleaved ? kSize : kLanes * kSize);
  const Heads<T> row(p, item, token);

  const int64 position = table_row(p, item, token);
  A c[kSize], s[kSize];
  if (position < 0 || position >= p.table) {
    *p.fault = 1;  // any number of threads may write the same 1
    for (int i = 0; i < kSize; ++i) {
      c[i] = s[i] = A(0) * negative_infinity<A>();  // NaN, and so are the results
    }
  } else {
    load_angles(c, static_cast<const Table*>(p.cos) + item * p.cos_stride[0] +
                       position * p.cos_stride[1],
                p.cos_stride[2], lane * kSize, p.table_step, Config::kTableVectors);
    load_angles(s, static_cast<const Table*>(p.sin) + item * p.sin_stride[0] +
                       position * p.sin_stride[1],
                p.sin_stride[2], lane * kSize, p.table_step, Config::kTableVectors);
  }
  if (p.inverse) {
    for (int i = 0; i < kSize; ++i) {
      s[i] = -s[i];
    }
  }

  for (int h0 = slot; h0 < heads; h0 += kUnroll * kSlots) {
    Vector<T> a[kUnroll], b[kUnroll];
    for (int u = 0; u < kUnroll; ++u) {
      const int h = h0 + u * kSlots;
      if (h < heads) {
        a[u] = load_vector(row.from(p, h) + first);
        b[u] = load_vector(row.from(p, h) + second);
      }
    }
    for (int u = 0; u < kUnroll; ++u) {
      const int h = h0 + u * kSlots;
      if (h < heads) {
        rotate<Config>(a[u], b[u], c, s);
        store_vector(row.to(p, h) + first, a[u]);
        store_vector(row.to(p, h) + second, b[u]);
      }
    }
  }

  // Channels that are not rotated.
  const bool valid = position >= 0 && position < p.table;
#pragma unroll 1
  for (int h = slot; h < heads; h += kSlots) {
    const T* from = row.from(p, h);
    T* to = row.to(p, h);
#pragma unroll 1
    for (int i = p.rotary_dim + lane * kSize; i < p.head_dim; i += kLanes * kSize) {
      Vector<T> v = load_vector(from + i);
      for (int j = 0; j < kSize && !valid; ++j) {
        v.x[j] = narrow<T>(c[0]);
      }
      store_vector(to + i, v);
    }
  }
}
