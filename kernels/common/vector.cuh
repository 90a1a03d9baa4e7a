// vector.cuh: 16-byte accesses to global memory, the widest that a thread has.
#pragma once
#include "common/types.cuh"

template <class T>
struct Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T x[kSize];
};

// `from` is 16-byte aligned.
template <class T>
__device__ inline Vector<T> load_vector(const T* from) {
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  return __builtin_bit_cast(Vector<T>, bits);
}

// `to` is 16-byte aligned.
template <class T>
__device__ inline void store_vector(T* to, const Vector<T>& v) {
  *reinterpret_cast<uint4*>(to) = __builtin_bit_cast(uint4, v);
}
