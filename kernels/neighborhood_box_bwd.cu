// neighborhood_box_bwd.cu: neighborhood attention, backward, on matrix units by warp. sm_80 on.
//
//   p[i,j]   = exp(scale * <q[i], k[j]> - lse[i])          for j in window(i)
//   dp[i,j]  = <dy[i], v[j]>
//   delta[i] = <dy[i], y[i]> - dlse[i], corrected (see below)
//   ds[i,j]  = p[i,j] * (dp[i,j] - delta[i])
//   dq[i]    = scale * sum_j ds[i,j] k[j]                  j: the keys of query i
//   dk[j]    = scale * sum_i ds[i,j] q[i]   dv[j] = sum_i p[i,j] dy[i]   i: the queries of key j
//
// Shapes    as in neighborhood_box_fwd.cu; gradients have their array's shape
// Grid      as the forward's: dq by boxes of queries, then dk and dv by boxes of keys, whose heads
//           are kv_heads
// Block     a box of positions of one dilation group in one head, 16 a warp
// Tile map  dq: as the forward. dk, dv: the box from the start of the queries that see the first
//           key to the end of those that see the last one (one interval an axis, whose ends never
//           fall), for the query heads of the key head one after the other: gathered, no atomics
// Pipeline  the forward's copies; per 32 keys (kUnits 1: 16)
//             dq:      q k^T, dy v^T -> p, ds -> dq += ds k
//             dk, dv:  k q^T, v dy^T -> p, ds -> dv += p dy, dk += ds q
//           p and ds go from sums to left factors in the registers where they are
// Delta     is taken from y, whose rounding errors matter only where all terms of a query's dq are
//           as small: where one key has nearly all the weight. The sum of ds shows the error, and
//           a query for which it exceeds an eps of sum |ds| lets its warp (its block, where keys
//           come in chunks) walk again with the corrected delta. A query of one key then has
//           ds = 0, also in the second kernel, whose dp has the same bits
// Float32   as in the forward. dp has the same bits in both kernels, though operands change sides:
//           both are split alike, and small products come in the same order. p is divided by its
//           sum, as in neighborhood_band_bwd.cu, against the rounding of large lse and scores
// Not seen  p or ds is replaced by 0, so that only 0 * NaN can come through: rows that are not
//           finite are computed again, pair by pair (`recompute`)
// Memory    lse * log2(e) and delta, side by side in p.delta (float32: lse, delta, 1 / sum of p and
//           one more, for the alignment); shared: the block's rows of two arrays (later those of
//           the results), kStages chunks of two, codes, and for dk and dv the numbers of queries
// Limits    as the forward's
// Config    as the forward's; kHeads: of the block's own rows; kUnits; kHeld: the block's own rows
//           are kept in registers
// Sources   FlashAttention-2, Dao 2023, for the products; the rest as the forward's
//
// By counting (sm_90, 16 rows of the other side, a warp): dq 103 instructions at kDim 32, of which
// 12 are products and 6 loads of fragments, 137 at 64; dk and dv 102 at 32, 140 at 64 (32 and 16).
// A start and an end take about 1000. Fragments come from shared memory at 128 bytes a clock: at
// kDim 64 that takes 48 and 64 clocks of a multiprocessor per 16 rows, longer than its issue slots
// (35 each) or, at two thirds of its speed, the matrix unit (40 and 52): warps of 32 rows would
// halve it, and have no registers for that in dk and dv.
// Float32, 16 rows: dq 584 instructions at kDim 32, 956 at 64, 1668 at 128; dk and dv 683, 1180,
// 2144; the matrix unit 490, 979, 1958 and 653, 1306, 2611 clocks of a scheduler. With one TF32
// product dq 246, 305, 437 and dk, dv 275, 366, 532, and shared memory rules from kDim 64 on.
#include "common/features.cuh"
#include "common/neighborhood_box.cuh"
#include "common/neighborhood_tf32.cuh"

// Exponents are of 2, those of float32 of e.
template <class T>
constexpr float kNatural = 1.44269504f;  // a natural exponent as one of these
template <>
constexpr float kNatural<float> = 1.0f;

// 2^x; below 2^-126 that is 0.
template <class T>
__device__ inline float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
template <>
__device__ inline float power<float>(float x) {
  return exponential(x);
}

// What a lane, whose position is number lane % 16 of the warp's, and its warp are related to.
template <class Config, Role kRole>
struct Sweep {
  using Map = Tile<Config>;
  Interval in[3] = {};
  int low = 0, high = 0;  // rows of the other side's box
  int all_from, all_to;   // of rank 1: what all 16 are related to

  __device__ explicit Sweep(const Work<Config, kRole>& work) {
    const int first = threadIdx.x / 32 * 16, mine = first + threadIdx.x % 16;
#pragma unroll
    for (int a = Map::kFirst; a < 3; ++a) {
      in[a] = work.keys(mine, a);
      low = low * Map::reach(a) + in[a].start;
      high = high * Map::reach(a) + in[a].end - 1;
    }
    low = __shfl_sync(kEverybody, low, 0) & ~15;
    high = __shfl_sync(kEverybody, high, 15) + 1;
    if (!work.has(first)) {
      high = low;
    }
    all_from = __shfl_sync(kEverybody, in[2].start, 15);
    all_to = __shfl_sync(kEverybody, in[2].end, 0);
  }

  // Give `side` the rows of chunk `n` that the warp needs.
  template <class Side>
  __device__ void take(Side& side, const Stream<Config, kRole>& stream, int n) const {
    constexpr int kUnits = Config::kUnits, kStep = 16 * kUnits;
    const int stage = Config::kStages == 1 ? 0 : n % Config::kStages, base = stream.first(n);
    const unsigned* codes =
        reinterpret_cast<const unsigned*>(stream.memory + stream.shared.codes(stage));
    const Sight<Config> own(in, base);
    const int lane = threadIdx.x % 32;
    const Sight<Config> sight[2] = {own.of(lane / 4), own.of(lane / 4 + 8)};
    const int to = min(high - base, Map::kKeys);
#pragma unroll 1
    for (int row = max(low - base, 0); row < to; row += kStep) {
      const unsigned rows = stream.shared.k(stage) + row * Map::kRowBytes;
      const int mine = row + 2 * (lane % 4);
      const unsigned number = base + mine;
      const char* numbers = stream.memory + stream.shared.numbers(stage) +
                            mine * stream.shared.kNumbers;
      const auto sees = [&](int i, bool(&x)[2][2]) {  // of columns i and i + 1
        unsigned code[2] = {number + i, number + i + 1};
        if constexpr (Map::kRank > 1) {
          const uint2 pair = *reinterpret_cast<const uint2*>(codes + mine + i);
          code[0] = pair.x;
          code[1] = pair.y;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          x[h][0] = sight[h].sees(code[0]);
          x[h][1] = sight[h].sees(code[1]);
        }
      };
      if (Config::kInner && to - row >= kStep && base + row >= all_from &&
          base + row + kStep <= all_to) {
        side.template take<kUnits, false>(rows, numbers, sees);
      } else if (kUnits == 1 || to - row > 16) {
        side.template take<kUnits, true>(rows, numbers, sees);
      } else {
        side.template take<1, true>(rows, numbers, sees);
      }
    }
  }
};

// A warp's 16 rows of two arrays as left factors, in registers or where they are.
template <class Config>
struct Own {
  using Map = Tile<Config>;
  static constexpr int kParts = Map::kDim / 16;
  static constexpr int kOwn = Map::kQueries * Map::kRowBytes;
  unsigned address;  // of the lane's part of the first array
  unsigned kept[Config::kHeld ? 2 : 1][Config::kHeld ? kParts : 1][4];

  __device__ void load(unsigned rows) {
    const int lane = threadIdx.x % 32;
    address = rows + Map::place(lane % 16, lane / 16);
    if constexpr (Config::kHeld) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        load_matrices(kept[0][i], Map::further(address, i));
        load_matrices(kept[1][i], Map::further(address + kOwn, i));
      }
    }
  }
  __device__ void get(unsigned (&x)[2][4], int i) const {
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      if constexpr (Config::kHeld) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[a][j] = kept[a][i][j];
        }
      } else {
        load_matrices(x[a], Map::further(address + a * kOwn, i));
      }
    }
  }
};

// A lane's places in 16 rows of the other side (mma.cuh).
template <class Config, Role kRole>
struct Lane {
  using Map = Tile<Config>;
  using T = typename Config::T;
  static constexpr int kDim = Map::kDim, kChunk = Map::kKeys * Map::kRowBytes;
  static constexpr bool kWide = Map::kSize == 4;

  const int lane = threadIdx.x % 32;
  // Rows as columns of a right factor, and as its rows.
  const int as_columns = Map::place(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const int as_rows = Map::place(lane % 16, lane / 16);

  // Both products of own rows with kUnits * 16 rows of each of the other side's arrays.
  template <int kUnits>
  __device__ void dots(float (&s)[2 * kUnits][4], float (&dp)[2 * kUnits][4],
                       const Own<Config>& own, unsigned rows) const {
    if constexpr (kWide) {
      // The same product in both kernels, so the same bits.
      constexpr bool kFirst = kRole == kOfQueries;
      dot_rows<Config, kUnits, kFirst>(s, own.address, rows + as_columns);
      dot_rows<Config, kUnits, kFirst>(dp, own.address + own.kOwn, rows + as_columns + kChunk);
    } else {
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        unsigned a[2][4];
        own.get(a, i);
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          const unsigned at = Map::further(rows + as_columns, i) + u * 16 * Map::kRowBytes;
          unsigned b[4];
          load_matrices(b, at);
          multiply<T>(s[2 * u], a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1]);
          multiply<T>(s[2 * u + 1], a[0][0], a[0][1], a[0][2], a[0][3], b[2], b[3]);
          load_matrices(b, at + kChunk);
          multiply<T>(dp[2 * u], a[1][0], a[1][1], a[1][2], a[1][3], b[0], b[1]);
          multiply<T>(dp[2 * u + 1], a[1][0], a[1][1], a[1][2], a[1][3], b[2], b[3]);
        }
      }
    }
  }

  // y += x rows.
  template <int kUnits>
  __device__ void add(float (&y)[kDim / 8][4], const LeftFactor<T, 2 * kUnits>& x,
                      unsigned rows) const {
    if constexpr (kWide) {
      add_rows<Config, kUnits>(y, x.x, rows);
    } else {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
#pragma unroll
        for (int i = 0; i < kDim / 16; ++i) {
          unsigned b[4];
          load_matrices_transposed(b, Map::further(rows + as_rows, i) + u * 16 * Map::kRowBytes);
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            multiply<T>(y[2 * i + n], x.x[2 * u][0], x.x[2 * u][1], x.x[2 * u + 1][0],
                        x.x[2 * u + 1][1], b[2 * n], b[2 * n + 1]);
          }
        }
      }
    }
  }

  // Multiply a result by `factor`. Whether the rows g and g + 8 are finite; all lanes of a row.
  __device__ static void finish(float (&y)[kDim / 8][4], float factor, bool (&finite)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float zero = 0.0f;  // stays so as long as numbers are finite
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          y[i][e] *= factor;
          zero = multiply_add(y[i][e], 0.0f, zero);
        }
      }
      finite[h] = finite[h] && zero == 0.0f;
    }
  }
};

// A warp's 16 queries while keys go by.
template <class Config>
struct Queries : Lane<Config, kOfQueries> {
  using Map = Tile<Config>;
  using T = typename Config::T;

  Own<Config> own;  // q, dy
  float factor;     // of a product, to be an exponent of 2
  float shift[2];   // lse * log2(e)
  float delta[2];
  float dq[Map::kDim / 8][4];
  float sum[2], size[2];  // of ds, of |ds|
  float total[2];         // of p, for float32

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < Map::kDim / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dq[i][e] = 0.0f;
      }
    }
    sum[0] = sum[1] = size[0] = size[1] = total[0] = total[1] = 0.0f;
  }

  // Take in kUnits * 16 keys, whose rows of k begin at `rows`.
  template <int kUnits, bool kMasked, class Sees>
  __device__ void take(unsigned rows, const char*, Sees sees) {
    float s[2 * kUnits][4] = {}, dp[2 * kUnits][4] = {};
    this->template dots<kUnits>(s, dp, own, rows);
    LeftFactor<T, 2 * kUnits> ds;
#pragma unroll
    for (int t = 0; t < 2 * kUnits; ++t) {
      bool seen[2][2] = {{true, true}, {true, true}};
      if constexpr (kMasked) {
        sees(8 * t, seen);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float p = power<T>(multiply_add(s[t][2 * h + e], factor, -shift[h]));
          x[e] = seen[h][e] ? p * (dp[t][2 * h + e] - delta[h]) : 0.0f;
          if constexpr (Map::kSize == 4) {
            total[h] += seen[h][e] ? p : 0.0f;
          }
          sum[h] += x[e];
          size[h] += fabsf(x[e]);
        }
        ds.set(t, h, x[0], x[1]);
      }
    }
    this->template add<kUnits>(dq, ds, rows);
  }
};

// A warp's 16 keys while queries go by.
template <class Config>
struct Keys : Lane<Config, kOfKeys> {
  using Map = Tile<Config>;
  using T = typename Config::T;

  Own<Config> own;  // k, v
  float factor;
  float dk[Map::kDim / 8][4] = {}, dv[Map::kDim / 8][4] = {};

  // Take in kUnits * 16 queries; those of the lane have their numbers at `numbers`.
  template <int kUnits, bool kMasked, class Sees>
  __device__ void take(unsigned rows, const char* numbers, Sees sees) {
    float s[2 * kUnits][4] = {}, dp[2 * kUnits][4] = {};
    this->template dots<kUnits>(s, dp, own, rows);
    LeftFactor<T, 2 * kUnits> p, ds;
#pragma unroll
    for (int t = 0; t < 2 * kUnits; ++t) {
      bool seen[2][2] = {{true, true}, {true, true}};
      if constexpr (kMasked) {
        sees(8 * t, seen);
      }
      float shift[2], delta[2], norm[2];
      if constexpr (Map::kSize == 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float4 one = *reinterpret_cast<const float4*>(numbers + (8 * t + e) * 16);
          shift[e] = one.x;
          delta[e] = one.y;
          norm[e] = one.z;
        }
      } else {
        const float4 both = *reinterpret_cast<const float4*>(numbers + 8 * t * 8);
        shift[0] = both.x;
        shift[1] = both.z;
        delta[0] = both.y;
        delta[1] = both.w;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x[2], y[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float weight = power<T>(multiply_add(s[t][2 * h + e], factor, -shift[e]));
          if constexpr (Map::kSize == 4) {
            weight *= norm[e];
          }
          x[e] = seen[h][e] ? weight : 0.0f;
          y[e] = x[e] * (dp[t][2 * h + e] - delta[e]);
        }
        p.set(t, h, x[0], x[1]);
        ds.set(t, h, y[0], y[1]);
      }
    }
    this->template add<kUnits>(dv, p, rows + this->kChunk);
    this->template add<kUnits>(dk, ds, rows);
  }
};

// <x, y> of two rows of which a lane reads a quarter, in all four lanes.
template <class Config>
__device__ float dot(const char* x, const char* y) {
  using T = typename Config::T;
  constexpr int kParts = Tile<Config>::kParts;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kParts; i += 4) {
    const int part = i + threadIdx.x % 4;
    if (i + 4 <= kParts || part < kParts) {
      const uint4 both[2] = {*reinterpret_cast<const uint4*>(x + part * 16),
                             *reinterpret_cast<const uint4*>(y + part * 16)};
      const unsigned a[4] = {both[0].x, both[0].y, both[0].z, both[0].w};
      const unsigned b[4] = {both[1].x, both[1].y, both[1].z, both[1].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if constexpr (sizeof(T) == 4) {
          sum = multiply_add(__uint_as_float(a[w]), __uint_as_float(b[w]), sum);
        } else {
          float a0, a1, b0, b1;
          unpack<T>(a[w], a0, a1);
          unpack<T>(b[w], b0, b1);
          sum = multiply_add(a1, b1, multiply_add(a0, b0, sum));
        }
      }
    }
  }
  sum += __shfl_xor_sync(kEverybody, sum, 1);
  return sum + __shfl_xor_sync(kEverybody, sum, 2);
}

// Compute dq and delta of one query key by key, as the plain kernel does. All lanes of a warp.
template <class Config>
__device__ __noinline__ void recompute_query(const NeighborhoodParams& p, const Token& query) {
  using T = typename Config::T;
  const int lane = threadIdx.x % 32;
  const float scale = float(p.scale), lse = *row_of<const float>(p.lse, query, query.head);
  Features<T, (Config::kDim + 31) / 32> q, dy, k, v, dq;
  q.load(row_of<const T>(p.q, query, query.head), p.head_dim, lane);
  dy.load(row_of<const T>(p.dy, query, query.head), p.value_dim, lane);
  float sum = 0.0f, weighted = 0.0f;
  for_each_key<T>(p, query, [&](const T* k_row, const T* v_row) {
    k.load(k_row, p.head_dim, lane);
    v.load(v_row, p.value_dim, lane);
    const float weight = exponential(multiply_add(scale, q.dot(k), -lse));
    sum += weight;
    weighted += weight * dy.dot(v);
  });
  float delta = weighted / sum;
  if (p.dlse.data != nullptr) {
    delta -= *row_of<const float>(p.dlse, query, query.head);
  }
  dq.clear();
  for_each_key<T>(p, query, [&](const T* k_row, const T* v_row) {
    k.load(k_row, p.head_dim, lane);
    v.load(v_row, p.value_dim, lane);
    const float weight = exponential(multiply_add(scale, q.dot(k), -lse));
    dq.add(weight * (dy.dot(v) - delta), k);
  });
  dq.store(row_of<T>(p.dq, query, query.head), p.head_dim, lane, scale);
  if (lane == 0) {
    row_of<float>(p.delta, query, query.head)[1] = delta;
  }
}

// Compute dk and dv of one key query by query.
template <class Config>
__device__ __noinline__ void recompute_key(const NeighborhoodParams& p, const Token& key) {
  using T = typename Config::T;
  const int lane = threadIdx.x % 32;
  const float scale = float(p.scale);
  const Box queries = box_of<true>(p, key.at);
  Features<T, (Config::kDim + 31) / 32> k, v, q, dy, dk, dv;
  k.load(row_of<const T>(p.k, key, key.head), p.head_dim, lane);
  v.load(row_of<const T>(p.v, key, key.head), p.value_dim, lane);
  dk.clear();
  dv.clear();
  const int all = queries.count[0] * queries.count[1] * queries.count[2];
  for (int i = 0; i < all; ++i) {
    const int line = i / queries.count[2];
    const Token query = {key.batch,
                         {queries.position(0, line / queries.count[1]),
                          queries.position(1, line % queries.count[1]),
                          queries.position(2, i % queries.count[2])},
                         0};
    for (int head = key.head * Config::kShared; head < (key.head + 1) * Config::kShared; ++head) {
      q.load(row_of<const T>(p.q, query, head), p.head_dim, lane);
      dy.load(row_of<const T>(p.dy, query, head), p.value_dim, lane);
      const float weight =
          exponential(multiply_add(scale, q.dot(k), -*row_of<const float>(p.lse, query, head)));
      dk.add(weight * (dy.dot(v) - row_of<const float>(p.delta, query, head)[1]), q);
      dv.add(weight, dy);
    }
  }
  dk.store(row_of<T>(p.dk, key, key.head), p.head_dim, lane, scale);
  dv.store(row_of<T>(p.dv, key, key.head), p.value_dim, lane, 1.0f);
}

// Call visit(position) for the warp's rows that a lane found not finite.
template <class Config, Role kRole, class Visit>
__device__ void visit_rows(const Work<Config, kRole>& work, const bool (&finite)[2], Visit visit) {
  const unsigned bad[2] = {__ballot_sync(kEverybody, !finite[0]),
                           __ballot_sync(kEverybody, !finite[1])};
  if ((bad[0] | bad[1]) != 0) {
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      const int position = threadIdx.x / 32 * 16 + row;
      if ((bad[row / 8] >> (row % 8 * 4) & 1) != 0 && work.has(position)) {
        visit(work.token(position));
      }
    }
  }
}

// Start copies of the first chunks.
template <class Config, Role kRole>
__device__ void start(const Stream<Config, kRole>& stream) {
  constexpr int kStages = Config::kStages;
#pragma unroll 1
  for (int n = 0; n < (kStages > 1 ? kStages - 1 : 1); ++n) {
    if (n < stream.chunks()) {
      stream.copy(n);
    }
    copies_end_group();
  }
}

// Wait for chunk `n`, and ask for one that takes the place of the chunk before.
template <class Config, Role kRole>
__device__ void next(const Stream<Config, kRole>& stream, int n) {
  constexpr int kStages = Config::kStages;
  wait_for_copies<(kStages > 1 ? kStages - 2 : 0)>();
  if constexpr (rounds<Config>()) {
    if (n == 0) {
      round_queries<Config>(stream.shared.q());
      round_queries<Config>(stream.shared.q() + stream.shared.kOwn);
    }
    stream.round(n);
  }
  __syncthreads();  // the chunk is here; the one before it is no longer in use
  if constexpr (kStages > 1) {
    if (n + kStages - 1 < stream.chunks()) {
      stream.copy(n + kStages - 1);
    }
    copies_end_group();
  }
}

template <class Config>
__device__ void neighborhood_box_dq(const NeighborhoodParams& p) {
  extern __shared__ __align__(128) char memory[];
  using Map = Tile<Config>;
  using T = typename Config::T;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
  const Work<Config, kOfQueries> work(p);
  if (!work.exists) {
    return;
  }

  const Stream<Config, kOfQueries> stream(p, work, memory);
  const unsigned q_rows = stream.shared.q();
  copy_queries(q_rows, work, Rows<Config>(p.q, work, work.head, false));
  copy_queries(q_rows + stream.shared.kOwn, work, Rows<Config>(p.dy, work, work.head, false));
  const Sweep<Config, kOfQueries> sweep(work);

  Queries<Config> mine;
  const float scale = float(p.scale);
  mine.factor = scale * kNatural<T>;
  float dlse[2] = {0.0f, 0.0f}, norm[2];
  bool again = false;
#pragma unroll 1
  while (true) {
    if (Config::kStages > 1 || !again) {
      start(stream);
    }
    if (!again) {
      const Rows<Config> dy(p.dy, work, work.head, false), y(p.y, work, work.head, false);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int query = warp * 16 + g + 8 * h;
        const int at[3] = {work.offset(query, 0), work.offset(query, 1), work.offset(query, 2)};
        const Token token = work.token(query);
        if (p.dlse.data != nullptr) {
          dlse[h] = *row_of<const float>(p.dlse, token, token.head);
        }
        mine.shift[h] = *row_of<const float>(p.lse, token, token.head) * kNatural<T>;
        mine.delta[h] =
            dot<Config>(dy.row(at[0], at[1], at[2]), y.row(at[0], at[1], at[2])) - dlse[h];
      }
    }
#pragma unroll 1
    for (int n = 0; n < stream.chunks(); ++n) {
      if (Config::kStages > 1 || !again) {
        next(stream, n);
      }
      if (n == 0) {
        mine.own.load(q_rows + warp * 16 * Map::kRowBytes);
        mine.clear();
      }
      sweep.take(mine, stream, n);
    }

    bool wrong = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float &sum = mine.sum[h], &size = mine.size[h], &total = mine.total[h];
      sum += __shfl_xor_sync(kEverybody, sum, 1);
      sum += __shfl_xor_sync(kEverybody, sum, 2);
      if constexpr (Map::kSize == 4) {
        total += __shfl_xor_sync(kEverybody, total, 1);
        total += __shfl_xor_sync(kEverybody, total, 2);
        norm[h] = 1.0f / total;
        sum *= norm[h];
      }
      size += __shfl_xor_sync(kEverybody, size, 1);
      size += __shfl_xor_sync(kEverybody, size, 2);
      const float error = sum - dlse[h];
      mine.delta[h] += error;
      wrong = wrong || fabsf(error) > Config::kEps * size;
    }
    // Once more is enough: the correction is as exact as float32 is.
    if (again || !(Config::kStages > 1 ? __syncthreads_or(wrong)
                                       : __any_sync(kEverybody, wrong))) {
      break;
    }
    again = true;
  }

  if (!work.has(warp * 16)) {
    return;
  }
  bool finite[2] = {true, true};
  if constexpr (Map::kSize == 4) {
#pragma unroll
    for (int i = 0; i < 4 * (Map::kDim / 8); ++i) {
      mine.dq[i / 4][i % 4] *= norm[i % 4 / 2];
    }
  }
  mine.finish(mine.dq, scale, finite);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = warp * 16 + g + 8 * h;
    finite[h] = finite[h] && fabsf(mine.delta[h]) < 3e38f;
    if (lane % 4 == 0 && work.has(query)) {
      const Token token = work.token(query);
      float* numbers = row_of<float>(p.delta, token, token.head);
      if constexpr (Map::kSize == 4) {
        *reinterpret_cast<float4*>(numbers) = float4{mine.shift[h], mine.delta[h], norm[h], 0.0f};
      } else {
        *reinterpret_cast<float2*>(numbers) = float2{mine.shift[h], mine.delta[h]};
      }
    }
  }
  __syncwarp();  // all lanes have q
  store_rows<Config>(memory, work, Rows<Config>(p.dq, work, work.head, false), mine.dq);
  visit_rows(work, finite, [&](const Token& query) { recompute_query<Config>(p, query); });
}

template <class Config>
__device__ void neighborhood_box_dkdv(const NeighborhoodParams& p) {
  extern __shared__ __align__(128) char memory[];
  using Map = Tile<Config>;
  using T = typename Config::T;
  const int warp = threadIdx.x / 32;
  const Work<Config, kOfKeys> work(p);
  if (!work.exists) {
    return;
  }

  const Stream<Config, kOfKeys> stream(p, work, memory);
  const unsigned k_rows = stream.shared.q();
  copy_queries(k_rows, work, Rows<Config>(p.k, work, work.head, false));
  copy_queries(k_rows + stream.shared.kOwn, work, Rows<Config>(p.v, work, work.head, false));
  start(stream);
  const Sweep<Config, kOfKeys> sweep(work);

  Keys<Config> mine;
  const float scale = float(p.scale);
  mine.factor = scale * kNatural<T>;
#pragma unroll 1
  for (int n = 0; n < stream.chunks(); ++n) {
    next(stream, n);
    if (n == 0) {
      mine.own.load(k_rows + warp * 16 * Map::kRowBytes);
    }
    sweep.take(mine, stream, n);
  }

  if (!work.has(warp * 16)) {
    return;
  }
  bool finite[2] = {true, true};
  mine.finish(mine.dk, scale, finite);
  mine.finish(mine.dv, 1.0f, finite);
  __syncwarp();  // all lanes have k and v
  store_rows<Config>(memory, work, Rows<Config>(p.dk, work, work.head, false), mine.dk);
  store_rows<Config>(memory + stream.shared.kOwn, work,
                     Rows<Config>(p.dv, work, work.head, false), mine.dv);
  visit_rows(work, finite, [&](const Token& key) { recompute_key<Config>(p, key); });
}
