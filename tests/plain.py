"""The textbook sequence of array operations in the arrays' own dtype, in NumPy.

Matrix products, softmax and convolutions accumulate in float32 and scores stay float32 (float64
for float64 arrays); what such a sequence hands from one operation to the next (probabilities, the
gradients that enter a product, projections) and its results are rounded to the dtype. Its error
is the yardstick of `tolerance.agree`.
"""

from __future__ import annotations

import math

import numpy as np

import oracle


def _accumulator(dtype):
    return np.float64 if np.dtype(dtype) == np.float64 else np.float32


class _Rounding:
    """Arithmetic type of a dtype, and rounding to the dtype."""

    def __init__(self, dtype):
        self.dtype = np.dtype(dtype)
        self.wide = _accumulator(dtype)

    def __call__(self, x):
        return x.astype(self.dtype).astype(self.wide)


def _heads_first(x, heads, wide):
    rows = x.astype(wide).reshape(x.shape[0], -1, *x.shape[-2:]).swapaxes(1, 2)
    return np.repeat(rows, heads // x.shape[-2], axis=1)


def _heads_last(x, like):
    return x.swapaxes(1, 2).reshape(like.shape[:-1] + x.shape[-1:])


def _attention(q, k, v, kernel_size, dilation, stride, causal, boundary, scale, wide):
    allowed = oracle.mask(q.shape[1:-2], kernel_size, dilation, stride, causal, boundary)
    scale = wide(q.shape[-1] ** -0.5 if scale is None else scale)
    qq, kk, vv = (_heads_first(x, q.shape[-2], wide) for x in (q, k, v))
    scores = np.where(allowed, qq @ kk.swapaxes(-1, -2) * scale, wide(-np.inf))
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return qq, kk, vv, scale, weights / total, (top + np.log(total))[..., 0]


def na(q, k, v, kernel_size, dilation=1, stride=1, causal=False, boundary="shift", scale=None):
    """y in the dtype of `q`, lse in float32 (float64 for float64)."""
    rounded = _Rounding(q.dtype)
    *_, vv, _, weights, lse = _attention(q, k, v, kernel_size, dilation, stride, causal, boundary,
                                         scale, rounded.wide)
    y = _heads_last(rounded(weights) @ vv, q)
    return y.astype(q.dtype), lse.swapaxes(1, 2).reshape(q.shape[:-1])


def na_bwd(q, k, v, dy, kernel_size, dilation=1, stride=1, causal=False, boundary="shift",
           scale=None, dlse=None):
    """dq, dk and dv in the dtype of `q`."""
    rounded = _Rounding(q.dtype)
    wide, heads, kv_heads = rounded.wide, q.shape[-2], k.shape[-2]
    qq, kk, vv, scale, weights, _ = _attention(q, k, v, kernel_size, dilation, stride, causal,
                                               boundary, scale, wide)
    weights = rounded(weights)
    dd = _heads_first(dy, heads, wide)
    d_weights = dd @ vv.swapaxes(-1, -2)
    delta = (d_weights * weights).sum(-1, keepdims=True)
    if dlse is not None:
        delta = delta - _heads_first(dlse[..., None], heads, wide)
    d_scores = rounded(weights * (d_weights - delta) * scale)

    def shared(x):
        return x.reshape(x.shape[0], kv_heads, heads // kv_heads, *x.shape[2:]).sum(2)

    dk, dv = shared(d_scores.swapaxes(-1, -2) @ qq), shared(weights.swapaxes(-1, -2) @ dd)
    return tuple(_heads_last(x, like).astype(q.dtype)
                 for x, like in ((d_scores @ kk, q), (dk, k), (dv, v)))


def mta(scores, weight, bias=None, groups=1, dilation=1, padding="same", activation="softmax"):
    """y in the dtype of `scores`."""
    rounded = _Rounding(scores.dtype)
    p = rounded(oracle.probabilities(scores, activation, rounded.wide))
    y = oracle.correlate(p, weight.astype(rounded.wide), groups, dilation, padding)
    if bias is not None:
        y = y + bias.astype(rounded.wide)[:, None, None]
    return np.tril(y).astype(scores.dtype)


def mta_bwd(scores, weight, bias, dy, groups=1, dilation=1, padding="same", activation="softmax"):
    """d_scores, d_weight and d_bias in the dtype of `scores`."""
    rounded = _Rounding(scores.dtype)
    wide = rounded.wide
    p = oracle.probabilities(scores, activation, wide)
    lower = np.tri(scores.shape[-1], dtype=bool)
    d_out = np.where(lower, dy.astype(wide), wide(0))
    dp, d_weight = oracle.correlate_bwd(d_out, rounded(p), weight.astype(wide), groups, dilation,
                                        padding)
    dp = rounded(dp)
    if activation == "softmax":
        p = rounded(p)
        d_scores = p * (dp - (p * dp).sum(-1, keepdims=True))
    else:
        on = (p > 0).astype(wide)
        d_scores = on * (dp - (on * dp).sum(-1, keepdims=True) / on.sum(-1, keepdims=True))
    d_bias = None if bias is None else d_out.sum((0, 2, 3)).astype(scores.dtype)
    return (np.where(lower, d_scores, 0).astype(scores.dtype), d_weight.astype(scores.dtype),
            d_bias)


def rotate(x, cos, sin, interleaved=False, inverse=False):
    """Rotation in float32 arithmetic with one rounding; tables in the half form."""
    wide = _accumulator(x.dtype)
    return oracle.rotate(x, cos.astype(wide), sin.astype(wide), interleaved, inverse,
                         wide).astype(x.dtype)


def _linear(x, weight, bias, rounded):
    y = x.astype(rounded.wide).reshape(-1, x.shape[-1]) @ weight.astype(rounded.wide).T
    if bias is not None:
        y = y + bias.astype(rounded.wide)
    return y.reshape(x.shape[:-1] + (weight.shape[0],)).astype(rounded.dtype)


def _projected(x, weights, biases, num_heads, num_kv_heads, tables, interleaved, rounded):
    num_kv_heads = num_kv_heads or num_heads
    counts = (num_heads, num_kv_heads, num_kv_heads)
    parts = [_linear(x, w, b, rounded) for w, b in zip(weights[:3], biases[:3])]
    q, k, v = (p.reshape(p.shape[:-1] + (n, -1)) for p, n in zip(parts, counts))
    if tables is not None:
        q, k = (rotate(y.reshape(y.shape[0], -1, *y.shape[-2:]), *tables, interleaved)
                .reshape(y.shape) for y in (q, k))
    return q, k, v


def fused(x, weights, biases, num_heads, num_kv_heads, rope_tables=None, interleaved=False,
          **options):
    """The module; `rope_tables` in the half form."""
    rounded = _Rounding(x.dtype)
    q, k, v = _projected(x, weights, biases, num_heads, num_kv_heads, rope_tables, interleaved,
                         rounded)
    y, _ = na(q, k, v, **options)
    return _linear(y.reshape(x.shape[:-1] + (-1,)), weights[3], biases[3], rounded)


def fused_bwd(x, weights, biases, dy, num_heads, num_kv_heads, rope_tables=None,
              interleaved=False, **options):
    """The nine gradients, each rounded where one operation hands over to the next."""
    rounded = _Rounding(x.dtype)
    wide = rounded.wide
    q, k, v = _projected(x, weights, biases, num_heads, num_kv_heads, rope_tables, interleaved,
                         rounded)
    attended, _ = na(q, k, v, **options)
    tokens = math.prod(x.shape[:-1])
    flat_x, flat_dy = x.astype(wide).reshape(tokens, -1), dy.astype(wide).reshape(tokens, -1)
    flat_attended = attended.astype(wide).reshape(tokens, -1)
    d_attended = (flat_dy @ weights[3].astype(wide)).astype(x.dtype).reshape(attended.shape)
    gradients = list(na_bwd(q, k, v, d_attended, **options))
    if rope_tables is not None:
        for n in (0, 1):
            g = gradients[n]
            gradients[n] = rotate(g.reshape(g.shape[0], -1, *g.shape[-2:]), *rope_tables,
                                  interleaved, inverse=True).reshape(g.shape)
    gradients = [g.astype(wide).reshape(tokens, -1) for g in gradients]
    dx = sum(g @ w.astype(wide) for g, w in zip(gradients, weights))
    d_weights = [g.T @ flat_x for g in gradients] + [flat_dy.T @ flat_attended]
    d_biases = [None if b is None else g.sum(0) for g, b in zip(gradients + [flat_dy], biases)]
    results = (dx.reshape(x.shape), *d_weights, *d_biases)
    return tuple(None if r is None else r.astype(x.dtype) for r in results)
