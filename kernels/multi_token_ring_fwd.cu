// multi_token_ring_fwd.cu: multi-token attention, forward, 16-bit: a block walks down its rows.
//
//   P[c, i, :] = softmax or sparsemax of scores[c, i, 0..i];  P = 0 for j > i, outside the matrix
//   y[o, i, j] = sum_{c, u, v} weight[o, c, u, v] * P[c, i + u - r0, j + v - c0] + bias[o]
//                for j <= i, else 0;  c runs over the heads of o's group
//
// Shapes    scores (batch, heads_in, seq, seq), unit stride on the last axis;  weight, bias: any
//           strides;  y (batch, heads_out, seq, seq), contiguous
// Grid      p.chunks parts of the rows of every (item, group), of equal cost, one wave of blocks
// Ring      P of the rows that taps reach: kKh - 1 older rows and those of this step
//
//             keys j ->                        a step adds rows_per_step rows of P at the bottom and
//           +---------------------+            writes as many rows of y, kKh - 1 - r0 rows above
//           | P of step s - 1     |
//           | P of step s         | <- 256 columns of a quad of heads per warp, 8 x 4 per lane
//           +---------------------+
//
// Cells     two neighbouring columns of four heads ("a quad"), 16 bytes:
//
//             cell k:  | column 2k - left: heads 0..3 | column 2k + 1 - left: heads 0..3 |
//
//           cell k of a row is number k / 4 of plane k % 4, so that the eight cells of a matrix, four
//           apart, are neighbours: no bank is asked twice. Quads are four planes each
// Pipeline  a step: 1. scores: largest number and exponentials of a warp's 256 columns, their sum;
//                      to shared memory
//                   2. barrier; the row's statistics from its warps'; P = e * factor to the ring
//                   3. ask for the scores of the next step (kAhead)
//                   4. barrier; matrix products of the rows that are complete; y and its zeros
//           So scores are read once (and kKh - 1 rows a block again), y is written once
// Product   pairs of neighbouring columns j = 2k, 2k + 1 are the rows of A. Their taps in a row are in
//           cells k .. k + kSpan - 1, the leftmost first: hence `left`. So
//             (16 pairs) x (two cells, each 2 columns x 4 heads) x (8 = 4 outputs x the pair's two)
//           Pair (x, q) has columns 8 x + 2 q: the sixteen x of 128 columns are the rows of a product,
//           the four q are four products. So a lane ends with columns 8 x .. 8 x + 7 of one output
// Not finite  a NaN would spread through weights that are 0 because a tap does not exist: rows of P
//           that are NaN (they always are so as a whole) enter as 0, and the outputs that they
//           reach are overwritten with NaN
// Accuracy  statistics and sums in float32, P rounded to T. The bits of a row depend neither on the
//           block it lands in nor on alignment
// Limits    dilation 1; kernel and heads of a group are compile-time values; a ring row must fit a
//           pass of the block's warps, and kKh of them in shared memory
// Config    T; kChannels, kOutputs: heads of a group; kKh, kKw; kVector: elements per access of scores
//           and y (divides seq and the strides of scores); kSparsemax (then shift and factor come
//           from multi_token_statistics); kPlane: bytes of a plane; kSlope, kFlat: cost of a row, see
//           part_start; kAhead: whether a step's scores are asked for before the products of the step
//           before, which hides the wait and costs 16 registers, or after them
// Sources   Golovneva et al., "Multi-Token Attention", 2025
#include "common/multi_token_cells.cuh"

constexpr int kPassColumns = 256;  // columns that a warp loads at once: 8 a lane

// Sizes that follow from Config.
template <class Config>
struct Ring {
  static constexpr int kWarps = Config::kThreads / kWarp;
  static constexpr int kQuads = (Config::kChannels + 3) / 4;
  static constexpr int kTiles = (Config::kOutputs + 3) / 4;   // of 4 outputs
  static constexpr int kTogether = kTiles % 2 == 0 ? 2 : 1;   // that share a read of A
  static constexpr int kLeft = Config::kKw / 2;               // columns left of a key
  static constexpr int kSpan = (Config::kKw + 2) / 2;         // cells of a pair's taps in a row
  static constexpr int kUnits = Config::kKh * kQuads * kSpan;  // of 8 terms
  static constexpr int kSteps = (kUnits + 1) / 2;             // products

  // Shared memory, bytes: weights, bias, statistics of warps, NaN rows, ring.
  static constexpr int kTable = kSteps * kTiles * kWarp * 8;
  static constexpr int kStatistics = kTable + kTiles * 16;
  static constexpr int kPoison = kStatistics + kWarps * 4 * 8;
  static constexpr int kRing = kPoison + (kWarps + Config::kKh) * kQuads * 4 / 16 * 16 + 16;
};

// The eight terms number n of a sum: a cell of a tap row of a quad.
template <class Config>
struct Unit {
  int span, quad, row;

  __device__ constexpr explicit Unit(int n)
      : span(n % Ring<Config>::kSpan),
        quad(n / Ring<Config>::kSpan % Ring<Config>::kQuads),
        row(n / Ring<Config>::kSpan / Ring<Config>::kQuads) {}
};

// How a block divides its work. Uniform in the block.
struct RingShape {
  int warps_per_line;  // a line: one row of one quad
  int rows_per_step;
  int slots;           // ring rows
  int slot;            // bytes of a ring row in a plane

  // `width`: columns that any row of the block has. As _ring_plane in configs/multi_token_fwd.py.
  __device__ void set(int width, int quads, int warps, int kernel_rows) {
    warps_per_line = max(1, (width + kPassColumns - 1) / kPassColumns);
    rows_per_step = max(1, warps / (warps_per_line * quads));
    slots = rows_per_step + kernel_rows - 1;
    slot = (warps_per_line * 32 + 2) * 16;
  }
};

// What a block works on. Uniform in the block, and kept in shared memory to save registers.
template <class Config>
struct RingPlace {
  using T = typename Config::T;
  using R = Ring<Config>;
  const T* scores;        // (item, first head in of the group, 0, 0)
  T* y;                   // (item, first head out of the group, 0, 0)
  int64 item;
  int head_in, head_out;  // first ones of the group
  int begin, end;         // rows of y
  int origin;             // row of P number 0
  int count;              // rows of P
  bool aligned;           // y can be written in packs
  RingShape shape;

  __device__ void set(const MultiTokenParams& p) {
    const int pairs = int(gridDim.x) / p.chunks;
    const int part = p.chunks - 1 - int(blockIdx.x) / pairs;
    const int group = int(blockIdx.x) % pairs % p.groups;
    item = int(blockIdx.x) % pairs / p.groups;
    head_in = group * Config::kChannels;
    head_out = group * Config::kOutputs;
    begin = part_start(part, p.chunks, p.seq, Config::kSlope, Config::kFlat);
    end = part_start(part + 1, p.chunks, p.seq, Config::kSlope, Config::kFlat);
    origin = begin - p.row_origin;
    count = end - begin + Config::kKh - 1;
    scores = row_start<T>(p.scores, p.scores_stride, item, head_in, 0);
    y = static_cast<T*>(p.y) + (item * p.heads_out + head_out) * p.seq * p.seq;
    aligned = reinterpret_cast<unsigned long long>(p.y) % (sizeof(T) * Config::kVector) == 0;
    const int width = min(p.seq, origin + count);  // columns of the last row of P
    shape.set(width, R::kQuads, R::kWarps, Config::kKh);
  }
};

// What a warp loads: `part` of a line of the block, which is one quad of one row of a step.
struct WarpTask {
  int part, quad;
  int row;  // of the step; too large where there is nothing to do

  __device__ WarpTask(const RingShape& shape, int quads) {
    const int warp = threadIdx.x / kWarp, line = warp / shape.warps_per_line;
    part = warp % shape.warps_per_line;
    quad = line % quads;
    row = line / quads < shape.rows_per_step ? line / quads : 1 << 30;
  }
};

// What a lane loads in a step: 8 columns of the 4 heads of a quad in one row.
template <class Config>
struct LaneTask {
  using T = typename Config::T;
  int part, quad;
  bool exists;
  int row;      // of the matrix; -1 outside
  int column;   // the first
  int allowed;  // of the columns from it on, how many are at or before the diagonal; may be <= 0

  __device__ LaneTask(const MultiTokenParams& p, const RingPlace<Config>& place,
                      const WarpTask& warp, int first)
      : part(warp.part), quad(warp.quad) {
    const int lane = threadIdx.x % kWarp;
    exists = warp.row < place.count - first;
    row = exists ? place.origin + first + warp.row : -1;
    row = row < p.seq ? max(row, -1) : -1;
    column = part * kPassColumns + lane * 8;
    allowed = row - column + 1;
  }

  // Whether any lane of the warp has a column at or before the diagonal.
  __device__ bool warp_has_any() const { return row >= part * kPassColumns; }

  __device__ void load(const MultiTokenParams& p, const RingPlace<Config>& place,
                       Pack<T, 8> (&x)[4]) const {
    const T* from = place.scores + quad * 4 * p.scores_stride[1] + row * p.scores_stride[2] +
                    column;
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      if (Config::kChannels % 4 != 0) {
        x[h].fill(negative_infinity<float>());
      }
      if (Config::kChannels % 4 == 0 || quad * 4 + h < Config::kChannels) {
#pragma unroll
        for (int k = 0; k < 8; k += Config::kVector) {
          if (k < allowed) {
            Pack<T, Config::kVector> v;
            v.load(from + k);
            x[h].put(k, v);
          }
        }
      }
      from += p.scores_stride[1];
    }
  }
};

// ------------------------------------------------------------------------------------ statistics

// Entries from `allowed` on become -inf.
template <class T>
__device__ inline void mask_pack(Pack<T, 8>& x, int allowed) {
  const unsigned lowest = narrow<T>(negative_infinity<float>()).bits;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    x.word[k] = 2 * k >= allowed ? lowest | lowest << 16
        : 2 * k + 1 == allowed ? (x.word[k] & 0xffffu) | lowest << 16 : x.word[k];
  }
}

// Largest of the warp's numbers in each of four heads.
template <class T>
__device__ inline void warp_largest(const Pack<T, 8> (&x)[4], float (&largest)[4]) {
  unsigned two[2];
#pragma unroll
  for (int h = 0; h < 4; h += 2) {
    unsigned of_head[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const unsigned(&w)[4] = x[h + k].word;
      of_head[k] = max_pair<T>(max_pair<T>(w[0], w[1]), max_pair<T>(w[2], w[3]));
    }
    two[h / 2] = max_pair<T>(low_halves(of_head[0], of_head[1]),
                             high_halves(of_head[0], of_head[1]));
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    two[0] = max_pair<T>(two[0], __shfl_xor_sync(0xffffffffu, two[0], distance));
    two[1] = max_pair<T>(two[1], __shfl_xor_sync(0xffffffffu, two[1], distance));
  }
  unpack<T>(two[0], largest[0], largest[1]);
  unpack<T>(two[1], largest[2], largest[3]);
}

// Sum over the warp of four numbers; lane l gets that of head l / 8.
__device__ inline float warp_sums(const float (&x)[4]) {
  const int lane = threadIdx.x % kWarp;
  const bool upper = lane & 16, odd = lane & 8;
  float a = upper ? x[2] : x[0], b = upper ? x[3] : x[1];
  a += __shfl_xor_sync(0xffffffffu, upper ? x[0] : x[2], 16);
  b += __shfl_xor_sync(0xffffffffu, upper ? x[1] : x[3], 16);
  float y = odd ? b : a;
  y += __shfl_xor_sync(0xffffffffu, odd ? a : b, 8);
  y += __shfl_xor_sync(0xffffffffu, y, 4);
  y += __shfl_xor_sync(0xffffffffu, y, 2);
  return y + __shfl_xor_sync(0xffffffffu, y, 1);
}

// The factors that turn a warp's exponentials into weights of the whole row, from the (largest, sum)
// of every warp of the line: float2 [warp of the line][head]. NaN where the row is NaN.
__device__ inline void line_factors(const float2* of_line, int warps, int part,
                                    float (&factor)[4]) {
  constexpr int kEach = 4;  // of a lane: 32 warps at most
  const int lane = threadIdx.x % kWarp, head = lane % 4;
  float largest = negative_infinity<float>(), sum = 0;
  if (warps > kWarp / 4) {
    float2 s[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int w = lane / 4 + k * (kWarp / 4);
      s[k] = w < warps ? of_line[w * 4 + head] : float2{negative_infinity<float>(), 0};
      largest = fmaxf(largest, s[k].x);
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      sum += s[k].y * exp2f((s[k].x - RunningSoftmax::anchor(largest)) * kLog2e);
    }
  } else if (lane / 4 < warps) {
    const float2 s = of_line[lane];
    largest = s.x;
    sum = s.y;
  }
  const float before = largest;
#pragma unroll
  for (int distance = 4; distance < kWarp; distance *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  // -inf - -inf: a row without a finite number is NaN.
  sum *= exp2f((before - RunningSoftmax::anchor(largest)) * kLog2e);
#pragma unroll
  for (int distance = 4; distance < kWarp; distance *= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  const float mine = exp2f((of_line[part * 4 + head].x - largest) * kLog2e) / sum;
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    factor[h] = __shfl_sync(0xffffffffu, mine, h);
  }
}

// ------------------------------------------------------------------------------------------ ring

// P of the lane's 8 columns to the ring; all lanes of the warp call. `row` is the ring row in the
// quad's first plane. Returns whether one of the four rows is NaN: its cells become 0, and `noted`
// says so.
template <class Config>
__device__ inline bool write_cells(const LaneTask<Config>& task, float (&e)[4][8],
                                   const float (&factor)[4], char* row, unsigned* noted) {
  using R = Ring<Config>;
  using T = typename Config::T;
  constexpr int kPlane = Config::kPlane;
  unsigned bad = 0;
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    bad |= factor[h] != factor[h] ? 1u << h : 0u;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      e[h][k] *= factor[h];
    }
  }
  if (bad) {
#pragma unroll
    for (int h = 0; h < 4; ++h) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        e[h][k] = bad >> h & 1 ? 0.0f : e[h][k];
      }
    }
  }
  uint2 column[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    column[k] = uint2{pack<T>(e[0][k], e[1][k]), pack<T>(e[2][k], e[3][k])};
  }
  // Cell 4 l + kFirst + j has columns 8 l + 2 j (and the next), or one less where kLeft is odd: then
  // the column before the lane's comes from its neighbour, and its last one goes to the other.
  constexpr int kFirst = R::kLeft / 2;
  constexpr bool kOdd = R::kLeft % 2 == 1;
  const int lane = threadIdx.x % kWarp;
  char* cells = row + (task.part * kWarp + lane) * 16;
  uint2 before{0, 0};
  if constexpr (kOdd) {
    before.x = __shfl_up_sync(0xffffffffu, column[7].x, 1);
    before.y = __shfl_up_sync(0xffffffffu, column[7].y, 1);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    char* to = cells + (kFirst + j) % 4 * kPlane + (kFirst + j) / 4 * 16;
    const uint2 low = !kOdd ? column[2 * j] : j == 0 ? before : column[(2 * j + 7) % 8];
    const uint2 high = kOdd ? column[2 * j] : column[2 * j + 1];
    if (kOdd && j == 0 && lane == 0) {  // the low half is the warp's before, or a zero for good
      *reinterpret_cast<uint2*>(to + 8) = high;
    } else {
      *reinterpret_cast<uint4*>(to) = uint4{low.x, low.y, high.x, high.y};
    }
  }
  if (kOdd && lane == kWarp - 1) {
    *reinterpret_cast<uint2*>(cells + kFirst % 4 * kPlane + (kFirst / 4 + 1) * 16) = column[7];
  }
  if (task.part == 0 && lane == 0) {
    *noted = bad;
  }
  return bad != 0;
}

// ------------------------------------------------------------------------------------- products

// B fragments, uint2 [step * kTiles + tile][lane], and the bias, a float per output.
template <class Config>
__device__ inline void write_table(const MultiTokenParams& p, int head_out, uint2* table,
                                   float* bias) {
  using R = Ring<Config>;
  using T = typename Config::T;
  for (int n = threadIdx.x; n < R::kSteps * R::kTiles * kWarp; n += Config::kThreads) {
    const int lane = n % kWarp, g = lane / 4, t = lane % 4;
    const int tile = n / kWarp % R::kTiles, step = n / kWarp / R::kTiles;
    const int output = tile * 4 + g / 2;
    unsigned word[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Unit<Config> unit(step * 2 + half);
      const int v = 2 * unit.span + t / 2 - g % 2;
      const int channel = unit.quad * 4 + t % 2 * 2;
      if (step * 2 + half < R::kUnits && output < Config::kOutputs && v >= 0 && v < Config::kKw) {
        const T* from = static_cast<const T*>(p.weight) + (head_out + output) * p.weight_stride[0] +
                        channel * p.weight_stride[1] + unit.row * p.weight_stride[2] +
                        v * p.weight_stride[3];
        if (channel < Config::kChannels) {
          word[half] = from->bits;
        }
        if (channel + 1 < Config::kChannels) {
          word[half] |= unsigned(from[p.weight_stride[1]].bits) << 16;
        }
      }
    }
    table[n] = uint2{word[0], word[1]};
  }
  for (int o = threadIdx.x; o < R::kTiles * 4; o += Config::kThreads) {
    const T* from = static_cast<const T*>(p.bias);
    bias[o] = from && o < Config::kOutputs ? widen(from[(head_out + o) * p.bias_stride]) : 0.0f;
  }
}

// A chunk of keys of row `query` of y at or left of the diagonal. `ring` is the shared address of the
// first plane, `slot` the ring row of the first row of taps.
template <class Config>
__device__ inline void multiply_chunk(const MultiTokenParams& p, const RingPlace<Config>& place,
                                      const uint2* table, const float* bias, unsigned ring,
                                      int slot, int query, int chunk) {
  using R = Ring<Config>;
  using T = typename Config::T;
  constexpr int kPlane = Config::kPlane;
  const int lane = threadIdx.x % kWarp, t = lane % 4, g = lane / 4;
  const bool second = lane >= 16;  // of the two units of a product
  const int slots = place.shape.slots, slot_bytes = place.shape.slot;
  const unsigned at = ring + (chunk * 16 + lane % 16) * 16;
  unsigned row[Config::kKh];
#pragma unroll
  for (int u = 0; u < Config::kKh; ++u) {
    row[u] = at + slot * slot_bytes;
    slot = slot + 1 == slots ? 0 : slot + 1;
  }
  T* y = place.y + int64(query) * p.seq + chunk * kChunk + g * 8;

#pragma unroll 1
  for (int tile = 0; tile < R::kTiles; tile += R::kTogether) {
    float sum[R::kTogether][4][4];
#pragma unroll
    for (int i = 0; i < R::kTogether * 16; ++i) {
      sum[i / 16][i / 4 % 4][i % 4] = bias[(tile + i / 16) * 4 + t];
    }
#pragma unroll
    for (int step = 0; step < R::kSteps; ++step) {
      const Unit<Config> a(step * 2), b(step * 2 + 1 < R::kUnits ? step * 2 + 1 : step * 2);
      uint2 w[R::kTogether];
#pragma unroll
      for (int k = 0; k < R::kTogether; ++k) {
        w[k] = table[(step * R::kTiles + tile + k) * kWarp + lane];
      }
      const unsigned from = a.row == b.row ? row[a.row] : second ? row[b.row] : row[a.row];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int first = (a.quad * 4 + (q + a.span) % 4) * kPlane + (q + a.span) / 4 * 16;
        const int other = (b.quad * 4 + (q + b.span) % 4) * kPlane + (q + b.span) / 4 * 16;
        unsigned x[4];
        load_matrices(x, from + (second ? other - first : 0) + first);
#pragma unroll
        for (int k = 0; k < R::kTogether; ++k) {
          multiply<T>(sum[k][q], x[0], x[1], x[2], x[3], w[k].x, w[k].y);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < R::kTogether; ++k) {
      const int output = (tile + k) * 4 + t;
      if (output < Config::kOutputs) {
        T* to = y + int64(output) * p.seq * p.seq;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float value[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            value[i] = sum[k][i / 2][half * 2 + i % 2];
          }
          store_eight<Config>(to + half * kHalf, p, place.aligned, query,
                              chunk * kChunk + g * 8 + half * kHalf, value);
        }
      }
    }
  }
}

// Which rows of taps from ring row `slot` on are NaN, the last one in bit 0.
template <class Config>
__device__ inline unsigned nan_rows(const RingShape& shape, const unsigned* poison, int slot) {
  unsigned rows = 0;
  for (int u = 0; u < Config::kKh; ++u) {
    unsigned any = 0;
    for (int quad = 0; quad < Ring<Config>::kQuads; ++quad) {
      any |= poison[slot * Ring<Config>::kQuads + quad];
    }
    rows = rows << 1 | (any != 0 ? 1u : 0u);
    slot = slot + 1 == shape.slots ? 0 : slot + 1;
  }
  return rows;
}

// Zeros of a chunk right of the diagonal.
template <class Config>
__device__ inline void store_zeros(const MultiTokenParams& p, const RingPlace<Config>& place,
                                   int query, int first_key) {
  using T = typename Config::T;
  const int lane = threadIdx.x % kWarp, key = first_key + lane % 16 * 8;
  Pack<T, 8> zero;
  zero.fill(0);
  T* y = place.y + int64(query) * p.seq + key;
#pragma unroll
  for (int output = lane / 16; output < Config::kOutputs; output += 2) {
    store_pack<Config>(y + int64(output) * p.seq * p.seq, p, place.aligned, key, zero);
  }
}

// ----------------------------------------------------------------------------------------- kernel

template <class Config>
__device__ void multi_token_ring(const MultiTokenParams& p) {
  using R = Ring<Config>;
  using T = typename Config::T;
  extern __shared__ uint4 ring_shared[];
  char* shared = reinterpret_cast<char*>(ring_shared);
  float2* statistics = reinterpret_cast<float2*>(shared + R::kStatistics);
  unsigned* poison = reinterpret_cast<unsigned*>(shared + R::kPoison);
  char* ring = shared + R::kRing;
  float* bias = reinterpret_cast<float*>(shared + R::kTable);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  __shared__ RingPlace<Config> kept;
  const RingPlace<Config>& place = kept;
  Pack<T, 8> x[4];
  {
    RingPlace<Config> now;
    now.set(p);
    if (threadIdx.x == 0) {
      kept = now;
    }
    LaneTask<Config>(p, now, WarpTask(now.shape, R::kQuads), 0).load(p, now, x);
  }
  __syncthreads();  // place readable
  if (place.begin >= place.end) {
    return;
  }
  const RingShape& shape = place.shape;
  uint2* weights = reinterpret_cast<uint2*>(shared);
  write_table<Config>(p, place.head_out, weights, bias);

  // Cells of columns outside the lines are zero for good: the first kLeft / 2 + 1 and the last four.
  const int last = shape.warps_per_line * 128;
  for (int n = threadIdx.x; n < shape.slots * R::kQuads * (R::kSpan + 4); n += Config::kThreads) {
    const int k = n % (R::kSpan + 4) < R::kSpan ? n % (R::kSpan + 4)
                                                : last + n % (R::kSpan + 4) - R::kSpan + R::kLeft / 2;
    const int quad = n / (R::kSpan + 4) % R::kQuads, at = n / (R::kSpan + 4) / R::kQuads;
    *reinterpret_cast<uint4*>(ring + (quad * 4 + k % 4) * Config::kPlane + at * shape.slot +
                              k / 4 * 16) = {0, 0, 0, 0};
  }

  const WarpTask of_warp(shape, R::kQuads);
  int poisoned = -1;  // the last row of P, by number, that may be NaN
  int slot = 0;       // of row `first`
#pragma unroll 1
  for (int first = 0; first < place.count; first += shape.rows_per_step) {
    const LaneTask<Config> task(p, place, of_warp, first);
    const bool any = task.warp_has_any();
    float e[4][8], factor[4];
    if (any) {
      if (task.allowed < 8) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          mask_pack<T>(x[h], task.allowed);
        }
      }
      if constexpr (Config::kSparsemax) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          const int head = min(task.quad * 4 + h, Config::kChannels - 1);
          const int64 n = (place.item * p.heads_in + place.head_in + head) * p.seq + task.row;
          const float shift = static_cast<const float*>(p.shift)[n];
          const float weight = static_cast<const float*>(p.factor)[n];
          factor[h] = 1 + 0 * weight;  // NaN where the row is
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            const float score = x[h][k];
            e[h][k] = score < shift ? 0.0f : score - shift + weight;
          }
        }
      } else {
        float largest[4], total[4];
        warp_largest<T>(x, largest);
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          const float anchor = RunningSoftmax::anchor(largest[h]);
          total[h] = 0;
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            e[h][k] = exp2f((x[h][k] - anchor) * kLog2e);
            total[h] += e[h][k];
          }
        }
        const float sum = warp_sums(total);
        if (lane % 8 == 0) {
          const float of_head = lane == 0 ? largest[0] : lane == 8 ? largest[1]
                                : lane == 16 ? largest[2] : largest[3];
          statistics[warp * 4 + lane / 8] = float2{of_head, sum};
        }
      }
    } else {
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        factor[h] = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          e[h][k] = 0;
        }
      }
      if (lane < 4) {
        statistics[warp * 4 + lane] = float2{negative_infinity<float>(), 0};
      }
    }
    __syncthreads();  // statistics readable; the rows that this step overwrites were used

    bool found = false;
    if (task.exists) {
      int mine = slot + of_warp.row;
      mine -= mine >= shape.slots ? shape.slots : 0;
      if (!Config::kSparsemax && any) {
        line_factors(statistics + (warp - task.part) * 4, shape.warps_per_line, task.part, factor);
      }
      if constexpr (Config::kChannels % 4 != 0) {
#pragma unroll
        for (int h = 1; h < 4; ++h) {
          factor[h] = task.quad * 4 + h < Config::kChannels ? factor[h] : 0.0f;
        }
      }
      found = write_cells<Config>(
          task, e, factor, ring + task.quad * 4 * Config::kPlane + mine * shape.slot,
          poison + mine * R::kQuads + task.quad);
    }
    if constexpr (Config::kAhead) {
      LaneTask<Config>(p, place, of_warp, first + shape.rows_per_step).load(p, place, x);
    }

    // Rows of y whose last row of P is in this step, by number, and where their first one is.
    const int from = max(0, first - (Config::kKh - 1));
    const int to = min(place.count, first + shape.rows_per_step) - (Config::kKh - 1);
    const int chunks = (p.seq + kChunk - 1) / kChunk;
    if (__syncthreads_or(found)) {  // the rows of this step are in the ring
      poisoned = first + shape.rows_per_step - 1;
    }
    int top = slot - (first - from);
    top += top < 0 ? shape.slots : 0;
    slot += shape.rows_per_step;
    slot -= slot >= shape.slots ? shape.slots : 0;

    // Chunks of all these rows, one after the other, are dealt to the warps.
    int row = from, chunk = warp;
#pragma unroll 1
    while (true) {
#pragma unroll 1
      while (chunk >= chunks && row < to) {
        chunk -= chunks;
        ++row;
        top = top + 1 == shape.slots ? 0 : top + 1;
      }
      if (row >= to) {
        break;
      }
      const int query = place.begin + row, key = chunk * kChunk;
      if (key > query) {
        store_zeros<Config>(p, place, query, key);
      } else {
        multiply_chunk<Config>(p, place, weights, bias, shared_address(ring), top, query, chunk);
        if (from <= poisoned) {
          poison_chunk<Config>(p, place.y, nan_rows<Config>(shape, poison, top), query, key);
        }
      }
      chunk += R::kWarps;
    }
    if constexpr (!Config::kAhead) {
      LaneTask<Config>(p, place, of_warp, first + shape.rows_per_step).load(p, place, x);
    }
  }
}
