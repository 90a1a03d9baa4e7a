// rope_vector.cu: rotary position embedding of q and k in 16-byte accesses.
//
//   y[first]  = x[first]  * cos - x[second] * sin        first, second: the channels of a pair,
//   y[second] = x[second] * cos + x[first]  * sin        (i, i + r) or (2i, 2i + 1), r = rotary / 2
//   inverse: the sine is negated, which is the transpose
//
// Shapes    as in rope.cu; every row of q, k and their outputs 16-byte aligned
// Grid      x: kGroups groups of heads, fastest, by blocks of tokens;  y: batch, at most 65,535
// Block     kThreads = tokens x kSlots x kLanes; a thread has kQueries heads of q and kKeys of k,
//           slot, slot + kSlots, ... of its group's, and two vectors in each
// Tile map  the two vectors of a thread, in one head, for kSize = 16 / sizeof(T) = 8:
//             half-split    [8 l, 8 l + 8)  and  [r + 8 l, r + 8 l + 8)
//             interleaved   [16 l, 16 l + 8)  and  [16 l + 8, 16 l + 16)      l < kLanes
// Pipeline  all loads of the heads and of the table row, then rotations and stores: one latency.
//           No branch stands before the loads, and heads are a constant step apart, so that the
//           last load leaves soon after the first: small problems are all latency
// Memory    each element is read once and written once, 2 * (kQueries + kKeys) vectors in flight a
//           thread; a table row is read by each head slot, from cache
// In place  a thread reads its vectors before it writes any
// Limits    rotary_dim = 2 * kLanes * kSize; the rest of the head a multiple of kSize; seq below
//           2**31
// Config    T, Table; kRest: some channels are not rotated; kPositions: position_ids or offsets
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

// A thread's heads of one array: `count` of them exist, `step` elements apart.
template <class Config, int kHeads>
struct Share {
  using T = typename Config::T;
  static constexpr int kSize = Vector<T>::kSize;

  const T* from;
  T* to;
  int64 from_step, to_step;
  int count;
  Vector<T> a[kHeads], b[kHeads];

  __device__ Share(const void* x, const int64 (&x_stride)[3], void* y, const int64 (&y_stride)[3],
                   int heads, unsigned item, unsigned token, unsigned head)
      : from(static_cast<const T*>(x) + item * x_stride[0] + token * x_stride[1] +
             head * x_stride[2]),
        to(static_cast<T*>(y) + item * y_stride[0] + token * y_stride[1] + head * y_stride[2]),
        from_step(Config::kSlots * x_stride[2]),
        to_step(Config::kSlots * y_stride[2]),
        count((heads - int(head) + Config::kSlots - 1) / Config::kSlots) {}

  __device__ void load(int first, int second) {
#pragma unroll
    for (int u = 0; u < kHeads; ++u) {
      if (u < count) {
        a[u] = load_vector(from + u * from_step + first);
        b[u] = load_vector(from + u * from_step + second);
      }
    }
  }

  __device__ void rotate_and_store(int first, int second, const float (&c)[kSize],
                                   const float (&s)[kSize]) {
#pragma unroll
    for (int u = 0; u < kHeads; ++u) {
      if (u < count) {
        rotate<Config>(a[u], b[u], c, s);
        store_vector(to + u * to_step + first, a[u]);
        store_vector(to + u * to_step + second, b[u]);
      }
    }
  }

  // Channels that are not rotated; NaN in a token without a table row.
  __device__ void copy_rest(int start, int end, bool valid) const {
#pragma unroll 1
    for (int u = 0; u < min(kHeads, count); ++u) {
#pragma unroll 1
      for (int i = start; i < end; i += Config::kLanes * kSize) {
        Vector<T> v = load_vector(from + u * from_step + i);
        const float nan = 0.0f * negative_infinity<float>();
        for (int j = 0; j < kSize && !valid; j += 2) {
          v.set(j, nan, nan);
        }
        store_vector(to + u * to_step + i, v);
      }
    }
  }
};

// q or k is absent, or has no heads here.
template <class Config>
struct Share<Config, 0> {
  template <class... Arguments>
  __device__ Share(const Arguments&...) {}
  __device__ void load(int, int) {}
  template <class Angles>
  __device__ void rotate_and_store(int, int, const Angles&, const Angles&) {}
  __device__ void copy_rest(int, int, bool) const {}
};

template <class Config>
__device__ void rope_vector(const RopeParams& p) {
  using T = typename Config::T;
  using Table = typename Config::Table;
  constexpr int kSize = Vector<T>::kSize, kLanes = Config::kLanes, kSlots = Config::kSlots;
  constexpr int kToken = kLanes * kSlots;  // threads of a token
  constexpr int kQueries = Config::kQueries, kKeys = Config::kKeys;
  const unsigned lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes % kSlots;
  const unsigned item = blockIdx.y, group = blockIdx.x % Config::kGroups;
  const unsigned token = blockIdx.x / Config::kGroups * (Config::kThreads / kToken) +
                         threadIdx.x / kToken;
  if (token >= p.seq) {
    return;
  }
  const int first = lane * (Config::kInterleaved ? 2 * kSize : kSize);
  const int second = first + (Config::kInterleaved ? kSize : kLanes * kSize);
  Share<Config, kQueries> q(p.q, p.q_stride, p.q_out, p.q_out_stride, p.q_heads, item, token,
                            group * (kSlots * kQueries) + slot);
  Share<Config, kKeys> k(p.k, p.k_stride, p.k_out, p.k_out_stride, p.k_heads, item, token,
                         group * (kSlots * kKeys) + slot);
  q.load(first, second);
  k.load(first, second);

  // Without positions and offsets the host has checked every row.
  const int64 position = Config::kPositions ? table_row(p, item, token) : token + p.offset;
  const bool valid = !Config::kPositions || (position >= 0 && position < p.table);
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

  q.rotate_and_store(first, second, c, s);
  k.rotate_and_store(first, second, c, s);
  if (Config::kRest) {
    q.copy_rest(p.rotary_dim + lane * kSize, p.head_dim, valid);
    k.copy_rest(p.rotary_dim + lane * kSize, p.head_dim, valid);
  }
}
