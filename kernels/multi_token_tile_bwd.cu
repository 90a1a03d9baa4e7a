// multi_token_tile_bwd.cu: multi-token attention, backward, on CUDA cores, by tiles of dy.
//
//   dP[c, i, j] = sum_{o, u, v} weight[o, c, u, v] * dy[o, i - u * d0 + r0, j - v * d1 + c0]
//   softmax     d_scores = P * (dP - mean),  mean = sum over the row of P * dP
//   sparsemax   d_scores = dP - mean where P > 0, else 0,  mean = that of dP where P > 0
//   d_weight[o, c, u, v] = sum_{batch, i, j} P[c, i, j] * dy[o, i - u * d0 + r0, j - v * d1 + c0]
//   d_bias[o]            = sum_{batch, i, j} dy[o, i, j];  all sums over j <= i only
//
// Shapes    as multi_token_bwd.cu: scores, dy, weight with any strides;  d_scores contiguous;
//           partial (elements of d_weight then d_bias, chunks)
// Passes    multi_token_statistics     multi_token_fwd.cu: shift and factor of every row
//           multi_token_tile_scores    a strip of rows: their means, then d_scores
//           multi_token_tile_weight    some elements of d_weight and d_bias over a chunk of strips
//           multi_token_d_weight       multi_token_bwd.cu: the sums of the chunks
// Strip     kRows queries that lie d0 apart, so that taps are neighbouring rows of the tile,
//           whatever the dilation. A block walks along its keys, 128 at a time
//
//             keys j ->   tile of dy, float32, 0 above the diagonal and outside the matrix
//           +-----------------+
//           |   halo          |     kRows + kKh - 1 rows, 128 + (kKw - 1) d1 keys; the first key
//           |  +-----------+  |     is a multiple of four, and so is what a lane reads at once
//           |  | strip     |  |
//           |  +-----------+  |
//           +-----------------+
//
// Scores    grid: (strip, item, group, kTiles * kChannels heads), the longest strips first. A warp
//           has a row and kChannels heads, a lane four neighbouring keys: from shared memory, per
//           row of taps, the window of 4 + (kKw - 1) d1 numbers of dy, and kChannels weights per
//           tap, the same for all lanes. Outputs come in turns of kOutputs, dP stays in registers
//             sweep 1   dP, and the sum of P dP of the row: by tile over the warp, then in order
//             sweep 2   dP again, d_scores
//           Between the sweeps d_scores has room for dP, in float32: of float32 all, of 16 bits the
//           first half of every row, which is three quarters of the triangle. Only what finds no
//           room is computed again
// Weight    grid: (chunk of strips, group, kChannels heads, elements). A warp has kPieces pieces of
//           kTaps taps (v) of a row of taps (o, u), times kChannels heads: that many sums in every
//           lane, over the keys of the lane. P and dy of a tile are in shared memory. Where a block
//           has all elements with fewer warps, kSplits times as many share the rows
// Accuracy  sums in float32; those of d_weight end after a few hundred rows at most
// Not finite  products with the zeros of a tile would spread a NaN to what it does not reach: where
//           anything in them (P and dy, or a weight) is not finite, each product is checked
// Limits    kernel and key dilation are compile-time values;  reaches below 2^30, seq below 2^27
// Config    T, kSparsemax; kVector: elements per access of scores and dy, which divides seq and
//           their strides; kKh, kKw, kKeyStep (d1); kRows, kChannels, kOutputs, kShared (bytes);
//           scores: kTiles, kTable (outputs whose weights are in shared memory);
//           weight: kPieces, kTaps, kSplits
#include "common/params.cuh"
#include "common/types.cuh"
#include "common/reduce.cuh"
#include "common/mma.cuh"
#include "common/multi_token.cuh"
#include "common/multi_token_strip.cuh"

// What stands in a tile for keys above the diagonal or outside the matrix. No number of the tile
// is a negative zero, so that these can be told from those, and finite products need not care.
constexpr float kNothing = -0.0f;

__device__ inline bool exists(float x) { return __float_as_uint(x) != 0x80000000u; }

// Sizes of a tile of dy.
template <class Config>
struct Tile {
  static constexpr int kKeys = 4 * kWarp;
  static constexpr int kRows = Config::kRows + Config::kKh - 1;
  static constexpr int kReach = (Config::kKw - 1) * Config::kKeyStep;
  // The last tap of key j reads key j + kFirst; the tile starts kSkip keys before that.
  static constexpr int kFirst = Config::kKw / 2 * Config::kKeyStep - kReach;
  static constexpr int kSkip = (kFirst % 4 + 4) % 4;
  static constexpr int kWidth = (kSkip + kReach + kKeys + 3) / 4 * 4;
  static constexpr int kFloats = Config::kOutputs * kRows * kWidth;
};

// The strip of a block, and where its tile lies.
template <class Config>
struct TilePlace {
  int64 item;
  int group;
  int query;      // first row of the strip
  int step;       // from row to row
  int last;       // last row of the strip, or -1 where it is empty
  int first_tap;  // r0 = first_tap * step

  __device__ static int strips(const MultiTokenParams& p) {
    const int step = p.dilation[0], rows = Config::kRows * step;
    return (p.seq + rows - 1) / rows * step;
  }

  __device__ TilePlace(const MultiTokenParams& p, int64 item, int group, int strip)
      : item(item), group(group), step(p.dilation[0]), first_tap(p.row_origin / step) {
    query = strip / step * (Config::kRows * step) + strip % step;
    last = query < p.seq ? query + min(Config::kRows - 1, (p.seq - 1 - query) / step) * step : -1;
  }

  // The query of a row of the tile: may lie outside the matrix.
  __device__ int tile_query(int row) const {
    return query + (row - (Config::kKh - 1) + first_tap) * step;
  }
};

// Hides from the compiler that a number is known before, lest it computes what follows from it
// ahead of a loop and holds that in registers.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Four neighbouring keys from a multiple of four on; those after `last` are not read.
template <class Config>
__device__ inline Pack<typename Config::T, 4> read_keys(const typename Config::T* row,
                                                        int64 key_stride, int key, int last) {
  using T = typename Config::T;
  constexpr int kVector = Config::kVector;
  Pack<T, 4> x;
  x.fill(0);
#pragma unroll
  for (int k = 0; k < 4; k += kVector) {
    if (key + k <= last) {
      Pack<T, kVector> v;
      v.load(row + (key + k) * (kVector == 1 ? key_stride : 1));
      if constexpr (kVector == 4) {
        x = v;
      } else {
        x.put(k, v);
      }
    }
  }
  return x;
}

// Numbers offset .. offset + 3 of a line, of which the lane has the place; `offset` is known to
// the compiler, which reads each float4 once.
__device__ inline void window(const float4* line, int offset, float (&x)[4]) {
  const float4 low = line[offset / 4];
  const float4 high = offset % 4 ? line[offset / 4 + 1] : low;
  const float both[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    x[k] = both[offset % 4 + k];
  }
}

// Fill the tile of keys j0 .. with dy of `count` outputs. Returns whether all of it is finite.
template <class Config>
__device__ inline bool fill_dy(const MultiTokenParams& p, const TilePlace<Config>& place,
                               int first_output, int count, int j0, float4* tile) {
  using T = typename Config::T;
  using S = Tile<Config>;
  constexpr int kQuads = S::kWidth / 4;
  constexpr int kBatch = Config::kVector == 4 ? 4 : 1;  // reads in flight per thread
  const int quads = count * S::kRows * kQuads;
  float check = 0;
#pragma unroll 1
  for (int n0 = threadIdx.x; n0 < quads; n0 += kBatch * Config::kThreads) {
    Pack<T, 4> x[kBatch];
    int valid[kBatch];  // how many of the four keys are
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int n = n0 + b * Config::kThreads;
      const int line = n / kQuads;
      const int key = j0 + S::kFirst - S::kSkip + n % kQuads * 4;
      const int query = place.tile_query(line % S::kRows);
      const bool inside = n < quads && query >= 0 && query < p.seq && key >= 0;
      valid[b] = inside ? query - key + 1 : 0;
      const T* row = row_start<T>(p.dy, p.dy_stride, place.item, first_output + line / S::kRows,
                                  query);
      x[b] = read_keys<Config>(row, p.dy_stride[3], key, inside ? query : key - 1);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int n = n0 + b * Config::kThreads;
      if (n < quads) {
        float v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          v[k] = k < valid[b] ? x[b][k] + 0.0f : kNothing;  // -0 becomes 0
          check += 0 * v[k];
        }
        tile[n] = float4{v[0], v[1], v[2], v[3]};
      }
    }
  }
  return check == 0;
}

// The statistics of a row, and what multi_token.cuh computes from them.
template <class Config>
struct RowWeights {
  float shift, factor;

  __device__ void load(const MultiTokenParams& p, int64 item, int head, int query) {
    const int64 row = (item * p.heads_in + head) * p.seq + query;
    shift = static_cast<const float*>(p.shift)[row];
    factor = static_cast<const float*>(p.factor)[row];
  }

  // Those that a lane of the warp has.
  __device__ RowWeights of_lane(int lane) const {
    return {__shfl_sync(0xffffffffu, shift, lane), __shfl_sync(0xffffffffu, factor, lane)};
  }

  __device__ float weight(float x) const {
    if constexpr (Config::kSparsemax) {
      return x < shift ? 0 * factor : x - shift + factor;
    } else {
      return exp2f((x - shift) * kLog2e) * factor;
    }
  }

  __device__ float slope(float x) const {
    if constexpr (Config::kSparsemax) {
      return x < shift ? 0 * factor : 1 + 0 * factor;
    } else {
      return weight(x);
    }
  }
};

// ----------------------------------------------------------------------------------------- scores

template <class Config>
struct ScoresSizes {
  static constexpr int kHeads = Config::kTiles * Config::kChannels;  // of a block
  static constexpr int kTaps = Config::kKh * Config::kKw;
  static constexpr int kWeights = kTaps * kHeads;  // of an output
  static constexpr int kShared = 4 * (Tile<Config>::kFloats + Config::kTable * kWeights);
  static_assert(kShared == Config::kShared, "shared memory: the row of the table differs");
  static_assert(Config::kThreads == kWarp * Config::kRows * Config::kTiles, "a warp for each row");
};

template <class T>
__device__ inline T* row_of_gradient(const MultiTokenParams& p, int64 item, int head, int query) {
  return static_cast<T*>(p.d_scores) + ((item * p.heads_in + head) * p.seq + query) * p.seq;
}

// What a warp works on: a row, some heads.
template <class Config>
struct ScoresWarp {
  using T = typename Config::T;
  int row, query;   // of the strip, of the matrix
  int head;         // first of scores
  int heads;        // at most kChannels; 0 where there is nothing to do
  int first_stored; // of the block's heads in shared memory
  int lane;
  bool aligned;     // d_scores can be written four elements at a time,
  bool wide;        // and 16 bytes

  __device__ ScoresWarp(const MultiTokenParams& p, const TilePlace<Config>& place, int set) {
    const int warp = threadIdx.x / kWarp, heads_of_group = p.heads_in / p.groups;
    lane = threadIdx.x % kWarp;
    row = warp % Config::kRows;
    query = place.query + row * place.step;
    first_stored = warp / Config::kRows * Config::kChannels;
    const int first = set * ScoresSizes<Config>::kHeads + first_stored;
    head = place.group * heads_of_group + first;
    heads = query <= place.last ? max(min(heads_of_group - first, Config::kChannels), 0) : 0;
    const auto address = reinterpret_cast<unsigned long long>(p.d_scores);
    aligned = p.seq % 4 == 0 && address % (4 * sizeof(T)) == 0;
    wide = p.seq * int64(sizeof(T)) % 16 == 0 && address % 16 == 0;
  }

  // Write four elements, of which `left` exist.
  __device__ void store(T* to, int left, const float (&x)[4]) const {
    if (aligned) {
      if (left > 0) {
        Pack<T, 4> v;
        if constexpr (sizeof(T) == 4) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            v.word[k] = __float_as_uint(x[k]);
          }
        } else {
          v.word[0] = pack<T>(x[0], x[1]);
          v.word[1] = pack<T>(x[2], x[3]);
        }
        v.stream(to);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k < left) {
          to[k] = narrow<T>(x[k]);
        }
      }
    }
  }

  // Whether a row of d_scores has room for dP of the tile of keys j0 .., as float32.
  __device__ bool keeps(int j0, int seq) const {
    return sizeof(T) == 4 || (wide && (j0 + Tile<Config>::kKeys) * 2 <= seq);
  }

  __device__ void keep(T* row, int key, int seq, const float (&x)[4]) const {
    float* to = reinterpret_cast<float*>(row) + key;
    if (wide) {
      *reinterpret_cast<float4*>(to) = float4{x[0], x[1], x[2], x[3]};
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (key + k < seq) {
          to[k] = x[k];
        }
      }
    }
  }

  // Read what this thread has kept.
  __device__ void kept(const T* row, int key, int seq, float (&x)[4]) const {
    const float* from = reinterpret_cast<const float*>(row) + key;
    if (wide) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        x[k] = key + k < seq ? from[k] : 0;
      }
    }
  }
};

// Weights of `count` outputs, [output][tap][head]; those of heads that do not exist are 0. Returns
// whether all are finite.
template <class Config>
__device__ inline bool fill_table(const MultiTokenParams& p, int group, int set, int first_output,
                                  int count, float* table) {
  using T = typename Config::T;
  constexpr int kHeads = ScoresSizes<Config>::kHeads, kTaps = ScoresSizes<Config>::kTaps;
  constexpr int kBatch = 4;  // loads in flight per thread
  const int heads_of_group = p.heads_in / p.groups, words = count * kTaps * kHeads;
  float check = 0;
#pragma unroll 1
  for (int n0 = threadIdx.x; n0 < words; n0 += kBatch * Config::kThreads) {
    float w[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int n = n0 + b * Config::kThreads, tap = n / kHeads % kTaps;
      const int head = set * kHeads + n % kHeads;
      const int64 output = group * (p.heads_out / p.groups) + first_output + n / kHeads / kTaps;
      w[b] = 0;
      if (n < words && head < heads_of_group) {
        w[b] = widen(static_cast<const T*>(
            p.weight)[output * p.weight_stride[0] + head * p.weight_stride[1] +
                      tap / Config::kKw * p.weight_stride[2] +
                      tap % Config::kKw * p.weight_stride[3]]);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (n0 + b * Config::kThreads < words) {
        table[n0 + b * Config::kThreads] = w[b];
        check += 0 * w[b];
      }
    }
  }
  return check == 0;
}

// dP of the lane's four keys gets what `count` outputs add. In float32 an output's taps have a sum of
// their own, where registers allow it: fewer additions round a large number.
template <class Config, bool kExact>
__device__ inline void convolve(const ScoresWarp<Config>& warp, const float4* tile,
                                const float* table, int count,
                                float (&sum)[Config::kChannels][4]) {
  using S = Tile<Config>;
  constexpr int kKh = Config::kKh, kKw = Config::kKw, kChannels = Config::kChannels;
  constexpr int kBlock = kKw <= 16 ? kKw : 4;  // taps that are unrolled: places modulo 4 are known
  constexpr int kHeads = ScoresSizes<Config>::kHeads;
  constexpr bool kParts = sizeof(typename Config::T) == 4 && kChannels <= 4;
#pragma unroll 1
  for (int o = 0; o < count; ++o) {
    float part[kChannels][4];
#pragma unroll
    for (int i = 0; i < 4 * kChannels; ++i) {
      part[i / 4][i % 4] = kParts ? 0.0f : sum[i / 4][i % 4];
    }
#pragma unroll(!kExact && kKh * kKw * kChannels <= 72 ? kKh : 1)
    for (int u = 0; u < kKh; ++u) {
      const float4* line =
          tile + (o * S::kRows + warp.row + kKh - 1 - u) * (S::kWidth / 4) + warp.lane;
      const float* weights = table + (o * kKh + u) * kKw * kHeads + warp.first_stored;
#pragma unroll(kBlock == kKw ? kKw : 1)
      for (int s0 = 0; s0 < kKw; s0 += kBlock) {
#pragma unroll
        for (int s = 0; s < kBlock; ++s) {
          const int v = kKw - 1 - s0 - s;  // the tile's keys rise as v falls
          if (v < 0) {
            continue;
          }
          float x[4], w[kChannels];
          window(line + s0 / 4 * Config::kKeyStep, S::kSkip + s * Config::kKeyStep, x);
          if constexpr (kChannels % 4 == 0) {
#pragma unroll
            for (int c = 0; c < kChannels; c += 4) {
              const float4 four = *reinterpret_cast<const float4*>(weights + v * kHeads + c);
              w[c] = four.x, w[c + 1] = four.y, w[c + 2] = four.z, w[c + 3] = four.w;
            }
          } else {
#pragma unroll
            for (int c = 0; c < kChannels; ++c) {
              w[c] = weights[v * kHeads + c];
            }
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if (!kExact || exists(x[k])) {
#pragma unroll
              for (int c = 0; c < kChannels; ++c) {
                part[c][k] += w[c] * x[k];
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kChannels; ++i) {
      sum[i / 4][i % 4] = kParts ? sum[i / 4][i % 4] + part[i / 4][i % 4] : part[i / 4][i % 4];
    }
  }
}

// Zeros of d_scores from key `begin`, a multiple of four, on.
template <class Config>
__device__ inline void store_zeros(const MultiTokenParams& p, const TilePlace<Config>& place,
                                   const ScoresWarp<Config>& warp, int begin) {
  const float zeros[4] = {0, 0, 0, 0};
  for (int c = 0; c < warp.heads; ++c) {
    auto* to = row_of_gradient<typename Config::T>(p, place.item, warp.head + c, warp.query);
    for (int key = begin + 4 * warp.lane; key < p.seq; key += Tile<Config>::kKeys) {
      warp.store(to + key, p.seq - key, zeros);
    }
  }
}

template <class Config>
__device__ void multi_token_tile_scores(const MultiTokenParams& p) {
  using T = typename Config::T;
  using S = Tile<Config>;
  constexpr int kChannels = Config::kChannels, kAtOnce = kChannels < 4 ? kChannels : 4;
  extern __shared__ float4 tile_shared[];
  float4* tile = tile_shared;
  float* table = reinterpret_cast<float*>(tile_shared) + S::kFloats;

  const int heads_of_group = p.heads_in / p.groups, outputs = p.heads_out / p.groups;
  const int sets = (heads_of_group + ScoresSizes<Config>::kHeads - 1) / ScoresSizes<Config>::kHeads;
  const int strips = TilePlace<Config>::strips(p);
  const int batch = int(p.batch), block = int(blockIdx.x);
  const int set = block % sets, group = block / sets % p.groups, rest = block / sets / p.groups;
  const TilePlace<Config> place(p, rest % batch, group, strips - 1 - rest / batch);
  if (place.last < 0) {
    return;
  }
  const ScoresWarp<Config> warp(p, place, set);
  const int end = place.last / S::kKeys * S::kKeys + S::kKeys;  // of the walk

  // All weights at once where they fit, else those of the outputs that are in the tile.
  constexpr bool kWhole = Config::kTable > Config::kOutputs;
  bool finite = true;  // weights
  if constexpr (kWhole) {
    finite = fill_table<Config>(p, group, set, 0, outputs, table);
  }
  // Lane c has those of head c; mean: the sum of slope * dP, slopes: that of the slopes.
  RowWeights<Config> statistics{0, 0};
  if (warp.lane < warp.heads) {
    statistics.load(p, place.item, warp.head + warp.lane, warp.query);
  }
  float mean = 0, slopes = 0;
#pragma unroll 1
  for (int sweep = 0; sweep < 2; ++sweep) {
#pragma unroll 1
    for (int j0 = 0; j0 < end; j0 += S::kKeys) {
      const int key = j0 + 4 * warp.lane;
      float sum[kChannels][4];
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        sum[c][0] = sum[c][1] = sum[c][2] = sum[c][3] = 0;
      }
      const bool keeps = warp.keeps(j0, p.seq);
      if (sweep == 0 || !keeps) {
#pragma unroll 1
        for (int first = 0; first < outputs; first += Config::kOutputs) {
          const int count = min(outputs - first, Config::kOutputs);
          const int first_output = group * outputs + first;
          __syncthreads();  // tile and table are free again
          fill_dy<Config>(p, place, first_output, count, j0, tile);
          if (!kWhole && (outputs > Config::kOutputs || (sweep == 0 && j0 == 0))) {
            finite = fill_table<Config>(p, group, set, first, count, table);
          }
          finite = __syncthreads_and(finite);  // tile and table are readable
          if (warp.heads == 0 || j0 > warp.query) {
            continue;
          }
          const float* of_turn = kWhole ? table + first * ScoresSizes<Config>::kWeights : table;
          if (finite) {
            convolve<Config, false>(warp, tile, of_turn, count, sum);
          } else {
            convolve<Config, true>(warp, tile, of_turn, count, sum);
          }
        }
      }

      if (sweep == 0 && j0 > warp.query) {
        continue;
      }
      const int head = opaque(warp.head);
#pragma unroll
      for (int c0 = 0; c0 < kChannels; c0 += kAtOnce) {
        Pack<T, 4> scores[kAtOnce];
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c) {
          if (c0 + c < warp.heads) {
            scores[c] = read_keys<Config>(
                row_start<T>(p.scores, p.scores_stride, place.item, head + c0 + c, warp.query),
                p.scores_stride[3], key, warp.query);
            if (sweep == 1 && keeps && key <= warp.query) {
              warp.kept(row_of_gradient<T>(p, place.item, head + c0 + c, warp.query), key, p.seq,
                        sum[c0 + c]);
            }
          }
        }
        __syncwarp();  // what was kept is read: with 16 bits other lanes write there
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c) {
          if (c0 + c >= warp.heads) {
            continue;
          }
          float(&gradient)[4] = sum[c0 + c];
          T* to = row_of_gradient<T>(p, place.item, head + c0 + c, warp.query);
          const RowWeights<Config> row = statistics.of_lane(c0 + c);
          float slope[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            slope[k] = key + k <= warp.query ? row.slope(scores[c][k]) : 0;
          }
          if (sweep == 0) {
            float total = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              total += key + k <= warp.query ? slope[k] * gradient[k] : 0;
            }
            total = warp_sum(total);
            mean += warp.lane == c0 + c ? total : 0;
            if constexpr (Config::kSparsemax) {
              total = warp_sum(slope[0] + slope[1] + (slope[2] + slope[3]));
              slopes += warp.lane == c0 + c ? total : 0;
            }
            if (keeps && key <= warp.query) {
              warp.keep(to, key, p.seq, gradient);
            }
          } else {
            const float row_mean = __shfl_sync(0xffffffffu, mean, c0 + c);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              gradient[k] = key + k <= warp.query ? slope[k] * (gradient[k] - row_mean) : 0;
            }
            warp.store(to + key, p.seq - key, gradient);
          }
        }
      }
    }
    if constexpr (Config::kSparsemax) {
      mean = sweep == 0 ? mean / slopes : mean;  // with softmax the slopes sum to 1
    }
  }
  store_zeros(p, place, warp, end);
}

// ----------------------------------------------------------------------------------------- weight

template <class Config>
struct WeightSizes {
  static constexpr int kSets = Config::kThreads / kWarp / Config::kSplits;  // of pieces, in a block
  static constexpr int kRuns = (Config::kKw + Config::kTaps - 1) / Config::kTaps;  // in a tap row
  static constexpr int kPerOutput = Config::kKh * kRuns;  // pieces of an output
  static constexpr int kWeights = Config::kChannels * Config::kRows * Tile<Config>::kKeys;
  static constexpr int kShared = 4 * (Tile<Config>::kFloats + kWeights);
  static_assert(kShared == Config::kShared, "shared memory: the row of the table differs");
  static_assert(kRuns == 1 || Config::kTaps % 4 == 0, "places modulo 4 are known");
};

// P of kChannels heads, [head][row][key]; 0 above the diagonal. Returns whether all are finite.
template <class Config>
__device__ inline bool fill_p(const MultiTokenParams& p, const TilePlace<Config>& place, int head,
                              int heads, int j0, float4* table) {
  using T = typename Config::T;
  constexpr int kQuads = WeightSizes<Config>::kWeights / 4;
  constexpr int kBatch = Config::kVector == 4 ? 2 : 1;  // reads in flight per thread
  float check = 0;
#pragma unroll 1
  for (int n0 = threadIdx.x; n0 < kQuads; n0 += kBatch * Config::kThreads) {
    Pack<T, 4> x[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int n = n0 + b * Config::kThreads, line = n / kWarp;
      const int c = line / Config::kRows, query = place.query + line % Config::kRows * place.step;
      const bool inside = c < heads && query <= place.last;
      x[b] = read_keys<Config>(
          row_start<T>(p.scores, p.scores_stride, place.item, head + c, query),
          p.scores_stride[3], j0 + n % kWarp * 4, inside ? query : -1);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int n = n0 + b * Config::kThreads, line = n / kWarp;
      const int c = line / Config::kRows, query = place.query + line % Config::kRows * place.step;
      float v[4] = {kNothing, kNothing, kNothing, kNothing};
      if (c < heads && query <= place.last) {
        const int key = j0 + n % kWarp * 4;
        RowWeights<Config> row;
        row.load(p, place.item, head + c, query);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          v[k] = key + k <= query ? row.weight(x[b][k]) : kNothing;
          check += 0 * v[k];
        }
      }
      if (n < kQuads) {
        table[n] = float4{v[0], v[1], v[2], v[3]};
      }
    }
  }
  return check == 0;
}

// What a block works on.
template <class Config>
struct WeightBlock {
  using W = WeightSizes<Config>;
  int heads_of_group, outputs, pieces;  // of the group
  int group, chunk;
  int head, heads;          // first one in the group, at most kChannels of them
  int first;                // piece of this block
  int first_output, count;  // outputs of the tile, in the group
  int split;

  static constexpr int kPieces = W::kSets * Config::kPieces;  // of a block

  __device__ WeightBlock(const MultiTokenParams& p, int number)
      : heads_of_group(p.heads_in / p.groups),
        outputs(p.heads_out / p.groups),
        pieces(outputs * W::kPerOutput) {
    const int blocks = (pieces + kPieces - 1) / kPieces;
    const int tiles = (heads_of_group + Config::kChannels - 1) / Config::kChannels;
    const int rest = number / blocks;
    head = rest % tiles * Config::kChannels;
    heads = min(heads_of_group - head, Config::kChannels);
    group = rest / tiles % p.groups;
    chunk = rest / tiles / p.groups;
    first = number % blocks * kPieces;
    first_output = first / W::kPerOutput;
    count = (min(first + kPieces, pieces) - 1) / W::kPerOutput - first_output + 1;
    split = int(threadIdx.x) / kWarp / W::kSets;
  }

  __device__ int first_of_warp() const {
    return first + int(threadIdx.x) / kWarp % W::kSets * Config::kPieces;
  }

  // The bias of an output has its sum in one block only: that of the output's first piece.
  __device__ bool sums_bias(int o) const {
    const int piece = (first_output + o) * W::kPerOutput;
    return o < count && piece >= first && piece < first + kPieces;
  }
};

// The pieces of a warp and their sums.
template <class Config>
struct WeightWarp {
  using S = Tile<Config>;
  using W = WeightSizes<Config>;
  static constexpr int kPieces = Config::kPieces, kTaps = Config::kTaps;
  static constexpr int kChannels = Config::kChannels;
  static constexpr int kWarps = Config::kThreads / kWarp;
  static constexpr int kBiases = (Config::kOutputs + kWarps - 1) / kWarps;
  float sum[kPieces][kTaps][kChannels];
  float bias[kBiases];     // of outputs warp, warp + kWarps .. of the tile
  int place_of[kPieces];   // of the lane in the tile, for row 0 of the strip
  int run_of[kPieces];     // which taps of their row of taps
  int warp, lane;

  __device__ explicit WeightWarp(const WeightBlock<Config>& block)
      : warp(threadIdx.x / kWarp), lane(threadIdx.x % kWarp) {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      // Pieces after the last do what the last does; nobody stores their sums.
      const int piece = min(block.first_of_warp() + n, block.pieces - 1);
      run_of[n] = run(piece);
      place_of[n] = ((output(piece) - block.first_output) * S::kRows + Config::kKh - 1 - u(piece)) *
                        (S::kWidth / 4) +
                    run_of[n] * (kTaps / 4) * Config::kKeyStep + lane;
#pragma unroll
      for (int s = 0; s < kTaps; ++s) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          sum[n][s][c] = 0;
        }
      }
    }
#pragma unroll
    for (int b = 0; b < kBiases; ++b) {
      bias[b] = 0;
    }
  }

  __device__ static int output(int piece) { return piece / W::kPerOutput; }
  __device__ static int u(int piece) { return piece % W::kPerOutput / W::kRuns; }
  __device__ static int run(int piece) { return piece % W::kRuns; }

  template <bool kExact>
  __device__ void multiply(int n, int s, int c, const float (&x)[4], const float4& weight) {
    const float w[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (!kExact || (exists(x[k]) && exists(w[k]))) {
        sum[n][s][c] += w[k] * x[k];
      }
    }
  }

  // Row `row` of the strip. The compiler reads each float4 once: of the two loops the outer one is
  // that which leaves fewer of them in registers.
  template <bool kExact>
  __device__ void add(const float4* tile, const float4* table, int row) {
    constexpr bool kHeadsOutside = 4 * kChannels > kPieces * (kTaps + 3);
#pragma unroll
    for (int i = 0; i < (kHeadsOutside ? kChannels : kPieces); ++i) {
      const int at = kExact ? opaque(row) : row;  // what is read is not held from turn to turn
#pragma unroll
      for (int s = 0; s < kTaps; ++s) {
#pragma unroll
        for (int j = 0; j < (kHeadsOutside ? kPieces : kChannels); ++j) {
          const int n = kHeadsOutside ? j : i, c = kHeadsOutside ? i : j;
          if (W::kRuns > 1 && run_of[n] * kTaps + s >= Config::kKw) {
            continue;
          }
          float x[4];
          window(tile + place_of[n] + at * (S::kWidth / 4), S::kSkip + s * Config::kKeyStep, x);
          multiply<kExact>(n, s, c, x, table[(c * Config::kRows + at) * kWarp + lane]);
        }
      }
    }
  }

  __device__ void add_bias(const float4* tile, const WeightBlock<Config>& block, int first_tap) {
    constexpr int kOwn = Config::kKw - 1 - Config::kKw / 2;  // tap that reads a key's own dy
#pragma unroll
    for (int b = 0; b < kBiases; ++b) {
      const int o = warp + b * kWarps;
      if (!block.sums_bias(o)) {
        continue;
      }
      const float4* line =
          tile + (o * S::kRows + Config::kKh - 1 - first_tap) * (S::kWidth / 4) + lane;
#pragma unroll 2
      for (int row = 0; row < Config::kRows; ++row) {
        float x[4];
        window(line + row * (S::kWidth / 4), S::kSkip + kOwn * Config::kKeyStep, x);
        bias[b] += x[0] + x[1] + (x[2] + x[3]);
      }
    }
  }

  // The sums of this warp: one of those that make up an element.
  __device__ void store(const MultiTokenParams& p, const WeightBlock<Config>& block) {
    float* partial = static_cast<float*>(p.partial) + int64(block.chunk) * Config::kSplits;
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const int piece = block.first_of_warp() + n;
      if (piece >= block.pieces) {
        break;
      }
      const int64 head_out = block.group * block.outputs + output(piece);
#pragma unroll
      for (int s = 0; s < kTaps; ++s) {
        const int v = Config::kKw - 1 - run(piece) * kTaps - s;
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          const float total = warp_sum(sum[n][s][c]);
          if (lane == 0 && v >= 0 && c < block.heads) {
            const int64 element =
                ((head_out * block.heads_of_group + block.head + c) * Config::kKh + u(piece)) *
                    Config::kKw + v;
            partial[element * p.chunks + block.split] = total;
          }
        }
      }
    }
    if (!p.d_bias || block.head != 0) {
      return;
    }
    const int64 weights =
        int64(p.heads_out) * block.heads_of_group * (Config::kKh * Config::kKw);
#pragma unroll
    for (int b = 0; b < kBiases; ++b) {
      const int o = warp + b * kWarps;
      const float total = warp_sum(bias[b]);
      if (lane < Config::kSplits && block.sums_bias(o)) {  // one sum for all splits
        const int64 element = weights + block.group * block.outputs + block.first_output + o;
        partial[element * p.chunks + lane] = lane == 0 ? total : 0;
      }
    }
  }
};

template <class Config>
__device__ void multi_token_tile_weight(const MultiTokenParams& p) {
  using S = Tile<Config>;
  using W = WeightSizes<Config>;
  extern __shared__ float4 tile_shared[];
  float4* tile = tile_shared;
  float4* table = tile_shared + S::kFloats / 4;

  const WeightBlock<Config> block(p, int(blockIdx.x));
  WeightWarp<Config> mine(block);
  const int batch = int(p.batch), strips = batch * TilePlace<Config>::strips(p);
#pragma unroll 1
  for (int strip = block.chunk; strip < strips; strip += p.chunks / Config::kSplits) {
    const TilePlace<Config> place(p, strip % batch, block.group, strip / batch);
#pragma unroll 1
    for (int j0 = 0; j0 <= place.last; j0 += S::kKeys) {
      __syncthreads();  // tile and table are free again
      bool finite = fill_dy<Config>(
          p, place, block.group * block.outputs + block.first_output, block.count, j0, tile);
      finite = fill_p<Config>(p, place, block.group * block.heads_of_group + block.head,
                              block.heads, j0, table) && finite;
      finite = __syncthreads_and(finite);  // tile and table are readable
      if (p.d_bias && block.head == 0) {
        mine.add_bias(tile, block, place.first_tap);
      }
#pragma unroll 1
      for (int row = block.split; row < Config::kRows; row += Config::kSplits) {
        const int query = place.query + row * place.step;
        if (query > place.last || j0 > query) {
          continue;
        }
        if (finite) {
          mine.template add<false>(tile, table, row);
        } else {
          mine.template add<true>(tile, table, row);
        }
      }
    }
  }
  mine.store(p, WeightBlock<Config>(p, opaque(int(blockIdx.x))));
}
