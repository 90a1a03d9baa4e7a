// multi_token.cuh: what the forward and the backward of multi-token attention share.
#pragma once

#include "common/params.cuh"
#include "common/types.cuh"

// A row (item, head, query) of a [batch, heads, seq, seq] array, counted over the whole array.
struct MatrixRow {
  int64 item;
  int head;
  int query;

  __device__ MatrixRow(int64 number, int heads, int seq)
      : item(number / seq / heads),
        head(int(number / seq % heads)),
        query(int(number % seq)) {}
};

// Element (item, head, query, 0) of a strided array; keys are strides[3] apart.
template <class T>
__device__ inline const T* row_start(const void* data, const int64 (&strides)[4], int64 item,
                                     int64 head, int64 query) {
  return static_cast<const T*>(data) + item * strides[0] + head * strides[1] + query * strides[2];
}

// The attention weights of one row of scores, computed from the scores when they are needed.
// `shift` and `factor` are the row's statistics:
//   softmax    weight = exp(x - shift) * factor;  shift: the largest score of the row,
//              factor: 1 / sum of exp(x - shift)
//   sparsemax  weight = x - shift + factor where x >= shift, else 0;  shift: the smallest score
//              that gets a weight, factor: that weight
// The sparsemax threshold is shift - factor; kept apart, the two lose nothing where weights are
// small. A row with a NaN, or without a largest finite score, has factor NaN, and NaN weights.
template <class Config>
struct AttentionRow {
  using T = typename Config::T;
  using A = Accumulator<T>;
  const T* scores;
  int64 key_stride;
  A shift, factor;

  __device__ AttentionRow(const MultiTokenParams& p, int64 item, int head, int64 query)
      : scores(row_start<T>(p.scores, p.scores_stride, item, head, query)),
        key_stride(p.scores_stride[3]) {
    int64 row = (item * p.heads_in + head) * p.seq + query;
    shift = static_cast<const A*>(p.shift)[row];
    factor = static_cast<const A*>(p.factor)[row];
  }

  __device__ A score(int64 key) const { return widen(scores[key * key_stride]); }

  // Key must not exceed the row's query: what lies above the diagonal is never read.
  __device__ A weight(int64 key) const {
    if constexpr (Config::kSparsemax) {
      A x = score(key);
      return x < shift ? 0 * factor : x - shift + factor;
    } else {
      return exponential(score(key) - shift) * factor;
    }
  }

  // How much a change of this score moves its own weight, before the row is made to sum to 1.
  __device__ A slope(int64 key) const {
    if constexpr (Config::kSparsemax) {
      return score(key) < shift ? 0 * factor : 1 + 0 * factor;
    } else {
      return weight(key);
    }
  }
};

// First row of part number `part` of `parts`: parts have about equal cost, where row r costs
// flat + 2 * slope * r / seq.
__device__ inline int part_start(int part, int parts, int seq, float slope, float flat) {
  if (part >= parts) {
    return seq;
  }
  const float share = float(part) / float(parts);
  const float z = slope == 0 ? share
      : (sqrtf(flat * flat + 4 * slope * (slope + flat) * share) - flat) / (2 * slope);
  return min(seq, int(z * float(seq) + 0.5f));
}
