// multi_token_strip.cuh: rows of scores and their statistics, read 16 bytes at a time.
#pragma once
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr float kLog2e = 1.44269504f;

// kCount neighbours in memory, moved by one access; the address is a multiple of their size.
template <class T, int kCount>
struct Pack {
  static constexpr int kBytes = int(sizeof(T)) * kCount;
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16, "one access");
  unsigned word[kWords];

  // Read through the cache for data that nobody writes meanwhile.
  __device__ void load(const T* from) {
    if constexpr (kBytes == 16) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
      word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    } else if constexpr (kBytes == 8) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
      word[0] = v.x, word[1] = v.y;
    } else if constexpr (kBytes == 4) {
      word[0] = __ldg(reinterpret_cast<const unsigned*>(from));
    } else {
      word[0] = __ldg(reinterpret_cast<const unsigned short*>(from));
    }
  }

  // Write what this kernel does not read again; the cache is for the scores.
  __device__ void stream(T* to) const {
    if constexpr (kBytes == 16) {
      __stcs(reinterpret_cast<uint4*>(to), uint4{word[0], word[1], word[2], word[3]});
    } else if constexpr (kBytes == 8) {
      __stcs(reinterpret_cast<uint2*>(to), uint2{word[0], word[1]});
    } else {
      store(to);
    }
  }

  __device__ void store(T* to) const {
    if constexpr (kBytes == 16) {
      *reinterpret_cast<uint4*>(to) = uint4{word[0], word[1], word[2], word[3]};
    } else if constexpr (kBytes == 8) {
      *reinterpret_cast<uint2*>(to) = uint2{word[0], word[1]};
    } else if constexpr (kBytes == 4) {
      *reinterpret_cast<unsigned*>(to) = word[0];
    } else {
      *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(word[0]);
    }
  }

  __device__ void fill(float value) {
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        word[i] = __float_as_uint(value);
      } else {
        word[i] = narrow<T>(value).bits * 0x10001u;
      }
    }
  }

  // Elements k, k + 1, ... become those of a smaller pack; k is a multiple of its size.
  template <int kSmaller>
  __device__ void put(int k, const Pack<T, kSmaller>& from) {
    if constexpr (kSmaller * sizeof(T) == 2) {
      const unsigned shift = k % 2 * 16;
      word[k / 2] = (word[k / 2] & ~(0xffffu << shift)) | (from.word[0] & 0xffffu) << shift;
    } else {
      for (int w = 0; w < Pack<T, kSmaller>::kWords; ++w) {
        word[k * int(sizeof(T)) / 4 + w] = from.word[w];
      }
    }
  }

  __device__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word[i]);
    } else {
      return widen(T{static_cast<unsigned short>(i % 2 ? word[i / 2] >> 16 : word[i / 2])});
    }
  }
};

// exp(x) for x <= 0. The error of 2^(x log2 e) grows with x, since the product is rounded: below the
// rounding of 16-bit weights, but float32 needs the accurate one.
template <class T>
__device__ inline float weight_exponential(float x) {
  return sizeof(T) == 4 ? exponential(x) : exp2f(x * kLog2e);
}

// Largest number so far and sum of exp(x - largest): the statistics of a softmax in one reading.
// A NaN, or an infinite largest number, makes the sum NaN; -inf alone leaves largest = -inf.
struct RunningSoftmax {
  float largest = negative_infinity<float>();
  float sum = 0;

  // Before anything finite has come, exponentials are taken against 0: all are 0.
  __device__ static float anchor(float x) { return x == negative_infinity<float>() ? 0.0f : x; }

  template <class T, int kCount>
  __device__ void add(const Pack<T, kCount>& x) {
    const float before = largest;
    for (int i = 0; i < kCount; ++i) {
      largest = fmaxf(largest, x[i]);
    }
    const float shift = anchor(largest);
    sum *= weight_exponential<T>(before - shift);
    for (int i = 0; i < kCount; ++i) {
      sum += weight_exponential<T>(x[i] - shift);
    }
  }

  // Put the lanes of a warp together; every lane gets the result.
  __device__ void reduce() {
    const float before = largest;
    largest = warp_max(largest);
    sum = warp_sum(sum * exponential(before - anchor(largest)));
    if (largest == negative_infinity<float>()) {
      sum = 0 * largest;  // NaN
    }
  }
};

// The first `count` scores of a row, in packs of 16 bytes by their keys. Which lane sums which keys
// does not depend on where the row lies, so neither do the bits of its statistics; kVector elements,
// of which rows and strides are multiples, are read at a time.
template <class T, int kVector>
struct RowPiece {
  static constexpr int kCount = 16 / int(sizeof(T));
  const T* start;
  int count, packs;

  __device__ RowPiece(const T* from, int count)
      : start(from), count(count), packs((count + kCount - 1) / kCount) {}

  // Keys [i * kCount, (i + 1) * kCount); -inf from `count` on.
  __device__ Pack<T, kCount> pack(int i) const {
    Pack<T, kCount> x;
    x.fill(negative_infinity<float>());
    const int first = i * kCount;
    if (first + kCount <= count) {
#pragma unroll
      for (int k = 0; k < kCount; k += kVector) {
        Pack<T, kVector> v;
        v.load(start + first + k);
        x.put(k, v);
      }
    } else if (first < count) {
      for (int k = 0; k < kCount; ++k) {
        if (first + k < count) {
          Pack<T, 1> v;
          v.load(start + first + k);
          x.put(k, v);
        }
      }
    }
    return x;
  }
};
