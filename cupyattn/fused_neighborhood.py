"""The fused neighborhood attention module: projections, attention, output projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import _checks
from ._launch import Operator, call
from ._program import Layout
from .configs import fused_neighborhood as configs
from .configs.fused_neighborhood import BIASES, WEIGHTS, Problem
from .neighborhood import BACKWARD as _ATTENTION_BACKWARD
from .neighborhood import FORWARD as _ATTENTION_FORWARD
from .reference import fused_neighborhood as reference

_INPUTS = ("hidden_states", *WEIGHTS, *BIASES)
_RESIDUALS = ("q", "k", "v", "attn", "lse")


def fused_neighborhood_attention(hidden_states, q_weight, k_weight, v_weight, out_weight,
                                 q_bias=None, k_bias=None, v_bias=None, out_bias=None, *,
                                 num_heads, num_kv_heads=None, kernel_size, dilation=1, stride=1,
                                 is_causal=False, scale=None, boundary="clip", rope=None,
                                 precision="fp32", return_residuals=False, out=None):
    """Project to q, k and v, attend within each neighborhood, project the heads back.

    Parameters
    ----------
    hidden_states : array, (batch, *space, hidden), float16, bfloat16, float32 or float64
        Tokens on a grid of 1 to 3 axes. NumPy, CuPy or torch (CUDA). Copied only if its tokens
        do not lie at one stride, a multiple of 16 bytes.
    q_weight : array, (num_heads * head_dim, hidden)
        Row = output feature. Row slices of a packed weight, or transposed ones, are fine; other
        strides than multiples of 16 bytes cost a copy.
    k_weight, v_weight : array, (num_kv_heads * head_dim, hidden)
    out_weight : array, (hidden, num_heads * head_dim)
    q_bias, k_bias, v_bias, out_bias : array, optional
        One value per row of their weight.
    num_heads, num_kv_heads : int
        Query heads, and key and value heads (`num_heads` when None).
    kernel_size, dilation, stride, is_causal, scale, boundary, precision
        As in `neighborhood_attention`, except that `boundary` is "clip" by default: the banded
        mask of the published module.
    rope : (cos, sin) or (cos, sin, interleaved), optional
        Rotate q and k before attention. Tables (tokens, width) or (batch or 1, tokens, width),
        one row per token, spatial tokens in row-major order.
    return_residuals : bool
        Return what the backward needs too.
    out : array or tuple, optional
        Written in place of a new `y`; with `return_residuals` a tuple (y, residuals).

    Returns
    -------
    y : array, (batch, *space, hidden)
        Of the kind and dtype of `hidden_states`. 16-bit inputs accumulate in float32; q, k and
        v are rounded to their dtype in between.
    residuals : tuple of arrays
        For `fused_neighborhood_attention_backward`; opaque, O(tokens) in size. Only with
        `return_residuals`.

    Raises
    ------
    TypeError
        For arrays of unlike kinds or dtypes, and options of the wrong type.
    ValueError
        For shapes that do not fit together and options outside their range.
    NotImplementedError
        On a GPU, for head_dim above 512.

    References
    ----------
    Hassani et al., "Neighborhood Attention Transformer", 2023.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x, w = np.ones((1, 9, 8), np.float32), np.eye(8, dtype=np.float32)
    >>> cupyattn.fused_neighborhood_attention(x, w, w, w, w, num_heads=2, kernel_size=3).shape
    (1, 9, 8)
    """
    return_residuals = _checks.boolean("return_residuals", return_residuals)
    cos, sin, interleaved = _rotation(rope)
    arrays = (hidden_states, q_weight, k_weight, v_weight, out_weight, q_bias, k_bias, v_bias,
              out_bias, cos, sin)
    options = (num_heads, num_kv_heads, kernel_size, dilation, stride, is_causal, scale, boundary,
               interleaved, precision, return_residuals)
    if return_residuals and out is not None:
        y, residuals = _checks.outputs(out, 2)
        out = (y, *(_checks.outputs(residuals, len(_RESIDUALS)) or (None,) * len(_RESIDUALS)))
    else:
        out = _checks.outputs(out, 1)
    y, *residuals = call(FORWARD, arrays, options, out)
    return (y, tuple(residuals)) if return_residuals else y


def fused_neighborhood_attention_backward(dy, hidden_states, q_weight, k_weight, v_weight,
                                          out_weight, q_bias, k_bias, v_bias, out_bias, residuals,
                                          *, num_heads, num_kv_heads=None, kernel_size,
                                          dilation=1, stride=1, is_causal=False, scale=None,
                                          boundary="clip", rope=None, precision="fp32", out=None):
    """Gradients of `fused_neighborhood_attention` with respect to its nine arrays.

    Parameters
    ----------
    dy : array, (batch, *space, hidden)
        Gradient of `y`.
    hidden_states, q_weight, k_weight, v_weight, out_weight : arrays
    q_bias, k_bias, v_bias, out_bias : arrays or None
        The forward's inputs.
    residuals : tuple of arrays
        From the forward with ``return_residuals=True`` and the same arguments.
    num_heads, num_kv_heads, kernel_size, dilation, stride, is_causal, scale, boundary,
    rope, precision
        As in the forward.
    out : tuple of nine arrays, optional
        Written in place of new results; None entries are allocated.

    Returns
    -------
    tuple of nine arrays
        Gradients of `hidden_states`, the four weights and the four biases, in this order; None
        where a bias was None. The same bits every time.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the forward.
    """
    if not isinstance(residuals, (tuple, list)):
        raise TypeError(f"residuals is a {type(residuals).__name__}; accepted is the tuple that "
                        "the forward returned with return_residuals=True")
    if len(residuals) != len(_RESIDUALS):
        raise ValueError(f"residuals has {len(residuals)} entries; accepted are the "
                         f"{len(_RESIDUALS)} that the forward returned")
    cos, sin, interleaved = _rotation(rope)
    given = (hidden_states, q_weight, k_weight, v_weight, out_weight, q_bias, k_bias, v_bias,
             out_bias)
    options = (num_heads, num_kv_heads, kernel_size, dilation, stride, is_causal, scale, boundary,
               interleaved, precision, True)
    out = _checks.outputs(out, len(given))
    if out is not None:
        out = tuple(target for target, x in zip(out, given) if x is not None)
    results = iter(call(BACKWARD, (dy, *given, cos, sin, *residuals), options, out))
    return tuple(None if x is None else next(results) for x in given)


def _rotation(rope) -> tuple[Any, Any, bool]:
    """Return cos, sin and interleaved; None and False without rotation."""
    if rope is None:
        return None, None, False
    if not isinstance(rope, (tuple, list)):
        raise TypeError(f"rope is a {type(rope).__name__}; accepted are (cos, sin) and "
                        "(cos, sin, interleaved)")
    if len(rope) not in (2, 3):
        raise ValueError(f"rope has {len(rope)} entries; accepted are (cos, sin) and "
                         "(cos, sin, interleaved)")
    for i, x in enumerate(rope[:2]):
        if x is None:
            raise TypeError(f"rope[{i}] is None; accepted is an array")
    return rope[0], rope[1], _checks.boolean("rope[2]", rope[2]) if len(rope) == 3 else False


def _normalise(hidden_states, options: tuple) -> tuple[Any, ...]:
    (num_heads, num_kv_heads, kernel_size, dilation, stride, is_causal, scale, boundary,
     interleaved, precision, return_residuals) = options
    rank = _checks.space_rank("hidden_states", hidden_states, 2)
    return (_checks.integer("num_heads", num_heads),
            None if num_kv_heads is None else _checks.integer("num_kv_heads", num_kv_heads),
            _checks.per_axis("kernel_size", kernel_size, rank),
            _checks.per_axis("dilation", dilation, rank),
            _checks.per_axis("stride", stride, rank),
            _checks.per_axis("is_causal", is_causal, rank, _checks.boolean),
            _checks.scale(scale),
            _checks.choice("boundary", boundary, ("shift", "clip")), interleaved,
            _checks.choice("precision", precision, ("fp32", "tf32")), return_residuals)


def _module(arrays: Mapping[str, Any], p: Problem) -> tuple[Any, ...]:
    rope = None if p.cos is None else (arrays["cos"], arrays["sin"], p.interleaved)
    return (p.heads, p.kv_heads, p.kernel_size, p.dilation, p.stride, p.is_causal, p.scale,
            p.boundary, rope)


def _forward_results(problem: Problem) -> dict[str, Layout]:
    y = Layout(problem.hidden_states.shape, problem.dtype)
    return {"y": y, **(problem.residuals if problem.return_residuals else {})}


def _forward_reference(arrays: Mapping[str, Any], problem: Problem, scalars: Mapping[str, Any]):
    y, residuals = reference.forward(*(arrays[name] for name in _INPUTS),
                                     *_module(arrays, problem))
    return (y, *residuals) if problem.return_residuals else (y,)


def _backward_results(problem: Problem) -> dict[str, Layout]:
    given = {name: getattr(problem, name) for name in _INPUTS}
    return {f"d_{name}": Layout(layout.shape, layout.dtype)
            for name, layout in given.items() if layout is not None}


def _backward_reference(arrays: Mapping[str, Any], problem: Problem, scalars: Mapping[str, Any]):
    given = [arrays[name] for name in ("dy", *_INPUTS)]
    residuals = tuple(arrays[name] for name in _RESIDUALS)
    arguments: list[Any] = [*given, residuals, *_module(arrays, problem)]
    results = reference.backward(*arguments)
    return [x for x in results if x is not None]


def _flops(problem: Problem, backward: bool) -> int:
    """Count the projections (twice in the backward) and the attention between them."""
    x, weights = problem.hidden_states, (getattr(problem, name) for name in WEIGHTS)
    products = 2 * (x.size // x.shape[-1]) * sum(weight.size for weight in weights)
    attention = (_ATTENTION_BACKWARD if backward else _ATTENTION_FORWARD).flops(
        problem.attention(backward))
    return (1 + backward) * products + attention


_ANY = frozenset({*BIASES, "cos", "sin"})
FORWARD = Operator(
    name="fused_neighborhood_fwd", mixed=True, arrays=(*_INPUTS, "cos", "sin"),
    table=configs.FORWARD,
    normalise=lambda arrays, options: _normalise(arrays[0], options),
    problem=_checks.fused_neighborhood, results=_forward_results, reference=_forward_reference,
    flops=lambda p: _flops(p, False), any_strides=_ANY,
    as_matrix=frozenset({"hidden_states", *WEIGHTS}), dense=frozenset({"y", *_RESIDUALS}),
    over="hidden_states")
BACKWARD = Operator(
    name="fused_neighborhood_bwd", mixed=True,
    arrays=("dy", *_INPUTS, "cos", "sin", *_RESIDUALS),
    table=configs.BACKWARD, normalise=lambda arrays, options: _normalise(arrays[1], options),
    problem=_checks.fused_neighborhood, results=_backward_results,
    reference=_backward_reference, flops=lambda p: _flops(p, True), any_strides=_ANY,
    as_matrix=frozenset({"hidden_states", "dy", *WEIGHTS}),
    dense=frozenset({*_RESIDUALS, *(f"d_{name}" for name in _INPUTS)}), over="hidden_states")
