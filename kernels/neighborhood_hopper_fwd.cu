// neighborhood_hopper_fwd.cu: neighborhood attention, forward, by TMA and warpgroup products
// (sm_90a).
//
//   s[j] = scale * <q, k[j]>  for j in window(query)
//   y    = sum_j softmax(s)[j] v[j]         lse = log sum_j exp s[j]
//
// Shapes    as in neighborhood_fwd.cu, 16-bit; head_dim = kDim, value_dim = kValues, multiples of 8
// Grid      x: kBlocks for each multiprocessor, or tiles if these are fewer. Tiles: query boxes
//           of a dilation group, last axis fastest; then groups, heads, batch: blocks work on
//           neighbouring queries of one head at a time, whose keys are in L2
// Block     kGroups warpgroups that own 64 queries of the tile each, and warps that bring boxes
// Tile map  a box of queries that walks boxes of the keys that they see, as in
//           common/neighborhood_hopper.cuh. A box of positions of a dilation group is a strided box
//           of tokens, which the copy engine takes: nothing is permuted
//
//                 keys         shared memory: kOwned q; kStages of k and of v, each in blocks of 64
//               +---------+    or 32 features, [block][positions][128 or 64 bytes], swizzled
//    queries 64 | s, p    |    registers of a warpgroup: s 64 x keys, o 64 x kValues, p as 16-bit
//               +---------+
//
// Spare     features up to whole blocks arrive as zeros, spare columns of o are dropped
// Pipeline  producer  warp 0: empty -> ask for k, v -> full; warp 1: the next tile's plan and its q
//           consumer, one block a multiprocessor:  s(i) = q k(i)^T  and  o += p(i - 1) v(i - 1)
//                     are issued together; the softmax of s(i) runs while the second product does,
//                     and under the other warpgroup's products: they take turns to ask for theirs.
//                     So does the end of a tile
//           consumer, two blocks:  s(i), its softmax, o += p(i) v(i), one after the other: the
//                     three other warps of a scheduler have work meanwhile
// Softmax   exponents of 2, relative to a reference that follows the largest score only when that
//           is kSlack ahead: a vote per box, and o is seldom rescaled
// Masks     a key box that lies inside every window of a warpgroup's queries needs none, one that
//           none of them sees is passed over. Otherwise a score counts where the key's position is
//           in [start, end) of the query on each axis
// Not finite  a NaN beside the window would reach o by 0 * NaN: rows that are not finite are
//           computed again, key by key
// Limits    sm_90a; strides in 16 bytes
#include "common/features.cuh"
#include "common/neighborhood_hopper.cuh"
#include "common/softmax.cuh"

template <class Config>
__device__ void neighborhood_hopper_fwd(const NeighborhoodHopperParams& hp) {
  using T = typename Config::T;
  using B = Boxes<Config>;
  using Scored = typename B::Scored;
  using Summed = typename B::Summed;
  constexpr int kStages = Config::kStages, kKeys = B::kSeen, kOutputs = Summed::kAll;
  constexpr int kQBytes = 64 * Scored::kBytes;  // of a warpgroup
  constexpr int kKBytes = kKeys * Scored::kBytes, kVBytes = kKeys * Summed::kBytes;
  constexpr int kGroups = Config::kGroups, kOwned = Config::kOwned;
  static_assert(!Config::kInverse && kStages > 1, "queries own");
  constexpr bool kTurns = Config::kBlocks == 1;
  constexpr float kSlack = 8.0f;  // weights up to 2^kSlack are as exact as up to 1
  const NeighborhoodParams& p = hp.na;
  extern __shared__ unsigned char memory[];
  const unsigned q_at = static_cast<unsigned>(__cvta_generic_to_shared(memory));
  if (q_at % 1024 != 0) {
    __trap();  // swizzles count from such a boundary
  }
  const unsigned k_at = q_at + kOwned * kGroups * kQBytes;
  const unsigned v_at = k_at + kStages * kKBytes;
  const unsigned q_full = v_at + kStages * kVBytes, q_empty = q_full + 8 * kOwned * kGroups;
  const unsigned k_full = q_empty + 8 * kOwned * kGroups, v_full = k_full + 8 * kStages;
  const unsigned k_empty = v_full + 8 * kStages, v_empty = k_empty + 8 * kStages;
  const Plans<Config> plans(memory, v_empty + 8 * kStages);
  // Known to be uniform, so that addresses of products are.
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kOwned * kGroups; ++i) {
      barrier_init(q_full + 8 * i, 1);
      barrier_init(q_empty + 8 * i, 4);  // warps
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(k_full + 8 * i, 1);
      barrier_init(v_full + 8 * i, 1);
      barrier_init(k_empty + 8 * i, B::kWarps);
      barrier_init(v_empty + 8 * i, B::kWarps);
    }
    plans.init(B::kWarps + 1);
    barrier_init_done();
    prefetch_map(hp.q_map);
    prefetch_map(hp.k_map);
    prefetch_map(hp.v_map);
  }
  __syncthreads();  // barriers can be used

  if (warpgroup == kGroups) {
    if constexpr (kTurns) {
      fewer_registers<40>();
    }
    if (threadIdx.x % 128 == 0) {
      load_keys(hp, plans, k_at, k_full);
    } else if (threadIdx.x % 128 / 32 == 1) {
      plans.write(hp, p.heads, [&](const BoxPlan<Config>& plan, unsigned tile) {
        for (int group = 0; group < kGroups; ++group) {
          const unsigned slot = tile % kOwned * kGroups + group;
          barrier_wait(q_empty + 8 * slot, (tile / kOwned & 1) ^ 1);
          barrier_expect(q_full + 8 * slot, kQBytes);
          load_part<Scored>(hp, hp.q_map, plan.place, group, p.heads, hp.q_heads_first,
                            q_at + slot * kQBytes, q_full + 8 * slot);
        }
      });
    }
    return;
  }

  if constexpr (kTurns) {
    more_registers<232>();
  }
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int row0 = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;  // and row0 + 8
  const float scale = float(p.scale * 1.4426950408889634);  // scores in base 2
  float s[kKeys / 2], o[kOutputs / 2], reference[2], sum[2], factor[2];
  bool moves = false;  // whether references do: then o is rescaled by factors
  unsigned weights[kKeys / 16][4];
  // Warpgroups of a block alone take turns to ask for products, so that the softmax of one runs
  // under the products of the other: one turn each for every box, also for those passed over.
  const auto my_turn = [&]() {
    if constexpr (kTurns) {
      named_barrier(1 + warpgroup, 256);
    }
  };
  const auto end_turn = [&]() {
    if constexpr (kTurns) {
      named_arrive(1 + (warpgroup + 1) % kGroups, 256);
    }
  };
  if (kTurns && warpgroup == 0) {
    named_arrive(1, 256);
  }
  unsigned it = 0, q_now = 0;  // box of the block; where q is
  const auto start_scores = [&]() {
    const unsigned stage = __shfl_sync(0xffffffffu, it % kStages, 0);
    barrier_wait(k_full + 8 * stage, it / kStages & 1);
    const unsigned long long q = features_at<Scored>(q_now);
    const unsigned long long k = features_at<Scored>(k_at + stage * kKBytes);
    warpgroup_arrive();
    multiply_features<T, Config::kDim>(s, q, k);
    warpgroup_commit();
  };
  const auto add_values = [&](unsigned box) {
    const unsigned stage = __shfl_sync(0xffffffffu, box % kStages, 0);
    barrier_wait(v_full + 8 * stage, box / kStages & 1);
    const unsigned long long v = rows_at<Summed, kKeys>(v_at + stage * kVBytes);
    warpgroup_arrive();
    multiply_seen<T>(o, weights, v);
    warpgroup_commit();
  };
  const auto rescale = [&]() {  // where no sum is on its way
    hold(o);
#pragma unroll
    for (int r = 0; r < kOutputs / 2; ++r) {
      o[r] *= factor[r / 2 % 2];
    }
  };
  const auto softmax = [&](BoxWalk<Config>& walk, const RowIntervals<Config>& rows) {
    hold(s);
    if (!walk.is_inside(warpgroup)) {
      rows.mask(s, walk, row0);
    }
    walk.next();
    float top[2] = {negative_infinity<float>(), negative_infinity<float>()};
#pragma unroll
    for (int r = 0; r < kKeys / 2; ++r) {
      top[r / 2 % 2] = fmaxf(top[r / 2 % 2], s[r]);
    }
    moves = __any_sync(0xffffffffu, top[0] * scale > reference[0] + kSlack ||
                                        top[1] * scale > reference[1] + kSlack);
    if (moves) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 1));
        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 2));
        const float next = fmaxf(top[i] * scale, reference[i]);
        factor[i] = exp2f(reference[i] - next);
        reference[i] = next;
        sum[i] *= factor[i];
      }
      if constexpr (!kTurns) {
        rescale();
      }
    }
#pragma unroll
    for (int r = 0; r < kKeys / 2; ++r) {
      s[r] = exp2f(fmaf(s[r], scale, -reference[r / 2 % 2]));
      sum[r / 2 % 2] += s[r];
    }
  };
  const auto rescale_and_pack = [&]() {
    if (kTurns && moves) {
      rescale();
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        weights[k][w] = pack<T>(s[8 * k + 2 * w], s[8 * k + 2 * w + 1]);
      }
    }
  };

  plans.for_each_by_warp([&](const BoxPlan<Config>& plan, unsigned tile) {
    const BoxPlace<Config>& place = plan.place;
    const int boxes = place.count;
    const unsigned slot = tile % kOwned * kGroups + warpgroup;
    q_now = __shfl_sync(0xffffffffu, q_at + slot * kQBytes, 0);
    barrier_wait(q_full + 8 * slot, tile / kOwned & 1);
    BoxWalk<Config> walk(place);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      reference[i] = -1e30f;
      sum[i] = 0;
    }
#pragma unroll
    for (int r = 0; r < kOutputs / 2; ++r) {
      o[r] = 0;
    }
    for (int i = 0; i < boxes;) {
      const bool outside = walk.is_outside(warpgroup);
      my_turn();
      if (outside) {
        end_turn();
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
      end_turn();
      warpgroup_wait<0>();
      arrive_by_warp(k_empty + 8 * (it % kStages));
      softmax(walk, plan.rows);
      rescale_and_pack();
      ++it;
      ++i;
      if constexpr (kTurns) {
        for (; i < boxes && !walk.is_outside(warpgroup); ++i, ++it) {
          my_turn();
          start_scores();
          add_values(it - 1);
          end_turn();
          warpgroup_wait<1>();  // the scores are there
          arrive_by_warp(k_empty + 8 * (it % kStages));
          softmax(walk, plan.rows);
          warpgroup_wait<0>();
          arrive_by_warp(v_empty + 8 * ((it - 1) % kStages));
          rescale_and_pack();
        }
      }
      add_values(it - 1);
      warpgroup_wait<0>();
      arrive_by_warp(v_empty + 8 * ((it - 1) % kStages));
    }
    hold(o);
    arrive_by_warp(q_empty + 8 * slot);

    Token mine[2];
    bool wrong[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
      const float lse = (reference[i] + log2f(sum[i])) * 0.6931471805599453f;
      const float inverse = 1.0f / sum[i];
#pragma unroll
      for (int r = 2 * i; r < kOutputs / 2; r += 4) {
        o[r] *= inverse;
        o[r + 1] *= inverse;
      }
      const bool has = place.token(p, row0 + 8 * i, mine[i]);
      if (has && quad == 0 && p.lse.data != nullptr) {
        *row_of<float>(p.lse, mine[i], mine[i].head) = lse;
      }
      T* const y = row_of<T>(p.y, mine[i], mine[i].head);
      wrong[i] = !(store_row<T, Config::kValues>(y, has, i, o) && is_finite(lse)) && has;
    }
    // The plain way: the warp computes one row after the other.
    for_each_row(wrong, mine, [&](const Token& query) {
      attend_plainly<T, B::kMost>(p, query);
    });
  });
}
