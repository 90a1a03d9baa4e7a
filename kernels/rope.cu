// rope.cu: rotary position embedding of q and k, forward and (inverse) backward.
//
//   y[first]  = x[first]  * cos - x[second] * sin        first, second: the channels of a pair,
//   y[second] = x[second] * cos + x[first]  * sin        (i, i + r) or (2i, 2i + 1), r = rotary / 2
//   inverse: the sine is negated, which is the transpose
//
// Shapes    q, k, q_out, k_out  (batch, seq, heads, head_dim), unit stride on the last axis; q or k
//                               may be absent; an output may be its own input
//           cos, sin            (1 or batch, table, columns): pair i is in column i * table_step
//           position_ids        (1 or batch, seq), int32 or int64, or absent
//           offsets             (batch), int64, or absent: then the one offset of the parameters
// Table     token t of item b reads table row position_ids[b, t] + offset, or t + offset. If there
//           is no such row, every channel of the token becomes NaN and *fault becomes 1.
// Grid      one block per token, q and k together; blocks stride over the tokens beyond the grid
// Block     128 threads: warp w takes heads w, w + 4, ...; its lanes run along the pairs, so that
//           no index needs a division and neighbouring lanes touch neighbouring channels
// Memory    each element is read once and written once; the table stays in the caches
// In place  a thread reads both channels of its pair before it writes either
// Accuracy  float32 (float64 for float64), one rounding; channels from rotary_dim on are copied
// Limits    none on head_dim, rotary_dim (even), heads or seq; indices are 64-bit
// Config    T: element; Table: element of cos and sin
// Sources   Su et al., "RoFormer", 2021
#include "common/params.cuh"
#include "common/reduce.cuh"
#include "common/rope.cuh"
#include "common/types.cuh"

// Rotate all heads of one token. x and y may be the same; cos and sin point at the token's row.
template <class Config>
__device__ void rotate_heads(const RopeParams& p, const typename Config::T* x, int64 x_head,
                             typename Config::T* y, int64 y_head, int heads,
                             const typename Config::Table* cos,
                             const typename Config::Table* sin) {
  using T = typename Config::T;
  using A = Accumulator<T>;
  int lane = threadIdx.x % kWarp;
  int pairs = p.rotary_dim / 2;
  for (int head = threadIdx.x / kWarp; head < heads; head += blockDim.x / kWarp) {
    const T* from = x + head * x_head;
    T* to = y + head * y_head;
    for (int pair = lane; pair < pairs; pair += kWarp) {
      int64 column = int64(pair) * p.table_step;
      A c = A(widen(cos[column * p.cos_stride[2]]));
      A s = A(widen(sin[column * p.sin_stride[2]]));
      if (p.inverse) {
        s = -s;
      }
      int first = p.interleaved ? 2 * pair : pair;
      int second = p.interleaved ? first + 1 : pair + pairs;
      A a = widen(from[first]);
      A b = widen(from[second]);
      rotate_pair(a, b, c, s);
      to[first] = narrow<T>(a);
      to[second] = narrow<T>(b);
    }
    for (int channel = p.rotary_dim + lane; channel < p.head_dim; channel += kWarp) {
      to[channel] = from[channel];
    }
  }
}

template <class T>
__device__ void fill_heads_with_nan(T* y, int64 y_head, int heads, int head_dim) {
  T nan = narrow<T>(0 * negative_infinity<Accumulator<T>>());
  for (int head = threadIdx.x / kWarp; head < heads; head += blockDim.x / kWarp) {
    for (int channel = threadIdx.x % kWarp; channel < head_dim; channel += kWarp) {
      y[head * y_head + channel] = nan;
    }
  }
}

template <class Config>
__device__ void rope(const RopeParams& p) {
  using T = typename Config::T;
  using Table = typename Config::Table;
  for (int64 n = blockIdx.x; n < p.batch * p.seq; n += gridDim.x) {
    int64 item = n / p.seq;
    int64 token = n % p.seq;
    const T* q = static_cast<const T*>(p.q) + item * p.q_stride[0] + token * p.q_stride[1];
    const T* k = static_cast<const T*>(p.k) + item * p.k_stride[0] + token * p.k_stride[1];
    T* q_out = static_cast<T*>(p.q_out) + item * p.q_out_stride[0] + token * p.q_out_stride[1];
    T* k_out = static_cast<T*>(p.k_out) + item * p.k_out_stride[0] + token * p.k_out_stride[1];

    int64 row = table_row(p, item, token);
    if (row < 0 || row >= p.table) {
      if (threadIdx.x == 0) {
        *p.fault = 1;  // any number of tokens may write the same 1
      }
      fill_heads_with_nan(q_out, p.q_out_stride[2], p.q_heads, p.head_dim);
      fill_heads_with_nan(k_out, p.k_out_stride[2], p.k_heads, p.head_dim);
      continue;
    }
    const Table* cos =
        static_cast<const Table*>(p.cos) + item * p.cos_stride[0] + row * p.cos_stride[1];
    const Table* sin =
        static_cast<const Table*>(p.sin) + item * p.sin_stride[0] + row * p.sin_stride[1];
    rotate_heads<Config>(p, q, p.q_stride[2], q_out, p.q_out_stride[2], p.q_heads, cos, sin);
    rotate_heads<Config>(p, k, p.k_stride[2], k_out, p.k_out_stride[2], p.k_heads, cos, sin);
  }
}
