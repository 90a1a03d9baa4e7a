"""Multi-token attention: softmax of causal scores, then a convolution over queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import _checks
from ._launch import Operator, call
from ._program import Layout
from .configs.multi_token import Problem
from .configs.multi_token_bwd import BACKWARD as BACKWARD_ROWS
from .configs.multi_token_fwd import FORWARD as FORWARD_ROWS
from .reference import multi_token as reference


def multi_token_attention(scores, weight, bias=None, *, groups=1, dilation=1, padding="same",
                          activation="softmax", out=None):
    """Mask causally, normalise each row, convolve across heads, mask again.

    With ``padding="same"``, the published form, the convolution is centred on the query too:
    row `i` sees the weights of later queries, up to ``(kh - 1 - kh // 2) * dilation`` ahead.
    ``padding="causal"`` uses the current and earlier queries only.

    Parameters
    ----------
    scores : array, (batch, heads_in, seq, seq), float16, bfloat16, float32 or float64
        Attention scores, queries by keys, already scaled. What stands above the diagonal never
        matters. NumPy, CuPy or torch (CUDA); any strides.
    weight : array, (heads_out, heads_in // groups, kh, kw)
        Convolution kernel over (query, key): cross-correlation, odd or even sizes.
    bias : array, (heads_out,), optional
    groups : int
        Groups of heads that are convolved apart.
    dilation : int or (int, int)
        Distance between taps, in (queries, keys).
    padding : {"same", "causal"}
    activation : {"softmax", "sparsemax"}
    out : array, optional
        Written in place of a new result.

    Returns
    -------
    array, (batch, heads_out, seq, seq)
        Zero above the diagonal. Of the kind and dtype of `scores`.

    Raises
    ------
    TypeError
        For arrays of unlike kinds or dtypes, and options of the wrong type.
    ValueError
        For shapes that do not fit together and options outside their range.

    References
    ----------
    Golovneva et al., "Multi-Token Attention", 2025; Martins and Astudillo, "From Softmax to
    Sparsemax", 2016.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> scores = np.zeros((1, 2, 4, 4), np.float32)
    >>> weight = np.ones((2, 2, 3, 3), np.float32)
    >>> cupyattn.multi_token_attention(scores, weight).shape
    (1, 2, 4, 4)
    """
    return call(FORWARD, (scores, weight, bias), (groups, dilation, padding, activation),
                _checks.outputs(out, 1))[0]


def multi_token_attention_backward(dy, scores, weight, bias=None, *, groups=1, dilation=1,
                                   padding="same", activation="softmax", out=None):
    """Gradients of `multi_token_attention`.

    Parameters
    ----------
    dy : array, (batch, heads_out, seq, seq)
        Gradient of the result; what stands above the diagonal never matters.
    scores, weight, bias : arrays
        The forward's inputs.
    groups, dilation, padding, activation
        As in the forward.
    out : tuple of arrays, optional
        Written in place of new results; None entries are allocated. Without `bias` the third
        entry is absent or None.

    Returns
    -------
    d_scores, d_weight, d_bias : arrays
        `d_scores` is zero above the diagonal; `d_bias` is None without `bias`. The same bits
        every time.

    Raises
    ------
    TypeError, ValueError
        As the forward.
    """
    results = call(BACKWARD, (dy, scores, weight, bias), (groups, dilation, padding, activation),
                   _checks.outputs(out, 3 if bias is not None else 2, 3))
    return tuple(results) if bias is not None else (*results, None)


def _normalise(arrays, options: tuple) -> tuple[Any, ...]:
    groups, dilation, padding, activation = options
    return (_checks.integer("groups", groups), _checks.per_axis("dilation", dilation, 2),
            _checks.choice("padding", padding, ("same", "causal")),
            _checks.choice("activation", activation, ("softmax", "sparsemax")))


def _convolution(problem: Problem) -> tuple[Any, ...]:
    return problem.groups, problem.dilation, problem.padding, problem.activation


def _forward_results(problem: Problem) -> dict[str, Layout]:
    batch, _, seq, _ = problem.scores.shape
    return {"y": Layout((batch, problem.weight.shape[0], seq, seq), problem.scores.dtype)}


def _forward_reference(arrays: Mapping[str, Any], problem: Problem, scalars: Mapping[str, Any]):
    return (reference.forward(arrays["scores"], arrays["weight"], arrays["bias"],
                              *_convolution(problem)),)


def _backward_results(problem: Problem) -> dict[str, Layout]:
    return {f"d_{name}": Layout(layout.shape, layout.dtype)
            for name, layout in (("scores", problem.scores), ("weight", problem.weight),
                                 ("bias", problem.bias)) if layout is not None}


def _backward_reference(arrays: Mapping[str, Any], problem: Problem, scalars: Mapping[str, Any]):
    results = reference.backward(*(arrays[n] for n in ("dy", "scores", "weight", "bias")),
                                 *_convolution(problem))
    return results if problem.bias is not None else results[:2]


def _flops(problem: Problem) -> int:
    """Count the convolution of the lower triangle."""
    batch, _, seq, _ = problem.scores.shape
    return batch * seq * (seq + 1) * problem.weight.size  # 2 a tap, half the matrix


# Scores and dy with a strided last axis are copied: every view gives the bits of its copy.
_ANY = frozenset({"weight", "bias"})
FORWARD = Operator(
    name="multi_token_fwd", mixed=True, arrays=("scores", "weight", "bias"), table=FORWARD_ROWS,
    normalise=_normalise, problem=_checks.multi_token, results=_forward_results,
    reference=_forward_reference, flops=_flops, any_strides=_ANY, over="scores")
BACKWARD = Operator(
    name="multi_token_bwd", mixed=True, arrays=("dy", "scores", "weight", "bias"),
    table=BACKWARD_ROWS,
    normalise=_normalise, problem=_checks.multi_token, results=_backward_results,
    reference=_backward_reference, flops=lambda p: 2 * _flops(p), any_strides=_ANY, over="dy")
