"""The ledger, one JSON object a line, and the table that is printed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import workloads
from .problems import DIRECTIONS

RESULTS = Path(__file__).resolve().parent / "results"
# What a worker measures, and the whole row in the order it is written.
MEASURED = ["row", "graph_us", "call_us", "host_us", "peak_bytes", "error", "plain_error", "note"]
FIELDS = [
    "run", "operator", "workload", "direction", "provider", "row", "graph_us", "call_us", "host_us",
    "floor_us", "peak_bytes", "error", "plain_error", "gpu", "driver", "cuda", "cupy", "torch",
    "peer_version", "commit", "dirty", "note",
]  # fmt: skip
PACKAGES = {
    "liger": "liger-kernel",
    "huggingface": "transformers",
    "natten": "natten",
    "cupyattn": "cupyattn",
    "naive": "cupyattn",
    "copy": None,
}


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def peer_version(provider: str) -> str | None:
    """Return the version of the package that a provider runs; torch's for torch's own."""
    package = PACKAGES.get(provider, "torch")
    if package == "cupyattn":
        import cupyattn

        return getattr(cupyattn, "__version__", None)
    return version(package) if package else None


def device_facts() -> dict[str, Any]:
    """Return the GPU, the driver and the versions; needs a GPU."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    runtime = cupy.cuda.runtime.runtimeGetVersion()
    return {
        "gpu": properties["name"].decode(),
        "driver": _driver() or str(cupy.cuda.runtime.driverGetVersion()),
        "cuda": f"{runtime // 1000}.{runtime % 1000 // 10}",
        "cupy": cupy.__version__,
        "torch": version("torch"),
    }


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip().splitlines()[0] if answer.stdout.strip() else None


def commit() -> tuple[str | None, bool | None]:
    """Return the commit and whether the tree differs from it.

    A copy of the tree that has no history can be told its commit by the environment variable
    ``CUPYATTN_BENCH_COMMIT``, with ``-dirty`` at the end where that applies.
    """
    given = os.environ.get("CUPYATTN_BENCH_COMMIT")
    if given:
        return given.removesuffix("-dirty"), given.endswith("-dirty")
    git = ["git", "-C", str(RESULTS.parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        # The ledger grows during a run: that does not make the sources differ.
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--", ":/", ":(top,exclude)bench/results"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return head.stdout.strip(), bool(changes.stdout.strip())


def path(gpu: str, committed: bool = False) -> Path:
    """Return the GPU's ledger; ``CUPYATTN_BENCH_LEDGER`` names another file than the committed."""
    given = None if committed else os.environ.get("CUPYATTN_BENCH_LEDGER")
    return Path(given) if given else RESULTS / (re.sub(r"[^A-Za-z0-9]+", "-", gpu) + ".jsonl")


def read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]


def append(file: Path, row: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        stream.write(json.dumps({field: row.get(field) for field in FIELDS}) + "\n")


def new_run() -> str:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return f"{now}-{secrets.token_hex(3)}"


def find_run(rows: list[dict[str, Any]], wanted: str) -> str | None:
    """Return the run whose id is, or ends with, `wanted`, if there is one."""
    found = sorted({row["run"] for row in rows if row["run"].endswith(wanted)})
    if len(found) > 1:
        raise ValueError(f"--run {wanted}: several runs end so: {found}")
    return found[0] if found else None


def join_run(wanted: str | None, rows: list[dict[str, Any]], gpu: str) -> str:
    """Return the run whose id is, or ends with, `wanted`; a new one when it is None."""
    if wanted is None:
        return new_run()
    run = find_run(rows, wanted)
    if run is None:
        return f"{new_run().rpartition('-')[0]}-{wanted}"
    where = next(row["gpu"] for row in rows if row["run"] == run)
    if where != gpu:
        raise ValueError(f"--run {wanted}: that run was on {where}, this GPU is {gpu}")
    return run


# --- the table ------------------------------------------------------------------------------

# Rows that do other work than the workload's, or are this library itself.
NO_PEER = ("cupyattn", "naive", "copy", "cublas", "cudnn")
HEADINGS = [
    "workload", "direction", "provider", "row", "graph us", "call us", "host us", "x best peer",
    "x floor", "error", "plain", "note",
]  # fmt: skip


def median(row: dict[str, Any], key: str) -> float | None:
    return row[key][1] if row.get(key) else None


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _time(row: dict[str, Any], key: str) -> str:
    return _us(median(row, key))


def best_peer(rows: Iterable[dict[str, Any]], key: str) -> dict[str, Any] | None:
    """Return the peer's row with the least time."""
    peers = [row for row in rows if row["provider"] not in NO_PEER and median(row, key)]
    return min(peers, key=lambda row: row[key][1], default=None)


def _ratio(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return how many times faster than the best peer a row is, by graph or else by call."""
    for key in ("graph_us", "call_us"):
        best, own = best_peer(rows, key), median(row, key)
        if best and own:
            return f"{best[key][1] / own:.2f}"
    return "-"


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text, those of one workload and direction together."""
    lines = [HEADINGS]
    first: dict[tuple[str, str], int] = {}
    for row in rows:
        first.setdefault((row["workload"], row["direction"]), len(first))
    for row in sorted(rows, key=lambda r: first[r["workload"], r["direction"]]):
        case = [r for r in rows if all(r[k] == row[k] for k in ("workload", "direction"))]
        own = median(row, "graph_us") or median(row, "call_us")
        floor = row.get("floor_us")
        lines.append(
            [
                row["workload"], row["direction"], row["provider"], row.get("row") or "-",
                *(_time(row, key) for key in ("graph_us", "call_us", "host_us")),
                _ratio(row, case), f"{own / floor:.2f}" if own and floor else "-",
                _small(row.get("error")), _small(row.get("plain_error")), row.get("note") or "",
            ]
        )  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS) - 1)]
    numbers = range(4, len(widths))
    text = []
    for line in lines:
        cells = [
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=False))
        ]
        text.append("  ".join([*cells, line[-1]]).rstrip())
    return "\n".join(text)


def gains(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return lines that say how much faster neighborhood attention is than the plain kernels.

    In the form of *Faster Neighborhood Attention*: (plain time / time - 1) in per cent, averaged
    over the workloads of one, two and three axes, for the forward and for forward and backward.
    The plain kernels are this library's, not the paper's: the percentages are not comparable.
    """
    rows = list(rows)
    times = {(row["workload"], row["direction"], row["provider"]): own for row in rows
             if (own := median(row, "graph_us") or median(row, "call_us"))}  # fmt: skip
    scaled = {row["workload"] for row in rows if "scaled by the work" in (row["note"] or "")}
    lines = []
    for axes in (1, 2, 3):
        names = dict.fromkeys(name for name, _, _ in times if name.startswith(f"na/{axes}d-"))
        said = []
        for what, directions in (("forward", ["forward"]),
                                 ("forward and backward", ["forward", "backward"])):  # fmt: skip
            both = [
                name for name in names
                if all((name, d, who) in times for d in directions for who in ("naive", "cupyattn"))
            ]  # fmt: skip
            ratios = [
                sum(times[name, d, "naive"] for d in directions)
                / sum(times[name, d, "cupyattn"] for d in directions)
                for name in both
            ]
            if ratios:
                percent = 100 * (sum(ratios) / len(ratios) - 1)
                smaller = len(scaled & set(both))
                note = f", {smaller} scaled from a smaller grid" if smaller else ""
                said.append(f"{what} {percent:,.0f} % (of {len(ratios)}{note})")
        if said:
            lines.append(f"over the plain kernels, {axes}-D: " + ", ".join(said))
    return lines


# --- the table of the README ------------------------------------------------------------------

NAMES = {
    "liger": "Liger", "huggingface": "Hugging Face", "torch_compile": "torch.compile",
    "flex": "flex_attention", "natten": "NATTEN",
}  # fmt: skip


def figures(rows: list[dict[str, Any]], wanted: str | None = None) -> str:
    """Return one run, or the newest, as a Markdown table: each case beside its best peer.

    Raises
    ------
    ValueError
        If no run, or more than one, has an id that ends with `wanted`.
    """
    run = find_run(rows, wanted or max((row["run"] for row in rows), default=""))
    if run is None:
        raise ValueError(f"--run {wanted}: no run of the ledger ends so")
    rows = [row for row in rows if row["run"] == run]
    lines = [
        "| workload | direction | cupyattn graph / call us | peer graph / call us | floor us "
        "| error (plain) |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["provider"] != "cupyattn":
            continue
        case = [r for r in rows if all(r[k] == row[k] for k in ("workload", "direction"))]
        best = best_peer(case, "graph_us") or best_peer(case, "call_us")
        peer = f"{NAMES.get(best['provider'], best['provider'])} {_both(best)}" if best else "-"
        cited = workloads.NATTEN.get(row["workload"].removeprefix("na/"))
        if cited and row["gpu"] == "NVIDIA H200":
            peer += f"; NATTEN, cited, {_us(float(cited[DIRECTIONS.index(row['direction'])]))}"
        lines.append(
            f"| `{row['workload']}` | {row['direction']} | {_both(row)} | {peer} "
            f"| {_us(row.get('floor_us'))} "
            f"| {_small(row['error'])} ({_small(row['plain_error'])}) |"
        )
    above = gains(rows)
    return "\n".join([*lines, *([""] if above else []), *above])


def _both(row: dict[str, Any]) -> str:
    return " / ".join(_time(row, key) for key in ("graph_us", "call_us"))
