"""Multi-token attention in NumPy, float64: a causal softmax or sparsemax, then a convolution.

Rows are taken in blocks. A block reads of the score map only the columns that its last row may
see, and gathers the taps of all its entries into one matrix, so that the convolution and both of
its gradients are matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from .softmax import softmax, softmax_backward, sparsemax, sparsemax_backward

__all__ = ["backward", "forward"]

# Taps of one block: small enough to stay near the processor.
BLOCK_BYTES = 16 << 20

_Block = tuple[slice, slice, slice]  # batch items, rows, columns


@np.errstate(invalid="ignore", over="ignore")
def forward(
    scores: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    groups: int,
    dilation: tuple[int, int],
    padding: str,
    activation: str,
) -> np.ndarray:
    """Cross-correlate the causal attention weights of neighbouring queries, keys and heads.

    Parameters
    ----------
    scores : ndarray, (batch, heads_in, seq, seq)
        The upper triangle is never read as a number.
    weight : ndarray, (heads_out, heads_in // groups, kh, kw)
    bias : ndarray, (heads_out,), or None
    groups : int
    dilation : (int, int)
        Of rows and of columns.
    padding : {"same", "causal"}
        Whether rows are centred on the query, or reach back from it.
    activation : {"softmax", "sparsemax"}

    Returns
    -------
    ndarray, (batch, heads_out, seq, seq), float64
        0 in the upper triangle.
    """
    batch, heads_in, seq, _ = scores.shape
    heads_out, _, kh, kw = weight.shape
    y = np.zeros((batch, heads_out, seq, seq))
    p = _activate(scores, activation)
    kernel = weight.astype(np.float64).reshape(groups, heads_out // groups, -1)
    shift = np.zeros(heads_out) if bias is None else bias.astype(np.float64)
    offsets = _offsets(kh, kw, dilation, padding)
    for block in _blocks(batch, seq, heads_in * kh * kw):
        items, rows, columns = block
        part = y[items, :, rows, columns]
        conv = (kernel @ _taps(p, block, offsets, groups)).reshape(part.shape)
        part[...] = _causal(conv + shift[:, None, None], rows, 0)
    return y


@np.errstate(invalid="ignore", over="ignore")
def backward(
    dy: np.ndarray,
    scores: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    groups: int,
    dilation: tuple[int, int],
    padding: str,
    activation: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Gradients of `forward`.

    Parameters
    ----------
    dy : ndarray, (batch, heads_out, seq, seq)
        The upper triangle is never read as a number.
    scores, weight, bias, groups, dilation, padding, activation
        As for `forward`.

    Returns
    -------
    d_scores : ndarray, (batch, heads_in, seq, seq), float64
        0 in the upper triangle.
    d_weight : ndarray, float64
        Shaped as `weight`.
    d_bias : ndarray, (heads_out,), float64, or None
        None where `bias` is None.
    """
    batch, heads_in, seq, _ = scores.shape
    heads_out, _, kh, kw = weight.shape
    p = _activate(scores, activation)
    d_p = np.zeros(p.shape)
    kernel = weight.astype(np.float64).reshape(groups, heads_out // groups, -1)
    d_kernel, d_bias = np.zeros(kernel.shape), np.zeros(heads_out)
    offsets = _offsets(kh, kw, dilation, padding)
    for block in _blocks(batch, seq, heads_in * kh * kw):
        items, rows, columns = block
        d_conv = _causal(dy[items, :, rows, columns].astype(np.float64), rows, 0)
        d_bias += d_conv.sum((0, 2, 3))
        d_conv = d_conv.reshape(len(d_conv), groups, heads_out // groups, -1)
        d_kernel += (d_conv @ _taps(p, block, offsets, groups).swapaxes(-1, -2)).sum(0)
        _add_taps(d_p, block, offsets, kernel.swapaxes(-1, -2) @ d_conv)
    d_scores = _activate_backward(d_p, p, activation)
    return d_scores, d_kernel.reshape(weight.shape), None if bias is None else d_bias


def _activate(scores: np.ndarray, activation: str) -> np.ndarray:
    """Attention weights: the activation of each row's first entries, 0 after them."""
    p = np.zeros(scores.shape)
    for items, rows, columns in _blocks(len(scores), scores.shape[-1], scores.shape[1]):
        allowed = _causal(scores[items, :, rows, columns].astype(np.float64), rows, -np.inf)
        weights = softmax(allowed)[0] if activation == "softmax" else sparsemax(allowed)
        # A row with a NaN is NaN up to its diagonal, and still 0 after it.
        p[items, :, rows, columns] = _causal(weights, rows, 0)
    return p


def _activate_backward(d_p: np.ndarray, p: np.ndarray, activation: str) -> np.ndarray:
    d_scores = np.zeros(p.shape)
    gradient = softmax_backward if activation == "softmax" else sparsemax_backward
    for block in _blocks(len(p), p.shape[-1], p.shape[1]):
        items, rows, columns = block
        # Taps also reach entries after the diagonal; nothing there is a weight.
        d_weights = _causal(d_p[items, :, rows, columns], rows, 0)
        d_block = gradient(d_weights, p[items, :, rows, columns])
        d_scores[items, :, rows, columns] = _causal(d_block, rows, 0)
    return d_scores


def _blocks(batch: int, seq: int, values: int) -> Iterator[_Block]:
    """Yield batch items, rows and columns of blocks that hold the lower triangle.

    A block holds about `BLOCK_BYTES`, at `values` float64 numbers per entry of the score map.
    """
    row_bytes = 8 * max(values, 1) * max(seq, 1)
    items = max(1, BLOCK_BYTES // (row_bytes * max(seq, 1)))
    rows = max(1, BLOCK_BYTES // (row_bytes * min(items, max(batch, 1))))
    for item in range(0, batch, items):
        for row in range(0, seq, rows):
            end = min(row + rows, seq)
            yield slice(item, min(item + items, batch)), slice(row, end), slice(0, end)


def _causal(x: np.ndarray, rows: slice, fill: float) -> np.ndarray:
    """Fill what lies after the diagonal of a block whose columns start at 0."""
    row, column = np.ogrid[rows, : x.shape[-1]]
    return np.where(column <= row, x, fill)


def _offsets(kh: int, kw: int, dilation: tuple[int, int], padding: str) -> list[tuple[int, int]]:
    """Row and column offset of each tap, in the order of the kernel's entries."""
    first = kh - 1 if padding == "causal" else kh // 2
    return [
        ((u - first) * dilation[0], (v - kw // 2) * dilation[1])
        for u in range(kh)
        for v in range(kw)
    ]


def _overlap(span: slice, offset: int, size: int) -> tuple[slice, slice]:
    """Part of `span` whose image under `offset` lies in an axis of `size`, and that image."""
    start = min(max(span.start, -offset), span.stop)
    stop = max(min(span.stop, size - offset), start)
    return slice(start - span.start, stop - span.start), slice(start + offset, stop + offset)


def _taps(p: np.ndarray, block: _Block, offsets: list[tuple[int, int]], groups: int) -> np.ndarray:
    """Gather every tap of every entry: (items, groups, heads * taps, rows * columns)."""
    items, rows, columns = block
    part = p[items]
    shape = (rows.stop - rows.start, columns.stop)
    taps = np.zeros((*part.shape[:2], len(offsets), *shape))
    for tap, (down, right) in enumerate(offsets):
        to_rows, from_rows = _overlap(rows, down, p.shape[-2])
        to_columns, from_columns = _overlap(columns, right, p.shape[-1])
        taps[:, :, tap, to_rows, to_columns] = part[:, :, from_rows, from_columns]
    heads = p.shape[1] // groups
    return taps.reshape(len(part), groups, heads * len(offsets), math.prod(shape))


def _add_taps(
    d_p: np.ndarray, block: _Block, offsets: list[tuple[int, int]], d_taps: np.ndarray
) -> None:
    """Add the gradient of each tap to the weight it was taken from."""
    items, rows, columns = block
    part = d_p[items]
    d_taps = d_taps.reshape(*part.shape[:2], len(offsets), rows.stop - rows.start, columns.stop)
    for tap, (down, right) in enumerate(offsets):
        to_rows, from_rows = _overlap(rows, down, d_p.shape[-2])
        to_columns, from_columns = _overlap(columns, right, d_p.shape[-1])
        part[:, :, from_rows, from_columns] += d_taps[:, :, tap, to_rows, to_columns]
