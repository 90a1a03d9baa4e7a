// linear.cuh: numbers of a float32 product by ordinary arithmetic, where matrix units cannot tell.
#pragma once

#include "common/params.cuh"

__device__ inline bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

// One number of c[s], without bias.
__device__ inline float one_number(const LinearHopperParams& p, int s, int64 row, int64 column) {
  float sum = 0;
  for (int term = s; term < (p.summed ? p.products : s + 1); ++term) {
    const float* a = static_cast<const float*>(p.a[term].data) + row * p.a[term].row;
    const float* b = static_cast<const float*>(p.b[term].data) + column * p.b[term].row;
#pragma unroll 4
    for (int k = 0; k < p.depth[term]; ++k) {
      sum = fmaf(a[k * p.a[term].column], b[k * p.b[term].column], sum);
    }
  }
  return sum;
}
