"""Neighborhood attention in one, two and three dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from . import _checks
from ._launch import Operator, call
from ._program import Layout
from .configs import neighborhood as configs
from .configs.neighborhood import Problem
from .reference import neighborhood as reference


def neighborhood_attention(q, k, v, kernel_size, *, dilation=1, stride=1, is_causal=False,
                           scale=None, boundary="shift", precision="fp32", return_lse=False,
                           out=None):
    """Attend from each token to the window of tokens around it.

    Parameters
    ----------
    q : array, (batch, *space, heads, head_dim), float16, bfloat16, float32 or float64
        Queries; `space` has 1 to 3 axes. NumPy, CuPy or torch (CUDA). A heads-first array is
        passed as a transposed view. Copied only if the last axis is strided.
    k : array, (batch, *space, kv_heads, head_dim)
        Keys. Query head `h` reads key head ``h // (heads // kv_heads)``.
    v : array, (batch, *space, kv_heads, value_dim)
        Values.
    kernel_size : int or tuple of int
        Keys in the window, per axis or for every axis.
    dilation : int or tuple of int
        Distance between the keys of a window, in tokens.
    stride : int or tuple of int
        Queries that share the window of their leader; 1 is a sliding window, `kernel_size`
        blocked attention.
    is_causal : bool or tuple of bool
        Per axis: no key after the query.
    scale : float, optional
        Factor of the scores; ``head_dim ** -0.5`` when None.
    boundary : {"shift", "clip"}
        At a border the window is moved inward and keeps its size ("shift"), or is cut ("clip":
        odd `kernel_size`, stride 1).
    precision : {"fp32", "tf32"}
        For float32 arrays: as accurate as float32 arithmetic, or one TF32 product. Checked and
        otherwise ignored for other dtypes.
    return_lse : bool
        Return the log of the sum of exponentials too.
    out : array or tuple of arrays, optional
        Written in place of new results; None entries are allocated.

    Returns
    -------
    y : array, (batch, *space, heads, value_dim)
        Of the kind and dtype of `q`.
    lse : array, (batch, *space, heads), float32 (float64 beside float64)
        Natural logarithm. Only with `return_lse`.

    Raises
    ------
    TypeError
        For arrays of unlike kinds or dtypes, and options of the wrong type.
    ValueError
        For shapes that do not fit together, a window larger than its axis ("shift"), or an
        option outside its range.
    NotImplementedError
        On a GPU, for head_dim or value_dim above 512.

    References
    ----------
    Hassani et al., "Neighborhood Attention Transformer", 2023; "Generalized Neighborhood
    Attention", 2025.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> q = k = v = np.ones((1, 6, 8, 2, 4), np.float32)     # a 6 x 8 grid, 2 heads of 4
    >>> cupyattn.neighborhood_attention(q, k, v, kernel_size=3).shape
    (1, 6, 8, 2, 4)
    """
    return_lse = _checks.boolean("return_lse", return_lse)
    options = (kernel_size, dilation, stride, is_causal, scale, boundary, precision, return_lse)
    results = call(FORWARD, (q, k, v), options, _checks.outputs(out, 1 + return_lse))
    return tuple(results) if return_lse else results[0]


def neighborhood_attention_backward(dy, q, k, v, y, lse, kernel_size, *, dlse=None, dilation=1,
                                    stride=1, is_causal=False, scale=None, boundary="shift",
                                    precision="fp32", out=None):
    """Gradients of `neighborhood_attention`, the one through `lse` included.

    Parameters
    ----------
    dy : array, (batch, *space, heads, value_dim)
        Gradient of `y`.
    q, k, v : arrays
        The forward's inputs.
    y, lse : arrays
        The forward's results, with ``return_lse=True``.
    dlse : array, (batch, *space, heads), optional
        Gradient of `lse`, where it was used.
    kernel_size, dilation, stride, is_causal, scale, boundary, precision
        As in the forward.
    out : tuple of arrays, optional
        Written in place of new (dq, dk, dv); None entries are allocated.

    Returns
    -------
    dq, dk, dv : arrays
        Of the shapes and dtype of `q`, `k` and `v`. The same bits every time.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the forward.
    """
    options = (kernel_size, dilation, stride, is_causal, scale, boundary, precision, False)
    return tuple(call(BACKWARD, (dy, q, k, v, y, lse, dlse), options, _checks.outputs(out, 3)))


def _normalise(q, options: tuple) -> tuple[Any, ...]:
    kernel_size, dilation, stride, is_causal, scale, boundary, precision, return_lse = options
    rank = _checks.space_rank("q", q, 3)
    return (_checks.per_axis("kernel_size", kernel_size, rank),
            _checks.per_axis("dilation", dilation, rank),
            _checks.per_axis("stride", stride, rank),
            _checks.per_axis("is_causal", is_causal, rank, _checks.boolean),
            _checks.scale(scale),
            _checks.choice("boundary", boundary, ("shift", "clip")),
            _checks.choice("precision", precision, ("fp32", "tf32")),
            return_lse)


def _window(problem: Problem) -> tuple[Any, ...]:
    return (problem.kernel_size, problem.dilation, problem.stride, problem.is_causal,
            problem.scale, problem.boundary)


def _forward_results(problem: Problem) -> dict[str, Layout]:
    results = {"y": problem.y_layout}
    if problem.return_lse:
        results["lse"] = problem.lse_layout
    return results


def _forward_reference(arrays: Mapping[str, Any], problem: Problem, scalars: Mapping[str, Any]):
    y, lse = reference.forward(arrays["q"], arrays["k"], arrays["v"], *_window(problem))
    return (y, lse) if problem.return_lse else (y,)


def _backward_results(problem: Problem) -> dict[str, Layout]:
    return {f"d{name}": Layout(layout.shape, layout.dtype)
            for name, layout in (("q", problem.q), ("k", problem.k), ("v", problem.v))}


def _backward_reference(arrays: Mapping[str, Any], problem: Problem, scalars: Mapping[str, Any]):
    given = [arrays[name] for name in ("dy", "q", "k", "v", "y", "lse")]
    arguments: list[Any] = [*given, *_window(problem), arrays["dlse"]]
    return reference.backward(*arguments)


def pairs(problem: Problem) -> int:
    """Count the (query, key) pairs of all windows, batch items and heads."""
    axes = zip(problem.space, problem.kernel_size, problem.dilation, problem.stride,
               problem.is_causal)
    windows = (reference.window(*axis, problem.boundary) for axis in axes)
    return problem.batch * problem.heads * math.prod(
        int((end - start).sum()) for start, end in windows)


FORWARD = Operator(
    name="neighborhood_fwd", mixed=True, arrays=("q", "k", "v"), table=configs.FORWARD,
    normalise=lambda arrays, options: _normalise(arrays[0], options),
    problem=_checks.neighborhood, results=_forward_results, reference=_forward_reference,
    flops=lambda p: 2 * pairs(p) * (p.head_dim + p.value_dim), over="q")
BACKWARD = Operator(
    name="neighborhood_bwd", mixed=True, arrays=("dy", "q", "k", "v", "y", "lse", "dlse"),
    table=configs.BACKWARD, normalise=lambda arrays, options: _normalise(arrays[1], options),
    problem=_checks.neighborhood, results=_backward_results, reference=_backward_reference,
    flops=lambda p: 2 * pairs(p) * (3 * p.head_dim + 2 * p.value_dim),
    any_strides=frozenset({"lse", "dlse"}), over="dy")
