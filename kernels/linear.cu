// linear.cu: matrix products with bias, for every projection and its gradients, on any device; sums
// of the columns of matrices.
//
//   c[s][i,j] = bias[s][j] + sum_k a[s][i,k] * b[s][j,k]      for each product s, or, `summed`,
//   c[0][i,j] = bias[0][j] + sum over s of the same
//   c[s][j]   = sum_i a[s][i,j]                               (linear_column_sums)
//
// Shapes    a[s] (rows, depth), b[s] (columns, depth), c[s] (rows, columns), any strides: a weight is
//           b as it stands, a transposed operand exchanges its strides
// Grid      x: tiles of all c, product after product, columns fastest, grid-stride
// Block     256 threads; thread (tx, ty) owns 4 x 4 outputs, 16 apart
// Tile map  c tile 64 x 64; a and b pass through shared memory in slices of 64 x 16
// Pipeline  per slice:  load a, b -> barrier -> 16 rank-1 updates -> barrier
// Memory    2 * 16 * 65 * sizeof(A) bytes of shared memory, A = float | double
// Limits    none: every dtype and size
//
// Each slice is summed on its own before it joins the total: long sums then lose about as much
// as a blocked product does, not as a running sum. The order is fixed.
#include "common/params.cuh"
#include "common/types.cuh"
#include "common/vector.cuh"

constexpr int kTile = 64, kSlice = 16, kPad = 1;  // the pad keeps transposed writes off one bank

template <class T, class A>
__device__ void load_slice(A (&slice)[kSlice][kTile + kPad], const MatrixView& m, int64 row0,
                           int64 rows, int64 k0, int64 depth) {
  const T* data = static_cast<const T*>(m.data);
  for (int e = threadIdx.x; e < kTile * kSlice; e += 256) {
    // Neighbouring threads take neighbouring addresses, whichever axis is the unit one.
    const int r = m.row == 1 ? e % kTile : e / kSlice, k = m.row == 1 ? e / kTile : e % kSlice;
    const bool inside = row0 + r < rows && k0 + k < depth;
    slice[k][r] = inside ? A(widen(data[(row0 + r) * m.row + (k0 + k) * m.column])) : A(0);
  }
}

// Of the results: how many there are, and a tile's number in its own.
__device__ inline int results(const LinearParams& p) { return p.summed ? 1 : p.products; }

__device__ inline int64 tile_count(const LinearParams& p, int s) {
  return (p.rows[s] + kTile - 1) / kTile * ((p.columns[s] + kTile - 1) / kTile);
}

template <class Config>
__device__ void linear_product(const LinearParams& p) {
  using T = typename Config::T;
  using A = Accumulator<T>;
  static_assert(Config::kThreads == 256, "the tile map is made for 256 threads");
  __shared__ A a[kSlice][kTile + kPad], b[kSlice][kTile + kPad];
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  int64 tiles = 0;
  for (int r = 0; r < results(p); ++r) {
    tiles += tile_count(p, r);
  }

  for (int64 at = blockIdx.x; at < tiles; at += gridDim.x) {
    int64 tile = at;
    int r = 0;
    for (; tile >= tile_count(p, r); ++r) {
      tile -= tile_count(p, r);
    }
    const int64 tiles_x = (p.columns[r] + kTile - 1) / kTile;
    const int64 row0 = tile / tiles_x * kTile, column0 = tile % tiles_x * kTile;
    A total[4][4] = {};
    for (int s = r; s < (p.summed ? p.products : r + 1); ++s) {
      for (int64 k0 = 0; k0 < p.depth[s]; k0 += kSlice) {
        load_slice<T>(a, p.a[s], row0, p.rows[r], k0, p.depth[s]);
        load_slice<T>(b, p.b[s], column0, p.columns[r], k0, p.depth[s]);
        __syncthreads();  // a, b readable
        A part[4][4] = {};
        for (int k = 0; k < kSlice; ++k) {
          for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < 4; ++j) {
              part[i][j] += a[k][ty + 16 * i] * b[k][tx + 16 * j];
            }
          }
        }
        for (int i = 0; i < 4; ++i) {
          for (int j = 0; j < 4; ++j) {
            total[i][j] += part[i][j];
          }
        }
        __syncthreads();  // a, b free again
      }
    }
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) {
        const int64 row = row0 + ty + 16 * i, column = column0 + tx + 16 * j;
        if (row < p.rows[r] && column < p.columns[r]) {
          A value = total[i][j];
          if (p.bias[r] != nullptr) {
            value += A(widen(static_cast<const T*>(p.bias[r])[column * p.bias_stride[r]]));
          }
          static_cast<T*>(p.c[r].data)[row * p.c[r].row + column * p.c[r].column] =
              narrow<T>(value);
        }
      }
    }
  }
}

// kVector neighbouring elements of a row, or zeros.
template <class T, int kVector>
__device__ inline void load_columns(Accumulator<T> (&x)[kVector], const T* from, bool inside) {
  if constexpr (kVector == 1) {
    x[0] = inside ? Accumulator<T>(widen(*from)) : Accumulator<T>(0);
  } else {
    const Vector<T> v = inside ? load_vector(from) : Vector<T>{};
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      x[i] = v.get(i);
    }
  }
}

// Sums of columns, in two launches where there are many rows: rows in chunks, then the chunks' sums.
// Grid     x: 32 * kVector columns each, matrix after matrix; y: chunks of `share` rows
// Block    warp w adds rows w, w + 8, ..., in runs of 32; then the warps' sums are added in order
// Memory   four loads of a lane in flight; bound by memory from some megabytes on
// Output   c[s], row = chunk, in Config::Out
template <class Config>
__device__ void linear_column_sums(const LinearParams& p) {
  using T = typename Config::T;
  using Out = typename Config::Out;
  using A = Accumulator<T>;
  constexpr int kVector = Config::kVector, kWarps = Config::kThreads / 32;
  constexpr int kColumns = 32 * kVector, kAhead = 4, kRuns = 32 / kAhead;
  __shared__ A sums[kWarps][kVector][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int s = 0;
  int64 tile = blockIdx.x;
  for (; tile >= (p.columns[s] + kColumns - 1) / kColumns; ++s) {
    tile -= (p.columns[s] + kColumns - 1) / kColumns;
  }
  const MatrixView &a = p.a[s], &c = p.c[s];
  const int64 column0 = tile * kColumns, column = column0 + lane * kVector;
  const int64 row0 = blockIdx.y * p.share, end = min(row0 + p.share, p.rows[s]);

  A total[kVector] = {};
  if (column < p.columns[s]) {
    const T* from = static_cast<const T*>(a.data) + column * a.column;
    for (int64 row = row0 + warp; row < end;) {
      A run[kVector] = {};
      for (int n = 0; n < kRuns && row < end; ++n, row += kWarps * kAhead) {
        A x[kAhead][kVector];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int64 at = row + i * kWarps;
          load_columns<T, kVector>(x[i], from + at * a.row, at < end);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
#pragma unroll
          for (int v = 0; v < kVector; ++v) {
            run[v] += x[i][v];
          }
        }
      }
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        total[v] += run[v];
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    sums[warp][v][lane] = total[v];
  }
  __syncthreads();  // sums readable
  const int mine = threadIdx.x;
  if (mine < kColumns && column0 + mine < p.columns[s]) {
    A sum = sums[0][mine % kVector][mine / kVector];
    for (int w = 1; w < kWarps; ++w) {
      sum += sums[w][mine % kVector][mine / kVector];
    }
    static_cast<Out*>(c.data)[blockIdx.y * c.row + (column0 + mine) * c.column] =
        narrow<Out>(sum);
  }
}
