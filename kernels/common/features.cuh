// features.cuh: a feature vector spread over a warp; lane l holds features l, l + 32, l + 64, ...
#pragma once
#include "common/params.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

template <class T, int kChunks>
struct Features {
  using A = Accumulator<T>;
  A x[kChunks];

  __device__ void clear() {
    for (int c = 0; c < kChunks; ++c) {
      x[c] = A(0);
    }
  }

  __device__ void load(const T* row, int dim, int lane) {
    for (int c = 0; c < kChunks; ++c) {
      const int i = lane + 32 * c;
      x[c] = i < dim ? A(widen(row[i])) : A(0);
    }
  }

  __device__ void store(T* row, int dim, int lane, A factor) const {
    for (int c = 0; c < kChunks; ++c) {
      const int i = lane + 32 * c;
      if (i < dim) {
        row[i] = narrow<T>(x[c] * factor);
      }
    }
  }

  __device__ void scale(A factor) {
    for (int c = 0; c < kChunks; ++c) {
      x[c] *= factor;
    }
  }

  // this += factor * other
  __device__ void add(A factor, const Features& other) {
    for (int c = 0; c < kChunks; ++c) {
      x[c] += factor * other.x[c];
    }
  }

  // The inner product, in every lane.
  __device__ A dot(const Features& other) const {
    A sum = A(0);
    for (int c = 0; c < kChunks; ++c) {
      sum += x[c] * other.x[c];
    }
    return warp_sum(sum);
  }
};
