// neighborhood_hopper.cuh: boxes of positions that a block owns one after the other and that it
// walks, for sm_90a kernels of neighborhood attention.
//
// A tile is kRows positions of a dilation group: Config::kOwn{T,H,W}, 64 for each of
// Config::kGroups warpgroups, whose 64 are a box too. It walks boxes of kSeen{T,H,W} positions: the
// keys that its queries see or, Config::kInverse, the queries that see its keys. The first box
// starts where the intervals of the first position start, whatever the coordinate; the others
// follow until those of the last end. Ends of intervals never fall as positions grow, so this is
// the union.
//
// A block, one of Config::kBlocks a multiprocessor, stays for all its tiles. Two plans say where it
// works: a warp writes that of the next tile while this one is computed, and the tile's own positions
// and the boxes that it walks are asked for as soon as there is room, so that the warpgroups that
// compute go on without a pause.
#pragma once
#include "common/mma.cuh"
#include "common/params.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "common/window.cuh"

// x, which the compiler takes for another number: what depends on it is not kept in registers.
template <class I>
__device__ inline I again(I x) {
  asm volatile("" : "+r"(x));
  return x;
}

// How kCount features of a position lie in shared memory, padded with zeros: blocks of 64 features,
// or of 32 where these are fewer numbers, [block][position][kRow bytes], swizzled.
template <int kCount>
struct FeatureBlocks {
  static constexpr int kAll = kCount <= 128 ? (kCount + 31) / 32 * 32 : (kCount + 63) / 64 * 64;
  static constexpr bool kPadded = kAll != kCount;
  static constexpr int kBlock = kAll % 64 == 0 ? 64 : 32;
  static constexpr int kRow = kBlock * 2;
  static constexpr int kBytes = kAll * 2;  // of a position
  static_assert(kCount % 8 == 0, "whole vectors");
};

template <class Config>
struct Boxes {
  using Scored = FeatureBlocks<Config::kDim>;    // of q and k
  using Summed = FeatureBlocks<Config::kValues>;  // of v, y and dy
  static constexpr int kGroups = Config::kGroups;
  static constexpr int kRows = Config::kOwnT * Config::kOwnH * Config::kOwnW;
  static constexpr int kSeen = Config::kSeenT * Config::kSeenH * Config::kSeenW;
  static constexpr int kMost = Scored::kAll > Summed::kAll ? Scored::kAll : Summed::kAll;
  static constexpr int kFirstAxis = 3 - Config::kAxes;  // axes before it have one position
  static constexpr int kWarps = kGroups * 4;            // that compute
  static_assert(kRows == kGroups * 64, "64 rows for each warpgroup");
  static_assert(Config::kThreads > kGroups * 128, "and warps that bring boxes");
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
  int shared_heads;     // query heads of a kv head
  int group[3], n[3];   // of the dilation group; its positions
  int own[3];           // first position
  int first[3];         // of the first box
  int boxes[3];
  int count;            // of all boxes; below 0: there are no more tiles
  // Of the 64 rows of a warpgroup: the interval of positions that some row is related to, and that
  // of those that every row is.
  Interval some[Config::kGroups][3], every[Config::kGroups][3];

  // By all lanes of a warp, one for each axis. Whether there is such a tile in its dilation group,
  // which may be shorter than others.
  __device__ bool set(const NeighborhoodHopperParams& hp, int heads, int tile) {
    const NeighborhoodParams& p = hp.na;
    const int lane = again(int(threadIdx.x % 32)), a = min(lane, 2);
    const int own_box = a == 2 ? Config::kOwnW : a == 1 ? Config::kOwnH : Config::kOwnT;
    const int seen_box = a == 2 ? Config::kSeenW : a == 1 ? Config::kSeenH : Config::kSeenT;
    // Numbers of what lies inside one step along the axis.
    const int plane = hp.tiles[1] * hp.tiles[2], groups = p.dilation[1] * p.dilation[2];
    const int tiles_inside = a == 2 ? 1 : a == 1 ? hp.tiles[2] : plane;
    const int groups_inside = a == 2 ? 1 : a == 1 ? p.dilation[2] : groups;
    const int rest = tile / (plane * hp.tiles[0]), item = rest / (groups * p.dilation[0]);
    const int at = tile / tiles_inside % hp.tiles[a] * own_box;
    const int of_group = rest / groups_inside % p.dilation[a];
    const int length = (p.space[a] - of_group - 1) / p.dilation[a] + 1;
    if (!__all_sync(0xffffffffu, at < length)) {
      return false;
    }
    const Interval of_first = Boxes<Config>::seen(p, a, at, length);
    const Interval of_last = Boxes<Config>::seen(p, a, min(at + own_box, length) - 1, length);
    const int walked = (max(of_last.end - of_first.start, 0) + seen_box - 1) / seen_box;
    const int all = __shfl_sync(0xffffffffu, walked, 0) * __shfl_sync(0xffffffffu, walked, 1) *
                    __shfl_sync(0xffffffffu, walked, 2);
    if (lane < 3) {
      own[a] = at;
      group[a] = of_group;
      n[a] = length;
      first[a] = of_first.start;
      boxes[a] = walked;
    } else if (lane == 3) {
      head = item % heads;
      shared_heads = p.heads / p.kv_heads;
      batch = item / heads;
      count = all;
    }
    __syncwarp();
    return true;
  }

  // By all lanes of a warp, one for each axis and warpgroup.
  __device__ void set_parts(const NeighborhoodParams& p) {
    const int lane = again(int(threadIdx.x % 32)), group = lane / 3, a = lane % 3, row = group * 64;
    if (group < Config::kGroups) {
      // The last row of a box is last on every axis.
      const int from = min(position(a, row), n[a] - 1), to = min(position(a, row + 63), n[a] - 1);
      const Interval of_first = Boxes<Config>::seen(p, a, from, n[a]);
      const Interval of_last = Boxes<Config>::seen(p, a, to, n[a]);
      some[group][a] = {of_first.start, of_last.end};
      every[group][a] = {of_last.start, of_first.end};
    }
  }

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

// An arrival for all lanes of a warp. Where every warp arrives by itself, a stage that is filled
// anew has been seen by all of them: one that came later would wait for ever.
__device__ inline void arrive_by_warp(unsigned barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    barrier_arrive(barrier);
  }
}

// What the rows of a tile are related to, in shared memory: only boxes with masks need it. A thread
// has row0 and row0 + 8.
template <class Config>
struct RowIntervals {
  int start[Config::kAxes][Boxes<Config>::kRows];
  unsigned length[Config::kAxes][Boxes<Config>::kRows];

  // By all lanes of a warp.
  __device__ void set(const NeighborhoodParams& p, const BoxPlace<Config>& place) {
    constexpr int kRows = Boxes<Config>::kRows;
    const int lane = again(int(threadIdx.x % 32));
    for (int line = 0; line < Config::kAxes; ++line) {
      const int a = Boxes<Config>::kFirstAxis + line;
#pragma unroll 2
      for (int row_of_32 = 0; row_of_32 < kRows; row_of_32 += 32) {
        const int row = row_of_32 + lane;
        const int position = min(place.position(a, row), place.n[a] - 1);
        const Interval in = Boxes<Config>::seen(p, a, position, place.n[a]);
        start[line][row] = in.start;
        length[line][row] = in.end - in.start;
      }
    }
  }

  // Scores of the box at `walk` that do not count become -inf.
  __device__ void mask(float (&s)[Boxes<Config>::kSeen / 2], const BoxWalk<Config>& walk,
                       int row0) const {
    constexpr int kFirstAxis = Boxes<Config>::kFirstAxis;
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
      if constexpr (Config::kAxes == 1) {
        mask_line(s, i, -from[2], int(count[2]) - from[2]);
      } else {
        mask_lines(s, i, from, count);
      }
    }
  }

 private:
  __device__ static void mask_lines(float (&s)[Boxes<Config>::kSeen / 2], int i,
                                    const int (&from)[3], const unsigned (&count)[3]) {
    constexpr int kFirstAxis = Boxes<Config>::kFirstAxis;
    constexpr int kPlane = Config::kSeenH * Config::kSeenW;
    const int quad = threadIdx.x % 4;
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

  // On a single line no two columns share a comparison: those that count are bits, of 128 columns
  // at a time, of which a thread has 32.
  __device__ static void mask_line(float (&s)[Boxes<Config>::kSeen / 2], int i, int from, int to) {
    constexpr int kSeen = Boxes<Config>::kSeen;
    unsigned counts[(kSeen + 127) / 128];
#pragma unroll
    for (int at = 0; at < kSeen; at += 128) {
      counts[at / 128] = again(columns_before(to - at) & ~columns_before(from - at));
    }
#pragma unroll
    for (int k = 0; k < kSeen / 4; ++k) {
      float& x = s[k / 2 * 4 + 2 * i + k % 2];
      x = counts[k / 32] & 1u << k % 32 ? x : negative_infinity<float>();
    }
  }
  // Bits for the thread's columns before column x: two of each 8.
  __device__ static unsigned columns_before(int x) {
    const int quad = threadIdx.x % 4;
    const int count = (x >> 3) * 2 + min(max((x & 7) - 2 * quad, 0), 2);
    return count <= 0 ? 0 : count < 32 ? (1u << count) - 1 : 0xffffffffu;
  }
};

template <class Config>
struct BoxPlan {
  BoxPlace<Config> place;
  RowIntervals<Config> rows;
};

// Two plans in shared memory and their barriers: full[2], empty[2].
template <class Config>
struct Plans {
  BoxPlan<Config>* plans;
  unsigned barriers;

  // `memory`: the block's, in which they take what is left.
  __device__ Plans(unsigned char* memory, unsigned at)
      : plans(reinterpret_cast<BoxPlan<Config>*>(
            memory + (at + 4 * 8 - static_cast<unsigned>(__cvta_generic_to_shared(memory))))),
        barriers(at) {
    static_assert(sizeof(BoxPlace<Config>) == 80 + 48 * Config::kGroups,
                  "_memory in configs/neighborhood_hopper.py");
  }

  // `readers`: how often a plan is given back.
  __device__ void init(int readers) const {
    for (int b = 0; b < 2; ++b) {
      barrier_init(barriers + 8 * b, 1);
      barrier_init(barriers + 16 + 8 * b, readers);
    }
  }

  // All plans of the block, by one warp; the last one says that there are no more tiles. Blocks
  // have neighbouring tiles at any time, whose boxes are in L2. From round to round a block moves
  // on among them, or it might meet tiles at borders, which are smaller, in every round or in none.
  // After each, one thread calls visit(plan, number).
  __device__ void write(const NeighborhoodHopperParams& hp, int heads) const {
    write(hp, heads, [](const BoxPlan<Config>&, unsigned) {});
  }
  template <class Visit>
  __device__ void write(const NeighborhoodHopperParams& hp, int heads, Visit visit) const {
    unsigned made = 0;
    for (unsigned round = 0; round * gridDim.x < unsigned(hp.all_tiles); ++round) {
      BoxPlan<Config>& plan = plans[made % 2];
      barrier_wait(barriers + 16 + 8 * (made % 2), (made / 2 & 1) ^ 1);
      const unsigned turn = gridDim.x * 5 / 8 | 1;
      const unsigned tile = round * gridDim.x + (blockIdx.x + round * turn) % gridDim.x;
      if (tile < unsigned(hp.all_tiles) && plan.place.set(hp, heads, int(tile))) {
        plan.place.set_parts(hp.na);
        plan.rows.set(hp.na, plan.place);
        arrive_by_warp(barriers + 8 * (again(made) % 2));
        if (threadIdx.x % 32 == 0) {
          visit(plan, made);
        }
        ++made;
      }
    }
    barrier_wait(barriers + 16 + 8 * (made % 2), (made / 2 & 1) ^ 1);
    if (threadIdx.x % 32 == 0) {
      plans[made % 2].place.count = -1;
    }
    arrive_by_warp(barriers + 8 * (made % 2));
  }

  // Call visit(plan, number) for each tile, by one thread or by all lanes of a warp; then the plan
  // is given back.
  template <class Visit>
  __device__ void for_each(Visit visit) const {
    for (unsigned number = 0;; ++number) {
      const BoxPlan<Config>& plan = read(number);
      if (plan.place.count < 0) {
        return;
      }
      visit(plan, number);
      barrier_arrive(barriers + 16 + 8 * (again(number) % 2));
    }
  }
  template <class Visit>
  __device__ void for_each_by_warp(Visit visit) const {
    for (unsigned number = 0;; ++number) {
      const BoxPlan<Config>& plan = read(number);
      if (plan.place.count < 0) {
        return;
      }
      visit(plan, number);
      arrive_by_warp(barriers + 16 + 8 * (again(number) % 2));
    }
  }

 private:
  __device__ const BoxPlan<Config>& read(unsigned number) const {
    barrier_wait(barriers + 8 * (number % 2), number / 2 & 1);
    return plans[number % 2];
  }
};

// A box of positions of a head. Spare features arrive as zeros: the innermost axis of such a map is
// one head's features.
template <class Layout, int kPositions, class Config>
__device__ inline void load_positions(const NeighborhoodHopperParams& hp, const TensorMap& map,
                                      const BoxPlace<Config>& place, int head, int heads,
                                      bool heads_first, const int (&at)[3], unsigned to,
                                      unsigned full) {
  const NeighborhoodParams& p = hp.na;
  const bool apart = Layout::kPadded && !heads_first;  // heads are an axis
  const int x = heads_first || apart ? 0 : head * Layout::kAll;
  const int outer = int(heads_first ? place.batch * heads + head : place.batch);
  const int last = hp.folded ? at[2] : place.group[2] + at[2] * p.dilation[2];
  const int middle = hp.folded ? place.group[2] : place.group[1] + at[1] * p.dilation[1];
#pragma unroll
  for (int block = 0; block < Layout::kAll / Layout::kBlock; ++block) {
    const unsigned here = to + block * (kPositions * Layout::kRow);
    const int feature = x + block * Layout::kBlock;
    const int first = place.group[0] + at[0] * p.dilation[0];
    if (apart) {
      load_box(here, map, full, feature, head, last, middle, outer * p.space[0] + first);
    } else {
      load_box(here, map, full, feature, last, middle, first, outer);
    }
  }
}

// The 64 rows of a warpgroup.
template <class Layout, class Config>
__device__ inline void load_part(const NeighborhoodHopperParams& hp, const TensorMap& map,
                                 const BoxPlace<Config>& place, int group, int heads,
                                 bool heads_first, unsigned to, unsigned full) {
  const int row = group * 64;
  load_positions<Layout, 64>(hp, map, place, place.head, heads, heads_first,
                               {place.position(0, row), place.position(1, row),
                                place.position(2, row)}, to, full);
}

// The boxes of k and of v that tiles of queries walk, by one thread: each as soon as its stage is
// empty. Barriers, kStages each: full of k, of v; empty of k, of v.
template <class Config>
__device__ inline void load_keys(const NeighborhoodHopperParams& hp, const Plans<Config>& plans,
                                 unsigned k_at, unsigned barriers) {
  using B = Boxes<Config>;
  constexpr int kStages = Config::kStages, kKeys = B::kSeen;
  constexpr unsigned kKBytes = kKeys * B::Scored::kBytes, kVBytes = kKeys * B::Summed::kBytes;
  const unsigned v_at = k_at + kStages * kKBytes;
  const int heads = hp.na.kv_heads;
  unsigned it = 0;  // box of the block
  plans.for_each([&](const BoxPlan<Config>& plan, unsigned) {
    const BoxPlace<Config>& place = plan.place;
    const int head = place.head / place.shared_heads;
    BoxWalk<Config> walk(place);
    for (int i = 0; i < place.count; ++i, ++it, walk.next()) {
      const unsigned stage = it % kStages, parity = (it / kStages & 1) ^ 1;
      const unsigned k_full = barriers + 8 * stage, v_full = k_full + 8 * kStages;
      barrier_wait(k_full + 16 * kStages, parity);
      barrier_expect(k_full, kKBytes);
      load_positions<typename B::Scored, kKeys>(hp, hp.k_map, place, head, heads, hp.k_heads_first,
                                                walk.at, k_at + stage * kKBytes, k_full);
      barrier_wait(v_full + 16 * kStages, parity);
      barrier_expect(v_full, kVBytes);
      load_positions<typename B::Summed, kKeys>(hp, hp.v_map, place, head, heads, hp.v_heads_first,
                                                walk.at, v_at + stage * kVBytes, v_full);
    }
  });
}

// Descriptors of such blocks of positions: of their features, and of kPositions as rows of a sum.
template <class Layout>
__device__ inline unsigned long long features_at(unsigned address) {
  return tile_descriptor<Layout::kRow>(address, 16);
}
template <class Layout, int kPositions>
__device__ inline unsigned long long rows_at(unsigned address) {
  return tile_descriptor<Layout::kRow>(address, kPositions * Layout::kRow);
}

// d (+)= a b^T over kFeatures features: 64 rows of a, kCount * 2 of b, by descriptors.
template <class T, int kFeatures, int kCount>
__device__ inline void multiply_features(float (&d)[kCount], unsigned long long from_a,
                                         unsigned long long from_b) {
  using Layout = FeatureBlocks<kFeatures>;
  constexpr int kSteps = Layout::kBlock / 16;  // of a block
#pragma unroll
  for (int f = 0; f < (kFeatures + 15) / 16; ++f) {
    const int within = f % kSteps * 2;
    multiply_keys<T>(d, from_a + f / kSteps * (64 * Layout::kRow / 16) + within,
                     from_b + f / kSteps * (kCount * 2 * Layout::kRow / 16) + within, f != 0);
  }
}

// d += operands b: kSteps * 16 rows of b, whose features are columns of d.
template <class T, int kSteps, int kCount>
__device__ inline void multiply_seen(float (&d)[kCount], const unsigned (&operands)[kSteps][4],
                                     unsigned long long from) {
  constexpr int kRow = FeatureBlocks<kCount * 2>::kRow;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    multiply_rows<T>(d, operands[k], from + kRow * k, 1);
  }
}

__device__ inline bool is_finite(float x) { return fabsf(x) <= 3.4028235e38f; }

// Row i of a thread's two rows of an accumulator to an array, without spare features; whether it is
// finite. All parts are exchanged before the first is stored: shuffles wait for one another's ends.
template <class T, int kFeatures, int kCount>
__device__ inline bool store_row(T* row, bool has, int i, const float (&d)[kCount]) {
  const int quad = threadIdx.x % 4;
  bool finite = true;
  unsigned w[kCount / 16][4];  // of 8 features in each of the four lanes, which end with one
#pragma unroll
  for (int part = 0; part < kCount / 16; ++part) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float low = d[(part * 4 + k) * 4 + 2 * i];
      const float high = d[(part * 4 + k) * 4 + 2 * i + 1];
      finite = finite && is_finite(low) && is_finite(high);
      w[part][k] = pack<T>(low, high);
    }
  }
#pragma unroll
  for (int part = 0; part < kCount / 16; ++part) {
    transpose_quad(w[part]);
  }
  const bool aligned = reinterpret_cast<unsigned long long>(row) % 16 == 0;
#pragma unroll
  for (int part = 0; part < kCount / 16; ++part) {
    const int feature = part * 32 + quad * 8;
    if (has && (kFeatures == kCount * 2 || feature < kFeatures)) {
      if (aligned) {
        *reinterpret_cast<uint4*>(row + feature) =
            uint4{w[part][0], w[part][1], w[part][2], w[part][3]};
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          row[feature + e].bits = static_cast<unsigned short>(w[part][e / 2] >> e % 2 * 16);
        }
      }
    }
  }
  return finite;
}

// Call visit(token) for each row of the warp, of the two that a thread has a share of, that is `wrong`
// in one of its four lanes; all lanes of the warp are there.
template <class Visit>
__device__ inline void for_each_row(const bool (&wrong)[2], const Token (&mine)[2], Visit visit) {
  unsigned rows[2] = {__ballot_sync(0xffffffffu, wrong[0]), __ballot_sync(0xffffffffu, wrong[1])};
#pragma unroll 1
  while ((rows[0] | rows[1]) != 0) {
    const int i = rows[0] == 0, from = __ffs(i ? rows[1] : rows[0]) - 1;
    (i ? rows[1] : rows[0]) &= ~(0xfu << from / 4 * 4);
    Token token = i ? mine[1] : mine[0];
    for (int a = 0; a < 3; ++a) {
      token.at[a] = __shfl_sync(0xffffffffu, token.at[a], from);
    }
    __syncwarp();
    visit(token);
  }
}
