// multi_token_heads_fwd.cu: multi-token attention, forward, up to 32 heads of a group on matrix
// units.
//
//   P[c, i, :] = softmax or sparsemax of scores[c, i, 0..i];  P = 0 for j > i, outside the matrix
//   y[o, i, j] = sum_{c, u, v} weight[o, c, u, v] * P[c, i + u - r0, j + v - c0] + bias[o]
//                for j <= i, else 0
//
// Shapes    scores: unit key stride, rows and pointer multiples of kVector elements; weight, bias:
//           any strides; y: contiguous;  shift, factor (batch, heads_in, seq): the largest score
//           of a row and log2 of its sum, or those of sparsemax;  table: fragments of weights, by
//           group
// Passes    multi_token_band_statistics  multi_token_band_fwd.cu (sparsemax: multi_token_fwd.cu)
//           multi_token_heads_table      weights -> table
//           multi_token_heads            y
// Tile      common/multi_token_heads.cuh: P of the rows and columns that taps reach, rounded to T
// Grid      (strip of 8 rows, item, group, 256 keys), long rows first; two blocks a multiprocessor
// Block     tiles of 64 keys, one after the other:
//             barrier | P -> tile | barrier | y in registers, written
//           A warp has 2 rows x 32 keys of all heads. Above the diagonal zeros are written, and
//           nothing is read
// Memory    scores are read twice (the second time 10/8 of the rows, the halo from L2), y written
//           once
// Accuracy  P is rounded to T, as the textbook does; sums are float, the bias joins them last
// Limits    dilation 1; at most 9 taps and 32 heads in and out of a group
// Config    T: f16 or bf16; kSparsemax; kIn, kOut: heads of a group; kKh, kKw; kVector: elements
//           per access; kShared: bytes; kThreads: 256
// Sources   as multi_token_fwd.cu
#include "common/multi_token_heads.cuh"

extern __shared__ uint4 heads_shared[];

template <class Config>
struct Sizes {
  static constexpr int kRows = 8, kKeys = 64, kSpan = 256;  // of a tile, of a block
  static constexpr int kHeight = 2;                         // rows of a warp
  using Tile = HeadTile<Config, kRows, kKeys, Config::kKw / 2>;
  static constexpr int kWords = kFragments<Config> * kWarp;  // of 16 bytes, of the table
  static constexpr int kTable = Tile::kBytes;
  static constexpr int kStatistics = kTable + kWords * 16;                // [row][head]
  static constexpr int kBias = kStatistics + Tile::kRows * kHeads * 8;
  static constexpr int kStrip = kBias + kHeads * 4;                       // what the block does
  static constexpr int kBytes = kStrip + 16;
  static_assert(Config::kThreads / kWarp == kRows / kHeight * (kKeys / 32), "a tile");
  static_assert(Config::kIn <= kHeads && Config::kOut <= kHeads, "heads of a tile");

  // First row of a thread's warp in the tile, and which 32 keys.
  __device__ static int row(unsigned thread) {
    return thread / kWarp % (kRows / kHeight) * kHeight;
  }
  __device__ static int part(unsigned thread) { return thread / kWarp / (kRows / kHeight); }
};

template <class Config>
__device__ void multi_token_heads_table(const MultiTokenParams& p) {
  using T = typename Config::T;
  constexpr int kWords = kFragments<Config> * kWarp;
  constexpr int kBlocks = (kWords + Config::kThreads - 1) / Config::kThreads;  // of a group
  const int group = int(blockIdx.x) / kBlocks;
  const int n = int(blockIdx.x) % kBlocks * Config::kThreads + threadIdx.x;
  const int g = n % kWarp / 4, q = n % 4, f = n / kWarp, m = f % 2;
  const int down = f / 2 % Config::kKh, right = f / 2 / Config::kKh % Config::kKw;
  const int k = f / 2 / (Config::kKh * Config::kKw);
  if (n < kWords) {
    unsigned word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      word[i] = weight_pair<T, false>(p, group, 16 * m + i % 2 * 8 + g, 16 * k + i / 2 * 8 + 2 * q,
                                      down, right);
    }
    static_cast<uint4*>(p.table)[group * kWords + n] = {word[0], word[1], word[2], word[3]};
  }
}

template <class Config>
__device__ inline float attention_weight(float x, float2 s) {
  if constexpr (Config::kSparsemax) {
    return x < s.x ? 0 * s.y : x - s.x + s.y;
  } else {
    return exp2f(fmaf(x - s.x, kLog2e, -s.y));
  }
}

// Whether there is P of this head of the group at a place.
template <class Config>
__device__ inline bool inside(const MultiTokenParams& p, int query, int head, int key) {
  return query < p.seq && key >= 0 && key <= query && head < Config::kIn;
}

// The bits of one score.
template <class Config>
__device__ inline unsigned short read_one(const MultiTokenParams& p, const Strip& strip, int query,
                                          int head, int key) {
  using T = typename Config::T;
  const T* row = row_start<T>(p.scores, p.scores_stride, strip.item,
                              int64(strip.group) * Config::kIn + head, query);
  return inside<Config>(p, query, head, key)
             ? __ldg(reinterpret_cast<const unsigned short*>(row + key)) : 0;
}

// P of four heads of eight columns, from `head` of the group and `key` on.
template <class Config>
__device__ inline void read_p(const MultiTokenParams& p, const Strip& strip, int query, int head,
                              int key, const float2* statistics,
                              Pack<typename Config::T, 8> (&x)[4]) {
  using T = typename Config::T;
  const int last = query >= 0 && query < p.seq && key >= 0 ? query : kNoKey;
  const T* row = row_start<T>(p.scores, p.scores_stride, strip.item,
                              int64(strip.group) * Config::kIn + head, query);
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    x[h] = read_eight<Config>(row, key, head + h < Config::kIn ? last : kNoKey);
    row += p.scores_stride[1];
  }
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    const float2 s = statistics[head + h];
    const int count = head + h < Config::kIn ? last - key + 1 : 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float low, high;
      unpack<T>(x[h].word[k], low, high);
      x[h].word[k] = pack<T>(2 * k < count ? attention_weight<Config>(low, s) : 0,
                             2 * k + 1 < count ? attention_weight<Config>(high, s) : 0);
    }
  }
}

// A lane's part of y in the tile of keys `tile_key` ..: eight keys of two rows of four heads.
template <class Config>
struct OutputLane {
  using T = typename Config::T;
  using S = Sizes<Config>;
  int head, query, key, seq;
  T* y;

  __device__ OutputLane(const MultiTokenParams& p, const Strip& strip, int tile_key) : seq(p.seq) {
    const unsigned thread = opaque(threadIdx.x);
    head = thread % kWarp / 4;
    query = strip.query + S::row(thread);
    key = tile_key + S::part(thread) * 32 + thread % 4 * 8;
    const int64 output = int64(strip.item) * p.heads_out + strip.group * Config::kOut + head;
    y = static_cast<T*>(p.y) + (output * seq + query) * seq + key;
  }

  __device__ void write(int row, int i, const Pack<T, 8>& x) const {
    if (query + row < seq && head + 8 * i < Config::kOut) {
      write_eight<Config>(y + (int64(8 * i) * seq + row) * seq, seq - key, x);
    }
  }

  __device__ void write_zeros() const {
    Pack<T, 8> zero;
    zero.fill(0);
#pragma unroll
    for (int n = 0; n < S::kHeight * 4; ++n) {
      write(n / 4, n % 4, zero);
    }
  }

  __device__ void write_sums(const float (&sum)[S::kHeight][2][4][4], const float* bias) const {
#pragma unroll
    for (int row = 0; row < S::kHeight; ++row) {
      const int count = query + row - key + 1;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float b = bias[head + 8 * i];
        Pack<T, 8> x;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const float* s = sum[row][i / 2][t] + i % 2 * 2;
          x.word[t] = pack<T>(2 * t < count ? s[0] + b : 0, 2 * t + 1 < count ? s[1] + b : 0);
        }
        write(row, i, x);
      }
    }
  }
};

// Copies table, statistics and bias, unless all that the block writes is 0, and stores the strip.
template <class Config>
__device__ inline void begin_strip(const MultiTokenParams& p, char* shared) {
  using T = typename Config::T;
  using S = Sizes<Config>;
  const Strip strip = Strip::of<S::kRows, S::kSpan>(p);
  if (threadIdx.x == 0) {
    *reinterpret_cast<Strip*>(shared + S::kStrip) = strip;
  }
  if (strip.key < min(strip.query + S::kRows, p.seq)) {
    uint4* table = reinterpret_cast<uint4*>(shared + S::kTable);
    const uint4* from = static_cast<const uint4*>(p.table) + strip.group * S::kWords;
    for (int n = threadIdx.x; n < S::kWords; n += Config::kThreads) {
      copy_async(shared_address(table + n), from + n, 16);
    }
    float2* statistics = reinterpret_cast<float2*>(shared + S::kStatistics);
    for (int n = threadIdx.x; n < S::Tile::kRows * kHeads; n += Config::kThreads) {
      const int query = strip.query - p.row_origin + n / kHeads, head = n % kHeads;
      if (query >= 0 && query < p.seq && head < Config::kIn) {
        const int64 of_row =
            (int64(strip.item) * p.heads_in + strip.group * Config::kIn + head) * p.seq + query;
        statistics[n] = {static_cast<const float*>(p.shift)[of_row],
                         static_cast<const float*>(p.factor)[of_row]};
      }
    }
    if (threadIdx.x < kHeads) {
      const int head = strip.group * Config::kOut + threadIdx.x;
      const bool exists = p.bias && threadIdx.x < Config::kOut;
      reinterpret_cast<float*>(shared + S::kBias)[threadIdx.x] =
          exists ? widen(static_cast<const T*>(p.bias)[head * p.bias_stride]) : 0;
    }
  }
  copies_end_group();
  wait_for_copies<0>();
  __syncthreads();  // all of these are readable
}

template <class Config>
__device__ void multi_token_heads(const MultiTokenParams& p) {
  using T = typename Config::T;
  using S = Sizes<Config>;
  using Tile = typename S::Tile;
  static_assert(S::kBytes == Config::kShared, "shared memory: configs/multi_token_fwd.py differs");
  char* shared = reinterpret_cast<char*>(heads_shared);
  const float2* statistics = reinterpret_cast<const float2*>(shared + S::kStatistics);
  const Strip* stored = reinterpret_cast<const Strip*>(shared + S::kStrip);
  begin_strip<Config>(p, shared);
#pragma unroll 1
  for (int tile = 0; tile < S::kSpan / S::kKeys; ++tile) {
    const int key = Strip::at(stored).key + tile * S::kKeys;
    if (key >= p.seq) {
      break;
    }
    const int last = min(stored->query + S::kRows, p.seq) - 1;
    if (key <= last) {
      __syncthreads();  // the tile is free again
      const Strip strip = Strip::at(stored);
      const int query = strip.query - p.row_origin, first = key - Tile::kBefore;
      fill_tile<Config, Tile>(
          shared,
          [&](int row, int head, int column, Pack<T, 8>(&x)[4]) {
            read_p<Config>(p, strip, query + row, head, first + column, statistics + row * kHeads,
                           x);
          },
          [&](int row, int head, int column) {
            return read_one<Config>(p, strip, query + row, head, first + column);
          },
          [&](unsigned short bits, int row, int head, int column) {
            const float w =
                attention_weight<Config>(widen(T{bits}), statistics[row * kHeads + head]);
            return narrow<T>(inside<Config>(p, query + row, head, first + column) ? w : 0).bits;
          });
      __syncthreads();  // the tile is readable
    }
    const unsigned thread = opaque(threadIdx.x);
    const int row = S::row(thread), part = S::part(thread);
    if (key + part * 32 > min(stored->query + row + S::kHeight - 1, last)) {
      OutputLane<Config>(p, Strip::at(stored), key).write_zeros();
      continue;
    }
    float sum[S::kHeight][2][4][4] = {};
    convolve<Config, Tile, S::kHeight, Config::kIn>(
        sum, shared_address(shared) + row * Tile::kPitch + part * 32 * kPosition,
        reinterpret_cast<const uint4*>(shared + S::kTable));
    OutputLane<Config>(p, Strip::at(stored), key)
        .write_sums(sum, reinterpret_cast<const float*>(shared + S::kBias));
  }
}
