// linear_teams.cu: products of one matrix with others, and bias, for few tokens: a block per tile, all
// blocks at once, by TMA and warpgroup products (sm_90a). Most of depth is on its way early, and
// nothing is made ready in memory.
//
//   c[s][i,j] = bias[s][j] + sum_k a[i,k] * b[s][j,k]         for each s < products
//
// Shapes    a (rows, depth), b[s] (columns[s], depth), depth inside both;
//           c[s] (rows, columns[s]), columns inside, a multiple of 8
// Grid      x: tiles, along rows first. A tile is one of all c side by side: it may lie in two or more
// Block     kTeams teams of kHalves warpgroups that multiply, 64 rows each, and one warpgroup that
//           asks for boxes, with a thread of each warp
// Tile map  c tile kRows x kColumns; a slice is 128 bytes of depth (32 numbers of float32). A slice of
//           a comes in one box, that of b in boxes of kUnit columns, each of one b[s]
//
//             slice   0      1      2      3   ...    slice n is multiplied by team n % kTeams, alone:
//             team    0      1      0      1   ...    its sums stay in registers, and those of all
//                                                     teams are added at the end, in order
//
// Pipeline  loader:  empty[stage] -> ask for a, for the units of b -> full[stage]
//           team:    full[n] -> numbers of n -> operands -> products of n -> empty[n]
//                    While they run, it takes the numbers of its next slice
//           end:     teams' sums to shared memory -> added, bias, rounding, c by 16 bytes
// Operands  a by ldmatrix in registers, b where the boxes have put it
// float32   a number is the sum of two TF32 numbers, x = high + low, but for 2^-24 of it. Three
//           products: low high + high low + high high. Matrix units drop the lower 13 bits of an
//           operand, so b as it is serves as its own high part, and only the low part is written
//           (at the same place of another buffer: swizzled alike). Other parts are rounded to
//           nearest. Matrix units truncate when they add: the small products come first, and every
//           16 of depth have an own accumulator, added to the total by ordinary additions.
//           A result that is not finite is computed again, one number at a time
//           kTf32: one product, operands rounded by the copy engine
// Banks     a: eight lanes of an ldmatrix read eight chunks of a swizzled tile; b: lanes read and write
//           neighbouring chunks; sums: rows are 8 numbers longer than the tile
// Per slice in float32, in clocks: products 6 kHalves kColumns; shared memory 2 kRows (a in and out) +
//           3 kColumns (b in and out, its low part in) + 3 kHalves kColumns (b for products)
// Limits    sm_90a; 16-byte strides and addresses; fewer than 2^30 of each extent
#include "common/linear.cuh"
#include "common/mma.cuh"
#include "common/params.cuh"
#include "common/tma.cuh"
#include "common/types.cuh"
#include "common/wgmma.cuh"

template <class Config>
struct Tiling {
  using T = typename Config::T;
  static constexpr bool kExact = sizeof(T) == 4 && !Config::kTf32;
  static constexpr int kHalves = Config::kHalves, kTeams = Config::kTeams;
  static constexpr int kRows = 64 * kHalves, kColumns = Config::kColumns;
  static constexpr int kUnit = Config::kUnit, kUnits = kColumns / kUnit;  // columns of a box of b
  static constexpr int kStages = Config::kStages;
  static constexpr int kDepth = 128 / int(sizeof(T));  // of a slice
  static constexpr int kBytesA = kRows * 128, kBytesB = kColumns * 128;
  static constexpr int kStage = kBytesA + kBytesB;
  static constexpr int kTeam = 128 * kHalves, kMultiply = kTeam * kTeams;  // threads that multiply
  static constexpr int kRegisters = kMultiply == 256 ? 240 : kMultiply == 384 ? 160 : 112;
  static constexpr int kPitch = kColumns + 8;      // floats of a row of sums

  // A team's buffers for low parts of b. A warpgroup alone has two: where its warps wait for one
  // another to have written one, they all have ended the products with the other. Two warpgroups do
  // not wait for each other's products, so that those of one run under the additions of the other:
  // where one knows that n is written, the other has ended the products of n - 2.
  static constexpr int kBuffers = kHalves + 1;
  // Bytes from the begin of shared memory.
  static constexpr int kLow = kStages * kStage;
  static constexpr int kLows = kExact ? kBuffers * kBytesB : 0;
  static constexpr int kBias = kLow + kTeams * kLows;
  static constexpr int kBiasThere = kBias + 4 * kColumns;  // a barrier, as the rest
  static constexpr int kFull = kBiasThere + 8;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kWritten = kEmpty + 8 * kStages;  // by team and buffer

  static_assert(Config::kThreads == kMultiply + 128 && kMultiply >= 256 && kMultiply <= 512,
                "registers for two to four warpgroups");
  static_assert(kStages > kTeams, "a stage to load into while teams wait for their next slices");
  static_assert(kColumns % kUnit == 0 && kUnit % 8 == 0, "boxes begin at 1024-byte boundaries");
  static_assert(kColumns % (16 * kHalves) == 0, "chunks of b for every thread of a team");
  static_assert(kTeams * kRows * kPitch * 4 <= kLow, "sums fit the stages");
  static_assert(kColumns <= 128, "a thread for each bias");
};

// Where a block's tile is in all results side by side. Uniform in the block. Made again where it is
// wanted: kept, it would take registers through the products, and where two branches of different
// registers share a number it goes to memory.
template <class Config>
struct Place {
  using L = Tiling<Config>;
  int row, column, slices;

  __device__ explicit Place(const LinearHopperParams& p) {
    unsigned block = blockIdx.x;
    int depth = p.depth[0];
    asm volatile("" : "+r"(block), "+r"(depth));
    slices = (depth + L::kDepth - 1) / L::kDepth;
    const unsigned along_rows = (unsigned(p.rows[0]) + L::kRows - 1) / L::kRows;
    row = int(block % along_rows) * L::kRows;
    column = int(block / along_rows) * L::kColumns;
  }
};

// The result that has a column of all, and which of its columns that is. Columns after the last are
// counted on in the last one.
struct Column {
  int product, column;

  __device__ Column(const LinearHopperParams& p, int of_all) : product(0), column(of_all) {
    while (product + 1 < p.products && column >= p.columns[product]) {
      column -= p.columns[product];
      ++product;
    }
  }
};

// Before anything is known of earlier work: barriers, tensor maps, and b to L2, where it may still be
// written. Blocks of the same columns ask for different slices.
template <class Config>
__device__ void linear_teams_begin(const LinearHopperParams& p) {
  using L = Tiling<Config>;
  extern __shared__ unsigned char memory[];
  const unsigned shared = shared_address(memory);
  if (shared % 1024 != 0) {
    __trap();  // swizzles count from such a boundary; there is no static memory that could move it
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      barrier_init(shared + L::kFull + 8 * i, 1);
      barrier_init(shared + L::kEmpty + 8 * i, L::kTeam / 32);  // warps of the team that has it
    }
    barrier_init(shared + L::kBiasThere, L::kColumns);  // threads
    for (int i = 0; i < L::kTeams * L::kBuffers; ++i) {
      barrier_init(shared + L::kWritten + 8 * i, L::kTeam / 32);
    }
    barrier_init_done();
    prefetch_map(p.a_map[0]);
    for (int s = 0; s < p.products; ++s) {
      prefetch_map(p.b_map[s]);
    }
  }
  unsigned thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // its lane is not kept for later, as in `Place`
  if (thread >= L::kMultiply && thread % 32 == 0) {
    const Place<Config> place(p);
    const int step = (p.rows[0] + L::kRows - 1) / L::kRows;
    for (int unit = (thread - L::kMultiply) / 32; unit < L::kUnits; unit += 4) {
      const Column at(p, place.column + unit * L::kUnit);
      for (int slice = place.row / L::kRows; slice < place.slices; slice += step) {
        prefetch_box(p.b_map[at.product], slice * L::kDepth, at.column, 0);
      }
    }
  }
  __syncthreads();  // barriers can be used
}

// The block's boxes of all slices, by a thread of each of up to four warps: the last asks for those
// of a, units of b go round. A barrier that hears of bytes before it is told to expect them waits for
// both.
template <class Config>
__device__ inline void load_slices(const LinearHopperParams& p, unsigned shared, int warp) {
  using L = Tiling<Config>;
  const Place<Config> place(p);
  constexpr int kMine = (L::kUnits + 3) / 4;
  const TensorMap* map[kMine];
  int column[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const Column at(p, place.column + (warp + 4 * i) * L::kUnit);
    map[i] = &p.b_map[at.product];
    column[i] = at.column;
  }
  const unsigned b = shared + L::kBytesA + warp * L::kUnit * 128;
  unsigned stage = 0, phase = 1;
#pragma unroll 1
  for (int k = 0; k < place.slices * L::kDepth; k += L::kDepth) {
    const unsigned full = shared + L::kFull + 8 * stage, at = stage * L::kStage;
    barrier_wait(shared + L::kEmpty + 8 * stage, phase);
    if (warp == 3) {
      barrier_expect(full, L::kStage);
      load_box(shared + at, p.a_map[0], full, k, place.row, 0);
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (warp + 4 * i < L::kUnits) {
        load_box(b + at + i * L::kUnit * 512, *map[i], full, k, column[i], 0);
      }
    }
    if (++stage == L::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
}

// ------------------------------------------------------------------------------------- float32

// As a TF32 operand this is x rounded to nearest: the lower 13 bits do not count.
__device__ inline unsigned nearest(float x) { return __float_as_uint(x) + 0x1000u; }
// x less the number that an operand stands for.
__device__ inline float rest(float x, unsigned operand) {
  return x - __uint_as_float(operand & 0xffffe000u);
}

__device__ inline unsigned low_part(float x) { return nearest(rest(x, __float_as_uint(x))); }

// --------------------------------------------------------------------------------------- kernel

// A thread's numbers of a slice of a, as its warpgroup's products take them; in float32 as they are.
// Of b the thread writes its share of the low parts. `stage`, `buffer`: the slice is in which, and
// low parts go to which, of those of all teams.
template <class Config>
__device__ inline void take_slice(unsigned char* memory, unsigned shared, int stage, int buffer,
                                  unsigned (&a)[4][4]) {
  using L = Tiling<Config>;
  const int thread = threadIdx.x % L::kTeam, lane = thread % 32, row = thread / 32 * 16 + lane % 16;
  const int at = stage * L::kStage;
  if constexpr (L::kExact) {
    constexpr int kChunks = L::kBytesB / 16 / L::kTeam;
    const float4* from = reinterpret_cast<const float4*>(memory + at + L::kBytesA) + thread;
    uint4* low = reinterpret_cast<uint4*>(memory + L::kLow + buffer * L::kBytesB) + thread;
    constexpr int kAhead = kChunks % 4 == 0 ? 4 : kChunks % 3 == 0 ? 3 : kChunks;
#pragma unroll
    for (int first = 0; first < kChunks; first += kAhead) {
      float4 x[kAhead];  // loads that are asked for before the first use
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        x[i] = from[(first + i) * L::kTeam];
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        low[(first + i) * L::kTeam] =
            uint4{low_part(x[i].x), low_part(x[i].y), low_part(x[i].z), low_part(x[i].w)};
      }
    }
    publish_to_copies();
    if constexpr (L::kHalves > 1) {
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(shared + L::kWritten + 8 * buffer);
      }
      __syncwarp();
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    load_matrices(a[i], shared + at + row * 128 + ((2 * i + lane / 16) ^ lane % 8) * 16);
  }
}

// A thread's chunks of 16 bytes of the tile, neighbours' in a row beside one another.
template <class Config>
struct Chunks {
  using L = Tiling<Config>;
  static constexpr int kNumbers = 16 / int(sizeof(typename L::T)), kOfRow = L::kColumns / kNumbers;
  static constexpr int kCount = (L::kRows * kOfRow + L::kMultiply - 1) / L::kMultiply;

  __device__ static int line(int i) { return (int(threadIdx.x) + i * L::kMultiply) / kOfRow; }
  __device__ static int column(int i) {
    return (int(threadIdx.x) + i * L::kMultiply) % kOfRow * kNumbers;
  }
};

// The tile of c from the teams' sums. Returns whether all numbers of the thread are finite.
template <class Config>
__device__ inline bool write_tile(const LinearHopperParams& p, const Place<Config>& place,
                                  const float* sums, const float* bias) {
  using L = Tiling<Config>;
  using T = typename L::T;
  using C = Chunks<Config>;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < C::kCount; ++i) {
    const int line = C::line(i), column = C::column(i);
    const Column to(p, place.column + column);
    if (line >= min(L::kRows, p.rows[0] - place.row) || to.column >= p.columns[to.product]) {
      continue;
    }
    float y[C::kNumbers];
#pragma unroll
    for (int j = 0; j < C::kNumbers; j += 4) {
      const float* from = sums + line * L::kPitch + column + j;
      float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll
      for (int team = 1; team < L::kTeams; ++team) {
        const float4 more = *reinterpret_cast<const float4*>(from + team * L::kRows * L::kPitch);
        sum = float4{sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
      }
      const float4 of_bias = *reinterpret_cast<const float4*>(bias + column + j);
      y[j] = sum.x + of_bias.x;
      y[j + 1] = sum.y + of_bias.y;
      y[j + 2] = sum.z + of_bias.z;
      y[j + 3] = sum.w + of_bias.w;
    }
    T* const c = static_cast<T*>(p.c[to.product].data) +
                 (place.row + line) * p.c[to.product].row + to.column;
    if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<uint4*>(c) = uint4{pack<T>(y[0], y[1]), pack<T>(y[2], y[3]),
                                           pack<T>(y[4], y[5]), pack<T>(y[6], y[7])};
    } else {
      *reinterpret_cast<float4*>(c) = float4{y[0], y[1], y[2], y[3]};
      finite = finite && is_finite(y[0]) && is_finite(y[1]) && is_finite(y[2]) && is_finite(y[3]);
    }
  }
  return finite;
}

// Compute those of the thread's numbers again that are not finite.
template <class Config>
__device__ inline void correct_tile(const LinearHopperParams& p, const Place<Config>& place,
                                    const float* bias) {
  using L = Tiling<Config>;
  using C = Chunks<Config>;
#pragma unroll 1
  for (int n = 0; n < C::kCount * C::kNumbers; ++n) {
    const int line = C::line(n / C::kNumbers), column = C::column(n / C::kNumbers) + n % C::kNumbers;
    const Column to(p, place.column + column);
    if (line >= min(L::kRows, p.rows[0] - place.row) || to.column >= p.columns[to.product]) {
      continue;
    }
    const int64 row = place.row + line;
    float* c = static_cast<float*>(p.c[to.product].data) + row * p.c[to.product].row + to.column;
    if (!is_finite(*c)) {
      *c = one_number(p, to.product, row, to.column) + bias[column];
    }
  }
}

template <class Config>
__device__ void linear_teams(const LinearHopperParams& p) {
  using L = Tiling<Config>;
  using T = typename L::T;
  extern __shared__ unsigned char memory[];
  const unsigned shared = shared_address(memory);
  float* const bias = reinterpret_cast<float*>(memory + L::kBias);
  constexpr int kRead = 1 + L::kTeams, kReadable = kRead + 1;  // named barriers
  if (threadIdx.x >= L::kMultiply) {
    fewer_registers<24>();
    // A warp without a box would not be waited for, and could miss phases of the barriers.
    const int warp = threadIdx.x % 128 / 32;
    if (threadIdx.x % 32 == 0 && (warp < L::kUnits || warp == 3)) {
      load_slices<Config>(p, shared, warp);
    }
    const int thread = int(threadIdx.x) - L::kMultiply;
    if (thread < L::kColumns) {
      const Place<Config> place(p);
      const Column of(p, place.column + thread);
      const T* from = static_cast<const T*>(p.bias[of.product]);
      bias[thread] = from != nullptr && of.column < p.columns[of.product]
                         ? widen(from[of.column * p.bias_stride[of.product]])
                         : 0.0f;
      barrier_arrive(shared + L::kBiasThere);
    }
    return;
  }
  more_registers<L::kRegisters>();

  const int lane = threadIdx.x % 32, thread = threadIdx.x % L::kTeam;
  // The same in all lanes, which the compiler cannot know.
  const int team = __shfl_sync(0xffffffffu, int(threadIdx.x) / L::kTeam, 0);
  const int slices = Place<Config>(p).slices;
  float sums[L::kColumns / 2];
#pragma unroll
  for (int r = 0; r < L::kColumns / 2; ++r) {
    sums[r] = 0;
  }
  unsigned taken[4][4];
  int stage = team, buffer = team * L::kBuffers;  // of the slice whose numbers are taken
  unsigned phase = 0, phase_written = 0;
  if (team < slices) {
    barrier_wait(shared + L::kFull + 8 * stage, phase);
    take_slice<Config>(memory, shared, stage, buffer, taken);
  }
#pragma unroll 1
  for (int slice = team; slice < slices; slice += L::kTeams) {
    const int now = stage;
    const unsigned long long b =
        tile_descriptor(shared + now * L::kStage + L::kBytesA, 16);
    const unsigned long long low_b =
        tile_descriptor(shared + L::kLow + buffer * L::kBytesB, 16);
    unsigned a[4][4], low[4][4];
    float part[2][L::kColumns / 2];  // of 16 of depth each
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if constexpr (L::kExact) {
        const float x = __uint_as_float(taken[i / 4][i % 4]);
        a[i / 4][i % 4] = nearest(x);
        low[i / 4][i % 4] = nearest(rest(x, nearest(x)));
      } else {
        // The numbers in other registers: a copy would be folded, and the next slice's, taken while
        // products still read these, would come to the same ones. `summed` is 0.
        a[i / 4][i % 4] = taken[i / 4][i % 4] ^ unsigned(p.summed);
      }
    }
    if constexpr (L::kExact) {
      if constexpr (L::kHalves > 1) {  // low parts of b are readable
        barrier_wait(shared + L::kWritten + 8 * buffer, phase_written);
      } else {
        named_barrier(1 + team, L::kTeam);
      }
      hold(part[0]);
      hold(part[1]);
      warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multiply_lines<T>(part[i / 2], low[i], b + 2 * i, i % 2);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multiply_lines<T>(part[i / 2], a[i], low_b + 2 * i, 1);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multiply_lines<T>(part[i / 2], a[i], b + 2 * i, 1);
      }
    } else {
      hold(sums);
      warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multiply_lines<T>(sums, a[i], b + 2 * i, 1);
      }
    }
    warpgroup_commit();
    if (++buffer == (team + 1) * L::kBuffers) {
      buffer -= L::kBuffers;
      phase_written ^= 1;
    }
    stage += L::kTeams;
    if (stage >= L::kStages) {
      stage -= L::kStages;
      phase ^= 1;
    }
    if (slice + L::kTeams < slices) {
      barrier_wait(shared + L::kFull + 8 * stage, phase);
      take_slice<Config>(memory, shared, stage, buffer, taken);
    }
    warpgroup_wait<0>();
    if constexpr (L::kExact) {
      hold(part[0]);
      hold(part[1]);
#pragma unroll
      for (int r = 0; r < L::kColumns / 2; ++r) {
        sums[r] += part[0][r] + part[1][r];
      }
    } else {
      hold(sums);
    }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(shared + L::kEmpty + 8 * now);
    }
  }

  named_barrier(kRead, L::kMultiply);  // the last slice has been read
  float* const all = reinterpret_cast<float*>(memory);
  const int row = thread / 32 * 16 + lane / 4;
  float* to = all + (team * L::kRows + row) * L::kPitch + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < L::kColumns / 2; r += 2) {
    *reinterpret_cast<float2*>(to + r / 2 % 2 * 8 * L::kPitch + r / 4 * 8) =
        float2{sums[r], sums[r + 1]};
  }
  named_barrier(kReadable, L::kMultiply);  // sums are there
  barrier_wait(shared + L::kBiasThere, 0);
  const Place<Config> place(p);
  const bool finite = write_tile(p, place, all, bias);
  if constexpr (L::kExact) {
    if (!finite) {
      correct_tile(p, place, bias);
    }
  }
}
