// neighborhood_box.cuh: boxes of query positions, the boxes of keys that they see, and copies of
// these in shared memory.
//
// A block has a box of kBox0 x kBox1 x kBox2 query positions of one dilation group. Starts and ends
// of windows never fall as positions grow, so the keys of all are a box too, from the start of the
// first query to the end of the last. It is laid out in lines of kReach2 positions, of which
// kReach1 make a plane, whatever it has at a border: divisions are by constants.
//
// The queries of a key are an interval on each axis whose ends never fall either, so a block may
// have a box of keys as well. Then "query" and "key" change places in all that is said here.
#pragma once
#include "common/mma.cuh"
#include "common/planes.cuh"
#include "common/token.cuh"
#include "common/window.cuh"

constexpr unsigned kEverybody = 0xffffffffu;

// What a block computes: y or dq of its queries, dk and dv of its keys.
enum Role { kForward, kOfQueries, kOfKeys };

// Copy 16 bytes to shared memory, or as many zeros where `bytes` is 0.
__device__ inline void copy_async(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(to), "l"(from), "r"(bytes)
               : "memory");
}
// 8 bytes.
__device__ inline void copy_pair_async(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
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
  static constexpr int kSize = sizeof(T);
  static constexpr int kRowBytes = kDim * kSize;
  static constexpr int kParts = kRowBytes / 16;
  static constexpr int kQueries = Config::kThreads / 2;  // 16 a warp
  static_assert(kDim % (kSize == 4 ? 32 : 16) == 0 && kKeys % 16 == 0, "whole fragments");

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
template <class Config, Role kRole = kForward>
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
        x.start = related(x.first, a).start;
        const int last = min(x.first + Map::box(a), x.n) - 1;
        x.count = related(last, a).end - x.start;
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
    const Interval in = related(x.first + offset(query, a), a);
    return {in.start - x.start, in.end - x.start};
  }

 private:
  __device__ Interval related(int position, int a) const {
    const Axis axis = Map::axis(a);
    return kRole == kOfKeys ? axis.queries(position, along[a].n) : axis.keys(position, along[a].n);
  }
};

// Rows of an array at the positions of a box.
template <class Config>
struct Rows {
  using Map = Tile<Config>;
  char* data;   // of the box's first position
  int step[3];  // bytes from one position to the next

  template <Role kRole>
  __device__ Rows(const TokenView& view, const Work<Config, kRole>& work, unsigned head,
                  bool of_keys, int size = Map::kSize) {
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

// The part of shared memory that a block uses, from `base` on: the queries' rows (of q; q and dy; k
// and v), later those of results; then kStages chunks of kKeys rows of k, of v, and of the keys'
// codes. Those of queries that a block of keys meets: of q, of dy, of two numbers, and codes.
template <class Config, Role kRole = kForward>
struct Shared {
  using Map = Tile<Config>;
  static constexpr int kChunk = Map::kKeys * Map::kRowBytes;
  static constexpr int kOwn = Map::kQueries * Map::kRowBytes;  // of one array
  static constexpr int kRows = (kRole == kForward ? 1 : 2) * kOwn;
  static constexpr int kNumbers = Map::kSize == 4 ? 16 : 8;  // of a query, bytes
  unsigned base;

  __device__ unsigned q() const { return base; }
  __device__ unsigned k(int stage) const { return base + kRows + stage * 2 * kChunk; }
  // From the base.
  __device__ static constexpr int numbers(int stage) {
    return kRows + Config::kStages * 2 * kChunk + stage * Map::kKeys * kNumbers;
  }
  __device__ static constexpr int codes(int stage) {
    return numbers(kRole == kOfKeys ? Config::kStages : 0) + stage * Map::kKeys * 4;
  }
};

// Whether float32 numbers are rounded to TF32 when they have arrived.
template <class Config>
__device__ constexpr bool rounds() {
  if constexpr (sizeof(typename Config::T) == 4) {
    return Config::kTf32;
  } else {
    return false;
  }
}
// Round 16 bytes where they are.
__device__ inline void round_shared(unsigned address) {
  unsigned x[4];
  load_shared(x, address);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = round_tf32(__uint_as_float(x[i]));
  }
  store_shared(address, x);
}

// Start copies of the queries' rows; beyond the end of an axis those at the end.
template <class Config, Role kRole>
__device__ void copy_queries(unsigned to, const Work<Config, kRole>& work, const Rows<Config>& q) {
  using Map = Tile<Config>;
  constexpr int kPieces = Map::kQueries * Map::kParts;
#pragma unroll
  for (int i = 0; i < kPieces; i += Config::kThreads) {
    const int piece = i + threadIdx.x, query = piece / Map::kParts, part = piece % Map::kParts;
    const char* row = q.row(work.offset(query, 0), work.offset(query, 1), work.offset(query, 2));
    copy_async(to + Map::place(query, part), row + part * 16, 16);
  }
}
// Round them, each thread what it has copied, once that has arrived.
template <class Config>
__device__ void round_queries(unsigned to) {
  using Map = Tile<Config>;
#pragma unroll
  for (int i = 0; i < Map::kQueries * Map::kParts; i += Config::kThreads) {
    const int piece = i + threadIdx.x;
    round_shared(to + Map::place(piece / Map::kParts, piece % Map::kParts));
  }
}

// Chunks of keys on their way to shared memory, those of each further head after one another.
template <class Config, Role kRole = kForward>
struct Stream {
  using Map = Tile<Config>;
  static constexpr int kTurns = kRole == kOfKeys ? Config::kShared : 1;
  static constexpr int kKeys = Map::kKeys, kStages = Config::kStages;
  static constexpr int kPass = Config::kThreads / Map::kParts;  // rows that a block copies at once
  static constexpr int kPasses = (kKeys + kPass - 1) / kPass;

  const NeighborhoodParams& p;
  const Work<Config, kRole>& work;
  Shared<Config, kRole> shared;
  char* memory;
  int total;  // rows of the box
  int line;   // the thread's first row of a pass
  int part;
  Rows<Config> k, v;

  __device__ static const TokenView& view(const NeighborhoodParams& p, bool second) {
    return kRole == kOfKeys ? (second ? p.dy : p.q) : second ? p.v : p.k;
  }
  __device__ static unsigned head(const Work<Config, kRole>& work) {
    return kRole == kOfKeys ? work.head * Config::kShared : work.head / Config::kShared;
  }

  __device__ Stream(const NeighborhoodParams& p, const Work<Config, kRole>& work, char* memory)
      : p(p),
        work(work),
        shared{shared_address(memory)},
        memory(memory),
        line(threadIdx.x / Map::kParts),
        part(threadIdx.x % Map::kParts),
        k(view(p, false), work, head(work), true),
        v(k) {
    if constexpr (Config::kAlike) {
      v.data = static_cast<char*>(view(p, true).data) +
               (k.data - static_cast<char*>(view(p, false).data));
    } else {
      v = Rows<Config>(view(p, true), work, head(work), true);
    }
    k.data += part * 16;
    v.data += part * 16;
    int lines = 0;
    if constexpr (Map::kRank > 2) {
      lines = (work.along[0].count - 1) * Config::kReach1;
    }
    if constexpr (Map::kRank > 1) {
      lines += work.along[1].count - 1;
    }
    total = lines * Config::kReach2 + work.along[2].count;
  }

  __device__ int turn() const { return kStages == 1 ? 1 : (total + kKeys - 1) / kKeys; }
  __device__ int chunks() const { return kTurns * turn(); }
  // The first row of chunk `n`.
  __device__ int first(int n) const { return (kTurns == 1 ? n : n % unsigned(turn())) * kKeys; }

  // Bytes from one row of the box to the next, and what the first of a line or a plane has more.
  struct Pitch {
    int row, line, plane;

    __device__ explicit Pitch(const Rows<Config>& x)
        : row(x.step[2]),
          line(Map::kRank > 1 ? x.step[1] - Config::kReach2 * x.step[2] : 0),
          plane(Map::kRank > 2 ? x.step[0] - Config::kReach1 * x.step[1] : 0) {}
    __device__ int of(int rows, int lines, int planes) const {
      int offset = rows * row;
      offset += Map::kRank > 1 ? lines * line : 0;
      return Map::kRank > 2 ? offset + planes * plane : offset;
    }
  };

  __device__ bool exists(int at, int lines, int planes) const {
    bool inside = at - lines * Config::kReach2 < work.along[2].count;
    if constexpr (Map::kRank > 1) {
      inside = inside && lines - planes * Config::kReach1 < work.along[1].count;
    }
    if constexpr (Map::kRank > 2) {
      inside = inside && planes < work.along[0].count;
    }
    return inside;
  }

  // Start copies of chunk `n`, with zeros for rows that have no key.
  __device__ void copy(int n) const {
    const int first = this->first(n), stage = kStages == 1 ? 0 : n % kStages;
    const unsigned to = shared.k(stage) + Map::place(line, part);
    const Pitch k_pitch(k), v_pitch(v);
    int64 more_k = 0, more_v = 0;
    const unsigned head = kTurns == 1 ? 0 : n / unsigned(turn());
    if constexpr (kTurns > 1) {
      more_k = head * view(p, false).head * Map::kSize;
      more_v = head * view(p, true).head * Map::kSize;
    }
    if (kPass * Map::kParts == Config::kThreads || line < kPass) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int row = line + i * kPass;
        if ((i + 1) * kPass <= kKeys || row < kKeys) {
          const int at = first + row, lines = Map::kRank > 1 ? unsigned(at) / Config::kReach2 : 0;
          const int planes = Map::kRank > 2 ? unsigned(lines) / Config::kReach1 : 0;
          const int bytes = exists(at, lines, planes) ? 16 : 0;
          const unsigned into = kPass % 8 == 0 ? to + i * kPass * Map::kRowBytes
                                               : shared.k(stage) + Map::place(row, part);
          const int k_at = k_pitch.of(at, lines, planes);
          const int v_at = Config::kAlike ? k_at : v_pitch.of(at, lines, planes);
          copy_async(into, k.data + more_k + k_at, bytes);
          copy_async(into + shared.kChunk, v.data + more_v + v_at, bytes);
        }
      }
    }
    if constexpr (kRole == kOfKeys) {
      const Rows<Config> numbers(p.delta, work, this->head(work) + head, true, 4);
      const Pitch pitch(numbers);
#pragma unroll
      for (int i = 0; i < kKeys; i += Config::kThreads) {
        const int row = i + threadIdx.x;
        if (row < kKeys) {
          const int at = first + row, lines = Map::kRank > 1 ? unsigned(at) / Config::kReach2 : 0;
          const int planes = Map::kRank > 2 ? unsigned(lines) / Config::kReach1 : 0;
          const unsigned into = shared.base + shared.numbers(stage) + row * shared.kNumbers;
          const char* from = numbers.data + pitch.of(at, lines, planes);
          const int bytes = exists(at, lines, planes) ? shared.kNumbers : 0;
          if constexpr (Map::kSize == 4) {
            copy_async(into, from, bytes);
          } else {
            copy_pair_async(into, from, bytes);
          }
        }
      }
    }
    if constexpr (Map::kRank > 1) {
      unsigned* codes = reinterpret_cast<unsigned*>(memory + shared.codes(stage));
#pragma unroll
      for (int i = 0; i < kKeys; i += Config::kThreads) {
        const int row = i + threadIdx.x;
        if (row < kKeys) {
          codes[row] = Sight<Config>::code(first + row, first);
        }
      }
    }
  }
  // Round what this thread has copied of chunk `n`, once that has arrived.
  __device__ void round(int n) const {
    const int stage = kStages == 1 ? 0 : n % kStages;
    if (kPass * Map::kParts == Config::kThreads || line < kPass) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int row = line + i * kPass;
        if ((i + 1) * kPass <= kKeys || row < kKeys) {
          const unsigned at = shared.k(stage) + Map::place(row, part);
          round_shared(at);
          round_shared(at + shared.kChunk);
        }
      }
    }
  }
};

// Sums on their way to being a left factor: of each tile of 8 columns, a lane's two neighbours in
// rows g and g + 8. 16-bit: rounded, in a register.
template <class T, int kTiles>
struct LeftFactor {
  unsigned x[kTiles][2];
  __device__ void set(int t, int h, float low, float high) { x[t][h] = pack<T>(low, high); }
};
template <int kTiles>
struct LeftFactor<float, kTiles> {
  float x[kTiles][4];
  __device__ void set(int t, int h, float low, float high) {
    x[t][2 * h] = low;
    x[t][2 * h + 1] = high;
  }
};

// Write a warp's 16 rows by way of shared memory, where its queries were: these begin at `memory`.
template <class Config, Role kRole>
__device__ void store_rows(char* memory, const Work<Config, kRole>& work, const Rows<Config>& to,
                           const float (&x)[Config::kDim / 8][4]) {
  using Map = Tile<Config>;
  using T = typename Config::T;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
  char* rows = memory + warp * 16 * Map::kRowBytes;
  if constexpr (Map::kSize == 4) {
#pragma unroll
    for (int i = 0; i < Map::kDim / 32; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // of features as in neighborhood_tf32.cuh
        *reinterpret_cast<float4*>(rows + Map::place(g + e / 2 * 8, 8 * i + 2 * q + e % 2)) =
            float4{x[4 * i][e], x[4 * i + 1][e], x[4 * i + 2][e], x[4 * i + 3][e]};
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < Map::kDim / 8; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<unsigned*>(rows + Map::place(g + 8 * h, i) + 4 * q) =
            pack<T>(x[i][2 * h], x[i][2 * h + 1]);
      }
    }
  }
  __syncwarp();  // rows are complete
  const bool aligned = reinterpret_cast<unsigned long long>(to.data) % 16 == 0;
#pragma unroll
  for (int i = 0; i < Map::kParts / 2; ++i) {
    const int number = i * 32 + lane, row = number / Map::kParts, part = number % Map::kParts;
    const int query = warp * 16 + row;
    if (work.has(query)) {
      const uint4 piece = *reinterpret_cast<const uint4*>(rows + Map::place(row, part));
      char* at = to.row(Map::offset(query, 0), Map::offset(query, 1), Map::offset(query, 2)) +
                 part * 16;
      if (aligned) {
        *reinterpret_cast<uint4*>(at) = piece;
      } else {
        const unsigned word[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          reinterpret_cast<unsigned short*>(at)[e] =
              static_cast<unsigned short>(word[e / 2] >> (e % 2 * 16));
        }
      }
    }
  }
}
