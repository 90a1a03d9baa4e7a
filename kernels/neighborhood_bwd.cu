// neighborhood_bwd.cu: neighborhood attention, backward, in two passes of one warp per row.
//
//   p[i,j]   = exp(scale * <q[i], k[j]> - lse[i])          for j in window(i)
//   dp[i,j]  = <dy[i], v[j]>
//   delta[i] = sum_j p[i,j] dp[i,j] / sum_j p[i,j] - dlse[i]
//   ds[i,j]  = p[i,j] * (dp[i,j] - delta[i]) * scale
//   dq[i]    = sum_j ds[i,j] k[j]                          j: the keys of query i
//   dk[j]    = sum_i ds[i,j] q[i]    dv[j] = sum_i p[i,j] dy[i]    i: the queries of key j
//
// Shapes    as in neighborhood_fwd.cu; gradients have their array's shape
// Grid      x: items (batch, space, head), kThreads / 32 per block, grid-stride; heads are
//           kv_heads in the dk, dv pass
// Block     one warp owns one row; its lanes share the features
// Tile map  none. The queries of a key are one interval an axis (window.cuh), so dk and dv are
//           gathered, not scattered: no atomics, the same bits every time
// Pipeline  dq: walks the window twice, for delta and for dq, and leaves delta to
//           dk, dv: walks the inverse window, over the query heads of the group
// Memory    delta: one number per query and head; nothing of size (queries, keys)
// Limits    head_dim, value_dim <= Config::kDim; every dtype, rank, border rule and stride
// Sources   Dao et al. 2022 for the recomputation from lse
//
// delta equals <dy, y> - dlse, but as a mean over the same p and dp it cancels against dp to the
// last digit where one key has nearly all the weight; the rounding of y and lse would not.
#include "common/features.cuh"
#include "common/window.cuh"

template <class Config>
__device__ void neighborhood_dq(const NeighborhoodParams& p) {
  using T = typename Config::T;
  using A = Accumulator<T>;
  using Row = Features<T, Config::kDim / 32>;
  constexpr int kWarps = Config::kThreads / 32;
  const int lane = threadIdx.x % 32;
  const int64 items = item_count(p, p.heads);

  for (int64 item = blockIdx.x * int64(kWarps) + threadIdx.x / 32; item < items;
       item += gridDim.x * int64(kWarps)) {
    const Token query = token_of(item, p.heads, p.space);
    const A lse = *row_of<const A>(p.lse, query, query.head);
    Row q, dy, k, v, dq;
    q.load(row_of<const T>(p.q, query, query.head), p.head_dim, lane);
    dy.load(row_of<const T>(p.dy, query, query.head), p.value_dim, lane);

    A sum = A(0), weighted = A(0);
    for_each_key<T>(p, query, [&](const T* k_row, const T* v_row) {
      k.load(k_row, p.head_dim, lane);
      v.load(v_row, p.value_dim, lane);
      const A weight = exponential(multiply_add(A(p.scale), q.dot(k), -lse));
      sum += weight;
      weighted += weight * dy.dot(v);
    });
    A delta = weighted / sum;
    if (p.dlse.data != nullptr) {
      delta -= *row_of<const A>(p.dlse, query, query.head);
    }
    if (lane == 0) {
      *row_of<A>(p.delta, query, query.head) = delta;
    }

    dq.clear();
    for_each_key<T>(p, query, [&](const T* k_row, const T* v_row) {
      k.load(k_row, p.head_dim, lane);
      v.load(v_row, p.value_dim, lane);
      const A weight = exponential(multiply_add(A(p.scale), q.dot(k), -lse));
      dq.add(weight * (dy.dot(v) - delta), k);
    });
    dq.store(row_of<T>(p.dq, query, query.head), p.head_dim, lane, A(p.scale));
  }
}

template <class Config>
__device__ void neighborhood_dkdv(const NeighborhoodParams& p) {
  using T = typename Config::T;
  using A = Accumulator<T>;
  constexpr int kWarps = Config::kThreads / 32;
  const int lane = threadIdx.x % 32;
  const int group = p.heads / p.kv_heads;
  const int64 items = item_count(p, p.kv_heads);

  for (int64 item = blockIdx.x * int64(kWarps) + threadIdx.x / 32; item < items;
       item += gridDim.x * int64(kWarps)) {
    const Token key = token_of(item, p.kv_heads, p.space);
    const Box queries = box_of<true>(p, key.at);

    Features<T, Config::kDim / 32> k, v, q, dy, dk, dv;
    k.load(row_of<const T>(p.k, key, key.head), p.head_dim, lane);
    v.load(row_of<const T>(p.v, key, key.head), p.value_dim, lane);
    dk.clear();
    dv.clear();

    for (int i0 = 0; i0 < queries.count[0]; ++i0) {
      for (int i1 = 0; i1 < queries.count[1]; ++i1) {
        for (int i2 = 0; i2 < queries.count[2]; ++i2) {
          const Token query = {key.batch,
                               {queries.position(0, i0), queries.position(1, i1),
                                queries.position(2, i2)},
                               0};
          for (int head = key.head * group; head < (key.head + 1) * group; ++head) {
            q.load(row_of<const T>(p.q, query, head), p.head_dim, lane);
            dy.load(row_of<const T>(p.dy, query, head), p.value_dim, lane);
            const A lse = *row_of<const A>(p.lse, query, head);
            const A delta = *row_of<const A>(p.delta, query, head);
            const A weight = exponential(multiply_add(A(p.scale), q.dot(k), -lse));
            dk.add(weight * (dy.dot(v) - delta), q);
            dv.add(weight, dy);
          }
        }
      }
    }
    dk.store(row_of<T>(p.dk, key, key.head), p.head_dim, lane, A(p.scale));
    dv.store(row_of<T>(p.dv, key, key.head), p.value_dim, lane, A(1));
  }
}
