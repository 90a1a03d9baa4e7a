// token.cuh: a (batch, space, head) item and its place in heads-last arrays.
#pragma once
#include "common/params.cuh"

struct Token {
  int64 batch;
  int at[3];
  int head;
};

// Item number -> token, heads fastest, then the last space axis.
__device__ inline Token token_of(int64 item, int heads, const int (&space)[3]) {
  Token t;
  t.head = int(item % heads);
  item /= heads;
  for (int a = 2; a >= 0; --a) {
    t.at[a] = int(item % space[a]);
    item /= space[a];
  }
  t.batch = item;
  return t;
}

__device__ inline int64 item_count(const NeighborhoodParams& p, int heads) {
  return p.batch * p.space[0] * p.space[1] * p.space[2] * heads;
}

// The first feature of a token; `T` is the array's element type.
template <class T>
__device__ inline T* row_of(const TokenView& view, int64 batch, int at0, int at1, int at2,
                            int head) {
  return static_cast<T*>(view.data) + batch * view.batch + at0 * view.space[0] +
         at1 * view.space[1] + at2 * view.space[2] + head * view.head;
}

template <class T>
__device__ inline T* row_of(const TokenView& view, const Token& t, int head) {
  return row_of<T>(view, t.batch, t.at[0], t.at[1], t.at[2], head);
}
