"""Neighborhood attention in NumPy, float64, in O(tokens * window) work and bounded memory.

Tokens are numbered in row-major order over batch and space. Queries are taken in chunks, and the
keys of each are gathered by number, so that nothing outside a window is ever read. A window with
fewer keys than the widest is filled up with one further row of zeros, whose weight is 0. The
gradients of keys and values gather in the other direction: the queries that see each key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .softmax import softmax

__all__ = ["backward", "forward", "inverse_window", "window"]

# Gathered keys and values of one chunk: small enough to stay in a processor's cache.
CHUNK_BYTES = 8 << 20


def window(
    length: int, kernel_size: int, dilation: int, stride: int, is_causal: bool, boundary: str
) -> tuple[np.ndarray, np.ndarray]:
    """Interval of keys that each position of one axis attends to.

    Parameters
    ----------
    length : int
        Extent of the axis.
    kernel_size, dilation, stride : int
    is_causal : bool
    boundary : {"shift", "clip"}

    Returns
    -------
    start, end : ndarray, (length,), int64
        First key and one past the last, as positions within the dilation group of the query:
        position `p` of group `g` is token `g + p * dilation`.
    """
    group, p = np.arange(length) % dilation, np.arange(length) // dilation
    n = -((group - length) // dilation)  # length of the group, rounded up
    if boundary == "clip":
        start = np.maximum(p - kernel_size // 2, 0)
        end = p + 1 if is_causal else np.minimum(p + kernel_size // 2 + 1, n)
    elif is_causal:
        leader = np.minimum(p // stride * stride + stride - 1, n - 1)
        start = np.maximum(leader - kernel_size + 1, 0)
        end = p + 1
    else:
        leader = np.minimum(p // stride * stride + stride // 2, n - 1)
        start = np.clip(leader - kernel_size // 2, 0, n - kernel_size)
        end = start + kernel_size
    return start, end


def inverse_window(
    length: int, kernel_size: int, dilation: int, stride: int, is_causal: bool, boundary: str
) -> tuple[np.ndarray, np.ndarray]:
    """Interval of queries whose window holds the key at each position of one axis.

    It is an interval because neither end of a window moves back as its query moves on.

    Parameters
    ----------
    length, kernel_size, dilation, stride, is_causal, boundary
        As for `window`.

    Returns
    -------
    start, end : ndarray, (length,), int64
        First query and one past the last, as positions within the dilation group of the key.
    """
    window_start, window_end = window(length, kernel_size, dilation, stride, is_causal, boundary)
    start, end = np.empty_like(window_start), np.empty_like(window_end)
    for group in range(min(dilation, length)):
        members = slice(group, None, dilation)
        key = np.arange(len(start[members]))
        start[members] = np.searchsorted(window_end[members], key, side="right")
        end[members] = np.searchsorted(window_start[members], key, side="right")
    return start, end


@np.errstate(invalid="ignore", over="ignore")
def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    stride: Sequence[int],
    is_causal: Sequence[bool],
    scale: float,
    boundary: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of each query to the keys in its window.

    Parameters
    ----------
    q : ndarray, (batch, *space, heads, head_dim)
    k : ndarray, (batch, *space, kv_heads, head_dim)
    v : ndarray, (batch, *space, kv_heads, value_dim)
    kernel_size, dilation, stride, is_causal : sequence, one entry per spatial axis
    scale : float
    boundary : {"shift", "clip"}

    Returns
    -------
    y : ndarray, (batch, *space, heads, value_dim), float64
    lse : ndarray, (batch, *space, heads), float64
    """
    y = np.zeros(q.shape[:-1] + v.shape[-1:])
    lse = np.zeros(q.shape[:-1])
    if lse.size == 0:
        return y, lse
    options = (q.shape[:-2], kernel_size, dilation, stride, is_causal, boundary)
    query, key, value = _grouped(q, k), _with_row(_tokens(k), 0), _with_row(_tokens(v), 0)
    flat_y, flat_lse = _grouped(y, k), lse.reshape(query.shape[:-1])
    for tokens, keys in _chunks(window, *options, row_size=key[0].size + value[0].size):
        weights, flat_lse[tokens] = softmax(_scores(query[tokens], key, keys, scale))
        flat_y[tokens] = weights @ _per_head(value[keys])
    return y, lse


@np.errstate(invalid="ignore", over="ignore")
def backward(
    dy: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    y: np.ndarray,
    lse: np.ndarray,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    stride: Sequence[int],
    is_causal: Sequence[bool],
    scale: float,
    boundary: str,
    dlse: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of `forward`.

    Parameters
    ----------
    dy : ndarray, (batch, *space, heads, value_dim)
    q, k, v, kernel_size, dilation, stride, is_causal, scale, boundary
        As for `forward`.
    y, lse : ndarray
        Not read: both are computed again from `q`, `k` and `v`, so that no rounding of theirs
        enters the gradients.
    dlse : ndarray, (batch, *space, heads), optional

    Returns
    -------
    dq, dk, dv : ndarray, float64
        Shaped as `q`, `k` and `v`.
    """
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    if math.prod(q.shape[:-1]) == 0:
        return dq, dk, dv
    options = (q.shape[:-2], kernel_size, dilation, stride, is_causal, boundary)
    query, d_out = _grouped(q, k), _grouped(dy, k)
    key, value = _with_row(_tokens(k), 0), _with_row(_tokens(v), 0)
    row_size = key[0].size + value[0].size

    # From the queries: lse, and delta = <dy, y> - dlse, all that dS needs to know of a row.
    flat_dq = _grouped(dq, k)
    row_lse, delta = np.empty(query.shape[:-1]), np.empty(query.shape[:-1])
    d_lse = np.zeros(delta.shape) if dlse is None else _float64(dlse).reshape(delta.shape)
    for tokens, keys in _chunks(window, *options, row_size=row_size):
        near_key = _per_head(key[keys])
        weights, row_lse[tokens] = softmax(_scores(query[tokens], key, keys, scale))
        d_weights = d_out[tokens] @ _transposed(_per_head(value[keys]))
        delta[tokens] = (d_weights * weights).sum(-1) - d_lse[tokens]
        d_scores = weights * (d_weights - delta[tokens, ..., None])
        flat_dq[tokens] = scale * (d_scores @ near_key)

    # From the keys: weights and dS once more, of the queries that see each key.
    flat_dk, flat_dv = _tokens(dk), _tokens(dv)
    group = query.shape[2]
    query, d_out = _with_row(query, 0), _with_row(d_out, 0)
    row_lse, delta = _with_row(row_lse, 0), _with_row(delta, 0)
    row_size = query[0].size + d_out[0].size
    for tokens, queries in _chunks(inverse_window, *options, row_size=row_size):
        seen = np.repeat(queries < len(query) - 1, group, axis=1)[:, None, :, None]
        near_query, near_dy = _per_kv_head(query[queries]), _per_kv_head(d_out[queries])
        near_lse = _per_kv_head(row_lse[queries, ..., None])
        near_delta = _per_kv_head(delta[queries, ..., None])
        scores = scale * (near_query @ key[tokens, ..., None])
        weights = np.where(seen, np.exp(scores - near_lse), 0)
        d_weights = near_dy @ value[tokens, ..., None]
        d_scores = weights * (d_weights - near_delta)
        flat_dk[tokens] = scale * (_transposed(d_scores) @ near_query)[..., 0, :]
        flat_dv[tokens] = (_transposed(weights) @ near_dy)[..., 0, :]
    return dq, dk, dv


def _chunks(
    interval: Callable[..., tuple[np.ndarray, np.ndarray]],
    shape: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    stride: Sequence[int],
    is_causal: Sequence[bool],
    boundary: str,
    row_size: int,
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield chunks of tokens, and for each the numbers (tokens, most) of the rows they meet.

    Where a token meets fewer rows than `most`, the number of tokens, which no token has, fills up.
    """
    batch, *space = shape
    size = math.prod(space)
    axes = [
        _members(rule[1], *interval(length, *rule, boundary))
        for length, *rule in zip(space, kernel_size, dilation, stride, is_causal)
    ]
    most = math.prod(members.shape[1] for members in axes)
    step = max(1, CHUNK_BYTES // (8 * most * max(row_size, 1)))
    for first in range(0, batch * size, step):
        tokens = np.arange(first, min(first + step, batch * size))
        near, absent = tokens[:, None] // size, np.zeros((len(tokens), 1), bool)
        for length, members, at in zip(space, axes, np.unravel_index(tokens % size, space)):
            near = near[:, :, None] * length + members[at][:, None, :]
            absent = absent[:, :, None] | (members[at] < 0)[:, None, :]
            near, absent = near.reshape(len(tokens), -1), absent.reshape(len(tokens), -1)
        yield slice(first, first + len(tokens)), np.where(absent, batch * size, near)


def _members(dilation: int, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Turn intervals within dilation groups into positions on the axis, -1 past an end."""
    within = start[:, None] + np.arange((end - start).max())
    group = np.arange(len(start))[:, None] % dilation
    return np.where(within < end[:, None], group + within * dilation, -1)


def _scores(query: np.ndarray, key: np.ndarray, keys: np.ndarray, scale: float) -> np.ndarray:
    """Scores (tokens, kv_heads, group, window), -inf where there is no key."""
    scores = scale * (query @ _transposed(_per_head(key[keys])))
    return np.where((keys < len(key) - 1)[:, None, None, :], scores, -np.inf)


def _float64(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float64)


def _tokens(x: np.ndarray) -> np.ndarray:
    """View or copy as (tokens, kv_heads, dim)."""
    return _float64(x).reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _grouped(x: np.ndarray, k: np.ndarray) -> np.ndarray:
    """View or copy as (tokens, kv_heads, query heads of one kv head, dim)."""
    heads, dim = x.shape[-2:]
    kv_heads = k.shape[-2]
    return _float64(x).reshape(math.prod(x.shape[:-2]), kv_heads, heads // kv_heads, dim)


def _with_row(x: np.ndarray, fill: float) -> np.ndarray:
    """Append the row that stands for no token."""
    return np.concatenate([x, np.full((1, *x.shape[1:]), fill)])


def _per_head(x: np.ndarray) -> np.ndarray:
    """(tokens, window, kv_heads, dim) to (tokens, kv_heads, window, dim)."""
    return x.swapaxes(1, 2)


def _per_kv_head(x: np.ndarray) -> np.ndarray:
    """(tokens, window, kv_heads, group, dim) to (tokens, kv_heads, window * group, dim)."""
    tokens, near, kv_heads, group, dim = x.shape
    return x.swapaxes(1, 2).reshape(tokens, kv_heads, near * group, dim)


def _transposed(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)
