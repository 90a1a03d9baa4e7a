// multi_token_bwd.cu: multi-token attention, backward.
//
//   dP[c, i, j] = sum_{o, u, v} weight[o, c, u, v] * dy[o, i - u * d0 + r0, j - v * d1 + c0]
//   softmax     d_scores = P * (dP - mean),  mean = sum over the row of P * dP
//   sparsemax   d_scores = dP - mean where P > 0, else 0,  mean = that of dP where P > 0
//   d_weight[o, c, u, v] = sum_{batch, i, j} dy[o, i, j] * P[c, i + u * d0 - r0, j + v * d1 - c0]
//   d_bias[o]            = sum_{batch, i, j} dy[o, i, j];  all sums over j <= i only
//
// Shapes    scores, dy, weight: any strides;  d_scores, d_weight, d_bias: contiguous, shapes of
//           scores, weight, bias;  d_bias may be absent
//           shift, factor (batch, heads_in, seq): from multi_token_statistics in multi_token_fwd.cu
//           partial (elements of d_weight then d_bias, chunks): in the accumulator's type
// Passes    multi_token_statistics     again, from the scores: a forward call need not keep them
//           multi_token_d_scores       one row of d_scores: the row's mean, then the row itself
//           multi_token_d_weight_partial   one element of d_weight or d_bias over one chunk of rows
//           multi_token_d_weight       one element: the sum of its chunks
// Grid      one block per row; per (element, chunk); per element. Blocks stride beyond the grid
// Block     kThreads threads along the keys of a row; in the last pass, along the chunks
//
//   chunk k holds rows k, k + chunks, ... of all (item, query) pairs: long and short rows alike
//
// Memory    P and dP are computed where they are needed, dP twice; neither is stored
// Accuracy  sums in Accumulator<T>, nested; each gradient is rounded once. The order is fixed: no
//           atomics, so the same input gives the same bits
// Limits    (kh - 1) * d0 and (kw - 1) * d1 below 2^31
// Config    T: element; kSparsemax: activation; kThreads
// Sources   as multi_token_fwd.cu
//
// Above the diagonal nothing is read, of dy as of the scores, and d_scores is 0.
#include "common/params.cuh"
#include "common/types.cuh"
#include "common/reduce.cuh"
#include "common/multi_token.cuh"

// dP at (query, key) from one head of y: the transposed convolution.
template <class Config>
__device__ Accumulator<typename Config::T> head_gradient(const MultiTokenParams& p, int64 item,
                                                         int head_out,
                                                         const typename Config::T* weight,
                                                         int query, int key) {
  using T = typename Config::T;
  using A = Accumulator<T>;
  A sum = 0;
#pragma unroll 1  // kernels are small: unrolled taps only cost registers, here and below
  for (int u = 0; u < p.kh; ++u) {
    int64 to_query = query - int64(u) * p.dilation[0] + p.row_origin;
    if (to_query < 0 || to_query >= p.seq) {
      continue;
    }
    const T* dy = row_start<T>(p.dy, p.dy_stride, item, head_out, to_query);
    A row_sum = 0;
#pragma unroll 1
    for (int v = 0; v < p.kw; ++v) {
      int64 to_key = key - int64(v) * p.dilation[1] + p.column_origin;
      if (to_key >= 0 && to_key <= to_query) {
        A w = widen(weight[u * p.weight_stride[2] + v * p.weight_stride[3]]);
        row_sum += w * widen(dy[to_key * p.dy_stride[3]]);
      }
    }
    sum += row_sum;
  }
  return sum;
}

// dP at (query, key) of one head of the scores.
template <class Config>
__device__ Accumulator<typename Config::T> weight_gradient(const MultiTokenParams& p,
                                                           const MatrixRow& row, int key) {
  using T = typename Config::T;
  using A = Accumulator<T>;
  int heads_of_group = p.heads_in / p.groups;
  int outputs_of_group = p.heads_out / p.groups;
  int first_output = row.head / heads_of_group * outputs_of_group;
  const T* weight =
      static_cast<const T*>(p.weight) + row.head % heads_of_group * p.weight_stride[1];
  A sum = 0;
  for (int o = first_output; o < first_output + outputs_of_group; ++o) {
    sum += head_gradient<Config>(p, row.item, o, weight + o * p.weight_stride[0], row.query, key);
  }
  return sum;
}

template <class Config>
__device__ void multi_token_d_scores(const MultiTokenParams& p) {
  using T = typename Config::T;
  using A = Accumulator<T>;
  constexpr int kThreads = Config::kThreads;
  for (int64 number = blockIdx.x; number < p.batch * p.heads_in * p.seq; number += gridDim.x) {
    MatrixRow row(number, p.heads_in, p.seq);
    AttentionRow<Config> attention(p, row.item, row.head, row.query);

    A total = 0;
    A slopes = 0;
    for (int key = threadIdx.x; key <= row.query; key += kThreads) {
      A slope = attention.slope(key);
      total += slope * weight_gradient<Config>(p, row, key);
      slopes += slope;
    }
    A mean = block_sum<kThreads>(total);
    if constexpr (Config::kSparsemax) {
      mean /= block_sum<kThreads>(slopes);  // with softmax the slopes sum to 1
    }

    T* d_scores = static_cast<T*>(p.d_scores) + number * p.seq;
    for (int key = threadIdx.x; key < p.seq; key += kThreads) {
      A gradient = 0;
      if (key <= row.query) {
        gradient = attention.slope(key) * (weight_gradient<Config>(p, row, key) - mean);
      }
      d_scores[key] = narrow<T>(gradient);
    }
  }
}

// One element of weight, or of bias: the elements of bias come after those of weight.
struct WeightElement {
  int head_out, head_in, u, v;  // head_in counts within the group
  bool bias;

  __device__ WeightElement(const MultiTokenParams& p, int64 number) {
    int64 heads_of_group = p.heads_in / p.groups;
    int64 weights = p.heads_out * heads_of_group * p.kh * p.kw;
    bias = number >= weights;
    v = int(number % p.kw);
    u = int(number / p.kw % p.kh);
    head_in = int(number / p.kw / p.kh % heads_of_group);
    head_out = bias ? int(number - weights) : int(number / p.kw / p.kh / heads_of_group);
  }
};

__device__ inline int64 weight_elements(const MultiTokenParams& p) {
  int64 weights = int64(p.heads_out) * (p.heads_in / p.groups) * p.kh * p.kw;
  return weights + (p.d_bias ? p.heads_out : 0);
}

// This thread's share of one row of dy, times the weights under it (or times 1 for the bias).
template <class Config>
__device__ Accumulator<typename Config::T> row_product(const MultiTokenParams& p,
                                                       const WeightElement& element, int64 item,
                                                       int query) {
  using T = typename Config::T;
  using A = Accumulator<T>;
  const T* dy = row_start<T>(p.dy, p.dy_stride, item, element.head_out, query);
  A sum = 0;
  if (element.bias) {
    for (int key = threadIdx.x; key <= query; key += Config::kThreads) {
      sum += widen(dy[key * p.dy_stride[3]]);
    }
    return sum;
  }
  int64 from_query = query + int64(element.u) * p.dilation[0] - p.row_origin;
  if (from_query < 0 || from_query >= p.seq) {
    return sum;
  }
  int group = element.head_out / (p.heads_out / p.groups);
  int head_in = group * (p.heads_in / p.groups) + element.head_in;
  AttentionRow<Config> attention(p, item, head_in, from_query);
  int64 shift = int64(element.v) * p.dilation[1] - p.column_origin;
  for (int key = threadIdx.x; key <= query; key += Config::kThreads) {
    int64 from_key = key + shift;
    if (from_key >= 0 && from_key <= from_query) {
      sum += widen(dy[key * p.dy_stride[3]]) * attention.weight(from_key);
    }
  }
  return sum;
}

template <class Config>
__device__ void multi_token_d_weight_partial(const MultiTokenParams& p) {
  using A = Accumulator<typename Config::T>;
  A* partial = static_cast<A*>(p.partial);
  int64 rows = p.batch * p.seq;
  for (int64 number = blockIdx.x; number < weight_elements(p) * p.chunks; number += gridDim.x) {
    WeightElement element(p, number / p.chunks);
    A sum = 0;
    for (int64 row = number % p.chunks; row < rows; row += p.chunks) {
      sum += row_product<Config>(p, element, row / p.seq, int(row % p.seq));
    }
    sum = block_sum<Config::kThreads>(sum);
    if (threadIdx.x == 0) {
      partial[number] = sum;
    }
  }
}

template <class Config>
__device__ void multi_token_d_weight(const MultiTokenParams& p) {
  using T = typename Config::T;
  using A = Accumulator<T>;
  const A* partial = static_cast<const A*>(p.partial);
  int64 elements = weight_elements(p);
  int64 weights = elements - (p.d_bias ? p.heads_out : 0);
  for (int64 number = blockIdx.x; number < elements; number += gridDim.x) {
    A sum = 0;
    for (int chunk = threadIdx.x; chunk < p.chunks; chunk += Config::kThreads) {
      sum += partial[number * p.chunks + chunk];
    }
    sum = block_sum<Config::kThreads>(sum);
    if (threadIdx.x == 0) {
      if (number < weights) {
        static_cast<T*>(p.d_weight)[number] = narrow<T>(sum);
      } else {
        static_cast<T*>(p.d_bias)[number - weights] = narrow<T>(sum);
      }
    }
  }
}
