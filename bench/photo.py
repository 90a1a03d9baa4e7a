"""Neighborhood attention over a real photograph: checked, and drawn so that one can look at it.

The photograph ships with matplotlib. Each patch of 8 x 8 pixels is a token; its queries and keys
are its colours and texture, normalised and projected by a fixed random matrix per head, so that
attention goes to the patches of the 7 x 7 window that look alike.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from .ledger import RESULTS

PATCH, WINDOW, HEADS, HEAD_DIM = 8, (7, 7), 4, 32
SHARPNESS = 5.0  # of the softmax: features are random, not trained for it
# Tokens to look at, as fractions of the picture's height and width.
CHOSEN = [(0.24, 0.40), (0.64, 0.62), (0.42, 0.30)]


def load() -> np.ndarray:
    """Return the photograph as [height, width, 3] in 0 to 1, cut to whole patches."""
    import matplotlib.image
    from matplotlib import cbook

    with cbook.get_sample_data("grace_hopper.jpg") as file:
        image = matplotlib.image.imread(file, format="jpg")
    height, width = (n // PATCH * PATCH for n in image.shape[:2])
    return image[:height, :width, :3].astype(np.float32) / 255


def tokens(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return features [1, rows, columns, heads, head_dim] and mean colours per head."""
    rows, columns = image.shape[0] // PATCH, image.shape[1] // PATCH
    patches = image.reshape(rows, PATCH, columns, PATCH, 3).transpose(0, 2, 1, 3, 4)
    colour = patches.mean((2, 3))
    # Texture apart from its place in the patch: gradients' strength by direction.
    dy, dx = np.gradient(image.mean(-1))
    bins = ((np.arctan2(dy, dx) % np.pi) / np.pi * 8).astype(int).clip(0, 7)
    strength = np.hypot(dy, dx)[..., None] * (bins[..., None] == np.arange(8))
    texture = strength.reshape(rows, PATCH, columns, PATCH, 8).mean((1, 3))
    features = np.concatenate([3 * _standard(colour), _standard(np.sqrt(texture))], axis=-1)
    mix = np.random.default_rng(0).standard_normal((HEADS, features.shape[-1], HEAD_DIM))
    x = np.einsum("rcf,hfd->rchd", features, mix)
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    values = np.broadcast_to(colour[:, :, None], (rows, columns, HEADS, 3))
    return x[None].astype(np.float32), np.ascontiguousarray(values[None], dtype=np.float32)


def _standard(x: np.ndarray) -> np.ndarray:
    return (x - x.mean((0, 1))) / x.std((0, 1)) / math.sqrt(x.shape[-1])


def attend(x: np.ndarray, values: np.ndarray, device: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Return y, lse and the seconds of a call, on the GPU or by the NumPy reference."""
    import cupyattn

    xp: Any = np
    if device == "gpu":
        import cupy as xp
    q, v = xp.asarray(x), xp.asarray(values)

    def call() -> Any:
        result = cupyattn.neighborhood_attention(q, q, v, WINDOW, scale=SHARPNESS, return_lse=True)
        if device == "gpu":
            xp.cuda.get_current_stream().synchronize()
        return result

    if device == "gpu":
        call()  # compiles
    start = time.perf_counter()
    y, lse = call()
    seconds = time.perf_counter() - start
    return (y, lse, seconds) if device == "cpu" else (xp.asnumpy(y), xp.asnumpy(lse), seconds)


def window_of(token: tuple[int, int], space: tuple[int, int]) -> tuple[slice, slice]:
    """Return the window of one token, shifted inward at a border."""
    starts = [min(max(p - w // 2, 0), n - w) for p, w, n in zip(token, WINDOW, space, strict=True)]
    rows, columns = (slice(s, s + w) for s, w in zip(starts, WINDOW, strict=True))
    return rows, columns


def weights(x: np.ndarray, token: tuple[int, int]) -> tuple[np.ndarray, tuple[slice, slice]]:
    """Return the attention of one token over its window [heads, 7, 7], in float64."""
    where = window_of(token, x.shape[1:3])
    q, k = x[0, token[0], token[1]].astype(np.float64), x[0, where[0], where[1]].astype(np.float64)
    e = np.exp(SHARPNESS * np.einsum("hd,rchd->hrc", q, k))
    return e / e.sum((1, 2), keepdims=True), where


def largest_error(x: np.ndarray, values: np.ndarray, y: np.ndarray) -> float:
    """Return the largest error of y, from the definition of the operation, token by token."""
    worst = 0.0
    for token in np.ndindex(x.shape[1:3]):
        p, where = weights(x, token)
        expected = np.einsum("hrc,rchd->hd", p, values[0, where[0], where[1]].astype(np.float64))
        worst = max(worst, float(np.abs(y[0, token[0], token[1]] - expected).max()))
    return worst


def draw(image: np.ndarray, x: np.ndarray, y: np.ndarray, title: str, file: Any) -> None:
    """Draw the photograph with windows outlined, each one's attention, and the result."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Rectangle

    space = x.shape[1:3]
    colours = ["#ffd23f", "#3bceac", "#ff5d8f"]
    figure = plt.figure(figsize=(15, 7.6), facecolor="white")
    grid = figure.add_gridspec(
        3, 4, width_ratios=[2.35, 1, 1, 2.35], wspace=0.06, hspace=0.16,
        left=0.015, right=0.985, top=0.89, bottom=0.02,
    )  # fmt: skip
    photo, result = figure.add_subplot(grid[:, 0]), figure.add_subplot(grid[:, 3])
    photo.imshow(image)
    photo.set_title("photograph, with three tokens and their 7 x 7 windows", fontsize=11)
    result.imshow(y[0].mean(2).clip(0, 1), interpolation="nearest")
    result.set_title("result: each patch's colour, mixed by attention", fontsize=11)
    for row, (fraction, colour) in enumerate(zip(CHOSEN, colours, strict=True)):
        token = (int(fraction[0] * space[0]), int(fraction[1] * space[1]))
        p, where = weights(x, token)
        top, left = where[0].start * PATCH, where[1].start * PATCH
        size = (WINDOW[1] * PATCH, WINDOW[0] * PATCH)
        corner, own = (left - 0.5, top - 0.5), (token[1] * PATCH - 0.5, token[0] * PATCH - 0.5)
        photo.add_patch(Rectangle(corner, *size, fill=False, edgecolor=colour, linewidth=2.2))
        photo.add_patch(Rectangle(own, PATCH, PATCH, color=colour))
        crop = image[top : top + size[1], left : left + size[0]]
        extent = (left - 0.5, left + size[0] - 0.5, top + size[1] - 0.5, top - 0.5)
        zoom, over = figure.add_subplot(grid[row, 1]), figure.add_subplot(grid[row, 2])
        zoom.imshow(crop, extent=extent)
        over.imshow(crop.mean(-1), cmap="gray", extent=extent, vmin=0, vmax=1.6)
        over.imshow(p.mean(0), cmap="inferno", extent=extent, alpha=0.72, interpolation="bicubic")
        over.text(
            0.97, 0.04, f"highest weight {p.mean(0).max():.2f}", color="white", fontsize=9,
            ha="right", transform=over.transAxes,
        )  # fmt: skip
        for axes in (zoom, over):
            axes.add_patch(Rectangle(own, PATCH, PATCH, fill=False, edgecolor=colour, linewidth=2))
            for spine in axes.spines.values():
                spine.set(color=colour, linewidth=3)
        if row == 0:
            zoom.set_title("window", fontsize=11)
            over.set_title("its attention", fontsize=11)
    for axes in figure.axes:
        axes.set(xticks=[], yticks=[])
    figure.suptitle(title, fontsize=13)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main(device: str, file: Any = RESULTS / "photo.png") -> str:
    """Attend over the photograph, check and draw it, and return what to print."""
    image = load()
    x, values = tokens(image)
    y, _, seconds = attend(x, values, device)
    worst = largest_error(x, values, y)
    rows, columns = x.shape[1:3]
    where = "on the GPU" if device == "gpu" else "by the NumPy reference"
    title = (
        f"Neighborhood attention {where}: {rows} x {columns} patches of a photograph, "
        f"{HEADS} heads, window 7 x 7, {1e3 * seconds:.3g} ms"
    )
    draw(image, x, y, title, file)
    if not worst <= 1e-5:
        raise ArithmeticError(f"photograph: largest error {worst:.2g}, expected at most 1e-5")
    return (
        f"photograph: {rows} x {columns} tokens in {1e3 * seconds:.3g} ms {where}, "
        f"largest error {worst:.1e} against the definition\nphotograph drawn: {file}"
    )
