"""What each workload's result is: in float64, and by plain array operations in the input's dtype.

One computation serves both, for NumPy and CuPy arrays. Attention is computed densely in chunks of
queries under a mask of the windows, which has nothing in common with the kernels. Neighborhood
attention is independent by batch item and head, so that on large problems a few of them, whole,
are compared, gradients included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .inputs import rounder, widen
from .workloads import Windowed, Workload

CHUNK = 1 << 26  # elements of the attention matrix at a time
PAIRS = 1 << 33  # elements of attention matrices in one comparison, about


class Arithmetic:
    """A precision: how arrays are widened, and what is rounded back to the input's dtype."""

    def __init__(self, xp: Any, dtype: str, exact: bool) -> None:
        self.xp = xp
        self.exact = exact or dtype == "f64"
        self.float = np.float64 if self.exact else np.float32
        self.round: Callable[[Any], Any] = (lambda x: x) if self.exact else rounder(dtype, xp)

    def widen(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return {name: widen(array, self.xp, self.float) for name, array in arrays.items()}


def answers(w: Workload, direction: str, arrays: dict[str, Any], xp: Any, exact: bool) -> list[Any]:
    """Return the results in the order of `w.results`, on what `select` keeps of them."""
    arithmetic = Arithmetic(xp, w.dtype, exact)
    compute = {
        "rope": _rope,
        "multi_token": _multi_token,
        "fused_neighborhood": _fused,
        "neighborhood": _neighborhood,
    }[w.operator]
    if w.operator != "neighborhood":
        arrays = arithmetic.widen(arrays)
    return [arithmetic.round(x) for x in compute(w, direction == "backward", arrays, arithmetic)]


def select(w: Workload, outputs: list[Any]) -> list[Any]:
    """Return the part of a provider's outputs that `answers` computes."""
    if w.operator != "neighborhood":
        return outputs
    chosen = _slices(w)
    return [_stack([_slice(x, b, h) for b, h in chosen]) for x in outputs]


def _stack(parts: list[Any]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.stack(parts)
    import cupy

    if parts[0].dtype.name == "bfloat16":
        return cupy.stack([p.view(np.uint16) for p in parts]).view(parts[0].dtype)
    return cupy.stack(parts)


def error(w: Workload, direction: str, outputs: list[Any], exact: list[Any], xp: Any) -> float:
    """Return max |output - exact| / max |exact|, the largest over the outputs."""
    if len(outputs) != len(exact):
        raise ValueError(f"expected {len(exact)} outputs, got {len(outputs)}")
    scales = dict(zip(w.results(direction), (_peak(e, xp) for e in exact), strict=True))
    if "d_k_bias" in scales:
        # A constant added to every key cancels in the softmax: this gradient is zero, and its
        # rounding errors are measured on the scale of the query's.
        scales["d_k_bias"] = max(scales["d_k_bias"], scales["d_q_bias"])
    worst = 0.0
    for out, value, scale in zip(outputs, exact, scales.values(), strict=True):
        if out.shape != value.shape:
            raise ValueError(f"expected an output of shape {value.shape}, got {out.shape}")
        difference = _peak(widen(out, xp, np.float64) - value, xp)
        ratio = difference / scale if scale else difference
        worst = ratio if not ratio <= worst else worst  # keeps a NaN
    return worst


def _peak(array: Any, xp: Any) -> float:
    return float(xp.abs(array).max()) if array.size else 0.0


def _rope(w: Workload, backward: bool, x: dict[str, Any], a: Arithmetic) -> list[Any]:
    sin = -x["sin"] if backward else x["sin"]
    results = []
    for name in ("dq", "dk") if backward else ("q", "k"):
        first, second = a.xp.split(x[name], 2, axis=-1)
        turned = a.xp.concatenate([-second, first], axis=-1)
        results.append(x[name] * x["cos"][:, None] + turned * sin[:, None])
    return results


def _multi_token(w: Any, backward: bool, x: dict[str, Any], a: Arithmetic) -> list[Any]:
    xp, half = a.xp, w.kernel // 2
    weight = x["weight"].reshape(w.groups, -1, *x["weight"].shape[1:])  # [g, out, in, k, k]
    allowed = xp.tri(w.seq, dtype=bool)
    taps = [(u, v) for u in range(w.kernel) for v in range(w.kernel)]

    def shifted(padded: Any, u: int, v: int) -> Any:
        """Return the map moved by one tap, as [groups, channels, seq * seq]."""
        return padded[:, u : u + w.seq, v : v + w.seq].reshape(w.groups, -1, w.seq**2)

    def pad(maps: Any) -> Any:
        return xp.pad(maps, ((0, 0), (w.kernel, w.kernel), (w.kernel, w.kernel)))

    results: list[list[Any]] = [[], [], []]
    for b in range(w.batch):
        p = a.round(_activation(w.activation, xp.where(allowed, x["scores"][b], -np.inf), xp))
        padded, low = pad(p), w.kernel - half
        if not backward:
            y = sum(weight[..., u, v] @ shifted(padded, low + u, low + v) for u, v in taps)
            y = y.reshape(p.shape) + x["bias"][:, None, None]
            results[0].append(xp.where(allowed, y, 0))
            continue
        dy = xp.where(allowed, x["dy"][b], 0)
        columns, spread = dy.reshape(w.groups, -1, w.seq**2), pad(dy)
        high = w.kernel + half
        dp = sum(
            weight[..., u, v].transpose(0, 2, 1) @ shifted(spread, high - u, high - v)
            for u, v in taps
        ).reshape(p.shape)
        # Row by row of the map and then summed: one product over seq * seq terms with so few
        # results would run on one multiprocessor.
        by_row = columns.reshape(w.groups, -1, w.seq, w.seq).transpose(0, 2, 1, 3)
        d_weight = xp.stack(
            [
                (
                    by_row
                    @ shifted(padded, low + u, low + v)
                    .reshape(w.groups, -1, w.seq, w.seq)
                    .transpose(0, 2, 3, 1)
                ).sum(1)
                for u, v in taps
            ],
            axis=-1,
        )
        if w.activation == "sparsemax":
            support = p > 0
            mean = xp.where(support, dp, 0).sum(-1, keepdims=True) / support.sum(-1, keepdims=True)
            d_scores = xp.where(support, dp - mean.astype(a.float), 0)
        else:
            d_scores = p * (dp - (p * dp).sum(-1, keepdims=True))
        for result, value in zip(results, (d_scores, d_weight, dy.sum((1, 2))), strict=True):
            result.append(value)
    if not backward:
        return [xp.stack(results[0])]
    d_scores, d_weight, d_bias = results
    return [xp.stack(d_scores), sum(d_weight).reshape(x["weight"].shape), sum(d_bias)]


def _activation(name: str, z: Any, xp: Any) -> Any:
    if name == "softmax":
        e = xp.exp(z - z.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    ordered = xp.sort(z, axis=-1)[..., ::-1]
    total, count = ordered.cumsum(-1), xp.arange(1, z.shape[-1] + 1, dtype=z.dtype)
    size = (1 + count * ordered > total).sum(-1, keepdims=True)
    threshold = (xp.take_along_axis(total, size - 1, axis=-1) - 1) / size
    return xp.maximum(z - threshold.astype(z.dtype), 0)


def axis_mask(axis: tuple[Any, ...], xp: Any = np) -> Callable[[Any], Any]:
    """Return a function of query tokens of one axis: [query, key], whether the key is seen.

    `axis` is an item of `Windowed.axes`.
    """
    from cupyattn.reference.neighborhood import window

    length, _, dilation, *_ = axis
    start, end = (xp.asarray(bound) for bound in window(*axis))
    key = xp.arange(length)
    group, position = key % dilation, key // dilation

    def rows(query: Any) -> Any:
        same_group = (query % dilation)[:, None] == group
        return same_group & (position >= start[query][:, None]) & (position < end[query][:, None])

    return rows


def masks(w: Windowed, xp: Any) -> Callable[[slice], Any]:
    """Return a function that gives rows of the [token, token] mask."""
    axes = [axis_mask(axis, xp) for axis in w.axes()]
    rank = len(axes)

    def rows(part: slice) -> Any:
        coordinates = np.unravel_index(np.arange(part.start, part.stop), w.space)
        mask = None
        for i, (axis, coordinate) in enumerate(zip(axes, coordinates, strict=True)):
            shape = [-1] + [w.space[i] if j == i else 1 for j in range(rank)]
            one = axis(xp.asarray(coordinate)).reshape(shape)
            mask = one if mask is None else mask & one
        return mask.reshape(part.stop - part.start, w.tokens)

    return rows


def attend(
    q: Any, k: Any, v: Any, dy: Any, rows: Callable[[slice], Any], a: Arithmetic
) -> list[Any]:
    """Return y, or dq, dk, dv where `dy` is given, of one head: arrays [token, channel]."""
    xp, scale = a.xp, q.shape[-1] ** -0.5
    first = xp.empty_like(q if dy is not None else v)
    dk, dv = xp.zeros_like(k), xp.zeros_like(v)
    for part in _chunks(len(q), max(1, CHUNK // len(q))):
        s = xp.where(rows(part), (q[part] @ k.T) * a.float(scale), -np.inf)
        p = xp.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        if dy is None:
            first[part] = a.round(p) @ v
            continue
        dp = dy[part] @ v.T
        dp -= (p * dp).sum(-1, keepdims=True)
        ds = a.round(p * dp * a.float(scale))
        first[part] = ds @ k
        dk += ds.T @ q[part]
        dv += a.round(p).T @ dy[part]
    return [first] if dy is None else [first, dk, dv]


def _chunks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _slices(w: Any) -> list[tuple[int, int]]:
    total = w.batch * w.heads
    count = int(np.clip(PAIRS // w.tokens**2, 1, min(total, 16)))
    chosen = np.unique(np.linspace(0, total - 1, count).astype(int))
    return [divmod(int(i), w.heads) for i in chosen]


def _slice(array: Any, b: int, h: int) -> Any:
    part = array[b, ..., h, :]
    if part.dtype.name == "bfloat16":  # through integers: not every routine takes bfloat16
        return part.view(np.uint16).reshape(-1, part.shape[-1]).view(part.dtype)
    return part.reshape(-1, part.shape[-1])


def _neighborhood(w: Any, backward: bool, x: dict[str, Any], a: Arithmetic) -> list[Any]:
    rows = masks(w, a.xp)
    results = []
    for b, h in _slices(w):
        part = a.widen({name: _slice(array, b, h) for name, array in x.items()})
        dy = part["dy"] if backward else None
        results.append(attend(part["q"], part["k"], part["v"], dy, rows, a))
    return [a.xp.stack(values) for values in zip(*results, strict=True)]


def _fused(w: Any, backward: bool, x: dict[str, Any], a: Arithmetic) -> list[Any]:
    rows, xp = masks(w, a.xp), a.xp
    tokens = x["hidden_states"].reshape(-1, w.hidden)
    q, k, v = (
        a.round(tokens @ x[f"{name}_weight"].T + x[f"{name}_bias"]) for name in ("q", "k", "v")
    )

    def heads(array: Any) -> Any:
        return array.reshape(w.batch, w.tokens, w.heads, -1)

    attention, dq, dk, dv = (xp.empty_like(q) for _ in range(4))
    split = [heads(array) for array in (q, k, v, attention, dq, dk, dv)]
    if backward:
        dy = x["dy"].reshape(-1, w.hidden)
        d_attention = a.round(dy @ x["out_weight"])
    for b in range(w.batch):
        for h in range(w.heads):
            one = [xp.ascontiguousarray(array[b, :, h]) for array in split[:3]]
            split[3][b, :, h] = attend(*one, None, rows, a)[0]
            if backward:
                grad = xp.ascontiguousarray(heads(d_attention)[b, :, h])
                for array, value in zip(split[4:], attend(*one, grad, rows, a), strict=True):
                    array[b, :, h] = value
    attention = a.round(attention)
    shape = x["hidden_states"].shape
    if not backward:
        return [(attention @ x["out_weight"].T + x["out_bias"]).reshape(shape)]
    dq, dk, dv = a.round(dq), a.round(dk), a.round(dv)
    dx = dq @ x["q_weight"] + dk @ x["k_weight"] + dv @ x["v_weight"]
    weights = [dq.T @ tokens, dk.T @ tokens, dv.T @ tokens, dy.T @ attention]
    return [dx.reshape(shape), *weights, *(array.sum(0) for array in (dq, dk, dv, dy))]
