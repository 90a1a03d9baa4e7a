// vector.cuh: 16-byte accesses to global memory, the widest that a thread has.
#pragma once
#include "common/types.cuh"

// Sixteen bytes of elements, kept as words: 16-bit elements stay packed until they are used, so a
// thread can hold many vectors in few registers.
template <class T>
struct Vector {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "16- and 32-bit elements");
  static constexpr int kSize = 16 / sizeof(T);
  unsigned word[4];

  __device__ float get(int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word[i]);
    } else {
      const unsigned pair = word[i / 2];
      return widen_half(T{}, i % 2 ? pair >> 16 : pair & 0xffffu);
    }
  }

  // Elements i and i + 1, i even.
  __device__ void set(int i, float x, float y) {
    if constexpr (sizeof(T) == 4) {
      word[i] = __float_as_uint(x);
      word[i + 1] = __float_as_uint(y);
    } else {
      word[i / 2] = unsigned(narrow<T>(x).bits) | unsigned(narrow<T>(y).bits) << 16;
    }
  }

 private:
  __device__ static float widen_half(bf16, unsigned bits) { return __uint_as_float(bits << 16); }
  __device__ static float widen_half(f16, unsigned bits) {
    return widen(f16{static_cast<unsigned short>(bits)});
  }
};

// `from` is 16-byte aligned.
template <class T>
__device__ inline Vector<T> load_vector(const T* from) {
  const uint4 v = *reinterpret_cast<const uint4*>(from);
  return {{v.x, v.y, v.z, v.w}};
}

// `to` is 16-byte aligned.
template <class T>
__device__ inline void store_vector(T* to, const Vector<T>& v) {
  *reinterpret_cast<uint4*>(to) = uint4{v.word[0], v.word[1], v.word[2], v.word[3]};
}
