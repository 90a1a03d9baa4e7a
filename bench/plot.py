"""Pictures of the ledger: for each operator, the time of each provider by workload."""

from __future__ import annotations

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
    """Draw a picture per operator into `folder` and return their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    newest = latest(rows)
    order = {name: i for i, name in enumerate(WORKLOADS)}
    pictures = []
    for operator in OPERATORS:
        mine = [r for r in newest.values() if r["operator"] == operator and _time(r)]
        if not mine:
            continue
        names = sorted({r["workload"] for r in mine}, key=lambda n: order.get(n, len(order)))
        place = {name: i for i, name in enumerate(names)}
        figure, axes = plt.subplots(
            1, 2, figsize=(14, 2.2 + 0.24 * len(names)), sharey=True, layout="constrained"
        )
        for direction, panel in zip(DIRECTIONS, axes, strict=True):
            for provider, colour in COLOURS.items():
                points = [
                    (_time(r), place[r["workload"]])
                    for r in mine
                    if (r["direction"], r["provider"]) == (direction, provider)
                ]
                if points:
                    panel.scatter(*zip(*points, strict=True), color=colour, label=provider, s=34)
            floors = {
                place[r["workload"]]: r["floor_us"]
                for r in mine
                if r["direction"] == direction and r["floor_us"]
            }
            panel.scatter(
                list(floors.values()), list(floors), marker="|", s=120, color="black", label="floor"
            )
            panel.set(xscale="log", xlabel="microseconds", title=direction)
            panel.set_yticks(range(len(names)), [n.partition("/")[2] or n for n in names])
            panel.grid(alpha=0.3)
        axes[0].invert_yaxis()
        axes[1].legend(fontsize=8)
        gpu = mine[-1]["gpu"]
        figure.suptitle(f"{operator}, {gpu}: device time of one call (graph, or else eager)")
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', gpu)}-{operator}.png"
        figure.savefig(file, dpi=110)
        plt.close(figure)
        pictures.append(file)
    return pictures


def _time(row: dict[str, Any]) -> float | None:
    return median(row, "graph_us") or median(row, "call_us")
