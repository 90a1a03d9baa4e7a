// linear_mma.cu: matrix products with bias on matrix units by warp. sm_80 on.
//
//   c[s][i,j] = bias[s][j] + sum_k a[s][i,k] * b[s][j,k]      for each product s, or, `summed`,
//   c[0][i,j] = bias[0][j] + sum over s of the same
//
// Shapes    a[s] (rows, depth), b[s] (columns, depth), c[s] (rows, columns), c of unit column stride.
//           a and b have unit stride along depth (kAlongA, kAlongB) or across it; their lines begin
//           at 16-byte boundaries. No extent need be a multiple of anything
// Grid      x: tiles of all c, product after product; `group` rows of tiles share their columns, so
//           that blocks which run together read the same lines. y: chunks of depth
// Block     a tile of kM x kN: kWarpsM x kWarpsN warps of parts of it, and kWarpsK that share every
//           slice of kDepth between them
// Pipeline  slice n + kStages - 1 is on its way (cp.async, 16 bytes, zeros outside the matrix) while
//           slice n is multiplied; one barrier a slice:
//             wait for slice n -> barrier -> ask for slice n + kStages - 1 -> fragments, products
// Products  16-bit          one a pair
//           f32, kTf32      one TF32 product, operands rounded to nearest
//           f32             six bf16 products of planes (planes.cuh), small ones first; matrix units
//                           truncate when they add, so every 16 terms join a total in registers
//           Fragments are made by groups of 32 lines ("group" of a or b), of which lane (g, q) of a
//           product holds lines t = 0..3 and 4 terms of 16:
//             permuted    line 4 g + t     f32 and 16-bit along depth
//             natural     line 8 t + g     16-bit across depth, by transposing loads
//           Terms of f32 are 4 q.. 4 q + 3 in both operands: sums may run in any order, and so every
//           load has 16 bytes. With b permuted a lane ends with 8 neighbouring columns of c
// Banks     chunks of 16 bytes of a line are exchanged (`Operand::swizzle`) such that every eight
//           lanes that load together touch eight chunks of different banks
// Output    one chunk: bias is added, one rounding, 16-byte stores where c allows them. More: sums go
//           to `partial`, and linear_mma_reduce adds the chunks in their order
// Not finite  f32 in planes has NaN for every sum with an infinite operand. Where a block finds a sum
//           that is not finite it walks once more, over what decides inf or NaN (`sort_pair`), and
//           corrects those of its outputs: results are IEEE's, at twice the time for such blocks
// Memory    kStages * (kM + kN) * kDepth elements of shared memory; kWarpsK > 1 uses it once more for
//           the warps' sums
// Limits    16-byte boundaries, see above; fewer than 2^31 tiles; rows, columns, depth any
#include "common/params.cuh"
#include "common/planes.cuh"
#include "common/types.cuh"
#include "common/vector.cuh"

// Copy `bytes` (0 to 16) to shared memory, zeros after them; `from` is 16-byte aligned.
__device__ inline void copy_async(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ inline void copies_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most kGroups groups of copies are on their way.
template <int kGroups>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kGroups) : "memory");
}

enum class Terms { kOne, kTf32, kPlanes, kSorted };

// What Config says, and what follows from it.
template <class Config>
struct Block {
  using T = typename Config::T;
  static constexpr int kM = Config::kM, kN = Config::kN, kDepth = Config::kDepth;
  static constexpr int kSize = sizeof(T);
  static constexpr Terms kTerms =
      kSize == 2 ? Terms::kOne : Config::kTf32 ? Terms::kTf32 : Terms::kPlanes;
  static constexpr int kTiles = Config::kWarpsM * Config::kWarpsN;
  static constexpr int kGroupsM = kM / Config::kWarpsM / 32;  // groups of 32 lines of a warp
  static constexpr int kGroupsN = kN / Config::kWarpsN / 32;
  static constexpr int kSteps = kDepth / 16 / Config::kWarpsK;  // of 16 terms, of a warp
  static constexpr bool kNaturalA = kSize == 2 && !Config::kAlongA;
  static constexpr bool kNaturalB = kSize == 2 && !Config::kAlongB;
  static constexpr int kUnits = 4 * kGroupsM;  // rows of c that a lane has a part of
  static constexpr int kStage = (kM + kN) * kDepth * kSize;
  static_assert(kTiles * Config::kWarpsK * 32 == Config::kThreads, "a warp for each part");
  static_assert(kGroupsM * 32 * Config::kWarpsM == kM && kGroupsN * 32 * Config::kWarpsN == kN,
                "parts are groups of 32");
  static_assert(kSteps * 16 * Config::kWarpsK == kDepth, "slices are steps of 16");
  static_assert(Config::kWarpsK * kM * kN * 4 <= Config::kStages * kStage, "sums fit the stages");
};

// One operand's part of a slice in shared memory, and the way of a thread's copies to it.
template <class Config, int kOuter, bool kAlong>
struct Operand {
  static constexpr int kSize = sizeof(typename Config::T), kDepth = Config::kDepth;
  static constexpr int kBytes = kOuter * kDepth * kSize;
  static constexpr int kLine = (kAlong ? kDepth : kOuter) * kSize;
  static constexpr int kChunks = kLine / 16;
  static constexpr int kPasses = kBytes / 16 / Config::kThreads;
  static constexpr int kPassLines = Config::kThreads / kChunks;
  static_assert(kPasses * Config::kThreads * 16 == kBytes && kPassLines * kChunks == Config::kThreads,
                "a copy for each thread");
  static_assert(kChunks >= 8 || (kChunks == 4 && kSize == 2 && !kAlong), "swizzle");

  const char* from;
  int64 stride;  // bytes from line to line

  __device__ void start(const MatrixView& m, int64 outer, int64 k) {
    const int line = threadIdx.x / kChunks, element = threadIdx.x % kChunks * (16 / kSize);
    const int64 along = kAlong ? k : outer, across = kAlong ? outer : k;
    stride = (kAlong ? m.row : m.column) * kSize;
    from = static_cast<const char*>(m.data) + (across + line) * stride + (along + element) * kSize;
  }

  // Copy a slice of which `outer` lines or elements and `depth` of the other exist; move on.
  __device__ void copy(unsigned to, int outer, int depth) {
    const int line0 = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const int lines = kAlong ? outer : depth, length = kAlong ? depth : outer;
    const int bytes = min(max(length * kSize - chunk * 16, 0), 16);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int line = line0 + i * kPassLines;
      copy_async(to + line * kLine + swizzle(line, chunk) * 16, from + i * kPassLines * stride,
                 line < lines ? bytes : 0);
    }
    from += kAlong ? kDepth * kSize : kDepth * stride;
  }

  __device__ static int swizzle(int line, int chunk) {
    if constexpr (kSize == 2) {
      return chunk ^ (kAlong ? line >> 2 & 7 : kChunks >= 8 ? line & 7 : line >> 1 & 3);
    } else {
      return chunk ^ (kAlong ? (line >> 2 & 1) << 2 : (line >> 2 & 3) << 1);
    }
  }

  // Fragments of a group of 32 lines and 16 terms: [t][first or second 8 terms], 16-bit.
  __device__ static void load(unsigned (&word)[4][2], unsigned slice_at, int group, int step) {
    const int lane = threadIdx.x % 32, x = lane % 8, half = lane / 16;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int t = 2 * pair + lane / 8 % 2;
      const int line = kAlong ? 32 * group + 4 * x + t : 16 * step + 8 * half + x;
      const int chunk = kAlong ? 2 * step + half : 4 * group + t;
      const unsigned at = slice_at + line * kLine + swizzle(line, chunk) * 16;
      unsigned w[4];
      if constexpr (kAlong) {
        load_matrices(w, at);
      } else {
        load_matrices_transposed(w, at);
      }
      word[2 * pair][0] = w[0];
      word[2 * pair + 1][0] = w[1];
      word[2 * pair][1] = w[2];
      word[2 * pair + 1][1] = w[3];
    }
  }

  // The same for float32: terms 4 q.. of line 4 g + t.
  __device__ static void load(float (&x)[4][4], const char* slice_at, int group, int step) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int line = kAlong ? 32 * group + 4 * g + n : 16 * step + 4 * q + n;
      const int chunk = kAlong ? 4 * step + q : 8 * group + g;
      const float4 v =
          *reinterpret_cast<const float4*>(slice_at + line * kLine + swizzle(line, chunk) * 16);
      const float four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        (kAlong ? x[n][k] : x[k][n]) = four[k];
      }
    }
  }
};

// Fragments of a group in all their planes (kTf32: the two halves of the terms).
template <Terms kTerms>
struct Fragments {
  static constexpr int kPlanes = kTerms == Terms::kPlanes ? 3 : kTerms == Terms::kTf32 ? 2 : 1;
  unsigned word[kPlanes][4][2];

  template <class Operand>
  __device__ void load(const char* stage, int group, int step) {
    if constexpr (kTerms == Terms::kOne) {
      Operand::load(word[0], shared_address(stage), group, step);
    } else {
      float x[4][4];
      Operand::load(x, stage, group, step);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (kTerms == Terms::kPlanes) {
            unsigned plane[3];
            split_pair(x[t][2 * half], x[t][2 * half + 1], plane);
#pragma unroll
            for (int n = 0; n < 3; ++n) {
              word[n][t][half] = plane[n];
            }
          } else if constexpr (kTerms == Terms::kTf32) {
            word[0][t][half] = round_tf32(x[t][half]);
            word[1][t][half] = round_tf32(x[t][2 + half]);
          } else {
            word[0][t][half] = sort_pair(x[t][2 * half], x[t][2 * half + 1]);
          }
        }
      }
    }
  }
};

// The planes of a and b in the n-th product.
template <Terms kTerms>
struct Order {
  static constexpr int kCount = kTerms == Terms::kPlanes ? 6 : kTerms == Terms::kTf32 ? 2 : 1;
  __device__ static constexpr int a(int n) {
    return kTerms == Terms::kPlanes ? (n == 1 ? 2 : n == 2 || n == 4 ? 1 : 0) : n;
  }
  __device__ static constexpr int b(int n) {
    return kTerms == Terms::kPlanes ? (n == 0 ? 2 : n == 2 || n == 3 ? 1 : 0) : n;
  }
};

// Sums of a warp, as fragments of c: of the 16 lines i (of 2) of a group of a, and of 8 columns.
template <class Config>
struct Sums {
  static constexpr int kWidth = 4 * Block<Config>::kGroupsN;
  static constexpr int kCount = 2 * Block<Config>::kGroupsM * kWidth;
  float x[kCount][4];

  __device__ static constexpr int at(int group, int i, int tile) {
    return (2 * group + i) * kWidth + tile;
  }
  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < 4 * kCount; ++n) {
      x[n / 4][n % 4] = 0;
    }
  }
  __device__ void add(const Sums& other) {
#pragma unroll
    for (int n = 0; n < 4 * kCount; ++n) {
      x[n / 4][n % 4] += other.x[n / 4][n % 4];
    }
  }
  // Whether any is not finite.
  __device__ bool overflown() const {
    float zero = 0;
#pragma unroll
    for (int n = 0; n < 4 * kCount; ++n) {
      zero = fmaf(x[n / 4][n % 4], 0, zero);
    }
    return zero != 0;  // NaN, too
  }
};

// A block's share of the work: a tile of a result and a range of its slices. What stays in registers
// through the products is kept small.
template <class Config>
struct Work {
  int result;
  unsigned m, n;  // of the tile
  int slices;

  __device__ int64 row0() const { return int64(m) * Config::kM; }
  __device__ int64 column0() const { return int64(n) * Config::kN; }
};

__device__ inline int64 slices_of(const LinearParams& p, int s, int depth) {
  return (p.depth[s] + depth - 1) / depth;
}

template <class Config>
__device__ inline Work<Config> work_of(const LinearParams& p) {
  constexpr int kM = Config::kM, kN = Config::kN;
  unsigned tile = blockIdx.x, tiles_m, tiles_n;
  int r = 0;
  for (;; ++r) {  // the grid holds the tiles of all results
    tiles_m = unsigned((p.rows[r] + kM - 1) / kM);
    tiles_n = unsigned((p.columns[r] + kN - 1) / kN);
    if (tile < tiles_m * tiles_n) {
      break;
    }
    tile -= tiles_m * tiles_n;
  }
  const unsigned group = tile / (p.group * tiles_n), in_group = tile - group * p.group * tiles_n;
  const unsigned lines = min(unsigned(p.group), tiles_m - group * p.group);
  const unsigned n = in_group / lines, m = group * p.group + in_group - n * lines;
  int64 slices = slices_of(p, r, Config::kDepth);
  for (int s = 1; p.summed && s < p.products; ++s) {
    slices += slices_of(p, s, Config::kDepth);
  }
  return {r, m, n, int(max(min(slices - blockIdx.y * p.share, p.share), int64(0)))};
}

// sums += the products of the block's slices, of this warp's part.
template <class Config, Terms kTerms>
__device__ inline void accumulate(const LinearParams& p, const Work<Config>& work, char* shared,
                                  Sums<Config>& sums) {
  using B = Block<Config>;
  using T = typename Config::T;
  constexpr int kDepth = Config::kDepth, kStages = Config::kStages;
  using OperandA = Operand<Config, Config::kM, Config::kAlongA>;
  using OperandB = Operand<Config, Config::kN, Config::kAlongB>;
  const int warp = threadIdx.x / 32, part = warp % B::kTiles, warp_k = warp / B::kTiles;
  const int warp_m = part / Config::kWarpsN, warp_n = part % Config::kWarpsN;
  const int rows = int(min(p.rows[work.result] - work.row0(), int64(Config::kM)));
  const int columns = int(min(p.columns[work.result] - work.column0(), int64(Config::kN)));

  int s = work.result;
  int64 k = blockIdx.y * p.share;
  for (; p.summed && s + 1 < p.products && k >= slices_of(p, s, kDepth); ++s) {
    k -= slices_of(p, s, kDepth);
  }
  k *= kDepth;
  OperandA a;
  OperandB b;
  a.start(p.a[s], work.row0(), k);
  b.start(p.b[s], work.column0(), k);
  const unsigned to = shared_address(shared);
  int asked = 0, stage_in = 0;
  auto ask = [&]() {  // for the next slice
    if (asked < work.slices) {
      while (p.summed && k >= p.depth[s]) {
        ++s;
        k = 0;
        a.start(p.a[s], work.row0(), 0);
        b.start(p.b[s], work.column0(), 0);
      }
      const int depth = int(min(p.depth[s] - k, int64(kDepth)));
      a.copy(to + stage_in * B::kStage, rows, depth);
      b.copy(to + stage_in * B::kStage + OperandA::kBytes, columns, depth);
      k += kDepth;
      ++asked;
      stage_in = stage_in + 1 == kStages ? 0 : stage_in + 1;
    }
    copies_end_group();
  };

#pragma unroll 1
  for (int n = 0; n < kStages - 1; ++n) {
    ask();
  }
  int stage = 0;
#pragma unroll 1
  for (int at = 0; at < work.slices; ++at) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // the slice is readable; the stage of the one before is free again
    ask();
    const char* stage_a = shared + stage * B::kStage;
    const char* stage_b = stage_a + OperandA::kBytes;
#pragma unroll
    for (int n = 0; n < B::kSteps; ++n) {
      Sums<Config> part_of_sums;
      if constexpr (kTerms == Terms::kPlanes) {
        part_of_sums.clear();
      }
      Sums<Config>& into = kTerms == Terms::kPlanes ? part_of_sums : sums;
      const int step = n * Config::kWarpsK + warp_k;
      Fragments<kTerms> of_b[B::kGroupsN];
#pragma unroll
      for (int j = 0; j < B::kGroupsN; ++j) {
        of_b[j].template load<OperandB>(stage_b, warp_n * B::kGroupsN + j, step);
      }
#pragma unroll
      for (int m = 0; m < B::kGroupsM; ++m) {
        Fragments<kTerms> of_a;
        of_a.template load<OperandA>(stage_a, warp_m * B::kGroupsM + m, step);
#pragma unroll
        for (int term = 0; term < Order<kTerms>::kCount; ++term) {
          const auto& u = of_a.word[Order<kTerms>::a(term)];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < 4 * B::kGroupsN; ++j) {
              const auto& v = of_b[j / 4].word[Order<kTerms>::b(term)][j % 4];
              float(&c)[4] = into.x[Sums<Config>::at(m, i, j)];
              if constexpr (kTerms == Terms::kTf32) {
                multiply_tf32(c, u[2 * i][0], u[2 * i + 1][0], u[2 * i][1], u[2 * i + 1][1], v[0],
                              v[1]);
              } else if constexpr (kTerms == Terms::kOne) {
                multiply<T>(c, u[2 * i][0], u[2 * i + 1][0], u[2 * i][1], u[2 * i + 1][1], v[0],
                            v[1]);
              } else {
                multiply<bf16>(c, u[2 * i][0], u[2 * i + 1][0], u[2 * i][1], u[2 * i + 1][1], v[0],
                               v[1]);
              }
            }
          }
        }
      }
      if constexpr (kTerms == Terms::kPlanes) {
        sums.add(part_of_sums);
      }
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

// Where sums of chunks are: product after product [chunk][row][columns, rounded up to 8].
__device__ inline int64 partial_line(const LinearParams& p, int r) {
  return (p.columns[r] + 7) / 8 * 8;
}
__device__ inline float* partial_of(const LinearParams& p, int r, int64 chunk) {
  float* at = static_cast<float*>(p.partial);
  for (int s = 0; s < r; ++s) {
    at += p.chunks * p.rows[s] * partial_line(p, s);
  }
  return at + chunk * p.rows[r] * partial_line(p, r);
}

// Eight sums of a row of c, in this lane: x[tile of 8 columns][neighbour].
template <class Config>
struct Writer {
  using T = typename Config::T;
  static constexpr bool kNatural = Block<Config>::kNaturalB;
  const LinearParams& p;
  const Work<Config>& work;
  const float* bias;  // of the tile's columns; null where sums go to `partial`
  bool wide;          // c takes 16-byte stores

  __device__ Writer(const LinearParams& p, const Work<Config>& work, const float* bias)
      : p(p), work(work), bias(bias) {
    const MatrixView& c = p.c[work.result];
    wide = (reinterpret_cast<unsigned long long>(c.data) | c.row * sizeof(T)) % 16 == 0;
  }

  // The column of x[j][e], counted from the group's first.
  __device__ static int column_of(int j, int e) {
    const int q = threadIdx.x % 4;
    return kNatural ? 8 * j + 2 * q + e : 8 * q + 4 * e + j;
  }

  // All lanes of the warp must call. `line` and `group` count from the tile's corner.
  __device__ void write(const float (&x)[4][2], int line, int group) const {
    const int64 row = work.row0() + line;
    const bool exists = row < p.rows[work.result];
    if (bias == nullptr) {
      if (exists) {
        write_partial(x, row, work.column0() + 32 * group);
      }
      return;
    }
    const int64 column = work.column0() + 32 * group + threadIdx.x % 4 * 8;
    Vector<T> v[sizeof(T) / 2];
    float y[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        y[kNatural ? 2 * j + e : 4 * e + j] = x[j][e] + bias[32 * group + column_of(j, e)];
      }
    }
    constexpr int kSize = Vector<T>::kSize;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      v[i / kSize].set(i % kSize, y[i], y[i + 1]);
    }
    if constexpr (kNatural) {
      transpose_quad(v[0].word);
    }
    const int count = exists ? int(min(p.columns[work.result] - column, int64(8))) : 0;
    T* to = static_cast<T*>(p.c[work.result].data) + row * p.c[work.result].row + column;
    if (wide && count == 8) {
#pragma unroll
      for (int n = 0; n < int(sizeof(T)) / 2; ++n) {
        store_vector(to + n * kSize, v[n]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < count) {
          to[i] = element(v, i);
        }
      }
    }
  }

  __device__ static T element(const Vector<T> (&v)[sizeof(T) / 2], int i) {
    if constexpr (sizeof(T) == 4) {
      return v[i / 4].get(i % 4);
    } else {
      return T{static_cast<unsigned short>(v[0].word[i / 2] >> (i % 2 * 16))};
    }
  }

  __device__ void write_partial(const float (&x)[4][2], int64 row, int64 column0) const {
    const int64 line = partial_line(p, work.result);
    float* to = partial_of(p, work.result, blockIdx.y) + row * line + column0;
    if constexpr (kNatural) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (column0 + column_of(j, 0) < line) {
          *reinterpret_cast<float2*>(to + column_of(j, 0)) = float2{x[j][0], x[j][1]};
        }
      }
    } else if (column0 + column_of(0, 0) < line) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        *reinterpret_cast<float4*>(to + column_of(0, e)) =
            float4{x[0][e], x[1][e], x[2][e], x[3][e]};
      }
    }
  }

  // Overwrite only where x is not finite.
  __device__ void correct(const float (&x)[4][2], int line, int group) const {
    const int64 row = work.row0() + line;
    if (row >= p.rows[work.result]) {
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = 32 * group + column_of(j, e);
        const int64 column = work.column0() + at;
        if (x[j][e] - x[j][e] != 0 && column < p.columns[work.result]) {
          if (bias == nullptr) {
            partial_of(p, work.result, blockIdx.y)[row * partial_line(p, work.result) + column] =
                x[j][e];
          } else {
            const MatrixView& c = p.c[work.result];
            static_cast<T*>(c.data)[row * c.row + column] = narrow<T>(x[j][e] + bias[at]);
          }
        }
      }
    }
  }
};

// Give each row's sums of the whole block, after those of the warps that share its slices are added.
// Directly from registers, or by way of shared memory, which takes less code.
template <class Config, bool kDirect, class Give>
__device__ inline void finish(const Sums<Config>& sums, char* shared, Give give) {
  using B = Block<Config>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % B::kTiles;
  const int warp_m = part / Config::kWarpsN, warp_n = part % Config::kWarpsN;
  const int line0 = warp_m * B::kGroupsM * 32 + (B::kNaturalA ? lane / 4 : lane / 4 * 4);
  constexpr int kStep = B::kNaturalA ? 8 : 1;  // lines from t to t + 1
  if constexpr (kDirect) {
    static_assert(Config::kWarpsK == 1, "sums are whole");
#pragma unroll
    for (int u = 0; u < B::kUnits; ++u) {
#pragma unroll
      for (int group = 0; group < B::kGroupsN; ++group) {
        float x[4][2];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            x[j][e] = sums.x[sums.at(u / 4, u % 4 / 2, 4 * group + j)][u % 2 * 2 + e];
          }
        }
        give(x, line0 + u / 4 * 32 + u % 4 * kStep, warp_n * B::kGroupsN + group);
      }
    }
  } else {
    // [warp_k][part][unit][group][half of the eight][lane]
    float4* slots = reinterpret_cast<float4*>(shared) + lane;
    constexpr int kPart = B::kUnits * B::kGroupsN * 2;
    __syncthreads();  // the last slice has been read
#pragma unroll
    for (int u = 0; u < B::kUnits; ++u) {
#pragma unroll
      for (int j = 0; j < 4 * B::kGroupsN; j += 2) {
        const float(&c)[4] = sums.x[sums.at(u / 4, u % 4 / 2, j)];
        const float(&d)[4] = sums.x[sums.at(u / 4, u % 4 / 2, j + 1)];
        const int h = u % 2 * 2;
        slots[(warp * kPart + u * B::kGroupsN * 2 + j / 2) * 32] =
            float4{c[h], c[h + 1], d[h], d[h + 1]};
      }
    }
    __syncthreads();  // all sums readable
#pragma unroll 1
    for (int u = warp / B::kTiles; u < B::kUnits; u += Config::kWarpsK) {
#pragma unroll
      for (int group = 0; group < B::kGroupsN; ++group) {
        float x[4][2];
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const float4* slot = slots + (part * kPart + (u * B::kGroupsN + group) * 2 + j / 2) * 32;
          float4 sum = slot[0];
#pragma unroll
          for (int k = 1; k < Config::kWarpsK; ++k) {
            const float4 more = slot[k * B::kTiles * kPart * 32];
            sum = float4{sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
          }
          x[j][0] = sum.x;
          x[j][1] = sum.y;
          x[j + 1][0] = sum.z;
          x[j + 1][1] = sum.w;
        }
        give(x, line0 + u / 4 * 32 + u % 4 * kStep, warp_n * B::kGroupsN + group);
      }
    }
  }
}

template <class Config>
__device__ void linear_mma(const LinearParams& p) {
  using B = Block<Config>;
  using T = typename Config::T;
  extern __shared__ __align__(128) char shared[];
  __shared__ float bias[Config::kN];
  const Work<Config> work = work_of<Config>(p);
  const int r = work.result;
  const bool whole = p.chunks == 1;
  // Asked for before the first slices, kept in shared memory after the last.
  static_assert(Config::kN <= Config::kThreads, "a thread for each bias");
  float mine = 0;
  const int64 column = work.column0() + threadIdx.x;
  if (whole && p.bias[r] != nullptr && threadIdx.x < Config::kN && column < p.columns[r]) {
    mine = widen(static_cast<const T*>(p.bias[r])[column * p.bias_stride[r]]);
  }
  Sums<Config> sums;
  sums.clear();
  accumulate<Config, B::kTerms>(p, work, shared, sums);
  if (threadIdx.x < Config::kN) {
    bias[threadIdx.x] = mine;
  }
  __syncthreads();  // bias readable
  const Writer<Config> writer(p, work, whole ? bias : nullptr);
  bool overflown = false;
  if constexpr (B::kTerms == Terms::kPlanes) {
    overflown = sums.overflown();
  }
  finish<Config, Config::kWarpsK == 1>(sums, shared, [&](const float (&x)[4][2], int line,
                                                         int group) {
    writer.write(x, line, group);
  });
  if constexpr (B::kTerms == Terms::kPlanes) {
    if (__syncthreads_or(overflown)) {  // and shared memory is free again
      sums.clear();
      accumulate<Config, Terms::kSorted>(p, work, shared, sums);
      finish<Config, false>(sums, shared, [&](const float (&x)[4][2], int line, int group) {
        writer.correct(x, line, group);
      });
    }
  }
}

// c = bias + the sum of the chunks, four columns a thread, grid-stride. Depth is only divided where
// results are too small to fill the device, so counts fit 32 bits.
template <class Config>
__device__ void linear_mma_reduce(const LinearParams& p) {
  using T = typename Config::T;
  const unsigned step = gridDim.x * Config::kThreads;
  unsigned at = blockIdx.x * Config::kThreads + threadIdx.x;  // over the packs of all results
  for (int r = 0; r < (p.summed ? 1 : p.products); ++r) {
    const unsigned packs = unsigned(partial_line(p, r) / 4), count = unsigned(p.rows[r]) * packs;
    const float4* partial = reinterpret_cast<const float4*>(partial_of(p, r, 0));
    const T* bias = static_cast<const T*>(p.bias[r]);
    for (; at < count; at += step) {
      const unsigned row = at / packs, column = (at - row * packs) * 4;
      float4 sum = partial[at];
#pragma unroll 4
      for (int chunk = 1; chunk < p.chunks; ++chunk) {
        const float4 more = partial[at + int64(chunk) * count];
        sum = float4{sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
      }
      const float x[4] = {sum.x, sum.y, sum.z, sum.w};
      T* to = static_cast<T*>(p.c[r].data) + row * p.c[r].row + column;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column + i < p.columns[r]) {
          to[i] = narrow<T>(x[i] + (bias ? widen(bias[(column + i) * p.bias_stride[r]]) : 0.0f));
        }
      }
    }
    at -= count;
  }
}
