// rope_vector.cu: rotary position embedding of q and k in 16-byte accesses.
//
//   y[first]  = x[first]  * cos - x[second] * sin        first, second: the channels of a pair,
//   y[second] = x[second] * cos + x[first]  * sin        (i, i + r) or (2i, 2i + 1), r = rotary / 2
//   inverse: the sine is negated, which is the transpose
//
// Shapes    as in rope.cu; every row of q, k and their outputs 16-byte aligned
// Grid      x: groups of tokens;  y: batch, at most 65,535;  z: groups of kSlots * kUnroll heads
// Block     kThreads = tokens x kSlots heads x kLanes; a thread has kUnroll heads, slot,
//           slot + kSlots, ... of the list "q heads, then k heads", and two vectors in each
// Tile map  the two vectors of a thread, in one head, for kSize = 16 / sizeof(T) = 8:
//             half-split    [8 l, 8 l + 8)  and  [r + 8 l, r + 8 l + 8)
//             interleaved   [16 l, 16 l + 8)  and  [16 l + 8, 16 l + 16)      l < kLanes
// Pipeline  all loads of the heads, then of the table row, then rotations and stores: one latency
// Memory    each element is read once and written once, 2 * kUnroll vectors in flight a thread;
//           a table row is read by each head slot, from cache
// In place  a thread reads both vectors before it writes either
// Limits    rotary_dim = 2 * kLanes * kSize; the rest of the head a multiple of kSize
// Sources   Su et al., "RoFormer", 2021
#include "common/params.cuh"
#include "common/rope.cuh"
#include "common/types.cuh"
#include "common/vector.cuh"

// The cosines or sines of kSize neighbouring pairs.
template <int kSize, class Table>
__device__ void load_angles(float (&to)[kSize], const Table* row, int64 column_stride, int first_pair,
                            int table_step, bool vectors) {
  constexpr int kPerVector = Vector<Table>::kSize;
  if (vectors) {
#pragma unroll
    for (int i = 0; i < kSize; i += kPerVector) {
      const Vector<Table> v = load_vector(row + first_pair + i);
      for (int j = 0; j < kPerVector && i + j < kSize; ++j) {
        to[i + j] = v.get(j);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      to[i] = widen(row[int64(first_pair + i) * table_step * column_stride]);
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
template <class Config, class T, int kSize>
__device__ void rotate(Vector<T>& a, Vector<T>& b, const float (&c)[kSize],
                       const float (&s)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; i += 2) {
    if constexpr (Config::kInterleaved) {
      for (int j = i; j < i + 2; ++j) {
        Vector<T>& v = 2 * j < kSize ? a : b;
        float x = v.get(2 * j % kSize), y = v.get(2 * j % kSize + 1);
        rotate_pair(x, y, c[j], s[j]);
        v.set(2 * j % kSize, x, y);
      }
    } else {
      float x0 = a.get(i), y0 = b.get(i), x1 = a.get(i + 1), y1 = b.get(i + 1);
      rotate_pair(x0, y0, c[i], s[i]);
      rotate_pair(x1, y1, c[i + 1], s[i + 1]);
      a.set(i, x0, x1);
      b.set(i, y0, y1);
    }
  }
}

template <class Config>
__device__ void rope_vector(const RopeParams& p) {
  using T = typename Config::T;
  using Table = typename Config::Table;
  constexpr int kSize = Vector<T>::kSize, kLanes = Config::kLanes, kSlots = Config::kSlots;
  constexpr int kUnroll = Config::kUnroll, kToken = kLanes * kSlots;  // threads of a token
  const int lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes % kSlots;
  const int64 item = blockIdx.y;
  const int64 token = blockIdx.x * int64(Config::kThreads / kToken) + threadIdx.x / kToken;
  if (token >= p.seq) {
    return;
  }
  const int heads = p.q_heads + p.k_heads;
  const int head = blockIdx.z * (kSlots * kUnroll) + slot;
  const int first = lane * (Config::kInterleaved ? 2 * kSize : kSize);
  const int second = first + (Config::kInterleaved ? kSize : kLanes * kSize);
  const Heads<T> row(p, item, token);

  Vector<T> a[kUnroll], b[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int h = head + u * kSlots;
    if (h < heads) {
      a[u] = load_vector(row.from(p, h) + first);
      b[u] = load_vector(row.from(p, h) + second);
    }
  }

  const int64 position = table_row(p, item, token);
  const bool valid = position >= 0 && position < p.table;
  float c[kSize], s[kSize];
  if (valid) {
    load_angles(c, static_cast<const Table*>(p.cos) + item * p.cos_stride[0] +
                       position * p.cos_stride[1],
                p.cos_stride[2], lane * kSize, p.table_step, Config::kTableVectors);
    load_angles(s, static_cast<const Table*>(p.sin) + item * p.sin_stride[0] +
                       position * p.sin_stride[1],
                p.sin_stride[2], lane * kSize, p.table_step, Config::kTableVectors);
  } else {
    *p.fault = 1;  // any number of threads may write the same 1
    for (int i = 0; i < kSize; ++i) {
      c[i] = s[i] = 0.0f * negative_infinity<float>();  // NaN, and so are the results
    }
  }
  if (p.inverse) {
    for (int i = 0; i < kSize; ++i) {
      s[i] = -s[i];
    }
  }

#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int h = head + u * kSlots;
    if (h < heads) {
      rotate<Config>(a[u], b[u], c, s);
      store_vector(row.to(p, h) + first, a[u]);
      store_vector(row.to(p, h) + second, b[u]);
    }
  }

  // Channels that are not rotated.
  if (p.rotary_dim < p.head_dim) {
#pragma unroll 1
    for (int h = head; h < min(heads, head + kUnroll * kSlots); h += kSlots) {
      const T* from = row.from(p, h);
      T* to = row.to(p, h);
#pragma unroll 1
      for (int i = p.rotary_dim + lane * kSize; i < p.head_dim; i += kLanes * kSize) {
        Vector<T> v = load_vector(from + i);
        for (int j = 0; j < kSize && !valid; j += 2) {
          v.set(j, c[0], c[0]);
        }
        store_vector(to + i, v);
      }
    }
  }
}
