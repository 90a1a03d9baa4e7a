// neighborhood_slide_fwd.cu: neighborhood attention, forward, for narrow windows of many queries on
// one axis, float32.
//
//   s[j] = scale * <q, k[j]>  for j in window(query)
//   y    = sum_j softmax(s)[j] v[j]         lse = log sum_j exp s[j]
//
// Shapes    as in neighborhood_fwd.cu, with value_dim = head_dim and one axis; rows 16-byte aligned
// Grid      x: chains, heads of a warp fastest, kThreads / kLanes per block
// Block     a team of kLanes lanes, four features each, owns a chain: kKeys * kTurns neighbouring
//           queries of a dilation group
// Tile map  rows of k and v of the window in registers, the key at position i in slot i % kKeys, so
//           that from one query to the next one row of each is loaded, over that which the window
//           leaves
//
//             position            0 1 2 3 4 5 6 7 8 9        window 7
//             slot                0 1 2 3 4 5 6 0 1 2
//             query 3             x x x x x x x
//             query 4               x x x x x x x            key 7 takes the place of key 0
//
//           At a border a window that is moved inward has one key for every slot too, those beyond
//           the border taking kKeys positions less or more: nothing is loaded. Where the window is
//           cut instead (kCut), slots without a key are zeros, and their scores do not count
// Pipeline  dots -> load next k, q -> sum of every slot to the lanes that own it -> softmax, weights
//           to all lanes -> y -> load next v. One row of each is on its way while a query is computed
// Memory    registers: the window's rows, 8 kKeys, and some 40 more
// Limits    float32; head_dim 32, 64 or 128; 3 to 8 keys; stride 1
// Config    kKeys of a window, kBack of them before the query; kCut; kTurns; kHeads x kHeadTiles
//           heads, kShared query heads a key head; kDilation
#include "common/neighborhood_band.cuh"

template <class Config>
struct Slots {
  static constexpr int kKeys = Config::kKeys, kLanes = Config::kLanes;
  static constexpr int kCount = kKeys > 4 ? 8 : 4;  // with empty ones
  static constexpr int kSame = kLanes / kCount;     // lanes that own the same
  static_assert(kKeys >= 3 && kKeys <= kCount && kSame > 0, "every slot has lanes that own it");

  // Of two lanes that add up, each keeps one half of the slots and sends the other.
  __device__ static float total(float (&part)[kCount]) {
    const int own = threadIdx.x % kLanes / kSame;
#pragma unroll
    for (int b = kCount / 2; b > 0; b /= 2) {
      const bool high = own & b;
#pragma unroll
      for (int s = 0; s < b; ++s) {
        const float sent = high ? part[s] : part[s + b];
        part[s] = (high ? part[s + b] : part[s]) + __shfl_xor_sync(kEverybody, sent, b * kSame);
      }
    }
#pragma unroll
    for (int distance = kSame / 2; distance > 0; distance /= 2) {
      part[0] += __shfl_xor_sync(kEverybody, part[0], distance);
    }
    return part[0];
  }
  // The largest over the slots.
  __device__ static float largest(float x) {
#pragma unroll
    for (int b = kCount / 2; b > 0; b /= 2) {
      x = fmaxf(x, __shfl_xor_sync(kEverybody, x, b * kSame));
    }
    return x;
  }
  // What the owner of a slot has.
  __device__ static float of(int slot, float own_value) {
    return __shfl_sync(kEverybody, own_value, slot * kSame, kLanes);
  }
};

template <class Config>
__device__ void neighborhood_slide_forward(const NeighborhoodParams& p) {
  using S = Slots<Config>;
  constexpr int kKeys = Config::kKeys, kBack = Config::kBack, kChain = kKeys * Config::kTurns;
  constexpr unsigned kStep = Config::kDilation, kHeads = Config::kHeads;
  const Member<Config> me(p);
  const float scale = float(p.scale);

  // The chain: fastest are kHeads heads, then the chains of a group, groups, the other heads.
  const unsigned longest = (p.space[2] - 1) / kStep + 1, chains = (longest + kChain - 1) / kChain;
  unsigned rest = blockIdx.x * (Config::kThreads / Config::kLanes) + threadIdx.x / Config::kLanes;
  bool exists = rest < unsigned(p.batch) * chains * (kStep * kHeads * Config::kHeadTiles);
  rest = exists ? rest : 0;
  int head = rest % kHeads;
  rest /= kHeads;
  int first = rest % chains * kChain;
  rest /= chains;
  int group = rest % kStep;
  rest /= kStep;
  head += rest % Config::kHeadTiles * kHeads;
  const int64 batch = rest / Config::kHeadTiles;
  int n = longest - (group + (longest - 1) * kStep >= unsigned(p.space[2]));
  if (first >= n) {  // groups differ by one token: it may have been the chain's, or the group's
    exists = false;
    first = group = 0;
    n = longest;
  }
  const int end = exists ? min(first + kChain, n) : 0;  // of the queries
  const int keys_end = min(first + kChain - 1 - kBack + kKeys, n);

  const auto line = [&](const TokenView& view, int of_head) {
    char* data = reinterpret_cast<char*>(row_of<float>(view, batch, 0, 0, group, of_head));
    return Line{data + me.lane * 16, int(kStep * view.space[2] * 4)};
  };
  const Line q_line = line(p.q, head), y_line = line(p.y, head);
  const Line k_line = line(p.k, head / Config::kShared), v_line = line(p.v, head / Config::kShared);
  const bool aligned = reinterpret_cast<unsigned long long>(p.y.data) % 16 == 0;
  const bool writes_lse = p.lse.data != nullptr && me.lane == 0;

  Share<Config> q, k[kKeys], v[kKeys];
  q.load(q_line.row(first), me);
#pragma unroll
  for (int j = 0; j < kKeys; ++j) {
    const int s = (j + kKeys - kBack) % kKeys;
    int at = first - kBack + j;
    if constexpr (Config::kCut) {
      k[s] = v[s] = {};
      if (at < 0 || at >= n) {
        continue;
      }
    } else {
      at += at < 0 ? kKeys : at >= n ? -kKeys : 0;
    }
    k[s].load(k_line.row(at), me);
    v[s].load(v_line.row(at), me);
  }
  const int own = threadIdx.x % Config::kLanes / S::kSame;  // the lane's slot
  int own_at = first - kBack + (own + kBack) % kKeys;       // where its key is

  const char* next_q = q_line.row(first + 1);
  const char* next_k = k_line.row(first + kKeys - kBack);
  const char* next_v = v_line.row(first + kKeys - kBack);
  char* to = y_line.row(first);
  int query = first;
#pragma unroll 1
  for (int turn = 0; turn < Config::kTurns && __any_sync(kEverybody, query < end); ++turn) {
#pragma unroll
    for (int u = 0; u < kKeys; ++u, ++query) {
      float part[S::kCount] = {};
#pragma unroll
      for (int s = 0; s < kKeys; ++s) {
        float dot = k[s].get(0) * q.get(0);
#pragma unroll
        for (int i = 1; i < 4; ++i) {
          dot = multiply_add(k[s].get(i), q.get(i), dot);
        }
        part[s] = dot;
      }

      // The slot of the key that leaves takes that which comes.
      const int s = (u + kKeys - kBack) % kKeys, at = query + kKeys - kBack;
      if (at < keys_end) {
        k[s].load(next_k, me);
      } else if constexpr (Config::kCut) {
        k[s] = {};
      }
      if (query + 1 < end) {
        q.load(next_q, me);
      }
      next_k += k_line.step;
      next_q += q_line.step;

      const float dot = S::total(part);
      const bool counts = own < kKeys && (!Config::kCut || unsigned(own_at) < unsigned(n));
      float top = S::largest(counts ? scale * dot : negative_infinity<float>());
      // Finite, so that a score of -inf has weight 0 beside it and not NaN.
      top = fmaxf(top, __uint_as_float(0xff7fffffu));
      // The exponent is formed with one rounding, as in the backward, where lse stands for it.
      const float own_weight = counts ? exponential(multiply_add(scale, dot, -top)) : 0.0f;
      float sum, y[4];
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        const float weight = S::of(j, own_weight);
        sum = j == 0 ? weight : sum + weight;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          y[i] = j == 0 ? weight * v[j].get(i) : multiply_add(weight, v[j].get(i), y[i]);
        }
      }

      if (at < keys_end) {
        v[s].load(next_v, me);
      } else if constexpr (Config::kCut) {
        v[s] = {};
      }
      next_v += v_line.step;
      if constexpr (Config::kCut) {
        own_at += s == own ? kKeys : 0;
      }
      if (query < end) {
        store_share(to, me, aligned, y, 1.0f / sum);
        if (writes_lse) {
          *row_of<float>(p.lse, batch, 0, 0, group + query * int(kStep), head) =
              top + logarithm(sum);
        }
      }
      to += y_line.step;
    }
  }
}
