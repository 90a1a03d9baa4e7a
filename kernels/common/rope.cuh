// rope.cuh: which table row a token reads, and the rotation of a pair.
#pragma once
#include "common/params.cuh"
#include "common/types.cuh"

// Rotate (a, b) in place. The contraction is spelled out: every kernel gives the same bits.
template <class A>
__device__ inline void rotate_pair(A& a, A& b, A c, A s) {
  const A first = multiply_add(a, c, -(b * s));
  b = multiply_add(b, c, a * s);
  a = first;
}

// The table row of a token; it may lie outside the table.
__device__ inline int64 table_row(const RopeParams& p, int64 item, int64 token) {
  int64 position = token;
  if (p.position_ids) {
    int64 at = item * p.position_stride[0] + token * p.position_stride[1];
    position = p.wide_positions ? static_cast<const int64*>(p.position_ids)[at]
                                : static_cast<const int*>(p.position_ids)[at];
  }
  return position + (p.offsets ? static_cast<const int64*>(p.offsets)[item] : p.offset);
}
