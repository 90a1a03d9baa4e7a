// linear_hopper.cu: sums of matrix products by TMA and warpgroup products (sm_90a), and the planes that
// float32 products are made of.
//
//   c[s][i,j] = bias[s][j] + sum_k a[s][i,k] * b[s][j,k]         for each s < products, or, summed,
//   c[0][i,j] = bias[0][j] + sum over s of  sum_k a[s][i,k] * b[s][j,k]
//
// Shapes    a[s] (rows[s], depth[s]), b[s] (columns[s], depth[s]), either axis inside;
//           c[s] (rows[s], columns[s]), columns inside, a multiple of 8
// Grid      a block per multiprocessor; block n takes tiles n, n + grid, ...; tiles of a product follow
//           one another, columns fastest, then the splits of its depth
// Block     one warpgroup whose first thread asks for boxes, two that multiply 64 rows each
// Tile map  c tile 128 x kColumns, depth in steps of 128 bytes (float32: of two boxes)
//
//                 b: kColumns x step            stage of shared memory: a | b, kStages of them
//                  +-----------+
//             +----+-----------+
//   a: 128 x  | wg | 64 x      |                accumulators: 64 x 64 or 64 x 128, one or two
//      step   | wg | kColumns  |
//             +----+-----------+
//
// Pipeline  producer:  empty[stage] -> ask for a, b -> full[stage]
//           consumer:  full[stage] -> products of the step -> empty[stage];  bias, rounding, c
// float32   kPlanes 3: a number is a sum of three bf16 numbers, x = x0 + x1 + x2, exactly (each takes
//           the next 8 bits). Of the nine products of two numbers the six largest are made:
//             a2 b0 + a1 b1 + a0 b2 + a1 b0 + a0 b1 + a0 b0
//           a is split in registers; the planes of b are there already (linear_planes). The matrix
//           units truncate when they add, so a sum over 64 of depth is added to another register
//           set by ordinary additions. A result that is not finite is computed again, one number
//           at a time: an infinite x has no planes
//           kPlanes 1: one TF32 product, operands rounded by the copy engine. Its descriptors know
//           depth inside only: where b has rows inside, linear_planes copies it (one plane); where
//           a has, warps take its numbers to registers
// Splits    of the depth, where tiles are few: float32 sums to `partial`, added in order by linear_total
// Limits    sm_90a; 16-byte strides and addresses
#include "common/linear.cuh"
#include "common/mma.cuh"
#include "common/params.cuh"
#include "common/tma.cuh"
#include "common/types.cuh"
#include "common/wgmma.cuh"

template <class Config>
struct Tiling {
  using T = typename Config::T;
  static constexpr bool kExact = Config::kPlanes == 3;
  static constexpr bool kTaken = sizeof(T) == 4 && !kExact && Config::kRowsA;  // a in registers
  static constexpr int kRows = 128;
  static constexpr int kColumns = Config::kColumns;
  static constexpr int kDepth = sizeof(T) == 2 || kExact ? 64 : 32;
  static constexpr int kBytesA = kRows * kDepth * int(sizeof(T));
  static constexpr int kPlaneB = kColumns * 128;
  static constexpr int kStage = kBytesA + Config::kPlanes * kPlaneB;
  static constexpr int kWide = kColumns < 128 ? kColumns : 128;  // columns of an accumulator
  static constexpr int kSums = kColumns / kWide;                 // accumulators of a warpgroup
  static_assert(!kExact || kSums == 1, "float32 keeps two register sets");

  // An accumulator's results on their way to memory, where planes leave room for them: rows padded
  // so that no bank is asked twice.
  static constexpr int kPitch = (kWide + 8) * int(sizeof(T));
  static constexpr int kResults = kExact ? 0 : kRows * kPitch;
};

// Of the warpgroup's 64 rows, those of a lane's accumulator: this one, and kApart further. Where a
// lane takes numbers of a from lines of 32 rows, a warp's 32 then lie in as many banks.
template <class Config>
constexpr int kApart = Tiling<Config>::kTaken ? 4 : 8;
template <class Config>
__device__ inline int lane_row() {
  const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4;
  return Tiling<Config>::kTaken ? warp / 2 * 32 + warp % 2 * 8 + g / 4 * 16 + g % 4 : warp * 16 + g;
}

// What a block computes next. Uniform in the block.
struct LinearTile {
  int product;     // number of c
  int row, column;
  int begin, end;  // steps of depth, counted over all terms of a sum
  int split;

  template <class Config>
  __device__ static LinearTile number(const LinearHopperParams& p, int n) {
    using L = Tiling<Config>;
    LinearTile tile;
    int s = 0, columns, tiles;
    for (;; ++s) {
      columns = (p.columns[s] + L::kColumns - 1) / L::kColumns;
      tiles = (p.rows[s] + L::kRows - 1) / L::kRows * columns * p.splits;
      if (n < tiles) {
        break;
      }
      n -= tiles;
    }
    int steps = 0;
    for (int term = s; term < (p.summed ? p.products : s + 1); ++term) {
      steps += (p.depth[term] + L::kDepth - 1) / L::kDepth;
    }
    tile.product = s;
    tile.split = n % p.splits;
    n /= p.splits;
    tile.column = n % columns * L::kColumns;
    tile.row = n / columns * L::kRows;
    tile.begin = int(int64(steps) * tile.split / p.splits);
    tile.end = int(int64(steps) * (tile.split + 1) / p.splits);
    return tile;
  }
};

template <class Config>
__device__ inline int tile_count(const LinearHopperParams& p) {
  using L = Tiling<Config>;
  int count = 0;
  for (int s = 0; s < (p.summed ? 1 : p.products); ++s) {
    count += (p.rows[s] + L::kRows - 1) / L::kRows *
             ((p.columns[s] + L::kColumns - 1) / L::kColumns) * p.splits;
  }
  return count;
}

// ---------------------------------------------------------------------------------------- loads

// Ask for one step's boxes. `k` is the first of depth.
template <class Config>
__device__ inline void load_step(const LinearHopperParams& p, int term, const LinearTile& tile,
                                 int k, unsigned stage, unsigned full) {
  using L = Tiling<Config>;
  constexpr int kInside = 128 / int(sizeof(typename L::T));  // elements of a row of a's boxes
  if constexpr (Config::kRowsA) {
#pragma unroll
    for (int i = 0; i < L::kRows; i += kInside) {
      load_box(stage + i * L::kDepth * int(sizeof(typename L::T)), p.a_map[term], full,
               tile.row + i, k, 0);
    }
  } else {
#pragma unroll
    for (int i = 0; i < L::kDepth; i += kInside) {
      load_box(stage + i * L::kRows * int(sizeof(typename L::T)), p.a_map[term], full, k + i,
               tile.row, 0);
    }
  }
  stage += L::kBytesA;
  if constexpr (Config::kRowsB) {
#pragma unroll
    for (int i = 0; i < L::kColumns; i += 64) {
      load_box(stage + i * 128, p.b_map[term], full, tile.column + i, k, 0);
    }
  } else {
#pragma unroll
    for (int plane = 0; plane < Config::kPlanes; ++plane) {
      load_box(stage + plane * L::kPlaneB, p.b_map[term], full, k, tile.column, plane);
    }
  }
}

// -------------------------------------------------------------------------- TF32, rows of a inside

// A step's fragments of the warpgroup's rows, from boxes of 32 rows x 32 of depth.
template <class Config>
__device__ inline void take_step(const unsigned char* a, int group, unsigned (&to)[4][4]) {
  const int row = group * 64 + lane_row<Config>(), q = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int r = row + i % 2 * kApart<Config>, k = i / 4 * 8 + i / 2 % 2 * 4 + q;
    to[i / 4][i % 4] =
        *reinterpret_cast<const unsigned*>(a + r / 32 * 4096 + swizzled(k * 128 + r % 32 * 4));
  }
}

// ------------------------------------------------------------------------------------- float32

// The upper halves of x and y: the first 8 bits of each as bf16, x in the low half.
__device__ inline unsigned upper_halves(float x, float y) {
  return __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632);
}
__device__ inline float without_upper(float x) {
  return x - __uint_as_float(__float_as_uint(x) & 0xffff0000u);
}

// Two numbers as three planes each, both of a plane in one register.
__device__ inline void split(float x, float y, unsigned& plane0, unsigned& plane1,
                             unsigned& plane2) {
  plane0 = upper_halves(x, y);
  x = without_upper(x);
  y = without_upper(y);
  plane1 = upper_halves(x, y);
  plane2 = upper_halves(without_upper(x), without_upper(y));
}

// Fragment `step` (16 of depth) of the warpgroup's rows of a, in planes.
template <class Config>
__device__ inline void load_fragment(const unsigned char* a, int group, int step,
                                     unsigned (&planes)[3][4]) {
  const int lane = threadIdx.x % 32, q = lane % 4;
  const int row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = row + i % 2 * 8, k = step * 16 + i / 2 * 8 + 2 * q;
    float x, y;
    if constexpr (Config::kRowsA) {  // boxes of 32 rows x 64 of depth, rows inside
      const unsigned char* box = a + r / 32 * 8192;
      x = *reinterpret_cast<const float*>(box + swizzled(k * 128 + r % 32 * 4));
      y = *reinterpret_cast<const float*>(box + swizzled((k + 1) * 128 + r % 32 * 4));
    } else {  // boxes of 32 of depth x 128 rows, depth inside
      const float2 pair = *reinterpret_cast<const float2*>(
          a + k / 32 * 16384 + swizzled(r * 128 + k % 32 * 4));
      x = pair.x;
      y = pair.y;
    }
    split(x, y, planes[0][i], planes[1][i], planes[2][i]);
  }
}

// total += a b^T over one step. The matrix units truncate each time they add, by up to one unit in
// the last place of the sum so far: the small products of the whole step come first.
template <class Config>
__device__ inline void multiply_step_exact(const unsigned char* a, unsigned b, int group,
                                           float (&total)[Tiling<Config>::kWide / 2]) {
  using L = Tiling<Config>;
  float part[L::kWide / 2];
  unsigned planes[4][3][4];
  const unsigned long long b0 = tile_descriptor(b, 16), b1 = b0 + L::kPlaneB / 16,
                           b2 = b1 + L::kPlaneB / 16;
  hold(part);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    load_fragment<Config>(a, group, i, planes[i]);
    warpgroup_arrive();
    multiply(part, planes[i][2], b0 + 2 * i, i != 0);
    multiply(part, planes[i][1], b1 + 2 * i, 1);
    multiply(part, planes[i][0], b2 + 2 * i, 1);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    multiply(part, planes[i][1], b0 + 2 * i, 1);
    multiply(part, planes[i][0], b1 + 2 * i, 1);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    multiply(part, planes[i][0], b0 + 2 * i, 1);
  }
  warpgroup_commit();
  warpgroup_wait<0>();
  hold(part);
#pragma unroll
  for (int r = 0; r < L::kWide / 2; ++r) {
    total[r] += part[r];
  }
}

// -------------------------------------------------------------------------------------- epilogue

template <class T>
__device__ inline float bias_of(const LinearHopperParams& p, int s, int column) {
  return p.bias[s] == nullptr
             ? 0.0f
             : widen(static_cast<const T*>(p.bias[s])[column * p.bias_stride[s]]);
}

// The bias of a tile's columns: asked for when the tile begins, a number or two a thread, and shared
// by the warpgroup when it ends. If sums began with it, every thread would ask for all of its
// columns, and wait.
template <class Config>
struct TileBias {
  using L = Tiling<Config>;
  using T = typename Config::T;
  T mine[L::kSums];

  __device__ TileBias(const LinearHopperParams& p, const LinearTile& tile) {
    const T* bias = static_cast<const T*>(p.bias[tile.product]);
#pragma unroll
    for (int i = 0; i < L::kSums; ++i) {
      const int column = tile.column + i * L::kWide + threadIdx.x % 128;
      mine[i] = bias != nullptr && column < p.columns[tile.product]
                    ? bias[column * p.bias_stride[tile.product]]
                    : T{};
    }
  }

  // Those of accumulator i, to the warpgroup's room for kWide.
  __device__ void share(T* to, int i) const {
    if (threadIdx.x % 128 < L::kWide) {
      to[threadIdx.x % 128] = mine[i];
    }
  }
};

// `bias`: of the accumulator's first column.
template <class T, int kCount>
__device__ inline void add_bias(float (&sums)[kCount], const T* bias) {
  bias += threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < kCount; r += 4) {
    float low, high;
    if constexpr (sizeof(T) == 2) {
      unpack<T>(*reinterpret_cast<const unsigned*>(bias + r / 4 * 8), low, high);
    } else {
      const float2 pair = *reinterpret_cast<const float2*>(bias + r / 4 * 8);
      low = pair.x;
      high = pair.y;
    }
    sums[r] += low;
    sums[r + 1] += high;
    sums[r + 2] += low;
    sums[r + 3] += high;
  }
}

// A lane's pairs of float32 sums to the rows of a matrix. `to`: its first number in its two rows;
// `width`: columns from there on, 0 in a row outside.
template <int kCount>
__device__ inline void store_pairs(float* (&to)[2], const int (&width)[2],
                                   const float (&sums)[kCount]) {
#pragma unroll
  for (int r = 0; r < kCount; r += 2) {
    const int h = r / 2 % 2, j = r / 4 * 8;
    if (j < width[h]) {
      *reinterpret_cast<float2*>(to[h] + j) = float2{sums[r], sums[r + 1]};
    }
  }
}

// A warpgroup's numbers to c, or to `partial` where the depth is split.
template <class Config, int kCount>
__device__ inline void store_sums(const LinearHopperParams& p, const LinearTile& tile, int row0,
                                  int column0, const float (&sums)[kCount]) {
  using T = typename Config::T;
  constexpr int kSecond = kApart<Config>;
  const int s = tile.product;
  const int row = row0 + lane_row<Config>(), column = column0 + threadIdx.x % 4 * 2;
  int width[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    width[h] = row + h * kSecond < p.rows[s] ? p.columns[s] - column0 : 0;
  }
  if (p.splits > 1) {
    float* first = static_cast<float*>(p.partial) + tile.split * p.numbers + p.first[s] +
                   int64(row) * p.columns[s] + column;
    float* to[2] = {first, first + int64(kSecond) * p.columns[s]};
    store_pairs(to, width, sums);
    return;
  }
  T* c = static_cast<T*>(p.c[s].data) + row * p.c[s].row;
  if constexpr (Tiling<Config>::kExact) {
    float* to[2] = {c + column, c + column + kSecond * p.c[s].row};
    store_pairs(to, width, sums);
    bool finite = true;
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      finite &= is_finite(sums[r]);
    }
    if (!finite) {
      for (int r = 0; r < kCount; ++r) {
        const int h = r / 2 % 2, j = r / 4 * 8 + r % 2;
        float* at = (h ? to[1] : to[0]) + j;
        if (j < (h ? width[1] : width[0]) && !is_finite(*at)) {
          *at = one_number(p, s, row + h * kSecond, column + j) + bias_of<T>(p, s, column + j);
        }
      }
    }
  }
}

// A warpgroup's numbers to c by way of shared memory, from where they are copied while the next tile
// is multiplied. `results`: room for the warpgroup's 64 rows, `at` its shared address.
template <class Config>
__device__ inline void send_sums(const LinearHopperParams& p, const LinearTile& tile, int group,
                                 const TileBias<Config>& bias, typename Config::T* bias_room,
                                 unsigned char* results, unsigned at,
                                 float (&sums)[Tiling<Config>::kSums][64]) {
  using L = Tiling<Config>;
  using T = typename Config::T;
  constexpr int kSize = sizeof(T);
  const int thread = threadIdx.x % 128, s = tile.product;
  const bool sends = thread < 64;  // a row
  const int row = tile.row + group * 64 + thread;
  unsigned char* mine = results + lane_row<Config>() * L::kPitch + thread % 4 * 2 * kSize;
#pragma unroll
  for (int i = 0; i < L::kSums; ++i) {
    if (sends) {
      wait_stores_read();
    }
    bias.share(bias_room, i);
    named_barrier(1 + group, 128);  // results are free, bias readable
    add_bias(sums[i], bias_room);
#pragma unroll
    for (int r = 0; r < 64; r += 2) {
      void* to = mine + r / 2 % 2 * kApart<Config> * L::kPitch + r / 4 * 8 * kSize;
      if constexpr (kSize == 2) {
        *static_cast<unsigned*>(to) = pack<T>(sums[i][r], sums[i][r + 1]);
      } else {
        *static_cast<float2*>(to) = float2{sums[i][r], sums[i][r + 1]};
      }
    }
    publish_to_copies();
    named_barrier(1 + group, 128);  // results are written, bias is free
    const int column = tile.column + i * L::kWide;
    const int width = min(L::kWide, p.columns[s] - column);
    if (sends && row < p.rows[s] && width > 0) {
      store_bytes(static_cast<T*>(p.c[s].data) + row * p.c[s].row + column,
                  at + thread * L::kPitch, width * kSize);
    }
  }
}

// --------------------------------------------------------------------------------------- kernels

template <class Config>
__device__ void linear_hopper(const LinearHopperParams& p) {
  using L = Tiling<Config>;
  using T = typename L::T;
  extern __shared__ unsigned char memory[];
  static_assert(Config::kThreads == 384, "three warpgroups");
  const unsigned stages = static_cast<unsigned>(__cvta_generic_to_shared(memory));
  if (stages % 1024 != 0) {
    __trap();  // swizzles count from such a boundary; there is no static memory that could move it
  }
  const unsigned results = stages + Config::kStages * L::kStage;
  const unsigned bias_room = results + L::kResults;
  const unsigned full = bias_room + 2 * L::kWide * int(sizeof(T));
  const unsigned empty = full + 8 * Config::kStages;
  const int tiles = tile_count<Config>(p), group = int(threadIdx.x) / 128 - 1;

  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 8);  // the warps that multiply
    }
    barrier_init_done();
    for (int s = 0; s < p.products; ++s) {
      prefetch_map(p.a_map[s]);
      prefetch_map(p.b_map[s]);
    }
  }
  __syncthreads();  // barriers can be used

  unsigned stage = 0, phase = 0;
  const auto next_stage = [&] {
    if (++stage == Config::kStages) {
      stage = 0;
      phase ^= 1;
    }
  };

  if (group < 0) {
    fewer_registers<24>();
    if (threadIdx.x != 0) {
      return;
    }
    for (int n = blockIdx.x; n < tiles; n += gridDim.x) {
      const LinearTile tile = LinearTile::number<Config>(p, n);
      int term = tile.product, k = tile.begin * L::kDepth;
      for (int step = tile.begin; step < tile.end; ++step, k += L::kDepth) {
        while (k >= p.depth[term]) {  // the next term of a sum
          k -= (p.depth[term] + L::kDepth - 1) / L::kDepth * L::kDepth;
          ++term;
        }
        barrier_wait(empty + 8 * stage, phase ^ 1);
        barrier_expect(full + 8 * stage, L::kStage);
        load_step<Config>(p, term, tile, k, stages + stage * L::kStage, full + 8 * stage);
        next_stage();
      }
    }
    return;
  }

  more_registers<240>();
  const auto release = [&](unsigned i) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(empty + 8 * i);
    }
  };
  for (int n = blockIdx.x; n < tiles; n += gridDim.x) {
    const LinearTile tile = LinearTile::number<Config>(p, n);
    const TileBias<Config> bias(p, tile);
    float sums[L::kSums][L::kWide / 2];
    if constexpr (L::kExact) {
#pragma unroll
      for (int r = 0; r < L::kWide / 2; ++r) {
        sums[0][r] = 0;
      }
      for (int step = tile.begin; step < tile.end; ++step) {
        barrier_wait(full + 8 * stage, phase);
        multiply_step_exact<Config>(memory + stage * L::kStage,
                                    stages + stage * L::kStage + L::kBytesA, group, sums[0]);
        release(stage);
        next_stage();
      }
    } else if constexpr (L::kTaken) {
      unsigned taken[4][4];
      barrier_wait(full + 8 * stage, phase);
      take_step<Config>(memory + stage * L::kStage, group, taken);
#pragma unroll 1
      for (int step = tile.begin; step < tile.end; ++step) {
        const unsigned now = stage;
        const unsigned long long b =
            tile_descriptor(stages + now * L::kStage + L::kBytesA, 8192);
        // The numbers in other registers: a copy would be folded, and the next step's, taken while
        // products still read these, would come to the same ones. `summed` is 0 or 1.
        unsigned a[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          a[i / 4][i % 4] = taken[i / 4][i % 4] ^ unsigned(p.summed >> 1);
        }
#pragma unroll
        for (int i = 0; i < L::kSums; ++i) {
          hold(sums[i]);
        }
        warpgroup_arrive();
#pragma unroll
        for (int part = 0; part < 4; ++part) {
#pragma unroll
          for (int i = 0; i < L::kSums; ++i) {
            multiply_lines<T>(sums[i], a[part], b + i * 1024 + part * 2,
                              part == 0 ? step != tile.begin : 1);
          }
        }
        warpgroup_commit();
        next_stage();
        if (step + 1 < tile.end) {
          barrier_wait(full + 8 * stage, phase);
          take_step<Config>(memory + stage * L::kStage, group, taken);
        }
        warpgroup_wait<0>();
#pragma unroll
        for (int i = 0; i < L::kSums; ++i) {
          hold(sums[i]);
        }
        release(now);
      }
    } else {
      constexpr int kStepA = Config::kRowsA ? 128 : 2, kStepB = Config::kRowsB ? 128 : 2;
      const auto multiply_step = [&](int add) {
        barrier_wait(full + 8 * stage, phase);
        const unsigned at = stages + stage * L::kStage;
        // 64 rows of a are 8 KB in either order.
        const unsigned long long a = tile_descriptor(at + group * 8192, 8192);
        const unsigned long long b = tile_descriptor(at + L::kBytesA, 8192);
        warpgroup_arrive();
#pragma unroll
        for (int part = 0; part < 4; ++part) {
#pragma unroll
          for (int i = 0; i < L::kSums; ++i) {
            multiply<T, Config::kRowsA, Config::kRowsB>(sums[i], a + part * kStepA,
                                                        b + i * 1024 + part * kStepB,
                                                        part == 0 ? add : 1);
          }
        }
        warpgroup_commit();
        next_stage();
      };
      unsigned before = stage;
      multiply_step(0);
      for (int step = tile.begin + 1; step < tile.end; ++step) {
        const unsigned now = stage;
        multiply_step(1);
        warpgroup_wait<1>();  // the products before these are done
        release(before);
        before = now;
      }
      warpgroup_wait<0>();
#pragma unroll
      for (int i = 0; i < L::kSums; ++i) {
        hold(sums[i]);
      }
      release(before);
    }
    if (p.splits > 1) {
#pragma unroll
      for (int i = 0; i < L::kSums; ++i) {
        store_sums<Config>(p, tile, tile.row + group * 64, tile.column + i * L::kWide, sums[i]);
      }
    } else {
      T* room = reinterpret_cast<T*>(memory + (bias_room - stages)) + group * L::kWide;
      if constexpr (L::kExact) {
        named_barrier(1 + group, 128);  // the tile before is done with its bias
        bias.share(room, 0);
        named_barrier(1 + group, 128);  // bias readable
        add_bias(sums[0], room);
        store_sums<Config>(p, tile, tile.row + group * 64, tile.column, sums[0]);
      } else {
        const unsigned at = results + group * 64 * L::kPitch;
        send_sums<Config>(p, tile, group, bias, room, memory + (at - stages), at, sums);
      }
    }
  }
  if (!L::kExact) {
    wait_stores();
  }
}

// c from the splits' sums, in their order. Grid-stride over four numbers each.
template <class Config>
__device__ void linear_total(const LinearHopperParams& p) {
  using T = typename Config::T;
  const float* partial = static_cast<const float*>(p.partial);
  for (int64 n = (blockIdx.x * int64(Config::kThreads) + threadIdx.x) * 4; n < p.numbers;
       n += int64(gridDim.x) * Config::kThreads * 4) {
    int s = 0;
    while (s + 1 < p.products && !p.summed && n >= p.first[s + 1]) {
      ++s;
    }
    const int row = int((n - p.first[s]) / p.columns[s]);
    const int column = int((n - p.first[s]) % p.columns[s]);
    float sum[4] = {};
#pragma unroll 4
    for (int split = 0; split < p.splits; ++split) {
      const float4 x = *reinterpret_cast<const float4*>(partial + split * p.numbers + n);
      sum[0] += x.x;
      sum[1] += x.y;
      sum[2] += x.z;
      sum[3] += x.w;
    }
    T* c = static_cast<T*>(p.c[s].data) + row * p.c[s].row + column;
    for (int i = 0; i < 4; ++i) {
      if (Tiling<Config>::kExact && !is_finite(sum[i])) {
        sum[i] = one_number(p, s, row, column + i);
      }
      c[i] = narrow<T>(sum[i] + bias_of<T>(p, s, column + i));
    }
  }
}

// The planes of b[s], one after the other: bf16 [plane][columns][depth rounded up to 8], to
// `planes[s]`; or, of one plane, b[s] itself in float32. Grid: x tiles of 64 columns x 64 of depth,
// y products.
template <class Config>
__device__ void linear_planes(const LinearHopperParams& p) {
  constexpr int kTile = 64;
  __shared__ float tile[kTile][kTile + 1];
  const int s = blockIdx.y, width = (p.depth[s] + 7) / 8 * 8;
  const int across = (width + kTile - 1) / kTile;
  const int j0 = int(blockIdx.x) / across * kTile, k0 = int(blockIdx.x) % across * kTile;
  if (j0 >= p.columns[s]) {
    return;
  }
  const MatrixView& b = p.b[s];
  const float* from = static_cast<const float*>(b.data) + j0 * b.row + k0 * b.column;
  const int columns = p.columns[s] - j0, depth = p.depth[s] - k0;
  const bool rows_inside = b.row == 1;
  // Neighbouring threads take neighbouring addresses; all loads are asked for before the first use.
  const int inside = threadIdx.x % kTile, outside = threadIdx.x / kTile;
  constexpr int kOutside = Config::kThreads / kTile, kEach = kTile / kOutside;
  float x[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int other = outside + i * kOutside;
    const int j = rows_inside ? inside : other, k = rows_inside ? other : inside;
    x[i] = j < columns && k < depth ? from[j * b.row + k * b.column] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int other = outside + i * kOutside;
    tile[rows_inside ? inside : other][rows_inside ? other : inside] = x[i];
  }
  __syncthreads();  // tile readable
  const int64 start = (int64(j0) * width + k0) / 2, plane = int64(p.columns[s]) * width / 2;
  unsigned* to = static_cast<unsigned*>(p.planes[s]) + start;
  float2* copy = static_cast<float2*>(p.planes[s]) + start;
  const int pair = threadIdx.x % (kTile / 2), first = threadIdx.x / (kTile / 2);
#pragma unroll
  for (int j = first; j < kTile; j += Config::kThreads / (kTile / 2)) {
    if (j < columns && k0 + 2 * pair < width) {
      if constexpr (Config::kPlanes == 1) {
        copy[j * int64(width / 2) + pair] = float2{tile[j][2 * pair], tile[j][2 * pair + 1]};
      } else {
        unsigned word[3];
        split(tile[j][2 * pair], tile[j][2 * pair + 1], word[0], word[1], word[2]);
#pragma unroll
        for (int i = 0; i < 3; ++i) {
          to[i * plane + j * int64(width / 2) + pair] = word[i];
        }
      }
    }
  }
}
