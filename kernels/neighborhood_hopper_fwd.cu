// neighborhood_hopper_fwd.cu: neighborhood attention, forward, by TMA and warpgroup products (sm_90a).
//
//   s[j] = scale * <q, k[j]>  for j in window(query)
//   y    = sum_j softmax(s)[j] v[j]         lse = log sum_j exp s[j]
//
// Shapes    as in neighborhood_fwd.cu, 16-bit, value_dim = head_dim = kDim
// Grid      x: query boxes of a dilation group, last axis fastest; then groups, heads, batch: blocks that
//           run together have neighbouring queries of one head, whose keys are in L2
// Block     one warpgroup whose first thread asks for boxes, two that own 64 queries each
// Tile map  128 queries, a box of kQuery[3] positions; keys in boxes of kKey[3], 96 to 160 in all. The first key
//           box starts where the windows of the query box start, whatever the coordinate, the others
//           follow until the windows end. A box of positions of a dilation group is a strided box of
//           tokens, which the copy engine takes: nothing is permuted
//
//                 keys              shared memory: q, and kStages of k and of v, each in blocks of
//               +---------+         64 features: [kDim / 64][positions][128 bytes], swizzled
//    queries 64 | s, p    |         registers of a warpgroup: s 64 x keys, o 64 x kDim, p as 16-bit
//               +---------+
//
// Pipeline  producer  empty -> ask for k, v -> full
//           consumer  s(i) = q k(i)^T  and  o += p(i - 1) v(i - 1)  are issued together; the softmax of
//                     s(i) runs while the second product does, and under the other warpgroup's
//                     products: the two take turns to ask for theirs
// Masks     a key box that lies inside every window of the query box needs none. Otherwise a score counts
//           where the key's position is in [start, end) of the query on each axis
// Not finite  a NaN beside the window would reach o by 0 * NaN: rows that are not finite are computed
//           again, key by key
// Limits    sm_90a; strides in 16 bytes
#include "common/features.cuh"
#include "common/mma.cuh"
#include "common/params.cuh"
#include "common/softmax.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "common/window.cuh"

template <class Config>
struct HopperTile {
  static constexpr int kRows = 128;
  static constexpr int kKeys = Config::kKeyT * Config::kKeyH * Config::kKeyW;
  static constexpr int kQueryBytes = kRows * Config::kDim * 2;
  static constexpr int kKeyBytes = kKeys * Config::kDim * 2;  // of a k, of a v
  static_assert(Config::kQueryT * Config::kQueryH * Config::kQueryW == kRows, "128 queries");
  static_assert(kKeys % 16 == 0, "whole products of weights and values");
  static_assert(Config::kKeyW % 8 == 0, "8 neighbouring columns are neighbours on the last axis");
};

// Where a block works. Uniform in the block, and kept in shared memory to save registers.
template <class Config>
struct HopperPlace {
  int64 batch;
  int head, kv_head;
  int group[3], n[3];  // of the dilation group; its positions
  int query[3];        // first position
  int first[3];        // first position of the first key box
  int boxes[3];        // key boxes
  int low[3], high[3]; // positions that every query of the box sees
  bool exists;

  __device__ void set(const NeighborhoodHopperParams& hp) {
    const NeighborhoodParams& p = hp.na;
    const int query_box[3] = {Config::kQueryT, Config::kQueryH, Config::kQueryW};
    const int key_box[3] = {Config::kKeyT, Config::kKeyH, Config::kKeyW};
    int rest = blockIdx.x;
    exists = true;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      query[a] = rest % hp.tiles[a] * query_box[a];
      rest /= hp.tiles[a];
    }
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      group[a] = rest % p.dilation[a];
      rest /= p.dilation[a];
      n[a] = (p.space[a] - group[a] - 1) / p.dilation[a] + 1;
      exists = exists && query[a] < n[a];
    }
    head = rest % p.heads;
    batch = rest / p.heads;
    kv_head = head / (p.heads / p.kv_heads);
    if (exists) {
#pragma unroll
      for (int a = 0; a < 3; ++a) {
        const Axis axis = axis_of(p, a);
        const Interval of_first = axis.keys(query[a], n[a]);
        const Interval of_last = axis.keys(min(query[a] + query_box[a], n[a]) - 1, n[a]);
        first[a] = of_first.start;
        boxes[a] = (of_last.end - of_first.start + key_box[a] - 1) / key_box[a];
        low[a] = of_last.start;
        high[a] = of_first.end;
      }
    }
  }

  __device__ int count() const { return boxes[0] * boxes[1] * boxes[2]; }
};

// The key boxes one after the other, last axis fastest.
template <class Config>
struct KeyWalk {
  const HopperPlace<Config>& place;
  int at[3];

  __device__ explicit KeyWalk(const HopperPlace<Config>& where) : place(where) {
    at[0] = where.first[0];
    at[1] = where.first[1];
    at[2] = where.first[2];
  }

  __device__ void next() {
    const int step[3] = {Config::kKeyT, Config::kKeyH, Config::kKeyW};
    bool carry = true;
#pragma unroll
    for (int a = 2; a >= 3 - Config::kAxes; --a) {
      at[a] += carry ? step[a] : 0;
      carry = carry && a > 3 - Config::kAxes && at[a] >= place.first[a] + place.boxes[a] * step[a];
      at[a] = carry ? place.first[a] : at[a];
    }
  }

  // Whether every query of the block sees every key of the box.
  __device__ bool is_inside() const {
    const int step[3] = {Config::kKeyT, Config::kKeyH, Config::kKeyW};
    bool inside = true;
#pragma unroll
    for (int a = 3 - Config::kAxes; a < 3; ++a) {
      inside = inside && at[a] >= place.low[a] && at[a] + step[a] <= place.high[a];
    }
    return inside;
  }
};

// A box of positions of a head: kDim / 64 blocks of 64 features.
template <class Config, int kPositions>
__device__ inline void load_positions(const NeighborhoodHopperParams& hp, const TensorMap& map,
                                      const HopperPlace<Config>& place, int head, int heads,
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

template <class Config>
__device__ void neighborhood_hopper(const NeighborhoodHopperParams& hp) {
  using T = typename Config::T;
  using Tile = HopperTile<Config>;
  constexpr int kStages = Config::kStages, kDim = Config::kDim, kKeys = Tile::kKeys;
  static_assert(Config::kThreads == 384, "three warpgroups");
  static_assert(sizeof(HopperPlace<Config>) == 104, "_PLACE in configs/neighborhood_hopper.py");
  const NeighborhoodParams& p = hp.na;
  extern __shared__ unsigned char memory[];
  const unsigned q_at = static_cast<unsigned>(__cvta_generic_to_shared(memory));
  if (q_at % 1024 != 0) {
    __trap();  // swizzles count from such a boundary
  }
  const unsigned k_at = q_at + Tile::kQueryBytes, v_at = k_at + kStages * Tile::kKeyBytes;
  const unsigned q_full = v_at + kStages * Tile::kKeyBytes;
  const unsigned k_full = q_full + 8, v_full = k_full + 8 * kStages;
  const unsigned k_empty = v_full + 8 * kStages, v_empty = k_empty + 8 * kStages;

  HopperPlace<Config>& shared_place =
      *reinterpret_cast<HopperPlace<Config>*>(memory + (v_empty + 8 * kStages - q_at));
  const HopperPlace<Config>& place = shared_place;
  const int warpgroup = int(threadIdx.x) / 128 - 1;
  if (threadIdx.x == 0) {
    shared_place.set(hp);
    barrier_init(q_full, 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(k_full + 8 * i, 1);
      barrier_init(v_full + 8 * i, 1);
      barrier_init(k_empty + 8 * i, 2);  // warpgroups
      barrier_init(v_empty + 8 * i, 2);
    }
    barrier_init_done();
    prefetch_map(hp.q_map);
    prefetch_map(hp.k_map);
    prefetch_map(hp.v_map);
  }
  __syncthreads();  // place is known, barriers can be used
  if (!place.exists) {
    return;
  }
  const int boxes = place.count();

  if (warpgroup < 0) {
    fewer_registers<24>();
    if (threadIdx.x == 0) {
      barrier_expect(q_full, Tile::kQueryBytes);
      load_positions<Config, Tile::kRows>(hp, hp.q_map, place, place.head, p.heads, hp.q_heads_first,
                             place.query, q_at, q_full);
      KeyWalk<Config> walk(place);
      for (int i = 0; i < boxes; ++i, walk.next()) {
        const unsigned stage = i % kStages, parity = (i / kStages & 1) ^ 1;
        barrier_wait(k_empty + 8 * stage, parity);
        barrier_expect(k_full + 8 * stage, Tile::kKeyBytes);
        load_positions<Config, kKeys>(hp, hp.k_map, place, place.kv_head, p.kv_heads, hp.k_heads_first,
                               walk.at, k_at + stage * Tile::kKeyBytes, k_full + 8 * stage);
        barrier_wait(v_empty + 8 * stage, parity);
        barrier_expect(v_full + 8 * stage, Tile::kKeyBytes);
        load_positions<Config, kKeys>(hp, hp.v_map, place, place.kv_head, p.kv_heads, hp.v_heads_first,
                               walk.at, v_at + stage * Tile::kKeyBytes, v_full + 8 * stage);
      }
    }
    return;
  }

  more_registers<240>();
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int row0 = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;  // and row0 + 8
  constexpr int kFirstAxis = 3 - Config::kAxes;  // those before it have one position
  const auto position = [&](int i, int axis) {
    const int row = row0 + 8 * i;
    return place.query[axis] + (axis == 2   ? row % Config::kQueryW
                                : axis == 1 ? row / Config::kQueryW % Config::kQueryH
                                            : row / (Config::kQueryH * Config::kQueryW));
  };
  int start[2][3];
  unsigned length[2][3];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int a = kFirstAxis; a < 3; ++a) {
      const Interval in = axis_of(p, a).keys(min(position(i, a), place.n[a] - 1), place.n[a]);
      start[i][a] = in.start;
      length[i][a] = in.end - in.start;
    }
  }

  const float scale = float(p.scale * 1.4426950408889634);  // scores in base 2
  float s[kKeys / 2], o[kDim / 2], factor[2];
  float largest[2] = {negative_infinity<float>(), negative_infinity<float>()}, sum[2] = {0, 0};
  unsigned weights[kKeys / 16][4];
#pragma unroll
  for (int r = 0; r < kDim / 2; ++r) {
    o[r] = 0;
  }
  const auto release = [&](unsigned barrier) {
    if (threadIdx.x % 128 == 0) {
      barrier_arrive(barrier);
    }
  };
  const auto start_scores = [&](int i) {
    const unsigned stage = i % kStages;
    barrier_wait(k_full + 8 * stage, i / kStages & 1);
    const unsigned long long q = tile_descriptor(q_at + warpgroup * 8192, 16);
    const unsigned long long k = tile_descriptor(k_at + stage * Tile::kKeyBytes, 16);
    warpgroup_arrive();
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      const int within = d % 4 * 2;
      multiply_keys<T>(s, q + d / 4 * (Tile::kRows * 8) + within, k + d / 4 * (kKeys * 8) + within,
                       d != 0);
    }
    warpgroup_commit();
  };
  const auto add_values = [&](int i) {
    const unsigned stage = i % kStages;
    barrier_wait(v_full + 8 * stage, i / kStages & 1);
    const unsigned long long v = tile_descriptor(v_at + stage * Tile::kKeyBytes, kKeys * 128);
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      multiply_rows<T>(o, weights[k], v + 128 * k, 1);
    }
    warpgroup_commit();
  };
  KeyWalk<Config> walk(place);
  const auto softmax = [&]() {
    hold(s);
    if (!walk.is_inside()) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int at[3];
#pragma unroll
        for (int a = kFirstAxis; a < 3; ++a) {
          at[a] = walk.at[a] - start[i][a];
          asm volatile("" : "+r"(at[a]));  // or predicates of all columns are kept for both rows
        }
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) {
          constexpr int kPlane = Config::kKeyH * Config::kKeyW;
          const int t = j * 8 / kPlane, h = j * 8 / Config::kKeyW % Config::kKeyH,
                    w = j * 8 % Config::kKeyW + 2 * quad;
          bool line = true;
          if (kFirstAxis < 2) {
            line = unsigned(at[1] + h) < length[i][1];
          }
          if (kFirstAxis < 1) {
            line = line && unsigned(at[0] + t) < length[i][0];
          }
          float& low = s[j * 4 + 2 * i];
          float& high = s[j * 4 + 2 * i + 1];
          low = line && unsigned(at[2] + w) < length[i][2] ? low : negative_infinity<float>();
          high = line && unsigned(at[2] + w + 1) < length[i][2] ? high
                                                                : negative_infinity<float>();
        }
      }
    }
    walk.next();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = largest[i];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        top = fmaxf(top, fmaxf(s[j * 4 + 2 * i], s[j * 4 + 2 * i + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float anchor = top == negative_infinity<float>() ? 0.0f : top * scale;
      factor[i] = exp2f(largest[i] * scale - anchor);
      largest[i] = top;
      float part = 0;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          float& x = s[j * 4 + 2 * i + b];
          x = exp2f(fmaf(x, scale, -anchor));
          part += x;
        }
      }
      sum[i] = sum[i] * factor[i] + part;
    }
  };
  const auto rescale_and_pack = [&]() {
    hold(o);
#pragma unroll
    for (int r = 0; r < kDim / 2; ++r) {
      o[r] *= factor[r / 2 % 2];
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        weights[k][w] = pack<T>(s[8 * k + 2 * w], s[8 * k + 2 * w + 1]);
      }
    }
  };

  // The warpgroups take turns to ask for products, so that the softmax of one runs under the
  // products of the other.
  if (warpgroup == 0) {
    named_arrive(1, 256);
  }
  barrier_wait(q_full, 0);
  start_scores(0);
  warpgroup_wait<0>();
  release(k_empty);
  softmax();
  rescale_and_pack();
  for (int i = 1; i < boxes; ++i) {
    named_barrier(1 + warpgroup, 256);  // this warpgroup's turn
    start_scores(i);
    add_values(i - 1);
    named_arrive(2 - warpgroup, 256);
    warpgroup_wait<1>();  // the scores are there
    release(k_empty + 8 * (i % kStages));
    softmax();
    warpgroup_wait<0>();
    release(v_empty + 8 * ((i - 1) % kStages));
    rescale_and_pack();
  }
  add_values(boxes - 1);
  warpgroup_wait<0>();
  hold(o);

  float lse[2];
  bool finite[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
    lse[i] = (largest[i] * scale + log2f(sum[i])) * 0.6931471805599453f;
    const float inverse = 1.0f / sum[i];
    finite[i] = fabsf(lse[i]) <= 3.4028235e38f;
#pragma unroll
    for (int r = 2 * i; r < kDim / 2; r += 4) {
      o[r] *= inverse;
      o[r + 1] *= inverse;
      finite[i] = finite[i] && fabsf(o[r]) <= 3.4028235e38f && fabsf(o[r + 1]) <= 3.4028235e38f;
    }
  }
  const bool aligned = reinterpret_cast<unsigned long long>(p.y.data) % 16 == 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int at[3];
    bool has = true;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      has = has && position(i, a) < place.n[a];
      at[a] = place.group[a] + position(i, a) * p.dilation[a];
    }
    T* y = row_of<T>(p.y, place.batch, at[0], at[1], at[2], place.head);
#pragma unroll
    for (int block = 0; block < kDim / 8; block += 4) {  // of 8 features; lane q ends with one of four
      unsigned w[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        w[k] = pack<T>(o[(block + k) * 4 + 2 * i], o[(block + k) * 4 + 2 * i + 1]);
      }
      transpose_quad(w);
      if (has) {
        T* to = y + (block + quad) * 8;
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
    if (has && quad == 0 && p.lse.data != nullptr) {
      *row_of<float>(p.lse, place.batch, at[0], at[1], at[2], place.head) = lse[i];
    }
    // Rows that are not finite, the plain way: the warp computes one after the other.
    unsigned again = __ballot_sync(0xffffffffu, has && !finite[i]);
    while (again != 0) {
      const int from = __ffs(again) - 1;
      again &= ~(0xfu << from / 4 * 4);
      Token query;
      query.batch = place.batch;
      query.head = place.head;
      for (int a = 0; a < 3; ++a) {
        query.at[a] = __shfl_sync(0xffffffffu, at[a], from);
      }
      __syncwarp();
      attend_plainly<T, kDim>(p, query);
    }
  }
}
