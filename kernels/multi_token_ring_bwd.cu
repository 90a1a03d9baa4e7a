// multi_token_ring_bwd.cu: multi-token attention with softmax, backward, blocks that walk down the
// rows and read everything once.
//
//   dP[c, i, j] = sum_{o, u, v} weight[o, c, u, v] * dy[o, i - u + r0, j - v + c0]
//   mean(c, i)  = sum_j P dP;   d_scores = P * (dP - mean);   j <= i throughout
//   d_weight[o, c, u, v] = sum_{batch, i, j} P[c, i, j] * dy[o, i - u + r0, j - v + c0]
//   d_bias[o]   = sum_{batch, i, j} dy[o, i, j]
//
// Shapes    scores, dy: unit key stride, rows and pointers multiples of kVector elements; weight:
//           any strides; d_scores: contiguous;  partial (elements of d_weight then d_bias, chunks),
//           float
// Passes    multi_token_ring_bwd, then multi_token_d_weight of multi_token_bwd.cu sums the chunks
// Grid      one block per (part of the rows, item, group), parts of equal cost, long rows first; a
//           (part, item) is a chunk. One wave
// Block     kThreads threads. A warp has kTasks times 128 columns of one row of four heads ("a
//           quad"); `line` warps make a row, and as many rows as there are warps make a step
// Ring      rows of dy, masked, in chunks of 16 bytes: four heads of two neighbouring columns.
//           Chunk k of a row is number k / 4 of plane k % 4
//
//             chunk k:  | column 2k - left: heads 0..3 | column 2k + 1 - left: heads 0..3 |
//
//             planes:   | chunks 0, 4, 8, ... of the slots | 1, 5, 9, ... | 2, ... | 3, ... |
//
// Step      staged rows of dy -> ring | barrier | the next rows are asked for; dP, and per row sums
//           of e = exp(score - largest) and of e dP | barrier | P, d_scores, d_weight; the next
//           rows of scores are asked for
//           A step reads kKh - 1 + rows slots and the next one writes `rows` others
// Products  pairs of neighbouring columns j = 2k, 2k + 1 are the rows of the first matrix. Their
//           taps in a row u are in chunks k .. k + kSpan - 1, the leftmost first: hence `left`
//
//           dP        pairs x (chunk or u of 2, dx', o)  times  weights: (the same) x (c, dx)
//           d_weight  the same matrix, transposed by the load, times P: pairs x (c, dx). Entry
//                     ((shift, dx', o), (c, dx)) belongs to tap v = kKw - 1 + dx - 2 shift - dx';
//                     each (column, tap) is in one entry: no product is spent on shifted columns
//           d_bias    dy as it comes from memory times 1
//
//           Pair (x, q) has columns 8 x + 2 q: the sixteen x of 128 columns are the rows of a
//           product, the four q are four products. So a lane ends with columns 8 x .. 8 x + 7 of
//           one head, 16 bytes of scores and of d_scores. P becomes a second matrix by movmatrix
// Banks     eight rows of a matrix are eight neighbouring chunks of one plane
// Not finite  a weight 0 meets the columns beside the outermost taps: a NaN of dy would spread
//           there. Then the sum of e dP is not finite, and in such a step dP is computed tap by
//           tap, much slower. A row of P is NaN as a whole; its d_weight is set, not computed
// Memory    scores and dy are read once (dy kKh - 1 rows more per block); d_scores is written once
// Accuracy  P is rounded to T for d_weight, as the textbook does; P, dP and all sums are float
// Limits    dilation 1; kKw <= 7; a row fits the warps
// Config    T: f16 or bf16; kIn, kOut: heads of a group; kKh, kKw; kVector: elements per access;
//           kTasks: even; kPlane: bytes of a plane of the ring; kThreads
// Sources   as multi_token_fwd.cu; running maximum: Milakov and Gimelshein, 2018
#include "common/params.cuh"
#include "common/types.cuh"
#include "common/reduce.cuh"
#include "common/multi_token.cuh"
#include "common/mma.cuh"

extern __shared__ uint4 ring[];

constexpr float kLog2OfE = 1.44269504f;

// Transpose an 8 x 8 matrix: a lane has row g, columns 2q and 2q + 1, before and after.
__device__ inline unsigned transposed(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Sizes that follow from the configuration.
template <class Config>
struct Sizes {
  static constexpr int kWarps = Config::kThreads / kWarp;
  static constexpr int kInQuads = (Config::kIn + 3) / 4;
  static constexpr int kOutQuads = (Config::kOut + 3) / 4;
  static constexpr int kTeams = kWarps / kInQuads;          // warps of one quad
  static constexpr int kWide = Config::kTasks * 128;        // columns of a warp
  static constexpr int kSpan = (Config::kKw + 4) / 4 * 2;   // chunks of a pair's taps, even
  static constexpr int kPairs = Config::kKh / 2;            // of rows of taps
  static constexpr int kPaired = kPairs * kSpan;            // products of those
  static constexpr int kParts = kOutQuads * (kPaired + Config::kKh % 2 * kSpan / 2);
  static constexpr int kUnits = (kOutQuads + kInQuads - 1) / kInQuads;  // quads of dy of a warp
  static constexpr int kWeights = Config::kOut * Config::kIn * Config::kKh * Config::kKw;
  // Slots of the ring where `line` warps make a row: nobody waits for the readers of the last step.
  static constexpr int slots(int line) { return 2 * (kTeams / line) + Config::kKh - 1; }
  // 16-byte chunks of a row in a plane; the last one is right halo.
  static constexpr int chunks(int line) { return Config::kTasks * 16 * line + 1; }
  static constexpr int plane() {
    int bytes = 0;
    for (int line = 1; line <= kTeams; ++line) {
      int needed = slots(line) * chunks(line) * kOutQuads * 16;
      bytes = bytes < needed ? needed : bytes;
    }
    return bytes;
  }
  static_assert(Config::kTasks % 2 == 0 && kWarps % kInQuads == 0, "whole lines");
  static_assert(Config::kKw <= 7, "one chunk of right halo");
  static_assert(Config::kPlane == plane(), "kPlane differs from the table's");
  static_assert(kWarps * kParts * 512 <= 4 * plane(), "the last sums fit");
};

// Eight neighbouring columns of one row.
struct Eight {
  unsigned pair[4];
};

// The first `count` of eight entries; more may be read, whole pieces of kVector. Nothing waits for
// them here, unless kVector is 1: keep_first comes when they are used.
template <int kVector, class T>
__device__ inline void load_eight(Eight& x, const T* from, int count) {
  if constexpr (kVector == 8) {
    if (count > 0) {
      uint4 loaded = __ldg(reinterpret_cast<const uint4*>(from));
      x = {{loaded.x, loaded.y, loaded.z, loaded.w}};
    }
  } else if constexpr (kVector == 4) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (4 * k < count) {
        uint2 loaded = __ldg(reinterpret_cast<const uint2*>(from + 4 * k));
        x.pair[2 * k] = loaded.x;
        x.pair[2 * k + 1] = loaded.y;
      }
    }
  } else if constexpr (kVector == 2) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (2 * k < count) {
        x.pair[k] = __ldg(reinterpret_cast<const unsigned*>(from + 2 * k));
      }
    }
  } else {
    unsigned short one[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      one[k] = k < count ? __ldg(reinterpret_cast<const unsigned short*>(from + k)) : 0;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x.pair[k] = one[2 * k] | unsigned(one[2 * k + 1]) << 16;
    }
  }
}

// Replace all entries but the first `count`.
__device__ inline void keep_first(Eight& x, int count, unsigned filler) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    unsigned mask = 2 * k + 1 < count ? 0xffffffffu : 2 * k < count ? 0xffffu : 0;
    x.pair[k] = (x.pair[k] & mask) | (filler & ~mask);
  }
}

// Write the first `count` of eight entries; `count` may be more, and is a multiple of kVector.
template <int kVector, class T>
__device__ inline void store_eight(T* to, int count, const Eight& x) {
  if constexpr (kVector == 8) {
    if (count > 0) {
      *reinterpret_cast<uint4*>(to) = {x.pair[0], x.pair[1], x.pair[2], x.pair[3]};
    }
  } else if constexpr (kVector == 4) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (4 * k < count) {
        *reinterpret_cast<uint2*>(to + 4 * k) = {x.pair[2 * k], x.pair[2 * k + 1]};
      }
    }
  } else if constexpr (kVector == 2) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (2 * k < count) {
        *reinterpret_cast<unsigned*>(to + 2 * k) = x.pair[k];
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k < count) {
        to[k].bits = static_cast<unsigned short>(x.pair[k / 2] >> (k % 2 * 16));
      }
    }
  }
}

// Eight columns of a quad of dy into the ring; `to`: chunk 4 * lane of the row.
template <class Config>
__device__ inline void store_cells(char* to, const Eight (&x)[4]) {
  constexpr int kLeft = Config::kKw - 1 - Config::kKw / 2;
  uint2 cell[8];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    cell[2 * k] = {low_halves(x[0].pair[k], x[1].pair[k]), low_halves(x[2].pair[k], x[3].pair[k])};
    cell[2 * k + 1] = {high_halves(x[0].pair[k], x[1].pair[k]),
                       high_halves(x[2].pair[k], x[3].pair[k])};
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    int at = k + kLeft;
    char* chunk = to + at / 2 % 4 * Config::kPlane + at / 8 * 16;
    if (at % 2 == 1) {
      if (k == 0) {
        *reinterpret_cast<uint2*>(chunk + 8) = cell[k];
      }
    } else if (k < 7) {
      *reinterpret_cast<uint4*>(chunk) = {cell[k].x, cell[k].y, cell[k + 1].x, cell[k + 1].y};
    } else {
      *reinterpret_cast<uint2*>(chunk) = cell[k];
    }
  }
}

// What a block does, and where a warp stands in it. A row of dy has the slot of its number, counted
// from the first row that the block reads, modulo the slots.
template <class Config>
struct Place {
  using S = Sizes<Config>;
  int item, group, part;
  int first_row, end_row;  // of d_scores
  int line;                // warps of a row
  int rows;                // of a step
  int slots, quad_bytes, slot_bytes;
  int quad, row, column;   // of the warp: its quad; its row in the step; its first column

  __device__ Place(const MultiTokenParams& p) {
    int pairs = int(p.batch) * p.groups;
    int parts = gridDim.x / pairs;
    part = parts - 1 - int(blockIdx.x) / pairs;
    item = blockIdx.x % pairs / p.groups;
    group = blockIdx.x % pairs % p.groups;
    const float slope = 0.4f * p.seq, flat = 0.2f * p.seq + 128;  // products, and what a row costs
    first_row = part_start(part, parts, p.seq, slope, flat);
    end_row = part_start(part + 1, parts, p.seq, slope, flat);
    int width = min(end_row + p.column_origin, p.seq);
    line = max(1, (width + S::kWide - 1) / S::kWide);
    rows = S::kTeams / line;
    slots = 2 * rows + Config::kKh - 1;
    quad_bytes = S::chunks(line) * 16;
    slot_bytes = quad_bytes * S::kOutQuads;
    int warp = threadIdx.x / kWarp;
    quad = warp % S::kInQuads;
    row = warp / S::kInQuads / line;
    column = warp / S::kInQuads % line * S::kWide;
  }
};

// The rows of dy that a row of d_scores needs, and a lane's rows of matrices in task 0. A product
// takes 16 rows or columns of taps: a chunk of two rows u, so that a chunk once loaded serves all
// its shifts; where kKh is odd, of the last row, two neighbouring chunks.
template <class Config>
struct Rows {
  using S = Sizes<Config>;
  int start[Config::kKh];                      // bytes from the ring's start
  unsigned pair[S::kPairs > 0 ? S::kPairs : 1];  // shared addresses
  unsigned last;
  unsigned turn;  // what to add to `last` where the second chunk is in plane 0

  // `first`: slot of the row of u = kKh - 1. Transposed, the matrices of a load change places: they
  // come as x = 0..7, 8..15 of the first eight taps, then of the others, or the other way round.
  __device__ Rows(const Place<Config>& at, int lane, int first, bool transposed) {
    bool second = lane & (transposed ? 8 : 16);
    int x = lane % 8 + (lane & (transposed ? 16 : 8) ? 8 : 0);
    unsigned base = shared_address(ring) + (at.column / 8 + x) * 16;
#pragma unroll
    for (int u = 0; u < Config::kKh; ++u) {
      int slot = first + Config::kKh - 1 - u;
      start[u] = (slot < at.slots ? slot : slot - at.slots) * at.slot_bytes;
    }
#pragma unroll
    for (int n = 0; n < S::kPairs; ++n) {
      pair[n] = base + (second ? start[2 * n + 1] : start[2 * n]);
    }
    last = base + start[Config::kKh - 1] + (second ? Config::kPlane : 0);
    turn = second ? 16 - 4 * Config::kPlane : 0;
  }
};

// Call visit(part, q, a) for all products of a task: a is what `load` gets from the ring for pairs
// q of the sixteen x.
template <class Config, class Load, class Visit>
__device__ inline void for_each_product(const Place<Config>& at, const Rows<Config>& rows, int task,
                                        Load load, Visit visit) {
  using S = Sizes<Config>;
#pragma unroll
  for (int n = 0; n < S::kPairs; ++n) {
#pragma unroll
    for (int quad = 0; quad < S::kOutQuads; ++quad) {
#pragma unroll
      for (int chunk = 0; chunk < S::kSpan + 3; ++chunk) {
        unsigned a[4];
        load(a, rows.pair[n] + quad * at.quad_bytes + task * 256 + chunk % 4 * Config::kPlane +
                    chunk / 4 * 16);
#pragma unroll
        for (int shift = 0; shift < S::kSpan; ++shift) {
          if (chunk >= shift && chunk < shift + 4) {
            visit((n * S::kSpan + shift) * S::kOutQuads + quad, chunk - shift, a);
          }
        }
      }
    }
  }
  if constexpr (Config::kKh % 2 == 1) {
#pragma unroll
    for (int quad = 0; quad < S::kOutQuads; ++quad) {
#pragma unroll
      for (int chunk = 0; chunk < S::kSpan + 2; ++chunk) {
        unsigned a[4];
        load(a, rows.last + (chunk % 4 == 3 ? rows.turn : 0) + quad * at.quad_bytes + task * 256 +
                    chunk % 4 * Config::kPlane + chunk / 4 * 16);
#pragma unroll
        for (int shift = 0; shift < S::kSpan; shift += 2) {
          if (chunk >= shift && chunk < shift + 4) {
            visit((S::kPaired + shift / 2) * S::kOutQuads + quad, chunk - shift, a);
          }
        }
      }
    }
  }
}

// Which sums of d_weight the taps of row u in chunk `shift` are: a part, and rows 0..7 or 8..15.
template <class Config>
__device__ inline int part_of(int u, int shift) {
  using S = Sizes<Config>;
  return u / 2 < S::kPairs ? u / 2 * S::kSpan + shift : S::kPaired + shift / 2;
}
template <class Config>
__device__ inline int half_of(int u, int shift) {
  return u / 2 < Sizes<Config>::kPairs ? u % 2 : shift % 2;
}

// dP of a lane's head and columns: sum[q][2 h + dx] is column 8 (x + 8 h) + 2 q + dx, x = lane / 4.
template <class Config>
__device__ inline void gradients(float (&sum)[4][4], const uint2* weights,
                                 const Place<Config>& at, const Rows<Config>& rows, int task) {
  uint2 weight[Sizes<Config>::kParts];
#pragma unroll
  for (int part = 0; part < Sizes<Config>::kParts; ++part) {
    weight[part] = weights[part * kWarp];
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      sum[q][k] = 0;
    }
  }
  for_each_product<Config>(
      at, rows, task, [](unsigned (&a)[4], unsigned row) { load_matrices(a, row); },
      [&](int part, int q, const unsigned (&a)[4]) {
        multiply<typename Config::T>(sum[q], a[0], a[1], a[2], a[3], weight[part].x,
                                     weight[part].y);
      });
}

// The same without matrix units: what is not finite reaches what its taps reach, and nothing else.
template <class Config>
__device__ inline void exact_gradients(float (&sum)[4][4], const MultiTokenParams& p,
                                       const Place<Config>& at, const Rows<Config>& rows,
                                       int first_column) {
  using T = typename Config::T;
  constexpr int kKh = Config::kKh, kKw = Config::kKw;
  int lane = threadIdx.x % kWarp;
  int head = at.quad * 4 + lane % 4;
#pragma unroll 1
  for (int number = 0; number < 16; ++number) {
    int q = number / 4, k = number % 4;
    int column = first_column + lane / 4 * 8 + k / 2 * 64 + q * 2 + k % 2;
    float y = 0;
#pragma unroll 1
    for (int tap = 0; tap < Config::kOut * kKh * kKw && head < Config::kIn; ++tap) {
      int v = tap % kKw;
      int u = tap / kKw % kKh;
      int o = tap / (kKw * kKh);
      int start = 0;
#pragma unroll
      for (int n = 0; n < kKh; ++n) {  // registers have no run-time index, here and below
        start = n == u ? rows.start[n] : start;
      }
      int cell = column - v + kKw - 1;
      const char* from = reinterpret_cast<const char*>(ring) + start + o / 4 * at.quad_bytes +
                         cell / 2 % 4 * Config::kPlane + cell / 8 * 16 + cell % 2 * 8 + o % 4 * 2;
      const T* weight = static_cast<const T*>(p.weight);
      y += widen(weight[(int64(at.group) * Config::kOut + o) * p.weight_stride[0] +
                        head * p.weight_stride[1] + u * p.weight_stride[2] +
                        v * p.weight_stride[3]]) *
           widen(*reinterpret_cast<const T*>(from));
    }
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      sum[n / 4][n % 4] = n == number ? y : sum[n / 4][n % 4];
    }
  }
}

// Largest score (times log2 e) of a row so far, and sums of e = 2^(score - largest) and of e dP.
struct RowSums {
  float largest, total, product;

  // Put two parts of a row together.
  __device__ void add(const RowSums& other) {
    float before = largest;
    largest = fmaxf(largest, other.largest);
    float mine = before == largest ? 1 : exp2f(before - largest);
    float others = other.largest == largest ? 1 : exp2f(other.largest - largest);
    total = total * mine + other.total * others;
    product = product * mine + other.product * others;
  }

  // Put the parts of the eight lanes of equal lane % 4 together; all get the result.
  __device__ void add_lanes() {
#pragma unroll
    for (int distance = 4; distance < kWarp; distance *= 2) {
      float before = largest;
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
      float scale = before == largest ? 1 : exp2f(before - largest);
      total *= scale;
      product *= scale;
      total += __shfl_xor_sync(0xffffffffu, total, distance);
      product += __shfl_xor_sync(0xffffffffu, product, distance);
    }
  }
};

// Let the compiler know nothing of x. In a loop: what follows from x is computed where it is used,
// not kept in registers that the loop has not got.
__device__ inline void forget(int& x) { asm volatile("" : "+r"(x)); }

// Copy kVector entries to shared memory, behind the back of the registers.
template <int kVector>
__device__ inline void copy_async(void* to, const void* from) {
  static_assert(kVector == 2 || kVector == 4 || kVector == 8, "4, 8 or 16 bytes");
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
               :: "r"(shared_address(to)), "l"(from), "n"(kVector * 2) : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <class Config>
__device__ void multi_token_ring_bwd(const MultiTokenParams& p) {
  using T = typename Config::T;
  using S = Sizes<Config>;
  constexpr int kIn = Config::kIn, kOut = Config::kOut, kKh = Config::kKh, kKw = Config::kKw;
  constexpr int kTasks = Config::kTasks, kVector = Config::kVector;
  constexpr int kLeft = kKw - 1 - kKw / 2;
  const float kLowest = negative_infinity<float>();
  const unsigned kLowestPair = narrow<T>(kLowest).bits * 0x10001u;
  __shared__ uint2 weights[S::kInQuads * S::kParts][kWarp];
  __shared__ RowSums of_warp[S::kWarps][4];
  __shared__ float4 sum_dy[S::kWarps][S::kUnits][8];  // of four heads; lanes 4 g to 4 g + 3
  __shared__ int64 partial_start, dy_start;  // here, since the loop leaves no register free

  Place<Config> at(p);
  int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int head = at.quad * 4 + lane % 4;  // of the scores, in the group
  char* const bytes = reinterpret_cast<char*>(ring);

  // The lane's scores and d_scores in task 0, of row first_row + row.
  const int64 first_head = int64(at.group) * kIn + (head < kIn ? head : 0);
  int lane_column = at.column + lane / 4 * 8;
  const T* scores = row_start<T>(p.scores, p.scores_stride, at.item, first_head,
                                 at.first_row + at.row) + lane_column;
  T* d_scores = static_cast<T*>(p.d_scores) +
                ((int64(at.item) * p.heads_in + first_head) * p.seq + at.first_row + at.row) *
                    p.seq + lane_column;
  Eight x[kTasks][2];
  auto load_scores = [&](int task, int row) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int count = at.row < at.rows && row < at.end_row && head < kIn
                      ? row + 1 - lane_column - task * 128 - h * 64 : 0;
      load_eight<kVector>(x[task][h], scores + task * 128 + h * 64, count);
    }
  };
#pragma unroll
  for (int task = 0; task < kTasks; ++task) {
    load_scores(task, at.first_row + at.row);
  }

  // Rows of dy, in units of 256 columns of a quad. The rows of the next step wait where only the
  // lane that asked for them reads them.
  constexpr int kUnits = S::kUnits * kTasks / 2;
  int64 dy_offset = at.item * p.dy_stride[0] + int64(at.group) * kOut * p.dy_stride[1];
  uint4* const staged = ring + Config::kPlane / 4 + warp * kUnits * 128 + lane;
  if (lane % 4 == 0) {
#pragma unroll
    for (int unit = 0; unit < S::kUnits; ++unit) {
      sum_dy[warp][unit][lane / 4] = {0, 0, 0, 0};
    }
  }
  if (threadIdx.x == 0) {
    partial_start = int64(at.group) * S::kWeights * p.chunks + int64(at.part) * p.batch + at.item;
    dy_start = at.item * p.dy_stride[0] + int64(at.group) * kOut * p.dy_stride[1];
  }
  auto unit_quad = [&](int unit) { return at.quad + unit / (kTasks / 2) * S::kInQuads; };
  auto unit_column = [&](int unit) { return at.column + unit % (kTasks / 2) * 256 + lane * 8; };
  auto unit_count = [&](int unit, int row) {
    return at.row < at.rows && row >= 0 && row < p.seq ? row + 1 - unit_column(unit) : 0;
  };
  auto dy_of = [&](int unit, int k, int row) {
    return static_cast<const T*>(p.dy) + dy_offset + (unit_quad(unit) * 4 + k) * p.dy_stride[1] +
           row * p.dy_stride[2] + unit_column(unit);
  };
  // Whether head k of a unit exists.
  auto has_head = [&](int unit, int k) { return kOut % 4 == 0 || unit_quad(unit) * 4 + k < kOut; };
  auto has_quad = [&](int unit) {
    return S::kOutQuads % S::kInQuads == 0 || unit_quad(unit) < S::kOutQuads;
  };
  auto stage = [&](int row) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      int count = has_quad(unit) ? unit_count(unit, row) : 0;
#pragma unroll(kVector == 1 ? 1 : 4)
      for (int k = 0; k < 4; ++k) {
        if (has_head(unit, k)) {
          const T* from = dy_of(unit, k, row);
          uint4* to = staged + (unit * 4 + k) * 32;
          if constexpr (kVector == 1) {
            Eight y = {};
            load_eight<1>(y, from, count);
            *to = {y.pair[0], y.pair[1], y.pair[2], y.pair[3]};
          } else {
#pragma unroll
            for (int n = 0; n < 8; n += kVector) {
              if (n < count) {
                copy_async<kVector>(reinterpret_cast<T*>(to) + n, from + n);
              }
            }
          }
        }
      }
    }
  };
  // Put rows into the ring and, where `add`, to the sums of d_bias: by products with 1.
  auto store = [&](int unit, Eight (&y)[4], int row, int start, bool add) {
    int count = unit_count(unit, row);
    if (kOut % 4 != 0 || count < 8) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        keep_first(y[k], has_head(unit, k) ? count : 0, 0);
      }
    }
    if (p.d_bias && add) {
      const unsigned one = pack<T>(1, 1);
      float sum[2][4] = {};
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          multiply<T>(sum[k], y[2 * k].pair[n], y[2 * k + 1].pair[n], y[2 * k].pair[n + 1],
                      y[2 * k + 1].pair[n + 1], one, one);
        }
      }
      if (lane % 4 == 0) {
        float4& to = sum_dy[warp][unit / (kTasks / 2)][lane / 4];
        to = {to.x + sum[0][0], to.y + sum[0][2], to.z + sum[1][0], to.w + sum[1][2]};
      }
    }
    if (at.row < at.rows && has_quad(unit)) {
      store_cells<Config>(
          bytes + start + unit_quad(unit) * at.quad_bytes + unit_column(unit) * 2, y);
    }
  };

  stage(at.first_row + at.row < at.end_row ? at.first_row + at.row + p.row_origin : -1);
  // The weights as second matrices: column (c, dx) is lane / 4, rows (dx', o) are lane % 4 * 2...
#pragma unroll 1
  for (int n = threadIdx.x; n < S::kInQuads * S::kParts * kWarp; n += Config::kThreads) {
    unsigned pair[2] = {0, 0};
    int part = n / kWarp % S::kParts / S::kOutQuads;
    int c = n / kWarp / S::kParts * 4 + n % kWarp / 8;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int u = part < S::kPaired ? part / S::kSpan * 2 + k / 2 : kKh - 1;
      int shift = part < S::kPaired ? part % S::kSpan : (part - S::kPaired) * 2 + k / 2;
      int v = kKw - 1 + n / 4 % 2 - shift * 2 - n % 4 / 2;
      int o = n / kWarp % S::kParts % S::kOutQuads * 4 + n % 2 * 2 + k % 2;
      if (v >= 0 && v < kKw && c < kIn && o < kOut) {
        const T* w = static_cast<const T*>(p.weight) +
                     (int64(at.group) * kOut + o) * p.weight_stride[0] + c * p.weight_stride[1] +
                     u * p.weight_stride[2] + v * p.weight_stride[3];
        pair[k / 2] |= unsigned(w->bits) << (k % 2 * 16);
      }
    }
    weights[n / kWarp][n % kWarp] = {pair[0], pair[1]};
  }
  // Cells that no row covers: left and right of all columns.
  for (int n = threadIdx.x; n < at.slots * S::kOutQuads; n += Config::kThreads) {
    char* row = bytes + n * at.quad_bytes;
#pragma unroll
    for (int cell = 0; cell < 8; ++cell) {
      char* to = row + cell / 2 * Config::kPlane + cell % 2 * 8 +
                 (cell < kLeft ? 0 : at.quad_bytes - 16);
      *reinterpret_cast<uint2*>(to) = {0, 0};
    }
  }
#pragma unroll 1
  for (int n = at.row; n < kKh - 1 && at.row < at.rows; n += at.rows) {
    int row = at.first_row + n + p.row_origin - (kKh - 1);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      Eight y[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        load_eight<kVector>(y[k], dy_of(unit, k, row),
                            has_quad(unit) && has_head(unit, k) ? unit_count(unit, row) : 0);
      }
      // Each block adds the rows that its steps bring; the first block these too.
      store(unit, y, row, n * at.slot_bytes, at.first_row == 0);
    }
  }

  float sum[S::kParts][4] = {};
  int slot = at.row;  // of the row of dy that the warp's row needs first
  for (int first = at.first_row; first < at.end_row; first += at.rows) {
    forget(at.column);
    forget(at.row);
    forget(lane);
    forget(lane_column);
    const int row = first + at.row;
    const bool live = at.row < at.rows && row < at.end_row;
    const int width = live ? row + 1 - at.column : 0;  // of this warp, or more
    const Rows<Config> rows(at, lane, slot, false);
    wait_for_copies();
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      Eight y[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint4 loaded = staged[(unit * 4 + k) * 32];
        y[k] = {{loaded.x, loaded.y, loaded.z, loaded.w}};
      }
      store(unit, y, row < at.end_row ? row + p.row_origin : -1, rows.start[0], true);
    }
    __syncthreads();  // ring readable
    dy_offset = dy_start;
    stage(row + at.rows < at.end_row ? row + at.rows + p.row_origin : -1);

    float slope[kTasks][4][4];
    RowSums sums = {kLowest, 0, 0};
#pragma unroll
    for (int task = 0; task < kTasks; ++task) {
      if (task * 128 < width) {
        gradients<Config>(slope[task], &weights[at.quad * S::kParts][lane], at, rows, task);
        if (kIn % 4 != 0 || task * 128 + 128 > width) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            int count = width - task * 128 - h * 64 - lane / 4 * 8;
            keep_first(x[task][h], head < kIn ? count : 0, kLowestPair);
          }
        }
        unsigned largest = kLowestPair;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          largest = max_pair<T>(largest, max_pair<T>(x[task][0].pair[k], x[task][1].pair[k]));
        }
        float low, high;
        unpack<T>(largest, low, high);
        const float before = sums.largest;
        sums.largest = fmaxf(before, fmaxf(low, high) * kLog2OfE);
        const float shift = sums.largest == kLowest ? 0 : sums.largest;
        const float scale = before == sums.largest ? 1 : exp2f(before - shift);
        sums.total *= scale;
        sums.product *= scale;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            unpack<T>(x[task][h].pair[q], low, high);
            low = exp2f(fmaf(low, kLog2OfE, -shift));
            high = exp2f(fmaf(high, kLog2OfE, -shift));
            sums.total += low + high;
            sums.product = fmaf(low, slope[task][q][2 * h], sums.product);
            sums.product = fmaf(high, slope[task][q][2 * h + 1], sums.product);
          }
        }
      }
    }
    const bool finite = fabsf(sums.product) < -kLowest;
    sums.add_lanes();
    if (lane < 4) {
      of_warp[warp][lane] = sums;
    }
    if (live && head < kIn) {  // zeros right of the tasks
#pragma unroll 1
      for (int column = row / 128 * 128 + 128 + at.column / kTasks / 2 + lane / 4 * 8;
           column < p.seq; column += at.line * 64) {
        store_eight<kVector>(d_scores + (column - lane_column), p.seq - column,
                             Eight{{0, 0, 0, 0}});
      }
    }
    const bool exact = __syncthreads_or(!finite);  // of_warp readable

    auto row_sums = [&]() {
      RowSums of_row = {kLowest, 0, 0};
      const int line_start = min(at.row, at.rows - 1) * at.line;
#pragma unroll
      for (int n = 0; n < S::kTeams; n += 8) {
        if (n + lane / 4 < at.line) {
          const int number = (line_start + n + lane / 4) * S::kInQuads + at.quad;
          const RowSums& other = of_warp[number][lane % 4];
          n == 0 ? void(of_row = other) : of_row.add(other);
        }
      }
      of_row.add_lanes();
      return of_row;
    };
    const RowSums of_row = row_sums();
    const float factor = 1 / of_row.total;
    float mean = of_row.product * factor;
    const bool nan = !(of_row.total > 0 && of_row.total < -kLowest);  // all weights of the row
    if (exact) {
      float product = 0;
#pragma unroll
      for (int task = 0; task < kTasks; ++task) {
        if (task * 128 < width) {
          exact_gradients<Config>(slope[task], p, at, rows, at.column + task * 128);
#pragma unroll
          for (int n = 0; n < 16; ++n) {
            float low, high;
            unpack<T>(x[task][n / 2 % 2].pair[n / 4], low, high);
            float e = exp2f(fmaf(n % 2 ? high : low, kLog2OfE, -of_row.largest)) * factor;
            int column = task * 128 + lane / 4 * 8 + n / 2 % 2 * 64 + n / 4 * 2 + n % 2;
            product += column < width ? e * slope[task][n / 4][n % 4] : 0;
          }
        }
      }
      product += __shfl_xor_sync(0xffffffffu, product, 4);
      product += __shfl_xor_sync(0xffffffffu, product, 8);
      product += __shfl_xor_sync(0xffffffffu, product, 16);
      __syncthreads();  // of_warp free
      if (lane < 4) {
        of_warp[warp][lane] = {0, 0, product};
      }
      __syncthreads();  // of_warp readable
      mean = row_sums().product;
    }
    // NaN weights make NaN of all sums whose row of dy exists. Below they count as 0, since where
    // the row does not exist, they meet a 0 of the ring.
    const bool careful = exact || __any_sync(0xffffffffu, nan);
    if (careful) {
#pragma unroll
      for (int u = 0; u < kKh; ++u) {
#pragma unroll
        for (int n = 0; n < S::kSpan * S::kOutQuads; ++n) {
          int dy_row = row - u + p.row_origin;
          int shift = n / S::kOutQuads;
          if (nan && width > 0 && dy_row >= 0 && dy_row < p.seq) {
            float(&to)[4] = sum[part_of<Config>(u, shift) * S::kOutQuads + n % S::kOutQuads];
            to[2 * half_of<Config>(u, shift)] = __uint_as_float(0x7fffffffu);
            to[2 * half_of<Config>(u, shift) + 1] = __uint_as_float(0x7fffffffu);
          }
        }
      }
    }

    const Rows<Config> transposed_rows(at, lane, slot, true);
#pragma unroll
    for (int task = 0; task < kTasks; ++task) {
      if (task * 128 < width) {
        unsigned b[4][2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          Eight y;
          Eight weights;
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            float low, high;
            unpack<T>(x[task][h].pair[q], low, high);
            low = exp2f(fmaf(low, kLog2OfE, -of_row.largest)) * factor;
            high = exp2f(fmaf(high, kLog2OfE, -of_row.largest)) * factor;
            weights.pair[q] = pack<T>(low, high);
            y.pair[q] = pack<T>(low * (slope[task][q][2 * h] - mean),
                                high * (slope[task][q][2 * h + 1] - mean));
          }
          if (task * 128 + 128 > width) {  // zeros, not 0 * NaN, right of the diagonal
            keep_first(y, width - task * 128 - h * 64 - lane / 4 * 8, 0);
          }
          if (careful) {
            keep_first(weights, nan ? 0 : width - task * 128 - h * 64 - lane / 4 * 8, 0);
          }
          if (head < kIn) {
            store_eight<kVector>(d_scores + task * 128 + h * 64,
                                 p.seq - lane_column - task * 128 - h * 64, y);
          }
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            b[q][h] = transposed(weights.pair[q]);
          }
        }
        for_each_product<Config>(
            at, transposed_rows, task,
            [](unsigned (&a)[4], unsigned row) { load_matrices_transposed(a, row); },
            [&](int part, int q, const unsigned (&a)[4]) {
              multiply<T>(sum[part], a[0], a[1], a[2], a[3], b[q][0], b[q][1]);
            });
      }
      // The next step's scores, with all the time until its sums to arrive.
      if (task == 0) {
        scores += at.rows * p.scores_stride[2];
      }
      load_scores(task, row + at.rows);
    }
    d_scores += int64(at.rows) * p.seq;
    slot += at.rows;
    slot = slot < at.slots ? slot : slot - at.slots;
  }

  // The warps' sums, in their order.
  __syncthreads();  // the ring is no longer read
  float4* const all = reinterpret_cast<float4*>(ring);
  constexpr int kOfWarp = S::kParts * 32;
#pragma unroll
  for (int part = 0; part < S::kParts; ++part) {
    all[warp * kOfWarp + part * 32 + lane] = {sum[part][0], sum[part][1], sum[part][2],
                                              sum[part][3]};
  }
  __syncthreads();  // sums readable
  float* partial = static_cast<float*>(p.partial) + partial_start;
#pragma unroll 1
  for (int element = threadIdx.x; element < S::kWeights + (p.d_bias ? kOut : 0);
       element += Config::kThreads) {
    const float* const numbers = reinterpret_cast<const float*>(ring);
    float y = 0;
    if (element < S::kWeights) {
      int v = element % kKw;
      int u = element / kKw % kKh;
      int c = element / (kKw * kKh) % kIn;
      int o = element / (kKw * kKh * kIn);
#pragma unroll
      for (int dx = 0; dx < 2; ++dx) {
        int cell = kKw - 1 + dx - v;  // which tap v of a pair's column dx reads
        int part = part_of<Config>(u, cell / 2) * S::kOutQuads + o / 4;
        int of_lane = (cell % 2 * 4 + o % 4) * 4 + c % 4;
        int at_number = (part * 32 + of_lane) * 4 + half_of<Config>(u, cell / 2) * 2 + dx;
#pragma unroll 4
        for (int w = c / 4; w < S::kWarps; w += S::kInQuads) {
          y += numbers[w * kOfWarp * 4 + at_number];
        }
      }
    } else {
      int o = element - S::kWeights;
#pragma unroll 1
      for (int w = o / 4 % S::kInQuads; w < S::kWarps; w += S::kInQuads) {
#pragma unroll
        for (int g = 0; g < 8; ++g) {
          y += reinterpret_cast<const float*>(&sum_dy[w][o / 4 / S::kInQuads][g])[o % 4];
        }
      }
    }
    if (element < S::kWeights) {
      partial[int64(element) * p.chunks] = y;
    } else {  // the sums for d_bias come after those of all groups
      int group = blockIdx.x % (int(p.batch) * p.groups) % p.groups;
      int64 after = int64(p.groups - group) * S::kWeights + group * kOut;
      partial[(after + element - S::kWeights) * p.chunks] = y;
    }
  }
}
