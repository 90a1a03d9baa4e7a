// neighborhood_band.cuh: runs of neighbouring tokens on a few lanes, and the tokens that they meet.
//
// kLanes neighbouring lanes, a team, own a run: kRun neighbouring positions of one dilation group
// along the last axis, in one head. A lane has the vectors lane, lane + kLanes, ... of every row
// (16 bytes each), so that a team reads whole lines. A sum over features takes part of every lane
// and is wanted for each token of the run; slot s of lane l therefore stands for token s ^ own, own
// being the high bits of l. Two lanes that add up then exchange what the other one keeps, without
// choosing: kRun sums take kRun - 1 shuffles, and leave lane l with that of its own token.
//
// Loops go round equally often in all lanes of a warp: shuffles need everybody.
#pragma once
#include "common/token.cuh"
#include "common/vector.cuh"
#include "common/window.cuh"

constexpr unsigned kEverybody = 0xffffffffu;

// Which lane of its team a thread is.
template <class Config>
struct Member {
  static constexpr int kLanes = Config::kLanes, kRun = Config::kRun;
  static_assert((kLanes & (kLanes - 1)) == 0 && kLanes <= 32, "a team is part of a warp");
  static_assert((kRun & (kRun - 1)) == 0 && kRun <= kLanes, "every token of a run has a lane");
  static constexpr int kSame = kLanes / kRun;  // lanes with the same token

  int lane, own;  // own: the token, within the run, whose sums this lane has
  int vectors;    // of a row, from this lane's first one on

  __device__ explicit Member(const NeighborhoodParams& p)
      : lane(threadIdx.x % kLanes),
        own(lane / kSame),
        vectors(p.head_dim / Vector<typename Config::T>::kSize - lane) {}

  __device__ bool has(int vector) const { return Config::kFull || vector * kLanes < vectors; }
  // In bytes, from the lane's first vector.
  __device__ static constexpr int offset(int vector) { return vector * kLanes * 16; }
  __device__ int token(int slot) const { return slot ^ own; }
  __device__ bool first() const { return lane % kSame == 0; }  // of those with the same token

  // The sum over the team of every slot, which is left with the lanes that own the token.
  __device__ static float total(float (&part)[kRun]) {
#pragma unroll
    for (int b = kRun / 2; b > 0; b /= 2) {
#pragma unroll
      for (int s = 0; s < b; ++s) {
        part[s] += __shfl_xor_sync(kEverybody, part[s + b], b * kSame);
      }
    }
#pragma unroll
    for (int distance = kSame / 2; distance > 0; distance /= 2) {
      part[0] += __shfl_xor_sync(kEverybody, part[0], distance);
    }
    return part[0];
  }

  // What the owner of a slot's token has.
  template <class A>
  __device__ static A of(int slot, A own_value) {
    return slot == 0 ? own_value : __shfl_xor_sync(kEverybody, own_value, slot * kSame);
  }

  // What the owner of a token of the run has.
  template <class A>
  __device__ A of_token(int token, A own_value) const {
    return __shfl_sync(kEverybody, own_value, token * kSame, kLanes);
  }
};

// A lane's share of a row, as it lies in memory.
template <class Config>
struct Share {
  using T = typename Config::T;
  static constexpr int kSize = Vector<T>::kSize, kVectors = Config::kVectors;
  static constexpr int kFeatures = kSize * kVectors;
  Vector<T> part[kVectors];

  __device__ void load(const char* row, const Member<Config>& me) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (me.has(v)) {
        part[v] = load_vector(reinterpret_cast<const T*>(row + me.offset(v)));
      } else {
        part[v] = {};
      }
    }
  }

  __device__ float get(int i) const { return part[i / kSize].get(i % kSize); }

  __device__ void widen_to(float (&x)[kFeatures]) const {
#pragma unroll
    for (int i = 0; i < kFeatures; ++i) {
      x[i] = get(i);
    }
  }
};

// Write factor * x as the lane's share of a row; results may lie anywhere.
template <class Config>
__device__ inline void store_share(char* row, const Member<Config>& me, bool aligned,
                                   const float (&x)[Share<Config>::kFeatures], float factor) {
  using T = typename Config::T;
  constexpr int kSize = Vector<T>::kSize;
#pragma unroll
  for (int v = 0; v < Config::kVectors; ++v) {
    if (me.has(v)) {
      T* to = reinterpret_cast<T*>(row + me.offset(v));
      const float* from = x + v * kSize;
      if (aligned) {
        Vector<T> y;
#pragma unroll
        for (int i = 0; i < kSize; i += 2) {
          y.set(i, from[i] * factor, from[i + 1] * factor);
        }
        store_vector(to, y);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          to[i] = narrow<T>(from[i] * factor);
        }
      }
    }
  }
}

// The product of a row with the run's row in every slot, left with the lanes that own the token.
template <class Config>
__device__ inline float dot(const Share<Config>& row,
                            const float (&x)[Config::kRun][Share<Config>::kFeatures]) {
  float part[Config::kRun];
#pragma unroll
  for (int i = 0; i < Share<Config>::kFeatures; ++i) {
    const float y = row.get(i);
#pragma unroll
    for (int s = 0; s < Config::kRun; ++s) {
      part[s] = i == 0 ? y * x[s][i] : multiply_add(y, x[s][i], part[s]);
    }
  }
  return Member<Config>::total(part);
}

// x += weight * row in every slot where that is wanted: elsewhere the row may be NaN, and 0 * row
// would be too. A choice by element becomes a predicate; round all of them it would be a branch.
template <class Config>
__device__ inline void add(float (&x)[Config::kRun][Share<Config>::kFeatures],
                           const Share<Config>& row, const float (&weight)[Config::kRun],
                           const bool (&wanted)[Config::kRun]) {
#pragma unroll
  for (int i = 0; i < Share<Config>::kFeatures; ++i) {
    const float y = row.get(i);
#pragma unroll
    for (int s = 0; s < Config::kRun; ++s) {
      x[s][i] = wanted[s] ? multiply_add(weight[s], y, x[s][i]) : x[s][i];
    }
  }
}

// Positions first, first + step, ... of an outer axis.
struct Steps {
  int first, step, count;

  // Counts differ between the teams of a warp; beyond its own a team stays at the last one.
  __device__ int at(int i) const { return first + min(i, count - 1) * step; }
};

// As Axis::keys and Axis::queries, without divisions and bisections where every query has a window
// of its own (stride 1).
__device__ inline Interval keys_of(const Axis& axis, int i, int n) {
  if (axis.clip || axis.stride > 1) {
    return axis.keys(i, n);
  }
  const int w = axis.window;
  if (axis.causal) {
    return {max(i - w + 1, 0), i + 1};
  }
  const int start = min(max(i - w / 2, 0), n - w);
  return {start, start + w};
}

__device__ inline Interval queries_of(const Axis& axis, int j, int n) {
  if (axis.stride > 1) {
    return axis.queries(j, n);
  }
  const int w = axis.window, half = w / 2;
  if (axis.clip) {
    return {axis.causal ? j : max(j - half, 0), j + 1 + min(half, n - 1 - j)};
  }
  if (axis.causal) {
    return {j, j + min(w, n - j)};
  }
  return {j < w ? 0 : j - w + 1 + half, j >= n - w ? n : j + 1 + half};
}

// The largest over the warp.
__device__ inline int largest(int x) { return __reduce_max_sync(kEverybody, x); }

// Rows along the last axis, `step` bytes from one position of a dilation group to the next.
struct Line {
  char* data;
  int step;  // the table's rows ask for less than 2^31

  __device__ char* row(int position) const { return data + int64(position) * step; }
  __device__ float& number(int position) const { return *reinterpret_cast<float*>(row(position)); }
  __device__ float2& pair(int position) const { return *reinterpret_cast<float2*>(row(position)); }
};

// The run of a team, and what its tokens are related to.
template <class Config, bool kInverse>
struct Run {
  using T = typename Config::T;
  using Me = Member<Config>;

  int64 batch;
  int at[2];        // on the outer axes
  int head;         // of q, or of k where kInverse
  int group;        // position i of the dilation group is token group + i * kDilation
  int first, n;     // the run starts at position `first`; the group has n
  bool exists;
  Steps outer[2];
  Interval own;     // on the last axis, of the lane's own token
  Interval all;     // of all tokens of the run

  __device__ explicit Run(const NeighborhoodParams& p, const Me& me) {
    constexpr int kTeams = Config::kThreads / Config::kLanes;
    constexpr unsigned kStep = Config::kDilation, kHeads = Config::kHeads;
    constexpr unsigned kTiles = Config::kHeadTiles;
    const unsigned longest = (p.space[2] - 1) / kStep + 1;
    const unsigned runs = (longest + Me::kRun - 1) / Me::kRun;
    const unsigned rows = unsigned(p.batch) * p.space[0] * p.space[1];
    const unsigned mine = blockIdx.x * kTeams + threadIdx.x / Config::kLanes;
    exists = mine < rows * runs * (kStep * kHeads * kTiles);  // below 2^31: the table's rows ask

    // Fastest are kHeads heads, so that a warp reads long pieces of a token; then the runs of a
    // group, which share what they read; then groups, the other heads, the outer axes.
    unsigned rest = exists ? mine : 0;
    head = rest % kHeads;
    rest /= kHeads;
    first = rest % runs * Me::kRun;
    rest /= runs;
    group = rest % kStep;
    rest /= kStep;
    head += rest % kTiles * kHeads;
    rest /= kTiles;
    at[0] = at[1] = 0;
    if constexpr (Config::kOuter) {
      at[1] = rest % p.space[1];
      rest /= p.space[1];
      at[0] = rest % p.space[0];
      rest /= p.space[0];
    }
    batch = rest;
    n = longest - (group + (longest - 1) * kStep >= unsigned(p.space[2]));
    if (first >= n) {  // groups differ by one token: it may have been the run's, or the group's
      exists = false;
      first = group = 0;
      n = longest;
    }

    own = related(p, 2, position(me.own), n);
    all = {me.of_token(0, own.start), me.of_token(Me::kRun - 1, own.end)};
    if constexpr (Config::kOuter) {
      for (int a = 0; a < 2; ++a) {
        const int d = p.dilation[a], g = at[a] % d, size = (p.space[a] - g - 1) / d + 1;
        const Interval in = related(p, a, at[a] / d, size);
        outer[a] = {g + in.start * d, d, in.end - in.start};
      }
    } else {
      outer[0] = outer[1] = {0, 1, 1};
    }
  }

  // Beyond its end a run repeats the last token of its group.
  __device__ int position(int token) const { return min(first + token, n - 1); }
  __device__ bool has(int token) const { return exists && first + token < n; }

  // Rows of elements E at a place on the outer axes; statistics are rows of one.
  template <class E = T>
  __device__ Line line(const TokenView& view, int of_head, int at0, int at1) const {
    return {reinterpret_cast<char*>(row_of<E>(view, batch, at0, at1, group, of_head)),
            int(Config::kDilation * view.space[2] * int64(sizeof(E)))};
  }
  // The same from the lane's first vector on.
  __device__ Line line(const TokenView& view, int of_head, int at0, int at1, const Me& me) const {
    const Line whole = line(view, of_head, at0, at1);
    return {whole.data + me.lane * 16, whole.step};
  }

 private:
  __device__ static Interval related(const NeighborhoodParams& p, int axis, int position, int n) {
    const Axis a = axis_of(p, axis);
    return kInverse ? queries_of(a, position, n) : keys_of(a, position, n);
  }
};

// Rows of the run itself, slot by slot.
template <class Config, bool kInverse, int kFeatures>
__device__ void load_run(float (&x)[Config::kRun][kFeatures], const Run<Config, kInverse>& run,
                         const Member<Config>& me, const TokenView& view) {
  const Line line = run.line(view, run.head, run.at[0], run.at[1], me);
  Share<Config> row[Config::kRun];
#pragma unroll
  for (int s = 0; s < Config::kRun; ++s) {
    row[s].load(line.row(run.position(me.token(s))), me);
  }
#pragma unroll
  for (int s = 0; s < Config::kRun; ++s) {
    row[s].widen_to(x[s]);
  }
}

// Times a factor that the owner of each token has.
template <class Config, bool kInverse, int kFeatures>
__device__ void store_run(const float (&x)[Config::kRun][kFeatures],
                          const Run<Config, kInverse>& run, const Member<Config>& me,
                          const TokenView& view, float factor) {
  const Line line = run.line(view, run.head, run.at[0], run.at[1], me);
  const bool aligned = reinterpret_cast<unsigned long long>(view.data) % 16 == 0;
#pragma unroll
  for (int s = 0; s < Config::kRun; ++s) {
    const float f = me.of(s, factor);
    if (run.has(me.token(s))) {
      store_share(line.row(run.position(me.token(s))), me, aligned, x[s], f);
    }
  }
}

// The rows that kAhead positions have in one array, the next ones while these are used.
template <class Config>
struct Stream {
  const Line line;
  Share<Config> row[Config::kAhead];

  // Beyond `last` that row again.
  __device__ void load(int c, int position, int last, const Member<Config>& me) {
    row[c].load(line.row(min(position, last)), me);
  }
  __device__ void load(int first, int last, const Member<Config>& me) {
#pragma unroll
    for (int c = 0; c < Config::kAhead; ++c) {
      load(c, first + c, last, me);
    }
  }
};

// kAhead neighbouring positions on the last axis, at a place on the outer axes.
template <class Config>
struct Step {
  int first, last;  // `last` is the run's last position, which may be far
  int start;        // of the interval of the lane's own token, which has `count`
  unsigned count;
  int number;       // of this step and those before it, in positions
  const Member<Config>& me;

  __device__ bool inside(int c) const { return unsigned(first + c - start) < count; }
  __device__ void fetch_next(Stream<Config>& stream) const {
    if (first + Config::kAhead <= last) {
      stream.load(first + Config::kAhead, last, me);
    }
  }
  __device__ void fetch_next(Stream<Config>& stream, int c) const {
    if (first + Config::kAhead <= last) {
      stream.load(c, first + Config::kAhead + c, last, me);
    }
  }
};

// Go over all positions that a run is related to: visit(step, rows of a, rows of b, place), which
// fetches the next rows of either array when it has no more use for these.
template <class Config, bool kInverse, class Visit>
__device__ void walk(const Run<Config, kInverse>& run, const Member<Config>& me,
                     const TokenView& a_view, const TokenView& b_view, int of_head, Visit visit) {
  const int last = run.all.end - 1, trips = largest(run.all.end - run.all.start);
  const int rows0 = Config::kOuter ? largest(run.outer[0].count) : 1;
  const int rows1 = Config::kOuter ? largest(run.outer[1].count) : 1;
  int number = 0, i0 = 0, i1 = 0;
#pragma unroll 1
  for (int row = rows0 * rows1; row > 0; --row) {
    const int place[2] = {run.outer[0].at(i0), run.outer[1].at(i1)};
    const bool here = i0 < run.outer[0].count && i1 < run.outer[1].count;
    const unsigned count = here ? run.own.end - run.own.start : 0;
    Stream<Config> a = {run.line(a_view, of_head, place[0], place[1], me)};
    Stream<Config> b = {run.line(b_view, of_head, place[0], place[1], me)};
    a.load(run.all.start, last, me);
    b.load(run.all.start, last, me);
#pragma unroll 1
    for (int u = 0; u < trips; u += Config::kAhead, number += Config::kAhead) {
      visit(Step<Config>{run.all.start + u, last, run.own.start, count, number, me}, a, b, place);
    }
    if (++i1 == rows1) {
      i1 = 0;
      ++i0;
    }
  }
}
