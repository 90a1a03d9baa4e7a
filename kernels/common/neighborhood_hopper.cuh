// neighborhood_hopper.cuh: boxes of positions that a block owns and that it walks, for sm_90a
// kernels of neighborhood attention.
//
// A block owns kRows positions of a dilation group: Config::kOwn{T,H,W}. It walks boxes of
// kSeen{T,H,W} positions: the keys that its queries see or, Config::kInverse, the queries that see
// its keys. The first box starts where the intervals of the first position start, whatever the
// coordinate; the others follow until those of the last end. Ends of intervals never fall as
// positions grow, so this is the union.
#pragma once
#include "common/mma.cuh"
#include "common/params.cuh"
#include "common/tma.cuh"
#include "common/window.cuh"

template <class Config>
struct Boxes {
  static constexpr int kRows = Config::kOwnT * Config::kOwnH * Config::kOwnW;
  static constexpr int kSeen = Config::kSeenT * Config::kSeenH * Config::kSeenW;
  static constexpr int kRowBytes = kRows * Config::kDim * 2;   // of one array
  static constexpr int kSeenBytes = kSeen * Config::kDim * 2;
  static constexpr int kFirstAxis = 3 - Config::kAxes;  // axes before it have one position
  static_assert(kRows == 128, "two warpgroups of 64 rows; extents are powers of two, and so half "
                              "of a box is a box");
  static_assert(kSeen % 16 == 0, "whole products");
  static_assert(Config::kSeenW % 8 == 0, "8 neighbouring columns are neighbours on the last axis");

  __device__ static Interval seen(const NeighborhoodParams& p, int a, int position, int n) {
    const Axis axis = axis_of(p, a);
    return Config::kInverse ? axis.queries(position, n) : axis.keys(position, n);
  }
};

// Where a block works. Uniform in the block, and kept in shared memory to save registers.
template <class Config>
struct BoxPlace {
  int64 batch;
  int head;             // of those that own
  int group[3], n[3];   // of the dilation group; its positions
  int own[3];           // first position
  int first[3];         // of the first box
  int boxes[3];
  bool exists;
  // Of the 64 rows of a warpgroup: the interval of positions that some row is related to, and that
  // of those that every row is.
  Interval some[2][3], every[2][3];

  __device__ void set(const NeighborhoodHopperParams& hp, int heads) {
    const NeighborhoodParams& p = hp.na;
    const int own_box[3] = {Config::kOwnT, Config::kOwnH, Config::kOwnW};
    const int seen_box[3] = {Config::kSeenT, Config::kSeenH, Config::kSeenW};
    int rest = blockIdx.x;
    exists = true;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      own[a] = rest % hp.tiles[a] * own_box[a];
      rest /= hp.tiles[a];
    }
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      group[a] = rest % p.dilation[a];
      rest /= p.dilation[a];
      n[a] = (p.space[a] - group[a] - 1) / p.dilation[a] + 1;
      exists = exists && own[a] < n[a];
    }
    head = rest % heads;
    batch = rest / heads;
    if (exists) {
#pragma unroll
      for (int a = 0; a < 3; ++a) {
        const Interval of_first = Boxes<Config>::seen(p, a, own[a], n[a]);
        const int last = min(own[a] + own_box[a], n[a]) - 1;
        const Interval of_last = Boxes<Config>::seen(p, a, last, n[a]);
        first[a] = of_first.start;
        boxes[a] = (max(of_last.end - of_first.start, 0) + seen_box[a] - 1) / seen_box[a];
      }
    }
  }

  // By both warpgroups, each with its first row.
  __device__ void set_rows(const NeighborhoodParams& p, int row) {
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      // Rows of a half are a box; its last row is last on every axis.
      const int from = min(position(a, row), n[a] - 1), to = min(position(a, row + 63), n[a] - 1);
      const Interval of_first = Boxes<Config>::seen(p, a, from, n[a]);
      const Interval of_last = Boxes<Config>::seen(p, a, to, n[a]);
      some[row / 64][a] = {of_first.start, of_last.end};
      every[row / 64][a] = {of_last.start, of_first.end};
    }
  }

  __device__ int count() const { return boxes[0] * boxes[1] * boxes[2]; }

  __device__ int position(int axis, int row) const {
    return own[axis] + (axis == 2   ? row % Config::kOwnW
                        : axis == 1 ? row / Config::kOwnW % Config::kOwnH
                                    : row / (Config::kOwnH * Config::kOwnW));
  }

  // The token of a row, and whether there is one; else some token of the group.
  __device__ bool token(const NeighborhoodParams& p, int row, Token& token) const {
    token.batch = batch;
    token.head = head;
    bool has = true;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      has = has && position(a, row) < n[a];
      token.at[a] = group[a] + min(position(a, row), n[a] - 1) * p.dilation[a];
    }
    return has;
  }
};

// The boxes one after the other, last axis fastest, and then again from the first.
template <class Config>
struct BoxWalk {
  const BoxPlace<Config>& place;
  int at[3];

  __device__ explicit BoxWalk(const BoxPlace<Config>& where) : place(where) {
    at[0] = where.first[0];
    at[1] = where.first[1];
    at[2] = where.first[2];
  }

  // Whether it begins again.
  __device__ bool next() {
    const int step[3] = {Config::kSeenT, Config::kSeenH, Config::kSeenW};
    bool carry = true;
#pragma unroll
    for (int a = 2; a >= Boxes<Config>::kFirstAxis; --a) {
      at[a] += carry ? step[a] : 0;
      carry = carry && at[a] >= place.first[a] + place.boxes[a] * step[a];
      at[a] = carry ? place.first[a] : at[a];
    }
    return carry;
  }

  // Whether every row of a warpgroup is related to every position of the box.
  __device__ bool is_inside(int warpgroup) const {
    const int step[3] = {Config::kSeenT, Config::kSeenH, Config::kSeenW};
    bool inside = true;
#pragma unroll
    for (int a = Boxes<Config>::kFirstAxis; a < 3; ++a) {
      const Interval in = place.every[warpgroup][a];
      inside = inside && at[a] >= in.start && at[a] + step[a] <= in.end;
    }
    return inside;
  }

  // Whether no row of a warpgroup is related to any position of the box.
  __device__ bool is_outside(int warpgroup) const {
    const int step[3] = {Config::kSeenT, Config::kSeenH, Config::kSeenW};
    bool outside = false;
#pragma unroll
    for (int a = Boxes<Config>::kFirstAxis; a < 3; ++a) {
      const Interval in = place.some[warpgroup][a];
      outside = outside || at[a] + step[a] <= in.start || at[a] >= in.end;
    }
    return outside;
  }
};

// What the rows of a block are related to, in shared memory: only boxes with masks need it. A
// thread has row0 and row0 + 8 of the block; rows belong to one warp.
template <class Config>
struct RowIntervals {
  int start[Config::kAxes][Boxes<Config>::kRows];
  unsigned length[Config::kAxes][Boxes<Config>::kRows];

  // By all lanes of a warp.
  __device__ void set(const NeighborhoodParams& p, const BoxPlace<Config>& place, int row0) {
    if (threadIdx.x % 4 < 2) {
      const int row = row0 + threadIdx.x % 4 * 8;
#pragma unroll
      for (int a = Boxes<Config>::kFirstAxis; a < 3; ++a) {
        const int position = min(place.position(a, row), place.n[a] - 1);
        const Interval in = Boxes<Config>::seen(p, a, position, place.n[a]);
        start[a - Boxes<Config>::kFirstAxis][row] = in.start;
        length[a - Boxes<Config>::kFirstAxis][row] = in.end - in.start;
      }
    }
    __syncwarp();
  }

  // Scores of the box at `walk` that do not count become -inf.
  __device__ void mask(float (&s)[Boxes<Config>::kSeen / 2], const BoxWalk<Config>& walk,
                       int row0) const {
    constexpr int kFirstAxis = Boxes<Config>::kFirstAxis;
    constexpr int kPlane = Config::kSeenH * Config::kSeenW;
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int from[3];
      unsigned count[3];
#pragma unroll
      for (int a = kFirstAxis; a < 3; ++a) {
        from[a] = walk.at[a] - start[a - kFirstAxis][row0 + 8 * i];
        count[a] = length[a - kFirstAxis][row0 + 8 * i];
        asm volatile("" : "+r"(from[a]));  // or predicates of all columns are kept for both rows
      }
#pragma unroll
      for (int j = 0; j < Boxes<Config>::kSeen / 8; ++j) {
        const int t = j * 8 / kPlane, h = j * 8 / Config::kSeenW % Config::kSeenH,
                  w = j * 8 % Config::kSeenW + 2 * quad;
        bool line = true;
        if (kFirstAxis < 2) {
          line = unsigned(from[1] + h) < count[1];
        }
        if (kFirstAxis < 1) {
          line = line && unsigned(from[0] + t) < count[0];
        }
        float& low = s[j * 4 + 2 * i];
        float& high = s[j * 4 + 2 * i + 1];
        low = line && unsigned(from[2] + w) < count[2] ? low : negative_infinity<float>();
        high = line && unsigned(from[2] + w + 1) < count[2] ? high : negative_infinity<float>();
      }
    }
  }
};

// A box of positions of a head: kDim / 64 blocks of 64 features.
template <class Config, int kPositions>
__device__ inline void load_positions(const NeighborhoodHopperParams& hp, const TensorMap& map,
                                      const BoxPlace<Config>& place, int head, int heads,
                                      bool heads_first, const int (&at)[3], unsigned to,
                                      unsigned full) {
  const NeighborhoodParams& p = hp.na;
  const int x = heads_first ? 0 : head * Config::kDim;
  const int outer = int(heads_first ? place.batch * heads + head : place.batch);
  const int last = hp.folded ? at[2] : place.group[2] + at[2] * p.dilation[2];
  const int middle = hp.folded ? place.group[2] : place.group[1] + at[1] * p.dilation[1];
#pragma unroll
  for (int block = 0; block < Config::kDim / 64; ++block) {
    load_box(to + block * (kPositions * 128), map, full, x + block * 64, last, middle,
             place.group[0] + at[0] * p.dilation[0], outer);
  }
}

__device__ inline bool is_finite(float x) { return fabsf(x) <= 3.4028235e38f; }

// Row i of a thread's two rows of an accumulator to an array; whether it is finite.
template <class T, int kCount>
__device__ inline bool store_row(T* row, bool has, int i, const float (&d)[kCount]) {
  const int quad = threadIdx.x % 4;
  const bool aligned = reinterpret_cast<unsigned long long>(row) % 16 == 0;
  bool finite = true;
#pragma unroll
  for (int block = 0; block < kCount / 4; block += 4) {  // of 8 features; a lane ends with one
    unsigned w[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float low = d[(block + k) * 4 + 2 * i];
      const float high = d[(block + k) * 4 + 2 * i + 1];
      finite = finite && is_finite(low) && is_finite(high);
      w[k] = pack<T>(low, high);
    }
    transpose_quad(w);
    if (has) {
      T* to = row + (block + quad) * 8;
      if (aligned) {
        *reinterpret_cast<uint4*>(to) = uint4{w[0], w[1], w[2], w[3]};
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          to[e].bits = static_cast<unsigned short>(w[e / 2] >> e % 2 * 16);
        }
      }
    }
  }
  return finite;
}

// Call visit(token) for each row of the warp that has `again` set in one of its four lanes; all
// lanes of the warp are there.
template <class Visit>
__device__ inline void for_each_row(bool again, const Token& mine, Visit visit) {
  unsigned rows = __ballot_sync(0xffffffffu, again);
  while (rows != 0) {
    const int from = __ffs(rows) - 1;
    rows &= ~(0xfu << from / 4 * 4);
    Token token = mine;
    for (int a = 0; a < 3; ++a) {
      token.at[a] = __shfl_sync(0xffffffffu, mine.at[a], from);
    }
    __syncwarp();
    visit(token);
  }
}
