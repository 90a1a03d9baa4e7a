// params.cuh: the structs that kernels take by value, one per operator.
//
// cupyattn/_params.py holds the same fields as NumPy dtypes; the end of every generated source
// asserts that size and offsets agree. Strides count elements, not bytes. An absent array has a
// null pointer.
#pragma once

using int64 = long long;

// A heads-last array (batch, *space, heads, features) whose last axis has unit stride. Ranks 1
// and 2 of space have leading axes of extent 1. lse, dlse and delta have no feature axis.
struct TokenView {
  void* data;
  int64 batch;
  int64 space[3];
  int64 head;
};

// A matrix with any strides; a transposed matrix is one with its strides exchanged.
struct MatrixView {
  void* data;
  int64 row;
  int64 column;
};

struct NeighborhoodParams {
  TokenView q, k, v, y, lse;       // lse: natural log of the sum of exponentials
  TokenView dy, dlse, delta;       // delta: the mean of dp under p, less dlse
  TokenView dq, dk, dv;
  int64 batch;
  int space[3];
  int heads, kv_heads;             // query head h reads kv head h / (heads / kv_heads)
  int head_dim, value_dim;
  int window[3], dilation[3], stride[3], causal[3];
  int clip;                        // 1: the band is cut at a border, 0: it is moved inward
  double scale;
};

// For each product s, c[s][i, j] = bias[s][j] + sum_k a[s][i, k] * b[s][j, k]; with `summed` all
// products add into c[0], which is of size rows[0] x columns[0], with bias[0].
struct LinearParams {
  MatrixView a[4], b[4], c[4];
  void* bias[4];
  int64 bias_stride[4];
  int64 rows[4], columns[4], depth[4];
  void* partial;                   // first-stage sums, in the accumulator's type
  int64 share;                     // slices of depth (rows of a, for column sums) in a chunk
  int products;                    // or matrices of a column sum: 1 to 4
  int summed;
  int chunks;                      // pieces of the first-stage sums
  int group;                       // rows of tiles that neighbouring blocks share
};

// What the copy engine knows of an array: its address, and the rest as the driver encodes it.
struct alignas(64) TensorMap {
  void* address;
  unsigned long long geometry[15];
};

// As LinearParams.
struct LinearHopperParams {
  TensorMap a_map[4], b_map[4];
  MatrixView a[4], b[4], c[4];
  void* planes[4];                 // of b, [planes][columns][depth rounded up to 8]
  void* bias[4];
  int64 bias_stride[4];
  void* partial;                   // float [splits][numbers]
  int64 first[4];                  // in `partial`, the first number of c[s]
  int64 numbers;                   // of all c
  int rows[4], columns[4], depth[4];
  int products, summed, splits;
};

struct NeighborhoodHopperParams {
  // (features, last axis, middle, first, batch or batch and heads); with spare features of a head
  // that are not counted with the batch (features, heads, last axis, middle, first and batch)
  TensorMap q_map, k_map, v_map, dy_map;
  NeighborhoodParams na;
  int tiles[3];                    // tiles along each axis of the longest dilation group
  int all_tiles;                   // of all groups, heads and batches
  // 1: heads are counted with the batch
  int q_heads_first, k_heads_first, v_heads_first, dy_heads_first;
  int folded;                      // 1: (features, position in the group, group, 1, batch)
};

struct MultiTokenParams {
  void *scores, *weight, *bias, *y;
  void *dy, *d_scores, *d_weight, *d_bias;
  void *shift, *factor;            // row statistics [batch, heads_in, seq]
  void* partial;                   // first-stage sums of d_weight and d_bias
  void* mean;                      // of dP under P, a number per row as shift and factor
  void* table;                     // weights as the matrix units take them
  int64 scores_stride[4], dy_stride[4], weight_stride[4];
  int64 bias_stride;
  int64 batch;
  int heads_in, heads_out, groups, seq;
  int kh, kw;
  int dilation[2];                 // rows, columns
  int row_origin, column_origin;   // tap (u, v) reads (i + u * d0 - row_origin, j + v * d1 - ...)
  int chunks;                      // pieces of the first-stage sums
};

struct RopeParams {
  void *q, *k, *q_out, *k_out;     // null where absent
  void *cos, *sin;
  void *position_ids, *offsets;    // null: row t + offset
  int* fault;                      // host memory: set when a position is outside the table
  int64 q_stride[3], k_stride[3];  // batch, seq, head
  int64 q_out_stride[3], k_out_stride[3];
  int64 cos_stride[3], sin_stride[3];  // batch (0 when shared), row, column
  int64 position_stride[2];        // batch (0 when shared), seq
  int64 batch, seq, table, offset;
  int q_heads, k_heads, head_dim, rotary_dim;
  int table_step;                  // columns from one pair's angle to the next
  int inverse;                     // 1: negate the sine
  int interleaved;                 // 1: pairs are (2i, 2i + 1), 0: (i, i + rotary_dim / 2)
  int wide_positions;              // 1: position_ids are int64, 0: int32
};
