// multi_token_heads_bwd.cu: multi-token attention with softmax, backward, up to 32 heads of a group
// on matrix units.
//
//   dP[c, i, j] = sum_{o, u, v} weight[o, c, u, v] * dy[o, i - u + r0, j - v + c0]
//   mean(c, i)  = sum_j P dP;   d_scores = P * (dP - mean);   j <= i throughout
//   d_weight[o, c, u, v] = sum_{batch, i, j} P[c, i, j] * dy[o, i - u + r0, j - v + c0]
//   d_bias[o]   = sum_{batch, i, j} dy[o, i, j]
//
// Shapes    scores, dy: unit key stride, rows and pointers multiples of kVector elements; weight:
//           any strides; d_scores: contiguous;  partial (elements of d_weight then d_bias, chunks),
//           float;  shift, factor (batch, heads_in, seq): the largest score of a row and log2 of
//           its sum;  mean: the same shape;  table: fragments of weights, for both products, by
//           group
// Passes    multi_token_band_statistics  multi_token_band_fwd.cu: shift and factor
//           multi_token_heads_table      weights -> table
//           multi_token_heads_weight     d_weight and d_bias of a chunk of rows, and all means
//           multi_token_heads_scores     d_scores
//           multi_token_d_weight         multi_token_bwd.cu: the sums of the chunks
// Tile      common/multi_token_heads.cuh: dy of the rows that taps reach, masked
//
// Weight    grid: (chunk, group), two blocks a multiprocessor. A block takes two rows of P at a
//           time, longest first, and walks along their keys, 128 at a time:
//             barrier | scores asked for, dy -> tile, P -> fragments | barrier | products
//           A warp has one of the rows and eight outputs, for all heads c and taps:
//             d_weight (c) x (8 outputs, a tap) += P (c x keys) times dy (keys x outputs, shifted)
//           At the end of a row these sums times the weights are its mean, so that dP is not
//           needed for it; then they join the block's totals in shared memory
// Scores    grid: (strip of 8 rows, item, group, 256 keys), long rows first. Tiles of 64 keys, one
//           after the other:
//             scores asked for | barrier | dy -> tile | barrier | dP in registers, P, d_scores
//           A warp has 2 rows x 32 keys of all heads
// Memory    scores are read three times, dy twice (4/2 and 10/8 of the rows, mostly from L2),
//           d_scores written once, zeros above the diagonal without reading anything
// Not finite  a NaN reaches what its taps reach, in dP and d_weight. A mean is also NaN where such
//           a dy meets only what lies above the diagonal, which takes kernels that reach further up
//           than to the left: row i, where that dy is right of i + kKw / 2
// Accuracy  P is rounded to T for d_weight and the mean, as the textbook does; P, dP and all sums
//           are float, and join totals at the end of a row
// Limits    dilation 1; at most 9 taps and 32 heads in and out of a group
// Config    T: f16 or bf16; kIn, kOut: heads of a group; kKh, kKw; kVector: elements per access;
//           kStaged: scores wait in shared memory while dP is computed; kShared: bytes;
//           kThreads: 256
// Sources   as multi_token_fwd.cu
#include "common/multi_token_heads.cuh"

extern __shared__ uint4 heads_shared[];

// What both passes share.
template <class Config>
struct Heads {
  static constexpr int kTaps = Config::kKh * Config::kKw;
  static constexpr int kLeft = Config::kKw - 1 - Config::kKw / 2;  // columns of dy left of a key
  static constexpr int kTable = kFragments<Config> * kWarp;        // 16-byte words, for dP
  static constexpr int kShares = 4 * kTaps * kWarp;                // for the means
  static_assert(Config::kThreads == 256 && kTaps <= 9, "sums fit the registers");
  static_assert(Config::kIn <= kHeads && Config::kOut <= kHeads, "heads of a tile");
};

template <class Config>
__device__ inline float attention_weight(float x, float2 s) {
  return exp2f(fmaf(x - s.x, kLog2e, -s.y));
}

// One element of dy; 0 above the diagonal and outside.
template <class Config>
__device__ inline unsigned short read_one_dy(const MultiTokenParams& p, int item, int group,
                                             int query, int head, int key) {
  using T = typename Config::T;
  const bool inside = query < p.seq && key >= 0 && key <= query && head < Config::kOut;
  const T* row = row_start<T>(p.dy, p.dy_stride, item, int64(group) * Config::kOut + head, query);
  return inside ? __ldg(reinterpret_cast<const unsigned short*>(row + key)) : 0;
}

// Four heads of eight columns of dy, from output `head` of the group and `key` on.
template <class Config>
__device__ inline void read_dy(const MultiTokenParams& p, int item, int group, int query,
                               int head, int key, Pack<typename Config::T, 8> (&x)[4]) {
  using T = typename Config::T;
  const int last = query >= 0 && query < p.seq && key >= 0 ? query : kNoKey;
  const T* row = row_start<T>(p.dy, p.dy_stride, item, int64(group) * Config::kOut + head, query);
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    x[h] = read_eight<Config>(row, key, head + h < Config::kOut ? last : kNoKey);
    row += p.dy_stride[1];
  }
}

// ------------------------------------------------------------------------------------------- table

// Fragments of the convolution, then, for each eight outputs and tap, of a lane's share of a mean.
template <class Config>
__device__ void multi_token_heads_table(const MultiTokenParams& p) {
  using T = typename Config::T;
  using H = Heads<Config>;
  constexpr int kWords = H::kTable + H::kShares;
  constexpr int kBlocks = (kWords + Config::kThreads - 1) / Config::kThreads;  // of a group
  const int group = int(blockIdx.x) / kBlocks;
  const int n = int(blockIdx.x) % kBlocks * Config::kThreads + threadIdx.x;
  const int lane = n % kWarp, g = lane / 4, q = lane % 4;
  unsigned word[4] = {};
  if (n < H::kTable) {
    const int f = n / kWarp, m = f % 2, down = f / 2 % Config::kKh;
    const int right = f / 2 / Config::kKh % Config::kKw, k = f / 2 / H::kTaps;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      word[i] = weight_pair<T, true>(p, group, 16 * k + i / 2 * 8 + 2 * q, 16 * m + i % 2 * 8 + g,
                                     Config::kKh - 1 - down, Config::kKw - 1 - right);
    }
  } else if (n < kWords) {
    const int f = (n - H::kTable) / kWarp, tap = f % H::kTaps, octet = f / H::kTaps;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      word[i] = weight_pair<T, true>(p, group, 8 * octet + 2 * q, 8 * i + g,
                                     Config::kKh - 1 - tap / Config::kKw,
                                     Config::kKw - 1 - tap % Config::kKw);
    }
  }
  if (n < kWords) {
    static_cast<uint4*>(p.table)[group * kWords + n] = {word[0], word[1], word[2], word[3]};
  }
}

// ------------------------------------------------------------------------------------------ weight

template <class Config>
struct WeightSizes {
  static constexpr int kKeys = 128, kRows = 2;
  using Tile = HeadTile<Config, kRows, kKeys, Heads<Config>::kLeft>;
  static constexpr int kP = Tile::kBytes;                           // [row][32 keys][16][m][lane]
  static constexpr int kTotals = kP + kRows * kKeys * kPosition;    // [octet][tap][m][lane]
  static constexpr int kStatistics = kTotals + 4 * Heads<Config>::kTaps * 2 * kWarp * 16;
  static constexpr int kMeans = kStatistics + kRows * kHeads * 8;   // [row][octet][head]
  static constexpr int kBytes = kMeans + kRows * 4 * kHeads * 4;
};

// What a warp sums: a row of P times eight outputs.
template <class Config>
struct WeightWarp {
  using T = typename Config::T;
  using W = WeightSizes<Config>;
  using H = Heads<Config>;
  using Tile = typename W::Tile;
  float sum[H::kTaps][2][4];  // [tap][m][2 h + e]: head 16 m + 8 h + g, output 8 octet + 2 q + e
  float bias = 0;             // of output 8 octet + g

  // No registers are to hold these.
  __device__ static int row() { return opaque(threadIdx.x) / kWarp / 4; }
  __device__ static int octet() { return opaque(threadIdx.x) / kWarp % 4; }
  __device__ static int lane() { return threadIdx.x % kWarp; }

  __device__ void clear() {
#pragma unroll
    for (int tap = 0; tap < H::kTaps; ++tap) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        sum[tap][n / 4][n % 4] = 0;
      }
    }
  }

  // The keys of a tile, from j0 on; `query` is the row of P.
  __device__ void multiply_tile(const MultiTokenParams& p, const char* shared, int query, int j0) {
    unsigned start[Config::kKw];
    const int row = this->row(), octet = this->octet(), at = lane();
#pragma unroll
    for (int right = 0; right < Config::kKw; ++right) {
      start[right] = shared_address(shared) + row * Tile::kPitch +
                     matrix_row(at, Tile::kSkip + right + at / 8 * 2, octet);
    }
    const uint4* fragments =
        reinterpret_cast<const uint4*>(shared + W::kP) + row * (W::kKeys / 8 * kWarp) + at;
    const int first_query = query - (Config::kKh - 1) + p.row_origin;  // of dy: that of `down` 0
#pragma unroll 1
    for (int part = 0; part < W::kKeys / 32; ++part) {
      if (j0 + part * 32 > query) {
        break;
      }
      uint4 a[2][2];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        a[n / 2][n % 2] = fragments[(part * 4 + n) * kWarp];
      }
#pragma unroll
      for (int down = 0; down < Config::kKh; ++down) {
        if (first_query + down < 0 || first_query + down >= p.seq) {
          continue;  // no dy there, and P may be NaN
        }
#pragma unroll
        for (int right = 0; right < Config::kKw; ++right) {
          unsigned b[4];
          load_matrices_transposed(b, start[right] + down * Tile::kPitch + part * 32 * kPosition);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              const uint4& w = a[half][m];
              multiply<T>(sum[down * Config::kKw + right][m], w.x, w.y, w.z, w.w, b[2 * half],
                          b[2 * half + 1]);
            }
          }
          if (right == H::kLeft && first_query + down == query) {  // dy of the row itself
#pragma unroll
            for (int n = 0; n < 4; ++n) {
              float low, high;
              unpack<T>(b[n], low, high);
              bias += low + high;
            }
          }
        }
      }
    }
  }

  // What these sums add to the means of the row.
  __device__ void store_means(const MultiTokenParams& p, int group, float* means) const {
    const int row = this->row(), octet = this->octet(), lane = this->lane();
    const uint4* table = static_cast<const uint4*>(p.table) +
                         group * (H::kTable + H::kShares) + H::kTable +
                         octet * H::kTaps * kWarp + lane;
    float mean[4] = {};
#pragma unroll
    for (int tap = 0; tap < H::kTaps; ++tap) {
      const uint4 v = table[tap * kWarp];
      const unsigned word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float low, high;
        unpack<T>(word[i], low, high);
        mean[i] += low * sum[tap][i / 2][i % 2 * 2] + high * sum[tap][i / 2][i % 2 * 2 + 1];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mean[i] += __shfl_xor_sync(0xffffffffu, mean[i], 1);
      mean[i] += __shfl_xor_sync(0xffffffffu, mean[i], 2);
      if (lane % 4 == 0) {
        means[(row * 4 + octet) * kHeads + 8 * i + lane / 4] = mean[i];
      }
    }
  }

  __device__ void add_to(float4* totals) const {
    float4* of_lane = totals + octet() * 2 * H::kTaps * kWarp + lane();
#pragma unroll
    for (int n = 0; n < 2 * H::kTaps; ++n) {
      float4& total = of_lane[n * kWarp];
      const float(&s)[4] = sum[n / 2][n % 2];
      const float4 t = total;
      total = float4{t.x + s[0], t.y + s[1], t.z + s[2], t.w + s[3]};
    }
  }
};

// Scores of two heads, 8 apart, of two rows: what a thread makes fragments of P of. They come to
// where its fragments will be: (row, 32 keys, m) by warp.
template <class Config>
struct WeightScores {
  using T = typename Config::T;
  using W = WeightSizes<Config>;
  static constexpr bool kAsync = Config::kVector == 8;
  const MultiTokenParams& p;
  uint4* to;  // fragments of row 0, keys 0 .. 15 of 32; 2 kWarp further those of the others
  int item, group, query, head, key;

  __device__ WeightScores(const MultiTokenParams& p, int item, int group, int first, int j0,
                          char* shared)
      : p(p), item(item), group(group), query(first) {
    const unsigned thread = opaque(threadIdx.x), part = thread / kWarp / 2, m = thread / kWarp % 2;
    to = reinterpret_cast<uint4*>(shared + W::kP) + (part * 4 + m) * kWarp + thread % kWarp;
    head = 16 * m + thread % kWarp / 4;
    key = j0 + part * 32 + thread % 4 * 8;
  }

  __device__ uint4* place(int row, int h) const {
    return to + row * (W::kKeys / 8 * kWarp) + h * 2 * kWarp;
  }
  __device__ const T* scores(int row, int h) const {
    return row_start<T>(p.scores, p.scores_stride, item, int64(group) * Config::kIn + head + 8 * h,
                        query + row);
  }
  __device__ int last(int row, int h) const {
    return query + row < p.seq && head + 8 * h < Config::kIn ? query + row : kNoKey;
  }

  __device__ void ask() const {
    if constexpr (kAsync) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (key <= last(n / 2, n % 2)) {
          copy_async(shared_address(place(n / 2, n % 2)), scores(n / 2, n % 2) + key, 16);
        }
      }
      copies_end_group();
    }
  }

  __device__ void make_fragments(const float2* statistics) const {
    wait_for_copies<0>();  // of this thread, which alone reads them
#pragma unroll(kAsync ? 1 : W::kRows)
    for (int row = 0; row < W::kRows; ++row) {
      unsigned word[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Pack<T, 8> x;
        if constexpr (kAsync) {
          const uint4 v = *place(row, h);
          x.word[0] = v.x, x.word[1] = v.y, x.word[2] = v.z, x.word[3] = v.w;
        } else {
          x = read_eight<Config>(scores(row, h), key, last(row, h));
        }
        const float2 s = statistics[row * kHeads + head + 8 * h];
        const int count = last(row, h) - key + 1;
#pragma unroll
        for (int k = 0; k < 8; k += 2) {
          float low, high;
          unpack<T>(x.word[k / 2], low, high);
          word[h][k / 2] = pack<T>(k < count ? attention_weight<Config>(low, s) : 0,
                                   k + 1 < count ? attention_weight<Config>(high, s) : 0);
        }
      }
      *place(row, 0) = {word[0][0], word[1][0], word[0][1], word[1][1]};
      *place(row, 1) = {word[0][2], word[1][2], word[0][3], word[1][3]};
    }
  }
};

// The row and head of scores whose statistics and mean are one thread's.
template <class Config>
struct WeightRow {
  bool exists;
  int64 number;  // in the arrays of these

  __device__ WeightRow(const MultiTokenParams& p, int item, int group, int first) {
    const int query = first + int(threadIdx.x) / kHeads, head = threadIdx.x % kHeads;
    exists = threadIdx.x < WeightSizes<Config>::kRows * kHeads && query < p.seq &&
             head < Config::kIn;
    number = (int64(item) * p.heads_in + group * Config::kIn + head) * p.seq + query;
  }
};

// What the block has summed: one of the terms of each element. `means` is free.
template <class Config>
__device__ inline void store_partial(const MultiTokenParams& p, const WeightWarp<Config>& warp,
                                     const float4* totals, float* means) {
  using H = Heads<Config>;
  const unsigned block = opaque(blockIdx.x);
  const int group = block % p.groups, chunk = block / p.groups;
  float bias = warp.bias;
  bias += __shfl_xor_sync(0xffffffffu, bias, 1);
  bias += __shfl_xor_sync(0xffffffffu, bias, 2);
  const int lane = warp.lane();
  if (lane % 4 == 0) {
    means[warp.row() * kHeads + 8 * warp.octet() + lane / 4] = bias;
  }
  __syncthreads();  // bias readable
  float* partial = static_cast<float*>(p.partial) + chunk;
  const int64 first_output = int64(group) * Config::kOut;
  if (p.d_bias && threadIdx.x < Config::kOut) {
    const int64 weights = int64(p.heads_out) * (Config::kIn * H::kTaps);
    partial[(weights + first_output + threadIdx.x) * p.chunks] =
        means[threadIdx.x] + means[kHeads + threadIdx.x];
  }
  const float* total = reinterpret_cast<const float*>(totals);
  for (int n = threadIdx.x; n < Config::kOut * Config::kIn * H::kTaps; n += Config::kThreads) {
    const int tap = H::kTaps - 1 - n % H::kTaps;  // u and v run against `down` and `right`
    const int c = n / H::kTaps % Config::kIn, o = n / H::kTaps / Config::kIn;
    const int at = ((o / 8 * H::kTaps + tap) * 2 + c / 16) * kWarp + c % 8 * 4 + o % 8 / 2;
    partial[(first_output * (Config::kIn * H::kTaps) + n) * p.chunks] =
        total[at * 4 + c / 8 % 2 * 2 + o % 2];
  }
}

template <class Config>
__device__ void multi_token_heads_weight(const MultiTokenParams& p) {
  using T = typename Config::T;
  using W = WeightSizes<Config>;
  using H = Heads<Config>;
  using Tile = typename W::Tile;
  static_assert(W::kBytes == Config::kShared, "shared memory: configs/multi_token_bwd.py differs");
  char* shared = reinterpret_cast<char*>(heads_shared);
  float4* totals = reinterpret_cast<float4*>(shared + W::kTotals);
  float2* statistics = reinterpret_cast<float2*>(shared + W::kStatistics);
  float* means = reinterpret_cast<float*>(shared + W::kMeans);
  const int group = int(blockIdx.x) % p.groups, chunk = int(blockIdx.x) / p.groups;
  const int batch = int(p.batch), pairs = (p.seq + 1) / 2;

  WeightWarp<Config> mine;
  for (int n = threadIdx.x; n < 4 * H::kTaps * 2 * kWarp; n += Config::kThreads) {
    totals[n] = float4{0, 0, 0, 0};
  }
#pragma unroll 1
  for (int n = chunk; n < batch * pairs; n += p.chunks) {
    const int item = n % batch;
    const int first = (pairs - 1 - n / batch) * 2, last = min(first + 1, p.seq - 1);
    const WeightRow<Config> of_thread(p, item, group, first);
    if (of_thread.exists) {  // nobody reads these since the last barrier
      statistics[threadIdx.x] = {static_cast<const float*>(p.shift)[of_thread.number],
                                 static_cast<const float*>(p.factor)[of_thread.number]};
    }
    mine.clear();
#pragma unroll 1
    for (int j0 = 0; j0 <= last; j0 += W::kKeys) {
      __syncthreads();  // tile and fragments are free again, statistics readable
      WeightScores<Config>(p, item, group, first, j0, shared).ask();
      const int query = first - (Config::kKh - 1) + p.row_origin, key = j0 - Tile::kBefore;
      fill_tile<Config, Tile>(
          shared,
          [&](int row, int head, int column, Pack<T, 8>(&x)[4]) {
            read_dy<Config>(p, item, group, query + row, head, key + column, x);
          },
          [&](int row, int head, int column) {
            return read_one_dy<Config>(p, item, group, query + row, head, key + column);
          },
          [](unsigned short bits, int, int, int) { return bits; });
      WeightScores<Config>(p, item, group, first, j0, shared).make_fragments(statistics);
      __syncthreads();  // tile and fragments are readable
      if (first + mine.row() < p.seq) {
        mine.multiply_tile(p, shared, first + mine.row(), j0);
      }
    }
    mine.store_means(p, group, means);
    if (mine.row() == 0) {
      mine.add_to(totals);
    }
    __syncthreads();  // means and the totals of the first row are written
    if (mine.row() == 1) {
      mine.add_to(totals);
    }
    const WeightRow<Config> done(p, item, group, opaque(first));
    if (done.exists) {
      const float* of_octet = means + threadIdx.x / kHeads * 4 * kHeads + threadIdx.x % kHeads;
      static_cast<float*>(p.mean)[done.number] =
          of_octet[0] + of_octet[kHeads] + (of_octet[2 * kHeads] + of_octet[3 * kHeads]);
    }
  }

  __syncthreads();  // totals are complete, means free
  store_partial<Config>(p, mine, totals, means);
}

// ------------------------------------------------------------------------------------------ scores

template <class Config>
struct ScoresSizes {
  static constexpr int kRows = 8, kKeys = 64, kSpan = 256;  // of a tile, of a block
  static constexpr int kHeight = 2;                         // rows of a warp
  static constexpr int kPieces = kHeight * 4;               // of eight scores, of a lane
  using Tile = HeadTile<Config, kRows, kKeys, Heads<Config>::kLeft>;
  static constexpr int kTable = Tile::kBytes;
  static constexpr int kStatistics = kTable + Heads<Config>::kTable * 16;  // [row][head]
  static constexpr int kStrip = kStatistics + kRows * kHeads * 16;         // what the block does
  static constexpr int kScores = kStrip + 16;                              // [warp][piece][lane]
  static constexpr int kBytes =
      kScores + (Config::kStaged ? Config::kThreads * kPieces * 16 : 0);
  static_assert(Config::kThreads / kWarp == kRows / kHeight * (kKeys / 32), "a tile");

  // First row of a thread's warp in the tile, and which 32 keys.
  __device__ static int row(unsigned thread) {
    return thread / kWarp % (kRows / kHeight) * kHeight;
  }
  __device__ static int part(unsigned thread) { return thread / kWarp / (kRows / kHeight); }
};

// A lane's scores and d_scores: piece 4 row + i is head 8 i + lane / 4, eight keys.
template <class Config>
struct ScoresLane {
  using T = typename Config::T;
  using S = ScoresSizes<Config>;
  int item, group, query, key;  // first row and key
  int row, head;                // the row in the tile; the head of piece 0

  // In the tile of keys `tile_key` ..
  __device__ ScoresLane(const Strip& strip, int tile_key)
      : item(strip.item),
        group(strip.group),
        query(strip.query),
        key(tile_key) {
    const unsigned thread = opaque(threadIdx.x);
    row = S::row(thread), head = thread % kWarp / 4;
    query += row;
    key += S::part(thread) * 32 + thread % 4 * 8;
  }

  __device__ static uint4* staged(char* shared) {
    const unsigned thread = opaque(threadIdx.x);
    return reinterpret_cast<uint4*>(shared + S::kScores) + thread / kWarp * S::kPieces * kWarp +
           thread % kWarp;
  }

  __device__ const T* scores(const MultiTokenParams& p, int at, int i) const {
    return row_start<T>(p.scores, p.scores_stride, item, int64(group) * Config::kIn + head + 8 * i,
                        query + at) + key;
  }

  // The last key of a row that there is for the lane.
  __device__ int last(const MultiTokenParams& p, int at, int i) const {
    return query + at < p.seq && head + 8 * i < Config::kIn ? query + at : kNoKey;
  }

  __device__ void write(const MultiTokenParams& p, int at, int i, const Pack<T, 8>& x) const {
    if (last(p, at, i) >= 0) {
      const int64 head_in = int64(item) * p.heads_in + group * Config::kIn + head + 8 * i;
      T* row = static_cast<T*>(p.d_scores) + (head_in * p.seq + query + at) * p.seq;
      write_eight<Config>(row + key, p.seq - key, x);
    }
  }

  __device__ void write_zeros(const MultiTokenParams& p) const {
    Pack<T, 8> zero;
    zero.fill(0);
#pragma unroll
    for (int n = 0; n < S::kPieces; ++n) {
      write(p, n / 4, n % 4, zero);
    }
  }

  // Ask for the scores that are read with 16-byte copies.
  __device__ void ask(const MultiTokenParams& p, char* shared) const {
    const unsigned to = shared_address(staged(shared));
#pragma unroll
    for (int n = 0; n < S::kPieces; ++n) {
      if (key <= last(p, n / 4, n % 4)) {
        copy_async(to + n * kWarp * 16, scores(p, n / 4, n % 4), 16);
      }
    }
    copies_end_group();
  }

  __device__ void write_gradients(const MultiTokenParams& p,
                                  const float (&sum)[S::kHeight][2][4][4],
                                  const float4* statistics, char* shared) const {
    const float4* of_row = statistics + row * kHeads + head;
    const uint4* of_lane = staged(shared);
#pragma unroll
    for (int at = 0; at < S::kHeight; ++at) {
      Pack<T, 8> x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Config::kStaged) {
          const uint4 v = of_lane[(at * 4 + i) * kWarp];
          x[i].word[0] = v.x, x[i].word[1] = v.y, x[i].word[2] = v.z, x[i].word[3] = v.w;
        } else {
          x[i] = read_eight<Config>(scores(p, at, i) - key, key, last(p, at, i));
        }
      }
      const int count = query + at - key + 1;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 s = of_row[at * kHeads + 8 * i];
        Pack<T, 8> y;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          float low, high;
          unpack<T>(x[i].word[t], low, high);
          const float* gradient = sum[at][i / 2][t] + i % 2 * 2;
          low = attention_weight<Config>(low, {s.x, s.y}) * (gradient[0] - s.z);
          high = attention_weight<Config>(high, {s.x, s.y}) * (gradient[1] - s.z);
          y.word[t] = pack<T>(2 * t < count ? low : 0, 2 * t + 1 < count ? high : 0);
        }
        write(p, at, i, y);
      }
    }
  }
};

// Copies table and statistics, unless all that the block writes is 0, and stores the strip.
template <class Config>
__device__ inline void begin_strip(const MultiTokenParams& p, uint4* table, float4* statistics,
                                   Strip* stored) {
  using S = ScoresSizes<Config>;
  using H = Heads<Config>;
  const Strip strip = Strip::of<S::kRows, S::kSpan>(p);
  const int n = threadIdx.x, query = strip.query + n / kHeads, head = n % kHeads;
  static_assert(Config::kThreads == S::kRows * kHeads, "a row and head a thread");
  if (n == 0) {
    *stored = strip;
  }
  if (strip.key < min(strip.query + S::kRows, p.seq)) {
    const uint4* from =
        static_cast<const uint4*>(p.table) + strip.group * (H::kTable + H::kShares);
    for (int k = n; k < H::kTable; k += Config::kThreads) {
      copy_async(shared_address(table + k), from + k, 16);
    }
    if (query < p.seq && head < Config::kIn) {
      const int64 of_row =
          (int64(strip.item) * p.heads_in + strip.group * Config::kIn + head) * p.seq + query;
      statistics[n] = {static_cast<const float*>(p.shift)[of_row],
                       static_cast<const float*>(p.factor)[of_row],
                       static_cast<const float*>(p.mean)[of_row], 0};
    }
  }
  copies_end_group();
  __syncthreads();  // strip and statistics are readable
}

template <class Config>
__device__ void multi_token_heads_scores(const MultiTokenParams& p) {
  using T = typename Config::T;
  using S = ScoresSizes<Config>;
  using Tile = typename S::Tile;
  static_assert(S::kBytes == Config::kShared, "shared memory: configs/multi_token_bwd.py differs");
  char* shared = reinterpret_cast<char*>(heads_shared);
  uint4* table = reinterpret_cast<uint4*>(shared + S::kTable);
  float4* statistics = reinterpret_cast<float4*>(shared + S::kStatistics);
  Strip* stored = reinterpret_cast<Strip*>(shared + S::kStrip);
  begin_strip<Config>(p, table, statistics, stored);
#pragma unroll 1
  for (int tile = 0; tile < S::kSpan / S::kKeys; ++tile) {
    const int key = Strip::at(stored).key + tile * S::kKeys;
    if (key >= p.seq) {
      break;
    }
    const int last = min(stored->query + S::kRows, p.seq) - 1;
    if (key <= last) {
      if (Config::kStaged) {
        ScoresLane<Config>(Strip::at(stored), key).ask(p, shared);
      }
      __syncthreads();  // the tile is free again
      const Strip strip = Strip::at(stored);
      const int query = strip.query - (Config::kKh - 1) + p.row_origin;
      const int first = key - Tile::kBefore;
      fill_tile<Config, Tile>(
          shared,
          [&](int row, int head, int column, Pack<T, 8>(&x)[4]) {
            read_dy<Config>(p, strip.item, strip.group, query + row, head, first + column, x);
          },
          [&](int row, int head, int column) {
            return read_one_dy<Config>(p, strip.item, strip.group, query + row, head,
                                       first + column);
          },
          [](unsigned short bits, int, int, int) { return bits; });
      wait_for_copies<Config::kStaged ? 1 : 0>();  // of the table
      __syncthreads();  // tile and table are readable
    }
    const unsigned thread = opaque(threadIdx.x);
    const int row = S::row(thread), part = S::part(thread);
    if (key + part * 32 > min(stored->query + row + S::kHeight - 1, last)) {
      ScoresLane<Config>(Strip::at(stored), key).write_zeros(p);
      continue;
    }
    float sum[S::kHeight][2][4][4] = {};
    convolve<Config, Tile, S::kHeight, Config::kOut>(
        sum, shared_address(shared) + row * Tile::kPitch + part * 32 * kPosition, table);
    wait_for_copies<0>();  // of scores, by this thread
    ScoresLane<Config>(Strip::at(stored), key).write_gradients(p, sum, statistics, shared);
  }
}
