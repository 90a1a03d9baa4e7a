"""Softmax and sparsemax over the last axis, with their gradients, in float64."""

from __future__ import annotations

import numpy as np

__all__ = ["softmax", "softmax_backward", "sparsemax", "sparsemax_backward"]


@np.errstate(invalid="ignore", over="ignore")
def softmax(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Softmax of each row, and the log of the sum of its exponentials.

    Parameters
    ----------
    scores : ndarray, (..., n), n >= 1
        A score of -inf gets weight 0. A row that holds NaN or +inf, or -inf only, is NaN.

    Returns
    -------
    weights : ndarray, (..., n), float64
    lse : ndarray, (...), float64
        Natural log.
    """
    scores = np.asarray(scores, np.float64)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    weights /= total
    return weights, (top + np.log(total))[..., 0]


@np.errstate(invalid="ignore", over="ignore")
def softmax_backward(d_weights: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Gradient of the scores, from that of the weights.

    Parameters
    ----------
    d_weights, weights : ndarray, (..., n), float64

    Returns
    -------
    ndarray, (..., n), float64
    """
    delta = (weights * d_weights).sum(-1, keepdims=True)
    return weights * (d_weights - delta)


@np.errstate(invalid="ignore", over="ignore")
def sparsemax(scores: np.ndarray) -> np.ndarray:
    """Project each row onto the probability simplex.

    Parameters
    ----------
    scores : ndarray, (..., n), n >= 1
        A score of -inf gets weight 0. A row that holds NaN or +inf, or -inf only, is NaN.

    Returns
    -------
    ndarray, (..., n), float64

    References
    ----------
    Martins and Astudillo, "From softmax to sparsemax", 2016, algorithm 1.
    """
    scores = np.asarray(scores, np.float64)
    # Only differences count; with the maximum at 0, adding 1 below is never lost to rounding.
    shifted = scores - scores.max(-1, keepdims=True)
    falling = -np.sort(-shifted, -1)
    running = falling.cumsum(-1)
    rank = np.arange(1, scores.shape[-1] + 1)
    # A row with a NaN counts none, and so takes its last sum, which is NaN.
    support = (1 + rank * falling > running).sum(-1, keepdims=True)
    threshold = (np.take_along_axis(running, support - 1, -1) - 1) / support
    return np.maximum(shifted - threshold, 0)


@np.errstate(invalid="ignore", over="ignore")
def sparsemax_backward(d_weights: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Gradient of the scores: that of the weights, less its mean, on the support.

    Parameters
    ----------
    d_weights, weights : ndarray, (..., n), float64

    Returns
    -------
    ndarray, (..., n), float64
    """
    support = weights > 0
    mean = np.where(support, d_weights, 0).sum(-1, keepdims=True) / support.sum(-1, keepdims=True)
    return support * (d_weights - mean)
