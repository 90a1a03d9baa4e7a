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
#include "common/softmax.cuh"

template <class Config>
__device__ void neighborhood_forward(const NeighborhoodParams& p) {
  using T = typename Config::T;
  constexpr int kWarps = Config::kThreads / 32;
  const int64 items = item_count(p, p.heads);

  for (int64 item = blockIdx.x * int64(kWarps) + threadIdx.x / 32; item < items;
       item += gridDim.x * int64(kWarps)) {
    attend_plainly<T, Config::kDim>(p, token_of(item, p.heads, p.space));
  }
}
