// types.cuh: the element types and their conversions. No toolkit header is needed, so a mixture
// of header versions cannot happen.
#pragma once

struct f16 {
  unsigned short bits;
};
struct bf16 {
  unsigned short bits;
};

// The type in which sums are kept.
template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

__device__ inline float widen(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ inline float widen(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }

// Round to nearest even.
template <class T>
__device__ inline T narrow(Accumulator<T> x) {
  return x;
}
template <>
__device__ inline f16 narrow<f16>(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
__device__ inline bf16 narrow<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// Elementary functions by type: the accurate ones, never the fast intrinsics.
__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

// a * b + c with one rounding.
__device__ inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double multiply_add(double a, double b, double c) { return fma(a, b, c); }

template <class A>
__device__ inline A negative_infinity() {
  return A(__uint_as_float(0xff800000u));
}
