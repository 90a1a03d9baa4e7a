// multi_token_fwd.cu: multi-token attention, forward.
//
//   P[c, i, :] = softmax or sparsemax of scores[c, i, 0..i];  P = 0 for j > i, outside the matrix
//   y[o, i, j] = sum_{c, u, v} weight[o, c, u, v] * P[c, i + u * d0 - r0, j + v * d1 - c0]
//                + bias[o]  for j <= i, else 0;  c runs over the heads of o's group
//
// Shapes    scores (batch, heads_in, seq, seq), weight (heads_out, heads_in / groups, kh, kw),
//           bias (heads_out) or absent: any strides;  y (batch, heads_out, seq, seq), contiguous
//           shift, factor (batch, heads_in, seq): the row statistics, in the accumulator's type
// Origin    r0 = (kh / 2) * d0, or (kh - 1) * d0 with causal padding;  c0 = (kw / 2) * d1
// Passes    multi_token_statistics     one row of scores -> its shift and factor
//           multi_token_convolution    one row of y; P is never stored
// Grid      one block per row; blocks stride over the rows beyond the grid
// Block     kThreads threads along the keys of the row
//
//             keys j ->                       taps (u, v) of one output, 3 x 3, dilation 1:
//             +---------------+                 . . .      those in row i + 1 see a later query
//   queries   | \    y = 0    |                 . x .      those above the diagonal or outside
//     i       |   \           |                 . . .      the matrix give 0 and are not read
//     |       | P   \         |
//             +---------------+
//
// Memory    statistics: a row is read twice, for sparsemax several times, mostly from cache;
//           convolution: neighbouring outputs read the same taps, from cache
// Accuracy  sums in Accumulator<T>, nested (taps of a kernel row, rows, heads) to keep them short;
//           one rounding at the end
// Limits    (kh - 1) * d0 and (kw - 1) * d1 below 2^31
// Config    T: element; kSparsemax: activation; kThreads
// Sources   Golovneva et al., "Multi-Token Attention", 2025; sparsemax: Martins and Astudillo,
//           2016; its threshold by shrinking the support: Michelot, 1986
#include "common/params.cuh"
#include "common/types.cuh"
#include "common/reduce.cuh"
#include "common/multi_token.cuh"

// Find the keys that sparsemax keeps, {x - largest > threshold}. Every kept score exceeds
// largest - 1. Solve for the threshold as if all candidates were kept, drop those that do not
// exceed it, repeat: the threshold only rises, so the first round that drops none has the answer.
// Returns the smallest kept score as shift, and its weight as factor.
template <class Config, class A, class T>
__device__ void sparsemax_support(const T* scores, int64 stride, int query, A largest, A& shift,
                                  A& factor) {
  constexpr int kThreads = Config::kThreads;
  A threshold = -1;
  int kept = 0;
  int before;
  do {
    before = kept;
    A sum = 0;
    int count = 0;
    for (int key = threadIdx.x; key <= query; key += kThreads) {
      A x = widen(scores[key * stride]) - largest;
      if (x > threshold) {
        sum += x;
        ++count;
      }
    }
    sum = block_sum<kThreads>(sum);
    kept = block_sum<kThreads>(count);
    if (kept != before) {
      threshold = larger(threshold, (sum - 1) / kept);
    }
  } while (kept != before);

  A smallest = -negative_infinity<A>();
  for (int key = threadIdx.x; key <= query; key += kThreads) {
    A x = widen(scores[key * stride]);
    if (x - largest > threshold) {
      smallest = x < smallest ? x : smallest;
    }
  }
  shift = -block_max<kThreads>(-smallest);

  A excess = 0;  // what the kept weights have beyond the smallest of them
  for (int key = threadIdx.x; key <= query; key += kThreads) {
    A x = widen(scores[key * stride]);
    if (x >= shift) {
      excess += x - shift;
    }
  }
  factor = (1 - block_sum<kThreads>(excess)) / kept;
}

template <class Config>
__device__ void multi_token_statistics(const MultiTokenParams& p) {
  using T = typename Config::T;
  using A = Accumulator<T>;
  constexpr int kThreads = Config::kThreads;
  for (int64 number = blockIdx.x; number < p.batch * p.heads_in * p.seq; number += gridDim.x) {
    MatrixRow row(number, p.heads_in, p.seq);
    const T* scores = row_start<T>(p.scores, p.scores_stride, row.item, row.head, row.query);
    int64 stride = p.scores_stride[3];

    A largest = negative_infinity<A>();
    for (int key = threadIdx.x; key <= row.query; key += kThreads) {
      largest = larger(largest, A(widen(scores[key * stride])));
    }
    largest = block_max<kThreads>(largest);

    A shift = largest;
    A factor;
    if constexpr (Config::kSparsemax) {
      // False for a NaN, and where the largest score is infinite.
      bool ordered = true;
      for (int key = threadIdx.x; key <= row.query; key += kThreads) {
        ordered = ordered && widen(scores[key * stride]) - largest <= 0;
      }
      if (__syncthreads_and(ordered)) {
        sparsemax_support<Config>(scores, stride, row.query, largest, shift, factor);
      } else {
        factor = 0 * negative_infinity<A>();  // NaN
      }
    } else {
      A sum = 0;
      for (int key = threadIdx.x; key <= row.query; key += kThreads) {
        sum += exponential(widen(scores[key * stride]) - largest);
      }
      factor = 1 / block_sum<kThreads>(sum);
    }
    if (threadIdx.x == 0) {
      static_cast<A*>(p.shift)[number] = shift;
      static_cast<A*>(p.factor)[number] = factor;
    }
  }
}

// Sum over the taps of one head's kernel, for the output at (query, key).
template <class Config>
__device__ Accumulator<typename Config::T> head_sum(const MultiTokenParams& p, int64 item,
                                                    int head_in, const typename Config::T* weight,
                                                    int query, int key) {
  using A = Accumulator<typename Config::T>;
  A sum = 0;
  for (int u = 0; u < p.kh; ++u) {
    int64 from_query = query + int64(u) * p.dilation[0] - p.row_origin;
    if (from_query < 0 || from_query >= p.seq) {
      continue;
    }
    AttentionRow<Config> attention(p, item, head_in, from_query);
    A row_sum = 0;
    for (int v = 0; v < p.kw; ++v) {
      int64 from_key = key + int64(v) * p.dilation[1] - p.column_origin;
      if (from_key >= 0 && from_key <= from_query) {
        A w = widen(weight[u * p.weight_stride[2] + v * p.weight_stride[3]]);
        row_sum += w * attention.weight(from_key);
      }
    }
    sum += row_sum;
  }
  return sum;
}

template <class Config>
__device__ void multi_token_convolution(const MultiTokenParams& p) {
  using T = typename Config::T;
  using A = Accumulator<T>;
  int heads_of_group = p.heads_in / p.groups;
  for (int64 number = blockIdx.x; number < p.batch * p.heads_out * p.seq; number += gridDim.x) {
    MatrixRow row(number, p.heads_out, p.seq);
    int first_head = row.head / (p.heads_out / p.groups) * heads_of_group;
    const T* weight = static_cast<const T*>(p.weight) + row.head * p.weight_stride[0];
    const T* bias = static_cast<const T*>(p.bias);
    T* y = static_cast<T*>(p.y) + number * p.seq;

    for (int key = threadIdx.x; key < p.seq; key += Config::kThreads) {
      A sum = 0;
      if (key <= row.query) {
        for (int c = 0; c < heads_of_group; ++c) {
          sum += head_sum<Config>(p, row.item, first_head + c, weight + c * p.weight_stride[1],
                                  row.query, key);
        }
        if (bias) {
          sum += widen(bias[row.head * p.bias_stride]);
        }
      }
      y[key] = narrow<T>(sum);
    }
  }
}
