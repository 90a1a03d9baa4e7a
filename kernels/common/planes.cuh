// planes.cuh: float32 numbers as operands of matrix units. sm_80 on.
//
// A float32 number is the exact sum of three bf16 numbers ("planes") of its sign: its upper 8
// significant bits, the next 8, the rest. Planes are cut off and not rounded: so no finite number
// becomes infinite, and no two planes of one number have opposite signs, which would turn an
// overflow into inf - inf. Of the nine products of planes of two numbers the six largest are kept;
// what is left out is below 2^-21 of the product.
//
// An infinite number has NaN planes: products with it are NaN where IEEE arithmetic may have inf.
// `sort_pair` is for telling which: it keeps of each number what decides.
#pragma once
#include "common/types.cuh"
#include "common/mma.cuh"

// Planes of x and y, as pairs with x in the low half.
__device__ inline void split_pair(float x, float y, unsigned (&plane)[3]) {
#pragma unroll
  for (int n = 0; n < 3; ++n) {
    const unsigned u = __float_as_uint(x), v = __float_as_uint(y);
    plane[n] = high_halves(u, v);
    x -= __uint_as_float(u & 0xffff0000u);
    y -= __uint_as_float(v & 0xffff0000u);
  }
}

// 1 or -1 for a finite number, 0, inf, -inf or NaN for itself, in bf16. A sum of products of these
// is inf, -inf or NaN exactly where the sum of the numbers' products has that from an operand.
__device__ inline unsigned sort_bits(float x) {
  const unsigned u = __float_as_uint(x) & 0x7fffffffu, sign = __float_as_uint(x) >> 16 & 0x8000u;
  const unsigned one = 0x3f80u, infinity = 0x7f80u, nan = 0x7fc0u;
  return sign | (u == 0 ? 0 : u < 0x7f800000u ? one : u == 0x7f800000u ? infinity : nan);
}
__device__ inline unsigned sort_pair(float x, float y) { return sort_bits(x) | sort_bits(y) << 16; }

// Round to the nearest TF32 number.
__device__ inline unsigned round_tf32(float x) {
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// c += a b with 8 TF32 terms per sum, for lane = 4 * g + q:
//   A (16 x 8)  a0: row g, column q   a1: row g + 8   a2: row g, column q + 4   a3: row g + 8, same
//   B (8 x 8)   b0: row q, column g   b1: row q + 4
//   C           as in mma.cuh
__device__ inline void multiply_tf32(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                     unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
