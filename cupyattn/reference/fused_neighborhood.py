"""The neighborhood attention module in NumPy: projections, rotation, attention, projection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import neighborhood
from .rope import rotate

__all__ = ["backward", "forward"]


@np.errstate(invalid="ignore", over="ignore")
def forward(
    hidden_states: np.ndarray,
    q_weight: np.ndarray,
    k_weight: np.ndarray,
    v_weight: np.ndarray,
    out_weight: np.ndarray,
    q_bias: np.ndarray | None,
    k_bias: np.ndarray | None,
    v_bias: np.ndarray | None,
    out_bias: np.ndarray | None,
    num_heads: int,
    num_kv_heads: int,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    stride: Sequence[int],
    is_causal: Sequence[bool],
    scale: float,
    boundary: str,
    rope: Sequence[Any] | None,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Project to q, k and v, attend within each neighborhood, and project back.

    Parameters
    ----------
    hidden_states : ndarray, (batch, *space, hidden)
    q_weight : ndarray, (num_heads * head_dim, hidden)
    k_weight, v_weight : ndarray, (num_kv_heads * head_dim, hidden)
    out_weight : ndarray, (hidden, num_heads * head_dim)
    q_bias, k_bias, v_bias, out_bias : ndarray, one number per row of its weight, or None
    num_heads, num_kv_heads : int
    kernel_size, dilation, stride, is_causal, scale, boundary
        As for `neighborhood.forward`.
    rope : (cos, sin) or (cos, sin, interleaved), or None
        Tables (tokens, width), or (1 or batch, tokens, width), that rotate q and k.

    Returns
    -------
    y : ndarray, (batch, *space, hidden), float64
    residuals : tuple of ndarray
        `(q, k, v, attn_out, lse)`, float64; q and k are rotated. Of 16-bit inputs, q, k and v
        hold values of the input's dtype: rounded after the projection, q and k once more after
        the rotation.
    """
    dtype = hidden_states.dtype

    def heads(weight: np.ndarray, bias: np.ndarray | None, count: int) -> np.ndarray:
        x = _round(_linear(hidden_states, weight, bias), dtype)
        return x.reshape(*hidden_states.shape[:-1], count, weight.shape[0] // max(count, 1))

    q = heads(q_weight, q_bias, num_heads)
    k = heads(k_weight, k_bias, num_kv_heads)
    v = heads(v_weight, v_bias, num_kv_heads)
    if rope is not None:
        q, k = _round(_rotate(q, rope), dtype), _round(_rotate(k, rope), dtype)
    attn_out, lse = neighborhood.forward(
        q, k, v, kernel_size, dilation, stride, is_causal, scale, boundary
    )
    y = _linear(_merge(attn_out), out_weight, out_bias)
    return y, (q, k, v, attn_out, lse)


@np.errstate(invalid="ignore", over="ignore")
def backward(
    dy: np.ndarray,
    hidden_states: np.ndarray,
    q_weight: np.ndarray,
    k_weight: np.ndarray,
    v_weight: np.ndarray,
    out_weight: np.ndarray,
    q_bias: np.ndarray | None,
    k_bias: np.ndarray | None,
    v_bias: np.ndarray | None,
    out_bias: np.ndarray | None,
    residuals: Sequence[np.ndarray] | None,
    num_heads: int,
    num_kv_heads: int,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    stride: Sequence[int],
    is_causal: Sequence[bool],
    scale: float,
    boundary: str,
    rope: Sequence[Any] | None,
) -> tuple[np.ndarray | None, ...]:
    """Gradients of `forward`; the rounding of 16-bit q, k and v counts as the identity.

    Parameters
    ----------
    dy : ndarray, (batch, *space, hidden)
    residuals : sequence of ndarray or None
        Not read: they are computed again, so that no rounding of theirs enters the gradients.
    hidden_states, q_weight, ..., rope
        As for `forward`.

    Returns
    -------
    tuple of ndarray, float64
        Gradients of `hidden_states`, `q_weight`, `k_weight`, `v_weight`, `out_weight`, `q_bias`,
        `k_bias`, `v_bias` and `out_bias`, None where a bias is None.
    """
    options = (kernel_size, dilation, stride, is_causal, scale, boundary)
    _, (q, k, v, attn_out, lse) = forward(
        hidden_states,
        q_weight,
        k_weight,
        v_weight,
        out_weight,
        q_bias,
        k_bias,
        v_bias,
        out_bias,
        num_heads,
        num_kv_heads,
        *options,
        rope,
    )
    d_merged, d_out_weight, d_out_bias = _linear_backward(dy, _merge(attn_out), out_weight)
    d_attn_out = d_merged.reshape(attn_out.shape)
    dq, dk, dv = neighborhood.backward(d_attn_out, q, k, v, attn_out, lse, *options)
    if rope is not None:
        dq, dk = _rotate(dq, rope, inverse=True), _rotate(dk, rope, inverse=True)
    x_of_q, d_q_weight, d_q_bias = _linear_backward(_merge(dq), hidden_states, q_weight)
    x_of_k, d_k_weight, d_k_bias = _linear_backward(_merge(dk), hidden_states, k_weight)
    x_of_v, d_v_weight, d_v_bias = _linear_backward(_merge(dv), hidden_states, v_weight)
    return (
        x_of_q + x_of_k + x_of_v,
        d_q_weight,
        d_k_weight,
        d_v_weight,
        d_out_weight,
        None if q_bias is None else d_q_bias,
        None if k_bias is None else d_k_bias,
        None if v_bias is None else d_v_bias,
        None if out_bias is None else d_out_bias,
    )


def _linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    y = x.astype(np.float64) @ weight.astype(np.float64).T
    return y if bias is None else y + bias.astype(np.float64)


def _linear_backward(
    dy: np.ndarray, x: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of the input, the weight and the bias."""
    rows = dy.astype(np.float64).reshape(math.prod(dy.shape[:-1]), dy.shape[-1])
    d_weight = rows.T @ x.astype(np.float64).reshape(len(rows), x.shape[-1])
    d_x = (rows @ weight.astype(np.float64)).reshape(x.shape)
    return d_x, d_weight, rows.sum(0)


def _merge(x: np.ndarray) -> np.ndarray:
    """Put the heads of each token in one row."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _round(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round to a 16-bit dtype, as what a kernel hands on is; wider inputs are left exact."""
    return x.astype(dtype).astype(np.float64) if dtype.itemsize == 2 else x


def _rotate(x: np.ndarray, rope: Sequence[Any], inverse: bool = False) -> np.ndarray:
    """Rotate (batch, *space, heads, head_dim); token t, in row-major order, by table row t."""
    cos, sin = (part if part.ndim == 3 else part[None] for part in rope[:2])
    interleaved = len(rope) > 2 and bool(rope[2])
    width, head_dim = cos.shape[-1], x.shape[-1]
    tokens = x.reshape(len(x), math.prod(x.shape[1:-2]), *x.shape[-2:])
    rows = np.arange(tokens.shape[1])[None]
    rotary_dim = head_dim if width == head_dim else 2 * width
    return rotate(tokens, cos, sin, rotary_dim, interleaved, rows, inverse).reshape(x.shape)
