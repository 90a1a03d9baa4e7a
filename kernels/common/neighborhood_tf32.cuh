// neighborhood_tf32.cuh: a warp's products of 16 rows of float32 with rows of the other side, on
// matrix units. sm_80 on.
//
//   kTf32      one TF32 product; what is in shared memory has been rounded (`Stream::round`)
//   otherwise  three of x = high + low: low high + high low + high high. High parts are rounded to
//              nearest, so that low ones have either sign and what is left out, low low and the
//              end of low that the unit drops, has no bias: below 2^-21 of a product.
//
// Matrix units truncate when they add. So small products have sums of their own or come first, and
// large ones join a total by ordinary additions every 32 features, or every 16 rows.
//
// Fragments (planes.cuh) are made of whole 16-byte parts. Features are the terms of `dot_rows`:
// as in 16 bits, for a part of 4 of them is what `load_matrices` moves. In `add_rows` the terms are
// rows, of which a lane has 2q and 2q + 1, as sums have them; column g of the four products of 32
// features is feature 4g, 4g + 1, 4g + 2, 4g + 3, so that a lane loads 16 bytes. It then has, of
// rows g and g + 8, features 8q to 8q + 7: e = 0, 1 of y[4 i + n] is feature 32 i + 8 q + 4 e + n.
#pragma once
#include "common/neighborhood_box.cuh"
#include "common/planes.cuh"

// x = high + low. The unit drops the end of low. A NaN may be lost from high, but never from low.
__device__ inline void split_tf32(unsigned x, unsigned& high, unsigned& low) {
  high = (x + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
}

// s = own rows times rows, from s = 0; `own` and `rows` are the lane's places of factors from the
// left and the right. kFirst: own low parts come first; with rows exchanged, and kFirst, too, bits
// are the same.
template <class Config, int kUnits, bool kFirst>
__device__ void dot_rows(float (&s)[2 * kUnits][4], unsigned own, unsigned rows) {
  using Map = Tile<Config>;
  if constexpr (Config::kTf32) {
#pragma unroll
    for (int i = 0; i < Map::kParts / 2; ++i) {
      unsigned a[4];
      load_matrices(a, Map::further(own, i));
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        unsigned b[4];
        load_matrices(b, Map::further(rows, i) + u * 16 * Map::kRowBytes);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          multiply_tf32(s[2 * u + n], a[0], a[1], a[2], a[3], b[2 * n], b[2 * n + 1]);
        }
      }
    }
  } else {
    float small[2 * kUnits][4] = {};
#pragma unroll
    for (int first = 0; first < Map::kParts / 2; first += 4) {
      float further[2 * kUnits][4] = {};
      float(&large)[2 * kUnits][4] = first == 0 ? s : further;
#pragma unroll
      for (int i = first; i < first + 4; ++i) {
        unsigned x[4], a[4], a_low[4];
        load_matrices(x, Map::further(own, i));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          split_tf32(x[j], a[j], a_low[j]);
        }
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          unsigned b[4], b_low[4];
          load_matrices(x, Map::further(rows, i) + u * 16 * Map::kRowBytes);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            split_tf32(x[j], b[j], b_low[j]);
          }
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            float(&sum)[4] = small[2 * u + n];
            if constexpr (kFirst) {
              multiply_tf32(sum, a_low[0], a_low[1], a_low[2], a_low[3], b[2 * n], b[2 * n + 1]);
            }
            multiply_tf32(sum, a[0], a[1], a[2], a[3], b_low[2 * n], b_low[2 * n + 1]);
            if constexpr (!kFirst) {
              multiply_tf32(sum, a_low[0], a_low[1], a_low[2], a_low[3], b[2 * n], b[2 * n + 1]);
            }
            multiply_tf32(large[2 * u + n], a[0], a[1], a[2], a[3], b[2 * n], b[2 * n + 1]);
          }
        }
      }
#pragma unroll
      for (int t = 0; t < 2 * kUnits; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[t][e] = first == 0 ? s[t][e] : s[t][e] + further[t][e];
        }
      }
    }
#pragma unroll
    for (int t = 0; t < 2 * kUnits; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[t][e] += small[t][e];
      }
    }
  }
}

// y += x times kUnits * 16 rows, where x is as sums are.
template <class Config, int kUnits>
__device__ void add_rows(float (&y)[Config::kDim / 8][4], const float (&x)[2 * kUnits][4],
                         unsigned rows) {
  using Map = Tile<Config>;
  const int lane = threadIdx.x % 32;
  const unsigned even = rows + Map::place(lane % 4 * 2, lane / 4);
  const unsigned odd = rows + Map::place(lane % 4 * 2 + 1, lane / 4);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    unsigned a[2][4], a_low[2][4];  // of 8 rows each
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float one = x[2 * u + t][j % 2 * 2 + j / 2];
        if constexpr (Config::kTf32) {
          a[t][j] = round_tf32(one);
        } else {
          split_tf32(__float_as_uint(one), a[t][j], a_low[t][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Map::kDim / 32; ++i) {
      unsigned b[2][2][4];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int further = (u * 16 + t * 8) * Map::kRowBytes + i * 128;
        load_shared(b[t][0], even + further);
        load_shared(b[t][1], odd + further);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float(&sum)[4] = y[4 * i + n];
        if constexpr (Config::kTf32) {
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            multiply_tf32(sum, a[t][0], a[t][1], a[t][2], a[t][3], b[t][0][n], b[t][1][n]);
          }
        } else {
          float part[4] = {};
          unsigned high[2][2], low[2][2];
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            split_tf32(b[t][0][n], high[t][0], low[t][0]);
            split_tf32(b[t][1][n], high[t][1], low[t][1]);
            multiply_tf32(part, a_low[t][0], a_low[t][1], a_low[t][2], a_low[t][3], high[t][0],
                          high[t][1]);
            multiply_tf32(part, a[t][0], a[t][1], a[t][2], a[t][3], low[t][0], low[t][1]);
          }
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            multiply_tf32(part, a[t][0], a[t][1], a[t][2], a[t][3], high[t][0], high[t][1]);
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            sum[e] += part[e];
          }
        }
      }
    }
  }
}
