// linear.cu: sums of matrix products, with bias, for every projection and its gradients.
//
//   c[i,j] = bias[j] + sum over s < products of  sum_k a[s][i,k] * b[s][j,k]
//   c[j]   = sum_i a[0][i,j]                                  (linear_column_sum)
//
// Shapes    a[s] (rows, depth[s]), b[s] (columns, depth[s]), c (rows, columns), any strides: a
//           weight is b as it stands, a transposed operand exchanges its strides
// Grid      x: tiles of c, columns fastest, grid-stride
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

template <class Config>
__device__ void linear_product(const LinearParams& p) {
  using T = typename Config::T;
  using A = Accumulator<T>;
  static_assert(Config::kThreads == 256, "the tile map is made for 256 threads");
  __shared__ A a[kSlice][kTile + kPad], b[kSlice][kTile + kPad];
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const int64 tiles_x = (p.columns + kTile - 1) / kTile;
  const int64 tiles = tiles_x * ((p.rows + kTile - 1) / kTile);

  for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64 row0 = tile / tiles_x * kTile, column0 = tile % tiles_x * kTile;
    A total[4][4] = {};
    for (int s = 0; s < p.products; ++s) {
      for (int64 k0 = 0; k0 < p.depth[s]; k0 += kSlice) {
        load_slice<T>(a, p.a[s], row0, p.rows, k0, p.depth[s]);
        load_slice<T>(b, p.b[s], column0, p.columns, k0, p.depth[s]);
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
        if (row < p.rows && column < p.columns) {
          A value = total[i][j];
          if (p.bias != nullptr) {
            value += A(widen(static_cast<const T*>(p.bias)[column * p.bias_stride]));
          }
          static_cast<T*>(p.c.data)[row * p.c.row + column * p.c.column] = narrow<T>(value);
        }
      }
    }
  }
}

// Block: 32 columns; warp w sums rows w, w + 8, ... in runs of 32 rows, then the warps' sums are
// added in their order.
template <class Config>
__device__ void linear_column_sum(const LinearParams& p) {
  using T = typename Config::T;
  using A = Accumulator<T>;
  constexpr int kWarps = Config::kThreads / 32, kRun = 32;
  __shared__ A sums[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T* data = static_cast<const T*>(p.a[0].data);

  for (int64 column0 = blockIdx.x * int64(32); column0 < p.columns;
       column0 += gridDim.x * int64(32)) {
    const int64 column = column0 + lane;
    A total = A(0);
    if (column < p.columns) {
      for (int64 row0 = warp; row0 < p.rows; row0 += kWarps * kRun) {
        A run = A(0);
        for (int64 row = row0; row < min(p.rows, row0 + kWarps * kRun); row += kWarps) {
          run += A(widen(data[row * p.a[0].row + column * p.a[0].column]));
        }
        total += run;
      }
    }
    sums[warp][lane] = total;
    __syncthreads();  // sums readable
    if (warp == 0 && column < p.columns) {
      for (int w = 1; w < kWarps; ++w) {
        total += sums[w][lane];
      }
      static_cast<T*>(p.c.data)[column * p.c.column] = narrow<T>(total);
    }
    __syncthreads();  // sums free again
  }
}
