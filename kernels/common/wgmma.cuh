// wgmma.cuh: matrix units by warpgroup (sm_90a): products of 64 rows, B in shared memory.
//
// An operand in shared memory is a descriptor of a tile as a tensor map with 128-byte swizzle writes it:
//   depth inside    [rows][128 bytes of depth];  the next 32 bytes of depth: descriptor + 2
//   rows inside     [64 rows of each atom][depth][128 bytes of rows], 16-bit only;  the next 16 of
//                   depth: descriptor + 128
// or with 64-byte swizzle, with 64 bytes instead of 128, 32 rows instead of 64.
// A may come from registers. For lane 4 g + q of warp w, a0 is row 16 w + g, depth 2 q and 2 q + 1; a1
// is row + 8; a2 and a3 are depth + 8. Accumulator d[r] is row 16 w + g + 8 (r / 2 % 2), column
// 8 (r / 4) + 2 q + r % 2.
//
// From `warpgroup_arrive` to the `warpgroup_wait` that ends a product nothing may touch its
// registers; `hold` keeps the compiler from moving them.
#pragma once

#include "common/types.cuh"

// `atom`: bytes from one atom of rows to the next, where rows are inside. kSwizzle: 128 or 64 bytes.
template <int kSwizzle = 128>
__device__ inline unsigned long long tile_descriptor(unsigned address, unsigned atom) {
  return (unsigned long long)(address & 0x3ffffu) >> 4 | (unsigned long long)(atom >> 4) << 16 |
         (unsigned long long)(kSwizzle / 2) << 32 | (kSwizzle == 128 ? 1ull : 2ull) << 62;
}

__device__ inline void warpgroup_arrive() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <int kCount>
__device__ inline void hold(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(d[i])::"memory");
  }
}

// The accumulator of an instruction, 64 x N: operands 0 to N / 2 - 1.
#define CUPYATTN_D16 "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define CUPYATTN_D32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define CUPYATTN_D48 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23}"
#define CUPYATTN_D64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define CUPYATTN_D128 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63}"
#define CUPYATTN_D80 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
  "%38, %39}"
#define CUPYATTN_D96 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47}"
#define CUPYATTN_D112 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55}"
#define CUPYATTN_D144 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71}"
#define CUPYATTN_D160 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, " \
  "%74, %75, %76, %77, %78, %79}"
#define CUPYATTN_D176 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, " \
  "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87}"
#define CUPYATTN_D192 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, " \
  "%39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, " \
  "%58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, " \
  "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}"
#define CUPYATTN_D256 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, " \
  "%39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, " \
  "%58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, " \
  "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127}"
#define CUPYATTN_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CUPYATTN_16(d, i) \
  CUPYATTN_4(d, i), CUPYATTN_4(d, i + 4), CUPYATTN_4(d, i + 8), CUPYATTN_4(d, i + 12)
#define CUPYATTN_OUT16(d) CUPYATTN_4(d, 0), CUPYATTN_4(d, 4)
#define CUPYATTN_OUT32(d) CUPYATTN_16(d, 0)
#define CUPYATTN_OUT48(d) CUPYATTN_16(d, 0), CUPYATTN_4(d, 16), CUPYATTN_4(d, 20)
#define CUPYATTN_OUT64(d) CUPYATTN_16(d, 0), CUPYATTN_16(d, 16)
#define CUPYATTN_OUT128(d) CUPYATTN_OUT64(d), CUPYATTN_16(d, 32), CUPYATTN_16(d, 48)
#define CUPYATTN_OUT80(d) CUPYATTN_OUT64(d), CUPYATTN_4(d, 32), CUPYATTN_4(d, 36)
#define CUPYATTN_OUT96(d) \
  CUPYATTN_16(d, 0), CUPYATTN_16(d, 16), CUPYATTN_16(d, 32)
#define CUPYATTN_OUT112(d) \
  CUPYATTN_16(d, 0), CUPYATTN_16(d, 16), CUPYATTN_16(d, 32), CUPYATTN_4(d, 48), \
  CUPYATTN_4(d, 52)
#define CUPYATTN_OUT144(d) \
  CUPYATTN_16(d, 0), CUPYATTN_16(d, 16), CUPYATTN_16(d, 32), CUPYATTN_16(d, 48), \
  CUPYATTN_4(d, 64), CUPYATTN_4(d, 68)
#define CUPYATTN_OUT160(d) \
  CUPYATTN_16(d, 0), CUPYATTN_16(d, 16), CUPYATTN_16(d, 32), CUPYATTN_16(d, 48), \
  CUPYATTN_16(d, 64)
#define CUPYATTN_OUT176(d) \
  CUPYATTN_16(d, 0), CUPYATTN_16(d, 16), CUPYATTN_16(d, 32), CUPYATTN_16(d, 48), \
  CUPYATTN_16(d, 64), CUPYATTN_4(d, 80), CUPYATTN_4(d, 84)
#define CUPYATTN_OUT192(d) \
  CUPYATTN_OUT128(d), CUPYATTN_16(d, 64), CUPYATTN_16(d, 80)
#define CUPYATTN_OUT256(d) CUPYATTN_OUT192(d), CUPYATTN_16(d, 96), CUPYATTN_16(d, 112)

// N: columns; A, B, ADD: the operands after the accumulator's.
#define CUPYATTN_SHARED(N, KIND, MAJORS, A, B, ADD, ...) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADD ", 0; " \
               "wgmma.mma_async.sync.aligned.m64n" #N KIND " " CUPYATTN_D##N ", " A ", " B \
               ", p, 1, 1" MAJORS "; }" \
               : CUPYATTN_OUT##N(d) : "l"(a), "l"(b), "r"(add) __VA_ARGS__)
#define CUPYATTN_REGISTERS(N, KIND, A, B, ADD, ROWS) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADD ", 0; " \
               "wgmma.mma_async.sync.aligned.m64n" #N KIND " " CUPYATTN_D##N ", " A ", " B \
               ", p, 1, 1" ROWS "; }" \
               : CUPYATTN_OUT##N(d) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define CUPYATTN_COMMA ,

template <class T>
constexpr bool kIsBfloat = false;
template <>
constexpr bool kIsBfloat<bf16> = true;

// d (+)= a b^T, 64 x 128, over 32 bytes of depth; `add` 0 starts a sum. kRowsA, kRowsB: whether rows
// are inside. float means TF32.
template <class T, int kRowsA, int kRowsB>
__device__ inline void multiply(float (&d)[64], unsigned long long a, unsigned long long b,
                                int add) {
  if constexpr (sizeof(T) == 4) {
    static_assert(kRowsA + kRowsB == 0, "TF32 operands have depth inside");
    CUPYATTN_SHARED(128, "k8.f32.tf32.tf32", "", "%64", "%65", "%66");
  } else if constexpr (kIsBfloat<T>) {
    CUPYATTN_SHARED(128, "k16.f32.bf16.bf16", ", %67, %68", "%64", "%65", "%66",
                    CUPYATTN_COMMA "n"(kRowsA) CUPYATTN_COMMA "n"(kRowsB));
  } else {
    CUPYATTN_SHARED(128, "k16.f32.f16.f16", ", %67, %68", "%64", "%65", "%66",
                    CUPYATTN_COMMA "n"(kRowsA) CUPYATTN_COMMA "n"(kRowsB));
  }
}
// bf16, a from registers, depth inside; 64 x 128 or 64 x 64.
__device__ inline void multiply(float (&d)[64], const unsigned (&a)[4], unsigned long long b,
                                int add) {
  CUPYATTN_REGISTERS(128, "k16.f32.bf16.bf16", "{%64, %65, %66, %67}", "%68", "%69", ", 0");
}
__device__ inline void multiply(float (&d)[32], const unsigned (&a)[4], unsigned long long b,
                                int add) {
  CUPYATTN_REGISTERS(64, "k16.f32.bf16.bf16", "{%32, %33, %34, %35}", "%36", "%37", ", 0");
}
// a from registers, rows of b inside (columns of the product are neighbours in memory); 64 x 32, 64,
// 96, 128, 192 or 256.
#define CUPYATTN_ROWS(N, A, B, ADD) \
  if constexpr (kIsBfloat<T>) { \
    CUPYATTN_REGISTERS(N, "k16.f32.bf16.bf16", A, B, ADD, ", 1"); \
  } else { \
    CUPYATTN_REGISTERS(N, "k16.f32.f16.f16", A, B, ADD, ", 1"); \
  }
template <class T, int kCount>
__device__ inline void multiply_rows(float (&d)[kCount], const unsigned (&a)[4],
                                     unsigned long long b, int add) {
  if constexpr (kCount == 16) {
    CUPYATTN_ROWS(32, "{%16, %17, %18, %19}", "%20", "%21");
  } else if constexpr (kCount == 32) {
    CUPYATTN_ROWS(64, "{%32, %33, %34, %35}", "%36", "%37");
  } else if constexpr (kCount == 48) {
    CUPYATTN_ROWS(96, "{%48, %49, %50, %51}", "%52", "%53");
  } else if constexpr (kCount == 64) {
    CUPYATTN_ROWS(128, "{%64, %65, %66, %67}", "%68", "%69");
  } else if constexpr (kCount == 96) {
    CUPYATTN_ROWS(192, "{%96, %97, %98, %99}", "%100", "%101");
  } else {
    static_assert(kCount == 128, "columns");
    CUPYATTN_ROWS(256, "{%128, %129, %130, %131}", "%132", "%133");
  }
}
// 64 x 32, 48, 64, 80, 96, 112, 128, 144, 160 or 176, both from shared memory, depth inside, 16-bit.
template <class T>
__device__ inline void multiply_keys(float (&d)[16], unsigned long long a, unsigned long long b,
                                     int add) {
  if constexpr (kIsBfloat<T>) {
    CUPYATTN_SHARED(32, "k16.f32.bf16.bf16", ", 0, 0", "%16", "%17", "%18");
  } else {
    CUPYATTN_SHARED(32, "k16.f32.f16.f16", ", 0, 0", "%16", "%17", "%18");
  }
}
template <class T>
__device__ inline void multiply_keys(float (&d)[24], unsigned long long a, unsigned long long b,
                                     int add) {
  if constexpr (kIsBfloat<T>) {
    CUPYATTN_SHARED(48, "k16.f32.bf16.bf16", ", 0, 0", "%24", "%25", "%26");
  } else {
    CUPYATTN_SHARED(48, "k16.f32.f16.f16", ", 0, 0", "%24", "%25", "%26");
  }
}
template <class T>
__device__ inline void multiply_keys(float (&d)[32], unsigned long long a, unsigned long long b,
                                     int add) {
  if constexpr (kIsBfloat<T>) {
    CUPYATTN_SHARED(64, "k16.f32.bf16.bf16", ", 0, 0", "%32", "%33", "%34");
  } else {
    CUPYATTN_SHARED(64, "k16.f32.f16.f16", ", 0, 0", "%32", "%33", "%34");
  }
}
template <class T>
__device__ inline void multiply_keys(float (&d)[40], unsigned long long a, unsigned long long b,
                                     int add) {
  if constexpr (kIsBfloat<T>) {
    CUPYATTN_SHARED(80, "k16.f32.bf16.bf16", ", 0, 0", "%40", "%41", "%42");
  } else {
    CUPYATTN_SHARED(80, "k16.f32.f16.f16", ", 0, 0", "%40", "%41", "%42");
  }
}
template <class T>
__device__ inline void multiply_keys(float (&d)[48], unsigned long long a, unsigned long long b,
                                     int add) {
  if constexpr (kIsBfloat<T>) {
    CUPYATTN_SHARED(96, "k16.f32.bf16.bf16", ", 0, 0", "%48", "%49", "%50");
  } else {
    CUPYATTN_SHARED(96, "k16.f32.f16.f16", ", 0, 0", "%48", "%49", "%50");
  }
}
template <class T>
__device__ inline void multiply_keys(float (&d)[56], unsigned long long a, unsigned long long b,
                                     int add) {
  if constexpr (kIsBfloat<T>) {
    CUPYATTN_SHARED(112, "k16.f32.bf16.bf16", ", 0, 0", "%56", "%57", "%58");
  } else {
    CUPYATTN_SHARED(112, "k16.f32.f16.f16", ", 0, 0", "%56", "%57", "%58");
  }
}
template <class T>
__device__ inline void multiply_keys(float (&d)[72], unsigned long long a, unsigned long long b,
                                     int add) {
  if constexpr (kIsBfloat<T>) {
    CUPYATTN_SHARED(144, "k16.f32.bf16.bf16", ", 0, 0", "%72", "%73", "%74");
  } else {
    CUPYATTN_SHARED(144, "k16.f32.f16.f16", ", 0, 0", "%72", "%73", "%74");
  }
}
template <class T>
__device__ inline void multiply_keys(float (&d)[80], unsigned long long a, unsigned long long b,
                                     int add) {
  if constexpr (kIsBfloat<T>) {
    CUPYATTN_SHARED(160, "k16.f32.bf16.bf16", ", 0, 0", "%80", "%81", "%82");
  } else {
    CUPYATTN_SHARED(160, "k16.f32.f16.f16", ", 0, 0", "%80", "%81", "%82");
  }
}
template <class T>
__device__ inline void multiply_keys(float (&d)[88], unsigned long long a, unsigned long long b,
                                     int add) {
  if constexpr (kIsBfloat<T>) {
    CUPYATTN_SHARED(176, "k16.f32.bf16.bf16", ", 0, 0", "%88", "%89", "%90");
  } else {
    CUPYATTN_SHARED(176, "k16.f32.f16.f16", ", 0, 0", "%88", "%89", "%90");
  }
}
template <class T>
__device__ inline void multiply_keys(float (&d)[64], unsigned long long a, unsigned long long b,
                                     int add) {
  multiply<T, 0, 0>(d, a, b, add);
}
// a from registers, depth inside: 64 x 16, 32, 48, 64, 80, 96, 112 or 128. float means TF32, for
// which a0 to a3 hold depth q of row g, of row g + 8, and depth q + 4 of both.
#define CUPYATTN_LINES(N, A, B, ADD) \
  if constexpr (sizeof(T) == 4) { \
    CUPYATTN_REGISTERS(N, "k8.f32.tf32.tf32", A, B, ADD, ""); \
  } else if constexpr (kIsBfloat<T>) { \
    CUPYATTN_REGISTERS(N, "k16.f32.bf16.bf16", A, B, ADD, ", 0"); \
  } else { \
    CUPYATTN_REGISTERS(N, "k16.f32.f16.f16", A, B, ADD, ", 0"); \
  }
template <class T, int kCount>
__device__ inline void multiply_lines(float (&d)[kCount], const unsigned (&a)[4],
                                      unsigned long long b, int add) {
  if constexpr (kCount == 8) {
    CUPYATTN_LINES(16, "{%8, %9, %10, %11}", "%12", "%13");
  } else if constexpr (kCount == 16) {
    CUPYATTN_LINES(32, "{%16, %17, %18, %19}", "%20", "%21");
  } else if constexpr (kCount == 24) {
    CUPYATTN_LINES(48, "{%24, %25, %26, %27}", "%28", "%29");
  } else if constexpr (kCount == 32) {
    CUPYATTN_LINES(64, "{%32, %33, %34, %35}", "%36", "%37");
  } else if constexpr (kCount == 40) {
    CUPYATTN_LINES(80, "{%40, %41, %42, %43}", "%44", "%45");
  } else if constexpr (kCount == 48) {
    CUPYATTN_LINES(96, "{%48, %49, %50, %51}", "%52", "%53");
  } else if constexpr (kCount == 56) {
    CUPYATTN_LINES(112, "{%56, %57, %58, %59}", "%60", "%61");
  } else {
    static_assert(kCount == 64, "columns");
    CUPYATTN_LINES(128, "{%64, %65, %66, %67}", "%68", "%69");
  }
}
