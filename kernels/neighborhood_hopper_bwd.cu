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
// Shapes    as in neighborhood_fwd.cu, 16-bit; head_dim = kDim, value_dim = kValues, multiples of 8
// Grid      x: as many blocks as multiprocessors, or tiles if these are fewer. Tiles: boxes of
//           queries (dq) or keys (dk, dv) of a dilation group, last axis fastest; then groups,
//           heads (of keys for dk, dv), batch
// Block     one warpgroup that brings boxes, kGroups that own 64 rows of the tile each
// Tile map  dq: queries that walk boxes of the keys that they see. dk, dv: keys that walk boxes of
//           the queries that see them, for each query head of the kv head. Boxes as in
//           common/neighborhood_hopper.cuh
//
//                  keys                            queries
//               +--------+                        +--------+
//    queries 64 | s, dp  |              keys   64 | s, dp  |    transposed: p and ds are left
//               +--------+                        +--------+    operands as they are
//           registers: s, dp, ds, dq         registers: s, dp, p or ds, dk, dv
//
//           shared memory: kOwned q, dy (or k, v) of tiles, kStages of the others; of queries also
//           lse and delta
// Pipeline  dq: s(i) = q k(i)^T, dp(i) = dy v(i)^T and dq += ds(i - 1) k(i - 1) are issued
//           together; ds(i) is made while the last runs
//           dk, dv: s = k q^T and dp = v dy^T are issued together; p is made while dp runs, ds
//           while dv += p dy does, and then dk += ds q, with the next s and dp behind it where
//           registers allow: the other warpgroup's products fill the gaps. Where registers do not
//           hold both sums, a launch makes dk and another dv
//           first warpgroup: a warp for boxes, one for the next tile's plan, one for its own rows,
//           one that brings lse and delta (dk, dv), or to L2 what they are made of (dq)
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

constexpr float kLog2e = 1.4426950408889634f;

// ------------------------------------------------------------------------------ rows, pair by pair

// What is kept of a query: lse times log2 e, for scores in base 2, and delta times scale.
__device__ inline float2* sums_of(const NeighborhoodParams& p, const Token& query, int head) {
  return reinterpret_cast<float2*>(row_of<float>(p.delta, query, head));
}

// dq of a query. Keys outside its window are never loaded.
template <class T, int kDim, int kValues>
__device__ void differentiate_query(const NeighborhoodParams& p, const Token& query) {
  const int lane = threadIdx.x % 32;
  const float scale = float(p.scale);
  const float2 sums = *sums_of(p, query, query.head);
  Features<T, (kDim + 31) / 32> q, k, dq;
  Features<T, (kValues + 31) / 32> dy, v;
  q.load(row_of<const T>(p.q, query, query.head), kDim, lane);
  dy.load(row_of<const T>(p.dy, query, query.head), kValues, lane);
  dq.clear();
  for_each_key<T>(p, query, [&](const T* k_row, const T* v_row) {
    k.load(k_row, kDim, lane);
    v.load(v_row, kValues, lane);
    const float weight = exp2f(fmaf(q.dot(k), scale * kLog2e, -sums.x));
    dq.add(weight * fmaf(dy.dot(v), scale, -sums.y), k);
  });
  dq.store(row_of<T>(p.dq, query, query.head), kDim, lane, 1.0f);
}

// dk and dv of a key, or one of them. Queries that do not see it are never loaded.
template <class T, int kDim, int kValues, bool kDk, bool kDv>
__device__ void differentiate_key(const NeighborhoodParams& p, const Token& key) {
  const int lane = threadIdx.x % 32, group = p.heads / p.kv_heads;
  const float scale = float(p.scale);
  const Box queries = box_of<true>(p, key.at);
  Features<T, (kDim + 31) / 32> k, q, dk;
  Features<T, (kValues + 31) / 32> v, dy, dv;
  k.load(row_of<const T>(p.k, key, key.head), kDim, lane);
  v.load(row_of<const T>(p.v, key, key.head), kValues, lane);
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
          dy.load(row_of<const T>(p.dy, query, head), kValues, lane);
          const float2 sums = *sums_of(p, query, head);
          const float weight = exp2f(fmaf(q.dot(k), scale * kLog2e, -sums.x));
          dk.add(weight * fmaf(dy.dot(v), scale, -sums.y), q);
          dv.add(weight, dy);
        }
      }
    }
  }
  if constexpr (kDk) {
    dk.store(row_of<T>(p.dk, key, key.head), kDim, lane, 1.0f);
  }
  if constexpr (kDv) {
    dv.store(row_of<T>(p.dv, key, key.head), kValues, lane, 1.0f);
  }
}

// Add the products of two rows of y with rows of dy in shared memory, `at` and at + 8 of 64, that a
// lane has of its four lanes' share.
template <class T, int kCount>
__device__ inline void add_products(float (&sum)[2], const T* const (&y)[2],
                                    const unsigned char* dy, int at) {
  using Layout = FeatureBlocks<kCount>;
  constexpr int kAtOnce = kCount > 128 ? 2 : 4;  // what registers hold
#pragma unroll kAtOnce
  for (int feature = threadIdx.x % 4 * 8; feature < kCount; feature += 32) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned inside = (at + 8 * i) * Layout::kRow + feature % Layout::kBlock * 2;
      const uint4 a = *reinterpret_cast<const uint4*>(y[i] + feature);
      const uint4 b = *reinterpret_cast<const uint4*>(
          dy + feature / Layout::kBlock * (64 * Layout::kRow) + swizzled<Layout::kRow>(inside));
      const unsigned wa[4] = {a.x, a.y, a.z, a.w}, wb[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float a0, a1, b0, b1;
        unpack<T>(wa[e], a0, a1);
        unpack<T>(wb[e], b0, b1);
        sum[i] = fmaf(a0, b0, fmaf(a1, b1, sum[i]));
      }
    }
  }
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
  using Scored = typename B::Scored;
  using Summed = typename B::Summed;
  constexpr int kDim = Config::kDim, kValues = Config::kValues;
  constexpr int kStages = Config::kStages, kKeys = B::kSeen;
  constexpr int kGroups = Config::kGroups, kOwned = Config::kOwned;
  static_assert(!Config::kInverse && kGroups == 2 && kStages > 1, "queries own");
  const NeighborhoodParams& p = hp.na;
  extern __shared__ unsigned char memory[];
  const unsigned own_at = static_cast<unsigned>(__cvta_generic_to_shared(memory));
  if (own_at % 1024 != 0) {
    __trap();  // swizzles count from such a boundary
  }
  // A warpgroup's q, then its dy.
  constexpr unsigned kQBytes = 64 * Scored::kBytes, kOwnBytes = kQBytes + 64 * Summed::kBytes;
  constexpr unsigned kKBytes = kKeys * Scored::kBytes, kVBytes = kKeys * Summed::kBytes;
  const unsigned k_at = own_at + kOwned * kGroups * kOwnBytes;
  const unsigned v_at = k_at + kStages * kKBytes;
  const unsigned own_full = v_at + kStages * kVBytes;
  const unsigned own_empty = own_full + 8 * kOwned * kGroups;
  const unsigned k_full = own_empty + 8 * kOwned * kGroups, v_full = k_full + 8 * kStages;
  const unsigned k_empty = v_full + 8 * kStages, v_empty = k_empty + 8 * kStages;
  const Plans<Config> plans(memory, v_empty + 8 * kStages);
  // Known to be uniform, so that addresses of products are.
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128 - 1, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kOwned * kGroups; ++i) {
      barrier_init(own_full + 8 * i, 1);
      barrier_init(own_empty + 8 * i, 4);  // warps
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(k_full + 8 * i, 1);
      barrier_init(v_full + 8 * i, 1);
      barrier_init(k_empty + 8 * i, B::kWarps);
      barrier_init(v_empty + 8 * i, B::kWarps);
    }
    plans.init(B::kWarps + 3);
    barrier_init_done();
    prefetch_map(hp.q_map);
    prefetch_map(hp.dy_map);
    prefetch_map(hp.k_map);
    prefetch_map(hp.v_map);
  }
  __syncthreads();  // barriers can be used

  if (warpgroup < 0) {
    fewer_registers<40>();
    if (threadIdx.x == 0) {
      load_keys(hp, plans, k_at, k_full);
    } else if (threadIdx.x / 32 == 1) {
      plans.write(hp, p.heads);
    } else if (threadIdx.x == 64) {
      plans.for_each([&](const BoxPlan<Config>& plan, unsigned tile) {
        for (int group = 0; group < kGroups; ++group) {
          const unsigned slot = tile % kOwned * kGroups + group, full = own_full + 8 * slot;
          const unsigned to = own_at + slot * kOwnBytes;
          barrier_wait(own_empty + 8 * slot, (tile / kOwned & 1) ^ 1);
          barrier_expect(full, kOwnBytes);
          load_part<Scored>(hp, hp.q_map, plan.place, group, p.heads, hp.q_heads_first, to, full);
          load_part<Summed>(hp, hp.dy_map, plan.place, group, p.heads, hp.dy_heads_first,
                            to + kQBytes, full);
        }
      });
    } else if (threadIdx.x / 32 == 3) {
      plans.for_each_by_warp([&](const BoxPlan<Config>& plan, unsigned) {
        for (int row = threadIdx.x % 32; row < B::kRows; row += 32) {
          Token query;
          plan.place.token(p, row, query);
          const T* y = row_of<const T>(p.y, query, query.head);
          for (int i = 0; i < kValues; i += 16) {
            prefetch_to_l2(y + i);
          }
          prefetch_to_l2(row_of<const float>(p.lse, query, query.head));
        }
      });
    }
    return;
  }

  more_registers<232>();
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int first_row = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const float scale = float(p.scale);
  float s[kKeys / 2], dp[kKeys / 2], dq[Scored::kAll / 2];
  unsigned ds[kKeys / 16][4];
  unsigned it = 0;  // box of the block
  const auto add_keys = [&](unsigned box) {
    warpgroup_arrive();
    multiply_seen<T>(dq, ds, rows_at<Scored, kKeys>(k_at + box % kStages * kKBytes));
    warpgroup_commit();
  };

  plans.for_each_by_warp([&](const BoxPlan<Config>& plan, unsigned tile) {
    const BoxPlace<Config>& place = plan.place;
    const int boxes = place.count;
    int row0 = again(first_row);
    float lse[2], delta[2] = {0, 0};  // times log2 e, times scale
    const unsigned slot = tile % kOwned * kGroups + warpgroup;
    const unsigned q_now = own_at + slot * kOwnBytes, dy_now = q_now + kQBytes;
    const T* y[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Token query;
      place.token(p, row0 + 8 * i, query);
      y[i] = row_of<const T>(p.y, query, query.head);
      lse[i] = *row_of<const float>(p.lse, query, query.head) * kLog2e;
    }
    barrier_wait(own_full + 8 * slot, tile / kOwned & 1);
    add_products<T, kValues>(delta, y, memory + (dy_now - own_at), row0 % 64);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      delta[i] += __shfl_xor_sync(0xffffffffu, delta[i], 1);
      delta[i] += __shfl_xor_sync(0xffffffffu, delta[i], 2);
      Token query;
      const bool has = place.token(p, row0 + 8 * i, query);
      if (p.dlse.data != nullptr) {
        delta[i] -= *row_of<const float>(p.dlse, query, query.head);
      }
      delta[i] *= scale;
      if (has && quad == 0) {
        *sums_of(p, query, query.head) = float2{lse[i], delta[i]};
      }
    }
    const auto start_scores = [&]() {
      const unsigned stage = it % kStages, parity = it / kStages & 1;
      barrier_wait(k_full + 8 * stage, parity);
      warpgroup_arrive();
      multiply_features<T, kDim>(s, features_at<Scored>(q_now),
                                 features_at<Scored>(k_at + stage * kKBytes));
      warpgroup_commit();
      barrier_wait(v_full + 8 * stage, parity);
      warpgroup_arrive();
      multiply_features<T, kValues>(dp, features_at<Summed>(dy_now),
                                    features_at<Summed>(v_at + stage * kVBytes));
      warpgroup_commit();
    };
    BoxWalk<Config> walk(place);
    const auto make_weights = [&]() {
      hold(s);
      if (!walk.is_inside(warpgroup)) {
        plan.rows.mask(s, walk, row0);
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

    clear(dq);
    for (int i = 0; i < boxes;) {
      if (walk.is_outside(warpgroup)) {
        barrier_wait(k_full + 8 * (it % kStages), it / kStages & 1);
        arrive_by_warp(k_empty + 8 * (it % kStages));
        barrier_wait(v_full + 8 * (it % kStages), it / kStages & 1);
        arrive_by_warp(v_empty + 8 * (it % kStages));
        walk.next();
        ++i;
        ++it;
        continue;
      }
      start_scores();
      warpgroup_wait<1>();
      make_weights();
      warpgroup_wait<0>();
      arrive_by_warp(v_empty + 8 * (it % kStages));
      make_ds();
      pack_operands<T, kKeys>(ds, s);
      ++it;
      for (++i; i < boxes && !walk.is_outside(warpgroup); ++i, ++it) {
        start_scores();
        add_keys(it - 1);
        warpgroup_wait<2>();  // s
        make_weights();
        warpgroup_wait<1>();  // dp
        arrive_by_warp(v_empty + 8 * (it % kStages));
        make_ds();
        warpgroup_wait<0>();  // dq
        arrive_by_warp(k_empty + 8 * ((it - 1) % kStages));
        pack_operands<T, kKeys>(ds, s);
      }
      add_keys(it - 1);
      warpgroup_wait<0>();
      arrive_by_warp(k_empty + 8 * ((it - 1) % kStages));
    }
    hold(dq);
    arrive_by_warp(own_empty + 8 * slot);

    row0 = again(row0);  // or what depends on it is kept in registers all the time
    Token mine[2];
    bool wrong[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool has = place.token(p, row0 + 8 * i, mine[i]);
      wrong[i] = !store_row<T, kDim>(row_of<T>(p.dq, mine[i], mine[i].head), has, i, dq) && has;
    }
    for_each_row(wrong, mine, [&](const Token& query) {
      differentiate_query<T, kDim, kValues>(p, query);
    });
  });
}

// ------------------------------------------------------------------------------------------ dk, dv

template <class Config>
__device__ void neighborhood_hopper_dkdv(const NeighborhoodHopperParams& hp) {
  using T = typename Config::T;
  using B = Boxes<Config>;
  using Scored = typename B::Scored;
  using Summed = typename B::Summed;
  constexpr int kDim = Config::kDim, kValues = Config::kValues;
  constexpr bool kDk = Config::kDk, kDv = Config::kDv;  // made here
  constexpr int kSums = (kDk ? Scored::kAll : 0) + (kDv ? Summed::kAll : 0);  // columns of them
  constexpr int kStages = Config::kStages, kQueries = B::kSeen;
  constexpr int kGroups = Config::kGroups, kOwned = Config::kOwned;
  // Whether registers (s, dp, operands; dk, dv) let the next scores be asked for before dk is
  // there.
  constexpr bool kAhead = kQueries * (kDk ? 5 : 3) / 4 + kSums / 2 <= 164;
  constexpr bool kFew = kSums < 256 || kDk != kDv;  // registers, leaving more to those that load
  static_assert(Config::kInverse && kGroups == 2 && kStages > 1, "keys own");
  const NeighborhoodParams& p = hp.na;
  extern __shared__ unsigned char memory[];
  const unsigned own_at = static_cast<unsigned>(__cvta_generic_to_shared(memory));
  if (own_at % 1024 != 0) {
    __trap();  // swizzles count from such a boundary
  }
  // A warpgroup's k, then its v (for dk); stages of q and dy; lse and delta of a stage's queries.
  constexpr unsigned kKBytes = 64 * Scored::kBytes;
  constexpr unsigned kOwnBytes = kKBytes + (kDk ? 64 * Summed::kBytes : 0);
  constexpr unsigned kQBytes = kQueries * Scored::kBytes;
  constexpr unsigned kStageBytes = kQBytes + kQueries * Summed::kBytes;
  const unsigned stages = own_at + kOwned * kGroups * kOwnBytes;
  const unsigned sums_at = stages + kStages * kStageBytes;
  const unsigned own_full = sums_at + kStages * kQueries * 8;
  const unsigned own_empty = own_full + 8 * kOwned * kGroups;
  const unsigned full = own_empty + 8 * kOwned * kGroups;
  const unsigned known = full + 8 * kStages, empty = known + 8 * kStages;
  float* const sums = reinterpret_cast<float*>(memory + (sums_at - own_at));
  const Plans<Config> plans(memory, empty + 8 * kStages);
  // Known to be uniform, so that addresses of products are.
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128 - 1, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kOwned * kGroups; ++i) {
      barrier_init(own_full + 8 * i, 1);
      barrier_init(own_empty + 8 * i, 4);  // warps
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(known + 8 * i, 32);  // lanes
      barrier_init(empty + 8 * i, B::kWarps);
    }
    plans.init(B::kWarps + 3);
    barrier_init_done();
    prefetch_map(hp.k_map);
    prefetch_map(hp.v_map);
    prefetch_map(hp.q_map);
    prefetch_map(hp.dy_map);
  }
  __syncthreads();  // barriers can be used

  if (warpgroup < 0) {
    fewer_registers<kFew ? 40 : 24>();
    unsigned it = 0;  // box of the block
    if (threadIdx.x == 0) {
      plans.for_each([&](const BoxPlan<Config>& plan, unsigned) {
        const BoxPlace<Config>& place = plan.place;
        BoxWalk<Config> walk(place);
        int head = place.head * place.shared_heads;
        const int total = place.count * place.shared_heads;
        for (int i = 0; i < total; ++i, ++it, head += walk.next()) {
          const unsigned stage = it % kStages, at = stages + stage * kStageBytes;
          barrier_wait(empty + 8 * stage, (it / kStages & 1) ^ 1);
          barrier_expect(full + 8 * stage, kStageBytes);
          load_positions<Scored, kQueries>(hp, hp.q_map, place, head, p.heads, hp.q_heads_first,
                                           walk.at, at, full + 8 * stage);
          load_positions<Summed, kQueries>(hp, hp.dy_map, place, head, p.heads, hp.dy_heads_first,
                                           walk.at, at + kQBytes, full + 8 * stage);
        }
      });
    } else if (threadIdx.x / 32 == 1) {
      plans.write(hp, p.kv_heads);
    } else if (threadIdx.x == 64) {
      plans.for_each([&](const BoxPlan<Config>& plan, unsigned tile) {
        for (int group = 0; group < kGroups; ++group) {
          const unsigned slot = tile % kOwned * kGroups + group, own = own_full + 8 * slot;
          const unsigned to = own_at + slot * kOwnBytes;
          barrier_wait(own_empty + 8 * slot, (tile / kOwned & 1) ^ 1);
          barrier_expect(own, kOwnBytes);
          load_part<Scored>(hp, hp.k_map, plan.place, group, p.kv_heads, hp.k_heads_first, to, own);
          if constexpr (kDk) {
            load_part<Summed>(hp, hp.v_map, plan.place, group, p.kv_heads, hp.v_heads_first,
                              to + kKBytes, own);
          }
        }
      });
    } else if (threadIdx.x / 32 == 3) {
      plans.for_each_by_warp([&](const BoxPlan<Config>& plan, unsigned) {
        const BoxPlace<Config>& place = plan.place;
        BoxWalk<Config> walk(place);
        int head = place.head * place.shared_heads;
        const unsigned end = it + place.count * place.shared_heads;
        for (; it != end; ++it, head += walk.next()) {
          const unsigned stage = it % kStages;
          barrier_wait(empty + 8 * stage, (it / kStages & 1) ^ 1);
          for (int at = threadIdx.x % 32; at < kQueries; at += 32) {
            const int within[3] = {at / (Config::kSeenH * Config::kSeenW),
                                   at / Config::kSeenW % Config::kSeenH, at % Config::kSeenW};
            Token query = {place.batch, {0, 0, 0}, head};
            bool has = true;
#pragma unroll
            for (int a = 0; a < 3; ++a) {
              const int position = walk.at[a] + within[a];
              has = has && position < place.n[a];
              query.at[a] = place.group[a] + position * p.dilation[a];
            }
            // No query: its scores are masked.
            const float2* const of = sums_of(p, query, head);
            const unsigned to = sums_at + (stage * kQueries * 2 + at) * 4;
            copy_number(to, &of->x, has);
            copy_number(to + kQueries * 4, &of->y, has);
          }
          barrier_arrive_after_copies(known + 8 * stage);
        }
      });
    }
    return;
  }

  more_registers<kFew ? 232 : 240>();
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int first_row = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const float scale = float(p.scale), scale2 = scale * kLog2e;
  float s[kQueries / 2], dp[kQueries / 2], dk[Scored::kAll / 2], dv[Summed::kAll / 2];
  unsigned operands[kQueries / 16][4];  // p, then ds
  unsigned it = 0;                      // box of the block

  plans.for_each_by_warp([&](const BoxPlan<Config>& plan, unsigned tile) {
    const BoxPlace<Config>& place = plan.place;
    const int total = place.count * place.shared_heads;
    int row0 = again(first_row);
    const unsigned slot = tile % kOwned * kGroups + warpgroup;
    const unsigned k_now = own_at + slot * kOwnBytes, v_now = k_now + kKBytes;
    BoxWalk<Config> walk(place);
    const auto start_scores = [&]() {
      const unsigned stage = it % kStages, q_at = stages + stage * kStageBytes;
      barrier_wait(full + 8 * stage, it / kStages & 1);
      warpgroup_arrive();
      multiply_features<T, kDim>(s, features_at<Scored>(k_now), features_at<Scored>(q_at));
      warpgroup_commit();
      if constexpr (kDk) {
        multiply_features<T, kValues>(dp, features_at<Summed>(v_now),
                                      features_at<Summed>(q_at + kQBytes));
        warpgroup_commit();
      }
    };
    // From scores to the last sum, which is left to be waited for.
    const auto differentiate = [&](auto after_wait) {
      const unsigned stage = it % kStages, q_at = stages + stage * kStageBytes;
      const float* of_stage = sums + stage * kQueries * 2 + 2 * quad;
      float2 ahead[kAhead ? kQueries / 8 : 1];  // of lse or delta, asked for before it is wanted
      const auto ask = [&](const float* from) {
        if constexpr (kAhead) {
#pragma unroll
          for (int j = 0; j < kQueries / 8; ++j) {
            ahead[j] = *reinterpret_cast<const float2*>(from + j * 8);
          }
        }
      };
      const auto get = [&](const float* from, int j) {
        return kAhead ? ahead[kAhead ? j : 0] : *reinterpret_cast<const float2*>(from + j * 8);
      };
      barrier_wait(known + 8 * stage, it / kStages & 1);
      ask(of_stage);
      warpgroup_wait<kDk>();  // s, and what was asked for before it
      after_wait();
      hold(s);
      if (!walk.is_inside(warpgroup)) {
        plan.rows.mask(s, walk, row0);
      }
      walk.next();
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float2 lse = get(of_stage, j);
#pragma unroll
        for (int r = j * 4; r < j * 4 + 4; ++r) {
          s[r] = exp2f(fmaf(s[r], scale2, -(r % 2 ? lse.y : lse.x)));
        }
      }
      pack_operands<T, kQueries>(operands, s);
      if constexpr (kDv) {
        warpgroup_arrive();
        multiply_seen<T>(dv, operands, rows_at<Summed, kQueries>(q_at + kQBytes));
        warpgroup_commit();
      }
      if constexpr (!kDk) {
        return;
      }
      ask(of_stage + kQueries);
      warpgroup_wait<kDv>();  // dp
      hold(dp);
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float2 delta = get(of_stage + kQueries, j);
#pragma unroll
        for (int r = j * 4; r < j * 4 + 4; ++r) {
          s[r] *= fmaf(dp[r], scale, -(r % 2 ? delta.y : delta.x));
        }
      }
      hold(s);  // made while dv is
      warpgroup_wait<0>();
      pack_operands<T, kQueries>(operands, s);
      warpgroup_arrive();
      multiply_seen<T>(dk, operands, rows_at<Scored, kQueries>(q_at));
      warpgroup_commit();
    };

    clear(dk);
    clear(dv);
    barrier_wait(own_full + 8 * slot, tile / kOwned & 1);
    for (int i = 0; i < total;) {
      if (walk.is_outside(warpgroup)) {
        const unsigned stage = it % kStages, parity = it / kStages & 1;
        barrier_wait(full + 8 * stage, parity);
        barrier_wait(known + 8 * stage, parity);
        arrive_by_warp(empty + 8 * stage);
        walk.next();
        ++i;
        ++it;
        continue;
      }
      start_scores();
      differentiate([] {});
      ++it;
      for (++i; i < total && !walk.is_outside(warpgroup); ++i, ++it) {
        if constexpr (!kAhead) {
          warpgroup_wait<0>();
          arrive_by_warp(empty + 8 * ((it - 1) % kStages));
        }
        start_scores();
        differentiate([&] {
          if constexpr (kAhead) {  // the last sum is there, too
            arrive_by_warp(empty + 8 * ((it - 1) % kStages));
          }
        });
      }
      warpgroup_wait<0>();
      arrive_by_warp(empty + 8 * ((it - 1) % kStages));
    }
    if constexpr (kDk) {
      hold(dk);
    }
    if constexpr (kDv) {
      hold(dv);
    }
    arrive_by_warp(own_empty + 8 * slot);

    row0 = again(row0);
    Token mine[2];
    bool wrong[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool has = place.token(p, row0 + 8 * i, mine[i]);
      bool finite = true;
      if constexpr (kDk) {
        finite = store_row<T, kDim>(row_of<T>(p.dk, mine[i], mine[i].head), has, i, dk);
      }
      if constexpr (kDv) {
        finite = store_row<T, kValues>(row_of<T>(p.dv, mine[i], mine[i].head), has, i, dv) && finite;
      }
      wrong[i] = has && !finite;
    }
    for_each_row(wrong, mine, [&](const Token& key) {
      differentiate_key<T, kDim, kValues, kDk, kDv>(p, key);
    });
  });
}
