// multi_token_strip_fwd.cu: multi-token attention, forward, a strip of query rows per block.
//
//   P[c, i, :] = softmax or sparsemax of scores[c, i, 0..i];  P = 0 for j > i, outside the matrix
//   y[o, i, j] = sum_{c, u, v} weight[o, c, u, v] * P[c, i + u * d0 - r0, j + v * d1 - c0]
//                + bias[o]  for j <= i, else 0;  c runs over the heads of o's group
//
// Shapes    scores (batch, heads_in, seq, seq), unit stride on the last axis;  weight, bias: any
//           strides;  y (batch, heads_out, seq, seq), contiguous
// Grid      one block per (strip of kRows queries, item, group), the longest strips first
// Block     kThreads; after the statistics every warp walks key tiles of its own, no barrier
//
//             keys j ->  tile of kColumns keys
//           +---------+---------+---------+       rows of a tile: kRows + (kh - 1) d0, of which
//   halo    | \  :    |         |  zeros  |       the halo is computed again by the next strip
//   strip   |   \ P   |  tile   |  zeros  |       columns: kColumns + (kw - 1) d1
//   halo    |     \:  |         |         |
//           +---------+---------+---------+
//
// Pipeline  1. zeros of y right of the last tile, which depend on nothing
//           2. statistics of all rows of the strip and its halo: a warp takes kAtOnce rows at once,
//              reads each once in packs of 16 bytes (running largest number and sum)
//           3. barrier: statistics, kernel weights and bias are in shared memory
//           4. each warp: read scores again (from cache), write P of a tile to its own shared
//              memory, convolve, write y
// Matrix    16-bit elements: P is rounded to T, heads innermost in groups of four ("quads"), so
//           that one 8-byte read is a whole column of a B fragment. A product is
//             (16 = outputs x query rows) x (16 = four taps of a quad) x (8 keys);
//           with fewer than 16 outputs the rest of the 16 are neighbouring query rows, whose taps
//           that do not exist have weight 0. Key n of fragment q is key 8 (n / 2) + 2 q + n % 2 of
//           32, so that a thread ends with 8 neighbouring keys of one row of y: one 16-byte write.
//           A NaN would spread through those zero weights: rows of P that are NaN (they always are
//           so as a whole) enter as 0, and the outputs that they reach are set to NaN afterwards.
// Cores     float32: a thread computes 4 outputs of 4 keys, P in float32, FMAs
// Memory    scores: once from memory and once from cache, (kRows + (kh - 1) d0) / kRows times;
//           y: once. Shared: weights, statistics and one tile per warp (Strip::kShared bytes)
// Accuracy  statistics and sums in float32; P rounded to T where products are on matrix units
// Limits    kernel, dilation and heads of a group are compile-time values; kVector divides seq and
//           the strides of scores, and kVector elements are the alignment of scores
// Config    T, kMatrix, kSparsemax (then shift and factor come from multi_token_statistics);
//           kChannels, kOutputs: heads of a group; kKh, kKw, kRowStep, kColumnStep: kernel and
//           dilation; kRows, kColumns: strip and tile; kVector: elements per access of scores and
//           y; kAtOnce, kLoads: rows and packs in flight per lane in the statistics
// Sources   Golovneva et al., "Multi-Token Attention", 2025; online softmax: Milakov and
//           Gimelshein, 2018
#include "common/params.cuh"
#include "common/types.cuh"
#include "common/reduce.cuh"
#include "common/mma.cuh"
#include "common/multi_token.cuh"
#include "common/multi_token_strip.cuh"

__device__ constexpr int round_up(int x, int step) { return (x + step - 1) / step * step; }

// Sizes that follow from Config, and the places of things in shared memory (bytes).
template <class Config>
struct Strip {
  using T = typename Config::T;
  static constexpr int kWarps = Config::kThreads / kWarp;
  static constexpr int kReach = (Config::kKh - 1) * Config::kRowStep;
  static constexpr int kColumnReach = (Config::kKw - 1) * Config::kColumnStep;
  static constexpr int kBefore = Config::kKw / 2 * Config::kColumnStep;  // columns left of a key
  static constexpr int kTileRows = Config::kRows + kReach;
  static constexpr int kQuads = (Config::kChannels + 3) / 4;
  static constexpr int kPadded = 4 * kQuads;

  // Tile. A row starts at key j0 - kLeft, so that what is written at once stays aligned.
  static constexpr int kLeft = round_up(kBefore, !Config::kMatrix ? 4 : kQuads == 1 ? 2 : 1);
  static constexpr int kWidth = kLeft + Config::kColumns + kColumnReach - kBefore;
  static constexpr int kCell = Config::kMatrix ? kPadded * 2 : 4;  // bytes of a column in a row
  // Matrix: an odd number of 16 bytes modulo 64. Where there is one quad, the four taps of a
  // fragment are rows, and keys n and n + 2 lie 64 bytes apart: all banks are used once.
  // Cores: whole float4, and room for the last thread's window.
  static constexpr int kStride = Config::kMatrix
      ? round_up(kWidth * kCell - 16, 64) + (kQuads == 2 ? 32 : 16)
      : round_up(kWidth + 4, 4) * 4;
  static constexpr int kTile = (Config::kMatrix ? 1 : Config::kChannels) * kTileRows * kStride;

  // Matrix products: of 16 rows kOut are outputs, times kGroup query rows.
  static constexpr int kOut = Config::kOutputs <= 4 ? 4 : Config::kOutputs <= 8 ? 8 : 16;
  static constexpr int kGroup = 16 / kOut;
  static constexpr int kMany = (Config::kOutputs + kOut - 1) / kOut;  // products over outputs
  static constexpr int kGroupRows = kGroup + kReach;
  static constexpr int kTaps = kGroupRows * Config::kKw * kQuads;
  static constexpr int kSteps = (kTaps + 3) / 4;

  // Cores: outputs in fours.
  static constexpr int kFours = (Config::kOutputs + 3) / 4;

  static constexpr int kTableWords = Config::kMatrix
      ? kSteps * kMany * kWarp * 4
      : kFours * Config::kChannels * Config::kKh * Config::kKw * 4;
  static constexpr int kOffsets = kTableWords * 4;
  static constexpr int kBias = kOffsets + (Config::kMatrix ? kSteps * 16 : 0);
  static constexpr int kStatistics = kBias + round_up(Config::kOutputs, 16) * 4;
  static constexpr int kTiles = kStatistics + kTileRows * kPadded * 8;
  static constexpr int kShared = kTiles + kWarps * kTile;
  static_assert(kShared == Config::kShared, "shared memory: configs/multi_token.py differs");
};

// What a block works on.
template <class Config>
struct StripPlace {
  using T = typename Config::T;
  const T* scores;             // (item, first head in of the group, 0, 0)
  T* y;                        // (item, first head out of the group, 0, 0)
  int64 item;
  int head_in, head_out;       // first ones of the group
  int query;                   // first row of the strip
  int origin;                  // first row of its tiles; may be negative
  bool aligned;                // y can be written in packs
  bool poisoned;               // some row is NaN
  const float2* statistics;    // [tile row][head]

  __device__ explicit StripPlace(const MultiTokenParams& p) {
    const int strips = (p.seq + Config::kRows - 1) / Config::kRows;
    const int pairs = int(gridDim.x) / strips;  // items times groups
    const int number = int(blockIdx.x) / pairs;
    const int group = int(blockIdx.x) % pairs % p.groups;
    item = int(blockIdx.x) % pairs / p.groups;
    head_in = group * Config::kChannels;
    head_out = group * Config::kOutputs;
    query = (strips - 1 - number) * Config::kRows;
    origin = query - p.row_origin;
    scores = row_start<T>(p.scores, p.scores_stride, item, head_in, 0);
    y = static_cast<T*>(p.y) + (item * p.heads_out + head_out) * p.seq * p.seq;
    aligned = reinterpret_cast<unsigned long long>(p.y) % (sizeof(T) * Config::kVector) == 0;
    poisoned = false;
  }

  __device__ static bool is_nan(float2 statistic) { return statistic.y != statistic.y; }
};

// ------------------------------------------------------------------------------------ statistics

// Rows of the strip and its halo, all heads of the group. Softmax: (largest, log2 of the sum) for
// matrix products, (largest, 1 / sum) else; sparsemax: (shift, factor). Returns whether this thread
// has written a NaN.
template <class Config>
__device__ bool strip_statistics(const MultiTokenParams& p, const StripPlace<Config>& place,
                                 float2* statistics) {
  using S = Strip<Config>;
  using T = typename Config::T;
  using Piece = RowPiece<T, Config::kVector>;
  constexpr int kTasks = S::kTileRows * Config::kChannels;
  bool found = false;

  if constexpr (Config::kSparsemax) {
    for (int task = threadIdx.x; task < kTasks; task += Config::kThreads) {
      const int row = task / Config::kChannels, head = task % Config::kChannels;
      const int query = place.origin + row;
      float2 s{0, 0};
      if (query >= 0 && query < p.seq) {
        const int64 n = (place.item * p.heads_in + place.head_in + head) * p.seq + query;
        s = float2{static_cast<const float*>(p.shift)[n], static_cast<const float*>(p.factor)[n]};
      }
      statistics[row * S::kPadded + head] = s;
      found = found || place.is_nan(s);
    }
  } else {
    const int lane = threadIdx.x % kWarp;
    for (int first = threadIdx.x / kWarp; first < kTasks; first += S::kWarps * Config::kAtOnce) {
      RunningSoftmax running[Config::kAtOnce];
      const T* start[Config::kAtOnce];
      int count[Config::kAtOnce];
      int most = 0;
#pragma unroll
      for (int a = 0; a < Config::kAtOnce; ++a) {
        const int task = first + a * S::kWarps;
        const int query = place.origin + task / Config::kChannels;
        const bool inside = task < kTasks && query >= 0 && query < p.seq;
        count[a] = inside ? query + 1 : 0;
        start[a] = place.scores + (inside ? task % Config::kChannels * p.scores_stride[1] +
                                            query * p.scores_stride[2] : 0);
        most = max(most, Piece(start[a], count[a]).packs);
      }
      for (int begin = 0; begin < most; begin += kWarp * Config::kLoads) {
        Pack<T, Piece::kCount> x[Config::kAtOnce][Config::kLoads];
#pragma unroll
        for (int a = 0; a < Config::kAtOnce; ++a) {
          const Piece piece(start[a], count[a]);
#pragma unroll
          for (int l = 0; l < Config::kLoads; ++l) {
            x[a][l] = piece.pack(begin + l * kWarp + lane);
          }
        }
#pragma unroll
        for (int l = 0; l < Config::kLoads; ++l) {
          if (begin + l * kWarp < most) {
#pragma unroll
            for (int a = 0; a < Config::kAtOnce; ++a) {
              running[a].add(x[a][l]);
            }
          }
        }
      }
#pragma unroll
      for (int a = 0; a < Config::kAtOnce; ++a) {
        running[a].reduce();
        const int task = first + a * S::kWarps;
        if (lane == 0 && task < kTasks) {
          const float sum = running[a].sum;
          const float2 s = count[a] == 0 ? float2{0, 0}
              : float2{running[a].largest, Config::kMatrix ? log2f(sum) : 1 / sum};
          statistics[task / Config::kChannels * S::kPadded + task % Config::kChannels] = s;
          found = found || place.is_nan(s);
        }
      }
    }
  }
  return found;
}

// The attention weight of score x in a row with these statistics.
template <class Config>
__device__ inline float attention_weight(float x, float2 s) {
  if constexpr (Config::kSparsemax) {
    return x < s.x ? 0 * s.y : x - s.x + s.y;
  } else if constexpr (Config::kMatrix) {
    return exp2f(fmaf(x - s.x, kLog2e, -s.y));
  } else {
    return exponential(x - s.x) * s.y;
  }
}

// --------------------------------------------------------------------------------- kernel weights

// weight[head_out + output, channel, u, v], or 0 outside the kernel or the group.
template <class Config>
__device__ inline float kernel_weight(const MultiTokenParams& p, int head_out, int output,
                                      int channel, int u, int v) {
  if (output >= Config::kOutputs || channel >= Config::kChannels || u < 0 || u >= Config::kKh) {
    return 0;
  }
  return widen(static_cast<const typename Config::T*>(p.weight)
                   [(head_out + output) * p.weight_stride[0] + channel * p.weight_stride[1] +
                    u * p.weight_stride[2] + v * p.weight_stride[3]]);
}

// The tap that lane group t of product `step` multiplies: row of the group's rows, column, quad.
template <class Config>
struct Tap {
  using S = Strip<Config>;
  int row, column, quad;
  bool exists;

  __device__ Tap(int step, int t) {
    const int n = step * 4 + t;
    exists = n < S::kTaps;
    quad = n % S::kQuads;
    row = n / S::kQuads % S::kGroupRows;
    column = exists ? n / S::kQuads / S::kGroupRows : 0;
  }
};

// Word n of the table of weights: matrix, A fragments [step][product][lane][register]; cores,
// float32 [four][channel][u][v][output of the four].
template <class Config>
__device__ inline unsigned table_word(const MultiTokenParams& p, int head_out, int n) {
  using S = Strip<Config>;
  if constexpr (Config::kMatrix) {
    const int reg = n % 4, lane = n / 4 % kWarp, many = n / 4 / kWarp % S::kMany;
    const Tap<Config> tap(n / 4 / kWarp / S::kMany, lane % 4);
    const int m = lane / 4 + reg % 2 * 8;
    const int output = many * S::kOut + m % S::kOut;
    const int above = tap.row - m / S::kOut;  // rows from the first tap of this query row
    const int u = tap.exists && above % Config::kRowStep == 0 ? above / Config::kRowStep : -1;
    const int channel = tap.quad * 4 + reg / 2 * 2;
    return pack<typename Config::T>(
        kernel_weight<Config>(p, head_out, output, channel, u, tap.column),
        kernel_weight<Config>(p, head_out, output, channel + 1, u, tap.column));
  } else {
    const int tap = n / 4 % (Config::kKh * Config::kKw);
    const int rest = n / 4 / (Config::kKh * Config::kKw);
    return __float_as_uint(kernel_weight<Config>(
        p, head_out, rest / Config::kChannels * 4 + n % 4, rest % Config::kChannels,
        tap / Config::kKw, tap % Config::kKw));
  }
}

// ------------------------------------------------------------------------------------------- tile

// Write P of kCount neighbouring columns of a tile row: four heads (matrix) or one (cores).
template <class Config, int kCount>
__device__ inline void fill_cells(const MultiTokenParams& p, const StripPlace<Config>& place,
                                  char* tile, int part, int row, int column, int slot) {
  using S = Strip<Config>;
  using T = typename Config::T;
  constexpr int kHeads = Config::kMatrix ? 4 : 1;
  const int query = place.origin + row;
  // Columns from the first on that are allowed, less one.
  const int allowed = query < 0 || query >= p.seq || column < 0 ? -1 : query - column;
  float w[kHeads][kCount] = {};
  if (allowed >= 0) {
    const int head = part * kHeads;
    const T* from = place.scores + head * p.scores_stride[1] + query * p.scores_stride[2] + column;
    Pack<T, kCount> x[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (head + h < Config::kChannels) {
        x[h].load(from + h * p.scores_stride[1]);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (head + h < Config::kChannels) {
        float2 s = place.statistics[row * S::kPadded + head + h];
        if (Config::kMatrix && place.is_nan(s)) {
          s = float2{0, 0};
          x[h].fill(negative_infinity<float>());  // weight 0
        }
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          w[h][k] = attention_weight<Config>(x[h][k], s);
        }
      }
    }
    if (allowed < kCount - 1) {
#pragma unroll
      for (int k = 1; k < kCount; ++k) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          w[h][k] = k <= allowed ? w[h][k] : 0.0f;
        }
      }
    }
  }
  if constexpr (Config::kMatrix) {
    char* to = tile + row * S::kStride + slot * S::kCell + part * 8;
    uint2 cell[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      cell[k] = uint2{pack<T>(w[0][k], w[1][k]), pack<T>(w[2][k], w[3][k])};
    }
    if constexpr (S::kQuads == 1 && kCount % 2 == 0) {
#pragma unroll
      for (int k = 0; k < kCount; k += 2) {
        *reinterpret_cast<uint4*>(to + k * S::kCell) =
            uint4{cell[k].x, cell[k].y, cell[k + 1].x, cell[k + 1].y};
      }
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        *reinterpret_cast<uint2*>(to + k * S::kCell) = cell[k];
      }
    }
  } else {
    float* to = reinterpret_cast<float*>(tile + (part * S::kTileRows + row) * S::kStride) + slot;
    Pack<float, kCount> cells;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      cells.word[k] = __float_as_uint(w[0][k]);
    }
    cells.store(to);
  }
}

// Fill a warp's tile for keys [j0, j0 + kColumns) with halos.
template <class Config>
__device__ inline void fill_tile(const MultiTokenParams& p, const StripPlace<Config>& place,
                                 char* tile, int j0, int lane) {
  using S = Strip<Config>;
  constexpr int kParts = Config::kMatrix ? S::kQuads : Config::kChannels;
  constexpr int kPacks = Config::kColumns / Config::kVector;
  // Lanes run along the packs of a 32-byte sector, then along heads and rows, whose cells lie in
  // different banks.
  constexpr int kSector = 32 / int(sizeof(typename Config::T)) / Config::kVector;
  static_assert(kPacks % kSector == 0, "whole sectors");
#pragma unroll 1
  for (int n = lane; n < kPacks * kParts * S::kTileRows; n += kWarp) {
    const int rest = n / kSector;
    const int part = rest % kParts, row = rest / kParts % S::kTileRows;
    const int x = (rest / kParts / S::kTileRows * kSector + n % kSector) * Config::kVector;
    fill_cells<Config, Config::kVector>(p, place, tile, part, row, j0 + x, S::kLeft + x);
  }
  if constexpr (S::kColumnReach > 0) {
#pragma unroll 1
    for (int n = lane; n < S::kColumnReach * kParts * S::kTileRows; n += kWarp) {
      const int part = n % kParts, row = n / kParts % S::kTileRows;
      int x = n / kParts / S::kTileRows - S::kBefore;
      x += x < 0 ? 0 : Config::kColumns;
      fill_cells<Config, 1>(p, place, tile, part, row, j0 + x, S::kLeft + x);
    }
  }
}

// ---------------------------------------------------------------------------------------- results

// Write kCount neighbouring keys of a row of y, 0 above the diagonal.
template <class Config, int kCount>
__device__ inline void store_keys(const MultiTokenParams& p, const StripPlace<Config>& place,
                                  int output, int query, int key, float (&value)[kCount]) {
  using T = typename Config::T;
  constexpr int kVector = Config::kVector;
  if (output >= Config::kOutputs || query >= p.seq) {
    return;
  }
  if (key + kCount - 1 > query) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      value[k] = key + k <= query ? value[k] : 0.0f;
    }
  }
  T* to = place.y + (int64(output) * p.seq + query) * p.seq + key;
  if (kVector > 1 && place.aligned) {
#pragma unroll
    for (int k = 0; k < kCount; k += kVector) {
      Pack<T, kVector> x;
#pragma unroll
      for (int i = 0; i < x.kWords; ++i) {
        if constexpr (sizeof(T) == 4) {
          x.word[i] = __float_as_uint(value[k + i]);
        } else {
          x.word[i] = pack<T>(value[k + 2 * i], value[k + (kVector > 1 ? 2 * i + 1 : 0)]);
        }
      }
      if (key + k < p.seq) {
        x.stream(to + k);
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (key + k < p.seq) {
        to[k] = narrow<T>(value[k]);
      }
    }
  }
}

// Zeros of y from key `begin` on, in the rows of the strip.
template <class Config>
__device__ inline void store_zeros(const MultiTokenParams& p, const StripPlace<Config>& place,
                                   int begin) {
  using T = typename Config::T;
  const int lane = threadIdx.x % kWarp;
  Pack<T, Config::kVector> zero;
  for (int i = 0; i < zero.kWords; ++i) {
    zero.word[i] = 0;
  }
  for (int n = threadIdx.x / kWarp; n < Config::kRows * Config::kOutputs;
       n += Strip<Config>::kWarps) {
    const int query = place.query + n % Config::kRows;
    if (query < p.seq) {
      T* to = place.y + (int64(n / Config::kRows) * p.seq + query) * p.seq;
      if (place.aligned) {
        for (int key = begin + lane * Config::kVector; key < p.seq;
             key += kWarp * Config::kVector) {
          zero.stream(to + key);
        }
      } else {
        for (int key = begin + lane; key < p.seq; key += kWarp) {
          to[key] = narrow<T>(0);
        }
      }
    }
  }
}

// Whether a tap of this output reads a row that is NaN.
template <class Config>
__device__ bool reads_nan(const StripPlace<Config>& place, int query, int key) {
  using S = Strip<Config>;
  bool found = false;
  for (int u = 0; u < Config::kKh; ++u) {
    const int row = query - place.query + u * Config::kRowStep;
    const int from_query = place.origin + row;
    for (int c = 0; c < Config::kChannels; ++c) {
      if (place.is_nan(place.statistics[row * S::kPadded + c])) {
        for (int v = 0; v < Config::kKw; ++v) {
          const int from_key = key + v * Config::kColumnStep - S::kBefore;
          found = found || (from_key >= 0 && from_key <= from_query);
        }
      }
    }
  }
  return found;
}

// Overwrite with NaN what NaN rows reach, where products have taken these rows as 0.
template <class Config>
__device__ void poison_tile(const MultiTokenParams& p, const StripPlace<Config>& place, int j0,
                            int lane) {
  using T = typename Config::T;
  __syncwarp();  // the results of the tile are written
#pragma unroll 1
  for (int n = lane; n < Config::kRows * Config::kColumns; n += kWarp) {
    const int query = place.query + n / Config::kColumns, key = j0 + n % Config::kColumns;
    if (query < p.seq && key <= query && reads_nan<Config>(place, query, key)) {
#pragma unroll 1
      for (int o = 0; o < Config::kOutputs; ++o) {
        place.y[(int64(o) * p.seq + query) * p.seq + key] =
            narrow<T>(0 * negative_infinity<float>());
      }
    }
  }
}

// ------------------------------------------------------------------------------------ convolution

template <class Config>
__device__ inline void convolve_matrix(const MultiTokenParams& p, const StripPlace<Config>& place,
                                       const char* shared, const char* tile, int j0, int lane) {
  using S = Strip<Config>;
  using T = typename Config::T;
  constexpr int kGroups = Config::kRows / S::kGroup;
  // Query rows that share a read of the A fragments. More than one costs registers; with wide
  // groups shared memory allows few blocks anyway, and its bandwidth is what limits.
  constexpr int kTogether = S::kMany > 1 && kGroups % 2 == 0 ? 2 : 1;
  const uint4* table = reinterpret_cast<const uint4*>(shared);
  const int* offsets = reinterpret_cast<const int*>(shared + S::kOffsets);
  const float* bias = reinterpret_cast<const float*>(shared + S::kBias);
  const int g = lane / 4, t = lane % 4;

#pragma unroll 1
  for (int chunk = 0; chunk < Config::kColumns * kGroups; chunk += 32 * kTogether) {
    const int columns = chunk / (32 * kGroups) * 32;
    const int group = chunk / 32 % kGroups;
    if (j0 + columns >= p.seq) {
      break;
    }
    float sum[kTogether][S::kMany][4][4];
#pragma unroll
    for (int many = 0; many < S::kMany; ++many) {
      const float low = bias[many * S::kOut + g % S::kOut];
      const float high = bias[many * S::kOut + (g + 8) % S::kOut];
#pragma unroll
      for (int i = 0; i < kTogether * 4; ++i) {
        float(&c)[4] = sum[i / 4][many][i % 4];
        c[0] = c[1] = low;
        c[2] = c[3] = high;
      }
    }
    const char* from = tile + group * S::kGroup * S::kStride +
                       (S::kLeft - S::kBefore + columns + g / 2 * 8 + g % 2) * S::kCell;
#pragma unroll(S::kSteps <= 5 ? S::kSteps : 1)
    for (int step = 0; step < S::kSteps; ++step) {
      uint4 a[S::kMany];
#pragma unroll
      for (int many = 0; many < S::kMany; ++many) {
        a[many] = table[(step * S::kMany + many) * kWarp + lane];
      }
      const char* cells = from + offsets[step * 4 + t];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const uint2 b = *reinterpret_cast<const uint2*>(
              cells + i * S::kGroup * S::kStride + 2 * q * S::kCell);
#pragma unroll
          for (int many = 0; many < S::kMany; ++many) {
            multiply<T>(sum[i][many][q], a[many].x, a[many].y, a[many].z, a[many].w, b.x,
                        b.y);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = g + half * 8;
        const int query = place.query + (group + i) * S::kGroup + m / S::kOut;
        const int key = j0 + columns + t * 8;
#pragma unroll
        for (int many = 0; many < S::kMany; ++many) {
          float value[8];
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            value[k] = sum[i][many][k / 2][half * 2 + k % 2];
          }
          store_keys<Config>(p, place, many * S::kOut + m % S::kOut, query, key, value);
        }
      }
    }
  }
}

template <class Config>
__device__ inline void convolve_cores(const MultiTokenParams& p, const StripPlace<Config>& place,
                                      const char* shared, const char* tile, int j0, int lane) {
  using S = Strip<Config>;
  static_assert(Config::kColumns == 64 && Config::kRows % 2 == 0, "16 x 2 threads of 4 keys");
  // A thread's keys and their halo, from a multiple of four columns on.
  constexpr int kSkip = S::kLeft - S::kBefore - (S::kLeft - S::kBefore) / 4 * 4;
  constexpr int kStart = S::kLeft - S::kBefore - kSkip;
  constexpr int kWindow = round_up(kSkip + 4 + S::kColumnReach, 4);
  const float* bias = reinterpret_cast<const float*>(shared + S::kBias);
  const int x = lane % 16 * 4;

#pragma unroll 1
  for (int n = 0; n < Config::kRows / 2 * S::kFours; ++n) {
    const int row = n / S::kFours * 2 + lane / 16;
    const int four = n % S::kFours;
    // Few additions round a large number: a row of taps has a sum of its own, the lowest row, where
    // weights of keys are smallest, comes first, and the bias last.
    float sum[4][4] = {};
#pragma unroll(Config::kKh * Config::kKw <= 9 ? Config::kKh : 1)
    for (int u = Config::kKh - 1; u >= 0; --u) {
      float part[4][4] = {};
#pragma unroll(Config::kKw <= 3 ? 2 : 1)
      for (int c = 0; c < Config::kChannels; ++c) {
        const float4* weight =
            reinterpret_cast<const float4*>(shared) +
            ((four * Config::kChannels + c) * Config::kKh + u) * Config::kKw;
        const char* from = tile + (c * S::kTileRows + row + u * Config::kRowStep) * S::kStride +
                           (kStart + x) * 4;
        float window[kWindow];
#pragma unroll
        for (int k = 0; k < kWindow; k += 4) {
          const float4 v = *reinterpret_cast<const float4*>(from + k * 4);
          window[k] = v.x, window[k + 1] = v.y, window[k + 2] = v.z, window[k + 3] = v.w;
        }
#pragma unroll
        for (int v = 0; v < Config::kKw; ++v) {
          const float4 w = weight[v];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float value = window[kSkip + v * Config::kColumnStep + k];
            part[k][0] += w.x * value;
            part[k][1] += w.y * value;
            part[k][2] += w.z * value;
            part[k][3] += w.w * value;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        sum[i / 4][i % 4] += part[i / 4][i % 4];
      }
    }
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const float b = bias[four * 4 + o];
      float value[4] = {sum[0][o] + b, sum[1][o] + b, sum[2][o] + b, sum[3][o] + b};
      store_keys<Config>(p, place, four * 4 + o, place.query + row, j0 + x, value);
    }
  }
}

// ----------------------------------------------------------------------------------------- kernel

template <class Config>
__device__ void multi_token_strip(const MultiTokenParams& p) {
  using S = Strip<Config>;
  extern __shared__ uint4 strip_shared[];
  char* shared = reinterpret_cast<char*>(strip_shared);
  unsigned* table = reinterpret_cast<unsigned*>(shared);
  const int thread = threadIdx.x, warp = thread / kWarp;

  StripPlace<Config> place(p);
  const int tiles = (min(place.query + Config::kRows, p.seq) - 1) / Config::kColumns + 1;
  store_zeros<Config>(p, place, tiles * Config::kColumns);

  // Small tables are read before the scores, so that the two waits are one.
  constexpr int kEach = (S::kTableWords + Config::kThreads - 1) / Config::kThreads;
  constexpr int kAhead = kEach <= 3 ? kEach : 0;
  unsigned ahead[kAhead + 1];
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    const int n = thread + k * Config::kThreads;
    ahead[k] = n < S::kTableWords ? table_word<Config>(p, place.head_out, n) : 0;
  }

  float2* statistics = reinterpret_cast<float2*>(shared + S::kStatistics);
  place.statistics = statistics;
  const bool found = strip_statistics<Config>(p, place, statistics);

#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    const int n = thread + k * Config::kThreads;
    if (n < S::kTableWords) {
      table[n] = ahead[k];
    }
  }
#pragma unroll 1
  for (int n = thread + kAhead * Config::kThreads; n < S::kTableWords; n += Config::kThreads) {
    table[n] = table_word<Config>(p, place.head_out, n);
  }
  if constexpr (Config::kMatrix) {
    for (int n = thread; n < S::kSteps * 4; n += Config::kThreads) {
      // A tap that does not exist has weight 0; it reads what the first one reads.
      const Tap<Config> tap(n / 4, n % 4);
      reinterpret_cast<int*>(shared + S::kOffsets)[n] =
          tap.exists ? tap.row * S::kStride + tap.column * Config::kColumnStep * S::kCell +
                       tap.quad * 8 : 0;
    }
  }
  for (int o = thread; o < round_up(Config::kOutputs, 16); o += Config::kThreads) {
    const auto* bias = static_cast<const typename Config::T*>(p.bias);
    reinterpret_cast<float*>(shared + S::kBias)[o] =
        bias && o < Config::kOutputs ? widen(bias[(place.head_out + o) * p.bias_stride]) : 0;
  }
  place.poisoned = __syncthreads_or(found);  // table, offsets, bias, statistics readable

  char* tile = shared + S::kTiles + warp * S::kTile;
#pragma unroll 1
  for (int n = warp; n < tiles; n += S::kWarps) {
    const int j0 = n * Config::kColumns;
    // Unknown to the compiler, so that what follows from it is computed again in every tile and
    // does not stay in registers from tile to tile.
    int lane = thread % kWarp;
    asm volatile("" : "+r"(lane));
    fill_tile<Config>(p, place, tile, j0, lane);
    __syncwarp();  // the tile is full
    if constexpr (Config::kMatrix) {
      convolve_matrix<Config>(p, place, shared, tile, j0, lane);
      if (place.poisoned) {
        poison_tile<Config>(p, place, j0, lane);
      }
    } else {
      convolve_cores<Config>(p, place, shared, tile, j0, lane);
    }
    __syncwarp();  // the tile is free again
  }
}
