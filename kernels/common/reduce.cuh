// reduce.cuh: sums and maxima over a warp or a block, in a fixed order.
//
// Every thread gets the result, and the same bits: in the butterfly both partners add the same two
// numbers. All threads of the warp or block must call. A sum keeps a NaN; a maximum passes over it,
// as fmax does.
#pragma once

constexpr int kWarp = 32;

template <class A>
__device__ inline A larger(A x, A y) {
  return x > y || y != y ? x : y;
}

template <class A>
__device__ inline A warp_sum(A x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

template <class A>
__device__ inline A warp_max(A x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x = larger(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

// The block is one-dimensional with exactly kThreads threads.
template <int kThreads, class A>
__device__ inline A block_sum(A x) {
  static_assert(kThreads % kWarp == 0, "whole warps");
  __shared__ A of_warp[kThreads / kWarp];
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) {
    of_warp[threadIdx.x / kWarp] = x;
  }
  __syncthreads();  // of_warp readable
  A sum = of_warp[0];
  for (int warp = 1; warp < kThreads / kWarp; ++warp) {
    sum += of_warp[warp];
  }
  __syncthreads();  // of_warp free again
  return sum;
}

template <int kThreads, class A>
__device__ inline A block_max(A x) {
  static_assert(kThreads % kWarp == 0, "whole warps");
  __shared__ A of_warp[kThreads / kWarp];
  x = warp_max(x);
  if (threadIdx.x % kWarp == 0) {
    of_warp[threadIdx.x / kWarp] = x;
  }
  __syncthreads();  // of_warp readable
  A greatest = of_warp[0];
  for (int warp = 1; warp < kThreads / kWarp; ++warp) {
    greatest = larger(greatest, of_warp[warp]);
  }
  __syncthreads();  // of_warp free again
  return greatest;
}
