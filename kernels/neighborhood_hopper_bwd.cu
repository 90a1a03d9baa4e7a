// neighborhood_hopper_bwd.cu: neighborhood attention, backward, by TMA and warpgroup products
// (sm_90a).
//
//   p[i,j]   = exp(scale * <q[i], k[j]> - lse[i])          for j in window(i)
//   dp[i,j]  = <dy[i], v[j]>
//   delta[i] = <dy[i], y[i]> - dlse[i]                     = sum_j p[i,j] dp[i,j] - dlse[i]
//   ds[i,j]  = p[i,j] * (dp[i,j] - delta[i]) * scale
//   dq[i]    = sum_j ds[i,j] k[j]                          j: the keys of query i
//   dk[j]    = sum_i ds[i,j] q[i]    dv[j] = sum_i p[i,j] dy[i]    i: the queries of key j
//
// Shapes    as in neighborhood_fwd.cu, 16-bit, value_dim = head_dim = kDim
// Grid      x: boxes of queries (dq) or keys (dk, dv) of a dilation group, last axis fastest; then
//           groups, heads (of keys for dk, dv), batch
// Block     one warpgroup whose first thread asks for boxes, two that own 64 rows each
// Tile map  dq: 128 queries that walk boxes of the keys that they see. dk, dv: 128 keys that walk
//           boxes of the queries that see them, for each query head of the kv head. Boxes as in
//           common/neighborhood_hopper.cuh
//
//                  keys                            queries
//               +--------+                        +--------+
//    queries 64 | s, dp  |              keys   64 | s, dp  |    transposed: p and ds are left
//               +--------+                        +--------+    operands as they are
//           registers: s, dp, ds, dq         registers: s, dp, p or ds, dk, dv
//
//           shared memory: q, dy (or k, v) of the block, kStages of the others; of queries also
//           lse and delta
// Pipeline  dq: s(i) = q k(i)^T, dp(i) = dy v(i)^T and dq += ds(i - 1) k(i - 1) are issued
//           together; ds(i) is made while the last runs
//           dk, dv: s = k q^T and dp = v dy^T are issued together; p is made while dp runs, ds
//           while dv += p dy does, and then dk += ds q: the other warpgroup's products fill the
//           gaps. The second warp of the first warpgroup brings lse and delta
// Masks     only in boxes that do not lie inside the interval of each of a warpgroup's rows; a
//           warpgroup passes over boxes that none of its rows sees
// Memory    lse and delta side by side, two numbers per query and head; nothing of size (queries,
//           keys); no atomics, the same bits every time
// Not finite  a NaN beside the window would reach a sum by 0 * NaN: rows that are not finite are
//           computed again, pair by pair
// Limits    sm_90a; strides in 16 bytes; scale > 0; windows of many keys: y is rounded, so where a
//           query has one key its ds is not exactly 0, as it is in neighborhood_bwd.cu
// Sources   Dao et al. 2022 for the recomputation from lse; Shah et al. 2024 for the transposed
//           scores
#include "common/features.cuh"
#include "common/neighborhood_hopper.cuh"
#include "common/wgmma.cuh"

constexpr float kLog2e = 1.4426950408889634f;

// ------------------------------------------------------------------------------ rows, pair by pair

// What is kept of a query: lse times log2 e, for scores in base 2, and delta times scale.
__device__ inline float2* sums_of(const NeighborhoodParams& p, const Token& query, int head) {
  return reinterpret_cast<float2*>(row_of<float>(p.delta, query, head));
}

// dq of a query. Keys outside its window are never loaded.
template <class T, int kDim>
__device__ void differentiate_query(const NeighborhoodParams& p, const Token& query) {
  const int lane = threadIdx.x % 32;
  const float scale = float(p.scale);
  const float2 sums = *sums_of(p, query, query.head);
  Features<T, kDim / 32> q, dy, k, v, dq;
  q.load(row_of<const T>(p.q, query, query.head), kDim, lane);
  dy.load(row_of<const T>(p.dy, query, query.head), kDim, lane);
  dq.clear();
  for_each_key<T>(p, query, [&](const T* k_row, const T* v_row) {
    k.load(k_row, kDim, lane);
    v.load(v_row, kDim, lane);
    const float weight = exp2f(fmaf(q.dot(k), scale * kLog2e, -sums.x));
    dq.add(weight * fmaf(dy.dot(v), scale, -sums.y), k);
  });
  dq.store(row_of<T>(p.dq, query, query.head), kDim, lane, 1.0f);
}

// dk and dv of a key. Queries that do not see it are never loaded.
template <class T, int kDim>
__device__ void differentiate_key(const NeighborhoodParams& p, const Token& key) {
  const int lane = threadIdx.x % 32, group = p.heads / p.kv_heads;
  const float scale = float(p.scale);
  const Box queries = box_of<true>(p, key.at);
  Features<T, kDim / 32> k, v, q, dy, dk, dv;
  k.load(row_of<const T>(p.k, key, key.head), kDim, lane);
  v.load(row_of<const T>(p.v, key, key.head), kDim, lane);
  dk.clear();
  dv.clear();
  for (int i0 = 0; i0 < queries.count[0]; ++i0) {
    for (int i1 = 0; i1 < queries.count[1]; ++i1) {
      for (int i2 = 0; i2 < queries.count[2]; ++i2) {
        const Token query = {key.batch,
                             {queries.position(0, i0), queries.position(1, i1),
                              queries.position(2, i2)},
                             0};
        for (int head = key.head * group; head < (key.head + 1) * group; ++head) {
          q.load(row_of<const T>(p.q, query, head), kDim, lane);
          dy.load(row_of<const T>(p.dy, query, head), kDim, lane);
          const float2 sums = *sums_of(p, query, head);
          const float weight = exp2f(fmaf(q.dot(k), scale * kLog2e, -sums.x));
          dk.add(weight * fmaf(dy.dot(v), scale, -sums.y), q);
          dv.add(weight, dy);
        }
      }
    }
  }
  dk.store(row_of<T>(p.dk, key, key.head), kDim, lane, 1.0f);
  dv.store(row_of<T>(p.dv, key, key.head), kDim, lane, 1.0f);
}

// The inner product of two rows, shared by the four lanes of a row.
template <class T, int kDim>
__device__ inline float dot_by_quad(const T* x, const T* y) {
  const int quad = threadIdx.x % 4;
  const bool aligned = reinterpret_cast<unsigned long long>(y) % 16 == 0;  // x always is
  float sum = 0;
#pragma unroll
  for (int at = 0; at < kDim; at += 32) {
    const T *from_x = x + at + quad * 8, *from_y = y + at + quad * 8;
    const uint4 a = *reinterpret_cast<const uint4*>(from_x);
    uint4 b;
    if (aligned) {
      b = *reinterpret_cast<const uint4*>(from_y);
    } else {
      const auto two = [&](int e) { return from_y[e].bits | unsigned(from_y[e + 1].bits) << 16; };
      b = uint4{two(0), two(2), two(4), two(6)};
    }
    const unsigned wx[4] = {a.x, a.y, a.z, a.w}, wy[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float x0, x1, y0, y1;
      unpack<T>(wx[e], x0, x1);
      unpack<T>(wy[e], y0, y1);
      sum = fmaf(x0, y0, fmaf(x1, y1, sum));
    }
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

// Sixteen columns at a time of an accumulator as left operands.
template <class T, int kColumns>
__device__ inline void pack_operands(unsigned (&operands)[kColumns / 16][4],
                                     const float (&d)[kColumns / 2]) {
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      operands[k][w] = pack<T>(d[8 * k + 2 * w], d[8 * k + 2 * w + 1]);
    }
  }
}

// d (+)= a b^T over all features: 64 rows of a, kSeen of b, in blocks of 64 features.
template <class T, int kDim, int kCount>
__device__ inline void multiply_features(float (&d)[kCount], unsigned a, unsigned a_block,
                                         unsigned b) {
  const unsigned long long from_a = tile_descriptor(a, 16), from_b = tile_descriptor(b, 16);
#pragma unroll
  for (int f = 0; f < kDim / 16; ++f) {
    multiply_keys<T>(d, from_a + (f / 4 * a_block >> 4) + f % 4 * 2,
                     from_b + f / 4 * (kCount * 2 * 8) + f % 4 * 2, f != 0);
  }
}

// d += operands b: kSeen rows of b, whose features are columns of d.
template <class T, int kSteps, int kCount>
__device__ inline void multiply_seen(float (&d)[kCount], const unsigned (&operands)[kSteps][4],
                                     unsigned b) {
  const unsigned long long from = tile_descriptor(b, kSteps * 16 * 128);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    multiply_rows<T>(d, operands[k], from + 128 * k, 1);
  }
}

// x, which the compiler takes for another number.
__device__ inline int again(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

template <int kCount>
__device__ inline void clear(float (&d)[kCount]) {
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    d[r] = 0;
  }
}

// ---------------------------------------------------------------------------------------------- dq

template <class Config>
__device__ void neighborhood_hopper_dq(const NeighborhoodHopperParams& hp) {
  using T = typename Config::T;
  using B = Boxes<Config>;
  constexpr int kStages = Config::kStages, kDim = Config::kDim, kKeys = B::kSeen;
  static_assert(Config::kThreads == 384 && !Config::kInverse, "three warpgroups; queries own");
  static_assert(sizeof(BoxPlace<Config>) == 176, "_PLACE in configs/neighborhood_hopper.py");
  const NeighborhoodParams& p = hp.na;
  extern __shared__ unsigned char memory[];
  const unsigned q_at = static_cast<unsigned>(__cvta_generic_to_shared(memory));
  if (q_at % 1024 != 0) {
    __trap();  // swizzles count from such a boundary
  }
  const unsigned dy_at = q_at + B::kRowBytes, k_at = dy_at + B::kRowBytes;
  const unsigned v_at = k_at + kStages * B::kSeenBytes;
  const unsigned own_full = v_at + kStages * B::kSeenBytes;
  const unsigned k_full = own_full + 8, v_full = k_full + 8 * kStages;
  const unsigned k_empty = v_full + 8 * kStages, v_empty = k_empty + 8 * kStages;
  BoxPlace<Config>& shared_place =
      *reinterpret_cast<BoxPlace<Config>*>(memory + (v_empty + 8 * kStages - q_at));
  const BoxPlace<Config>& place = shared_place;
  RowIntervals<Config>& intervals = *reinterpret_cast<RowIntervals<Config>*>(&shared_place + 1);
  // Known to be uniform, so that addresses of products are.
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128 - 1, 0);
  if (threadIdx.x == 0) {
    shared_place.set(hp, p.heads);
    barrier_init(own_full, 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(k_full + 8 * i, 1);
      barrier_init(v_full + 8 * i, 1);
      barrier_init(k_empty + 8 * i, 2);  // warpgroups
      barrier_init(v_empty + 8 * i, 2);
    }
    barrier_init_done();
    prefetch_map(hp.q_map);
    prefetch_map(hp.dy_map);
    prefetch_map(hp.k_map);
    prefetch_map(hp.v_map);
  }
  __syncthreads();  // place is known, barriers can be used
  if (!place.exists) {
    return;
  }
  const int boxes = place.count();

  if (warpgroup < 0) {
    fewer_registers<24>();
    if (threadIdx.x == 0) {
      const int kv_head = place.head / (p.heads / p.kv_heads);
      barrier_expect(own_full, 2 * B::kRowBytes);
      load_positions<Config, B::kRows>(hp, hp.q_map, place, place.head, p.heads,
                                       hp.q_heads_first, place.own, q_at, own_full);
      load_positions<Config, B::kRows>(hp, hp.dy_map, place, place.head, p.heads,
                                       hp.dy_heads_first, place.own, dy_at, own_full);
      BoxWalk<Config> walk(place);
      for (int i = 0; i < boxes; ++i, walk.next()) {
        const unsigned stage = i % kStages, parity = (i / kStages & 1) ^ 1;
        barrier_wait(k_empty + 8 * stage, parity);
        barrier_expect(k_full + 8 * stage, B::kSeenBytes);
        load_positions<Config, kKeys>(hp, hp.k_map, place, kv_head, p.kv_heads, hp.k_heads_first,
                                      walk.at, k_at + stage * B::kSeenBytes, k_full + 8 * stage);
        barrier_wait(v_empty + 8 * stage, parity);
        barrier_expect(v_full + 8 * stage, B::kSeenBytes);
        load_positions<Config, kKeys>(hp, hp.v_map, place, kv_head, p.kv_heads, hp.v_heads_first,
                                      walk.at, v_at + stage * B::kSeenBytes, v_full + 8 * stage);
      }
    }
    return;
  }

  more_registers<240>();
  const int lane = threadIdx.x % 32, quad = lane % 4;
  int row0 = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  intervals.set(p, place, row0);
  if (threadIdx.x % 128 == 0) {
    shared_place.set_rows(p, warpgroup * 64);
  }
  named_barrier(1 + warpgroup, 128);  // its bounds are known
  const float scale = float(p.scale);
  float lse[2], delta[2];  // times log2 e, times scale
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Token query;
    const bool has = place.token(p, row0 + 8 * i, query);
    delta[i] = dot_by_quad<T, kDim>(row_of<const T>(p.dy, query, query.head),
                                    row_of<const T>(p.y, query, query.head));
    if (p.dlse.data != nullptr) {
      delta[i] -= *row_of<const float>(p.dlse, query, query.head);
    }
    lse[i] = *row_of<const float>(p.lse, query, query.head) * kLog2e;
    delta[i] *= scale;
    if (has && quad == 0) {
      *sums_of(p, query, query.head) = float2{lse[i], delta[i]};
    }
  }

  float s[kKeys / 2], dp[kKeys / 2], dq[kDim / 2];
  unsigned ds[kKeys / 16][4];
  clear(dq);
  const auto release = [&](unsigned barrier) {
    if (threadIdx.x % 128 == 0) {
      barrier_arrive(barrier);
    }
  };
  const auto start_scores = [&](int i) {
    const unsigned stage = i % kStages, parity = i / kStages & 1;
    barrier_wait(k_full + 8 * stage, parity);
    warpgroup_arrive();
    multiply_features<T, kDim>(s, q_at + warpgroup * 8192, B::kRows * 128,
                               k_at + stage * B::kSeenBytes);
    warpgroup_commit();
    barrier_wait(v_full + 8 * stage, parity);
    warpgroup_arrive();
    multiply_features<T, kDim>(dp, dy_at + warpgroup * 8192, B::kRows * 128,
                               v_at + stage * B::kSeenBytes);
    warpgroup_commit();
  };
  const auto add_keys = [&](int i) {
    warpgroup_arrive();
    multiply_seen<T>(dq, ds, k_at + i % kStages * B::kSeenBytes);
    warpgroup_commit();
  };
  BoxWalk<Config> walk(place);
  const auto make_weights = [&]() {
    hold(s);
    if (!walk.is_inside(warpgroup)) {
      intervals.mask(s, walk, row0);
    }
    walk.next();
    const float scale2 = scale * kLog2e;
#pragma unroll
    for (int r = 0; r < kKeys / 2; ++r) {
      s[r] = exp2f(fmaf(s[r], scale2, -lse[r / 2 % 2]));
    }
    hold(s);  // made here, not after a later wait
  };
  const auto make_ds = [&]() {
    hold(dp);
#pragma unroll
    for (int r = 0; r < kKeys / 2; ++r) {
      s[r] *= fmaf(dp[r], scale, -delta[r / 2 % 2]);
    }
    hold(s);
  };

  barrier_wait(own_full, 0);
  for (int i = 0; i < boxes;) {
    if (walk.is_outside(warpgroup)) {
      barrier_wait(k_full + 8 * (i % kStages), i / kStages & 1);
      barrier_wait(v_full + 8 * (i % kStages), i / kStages & 1);
      // All four warps have seen this phase, which products would make sure of: the stage may be
      // filled anew, and a warp that came after that would wait for ever.
      named_barrier(1 + warpgroup, 128);
      release(k_empty + 8 * (i % kStages));
      release(v_empty + 8 * (i % kStages));
      walk.next();
      ++i;
      continue;
    }
    start_scores(i);
    warpgroup_wait<1>();
    make_weights();
    warpgroup_wait<0>();
    release(v_empty + 8 * (i % kStages));
    make_ds();
    pack_operands<T, kKeys>(ds, s);
    for (++i; i < boxes && !walk.is_outside(warpgroup); ++i) {
      start_scores(i);
      add_keys(i - 1);
      warpgroup_wait<2>();  // s
      make_weights();
      warpgroup_wait<1>();  // dp
      release(v_empty + 8 * (i % kStages));
      make_ds();
      warpgroup_wait<0>();  // dq
      release(k_empty + 8 * ((i - 1) % kStages));
      pack_operands<T, kKeys>(ds, s);
    }
    add_keys(i - 1);
    warpgroup_wait<0>();
    release(k_empty + 8 * ((i - 1) % kStages));
  }
  hold(dq);

  row0 = again(row0);  // or what depends on it is kept in registers all the time
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Token mine;
    const bool has = place.token(p, row0 + 8 * i, mine);
    const bool finite = store_row(row_of<T>(p.dq, mine, mine.head), has, i, dq);
    for_each_row(has && !finite, mine, [&](const Token& query) {
      differentiate_query<T, kDim>(p, query);
    });
  }
}

// ------------------------------------------------------------------------------------------ dk, dv

template <class Config>
__device__ void neighborhood_hopper_dkdv(const NeighborhoodHopperParams& hp) {
  using T = typename Config::T;
  using B = Boxes<Config>;
  constexpr int kStages = Config::kStages, kDim = Config::kDim, kQueries = B::kSeen;
  constexpr int kStageBytes = 2 * B::kSeenBytes;
  static_assert(Config::kThreads == 384 && Config::kInverse, "three warpgroups; keys own");
  static_assert(sizeof(BoxPlace<Config>) == 176, "_PLACE in configs/neighborhood_hopper.py");
  const NeighborhoodParams& p = hp.na;
  extern __shared__ unsigned char memory[];
  const unsigned k_at = static_cast<unsigned>(__cvta_generic_to_shared(memory));
  if (k_at % 1024 != 0) {
    __trap();  // swizzles count from such a boundary
  }
  const unsigned v_at = k_at + B::kRowBytes, stages = v_at + B::kRowBytes;  // of q, of dy
  const unsigned sums_at = stages + kStages * kStageBytes;  // lse, delta of a stage's queries
  const unsigned own_full = sums_at + kStages * kQueries * 8;
  const unsigned full = own_full + 8, known = full + 8 * kStages, empty = known + 8 * kStages;
  float* const sums = reinterpret_cast<float*>(memory + (sums_at - k_at));
  const int shared_heads = p.heads / p.kv_heads;
  BoxPlace<Config>& shared_place =
      *reinterpret_cast<BoxPlace<Config>*>(memory + (empty + 8 * kStages - k_at));
  const BoxPlace<Config>& place = shared_place;
  RowIntervals<Config>& intervals = *reinterpret_cast<RowIntervals<Config>*>(&shared_place + 1);
  // Known to be uniform, so that addresses of products are.
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128 - 1, 0);
  if (threadIdx.x == 0) {
    shared_place.set(hp, p.kv_heads);
    barrier_init(own_full, 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(known + 8 * i, 1);
      barrier_init(empty + 8 * i, 8);  // warps
    }
    barrier_init_done();
    prefetch_map(hp.k_map);
    prefetch_map(hp.v_map);
    prefetch_map(hp.q_map);
    prefetch_map(hp.dy_map);
  }
  __syncthreads();  // place is known, barriers can be used
  if (!place.exists) {
    return;
  }
  if (warpgroup < 0) {
    fewer_registers<24>();
    if (threadIdx.x == 0) {
      barrier_expect(own_full, 2 * B::kRowBytes);
      load_positions<Config, B::kRows>(hp, hp.k_map, place, place.head, p.kv_heads,
                                       hp.k_heads_first, place.own, k_at, own_full);
      load_positions<Config, B::kRows>(hp, hp.v_map, place, place.head, p.kv_heads,
                                       hp.v_heads_first, place.own, v_at, own_full);
      BoxWalk<Config> walk(place);
      int head = place.head * shared_heads;
      const int total = place.count() * shared_heads;
      for (int i = 0; i < total; ++i, head += walk.next()) {
        const unsigned stage = i % kStages, at = stages + stage * kStageBytes;
        barrier_wait(empty + 8 * stage, (i / kStages & 1) ^ 1);
        barrier_expect(full + 8 * stage, kStageBytes);
        load_positions<Config, kQueries>(hp, hp.q_map, place, head, p.heads, hp.q_heads_first,
                                         walk.at, at, full + 8 * stage);
        load_positions<Config, kQueries>(hp, hp.dy_map, place, head, p.heads, hp.dy_heads_first,
                                         walk.at, at + B::kSeenBytes, full + 8 * stage);
      }
    } else if (threadIdx.x / 32 == 1) {
      const int lane = threadIdx.x % 32;
      BoxWalk<Config> walk(place);
      Token query = {place.batch, {0, 0, 0}, place.head * shared_heads};
      const int total = place.count() * shared_heads;
      for (int i = 0; i < total; ++i, query.head += walk.next()) {
        const unsigned stage = i % kStages;
        float* const to = sums + stage * kQueries * 2;
        barrier_wait(empty + 8 * stage, (i / kStages & 1) ^ 1);
        for (int at = lane; at < kQueries; at += 32) {
          const int within[3] = {at / (Config::kSeenH * Config::kSeenW),
                                 at / Config::kSeenW % Config::kSeenH, at % Config::kSeenW};
          bool has = true;
#pragma unroll
          for (int a = 0; a < 3; ++a) {
            const int position = walk.at[a] + within[a];
            has = has && position < place.n[a];
            query.at[a] = place.group[a] + position * p.dilation[a];
          }
          // No query: its scores are masked.
          const float2 x = has ? *sums_of(p, query, query.head) : float2{0, 0};
          to[at] = x.x;
          to[kQueries + at] = x.y;
        }
        __syncwarp();
        if (lane == 0) {
          barrier_arrive(known + 8 * stage);
        }
      }
    }
    return;
  }

  more_registers<240>();
  const int lane = threadIdx.x % 32, quad = lane % 4;
  int row0 = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  intervals.set(p, place, row0);
  if (threadIdx.x % 128 == 0) {
    shared_place.set_rows(p, warpgroup * 64);
  }
  named_barrier(1 + warpgroup, 128);  // its bounds are known
  const float scale = float(p.scale), scale2 = scale * kLog2e;
  float s[kQueries / 2], dp[kQueries / 2], dk[kDim / 2], dv[kDim / 2];
  unsigned operands[kQueries / 16][4];  // p, then ds
  clear(dk);
  clear(dv);
  const auto release = [&](int i) {
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(empty + 8 * (i % kStages));
    }
  };
  BoxWalk<Config> walk(place);
  const int total = place.count() * shared_heads;
  barrier_wait(own_full, 0);
  for (int i = 0; i < total; ++i, walk.next()) {
    const unsigned stage = i % kStages, parity = i / kStages & 1;
    const unsigned q_at = stages + stage * kStageBytes, dy_at = q_at + B::kSeenBytes;
    const float* of_stage = sums + stage * kQueries * 2 + 2 * quad;
    barrier_wait(full + 8 * stage, parity);
    if (walk.is_outside(warpgroup)) {
      barrier_wait(known + 8 * stage, parity);
      release(i);
      continue;
    }
    warpgroup_arrive();
    multiply_features<T, kDim>(s, k_at + warpgroup * 8192, B::kRows * 128, q_at);
    warpgroup_commit();
    multiply_features<T, kDim>(dp, v_at + warpgroup * 8192, B::kRows * 128, dy_at);
    warpgroup_commit();
    warpgroup_wait<1>();  // s
    hold(s);
    if (!walk.is_inside(warpgroup)) {
      intervals.mask(s, walk, row0);
    }
    barrier_wait(known + 8 * stage, parity);
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 lse = *reinterpret_cast<const float2*>(of_stage + j * 8);
#pragma unroll
      for (int r = j * 4; r < j * 4 + 4; ++r) {
        s[r] = exp2f(fmaf(s[r], scale2, -(r % 2 ? lse.y : lse.x)));
      }
    }
    pack_operands<T, kQueries>(operands, s);
    warpgroup_arrive();
    multiply_seen<T>(dv, operands, dy_at);
    warpgroup_commit();
    warpgroup_wait<1>();  // dp
    hold(dp);
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 delta = *reinterpret_cast<const float2*>(of_stage + kQueries + j * 8);
#pragma unroll
      for (int r = j * 4; r < j * 4 + 4; ++r) {
        s[r] *= fmaf(dp[r], scale, -(r % 2 ? delta.y : delta.x));
      }
    }
    hold(s);  // made while dv is
    warpgroup_wait<0>();
    pack_operands<T, kQueries>(operands, s);
    warpgroup_arrive();
    multiply_seen<T>(dk, operands, q_at);
    warpgroup_commit();
    warpgroup_wait<0>();  // the next scores beside it would need more registers
    release(i);
  }
  hold(dk);
  hold(dv);

  row0 = again(row0);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Token mine;
    const bool has = place.token(p, row0 + 8 * i, mine);
    bool finite = store_row(row_of<T>(p.dk, mine, mine.head), has, i, dk);
    finite = store_row(row_of<T>(p.dv, mine, mine.head), has, i, dv) && finite;
    for_each_row(has && !finite, mine,
                 [&](const Token& key) { differentiate_key<T, kDim>(p, key); });
  }
}
