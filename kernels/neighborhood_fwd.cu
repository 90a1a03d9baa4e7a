// neighborhood_fwd.cu: neighborhood attention, forward, one warp per query.
//
//   s[j] = scale * <q, k[j]>  for j in window(query)
//   y    = sum_j softmax(s)[j] v[j]         lse = log sum_j exp s[j]
//
// Shapes    q            (batch, *space, heads, head_dim)      any strides, last axis unit
//           k, v         (batch, *space, kv_heads, head_dim | value_dim)
//           y            (batch, *space, heads, value_dim)
//           lse          (batch, *space, heads), natural log, float | double; may be absent
// Grid      x: query items (batch, space, head), kThreads / 32 per block, grid-stride
// Block     one warp owns one query; its lanes share the features
// Tile map  none: the window is walked key by key, outer axes first
// Pipeline  per key:  load k -> dot (warp sum) -> online softmax -> load v -> y += weight * v
// Memory    registers only: 2 * kDim / 32 sums a lane; nothing of size (queries, keys)
// Limits    head_dim, value_dim <= Config::kDim; every dtype, rank, border rule and stride
// Sources   window rule: Hassani et al. 2023 and 2025; online softmax: Milakov et al. 2018
//
// This is the plain row: it takes every problem and is the baseline that faster rows are
// measured against. A key outside the window is never loaded, so its NaN cannot matter.
#include "common/features.cuh"
#include "common/window.cuh"

// The running softmax of a row: largest score so far and the sum of exponentials relative to it.
template <class A>
struct OnlineSoftmax {
  A largest = negative_infinity<A>();
  A sum = A(0);

  // Take in the score scale * dot; `rescale` is what earlier weights must be multiplied by. The
  // exponent is formed with one rounding, as in the backward, where lse stands for `largest`.
  __device__ A weight(A scale, A dot, A& rescale) {
    const A score = scale * dot;
    rescale = A(1);
    if (score > largest) {
      rescale = exponential(largest - score);
      largest = score;
      sum *= rescale;
    }
    // -inf minus -inf would be NaN; such a key has no weight.
    const A w = score == negative_infinity<A>()
                    ? A(0)
                    : exponential(multiply_add(scale, dot, -largest));
    sum += w;
    return w;
  }
};

template <class Config>
__device__ void neighborhood_forward(const NeighborhoodParams& p) {
  using T = typename Config::T;
  using A = Accumulator<T>;
  constexpr int kWarps = Config::kThreads / 32;
  const int lane = threadIdx.x % 32;
  const int64 items = item_count(p, p.heads);

  for (int64 item = blockIdx.x * int64(kWarps) + threadIdx.x / 32; item < items;
       item += gridDim.x * int64(kWarps)) {
    const Token query = token_of(item, p.heads, p.space);
    Features<T, Config::kDim / 32> q, k, v, y;
    q.load(row_of<const T>(p.q, query, query.head), p.head_dim, lane);
    y.clear();
    OnlineSoftmax<A> softmax;

    for_each_key<T>(p, query, [&](const T* k_row, const T* v_row) {
      k.load(k_row, p.head_dim, lane);
      A rescale;
      const A weight = softmax.weight(A(p.scale), q.dot(k), rescale);
      v.load(v_row, p.value_dim, lane);
      y.scale(rescale);
      y.add(weight, v);
    });

    y.store(row_of<T>(p.y, query, query.head), p.value_dim, lane, A(1) / softmax.sum);
    if (lane == 0 && p.lse.data != nullptr) {
      *row_of<A>(p.lse, query, query.head) = softmax.largest + logarithm(softmax.sum);
    }
  }
}
