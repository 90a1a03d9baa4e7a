"""Pictures of the ledger: for each operator, the time of each provider by size or workload."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from .ledger import NO_PEER, median
from .workloads import DIRECTIONS, OPERATORS, WORKLOADS

COLOURS = {
    "cupyattn": "#d1495b", "naive": "#edae49", "liger": "#00798c", "huggingface": "#8d6a9f",
    "torch": "#ee7733", "torch_compile": "#994455", "flex": "#30638e", "natten": "#66a182",
    "cudnn": "#7f7f7f", "cublas": "#b0b0b0", "copy": "#d0d0d0",
}  # fmt: skip

# The size in a workload's name, and what it is.
SIZES = {"rope": r"s(\d+)-h(\d+)", "multi_token": r"l(\d+)", "fused_neighborhood": r"\bs(\d+)"}
LABELS = {"rope": "sequence x hidden", "multi_token": "length", "fused_neighborhood": "length"}


def latest(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the rows of one run for each workload and direction: the last that has a peer.

    Times of different runs are not to be compared.
    """
    runs: dict[tuple[str, str], str] = {}
    for with_peer in (False, True):
        for r in rows:
            if not with_peer or r["provider"] not in NO_PEER:
                runs[r["workload"], r["direction"]] = r["run"]
    return {
        (r["workload"], r["direction"], r["provider"]): r
        for r in rows
        if r["run"] == runs[r["workload"], r["direction"]]
    }


def draw(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw a picture per operator into `folder` and return their paths.

    Workloads of one kind and several sizes are curves over the size; an operator that has none is
    drawn workload by workload.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    newest = latest(rows)
    pictures = []
    for operator in OPERATORS:
        mine = [r for r in newest.values() if r["operator"] == operator and _time(r)]
        if not mine:
            continue
        families = _families(mine)
        figure = _curves(families, plt) if families else _dots(mine, plt)
        gpu = mine[-1]["gpu"]
        figure.suptitle(f"{operator}, {gpu}: device time of one call (graph, or else eager)")
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', gpu)}-{operator}.png"
        figure.savefig(file, dpi=72, pil_kwargs={"optimize": True})
        plt.close(figure)
        pictures.append(file)
    return pictures


def _families(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Return the rows and their sizes by what else their names say, where there are many sizes."""
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for row in rows:
        name = row["workload"].partition("/")[2]
        size = re.search(SIZES.get(row["operator"], "$^"), name)
        if size:
            rest = name.replace(size[0], "").strip("-").replace("--", "-")
            found.setdefault(rest, []).append((math.prod(map(int, size.groups())), row))
    order = {name: i for i, name in enumerate(WORKLOADS)}
    many = {
        rest: sorted(some, key=lambda pair: pair[0])
        for rest, some in found.items()
        if len({size for size, _ in some}) >= 4
    }
    return dict(sorted(many.items(), key=lambda item: order.get(item[1][0][1]["workload"], 0)))


def _curves(families: dict[str, list[tuple[int, dict[str, Any]]]], plt: Any) -> Any:
    across = min(len(families), 4)
    down = -(-len(families) // across)
    shape = (2 * down, across) if len(families) > 1 else (1, 2)
    figure, grid = plt.subplots(
        *shape, figsize=(5 * shape[1], 3.3 * shape[0]), squeeze=False, layout="constrained"
    )
    for panel in grid.flat:
        panel.set_visible(False)
    for number, (rest, pairs) in enumerate(families.items()):
        for half, direction in enumerate(DIRECTIONS):
            row, column = number // across * 2 + half, number % across
            panel = grid[row][column] if len(families) > 1 else grid[0][half]
            panel.set_visible(True)
            here = [(size, row) for size, row in pairs if row["direction"] == direction]
            for provider, colour in COLOURS.items():
                points = [(size, _time(row)) for size, row in here if row["provider"] == provider]
                if points:
                    panel.plot(
                        *zip(*points, strict=True),
                        "o-",
                        color=colour,
                        label=provider,
                        markersize=4,
                        linewidth=2.2 if provider == "cupyattn" else 1.2,
                        zorder=4 if provider == "cupyattn" else 2,
                    )
            floors = sorted({(size, row["floor_us"]) for size, row in here if row["floor_us"]})
            if floors:
                panel.plot(*zip(*floors, strict=True), "--", color="black", label="floor")
            panel.set(
                xscale="log",
                yscale="log",
                ylabel="microseconds",
                xlabel=LABELS[pairs[0][1]["operator"]],
                title=f"{rest}, {direction}",
            )
            panel.grid(alpha=0.3)
            panel.legend(fontsize=7)
    return figure


def _dots(rows: list[dict[str, Any]], plt: Any) -> Any:
    order = {name: i for i, name in enumerate(WORKLOADS)}
    names = sorted({r["workload"] for r in rows}, key=lambda n: order.get(n, len(order)))
    place = {name: i for i, name in enumerate(names)}
    figure, axes = plt.subplots(
        1, 2, figsize=(14, 2.2 + 0.24 * len(names)), sharey=True, layout="constrained"
    )
    for direction, panel in zip(DIRECTIONS, axes, strict=True):
        here = [r for r in rows if r["direction"] == direction]
        for provider, colour in COLOURS.items():
            points = [(_time(r), place[r["workload"]]) for r in here if r["provider"] == provider]
            if points:
                panel.scatter(*zip(*points, strict=True), color=colour, label=provider, s=34)
        floors = {place[r["workload"]]: r["floor_us"] for r in here if r["floor_us"]}
        panel.scatter(
            list(floors.values()), list(floors), marker="|", s=120, color="black", label="floor"
        )
        panel.set(xscale="log", xlabel="microseconds", title=direction)
        panel.set_yticks(range(len(names)), [n.partition("/")[2] or n for n in names])
        panel.grid(alpha=0.3)
    axes[0].invert_yaxis()
    axes[1].legend(fontsize=8)
    return figure


def _time(row: dict[str, Any]) -> float | None:
    return median(row, "graph_us") or median(row, "call_us")
