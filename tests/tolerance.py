"""How far a result may be from the exact one.

The rule: with `exact` from float64 (wider for float64 arrays) on the same rounded inputs, and
`plain` from the textbook sequence in the arrays' dtype,

    max|ours - exact| <= 2 * max|plain - exact| + 4 * eps(dtype) * max|exact|.

A test that states its own tolerance gets the looser of the two.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

# Absolute, and relative to max(1, max|exact|), for the reported faults of tests/CASES.md.
CASE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2, "float64": 1e-12}


def eps(dtype) -> float:
    """Distance from 1 to the next number of the dtype."""
    return float(ml_dtypes.finfo(dtype).eps)


def _widened(x):
    return x if x.dtype in (np.float64, np.longdouble) else x.astype(np.float64)


def _distance(a, b):
    """|a - b|, with inf where either is NaN or they differ and one is infinite."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(_widened(a) - b)
    return np.where(np.isnan(difference), np.inf, difference)


def _largest(x) -> float:
    return float(np.max(x)) if x.size else 0.0


def agree(ours: np.ndarray, exact: np.ndarray,
          plain: np.ndarray | Callable[[], np.ndarray] | None = None, *, what: str = "result",
          row: str = "", case: float | bool | None = None) -> None:
    """Fail unless `ours` satisfies the rule; `case` is a tolerance of the test's own.

    `case=True` takes the dtype's from `CASE`. `plain` may be a function, called only if the
    case's tolerance does not decide. On failure the worst coordinate, both values and the name
    of the kernel row are printed.
    """
    name = f"{what} [{row}]" if row else what
    if ours.shape != exact.shape:
        raise AssertionError(f"{name} has shape {ours.shape}, expected {exact.shape}")
    distance, scale = _distance(ours, exact), _largest(np.abs(exact))
    worst = _largest(distance)
    allowed, terms = 0.0, []
    if case:
        tolerance = CASE[ours.dtype.name] if case is True else case
        allowed = tolerance * max(1.0, scale)
        terms.append(f"{tolerance:.3g} * max(1, {scale:.6g})")
    if worst > allowed and plain is not None:
        plain_error = _largest(_distance(plain() if callable(plain) else plain, exact))
        allowed = max(allowed, 2 * plain_error + 4 * eps(ours.dtype) * scale)
        terms.append(f"2 * {plain_error:.6g} + 4 * {eps(ours.dtype):.3g} * {scale:.6g}")
    if not worst <= allowed:
        at = np.unravel_index(int(np.argmax(distance)), distance.shape)
        raise AssertionError(
            f"{name} at {tuple(int(i) for i in at)} of {ours.shape} {ours.dtype.name}: "
            f"{float(ours[at])!r} instead of {float(exact[at])!r}, off by {worst:.6g}; "
            f"allowed {allowed:.6g} ({' or '.join(terms)}); "
            f"{int((distance > allowed).sum())} of {ours.size} elements are off")


def identical(ours: np.ndarray, other: np.ndarray, *, what: str = "result") -> None:
    """Fail unless two arrays hold the same bits."""
    if ours.shape != other.shape or ours.dtype != other.dtype:
        raise AssertionError(f"{what}: {ours.dtype}{ours.shape} against {other.dtype}{other.shape}")
    if ours.size == 0:
        return
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(x.size, -1)
            for x in (ours, other))
    differs = (a != b).any(-1)
    if differs.any():
        at = np.unravel_index(int(np.argmax(differs)), ours.shape)
        raise AssertionError(f"{what} at {tuple(int(i) for i in at)}: {ours[at]!r} and "
                             f"{other[at]!r}; {int(differs.sum())} of {ours.size} differ")
