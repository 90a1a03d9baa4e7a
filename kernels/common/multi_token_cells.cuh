// multi_token_cells.cuh: multi-token attention on matrix units: P in shared memory, and its products.
//
// Four heads ("a quad") of a row of P are lists of 16-byte cells, of which each is one lane's whole A
// fragment of a matrix product: two columns 64 apart,
//
//   cell s:  | heads 0, 1 of column a | heads 0, 1 of b | heads 2, 3 of a | heads 2, 3 of b |
//            a = s - left, b = a + 64, counted from the first column of a chunk of 128
//
// s runs from 0 to 63 + left + right, so the few columns near 0 and 64 stand in two cells.
//
// Product   (16 = columns) x (16 = four taps of four heads) x (8 = outputs): the cells are A as they
//           lie, one 16-byte read a lane, and the weights are B. With up to 4 outputs the 8 are
//           outputs x 2 neighbouring columns, so that kKw + 1 cells a row serve two keys. A lane ends
//           with 8 neighbouring keys of an output: one 16-byte write
// Banks     eight lanes (two neighbouring g, four t) of a product read cells 8 g + constant + t:
//           bit 3 of s is added to bit 2 of the place in a line of 8 cells, so that two lines differ
//           in their halves; bits 4 and 5 are added too, for the lanes that write every fourth cell
// Not finite  a NaN would spread through weights that are 0 because a tap does not exist: rows of P
//           that are NaN (they always are so as a whole) enter as 0, and the outputs that they
//           reach are overwritten with NaN
// Config    T; kChannels, kOutputs: heads of a group; kKh, kKw; kVector: elements per access of scores
//           and y (divides seq and the strides of scores); kTogether: products that share a read of A
#pragma once
#include "common/params.cuh"
#include "common/types.cuh"
#include "common/reduce.cuh"
#include "common/mma.cuh"
#include "common/multi_token.cuh"
#include "common/multi_token_strip.cuh"

constexpr int kChunk = 128;  // columns of a chunk, twice kHalf
constexpr int kHalf = 64;

__device__ constexpr int cell_offset(int s) { return s << 4 ^ (s & 8) << 3 ^ (s & 0x30); }

__device__ constexpr int round_up(int x, int step) { return (x + step - 1) / step * step; }

// Sizes that follow from Config.
template <class Config>
struct Cells {
  static constexpr int kQuads = (Config::kChannels + 3) / 4;
  static constexpr bool kPair = Config::kOutputs <= 4;  // two neighbouring columns in a product
  static constexpr int kLeft = Config::kKw / 2;         // columns left of a key
  static constexpr int kRight = Config::kKw - 1 - kLeft;
  static constexpr int kTapColumns = Config::kKw + (kPair ? 1 : 0);
  static constexpr int kRowSteps = (kTapColumns * kQuads + 3) / 4;  // products of a row of taps
  static constexpr int kSteps = kRowSteps * Config::kKh;
  static constexpr int kTiles = kPair ? 1 : (Config::kOutputs + 7) / 8;  // of 8 outputs
  static constexpr int kColumnStep = kPair ? 2 : 1;
  static constexpr int kEights = 8 / kColumnStep;  // products that give a lane its 8 keys, twice
  static constexpr int kLoad = Config::kVector < 4 ? Config::kVector : 4;  // elements per access

  static constexpr int kChunkBytes = round_up(kHalf + kLeft + kRight, 8) * 16;
  static constexpr int kTableBytes = kSteps * kTiles * kWarp * 8;        // weights
  static constexpr int kBiasBytes = round_up(Config::kOutputs, 8) * 4;
};

// Rows of P in shared memory, in a ring. In a row, quads are planes one after the other.
struct Window {
  const char* row;  // the first row's chunk
  int slots;        // rows
  int slot;         // bytes of a row
  int plane;        // bytes of a quad in a row
};

// Where lane slot t (0..3) of a product reads: a tap column and a quad.
template <class Config>
struct TapSlot {
  int column, quad;
  bool exists;

  __device__ constexpr TapSlot(int step, int t) : column(0), quad(0), exists(true) {
    constexpr int kQuads = Cells<Config>::kQuads, kColumns = Cells<Config>::kTapColumns;
    constexpr int kInPairs = kQuads % 2 == 0 ? kColumns / 2 * 2 * kQuads : 0;
    const int n = step * 4 + t;
    if (n < kInPairs) {  // two columns x two quads: the banks of a product differ
      constexpr int kHalves = kQuads / 2 > 0 ? kQuads / 2 : 1;
      column = step / kHalves * 2 + t % 2;
      quad = step % kHalves * 2 + t / 2;
    } else {
      column = kInPairs / kQuads + (n - kInPairs) / kQuads;
      quad = (n - kInPairs) % kQuads;
    }
    if (column >= kColumns) {
      column = quad = 0;
      exists = false;
    }
  }
};

// Write two words of a cell: its column a (half 0) or b (half 1).
__device__ inline void store_half_cell(char* cells, int s, int half, unsigned low, unsigned high) {
  unsigned* to = reinterpret_cast<unsigned*>(cells + cell_offset(s)) + half;
  to[0] = low;
  to[2] = high;
}

// Write the cells of 4 + 4 neighbouring columns: `cell[k]` has a = j + k, b = a + 64. kLeft and
// kRight columns beyond the band are the halo.
template <int kLeft, int kRight>
__device__ inline void store_cells(char* cells, int j, const uint4 (&cell)[4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    *reinterpret_cast<uint4*>(cells + cell_offset(kLeft + j + k)) = cell[k];
  }
  if (kRight > 0 && j < kRight) {  // b of the first cells is a of those 64 further
#pragma unroll
    for (int k = 0; k < 4 && k < kRight; ++k) {
      if (j + k < kRight) {
        store_half_cell(cells, kLeft + kHalf + j + k, 0, cell[k].y, cell[k].w);
      }
    }
  }
  if (kLeft > 0 && j >= kHalf - round_up(kLeft, 4)) {  // a of the last is b of those 64 before
#pragma unroll
    for (int k = kLeft < 4 ? 4 - kLeft : 0; k < 4; ++k) {
      if (j + k >= kHalf - kLeft) {
        store_half_cell(cells, kLeft + j + k - kHalf, 1, cell[k].x, cell[k].z);
      }
    }
  }
}

// Entries of a pack from `allowed` on become -inf.
template <class T>
__device__ inline void mask_pack(Pack<T, 4>& x, int allowed) {
  const unsigned lowest = narrow<T>(negative_infinity<float>()).bits;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    x.word[k] = 2 * k >= allowed ? lowest | lowest << 16
        : 2 * k + 1 == allowed ? (x.word[k] & 0xffffu) | lowest << 16 : x.word[k];
  }
}

// ----------------------------------------------------------------------------------------- weights

// B fragment word: weights of two neighbouring channels of a tap for column n of a product.
template <class Config>
__device__ inline unsigned weight_word(const MultiTokenParams& p, int head_out, int tile, int u,
                                       int step, int t, int n, int half) {
  using B = Cells<Config>;
  using T = typename Config::T;
  const TapSlot<Config> tap(step, t);
  const int output = B::kPair ? n / 2 : tile * 8 + n;
  const int v = tap.column - (B::kPair ? n % 2 : 0);
  const int channel = tap.quad * 4 + half * 2;
  unsigned word = 0;
  if (tap.exists && v >= 0 && v < Config::kKw && output < Config::kOutputs) {
    const T* from = static_cast<const T*>(p.weight) + (head_out + output) * p.weight_stride[0] +
                    channel * p.weight_stride[1] + u * p.weight_stride[2] +
                    v * p.weight_stride[3];
    if (channel < Config::kChannels) {
      word = from->bits;
    }
    if (channel + 1 < Config::kChannels) {
      word |= unsigned(from[p.weight_stride[1]].bits) << 16;
    }
  }
  return word;
}

// B fragments of all products, uint2 [(u * kRowSteps + step) * kTiles + tile][lane], and the bias.
template <class Config>
__device__ inline void write_weights(const MultiTokenParams& p, int head_out, uint2* table,
                                     float* bias) {
  using B = Cells<Config>;
  for (int n = threadIdx.x; n < B::kSteps * B::kTiles * kWarp; n += Config::kThreads) {
    const int lane = n % kWarp, number = n / kWarp;
    const int tile = number % B::kTiles, step = number / B::kTiles % B::kRowSteps;
    const int u = number / B::kTiles / B::kRowSteps;
    table[n] = uint2{weight_word<Config>(p, head_out, tile, u, step, lane % 4, lane / 4, 0),
                     weight_word<Config>(p, head_out, tile, u, step, lane % 4, lane / 4, 1)};
  }
  for (int o = threadIdx.x; o < round_up(Config::kOutputs, 8); o += Config::kThreads) {
    const auto* from = static_cast<const typename Config::T*>(p.bias);
    bias[o] = from && o < Config::kOutputs ? widen(from[(head_out + o) * p.bias_stride]) : 0.0f;
  }
}

// ----------------------------------------------------------------------------------------- results

// Write 8 neighbouring keys of a row of y, from `key` on, to `to`.
template <class Config>
__device__ inline void store_pack(typename Config::T* to, const MultiTokenParams& p, bool aligned,
                                  int key, const Pack<typename Config::T, 8>& x) {
  using T = typename Config::T;
  constexpr int kVector = Config::kVector;
  if (kVector == 8 && aligned) {
    if (key < p.seq) {
      x.stream(to);
    }
    return;
  }
  if (kVector > 1 && aligned) {
#pragma unroll
    for (int k = 0; k < 8; k += kVector) {
      Pack<T, kVector> piece;
#pragma unroll
      for (int i = 0; i < piece.kWords; ++i) {
        piece.word[i] = x.word[k / 2 + i];
      }
      if (key + k < p.seq) {
        piece.stream(to + k);
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (key + k < p.seq) {
        to[k].bits = static_cast<unsigned short>(k % 2 ? x.word[k / 2] >> 16 : x.word[k / 2]);
      }
    }
  }
}

// The same from float32, 0 above the diagonal.
template <class Config>
__device__ inline void store_eight(typename Config::T* to, const MultiTokenParams& p, bool aligned,
                                   int query, int key, float (&value)[8]) {
  using T = typename Config::T;
  if (key + 7 > query) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      value[k] = key + k <= query ? value[k] : 0.0f;
    }
  }
  Pack<T, 8> x;
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    x.word[k / 2] = pack<T>(value[k], value[k + 1]);
  }
  store_pack<Config>(to, p, aligned, key, x);
}

// Overwrite with NaN what NaN rows reach in a chunk of row `query` of y (item, first head of the
// group, 0, 0), where products have taken these rows as 0. Bit kKh - 1 - u of `rows` says whether the
// row of tap u is NaN.
template <class Config>
__device__ void poison_chunk(const MultiTokenParams& p, typename Config::T* y, unsigned rows,
                             int query, int first_key) {
  using T = typename Config::T;
  __syncwarp();  // the results of the chunk are written
#pragma unroll 1
  for (int key = first_key + int(threadIdx.x) % kWarp; key < first_key + kChunk && key <= query;
       key += kWarp) {
    bool found = false;
    for (int u = 0; u < Config::kKh; ++u) {
      for (int v = 0; v < Config::kKw && rows >> (Config::kKh - 1 - u) & 1; ++v) {
        const int from = key + v - Cells<Config>::kLeft;
        found = found || (from >= 0 && from <= query - p.row_origin + u);
      }
    }
    for (int o = 0; o < Config::kOutputs && found; ++o) {
      y[(int64(o) * p.seq + query) * p.seq + key] = narrow<T>(0 * negative_infinity<float>());
    }
  }
}

// ---------------------------------------------------------------------------------------- products

// A chunk of keys of row `query` of y (item, first head of the group, 0, 0), whose first row of taps
// is in ring row `slot` of the window.
template <class Config>
__device__ inline void convolve(const MultiTokenParams& p, typename Config::T* y_group,
                                const uint2* weights, const float* bias, bool aligned,
                                const Window& window, int slot, int query, int first_key) {
  using B = Cells<Config>;
  using T = typename Config::T;
  constexpr int kTogether = Config::kTogether;
  const int lane = threadIdx.x % kWarp, t = lane % 4, g = lane / 4;
  T* y = y_group + int64(query) * p.seq + first_key + g * 8;

#pragma unroll 1
  for (int tile = 0; tile < B::kTiles; tile += kTogether) {
    float sum[kTogether][B::kEights][4];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const float2 two = B::kPair ? float2{bias[t], bias[t]}
                                  : *reinterpret_cast<const float2*>(bias + (tile + k) * 8 + 2 * t);
#pragma unroll
      for (int q = 0; q < B::kEights; ++q) {
        sum[k][q][0] = sum[k][q][2] = two.x;
        sum[k][q][1] = sum[k][q][3] = two.y;
      }
    }
#pragma unroll(B::kSteps <= 6 ? B::kRowSteps : 1)
    for (int step = 0; step < B::kRowSteps; ++step) {
      const TapSlot<Config> tap(step, t);
      int cell[B::kEights];
#pragma unroll
      for (int q = 0; q < B::kEights; ++q) {
        cell[q] = cell_offset(g * 8 + tap.column + q * B::kColumnStep) + tap.quad * window.plane;
      }
      const char* from = window.row + slot * window.slot;
      int row = slot;
#pragma unroll(B::kSteps <= 6 ? Config::kKh : 1)
      for (int u = 0; u < Config::kKh; ++u) {
        uint2 b[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          b[k] = weights[((u * B::kRowSteps + step) * B::kTiles + tile + k) * kWarp + lane];
        }
#pragma unroll
        for (int q = 0; q < B::kEights; ++q) {
          const uint4 a = *reinterpret_cast<const uint4*>(from + cell[q]);
#pragma unroll
          for (int k = 0; k < kTogether; ++k) {
            multiply<T>(sum[k][q], a.x, a.y, a.z, a.w, b[k].x, b[k].y);
          }
        }
        row = row + 1 == window.slots ? 0 : row + 1;
        from = row == 0 ? window.row : from + window.slot;
      }
    }
#pragma unroll
    for (int n = 0; n < kTogether * (B::kPair ? 1 : 2); ++n) {
      const int k = n % kTogether, parity = n / kTogether;
      const int output = B::kPair ? t : (tile + k) * 8 + 2 * t + parity;
      if (output < Config::kOutputs) {
        T* to = y + int64(output) * p.seq * p.seq;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float value[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            value[i] = B::kPair ? sum[k][i / 2][half * 2 + i % 2]
                                : sum[k][i % B::kEights][half * 2 + parity];
          }
          store_eight<Config>(to + half * kHalf, p, aligned, query, first_key + g * 8 + half * kHalf,
                              value);
        }
      }
    }
  }
}
