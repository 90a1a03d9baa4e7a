// neighborhood_box_fwd.cu: neighborhood attention, forward, on matrix units by warp. sm_80 on.
//
//   s[j] = scale * <q, k[j]>  for j in window(query)
//   y    = sum_j softmax(s)[j] v[j]         lse = log sum_j exp s[j]
//
// Shapes    as in neighborhood_fwd.cu, with value_dim = head_dim = kDim, a multiple of 16 (float32:
//           of 32); 16-bit or float32 elements; rows of q, k, v 16-byte aligned
// Grid      x: tiles of the last axis, times dilation groups, times heads (fastest, so that blocks
//           which run together read long pieces of a token); y: tiles and groups of the axis
//           before; z: batch, times tiles and groups of the first axis where there are three
// Block     a box of query positions of one dilation group in one head, 16 queries a warp
// Tile map  keys of a block: the box from the start of its first window to the end of its last one,
//           numbered line by line. A warp takes those from its first query's start to its last
//           one's end, 32 at a time (16 at the end), and lets pass what is not in a query's window
//
//             2 axes, box 8 x 8, window 7 x 7: 14 lines of 14 keys; a warp has 2 lines of queries
//             warp 0   lines 0 to 7      116 of 196 keys, 784 pairs of 1856 wanted
//             warp 3   lines 6 to 13
//
// Pipeline  all keys at once where shared memory has room (kStages 1), and blocks of a
//           multiprocessor hide each other's latency; else chunks of kKeys rows in a ring:
//             wait for chunk n -> barrier -> ask for chunk n + kStages - 1 -> per 32 keys:
//             q k^T -> which are seen -> largest, weights -> y += weights v
//           Copies are 16 bytes (cp.async), with zeros for rows of a box that have no key
// Softmax   exponents of 2, relative to a reference that follows the largest score only when that
//           is 8 ahead: a vote per 32 keys, and y is seldom rescaled. Weights are rounded to T for
//           the product with v; their sum is of float32
// Float32   three TF32 products, or one (neighborhood_tf32.cuh); exponents of e. q stays in shared
//           memory; fragments are split, or have been rounded where they arrived
// Not seen  a score outside the window is replaced by -inf, so nothing of k comes through. Of v
//           0 * NaN would: a query whose result is not finite is computed again, key by key
//           (`recompute`). Where all is finite that costs a multiply-add per element of y
// Banks     parts of 16 bytes of a row are exchanged (`Tile::place`) such that every eight rows
//           that are loaded together touch different banks
// Memory    shared: queries' rows (later y), kStages * kKeys rows of k and of v, and where there
//           are two axes or more a word per key that says where it is (`Sight`)
// Limits    kDim 16 to 128; box and grid below 2^31, see the table's rows; any window, dilation,
//           stride, border rule, kv_heads
// Config    T, kDim, kRank; of float32 kTf32: one product; per axis kBox, kReach (of the keys' box,
//           at most), kDilation, kWindow, kStride, kCausal; kClip; kKeys, kStages; kHeads, kShared
//           query heads a key head; kAlike: k and v have the same strides; kBits: see `Sight`;
//           kInner: look for keys that all queries of a warp see
// Sources   window rule: Hassani et al. 2023 and 2025; online softmax: Milakov et al. 2018;
//           matrix units by warp: FlashAttention-2, Dao 2023
//
// By counting (sm_90, instructions of a warp, 32 keys): kDim 32 on two axes 148, of which 16 are
// products, 104 the softmax of 16 elements a lane and 8 loads of fragments; kDim 64 176, with
// fields in place of bits 209, on one axis 195. A start and an end take about 500, a row's copies
// 17. So a warp of (64, 56, 56, 4, 32), window 7 x 7, issues 1250 for 16 queries, 63 M warp
// instructions in all: 68 us of an H200's issue slots, against 48 us of memory.
// Float32, 16 keys: at kDim 32 359 instructions, of which 48 are products, at 64 555 and 96, at 128
// 940 and 192; at two thirds of its speed the matrix unit takes 326, 653 and 1306 clocks of a
// scheduler. With one TF32 product 219, 243, 330 and a third of the clocks; at kDim 128 shared
// memory rules then (160 clocks of a multiprocessor).
#include "common/features.cuh"
#include "common/neighborhood_box.cuh"
#include "common/neighborhood_tf32.cuh"

// A warp's 16 queries while keys go by. A lane has queries g and g + 8 (mma.cuh).
template <class Config>
struct Attention {
  using Map = Tile<Config>;
  using T = typename Config::T;
  static constexpr int kDim = Map::kDim;
  static constexpr bool kWide = sizeof(T) == 4;
  // Exponents are of 2 (of e for float32), and relative to a reference that follows the largest
  // score only when that is kSlack ahead: y is seldom rescaled, and float32 is as exact at 2^kSlack
  // as at 1.
  static constexpr float kSlack = 8.0f;

  const int lane = threadIdx.x % 32;
  float factor;  // of a product, to be an exponent
  unsigned q[kWide ? 1 : kDim / 16][4];
  unsigned own;  // float32: where q is
  float y[kDim / 8][4] = {};
  float reference[2] = {-1e30f, -1e30f}, sum[2] = {0.0f, 0.0f};
  int k_place, v_place;  // of the lane in 16 rows: of k as the right factor, of v, and of q

  __device__ Attention(double scale) {
    const float x = float(kWide ? scale : scale * 1.4426950408889634);
    factor = x == 0.0f ? 1.0f : fabsf(x);
    k_place = Map::place(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    v_place = Map::place(lane % 16, lane / 16);
  }

  // The warp's rows of q begin at `rows`. The sign of scale, or that it is 0, is put into q, so
  // that `factor` is positive.
  __device__ void load_queries(unsigned rows, double scale) {
    const float x = float(scale);
    const unsigned keep = x == 0.0f ? 0 : 0xffffffffu;
    const unsigned flip = x < 0.0f ? kWide ? 0x80000000u : 0x80008000u : 0;
    if constexpr (kWide) {
      own = rows + v_place;
      if (!(x > 0.0f)) {
#pragma unroll 1
        for (unsigned i = lane * 16; i < 16 * Map::kRowBytes; i += 32 * 16) {
          unsigned w[4];
          load_shared(w, rows + i);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            w[j] = (w[j] ^ flip) & keep;
          }
          store_shared(rows + i, w);
        }
        __syncwarp();  // the rows are the warp's own
      }
    } else {
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        load_matrices(q[i], Map::further(rows + v_place, i));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          q[i][j] = (q[i][j] ^ flip) & keep;
        }
      }
    }
  }

  __device__ static float power(float x) {
    if constexpr (kWide) {
      return exponential(x);
    } else {
      return exp2f(x);
    }
  }

  // Take in kUnits * 16 keys, whose rows of k begin at `rows`, a multiple of 16 after the chunk's
  // first. `code(i)` gives those of the lane's keys i and i + 1.
  template <int kUnits, bool kMasked, class Code>
  __device__ void take(unsigned rows, const Sight<Config> (&sight)[2], Code code) {
    float s[2 * kUnits][4] = {};
    if constexpr (kWide) {
      dot_rows<Config, kUnits, true>(s, own, rows + k_place);
    } else {
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          unsigned k[4];
          load_matrices(k, Map::further(rows + k_place, i) + u * 16 * Map::kRowBytes);
          multiply<T>(s[2 * u], q[i][0], q[i][1], q[i][2], q[i][3], k[0], k[1]);
          multiply<T>(s[2 * u + 1], q[i][0], q[i][1], q[i][2], q[i][3], k[2], k[3]);
        }
      }
    }

    if constexpr (kMasked) {
#pragma unroll
      for (int t = 0; t < 2 * kUnits; ++t) {
        unsigned codes[2];
        code(8 * t, codes);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[t][e] = sight[e / 2].sees(codes[e % 2]) ? s[t][e] : negative_infinity<float>();
        }
      }
    }

    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
      for (int t = 1; t < 2 * kUnits; ++t) {
        top[h] = fmaxf(top[h], fmaxf(s[t][2 * h], s[t][2 * h + 1]));
      }
      top[h] *= factor;
    }
    if (__any_sync(kEverybody,
                   top[0] > reference[0] + kSlack || top[1] > reference[1] + kSlack)) {
      follow(top);
    }

    LeftFactor<T, 2 * kUnits> weight;
#pragma unroll
    for (int t = 0; t < 2 * kUnits; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float low = power(multiply_add(s[t][2 * h], factor, -reference[h]));
        const float high = power(multiply_add(s[t][2 * h + 1], factor, -reference[h]));
        sum[h] += low + high;
        weight.set(t, h, low, high);
      }
    }

    if constexpr (kWide) {
      add_rows<Config, kUnits>(y, weight.x, rows + Shared<Config>::kChunk);
    } else {
      const unsigned v_rows = rows + v_place + Shared<Config>::kChunk;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
#pragma unroll
        for (int i = 0; i < kDim / 16; ++i) {
          unsigned v[4];
          load_matrices_transposed(v, Map::further(v_rows, i) + u * 16 * Map::kRowBytes);
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            multiply<T>(y[2 * i + n], weight.x[2 * u][0], weight.x[2 * u][1],
                        weight.x[2 * u + 1][0], weight.x[2 * u + 1][1], v[2 * n], v[2 * n + 1]);
          }
        }
      }
    }
  }

  // Let the references follow the largest exponents so far, each the lane's own.
  __device__ void follow(float (&top)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = fmaxf(top[h], __shfl_xor_sync(kEverybody, top[h], 1));
      top[h] = fmaxf(top[h], __shfl_xor_sync(kEverybody, top[h], 2));
      const float next = fmaxf(top[h], reference[h]);
      const float rescale = power(reference[h] - next);
      reference[h] = next;
      sum[h] *= rescale;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        y[i][2 * h] *= rescale;
        y[i][2 * h + 1] *= rescale;
      }
    }
  }

  // Divide y by the sums. Whether each query's result is finite; the same in lanes of a query.
  __device__ void finish(bool (&finite)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(kEverybody, sum[h], 1);
      sum[h] += __shfl_xor_sync(kEverybody, sum[h], 2);
      const float inverse = 1.0f / sum[h];
      float zero = 0.0f;  // stays so as long as numbers are finite
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          y[i][e] *= inverse;
          zero = multiply_add(y[i][e], 0.0f, zero);
        }
      }
      finite[h] = zero == 0.0f && sum[h] < 3e38f && reference[h] > -1e30f;
    }
  }
};

// Compute the result of one query key by key, as the plain kernel does: no other key can matter.
// All lanes of a warp.
template <class Config>
__device__ __noinline__ void recompute(const NeighborhoodParams& p, const Token& query) {
  using T = typename Config::T;
  const int lane = threadIdx.x % 32;
  const float scale = float(p.scale);
  Features<T, (Config::kDim + 31) / 32> q, k, v, y;
  q.load(row_of<const T>(p.q, query, query.head), p.head_dim, lane);
  y.clear();
  float largest = negative_infinity<float>(), sum = 0.0f;
  for_each_key<T>(p, query, [&](const T* k_row, const T* v_row) {
    k.load(k_row, p.head_dim, lane);
    const float dot = q.dot(k), score = scale * dot;
    if (score > largest) {
      const float rescale = exponential(largest - score);
      largest = score;
      sum *= rescale;
      y.scale(rescale);
    }
    // -inf minus -inf would be NaN; such a key has no weight.
    const float weight = score == negative_infinity<float>()
                             ? 0.0f
                             : exponential(multiply_add(scale, dot, -largest));
    sum += weight;
    v.load(v_row, p.value_dim, lane);
    y.add(weight, v);
  });
  y.store(row_of<T>(p.y, query, query.head), p.value_dim, lane, 1.0f / sum);
  if (lane == 0 && p.lse.data != nullptr) {
    *row_of<float>(p.lse, query, query.head) = largest + logarithm(sum);
  }
}

template <class Config>
__device__ void neighborhood_box_forward(const NeighborhoodParams& p) {
  extern __shared__ __align__(128) char memory[];
  using Map = Tile<Config>;
  using T = typename Config::T;
  constexpr int kKeys = Map::kKeys, kStages = Config::kStages;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Work<Config> work(p);
  if (!work.exists) {
    return;
  }

  const Stream<Config> stream(p, work, memory);
  const Shared<Config>& shared = stream.shared;
  const int chunks = stream.chunks();
  copy_queries(shared.q(), work, Rows<Config>(p.q, work, work.head, false));
#pragma unroll
  for (int n = 0; n < (kStages > 1 ? kStages - 1 : 1); ++n) {
    if (n < chunks) {
      stream.copy(n);
    }
    copies_end_group();
  }

  // A lane works out what one query sees; the warp needs keys from the start of its first query to
  // the end of its last one.
  Interval in[3] = {};
  const int mine = warp * 16 + lane % 16;
  int low = 0, high = 0;
#pragma unroll
  for (int a = Map::kFirst; a < 3; ++a) {
    in[a] = work.keys(mine, a);
    low = low * Map::reach(a) + in[a].start;
    high = high * Map::reach(a) + in[a].end - 1;
  }
  low = __shfl_sync(kEverybody, low, 0) & ~15;
  high = __shfl_sync(kEverybody, high, 15) + 1;
  if (!work.has(warp * 16)) {
    high = low;
  }
  // Of rank 1: all 16 queries see these.
  const int all_from = __shfl_sync(kEverybody, in[2].start, 15);
  const int all_to = __shfl_sync(kEverybody, in[2].end, 0);

  Attention<Config> attention(p.scale);
  const unsigned my_rows = shared.q() + warp * 16 * Map::kRowBytes;
#pragma unroll 1
  for (int n = 0; n < chunks; ++n) {
    wait_for_copies<(kStages > 1 ? kStages - 2 : 0)>();
    if constexpr (rounds<Config>()) {
      if (n == 0) {
        round_queries<Config>(shared.q());
      }
      stream.round(n);
    }
    __syncthreads();  // the chunk is here; the one before it is no longer in use
    if constexpr (kStages > 1) {
      if (n + kStages - 1 < chunks) {
        stream.copy(n + kStages - 1);
      }
      copies_end_group();
    }
    if (n == 0) {
      attention.load_queries(my_rows, p.scale);
    }
    const int stage = kStages == 1 ? 0 : n % kStages, base = n * kKeys;
    const unsigned* codes = reinterpret_cast<const unsigned*>(memory + shared.codes(stage));
    const Sight<Config> own(in, base), sight[2] = {own.of(lane / 4), own.of(lane / 4 + 8)};
    const int to = min(high - base, kKeys);
#pragma unroll 1
    for (int row = max(low - base, 0); row < to; row += 32) {
      const unsigned rows = shared.k(stage) + row * Map::kRowBytes;
      const unsigned number = base + row + 2 * (lane % 4);
      const unsigned* here = codes + row + 2 * (lane % 4);
      const auto code = [&](int i, unsigned(&x)[2]) {
        if constexpr (Map::kRank == 1) {
          x[0] = number + i;
          x[1] = number + i + 1;
        } else {
          const uint2 pair = *reinterpret_cast<const uint2*>(here + i);
          x[0] = pair.x;
          x[1] = pair.y;
        }
      };
      if (Config::kInner && to - row >= 32 && base + row >= all_from && base + row + 32 <= all_to) {
        attention.template take<2, false>(rows, sight, code);
      } else if (to - row > 16) {
        attention.template take<2, true>(rows, sight, code);
      } else {
        attention.template take<1, true>(rows, sight, code);
      }
    }
  }

  if (!work.has(warp * 16)) {
    return;
  }
  bool finite[2];
  attention.finish(finite);

  const int g = lane / 4, q = lane % 4;
  __syncwarp();  // all lanes have q
  store_rows<Config>(memory, work, Rows<Config>(p.y, work, work.head, false), attention.y);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = warp * 16 + g + 8 * h;
    if (p.lse.data != nullptr && q == 0 && work.has(query)) {
      const Token t = work.token(query);
      *row_of<float>(p.lse, t, t.head) =
          multiply_add(attention.reference[h], attention.kWide ? 1.0f : 0.693147181f,
                       logarithm(attention.sum[h]));
    }
  }

  const unsigned bad[2] = {__ballot_sync(kEverybody, !finite[0]),
                           __ballot_sync(kEverybody, !finite[1])};
  if ((bad[0] | bad[1]) != 0) {
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      const int query = warp * 16 + row;
      if ((bad[row / 8] >> (row % 8 * 4) & 1) != 0 && work.has(query)) {
        recompute<Config>(p, work.token(query));
      }
    }
  }
}
