// neighborhood_band_fwd.cu: neighborhood attention, forward, for narrow windows.
//
//   s[j] = scale * <q, k[j]>  for j in window(query)
//   y    = sum_j softmax(s)[j] v[j]         lse = log sum_j exp s[j]
//
// Shapes    as in neighborhood_fwd.cu, with value_dim = head_dim; rows of q, k, v 16-byte aligned
// Grid      x: runs (neighborhood_band.cuh), heads of a warp fastest, kThreads / kLanes per block
// Block     a team of kLanes lanes owns a run of kRun queries; teams of a block are neighbours and
//           find each other's keys in L1
// Tile map  keys of a run: the union of its windows along the last axis, row by row of the outer
//           axes, kRun - 1 more than a window has; a query lets pass what is not its own
//
//             position on the last axis ->   0 1 2 3 4 5 6 7 8 9
//             query 0 of the run             x x x x x x x            window 7, kRun = 4
//             query 3                              x x x x x x x
//
// Pipeline  per kAhead keys:  dots -> load next k -> team sums, softmax in the lanes that own a
//           query -> y += weight * v -> load next v
// Memory    registers: q, y of the run in float32, kAhead rows of k and v as they lie in memory
// Limits    head_dim up to 32 lanes x kVectors x 16 bytes; no float64; any window, but the work is
//           (window + kRun - 1) * kRun pairs a row, on CUDA cores
// Config    T; kFull: lanes have kVectors each, no more and no less; kOuter: more than one axis;
//           kHeads x kHeadTiles heads; kShared query heads a key head; kDilation of the last axis
// Sources   window rule: Hassani et al. 2023 and 2025; online softmax: Milakov et al. 2018
//
// By counting, for a window of 7, head_dim 64: a pair costs a lane 8 FMA for the score and 8 for y
// of 8 features. A warp with 4 teams, 4 queries each (float32), issues about 1850 instructions: 230
// before the first key, 6 x 300 for 2 keys x 4 queries each, of which 128 are those FMA, and 120 at
// the end. That is 116 per query and head, 8 us of an H200's issue slots for the 65,536 of a
// (2, 4096, 8, 64) call whose q, k, v and y are 67 MB, 16 us of memory; with 16-bit elements, of
// which unpacking takes 2 per feature and key, 111 and 8 us against 8 us.
#include "common/neighborhood_band.cuh"

// The softmax of a lane's own query while keys go by. Weights are relative to a reference that
// follows the largest score only when it is left behind by kSlack: y is seldom rescaled, and
// nothing is lost, since float32 is as exact at exp(kSlack) as at 1.
struct LazySoftmax {
  static constexpr float kSlack = 4.0f;
  // Finite, so that a score of -inf has weight 0 beside it and not NaN.
  float reference = __uint_as_float(0xff7fffffu);
  float sum = 0.0f;

  __device__ bool is_behind(float top) const { return top > reference + kSlack; }

  // What earlier weights must be multiplied by.
  __device__ float follow(float top) {
    const float next = is_behind(top) ? top : reference;
    const float factor = exponential(reference - next);
    sum *= factor;
    reference = next;
    return factor;
  }

  // The exponent is formed with one rounding, as in the backward, where lse stands for it.
  __device__ float weight(float scale, float dot) const {
    return exponential(multiply_add(scale, dot, -reference));
  }
};

// In place of a weight, which is not negative: the key is outside the query's window.
constexpr float kOutside = -1.0f;

template <class Config>
__device__ void neighborhood_band_forward(const NeighborhoodParams& p) {
  constexpr int kRun = Config::kRun, kAhead = Config::kAhead;
  using Rows = Stream<Config>;
  constexpr int kFeatures = Share<Config>::kFeatures;
  const Member<Config> me(p);
  const Run<Config, false> run(p, me);
  const float scale = me.of_token(0, float(p.scale));  // or it is converted again at every use

  float q[kRun][kFeatures], y[kRun][kFeatures] = {};
  load_run(q, run, me, p.q);
  LazySoftmax softmax;

  walk(run, me, p.k, p.v, run.head / Config::kShared,
       [&](const Step<Config>& step, Rows& k, Rows& v, const int (&)[2]) {
         float product[kAhead];
#pragma unroll
         for (int c = 0; c < kAhead; ++c) {
           product[c] = dot(k.row[c], q);
         }
         step.fetch_next(k);

         float top = negative_infinity<float>();
#pragma unroll
         for (int c = 0; c < kAhead; ++c) {
           if (step.inside(c)) {
             top = fmaxf(top, scale * product[c]);
           }
         }
         if (__any_sync(kEverybody, softmax.is_behind(top))) {
           const float factor = softmax.follow(top);
#pragma unroll
           for (int s = 0; s < kRun; ++s) {
             const float f = me.of(s, factor);
#pragma unroll
             for (int i = 0; i < kFeatures; ++i) {
               y[s][i] *= f;
             }
           }
         }
#pragma unroll
         for (int c = 0; c < kAhead; ++c) {
           const float weight = softmax.weight(scale, product[c]);
           softmax.sum += step.inside(c) ? weight : 0.0f;
           const float own = step.inside(c) ? weight : kOutside;
           float w[kRun];
           bool wanted[kRun];
#pragma unroll
           for (int s = 0; s < kRun; ++s) {
             w[s] = me.of(s, own);
             wanted[s] = w[s] != kOutside;
           }
           add(y, v.row[c], w, wanted);
         }
         step.fetch_next(v);
       });

  store_run(y, run, me, p.y, 1.0f / softmax.sum);
  if (p.lse.data != nullptr && me.first() && run.has(me.own)) {
    run.template line<float>(p.lse, run.head, run.at[0], run.at[1]).number(run.position(me.own)) =
        softmax.reference + logarithm(softmax.sum);
  }
}
