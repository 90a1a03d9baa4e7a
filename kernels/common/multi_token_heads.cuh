// multi_token_heads.cuh: multi-token attention of up to 32 heads on matrix units: tiles of
// positions whose heads lie side by side, and the convolution over them.
//
// Tile      rows of the matrix x columns, a multiple of eight from a multiple of eight on; a
//           position is 64 bytes, 32 heads. Taps shift by whole positions, so that any of them is
//           a matrix with rows of 16 bytes, and a tap is a product of its own: what does not exist
//           is never multiplied, and a NaN reaches what its taps reach
// Banks     piece b (8 heads) of column r is at r * 64 + (b ^ r / 8 % 4) * 16. A matrix takes
//           columns 8 n + s and 8 n + s + 1, n = 0..3: halves of 128 bytes by r % 2, sixteenths by
//           n. Writing, eight lanes have four heads each of one column; in every second block of
//           eight columns the two of a pair change turns
// Product   (16 heads out) x (16 heads in, one tap) x (8 positions). Positions 2 t + 8 n + {0, 1}
//           are product t of a warp's 32, so that a lane ends with 8 neighbours of a head
// Rows      a warp has kHeight rows of 32 columns: a matrix of the tile is loaded once for all
//           rows of taps that meet it
// Config    T: f16 or bf16; kKh, kKw; kVector: elements per access, divides seq and the strides
#pragma once
#include "common/params.cuh"
#include "common/types.cuh"
#include "common/reduce.cuh"
#include "common/mma.cuh"
#include "common/multi_token.cuh"
#include "common/multi_token_strip.cuh"

constexpr int kHeads = 32;  // of a tile
constexpr int kPosition = kHeads * 2;  // bytes

constexpr int kNoKey = -64;  // before any key of a tile

__device__ constexpr int up_to_eight(int x) { return (x + 7) / 8 * 8; }

// Hides from the compiler that a number is known before, lest it computes what follows from it
// ahead of a loop and holds that in registers.
__device__ inline unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Copy 16 bytes to shared memory.
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

// A tile that serves kHeight x kColumns positions, whose taps reach kLeft columns to the left.
template <class Config, int kHeight, int kColumns, int kLeft>
struct HeadTile {
  static constexpr int kRight = Config::kKw - 1 - kLeft;
  static constexpr int kRows = kHeight + Config::kKh - 1;
  static constexpr int kBefore = up_to_eight(kLeft);  // columns before the first position
  static constexpr int kSkip = kBefore - kLeft;       // of them no tap reaches so many
  static constexpr int kPitch = (kBefore + kColumns + up_to_eight(kRight)) * kPosition;  // bytes
  static constexpr int kBytes = kRows * kPitch;
  static constexpr int kBlocks = kColumns / 8;        // of eight columns, in a row
  static constexpr int kEdges = kLeft + kRight;       // columns beside them that taps reach

  // Column of the tile, from its start.
  __device__ static int edge(int n) {
    return n < kLeft ? kSkip + n : kBefore + kColumns + n - kLeft;
  }
};

// Where a lane's row of a matrix is, for columns 8 (lane % 8 / 2) + s + lane % 2, piece `piece`,
// from the start of 32 columns; s may depend on the lane, below 32.
__device__ inline int matrix_row(int lane, int s, int piece) {
  const int column = lane % 8 / 2 * 8 + s + lane % 2;
  return column * kPosition + (piece ^ column / 8 % 4) * 16;
}

// Eight neighbours from `key` on, up to key `last`; 0 after it. Whole packs are read.
template <class Config>
__device__ inline Pack<typename Config::T, 8> read_eight(const typename Config::T* row, int key,
                                                         int last) {
  using T = typename Config::T;
  constexpr int kVector = Config::kVector;
  Pack<T, 8> x;
  if (Config::kVector < 8 || key > last) {
    x.fill(0);
  }
#pragma unroll
  for (int k = 0; k < 8; k += kVector) {
    if (key + k <= last) {
      Pack<T, kVector> v;
      v.load(row + key + k);
      x.put(k, v);
    }
  }
  const int count = last - key + 1;
  if (count < 8) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x.word[k] &= 2 * k + 1 < count ? 0xffffffffu : 2 * k < count ? 0xffffu : 0u;
    }
  }
  return x;
}

// Write eight neighbours, of which `left` exist: a multiple of kVector.
template <class Config>
__device__ inline void write_eight(typename Config::T* to, int left,
                                   const Pack<typename Config::T, 8>& x) {
  using T = typename Config::T;
  constexpr int kVector = Config::kVector;
  if constexpr (kVector == 8) {
    if (left > 0) {
      x.stream(to);
    }
  } else if constexpr (kVector == 1) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k < left) {
        to[k].bits = static_cast<unsigned short>(x.word[k / 2] >> k % 2 * 16);
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < 8; k += kVector) {
      if (k < left) {
        Pack<T, kVector> v;
#pragma unroll
        for (int w = 0; w < kVector / 2; ++w) {
          v.word[w] = x.word[k / 2 + w];
        }
        v.stream(to + k);
      }
    }
  }
}

// Four heads of eight columns into a row of a tile.
template <class T>
__device__ inline void store_block(char* row, int block, int quad, const Pack<T, 8> (&x)[4]) {
  const unsigned first = block % 2 ? 0x7632 : 0x5410, second = first ^ 0x2222;
  char* to = row + block * 8 * kPosition + block % 2 * kPosition +
             ((quad / 2 ^ block % 4) * 16 + quad % 2 * 8);
  char* other = to + (block % 2 ? -kPosition : kPosition);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    *reinterpret_cast<uint2*>(to + 2 * k * kPosition) = {
        __byte_perm(x[0].word[k], x[1].word[k], first),
        __byte_perm(x[2].word[k], x[3].word[k], first)};
    *reinterpret_cast<uint2*>(other + 2 * k * kPosition) = {
        __byte_perm(x[0].word[k], x[1].word[k], second),
        __byte_perm(x[2].word[k], x[3].word[k], second)};
  }
}

// Fill a tile: read(row, first of four heads, column from the tile's start, x) gives eight columns
// of four heads. Where taps reach beyond the positions, finish_one(bits, row, head, column) makes
// an element of what read_one(row, head, column) has read meanwhile.
template <class Config, class Tile, class Read, class ReadOne, class FinishOne>
__device__ inline void fill_tile(char* tile, Read read, ReadOne read_one, FinishOne finish_one) {
  using T = typename Config::T;
  constexpr int kQuads = kHeads / 4, kUnits = Tile::kRows * Tile::kBlocks * kQuads;
  constexpr int kOnes = Tile::kRows * Tile::kEdges * kHeads;
  constexpr int kOfThread = (kOnes + Config::kThreads - 1) / Config::kThreads;
  unsigned short one[kOfThread > 0 ? kOfThread : 1];
  const int thread = opaque(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int n = i * Config::kThreads + thread, line = n / kHeads;
    if (n < kOnes) {
      one[i] = read_one(line / Tile::kEdges, n % kHeads, Tile::edge(line % Tile::kEdges));
    }
  }
#pragma unroll 1
  for (int n = thread; n < kUnits; n += Config::kThreads) {
    const int quad = n % kQuads, block = n / kQuads % Tile::kBlocks + Tile::kBefore / 8;
    const int row = n / kQuads / Tile::kBlocks;
    Pack<T, 8> x[4];
    read(row, quad * 4, block * 8, x);
    store_block<T>(tile + row * Tile::kPitch, block, quad, x);
  }
  const int again = opaque(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int n = i * Config::kThreads + again, line = n / kHeads, head = n % kHeads;
    if (n < kOnes) {
      const int column = Tile::edge(line % Tile::kEdges);
      char* to = tile + line / Tile::kEdges * Tile::kPitch + column * kPosition;
      reinterpret_cast<unsigned short*>(to + (head / 8 ^ column / 8 % 4) * 16)[head % 8] =
          finish_one(one[i], line / Tile::kEdges, head, column);
    }
  }
}

// ------------------------------------------------------------------------------------- convolution

// Number of the fragment of weights of 16 heads out (m) and 16 heads in (k) for the tap that reads
// row `down` and column `right` of a position's window in the tile.
template <class Config>
__device__ constexpr int fragment(int k, int down, int right, int m) {
  return ((k * Config::kKw + right) * Config::kKh + down) * 2 + m;
}

template <class Config>
constexpr int kFragments = 2 * Config::kKh * Config::kKw * 2;  // of 512 bytes

// sum[row][m][t][2 h + e]: head 16 m + 8 h + lane / 4, column 8 (lane % 4) + 2 t + e of 32. `tile`:
// shared address of the warp's first row of the tile, at the column kBefore before the first of
// the 32; kIn heads are summed over.
template <class Config, class Tile, int kHeight, int kIn>
__device__ inline void convolve(float (&sum)[kHeight][2][4][4], unsigned tile, const uint4* table) {
  using T = typename Config::T;
#pragma unroll 1
  for (int k = 0; k < (kIn + 15) / 16; ++k) {
    const int lane = opaque(threadIdx.x % kWarp);
    // Matrices of a load: pieces 2 k, 2 k + 1 of product t, then of t + 1. Addresses differ by
    // constants where no lane's column passes another multiple of eight.
    const int piece = 2 * k + lane / 8 % 2, later = lane / 16 * 2;
    unsigned even[4], mixed[2][24];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      even[c] = tile + matrix_row(lane, 8 * c + later, piece);
    }
#pragma unroll
    for (int right = 0; right < Config::kKw; ++right) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        mixed[t][right] = tile + matrix_row(lane, Tile::kSkip + right + 4 * t + later, piece);
      }
    }
#pragma unroll
    for (int right = 0; right < Config::kKw; ++right) {
      uint4 a[Config::kKh][2];
#pragma unroll
      for (int down = 0; down < Config::kKh; ++down) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          a[down][m] = table[fragment<Config>(k, down, right, m) * kWarp + lane];
        }
      }
#pragma unroll
      for (int row = 0; row < kHeight + Config::kKh - 1; ++row) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const int s = Tile::kSkip + right + 4 * t;
          unsigned b[4];
          load_matrices(b, row * Tile::kPitch + (s % 8 <= 4 ? even[s / 8] + s % 8 * kPosition
                                                            : mixed[t][right]));
#pragma unroll
          for (int out = 0; out < kHeight; ++out) {
            const int down = row - out;
            if (down < 0 || down >= Config::kKh) {
              continue;
            }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              const uint4& w = a[down][m];
              multiply<T>(sum[out][m][2 * t], w.x, w.y, w.z, w.w, b[0], b[1]);
              multiply<T>(sum[out][m][2 * t + 1], w.x, w.y, w.z, w.w, b[2], b[3]);
            }
          }
        }
      }
    }
  }
}

// One strip of rows of a matrix, and a span of its columns: what a block of the convolution does.
// Long rows come first.
struct alignas(16) Strip {
  int item, group, query, key;

  template <int kRows, int kSpan>
  __device__ static Strip of(const MultiTokenParams& p) {
    const int spans = (p.seq + kSpan - 1) / kSpan, pairs = int(p.batch) * p.groups;
    const int rest = int(blockIdx.x) / spans;
    const int strips = (p.seq + kRows - 1) / kRows;
    return {rest % pairs / p.groups, rest % pairs % p.groups,
            (strips - 1 - rest / pairs) * kRows, int(blockIdx.x) % spans * kSpan};
  }

  // One that is in shared memory, so that no registers hold it and what follows from it meanwhile.
  __device__ static Strip at(const Strip* stored) { return stored[opaque(0)]; }
};

// A word of a fragment: weight[output, channel, u, v] of two neighbours, or 0: of outputs if
// kOutputs, else of channels. `output` and `channel` count within the group.
template <class T, bool kOutputs>
__device__ inline unsigned weight_pair(const MultiTokenParams& p, int group, int output,
                                       int channel, int u, int v) {
  const int outputs = p.heads_out / p.groups, channels = p.heads_in / p.groups;
  unsigned word = 0;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int o = output + (kOutputs ? e : 0), c = channel + (kOutputs ? 0 : e);
    if (o < outputs && c < channels) {
      word |= unsigned(static_cast<const T*>(
                  p.weight)[(int64(group) * outputs + o) * p.weight_stride[0] +
                            c * p.weight_stride[1] + u * p.weight_stride[2] +
                            v * p.weight_stride[3]].bits)
              << 16 * e;
    }
  }
  return word;
}
