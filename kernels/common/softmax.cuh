// softmax.cuh: the attention of one query, key by key, by one warp: the plain way.
#pragma once
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

// y and lse of a query. Keys outside its window are never loaded.
template <class T, int kDim>
__device__ void attend_plainly(const NeighborhoodParams& p, const Token& query) {
  using A = Accumulator<T>;
  const int lane = threadIdx.x % kWarp;
  Features<T, kDim / kWarp> q, k, v, y;
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
