// multi_token_strip_bwd.cu: multi-token attention with softmax, backward, a block per strip of rows.
//
//   G[o, c, u, v](i) = sum_j P[c, i, j] * dy[o, i - u * d0 + r0, j - v * d1 + c0]
//   d_weight = sum of G over batch and i;   mean(c, i) = sum_{o, u, v} weight[o, c, u, v] * G(i)
//   dP[c, i, j] = sum_{o, u, v} weight[o, c, u, v] * dy[o, i - u * d0 + r0, j - v * d1 + c0]
//   d_scores = P * (dP - mean);   d_bias[o] = sum_{batch, i, j} dy[o, i, j];   j <= i throughout
//
// So the row's mean comes out of the sums that d_weight needs, and dP is computed once and never
// kept: a first sweep over the keys gives G, a second one d_scores.
//
// Shapes    scores, dy, weight: any strides (kVector: unit key stride, rows 16-byte aligned);
//           d_scores: contiguous;  partial (elements of d_weight then d_bias, chunks), float
// Passes    multi_token_strip_bwd, then multi_token_d_weight of multi_token_bwd.cu sums the chunks
// Grid      one block per (strip, item, group), the longest rows first; a (strip, item) is a chunk
// Block     kThreads threads; a strip is kRows = 16 / kIn rows, d0 apart, of kIn heads: the 16 rows
//           m = r * kIn + c of a matrix product
// Tile      dy of the kSpan = kRows + kKh - 1 rows that the strip's taps reach, kColumns keys and
//           their halo, masked: one record of (row s, head o) per key, so that s = r - u + kKh - 1
//
//             record of key j:  | o 0..3, s 0 | o 0..3, s 1 | ... |   8 numbers = a slice
//
// Products  first sweep    G'[m, (s, o)](v) = sum_j e[m, j] * tile[j - v * d1 + c0, (s, o)], where
//                          e = exp(score - largest so far); entries with a u in 0..kKh-1 are G
//           second sweep   dP[m, j] = sum_v W[m, (s, o)](v) * tile[j - v * d1 + c0, (s, o)]
//           A warp takes 32 keys. Lane (g, q) has rows g and g + 8, keys 8q..8q + 7, in both sweeps:
//           16 bytes of scores and of d_scores. Both sweeps load the same 16-byte rows of the tile:
//           matrix t has keys 8 * (n / 2) + 2 t + n % 2, n = 0..7
// Banks     a record is an odd number of 16 bytes and 8 records are padded by 32: the 8 rows of a
//           matrix lie in different banks
// Not finite  products with the zeros of W would spread a NaN of dy to rows that it does not reach.
//           Any such value makes a G' not finite: then the strip's dP and mean are computed tap by
//           tap, ten times slower
// Memory    scores and dy are read twice, mostly from L2 the second time, dy kSpan / kRows times;
//           d_scores is written once, what is above the diagonal at the start
// Accuracy  P is rounded to T for G, as the textbook does; P, dP and all sums are float elsewhere
// Limits    kIn, kOut divide 16; (kKw - 1) * d1 small enough for the tile; (kKh - 1) * d0 below 2^30,
//           the keys below 2^26, the blocks below 2^31; registers: kParts up to 20
// Config    T: f16 or bf16; kIn, kOut: heads of a group; kKh, kKw; kColumns: keys per tile, a
//           multiple of 32; kVector; kThreads
// Sources   as multi_token_fwd.cu; running maximum: Milakov and Gimelshein, 2018
#include "common/params.cuh"
#include "common/types.cuh"
#include "common/reduce.cuh"
#include "common/multi_token.cuh"
#include "common/mma.cuh"

extern __shared__ uint4 tile[];

// Sizes that follow from the configuration.
template <class Config>
struct Strip {
  static constexpr int kWarps = Config::kThreads / kWarp;
  static constexpr int kRows = 16 / Config::kIn;
  static constexpr int kSpan = kRows + Config::kKh - 1;
  static constexpr int kNumbers = kSpan * Config::kOut;        // used numbers of a record
  static constexpr int kSlices = (kNumbers + 7) / 8;
  static constexpr int kRecord = (kSlices | 1) * 16;           // bytes
  static constexpr int kBlock = 8 * kRecord + 32;              // bytes of 8 records
  static constexpr int kParts = Config::kKw * kSlices;         // slices times columns of taps
  static constexpr int kWeights = Config::kOut * Config::kIn * Config::kKh * Config::kKw;
  static_assert(16 % Config::kIn == 0 && Config::kColumns % 32 == 0, "whole matrices");
};

// Eight neighbouring keys of one row.
struct Eight {
  unsigned pair[4];
};

// The first `count` of eight entries that start at `first`, zeros for the others, which are not
// read one by one, and not at all where count <= 0.
template <bool kVector, class T>
__device__ inline Eight load_eight(const T* row, int64 stride, int first, int count) {
  Eight x = {{0, 0, 0, 0}};
  if (count <= 0) {
    return x;
  }
  if constexpr (kVector) {
    uint4 loaded = *reinterpret_cast<const uint4*>(row + first);
    x = {{loaded.x, loaded.y, loaded.z, loaded.w}};
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k < count) {
        x.pair[k / 2] |= unsigned(row[(first + k) * stride].bits) << (k % 2 * 16);
      }
    }
  }
  if (count < 8) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x.pair[k] = 2 * k >= count ? 0 : 2 * k + 1 == count ? x.pair[k] & 0xffffu : x.pair[k];
    }
  }
  return x;
}

template <bool kVector, class T>
__device__ inline void store_eight(T* row, int seq, int first, const Eight& x) {
  if constexpr (kVector) {
    if (first < seq) {
      *reinterpret_cast<uint4*>(row + first) = {x.pair[0], x.pair[1], x.pair[2], x.pair[3]};
    }
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (first + k < seq) {
        row[first + k].bits = static_cast<unsigned short>(x.pair[k / 2] >> (k % 2 * 16));
      }
    }
  }
}

__device__ inline float power_of_e(float x) { return exp2f(x * 1.44269504f); }

// One strip: where it is, and where a lane stands in it.
template <class Config>
struct Place {
  using T = typename Config::T;
  using S = Strip<Config>;
  int item;
  int group;
  int first_query;  // of row r = 0
  int width;        // keys that the last row sees
  int open;         // keys that all rows see; 0 unless all kRows rows exist
  int query[2];     // of the lane's rows, -1 where there is none

  // Of one item: d0 of them side by side, as often as it takes.
  __device__ static int strips(const MultiTokenParams& p) {
    int d0 = p.dilation[0];
    return (p.seq + S::kRows * d0 - 1) / (S::kRows * d0) * d0;
  }

  __device__ Place(const MultiTokenParams& p, int number) {
    int pairs = int(p.batch) * p.groups;
    item = number % pairs / p.groups;
    group = number % p.groups;
    int d0 = p.dilation[0];
    int strip = strips(p) - 1 - number / pairs;
    first_query = strip % d0 + strip / d0 * S::kRows * d0;
    int rows = first_query < p.seq ? (p.seq - 1 - first_query) / d0 + 1 : 0;
    rows = rows < S::kRows ? rows : S::kRows;
    open = rows == S::kRows ? first_query + 1 : 0;
    width = rows > 0 ? first_query + (rows - 1) * d0 + 1 : 0;
    for (int h = 0; h < 2; ++h) {
      int m = threadIdx.x % kWarp / 4 + 8 * h;
      query[h] = m / Config::kIn < rows ? first_query + m / Config::kIn * d0 : -1;
    }
  }
};

// Copy dy of the strip's rows, for `blocks` times eight keys from `first_key` on, into the tile.
template <class Config>
__device__ void fill_tile(const MultiTokenParams& p, const Place<Config>& at, int first_key,
                          int blocks) {
  using T = typename Config::T;
  using S = Strip<Config>;
  constexpr int kOut = Config::kOut;
  constexpr int kTogether = kOut % 4 == 0 ? 4 : kOut % 2 == 0 ? 2 : 1;  // heads of one store
  constexpr int kPieces = kOut / kTogether;
  const T* dy = row_start<T>(p.dy, p.dy_stride, at.item, int64(at.group) * kOut, 0);
  int first_row = at.first_query - (Config::kKh - 1) * p.dilation[0] + p.row_origin;
  if constexpr (S::kNumbers % 8 != 0) {
    // Unused numbers of a record meet zeros in the products: they must be finite.
    constexpr int kUnused = S::kSlices * 8 - S::kNumbers;
    for (int task = threadIdx.x; task < blocks * 8 * kUnused; task += Config::kThreads) {
      int record = task / kUnused;
      int number = S::kNumbers + task % kUnused;
      *reinterpret_cast<unsigned short*>(reinterpret_cast<char*>(tile) + record / 8 * S::kBlock +
                                         record % 8 * S::kRecord + number * 2) = 0;
    }
  }
  unsigned tasks = unsigned(blocks + 3) / 4 * 4 * S::kSpan * kPieces;
#pragma unroll 1  // the loads of one task are in flight together, and blocks overlap
  for (unsigned task = threadIdx.x; task < tasks; task += Config::kThreads) {
    // Four blocks of keys, then the rows: eight lanes store to different banks.
    int block = task % 4 + task / (4 * S::kSpan * kPieces) * 4;
    int s = task / 4 % S::kSpan;
    int o = task / (4 * S::kSpan) % kPieces * kTogether;
    if (block >= blocks) {
      continue;
    }
    int row = first_row + s * p.dilation[0];
    int key = first_key + block * 8;
    int count = row >= 0 && row < p.seq && key >= 0 ? row - key + 1 : 0;
    Eight x[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      x[k] = load_eight<Config::kVector>(dy + (o + k) * p.dy_stride[1] + row * p.dy_stride[2],
                                         p.dy_stride[3], key, count);
    }
    char* record = reinterpret_cast<char*>(tile) + block * S::kBlock + (s * kOut + o) * 2;
#pragma unroll
    for (int k = 0; k < 8; ++k, record += S::kRecord) {
      unsigned number[kTogether];
#pragma unroll
      for (int h = 0; h < kTogether; ++h) {
        number[h] = x[h].pair[k / 2] >> (k % 2 * 16) & 0xffffu;
      }
      if constexpr (kTogether == 4) {
        *reinterpret_cast<uint2*>(record) = {number[0] | number[1] << 16,
                                             number[2] | number[3] << 16};
      } else if constexpr (kTogether == 2) {
        *reinterpret_cast<unsigned*>(record) = number[0] | number[1] << 16;
      } else {
        *reinterpret_cast<unsigned short*>(record) = static_cast<unsigned short>(number[0]);
      }
    }
  }
}

// dP of the lane's rows and keys: sum[t] holds keys 8q + 2t and 8q + 2t + 1, of row g, of row g + 8.
template <class Config>
__device__ inline void weight_gradients(const unsigned (&weight)[2][Strip<Config>::kParts],
                                        const unsigned (&start)[Config::kKw], unsigned offset,
                                        float (&sum)[4][4]) {
  using T = typename Config::T;
  using S = Strip<Config>;
#pragma unroll
  for (int part = 0; part < S::kParts; part += 2) {
    unsigned b[2][4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (part + k < S::kParts) {
        load_matrices(b[k], start[(part + k) / S::kSlices] + offset +
                                (part + k) % S::kSlices * 16);
      }
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (part + 1 < S::kParts) {
        multiply<T>(sum[t], weight[0][part], weight[1][part], weight[0][part + 1],
                    weight[1][part + 1], b[0][t], b[1][t]);
      } else {
        multiply<T>(sum[t], weight[0][part], weight[1][part], b[0][t]);
      }
    }
  }
}

// The same without matrix units, for a tile with values that are not finite: they reach what their
// taps reach, and nothing else. Slow and small. `first_key` counts from the tile's start.
template <class Config>
__device__ inline void exact_weight_gradients(const MultiTokenParams& p,
                                              const typename Config::T* weights, int first_key,
                                              float (&sum)[4][4]) {
  using T = typename Config::T;
  using S = Strip<Config>;
  constexpr int kIn = Config::kIn, kOut = Config::kOut, kKh = Config::kKh, kKw = Config::kKw;
#pragma unroll 1
  for (int number = 0; number < 16; ++number) {
    int m = threadIdx.x % kWarp / 4 + number % 4 / 2 * 8;
    int key = first_key + threadIdx.x % 4 * 8 + number / 4 * 2 + number % 2 + p.column_origin;
    float y = 0;
#pragma unroll 1
    for (int tap = 0; tap < kOut * kKh * kKw; ++tap) {
      int v = tap % kKw;
      int u = tap / kKw % kKh;
      int o = tap / (kKw * kKh);
      int from = key - v * p.dilation[1];
      const char* record = reinterpret_cast<const char*>(tile) + from / 8 * S::kBlock +
                           from % 8 * S::kRecord;
      T dy = reinterpret_cast<const T*>(record)[(m / kIn - u + kKh - 1) * kOut + o];
      y += widen(weights[((o * kIn + m % kIn) * kKh + u) * kKw + v]) * widen(dy);
    }
#pragma unroll
    for (int k = 0; k < 16; ++k) {  // registers have no run-time index
      sum[k / 4][k % 4] = k == number ? y : sum[k / 4][k % 4];
    }
  }
}

template <class Config>
__device__ void strip_gradient(const MultiTokenParams& p, const Place<Config>& at,
                               const typename Config::T* weights) {
  using T = typename Config::T;
  using S = Strip<Config>;
  constexpr int kIn = Config::kIn, kOut = Config::kOut, kKh = Config::kKh, kKw = Config::kKw;
  constexpr int kColumns = Config::kColumns, kParts = S::kParts, kSlices = S::kSlices;
  constexpr int kStep = S::kWarps * 32;  // keys that the block takes at once
  __shared__ float of_warp[2][S::kWarps][16];
  __shared__ float gradient[16][kParts * 8];
  __shared__ float total_dy[kSlices * 8];
  const float kLowest = negative_infinity<float>();
  int warp = threadIdx.x / kWarp;
  unsigned lane = threadIdx.x % kWarp;
  int g = lane / 4;
  int q = lane % 4;

  // Row g, and how far row g + 8 is from it.
  int query = at.query[0] < 0 ? 0 : at.query[0];
  int head = at.group * kIn + g % kIn;
  const T* scores = row_start<T>(p.scores, p.scores_stride, at.item, head, query);
  T* d_scores = static_cast<T*>(p.d_scores) +
                ((int64(at.item) * p.heads_in + head) * p.seq + query) * p.seq;
  int64 scores_step = kIn == 16 ? 8 * p.scores_stride[1]
                                : int64(8 / kIn) * p.dilation[0] * p.scores_stride[2];
  int64 d_scores_step = int64(p.seq) * (kIn == 16 ? 8 * int64(p.seq) : 8 / kIn * p.dilation[0]);
  auto load_scores = [&](Eight (&x)[2], int key) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      x[h] = load_eight<Config::kVector>(scores + h * scores_step, p.scores_stride[3], key,
                                         at.query[h] - key + 1);
    }
  };

  int covered = (at.width + 31) / 32 * 32;  // keys of the sweeps
#pragma unroll 1
  for (int key = covered + warp * 32 + q * 8; key < p.seq; key += kStep) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (at.query[h] >= 0) {
        store_eight<Config::kVector>(d_scores + h * d_scores_step, p.seq, key, Eight{{0, 0, 0, 0}});
      }
    }
  }

  // Tile: `left` keys before the sweep's, then those, then the halo on the right.
  int right = unsigned(p.column_origin + 7) / 8 * 8;
  int left = unsigned((kKw - 1) * p.dilation[1] - p.column_origin + 7) / 8 * 8;
  unsigned start[kKw];  // this lane's row of matrices, for the sweep's first keys
#pragma unroll
  for (int v = 0; v < kKw; ++v) {
    unsigned key = left + 8 * (lane % 8 / 2) + 2 * (lane / 8) + lane % 2 - v * p.dilation[1] +
                   p.column_origin;
    start[v] = shared_address(tile) + key / 8 * S::kBlock + key % 8 * S::kRecord;
  }
  auto fill = [&](int from, int until) {
    fill_tile<Config>(p, at, from - left, (left + until - from + right) / 8);
  };

  float sum[kParts][4] = {};         // G', of the lane's rows
  float sum_dy[kSlices][4] = {};     // of dy, the same in all rows
  float largest[2] = {kLowest, kLowest};
  float total[2] = {0, 0};
  for (int from = 0; from < covered; from += kColumns) {
    int until = from + kColumns < covered ? from + kColumns : covered;
    int first = from + warp * 32;
    Eight next[2];
    load_scores(next, first + q * 8);
    if (from > 0) {
      __syncthreads();  // the tile is no longer read
    }
    fill(from, until);
    __syncthreads();  // tile readable
#pragma unroll 1
    for (int key = first; key < until; key += kStep) {
      float x[2][8];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          unpack<T>(next[h].pair[k], x[h][2 * k], x[h][2 * k + 1]);
        }
      }
      if (key + 32 > at.open) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          int count = at.query[h] - (key + q * 8) + 1;
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            x[h][k] = k < count ? x[h][k] : kLowest;
          }
        }
      }
      float before[2] = {largest[0], largest[1]};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          largest[h] = fmaxf(largest[h], x[h][k]);
        }
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 1));
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 2));
      }
      if (__any_sync(0xffffffffu, largest[0] != before[0] || largest[1] != before[1])) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float factor =
              largest[h] == before[h] ? 1 : power_of_e(before[h] - largest[h]);
          total[h] *= factor;
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            sum[part][2 * h] *= factor;
            sum[part][2 * h + 1] *= factor;
          }
        }
      }

      unsigned a[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float shift = largest[h] == kLowest ? 0 : largest[h];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float low = power_of_e(x[h][2 * k] - shift);
          float high = power_of_e(x[h][2 * k + 1] - shift);
          total[h] += low + high;
          a[h][k] = pack<T>(low, high);
        }
      }
      load_scores(next, key + kStep < until ? key + kStep + q * 8 : p.seq);  // or nothing
      unsigned offset = unsigned(key - from) / 8 * S::kBlock;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        unsigned b[4];
        load_matrices_transposed(b, start[part / kSlices] + offset + part % kSlices * 16);
        multiply<T>(sum[part], a[0][0], a[1][0], a[0][1], a[1][1], b[0], b[1]);
        multiply<T>(sum[part], a[0][2], a[1][2], a[0][3], a[1][3], b[2], b[3]);
        if (part / kSlices == kKw / 2) {  // the column of taps that shifts nothing
          const unsigned one = pack<T>(1, 1);
          multiply<T>(sum_dy[part % kSlices], one, one, one, one, b[0], b[1]);
          multiply<T>(sum_dy[part % kSlices], one, one, one, one, b[2], b[3]);
        }
      }
    }
  }

  float check = 0;  // NaN if anything is not finite
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      check += 0 * sum[part][2 * h] + 0 * sum[part][2 * h + 1];
    }
    total[h] += __shfl_xor_sync(0xffffffffu, total[h], 1);
    total[h] += __shfl_xor_sync(0xffffffffu, total[h], 2);
    if (q == 0) {
      of_warp[0][warp][g + 8 * h] = largest[h];
      of_warp[1][warp][g + 8 * h] = total[h];
    }
  }
  bool finite = __syncthreads_and(check == 0);  // of_warp readable

  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int m = g + 8 * h;
    float of_this_warp = largest[h];
    for (int w = 0; w < S::kWarps; ++w) {
      largest[h] = fmaxf(largest[h], of_warp[0][w][m]);
    }
    total[h] = 0;
    for (int w = 0; w < S::kWarps; ++w) {
      float x = of_warp[0][w][m];
      float scale = x == largest[h] ? 1 : power_of_e(x - largest[h]);
      total[h] += scale * of_warp[1][w][m];
    }
    factor[h] = 1 / total[h];
    float scale = of_this_warp == largest[h] ? 1 : power_of_e(of_this_warp - largest[h]);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int k = 2 * h; k < 2 * h + 2; ++k) {
        sum[part][k] = at.query[h] >= 0 ? sum[part][k] * (scale * factor[h]) : 0;
      }
    }
  }

  // The warps add up G one after the other.
  for (int w = 0; w < S::kWarps; ++w) {
    if (warp == w) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float& to = gradient[g + k / 2 * 8][part * 8 + 2 * q + k % 2];
          to = w == 0 ? sum[part][k] : to + sum[part][k];
        }
      }
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (g == 0) {
            float& to = total_dy[slice * 8 + 2 * q + k];
            to = w == 0 ? sum_dy[slice][k] : to + sum_dy[slice][k];
          }
        }
      }
    }
    __syncthreads();  // the next warp's turn; at the end, gradient and total_dy readable
  }

  // The mean of row m, by kThreads / 16 neighbours.
  __shared__ float means[16];
  constexpr int kTeam = Config::kThreads / 16;
  static_assert(kTeam <= kWarp && kWarp % kTeam == 0, "a team is within a warp");
  {
    int m = threadIdx.x / kTeam;
    float y = 0;
#pragma unroll 1
    for (int tap = threadIdx.x % kTeam; tap < kOut * kKh * kKw; tap += kTeam) {
      int v = tap % kKw;
      int u = tap / kKw % kKh;
      int o = tap / (kKw * kKh);
      y += widen(weights[((o * kIn + m % kIn) * kKh + u) * kKw + v]) *
           gradient[m][v * kSlices * 8 + (m / kIn - u + kKh - 1) * kOut + o];
    }
    for (int distance = kTeam / 2; distance > 0; distance /= 2) {
      y += __shfl_xor_sync(0xffffffffu, y, distance);
    }
    if (threadIdx.x % kTeam == 0) {
      means[m] = y;
    }
  }

  // One thread per element of d_weight adds the strip's rows.
  float* partial = static_cast<float*>(p.partial) + blockIdx.x / p.groups;
#pragma unroll 1
  for (int element = threadIdx.x; element < S::kWeights + kOut; element += Config::kThreads) {
    float y = 0;
    if (element < S::kWeights) {
      int v = element % kKw;
      int u = element / kKw % kKh;
      int c = element / (kKw * kKh) % kIn;
      int o = element / (kKw * kKh * kIn);
      for (int r = 0; r < S::kRows; ++r) {
        int row = at.first_query + (r - u) * p.dilation[0] + p.row_origin;
        if (row >= 0 && row < p.seq) {  // not 0 * NaN where there is no dy
          y += gradient[r * kIn + c][v * kSlices * 8 + (r - u + kKh - 1) * kOut + o];
        }
      }
      partial[(int64(at.group) * S::kWeights + element) * p.chunks] = y;
    } else if (p.d_bias) {
      int o = element - S::kWeights;
      int own = kKh - 1 - p.row_origin / p.dilation[0];  // s of the strip's first row
      for (int r = 0; r < S::kRows; ++r) {
        y += total_dy[(r + own) * kOut + o];
      }
      partial[(int64(p.groups) * S::kWeights + at.group * kOut + o) * p.chunks] = y;
    }
  }

  // W, the transposed convolution as a matrix: numbers 2q and 2q + 1 of a slice, rows g and g + 8.
  unsigned weight[2][kParts];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int c = (g + 8 * h) % kIn;
    int r = (g + 8 * h) / kIn;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      weight[h][part] = 0;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        int number = part % kSlices * 8 + 2 * q + k;
        int u = r + kKh - 1 - number / kOut;
        if (u >= 0 && u < kKh) {
          int element = ((number % kOut * kIn + c) * kKh + u) * kKw + part / kSlices;
          weight[h][part] |= unsigned(weights[element].bits) << (16 * k);
        }
      }
    }
  }

  __syncthreads();  // means readable
  float mean[2] = {finite ? means[g] : 0, finite ? means[g + 8] : 0};

  // Second sweep, and before it one for the mean if some value is not finite. The chunks go
  // backward: the last one is still in the tile.
  int held = at.width > 0 ? (covered - 1) / kColumns * kColumns : 0;
  for (bool write = finite;; write = true) {
    float product[2] = {0, 0};
    for (int from = (covered - 1) / kColumns * kColumns; from >= 0 && covered > 0;
         from -= kColumns) {
      int until = from + kColumns < covered ? from + kColumns : covered;
      int first = from + warp * 32;
      Eight next[2];
      load_scores(next, first + q * 8);
      if (from != held) {
        __syncthreads();  // the tile is no longer read
        fill(from, until);
        __syncthreads();  // tile readable
        held = from;
      }
#pragma unroll 1
      for (int key = first; key < until; key += kStep) {
        Eight x[2] = {next[0], next[1]};
        if (key + kStep < until) {
          load_scores(next, key + kStep + q * 8);
        }
        unsigned offset = unsigned(key - from) / 8 * S::kBlock;
        float slope[4][4] = {};
        if (finite) {
          weight_gradients<Config>(weight, start, offset, slope);
        } else {
          exact_weight_gradients<Config>(p, weights, left + key - from, slope);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          int count = at.query[h] - (key + q * 8) + 1;
          Eight y;
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            float low, high;
            unpack<T>(x[h].pair[t], low, high);
            low = power_of_e(low - largest[h]) * factor[h];
            high = power_of_e(high - largest[h]) * factor[h];
            low = 2 * t < count ? low * (slope[t][2 * h] - mean[h]) : 0;
            high = 2 * t + 1 < count ? high * (slope[t][2 * h + 1] - mean[h]) : 0;
            if (!write) {
              product[h] += low + high;
            }
            y.pair[t] = pack<T>(low, high);
          }
          if (write && at.query[h] >= 0) {
            store_eight<Config::kVector>(d_scores + h * d_scores_step, p.seq, key + q * 8, y);
          }
        }
      }
    }
    if (write) {
      break;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      product[h] += __shfl_xor_sync(0xffffffffu, product[h], 1);
      product[h] += __shfl_xor_sync(0xffffffffu, product[h], 2);
      if (q == 0) {
        of_warp[0][warp][g + 8 * h] = product[h];
      }
    }
    __syncthreads();  // of_warp readable
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      for (int w = 0; w < S::kWarps; ++w) {
        mean[h] += of_warp[0][w][g + 8 * h];
      }
    }
  }
}

template <class Config>
__device__ void multi_token_strip_bwd(const MultiTokenParams& p) {
  using T = typename Config::T;
  constexpr int kWeights = Strip<Config>::kWeights;
  __shared__ T weights[kWeights];  // of one group
  Place<Config> at(p, blockIdx.x);
#pragma unroll 1
  for (int element = threadIdx.x; element < kWeights; element += Config::kThreads) {
    int v = element % Config::kKw;
    int u = element / Config::kKw % Config::kKh;
    int c = element / (Config::kKw * Config::kKh) % Config::kIn;
    int o = element / (Config::kKw * Config::kKh * Config::kIn) + at.group * Config::kOut;
    weights[element] = static_cast<const T*>(p.weight)[
        o * p.weight_stride[0] + c * p.weight_stride[1] + u * p.weight_stride[2] +
        v * p.weight_stride[3]];
  }
  strip_gradient<Config>(p, at, weights);
}
