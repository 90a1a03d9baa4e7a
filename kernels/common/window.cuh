// window.cuh: which keys a query sees along one axis, and which queries see a key.
//
// An axis of length L with dilation d falls into d groups; position i is number i / d of group
// i % d, and only positions of one group see each other. All intervals here are half open and
// count within the group. Sums are ordered so that no extent below 2^31 overflows an int.
#pragma once
#include "common/params.cuh"
#include "common/token.cuh"

struct Interval {
  int start, end;
};

struct Axis {
  int window, stride;
  bool causal, clip;

  // The key positions of query position p in a group of n (spec: border rules "shift", "clip").
  __device__ Interval keys(int p, int n) const {
    if (clip) {
      return {max(p - window / 2, 0), p + 1 + (causal ? 0 : min(window / 2, n - 1 - p))};
    }
    // Of p's stride group, whose leader stands for all. Few have strides: they need no division.
    const int first = stride == 1 ? p : p / stride * stride;
    if (causal) {
      const int leader = first + min(stride - 1, n - 1 - first);
      return {max(leader - window + 1, 0), p + 1};
    }
    const int leader = first + min(stride / 2, n - 1 - first);
    const int start = min(max(leader - window / 2, 0), n - window);
    return {start, start + window};
  }

  // The query positions whose window holds key position j. Both ends of `keys` never fall as p
  // grows, so these are one interval too: from the first p with end > j up to the first p with
  // start > j.
  __device__ Interval queries(int j, int n) const {
    if (clip) {
      return {causal ? j : max(j - window / 2, 0), j + 1 + min(window / 2, n - 1 - j)};
    }
    // A window of fixed length ends after j where it starts after j - window.
    return {causal ? j : j < window ? 0 : first_to_start_after(j - window, n),
            first_to_start_after(j, n)};
  }

 private:
  // Where `keys(p, n).start` exceeds j >= 0 for the first time, n if nowhere; "shift" only.
  __device__ int first_to_start_after(int j, int n) const {
    if (j >= n - window) {
      return n;
    }
    // The least leader, and where the leader of a stride group is in it.
    const int leader = j + (causal ? window : window / 2 + 1);
    const int at = causal ? stride - 1 : stride / 2;
    const int first = max(leader - at, 0), before = stride == 1 ? first : first / stride * stride;
    return min(before < first ? before + stride : before, n);
  }
};

__device__ inline Axis axis_of(const NeighborhoodParams& p, int axis) {
  return {p.window[axis], p.stride[axis], p.causal[axis] != 0, p.clip != 0};
}

// The tokens that a token is related to: a box of positions, dilated.
struct Box {
  int first[3], step[3], count[3];

  __device__ int position(int axis, int i) const { return first[axis] + i * step[axis]; }
};

template <bool kInverse>  // false: the keys of a query; true: the queries of a key
__device__ inline Box box_of(const NeighborhoodParams& p, const int (&at)[3]) {
  Box box;
  for (int a = 0; a < 3; ++a) {
    const int d = p.dilation[a], group = at[a] % d, n = (p.space[a] - group - 1) / d + 1;
    const Axis axis = axis_of(p, a);
    const Interval in = kInverse ? axis.queries(at[a] / d, n) : axis.keys(at[a] / d, n);
    box.first[a] = group + in.start * d;
    box.step[a] = d;
    box.count[a] = max(in.end - in.start, 0);
  }
  return box;
}

// Call visit(k row, v row) for every key of a query, in one fixed order.
template <class T, class Visit>
__device__ void for_each_key(const NeighborhoodParams& p, const Token& query, Visit visit) {
  const int kv_head = query.head / (p.heads / p.kv_heads);
  const Box keys = box_of<false>(p, query.at);
  for (int i0 = 0; i0 < keys.count[0]; ++i0) {
    for (int i1 = 0; i1 < keys.count[1]; ++i1) {
      for (int i2 = 0; i2 < keys.count[2]; ++i2) {
        const int at0 = keys.position(0, i0), at1 = keys.position(1, i1),
                  at2 = keys.position(2, i2);
        visit(row_of<const T>(p.k, query.batch, at0, at1, at2, kv_head),
              row_of<const T>(p.v, query.batch, at0, at1, at2, kv_head));
      }
    }
  }
}
