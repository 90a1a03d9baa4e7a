// neighborhood_box.cuh: boxes of query positions, the boxes of keys that they see, and copies of
// these in shared memory.
//
// A block has a box of kBox0 x kBox1 x kBox2 query positions of one dilation group. Starts and ends
// of windows never fall as positions grow, so the keys of all are a box too, from the start of the
// first query to the end of the last. It is laid out in lines of kReach2 positions, of which
// kReach1 make a plane, whatever it has at a border: divisions are by constants.
#pragma once
#include "common/mma.cuh"
#include "common/token.cuh"
#include "common/window.cuh"

constexpr unsigned kEverybody = 0xffffffffu;

// Copy 16 bytes to shared memory, or as many zeros where `bytes` is 0.
__device__ inline void copy_async(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ inline void copies_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most kGroups groups of copies are on their way.
template <int kGroups>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kGroups) : "memory");
}

// What Config says, and what follows from it.
template <class Config>
struct Tile {
  using T = typename Config::T;
  static constexpr int kDim = Config::kDim, kRank = Config::kRank, kKeys = Config::kKeys;
  static constexpr int kParts = kDim / 8;  // of 16 bytes
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kQueries = Config::kThreads / 2;  // 16 a warp
  static_assert(kDim % 16 == 0 && kKeys % 16 == 0, "whole fragments");

  // Axes before `kFirst` have one position.
  static constexpr int kFirst = 3 - kRank;
  __device__ static constexpr int box(int a) {
    return a == 0 ? Config::kBox0 : a == 1 ? Config::kBox1 : Config::kBox2;
  }
  __device__ static constexpr int reach(int a) {
    return a == 0 ? Config::kReach0 : a == 1 ? Config::kReach1 : Config::kReach2;
  }
  __device__ static constexpr int dilation(int a) {
    return a == 0 ? Config::kDilation0 : a == 1 ? Config::kDilation1 : Config::kDilation2;
  }
  __device__ static constexpr Axis axis(int a) {
    return {a == 0   ? Config::kWindow0
            : a == 1 ? Config::kWindow1
                     : Config::kWindow2,
            a == 0   ? Config::kStride0
            : a == 1 ? Config::kStride1
                     : Config::kStride2,
            (a == 0   ? Config::kCausal0
             : a == 1 ? Config::kCausal1
                      : Config::kCausal2) != 0,
            Config::kClip};
  }
  static_assert(Config::kBox0 * Config::kBox1 * Config::kBox2 == kQueries, "16 queries a warp");

  // Where a query is in the box.
  __device__ static constexpr int offset(int query, int a) {
    return a == 2   ? query % Config::kBox2
           : a == 1 ? query / Config::kBox2 % Config::kBox1
                    : query / (Config::kBox2 * Config::kBox1);
  }

  // Rows in shared memory lie one after the other, their parts exchanged such that the same part of
  // any 8 neighbouring rows is in 8 different groups of banks.
  static constexpr int kSame = kParts % 8 == 0 ? 8 : kParts % 4 == 0 ? 4 : 2;
  __device__ static constexpr int swizzle(int row) { return row / (8 / kSame) % kSame; }
  __device__ static constexpr int place(int row, int part) {
    return row * kRowBytes + (part ^ swizzle(row)) * 16;
  }
  // From the address of part 0 or 1 of a row to that of the part 2 * i further. Parts are exchanged
  // among kSame neighbours, and rows begin at multiples of as many.
  __device__ static constexpr unsigned further(unsigned address, int i) {
    constexpr int kPairs = kSame / 2;
    return (address ^ (i % kPairs * 32)) + i / kPairs * kPairs * 32;
  }
};

// The part of an axis that a block deals with.
struct Along {
  int group;         // position i is token group + i * dilation
  int n;             // positions of the group
  int first, left;   // of the queries: the first one, and how many may follow it
  int start, count;  // of the keys
};

// A block's queries and keys.
template <class Config>
struct Work {
  using Map = Tile<Config>;

  unsigned batch, head;
  bool exists = true;  // groups differ by one position, so a block may have none
  Along along[3];

  __device__ explicit Work(const NeighborhoodParams& p) {
    head = blockIdx.x % Config::kHeads;
    batch = blockIdx.z;
    unsigned tile[3] = {0, blockIdx.y, blockIdx.x / Config::kHeads};
    if constexpr (Map::kRank == 3) {
      constexpr unsigned kStep = Map::dilation(0), kBox = Map::box(0);
      const unsigned longest = (p.space[0] - 1) / kStep + 1;
      const unsigned tiles = (longest + kBox - 1) / kBox * kStep;
      batch = blockIdx.z / tiles;
      tile[0] = blockIdx.z - batch * tiles;
    }
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      Along& x = along[a];
      x = {0, 1, 0, 0, 0, 1};
      if (a >= Map::kFirst) {
        const unsigned step = Map::dilation(a);
        x.group = tile[a] % step;
        x.first = tile[a] / step * Map::box(a);
        x.n = (unsigned(p.space[a]) - x.group + step - 1) / step;
        x.left = x.n - 1 - x.first;
        exists = exists && x.left >= 0;
        x.start = Map::axis(a).keys(x.first, x.n).start;
        const int last = min(x.first + Map::box(a), x.n) - 1;
        x.count = Map::axis(a).keys(last, x.n).end - x.start;
      }
    }
  }

  // Where a query is, from the first one on; beyond the end of an axis, at the end.
  __device__ int offset(int query, int a) const {
    return a < Map::kFirst ? 0 : min(Map::offset(query, a), along[a].left);
  }
  __device__ bool has(int query) const {
    bool inside = true;
#pragma unroll
    for (int a = Map::kFirst; a < 3; ++a) {
      inside = inside && Map::offset(query, a) <= along[a].left;
    }
    return inside;
  }
  __device__ Token token(int query) const {
    Token t = {batch, {0, 0, 0}, int(head)};
#pragma unroll
    for (int a = Map::kFirst; a < 3; ++a) {
      t.at[a] = along[a].group + (along[a].first + offset(query, a)) * Map::dilation(a);
    }
    return t;
  }
  // The keys of a query, counted from the box's first.
  __device__ Interval keys(int query, int a) const {
    const Along& x = along[a];
    const Interval in = Map::axis(a).keys(x.first + offset(query, a), x.n);
    return {in.start - x.start, in.end - x.start};
  }
};

// Rows of an array at the positions of a box.
template <class Config>
struct Rows {
  using Map = Tile<Config>;
  char* data;   // of the box's first position
  int step[3];  // bytes from one position to the next

  __device__ Rows(const TokenView& view, const Work<Config>& work, unsigned head, bool of_keys,
                  int size) {
    // Products of a factor below 2^32 and a stride.
    int64 at = int64(work.batch) * view.batch + int64(head) * view.head;
#pragma unroll
    for (int a = Map::kFirst; a < 3; ++a) {
      const Along& x = work.along[a];
      const unsigned first = of_keys ? x.start : x.first;
      at += int64(x.group + first * Map::dilation(a)) * view.space[a];
      step[a] = int(Map::dilation(a) * int(view.space[a])) * size;
    }
    data = static_cast<char*>(view.data) + at * size;
  }

  // The table's rows ask that a box is less than 2^31 bytes long.
  __device__ char* row(int i0, int i1, int i2) const {
    int offset = i2 * step[2];
    if constexpr (Map::kRank > 1) {
      offset += i1 * step[1];
    }
    if constexpr (Map::kRank > 2) {
      offset += i0 * step[0];
    }
    return data + offset;
  }
};

// Which keys of a chunk a query sees, in the form in which that is asked key by key; `code` says
// where a key is.
//   rank 1           the key's number
//   kBits            a bit for the position on each axis, on the first one counted from the chunk's
//                    first row; the query has those that it does not see
//   otherwise        fields of positions; sums with the query's ends set a field's high bit outside
template <class Config>
struct Sight {
  using Map = Tile<Config>;
  static constexpr int kRank = Map::kRank;
  // Bits of the inner axes, and positions that a chunk has on the first one.
  static constexpr int kInner = Config::kReach2 + (kRank == 3 ? Config::kReach1 : 0);
  static constexpr int kPitch = Config::kReach2 * (kRank == 3 ? Config::kReach1 : 1);
  static constexpr int kSpan = (Map::kKeys + kPitch - 2) / kPitch + 1;
  static constexpr int kOuter = kSpan < Map::reach(Map::kFirst) ? kSpan : Map::reach(Map::kFirst);
  static_assert(!Config::kBits || kInner + kOuter <= 31, "and one bit that no query sees");

  static constexpr int kField = kRank == 2 ? 16 : 10;
  static constexpr unsigned kOnes = kRank == 2 ? 0x10001u : 0x100401u;
  static constexpr unsigned kHigh = kOnes << (kField - 1);

  unsigned a, b;

  // Of row `row` of the box in the chunk that begins with row `first`. On the first axis the
  // position may lie beyond the box.
  __device__ static unsigned code(int row, int first) {
    const int lines = unsigned(row) / Config::kReach2, i2 = row - lines * Config::kReach2;
    const int planes = kRank == 3 ? unsigned(lines) / Config::kReach1 : 0;
    const int i1 = lines - planes * Config::kReach1;
    if constexpr (Config::kBits) {
      const int outer = (kRank == 3 ? planes : lines) - unsigned(first) / kPitch;
      const unsigned inner = 1u << i2 | (kRank == 3 ? 1u << (Config::kReach2 + i1) : 0);
      return inner | 1u << (kInner + min(outer, kOuter));
    } else {
      return fields(planes, kRank == 3 ? i1 : lines, i2);
    }
  }

  __device__ Sight(const Interval (&in)[3], int first) {
    if constexpr (kRank == 1) {
      a = in[2].start;
      b = in[2].end - in[2].start;
    } else if constexpr (Config::kBits) {
      const Interval& x = in[Map::kFirst];
      const int origin = unsigned(first) / kPitch;
      const int start = min(max(x.start - origin, 0), kOuter);
      const int end = min(max(x.end - origin, 0), kOuter);
      unsigned seen = bits({start, end}) << kInner | bits(in[2]);
      if constexpr (kRank == 3) {
        seen |= bits(in[1]) << Config::kReach2;
      }
      a = ~seen;
      b = 0;
    } else {
      a = kHigh + fields(in[0].start, in[1].start, in[2].start) - kOnes;
      b = kHigh - fields(in[0].end, in[1].end, in[2].end);
    }
  }

  // That of another lane.
  __device__ Sight of(int lane) const {
    Sight x = *this;
    x.a = __shfl_sync(kEverybody, a, lane);
    if constexpr (!Config::kBits) {
      x.b = __shfl_sync(kEverybody, b, lane);
    }
    return x;
  }

  __device__ bool sees(unsigned code) const {
    if constexpr (kRank == 1) {
      return code - a < b;
    } else if constexpr (Config::kBits) {
      return (code & a) == 0;
    } else {
      return (((a - code) | (b + code)) & kHigh) == 0;
    }
  }

 private:
  __device__ static unsigned bits(const Interval& in) {
    return ((1u << (in.end - in.start)) - 1) << in.start;
  }
  __device__ static unsigned fields(int i0, int i1, int i2) {
    const unsigned x = i2 | i1 << kField;
    return kRank == 3 ? x | i0 << 2 * kField : x;
  }
};
