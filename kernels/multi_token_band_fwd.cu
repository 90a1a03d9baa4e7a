// multi_token_band_fwd.cu: multi-token attention, forward, 16-bit: a warp walks down a band.
//
//   P[c, i, :] = softmax or sparsemax of scores[c, i, 0..i];  P = 0 for j > i, outside the matrix
//   y[o, i, j] = sum_{c, u, v} weight[o, c, u, v] * P[c, i + u - r0, j + v - c0] + bias[o]
//                for j <= i, else 0;  c runs over the heads of o's group
//
// Shapes    scores (batch, heads_in, seq, seq), unit stride on the last axis;  weight, bias: any
//           strides;  y (batch, heads_out, seq, seq), contiguous
// Task      of a warp: kRows rows of y and a band of 128 keys of them, of one (item, group):
//
//             keys j ->    band
//           +---------------------+     P of the last kKh (+ 1) rows of the band stands in the
//           | \  :      |         |     warp's own window in shared memory, where a step adds one
//           |   \:      |  zeros  |     row, or two where a group has one quad of heads, and writes
//           |    :\     |         |     as many rows of y: no barrier but the warp's
//           +---------------------+
//
// Grid      a warp per task; the statistics of the rows come from multi_token_band_statistics
// Pipeline  scores of the next rows are asked for before the products of these
// Product   see common/multi_token_cells.cuh
// Memory    scores: twice, the second time from cache where they fit in it, and (kKh - 1) / kRows
//           more; y: once
// Accuracy  statistics and sums in float32, P rounded to T. The bits of a row depend neither on the
//           task it lands in nor on alignment
// Limits    dilation 1; kernel and heads of a group are compile-time values
// Config    as common/multi_token_cells.cuh; kSparsemax (then shift and factor come from
//           multi_token_statistics); kRows: of a task
// Sources   Golovneva et al., "Multi-Token Attention", 2025
#include "common/multi_token_cells.cuh"

// Sizes that follow from Config.
template <class Config>
struct Band : Cells<Config> {
  using C = Cells<Config>;
  static constexpr int kWarps = Config::kThreads / kWarp;
  static constexpr int kStep = C::kQuads == 1 ? 2 : 1;            // rows of a step
  static constexpr int kPasses = (kStep * C::kQuads + 1) / 2;     // half a warp loads a row of a quad
  static constexpr int kSlots = Config::kKh - 1 + kStep;          // rows of the window
  static constexpr int kHeads = 4 * C::kQuads;
  static constexpr int kTaskRows = Config::kRows + Config::kKh - 1;  // of scores

  // Shared memory, bytes: weights, bias, statistics of the warps' rows of scores, their windows.
  static constexpr int kStatistics = C::kTableBytes + C::kBiasBytes;
  static constexpr int kWindows = round_up(kStatistics + kWarps * kTaskRows * kHeads * 8, 128);
  static constexpr int kPlane = C::kChunkBytes + (C::kQuads > 1 ? 32 : 0);
  static constexpr int kSlot = C::kQuads * kPlane;
  static constexpr int kWindow = round_up(kSlots * kSlot, 128);
  static_assert(kWindows + kWarps * kWindow == Config::kShared,
                "shared memory: configs/multi_token.py differs");
};

// One (item, group).
template <class Config>
struct GroupPlace {
  using T = typename Config::T;
  int64 item;
  int head_in, head_out;  // first ones of the group
  const T* scores;        // (item, head_in, 0, 0)
  T* y;                   // (item, head_out, 0, 0)

  __device__ GroupPlace(const MultiTokenParams& p, int pair) {
    const int group = pair % p.groups;
    item = pair / p.groups;
    head_in = group * Config::kChannels;
    head_out = group * Config::kOutputs;
    scores = row_start<T>(p.scores, p.scores_stride, item, head_in, 0);
    y = static_cast<T*>(p.y) + (item * p.heads_out + head_out) * p.seq * p.seq;
  }
};

// ------------------------------------------------------------------------------------ statistics

// (largest, log2 of the sum) of a row of scores, softmax; all lanes of the warp call.
template <class Config>
__device__ inline float2 row_statistics(const typename Config::T* row, int count) {
  using T = typename Config::T;
  constexpr int kLoads = 4;  // in flight
  RunningSoftmax running;
  const RowPiece<T, Config::kVector> piece(row, count);
#pragma unroll 1
  for (int begin = 0; begin < piece.packs; begin += kWarp * kLoads) {
    Pack<T, 8> x[kLoads];
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      x[l] = piece.pack(begin + l * kWarp + int(threadIdx.x) % kWarp);
    }
    unsigned both = x[0].word[0];
#pragma unroll
    for (int i = 1; i < kLoads * 4; ++i) {
      both = max_pair<T>(both, x[i / 4].word[i % 4]);
    }
    float low, high;
    unpack<T>(both, low, high);
    const float before = running.largest;
    running.largest = fmaxf(before, fmaxf(low, high));
    const float anchor = RunningSoftmax::anchor(running.largest);
    running.sum *= exp2f((before - anchor) * kLog2e);
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      if (begin + l * kWarp < piece.packs) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          running.sum += exp2f((x[l][k] - anchor) * kLog2e);
        }
      }
    }
  }
  running.reduce();
  return float2{running.largest, log2f(running.sum)};
}

// A warp per row of scores, the longest first.
template <class Config>
__device__ void multi_token_band_statistics(const MultiTokenParams& p) {
  using T = typename Config::T;
  const unsigned heads = unsigned(p.batch) * p.heads_in;
  const unsigned number = blockIdx.x * (Config::kThreads / kWarp) + threadIdx.x / kWarp;
  if (number >= heads * p.seq) {
    return;
  }
  const int query = p.seq - 1 - int(number / heads);
  const int64 item = number % heads / p.heads_in, head = number % heads % p.heads_in;
  const float2 s = row_statistics<Config>(
      row_start<T>(p.scores, p.scores_stride, item, head, query), query + 1);
  if (threadIdx.x % kWarp == 0) {
    const int64 n = (item * p.heads_in + head) * p.seq + query;
    static_cast<float*>(p.shift)[n] = s.x;
    static_cast<float*>(p.factor)[n] = s.y;
  }
}

// Statistics of row `row` and head `head` of the group, from memory; zeros outside the matrix.
template <class Config>
__device__ inline float2 known_statistics(const MultiTokenParams& p,
                                          const GroupPlace<Config>& place, int row, int head) {
  if (row < 0 || row >= p.seq || head >= Config::kChannels) {
    return {0, 0};
  }
  const int64 n = (place.item * p.heads_in + place.head_in + head) * p.seq + row;
  return {static_cast<const float*>(p.shift)[n], static_cast<const float*>(p.factor)[n]};
}

// The attention weight of score x (-inf above the diagonal) in a row with these statistics.
template <class Config>
__device__ inline float attention_weight(float x, float2 s) {
  if constexpr (Config::kSparsemax) {
    return x < s.x ? 0.0f : x - s.x + s.y;
  } else {
    return exp2f(fmaf(x - s.x, kLog2e, -s.y));
  }
}

// ------------------------------------------------------------------------------------------- walk

// What half a warp loads of a band: a row of a quad, 4 + 4 columns a lane, and a column of the halo
// in the first lanes.
template <class Config>
struct HalfTask {
  using B = Band<Config>;
  using T = typename Config::T;
  int row;   // -1 outside the matrix
  int quad;  // past the last one: nothing

  __device__ HalfTask(const MultiTokenParams& p, int first_row, int pass) {
    const int number = pass * 2 + int(threadIdx.x) % kWarp / 16;
    quad = B::kStep == 2 ? 0 : number;
    row = first_row + (B::kStep == 2 ? number : 0);
    row = row >= 0 && row < p.seq && (B::kQuads % 2 == 0 || quad < B::kQuads) ? row : -1;
  }

  // First of the lane's 4 columns; 4 more are 64 further.
  __device__ static int column(int first_key) {
    return first_key + int(threadIdx.x) % 16 * 4;
  }

  // The lane's column of the halo, counted from the band.
  __device__ static int halo_column() {
    const int n = int(threadIdx.x) % 16;
    return n < B::kLeft ? n - B::kLeft : kChunk + n - B::kLeft;
  }
  __device__ static bool has_halo() { return int(threadIdx.x) % 16 < B::kLeft + B::kRight; }
};

// Scores of a lane: [head][half], and of its column of the halo.
template <class Config>
struct LaneScores {
  using B = Band<Config>;
  using T = typename Config::T;
  Pack<T, 4> x[4][2];
  Pack<T, 1> halo[4];

  __device__ void load(const MultiTokenParams& p, const GroupPlace<Config>& place,
                       const HalfTask<Config>& task, int first_key) {
    const int column = task.column(first_key);
    const T* row = place.scores + task.quad * 4 * p.scores_stride[1] + task.row * p.scores_stride[2];
    const int halo_key = first_key + task.halo_column();
    const bool with_halo = task.has_halo() && halo_key >= 0 && halo_key <= task.row;
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      if (Config::kChannels % 4 != 0) {
        x[h][0].fill(negative_infinity<float>());
        x[h][1].fill(negative_infinity<float>());
        halo[h].fill(negative_infinity<float>());
      }
      if (Config::kChannels % 4 == 0 || task.quad * 4 + h < Config::kChannels) {
#pragma unroll
        for (int i = 0; i < 8; i += B::kLoad) {
          if (column + i / 4 * kHalf + i % 4 <= task.row) {
            Pack<T, B::kLoad> v;
            v.load(row + column + i / 4 * kHalf + i % 4);
            x[h][i / 4].put(i % 4, v);
          }
        }
        if (B::kLeft + B::kRight > 0 && with_halo) {
          halo[h].load(row + halo_key);
        }
      }
      row += p.scores_stride[1];
    }
  }
};

// P of the half warp's row of a quad to the window, with the halo; `of_row` has the statistics of
// its four heads. Returns whether one of the four rows is NaN; its cells become 0.
template <class Config>
__device__ inline bool write_row(const HalfTask<Config>& task, LaneScores<Config>& scores,
                                 const float2* of_row, char* cells, int first_key) {
  using B = Band<Config>;
  using T = typename Config::T;
  auto& x = scores.x;
  float2 s[4];
#pragma unroll
  for (int h = 0; h < 4; h += 2) {
    const float4 two = *reinterpret_cast<const float4*>(of_row + h);
    s[h] = {two.x, two.y};
    s[h + 1] = {two.z, two.w};
  }
  const int allowed = task.row - task.column(first_key) + 1;  // of the columns from the first on
  if (allowed < kHalf + 4) {
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      mask_pack<T>(x[h][0], allowed);
      mask_pack<T>(x[h][1], allowed - kHalf);
    }
  }
  bool bad = false;
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    if (task.row < 0) {  // outside the matrix: of_row is another row's
      s[h] = {0, 0};
    }
    bad = bad || s[h].y != s[h].y;
  }
  if (bad) {
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      if (s[h].y != s[h].y) {
        s[h] = {0, 0};
        x[h][0].fill(negative_infinity<float>());
        x[h][1].fill(negative_infinity<float>());
        scores.halo[h].fill(negative_infinity<float>());
      }
    }
  }
  if (B::kQuads % 2 != 0 && B::kStep == 1 && task.quad >= B::kQuads) {
    return false;
  }
  uint4 cell[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    unsigned word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i / 2 * 2;
      word[i] = pack<T>(attention_weight<Config>(x[h][i % 2][k], s[h]),
                        attention_weight<Config>(x[h + 1][i % 2][k], s[h + 1]));
    }
    cell[k] = uint4{word[0], word[1], word[2], word[3]};
  }
  store_cells<B::kLeft, B::kRight>(cells, int(threadIdx.x) % 16 * 4, cell);
  if (B::kLeft + B::kRight > 0 && task.has_halo()) {
    const int column = task.halo_column(), key = first_key + column;
    float w[4] = {};
    if (key >= 0 && key <= task.row) {
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        w[h] = attention_weight<Config>(scores.halo[h][0], s[h]);
      }
    }
    store_half_cell(cells, column < 0 ? column + B::kLeft : column - kHalf + B::kLeft,
                    column < 0 ? 0 : 1, pack<T>(w[0], w[1]), pack<T>(w[2], w[3]));
  }
  return bad;
}

// Zeros of the band in rows [first, last).
template <class Config>
__device__ inline void store_zeros(const MultiTokenParams& p, const GroupPlace<Config>& place,
                                   bool aligned, int first, int last, int first_key) {
  using T = typename Config::T;
  const int lane = threadIdx.x % kWarp, key = first_key + lane % 16 * 8;
  Pack<T, 8> zero;
  zero.fill(0);
#pragma unroll 1
  for (int output = 0; output < Config::kOutputs; ++output) {
    T* y = place.y + (int64(output) * p.seq + first + lane / 16) * p.seq + key;
#pragma unroll 1
    for (int query = first + lane / 16; query < last; query += 2) {
      store_pack<Config>(y, p, aligned, key, zero);
      y += 2 * int64(p.seq);
    }
  }
}

// ----------------------------------------------------------------------------------------- kernel

// Rows [first, last) of y in the band from first_key on. `statistics` starts at row
// `statistics_row` of scores.
template <class Config>
__device__ void walk_band(const MultiTokenParams& p, const GroupPlace<Config>& place,
                          const uint2* weights, const float* bias, const float2* statistics,
                          int statistics_row, bool aligned, char* window, int first, int last,
                          int first_key) {
  using B = Band<Config>;
  if (first_key > first) {
    const int zeros = min(last, first_key);
    store_zeros<Config>(p, place, aligned, first, zeros, first_key);
    first = zeros;
  }
  if (first >= last) {
    return;
  }
  const int lane = threadIdx.x % kWarp;
  const int origin = first - p.row_origin;            // row of P number 0
  const int count = last - first + Config::kKh - 1;   // rows of P
  LaneScores<Config> scores;
  scores.load(p, place, HalfTask<Config>(p, origin, 0), first_key);
  unsigned history = 0;  // which of the last rows of P are NaN, the latest in bit 0
  int slot = 0;          // of the step's first row
#pragma unroll 1
  for (int number = 0; number < count; number += B::kStep) {
    bool bad = false;
#pragma unroll 1
    for (int pass = 0; pass < B::kPasses; ++pass) {
      const HalfTask<Config> task(p, origin + number, pass);
      int mine = slot + (B::kStep == 2 ? lane / 16 : 0);
      mine -= mine >= B::kSlots ? B::kSlots : 0;
      const int of_row = max(task.row - statistics_row, 0) * B::kHeads + task.quad * 4;
      bad |= write_row<Config>(task, scores, statistics + of_row,
                               window + mine * B::kSlot + task.quad * B::kPlane, first_key);
      const bool more = pass + 1 < B::kPasses;
      scores.load(p, place, HalfTask<Config>(p, origin + number + (more ? 0 : B::kStep),
                                             more ? pass + 1 : 0), first_key);
    }
    const unsigned of_lanes = __ballot_sync(0xffffffffu, bad);  // and the rows are in the window
    if constexpr (B::kStep == 2) {
      history = history << 2 | ((of_lanes & 0xffffu) != 0 ? 2u : 0u) | (of_lanes > 0xffffu ? 1u : 0u);
    } else {
      history = history << 1 | (of_lanes != 0 ? 1u : 0u);
    }
    __syncwarp();
    slot += B::kStep;
    slot -= slot >= B::kSlots ? B::kSlots : 0;
    // The window's oldest row, which `slot` overwrites next, is the first tap of the first row of y
    // that this step completes.
#pragma unroll 1
    for (int r = 0; r < B::kStep; ++r) {
      const int query = first + number - (Config::kKh - 1) + r;
      if (query >= first && query < last) {
        const int top = slot + r >= B::kSlots ? slot + r - B::kSlots : slot + r;
        convolve<Config>(p, place.y, weights, bias, aligned,
                         Window{window, B::kSlots, B::kSlot, B::kPlane}, top, query, first_key);
        if (history != 0) {
          poison_chunk<Config>(p, place.y, history >> (B::kStep - 1 - r), query, first_key);
        }
      }
    }
    __syncwarp();  // the oldest rows are free
  }
}

template <class Config>
__device__ void multi_token_band(const MultiTokenParams& p) {
  using B = Band<Config>;
  using T = typename Config::T;
  extern __shared__ uint4 band_shared[];
  char* shared = reinterpret_cast<char*>(band_shared);
  uint2* weights = reinterpret_cast<uint2*>(shared);
  float* bias = reinterpret_cast<float*>(shared + B::kTableBytes);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float2* statistics = reinterpret_cast<float2*>(shared + B::kStatistics) +
                       warp * B::kTaskRows * B::kHeads;
  const bool aligned =
      reinterpret_cast<unsigned long long>(p.y) % (sizeof(T) * Config::kVector) == 0;

  // A block's warps have tasks of one group, which share its weights. The longest rows come first.
  const int pairs = int(p.batch) * p.groups;
  const GroupPlace<Config> place(p, int(blockIdx.x) % pairs);
  const int bands = (p.seq + kChunk - 1) / kChunk;
  const int segments = (p.seq + Config::kRows - 1) / Config::kRows;
  const int n = int(blockIdx.x) / pairs * B::kWarps + warp;
  const int first = (segments - 1 - n / bands) * Config::kRows, first_key = n % bands * kChunk;
  const int statistics_row = first - p.row_origin;
  if (first_key < first + Config::kRows) {
    for (int k = lane; k < B::kTaskRows * B::kHeads; k += kWarp) {
      statistics[k] = known_statistics<Config>(p, place, statistics_row + k / B::kHeads,
                                               k % B::kHeads);
    }
  }
  write_weights<Config>(p, place.head_out, weights, bias);
  __syncthreads();  // weights, bias and statistics readable
  if (first >= 0) {
    walk_band<Config>(p, place, weights, bias, statistics, statistics_row, aligned,
                      shared + B::kWindows + warp * B::kWindow, first,
                      min(p.seq, first + Config::kRows), first_key);
  }
}
