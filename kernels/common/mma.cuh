// mma.cuh: matrix units by warp: tiles from shared memory, products of 16-bit matrices. sm_80 on.
//
// Fragments, for lane = 4 * g + q; a register holds two neighbours, the first in its low half:
//   A (16 x 16)  a0: row g, columns 2q..   a1: row g + 8   a2: row g, 2q + 8..   a3: row g + 8, same
//   B (16 x 8)   b0: rows 2q.., column g   b1: rows 2q + 8..
//   C (16 x 8)   c0, c1: row g, columns 2q, 2q + 1         c2, c3: row g + 8
#pragma once

#include "common/types.cuh"

// Round two numbers, `low` into the low half.
template <class T>
__device__ inline unsigned pack(float low, float high);
template <>
__device__ inline unsigned pack<f16>(float low, float high) {
  unsigned y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
template <>
__device__ inline unsigned pack<bf16>(float low, float high) {
  unsigned y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// Both halves of a register as numbers.
template <class T>
__device__ inline void unpack(unsigned x, float& low, float& high) {
  low = widen(T{static_cast<unsigned short>(x)});
  high = widen(T{static_cast<unsigned short>(x >> 16)});
}

// The larger of each half; a NaN gives way to a number.
template <class T>
__device__ inline unsigned max_pair(unsigned x, unsigned y);
template <>
__device__ inline unsigned max_pair<f16>(unsigned x, unsigned y) {
  unsigned z;
  asm("max.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
template <>
__device__ inline unsigned max_pair<bf16>(unsigned x, unsigned y) {
  unsigned z;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// Low halves of x and y, and high halves.
__device__ inline unsigned low_halves(unsigned x, unsigned y) { return __byte_perm(x, y, 0x5410); }
__device__ inline unsigned high_halves(unsigned x, unsigned y) { return __byte_perm(x, y, 0x7632); }

__device__ inline unsigned shared_address(const void* x) {
  return static_cast<unsigned>(__cvta_generic_to_shared(x));
}

// Four 8 x 8 matrices, one per register. Lane l gives the 16-byte row l % 8 of matrix l / 8. A lane
// gets row g, columns 2q and 2q + 1; transposed, rows 2q and 2q + 1 of column g.
__device__ inline void load_matrices(unsigned (&x)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}
__device__ inline void load_matrices_transposed(unsigned (&x)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

// 16 bytes.
__device__ inline void load_shared(unsigned (&x)[4], unsigned address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

__device__ inline void store_shared(unsigned address, const unsigned (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// c += a b, with 16 terms per sum or with 8.
template <class T>
__device__ inline void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                unsigned b0, unsigned b1);
template <>
__device__ inline void multiply<f16>(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                     unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply<bf16>(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                      unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <class T>
__device__ inline void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned b0);
template <>
__device__ inline void multiply<f16>(float (&c)[4], unsigned a0, unsigned a1, unsigned b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
template <>
__device__ inline void multiply<bf16>(float (&c)[4], unsigned a0, unsigned a1, unsigned b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

// Exchange words in the four lanes of one g: lane q's word t becomes lane t's word q.
__device__ inline void transpose_quad(unsigned (&w)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int n = 0; n < 4; n += 2) {
    const unsigned got = __shfl_xor_sync(0xffffffffu, odd ? w[n] : w[n + 1], 1);
    (odd ? w[n] : w[n + 1]) = got;
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const unsigned got = __shfl_xor_sync(0xffffffffu, high ? w[n] : w[n + 2], 2);
    (high ? w[n] : w[n + 2]) = got;
  }
}
