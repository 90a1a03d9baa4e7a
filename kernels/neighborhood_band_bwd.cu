// neighborhood_band_bwd.cu: neighborhood attention, backward, for narrow windows.
//
//   w[i,j]   = exp(scale * <q[i], k[j]> - lse[i])          for j in window(i)
//   p[i,j]   = w[i,j] / sum_j w[i,j]        dp[i,j] = <dy[i], v[j]>
//   delta[i] = sum_j p[i,j] dp[i,j] - dlse[i]
//   ds[i,j]  = p[i,j] * (dp[i,j] - delta[i]) * scale
//   dq[i]    = sum_j ds[i,j] k[j]                          j: the keys of query i
//   dk[j]    = sum_i ds[i,j] q[i]    dv[j] = sum_i p[i,j] dy[i]    i: the queries of key j
//
// Shapes    as in neighborhood_band_fwd.cu; gradients have their array's shape
// Grid      x: runs of kRun queries for dq and delta, then of kRun keys for dk and dv
// Block     a team of kLanes lanes owns a run, as in the forward
// Tile map  dq: the union of the run's windows; dk, dv: the union of the queries that see its keys
//           (one interval an axis), over the query heads of the key head: gathered, no atomics
// Pipeline  dq: walks over k and v for w, dp and delta, then over k for dq; w and dp wait in shared
//           memory (kKeep), or are computed again where a window has too many keys for that
//           dk, dv: per query  both dots -> team sums -> p, ds in the lanes that own a key
//           -> dk += ds * q, dv += p * dy -> load the query that is kAhead further
// Memory    delta and 1 / sum_j w: two numbers per query and head, in rows of two in p.delta; kKeep:
//           8 bytes of shared memory a pair
// Limits    as the forward's
// Config    as the forward's, and kKeep; dq and dkdv agree in kVectors, so that dp has the same bits
// Sources   Dao et al. 2022 for the recomputation from lse
//
// The sum is 1 but for the rounding of lse, which is that of a number as large as the scores: where
// these are large, more than float32 loses anywhere else.
//
// dq takes two walks, since delta must be known before it meets dp (see neighborhood_bwd.cu): the
// sums of w dp k and w k, with delta applied at the end, would cancel no further than their own
// roundings. With w and dp kept, the second walk has no dots and costs less than those two sums: 24
// FMA a pair and 8 features instead of 32. dk and dv take 32.
#include "common/neighborhood_band.cuh"

// In place of a weight, which is not negative: the pair is outside the window.
constexpr float kOutside = -1.0f;
// In place of a gradient, which may be anything: a NaN that no arithmetic makes.
constexpr unsigned kNoGradient = 0x7fc0b0d1u;

template <class Config>
__device__ void neighborhood_band_dq(const NeighborhoodParams& p) {
  constexpr int kRun = Config::kRun, kAhead = Config::kAhead;
  constexpr int kFeatures = Share<Config>::kFeatures;
  constexpr int kTeams = Config::kThreads / Config::kLanes;
  using Rows = Stream<Config>;
  const Member<Config> me(p);
  const Run<Config, false> run(p, me);
  const float scale = me.of_token(0, float(p.scale));  // or it is converted again at every use
  const int kv_head = run.head / Config::kShared, own = run.position(me.own);
  const float lse =
      run.template line<float>(p.lse, run.head, run.at[0], run.at[1]).number(own);

  float q[kRun][kFeatures], dy[kRun][kFeatures];
  load_run(q, run, me, p.q);
  load_run(dy, run, me, p.dy);

  // Weight and dp of every key and query of the block, where there is room.
  extern __shared__ float2 kept[];
  const int slot = threadIdx.x / Config::kLanes * kRun + me.own;

  // A key with all the weight gives the mean its own dp, with no rounding: its score then has no
  // gradient at all.
  float sum = 0.0f, weighted = 0.0f, largest_weight = 0.0f, its_dp = 0.0f;
  walk(run, me, p.k, p.v, kv_head,
       [&](const Step<Config>& step, Rows& k, Rows& v, const int (&)[2]) {
         float weight[kAhead];
#pragma unroll
         for (int c = 0; c < kAhead; ++c) {
           weight[c] = exponential(multiply_add(scale, dot(k.row[c], q), -lse));
         }
         step.fetch_next(k);
#pragma unroll
         for (int c = 0; c < kAhead; ++c) {
           const float dp = dot(v.row[c], dy);
           if (step.inside(c)) {
             sum += weight[c];
             weighted = multiply_add(weight[c], dp, weighted);
             its_dp = weight[c] > largest_weight ? dp : its_dp;
             largest_weight = fmaxf(largest_weight, weight[c]);
           }
           if (Config::kKeep && me.first()) {
             kept[(step.number + c) * (kTeams * kRun) + slot] = float2{weight[c], dp};
           }
         }
         step.fetch_next(v);
       });
  float delta = sum == largest_weight ? its_dp : weighted / sum;
  if (p.dlse.data != nullptr) {
    delta -= run.template line<float>(p.dlse, run.head, run.at[0], run.at[1]).number(own);
  }
  const float norm = 1.0f / sum;
  if (me.first() && run.has(me.own)) {
    run.template line<float>(p.delta, run.head, run.at[0], run.at[1]).pair(own) =
        float2{delta, norm};
  }
  __syncwarp();  // kept readable

  float dq[kRun][kFeatures] = {};
  walk(run, me, p.k, p.v, kv_head,
       [&](const Step<Config>& step, Rows& k, Rows& v, const int (&)[2]) {
         float gradient[kAhead];
#pragma unroll
         for (int c = 0; c < kAhead; ++c) {
           float weight, dp;
           if (Config::kKeep) {
             const float2 both = kept[(step.number + c) * (kTeams * kRun) + slot];
             weight = both.x;
             dp = both.y;
           } else {
             weight = exponential(multiply_add(scale, dot(k.row[c], q), -lse));
             dp = dot(v.row[c], dy);
           }
           gradient[c] = step.inside(c) ? weight * (dp - delta) : __uint_as_float(kNoGradient);
         }
         if (!Config::kKeep) {
           step.fetch_next(v);
         }
#pragma unroll
         for (int c = 0; c < kAhead; ++c) {
           float g[kRun];
           bool wanted[kRun];
#pragma unroll
           for (int s = 0; s < kRun; ++s) {
             g[s] = me.of(s, gradient[c]);
             wanted[s] = __float_as_uint(g[s]) != kNoGradient;
           }
           add(dq, k.row[c], g, wanted);
           step.fetch_next(k, c);
         }
       });
  store_run(dq, run, me, p.dq, scale * norm);
}

template <class Config>
__device__ void neighborhood_band_dkdv(const NeighborhoodParams& p) {
  constexpr int kRun = Config::kRun, kAhead = Config::kAhead;
  constexpr int kFeatures = Share<Config>::kFeatures;
  using Rows = Stream<Config>;
  const Member<Config> me(p);
  const Run<Config, true> run(p, me);
  const float scale = me.of_token(0, float(p.scale));

  float k[kRun][kFeatures], v[kRun][kFeatures];
  load_run(k, run, me, p.k);
  load_run(v, run, me, p.v);
  float dk[kRun][kFeatures] = {}, dv[kRun][kFeatures] = {};

#pragma unroll 1
  for (int head = run.head * Config::kShared; head < (run.head + 1) * Config::kShared; ++head) {
    walk(run, me, p.q, p.dy, head,
         [&](const Step<Config>& step, Rows& q, Rows& dy, const int (&place)[2]) {
           const Line lse = run.template line<float>(p.lse, head, place[0], place[1]);
           const Line sums = run.template line<float>(p.delta, head, place[0], place[1]);
           float shift[kAhead];
           float2 delta[kAhead];  // and 1 / sum
#pragma unroll
           for (int c = 0; c < kAhead; ++c) {
             const int position = min(step.first + c, step.last);
             shift[c] = lse.number(position);
             delta[c] = sums.pair(position);
           }
#pragma unroll
           for (int c = 0; c < kAhead; ++c) {
             const float weight =
                 exponential(multiply_add(scale, dot(q.row[c], k), -shift[c])) * delta[c].y;
             const float gradient = weight * (dot(dy.row[c], v) - delta[c].x);
             const float own = step.inside(c) ? weight : kOutside;
             float w[kRun], g[kRun];
             bool wanted[kRun];
#pragma unroll
             for (int s = 0; s < kRun; ++s) {
               w[s] = me.of(s, own);
               g[s] = me.of(s, gradient);
               wanted[s] = w[s] != kOutside;
             }
             add(dk, q.row[c], g, wanted);
             add(dv, dy.row[c], w, wanted);
             step.fetch_next(q, c);
             step.fetch_next(dy, c);
           }
         });
  }
  store_run(dk, run, me, p.dk, scale);
  store_run(dv, run, me, p.dv, 1.0f);
}
