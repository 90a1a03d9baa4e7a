"""The operations as dense array code with explicit masks, in float64 (or wider).

Nothing here is shared with the package. `wide` is the type of all arithmetic: float64, or
`numpy.longdouble` where the arrays under test are float64 themselves. Everything is O(tokens^2):
for small problems only.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

# --- neighborhood attention ----------------------------------------------------------------


def per_axis(value, rank):
    """Return one value per axis."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * rank


def axis_mask(length, kernel_size, dilation=1, stride=1, causal=False, boundary="shift"):
    """bool [length, length]: row i marks the keys that query i attends to on one axis."""
    mask = np.zeros((length, length), bool)
    if boundary == "clip":
        for i in range(length):
            for j in range(i % dilation, length, dilation):
                in_band = abs(j - i) <= (kernel_size // 2) * dilation
                mask[i, j] = in_band and not (causal and j > i)
        return mask
    # Keys on either side of the leader; an even window has one more on the left.
    left, right = kernel_size // 2, kernel_size // 2 + kernel_size % 2 - 1
    for i in range(length):
        group, place = i % dilation, i // dilation
        members = (length - group + dilation - 1) // dilation
        if causal:
            leader = min(place // stride * stride + stride - 1, members - 1)
            first, last = max(leader - (kernel_size - 1), 0), place
        else:
            leader = min(place // stride * stride + stride // 2, members - 1)
            first = max(leader - left, 0)
            if leader + right > members - 1:
                first -= leader + right - (members - 1)
                first = max(first, 0)
            last = first + kernel_size - 1
        mask[i, group + dilation * np.arange(first, last + 1)] = True
    return mask


def mask(space, kernel_size, dilation=1, stride=1, causal=False, boundary="shift"):
    """bool [tokens, tokens], both sides in row-major order over `space`."""
    rank = len(space)
    options = zip(space, per_axis(kernel_size, rank), per_axis(dilation, rank),
                  per_axis(stride, rank), per_axis(causal, rank))
    result = np.ones((1, 1), bool)
    for options_of_axis in options:
        result = np.kron(result, axis_mask(*options_of_axis, boundary)).astype(bool)
    return result


def _heads_first(x, heads, wide):
    batch, tokens = x.shape[0], math.prod(x.shape[1:-2])
    rows = x.astype(wide).reshape(batch, tokens, x.shape[-2], x.shape[-1]).swapaxes(1, 2)
    return np.repeat(rows, heads // x.shape[-2], axis=1)


def _heads_last(x, like):
    return x.swapaxes(1, 2).reshape(like.shape[:-1] + x.shape[-1:])


def _attention(q, k, v, kernel_size, dilation, stride, causal, boundary, scale, wide):
    heads = q.shape[-2]
    allowed = mask(q.shape[1:-2], kernel_size, dilation, stride, causal, boundary)
    scale = wide(1) / np.sqrt(wide(q.shape[-1])) if scale is None else wide(scale)
    qq, kk, vv = (_heads_first(x, heads, wide) for x in (q, k, v))
    scores = np.where(allowed, qq @ kk.swapaxes(-1, -2) * scale, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return qq, kk, vv, scale, weights / total, (top + np.log(total))[..., 0]


def na(q, k, v, kernel_size, dilation=1, stride=1, causal=False, boundary="shift", scale=None,
       wide=np.float64):
    """Neighborhood attention: y and lse, heads next to last."""
    *_, vv, _, weights, lse = _attention(q, k, v, kernel_size, dilation, stride, causal, boundary,
                                         scale, wide)
    return _heads_last(weights @ vv, q), lse.swapaxes(1, 2).reshape(q.shape[:-1])


def na_bwd(q, k, v, dy, kernel_size, dilation=1, stride=1, causal=False, boundary="shift",
           scale=None, dlse=None, wide=np.float64):
    """Gradients of q, k and v; that of shared key heads is the sum over their query heads."""
    qq, kk, vv, scale, weights, _ = _attention(q, k, v, kernel_size, dilation, stride, causal,
                                               boundary, scale, wide)
    heads, kv_heads = q.shape[-2], k.shape[-2]
    dd = _heads_first(dy, heads, wide)
    d_weights = dd @ vv.swapaxes(-1, -2)
    delta = (d_weights * weights).sum(-1, keepdims=True)
    if dlse is not None:
        delta = delta - _heads_first(dlse[..., None], heads, wide)
    d_scores = weights * (d_weights - delta) * scale

    def shared(x):
        return x.reshape(x.shape[0], kv_heads, heads // kv_heads, *x.shape[2:]).sum(2)

    return (_heads_last(d_scores @ kk, q), _heads_last(shared(d_scores.swapaxes(-1, -2) @ qq), k),
            _heads_last(shared(weights.swapaxes(-1, -2) @ dd), v))


# --- multi-token attention -----------------------------------------------------------------


def sparsemax(z):
    """Projection of each row on the simplex; -inf entries get 0."""
    falling = -np.sort(-z, -1)
    finite = np.isfinite(falling)
    running = np.cumsum(np.where(finite, falling, 0), -1)
    rank = np.arange(1, z.shape[-1] + 1)
    support = (finite & (1 + rank * falling > running)).sum(-1, keepdims=True)
    threshold = (np.take_along_axis(running, support - 1, -1) - 1) / support
    return np.maximum(z - threshold, 0)


def untied(scores, margin=1e-3):
    """Lower every score within `margin` of its row's sparsemax threshold.

    Whether such an entry is in the support, and with it the gradient, is up to rounding; 16-bit
    scores meet their threshold exactly more often than one would think.
    """
    lower = np.tri(scores.shape[-1], dtype=bool)
    scores = scores.copy()
    for _ in range(100):
        z = np.where(lower, scores.astype(np.float64), -np.inf)
        p = sparsemax(z)
        threshold = np.where(p > 0, z - p, -np.inf).max(-1, keepdims=True)
        close = lower & (np.abs(z - threshold) < margin)
        if not close.any():
            return scores
        scores[close] = (z[close] - 0.05 * np.maximum(1, np.abs(z[close]))).astype(scores.dtype)
    raise AssertionError("scores stay at their thresholds")


def probabilities(scores, activation, wide=np.float64):
    """activation of the causally masked scores, 0 above the diagonal."""
    lower = np.tri(scores.shape[-1], dtype=bool)
    z = np.where(lower, scores.astype(wide), -np.inf)
    if activation == "sparsemax":
        return sparsemax(z)
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def taps(weight_shape, dilation=1, padding="same"):
    """Yield (u, v, row shift, column shift) for every element of a kernel."""
    kh, kw = weight_shape[-2:]
    rows, columns = per_axis(dilation, 2)
    above = kh - 1 if padding == "causal" else kh // 2
    for u, v in itertools.product(range(kh), range(kw)):
        yield u, v, (u - above) * rows, (v - kw // 2) * columns


def shifted(x, down, right):
    """Return z with z[..., i, j] = x[..., i + down, j + right], 0 outside."""
    rows, columns = x.shape[-2:]
    z = np.zeros_like(x)
    i = slice(max(-down, 0), min(rows - down, rows))
    j = slice(max(-right, 0), min(columns - right, columns))
    if i.start < i.stop and j.start < j.stop:
        z[..., i, j] = x[..., i.start + down:i.stop + down, j.start + right:j.stop + right]
    return z


def correlate(p, weight, groups=1, dilation=1, padding="same"):
    """Cross-correlation of [batch, channels, seq, seq] with [out, channels / groups, kh, kw]."""
    batch, channels, rows, columns = p.shape
    outs = weight.shape[0]
    grouped = p.reshape(batch, groups, channels // groups, rows, columns)
    kernels = weight.reshape(groups, outs // groups, *weight.shape[1:])
    y = np.zeros((batch, groups, outs // groups, rows, columns), p.dtype)
    for u, v, down, right in taps(weight.shape, dilation, padding):
        moved = shifted(grouped, down, right)
        y += np.einsum("goc,bgcij->bgoij", kernels[..., u, v], moved, optimize=p.dtype.char != "g")
    return y.reshape(batch, outs, rows, columns)


def correlate_bwd(dy, p, weight, groups=1, dilation=1, padding="same"):
    """Gradients of `p` and `weight` for `correlate`."""
    batch, channels, rows, columns = p.shape
    outs = weight.shape[0]
    grouped = p.reshape(batch, groups, channels // groups, rows, columns)
    d_out = dy.reshape(batch, groups, outs // groups, rows, columns)
    kernels = weight.reshape(groups, outs // groups, *weight.shape[1:])
    dp, d_kernels = np.zeros_like(grouped), np.zeros(kernels.shape, p.dtype)
    fast = p.dtype.char != "g"
    for u, v, down, right in taps(weight.shape, dilation, padding):
        moved = shifted(grouped, down, right)
        d_kernels[..., u, v] = np.einsum("bgoij,bgcij->goc", d_out, moved, optimize=fast)
        back = np.einsum("goc,bgoij->bgcij", kernels[..., u, v], d_out, optimize=fast)
        dp += shifted(back, -down, -right)
    return dp.reshape(p.shape), d_kernels.reshape(weight.shape)


def mta(scores, weight, bias=None, groups=1, dilation=1, padding="same", activation="softmax",
        wide=np.float64):
    """Multi-token attention weights."""
    y = correlate(probabilities(scores, activation, wide), weight.astype(wide), groups, dilation,
                  padding)
    if bias is not None:
        y = y + bias.astype(wide)[:, None, None]
    return np.tril(y)


def mta_bwd(scores, weight, bias, dy, groups=1, dilation=1, padding="same", activation="softmax",
            wide=np.float64):
    """d_scores, d_weight and d_bias (None without a bias)."""
    p = probabilities(scores, activation, wide)
    lower = np.tri(scores.shape[-1], dtype=bool)
    d_out = np.where(lower, dy.astype(wide), 0)
    dp, d_weight = correlate_bwd(d_out, p, weight.astype(wide), groups, dilation, padding)
    if activation == "softmax":
        d_scores = p * (dp - (p * dp).sum(-1, keepdims=True))
    else:
        on = p > 0
        d_scores = on * (dp - (on * dp).sum(-1, keepdims=True) / on.sum(-1, keepdims=True))
    d_bias = None if bias is None else d_out.sum((0, 2, 3))
    return np.where(lower, d_scores, 0), d_weight, d_bias


# --- rotary position embedding -------------------------------------------------------------


def inv_freq(rotary_dim, base=10000.0):
    """Angle per position of each pair."""
    return base ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def rotate(x, cos, sin, interleaved=False, inverse=False, wide=np.float64):
    """Rotate [batch, seq, heads, head_dim] by tables in the half form, one row per token.

    `cos` and `sin` broadcast to [batch, seq, rotary_dim / 2].
    """
    half = cos.shape[-1]
    x = x.astype(wide)
    y = x.copy()
    shape = x.shape[:2] + (half,)
    c = np.broadcast_to(cos.astype(wide), shape)[:, :, None]
    s = np.broadcast_to(sin.astype(wide), shape)[:, :, None] * (-1 if inverse else 1)
    if interleaved:
        a, b = x[..., 0:2 * half:2], x[..., 1:2 * half:2]
        y[..., 0:2 * half:2], y[..., 1:2 * half:2] = a * c - b * s, b * c + a * s
    else:
        a, b = x[..., :half], x[..., half:2 * half]
        y[..., :half], y[..., half:2 * half] = a * c - b * s, b * c + a * s
    return y


def rope(x, positions, frequencies, interleaved=False, attention_factor=1.0, inverse=False):
    """Rotate [batch, seq, heads, head_dim] by positions [seq] or [batch, seq]."""
    angle = np.asarray(positions, np.float64)[..., None] * frequencies
    return rotate(x, np.cos(angle) * attention_factor, np.sin(angle) * attention_factor,
                  interleaved, inverse)


# --- fused module --------------------------------------------------------------------------


def fused(x, weights, biases, num_heads, num_kv_heads, rope_tables=None, interleaved=False,
          wide=np.float64, **options):
    """Projection, rotation, neighborhood attention, output projection.

    `weights` and `biases` are four each (query, key, value, output), `rope_tables` cos and sin
    with one row per token, and `options` those of `na`.
    """
    q, k, v, _ = _projected(x, weights, biases, num_heads, num_kv_heads, rope_tables, interleaved,
                            wide)
    attended, _ = na(q, k, v, wide=wide, **options)
    return _linear(attended.reshape(x.shape[:-1] + (-1,)), weights[3], biases[3], wide)


def fused_bwd(x, weights, biases, dy, num_heads, num_kv_heads, rope_tables=None,
              interleaved=False, wide=np.float64, **options):
    """Gradients of x, the four weights and the four biases (None where there is none)."""
    q, k, v, tables = _projected(x, weights, biases, num_heads, num_kv_heads, rope_tables,
                                 interleaved, wide)
    attended, _ = na(q, k, v, wide=wide, **options)
    tokens = math.prod(x.shape[:-1])
    flat_x, flat_dy = x.astype(wide).reshape(tokens, -1), dy.astype(wide).reshape(tokens, -1)
    flat_attended = attended.reshape(tokens, -1)
    d_attended = (flat_dy @ weights[3].astype(wide)).reshape(attended.shape)
    gradients = list(na_bwd(q, k, v, d_attended, wide=wide, **options))
    if tables is not None:
        for n in (0, 1):
            g = gradients[n]
            flat = rotate(g.reshape(g.shape[0], -1, *g.shape[-2:]), *tables, interleaved,
                          inverse=True, wide=wide)
            gradients[n] = flat.reshape(g.shape)
    gradients = [g.reshape(tokens, -1) for g in gradients]
    dx = sum(g @ w.astype(wide) for g, w in zip(gradients, weights))
    d_weights = [g.T @ flat_x for g in gradients] + [flat_dy.T @ flat_attended]
    d_biases = [None if b is None else g.sum(0) for g, b in zip(gradients + [flat_dy], biases)]
    return (dx.reshape(x.shape), *d_weights, *d_biases)


def _linear(x, weight, bias, wide):
    y = x.astype(wide).reshape(-1, x.shape[-1]) @ weight.astype(wide).T
    if bias is not None:
        y = y + bias.astype(wide)
    return y.reshape(x.shape[:-1] + (weight.shape[0],))


def _projected(x, weights, biases, num_heads, num_kv_heads, rope_tables, interleaved, wide):
    num_kv_heads = num_kv_heads or num_heads
    counts = (num_heads, num_kv_heads, num_kv_heads)
    parts = [_linear(x, w, b, wide) for w, b in zip(weights[:3], biases[:3])]
    q, k, v = (p.reshape(p.shape[:-1] + (n, -1)) for p, n in zip(parts, counts))
    if rope_tables is None:
        return q, k, v, None
    half = q.shape[-1] // 2  # tables in the full form repeat each value
    tables = tuple(t if t.shape[-1] <= half else (t[..., ::2] if interleaved else t[..., :half])
                   for t in rope_tables)

    def turned(y):
        flat = y.reshape(y.shape[0], -1, *y.shape[-2:])
        return rotate(flat, *tables, interleaved, wide=wide).reshape(y.shape)

    return turned(q), turned(k), v, tables
