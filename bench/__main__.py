"""Time workloads (run), the host's share of a call (host), or float32 products alone (products).

Show what was saved: as pictures (plot), or a run as a Markdown table (figures).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import ledger, workloads
from .peers import PROVIDERS
from .run import DEFAULT_PROVIDERS, Run, directions, say
from .workloads import DIRECTIONS, OPERATORS, Workload


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    p.add_argument(
        "command", nargs="?", choices=["run", "host", "products", "plot", "figures"], default="run"
    )  # fmt: skip
    p.add_argument("--operator", nargs="+", choices=OPERATORS, metavar="O", help=str(OPERATORS))
    p.add_argument(
        "--workload", nargs="+", metavar="NAME",
        help=f"names, globs or sets: {list(workloads.SETS)}",
    )  # fmt: skip
    p.add_argument(
        "--provider", nargs="+", choices=[*PROVIDERS, "all"], metavar="P",
        help=f"{DEFAULT_PROVIDERS} unless given; all, or of {list(PROVIDERS)}",
    )  # fmt: skip
    p.add_argument("--direction", choices=[*DIRECTIONS, "both"], default="both")
    p.add_argument("--quick", action="store_true", help="a few workloads and a photograph")
    p.add_argument("--save", action="store_true", help="append the rows to the GPU's ledger")
    p.add_argument("--run", metavar="ID", help="join a run; cases that it has are passed over")
    p.add_argument("--plot", action="store_true", help="draw the ledgers at the end")
    p.add_argument("--shape", nargs="+", metavar="KEY=VALUE", help="your own problem")
    p.add_argument("--limit", type=float, default=30.0, help="seconds per case (default 30)")
    p.add_argument(
        "--compile-limit", type=float, default=90.0, metavar="SECONDS",
        help="seconds for a peer to compile a case, side by side with others (default 90); what it "
        "did not compile in so long in this run or in the ledger is not tried, nor anything larger",
    )  # fmt: skip
    p.add_argument("--total", type=float, help="seconds for all; what is left then is not run")
    p.add_argument("--list", action="store_true", help="name the workloads and providers")
    return p


def gpu_missing() -> str | None:
    """Return why there is no GPU to use, or None."""
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "no CUDA device"
    except ImportError:
        return "CuPy is not installed"
    except Exception as failure:  # noqa: BLE001 (no driver, or one too old)
        return str(failure).strip().splitlines()[0]


def chosen(options: argparse.Namespace) -> list[Workload]:
    if options.shape:
        if not options.operator or len(options.operator) != 1:
            raise ValueError("--shape needs one --operator")
        return [workloads.custom(options.operator[0], options.shape)]
    patterns = options.workload or (["quick"] if options.quick else None)
    return workloads.select(options.operator, patterns)


def run_gpu(options: argparse.Namespace) -> int:
    run = Run(options, chosen(options))
    run.start()
    rows = run.execute()
    of_run = [*(row for row in run.known if row["run"] == run.run), *rows]
    print("\n".join([ledger.table(rows), *ledger.gains(of_run)]))
    print("times are medians; x best peer: how many times faster; x floor: time over the floor")
    if options.save:
        print(f"rows appended to {run.file}")
    if options.quick and not options.shape:
        photograph("gpu")
    if options.plot:
        plot([*run.known, *rows])
    ours = [r for r in rows if r["provider"] == "cupyattn"]
    return 1 if any(r["call_us"] is None for r in ours) else 0


def run_numpy(options: argparse.Namespace, why: str) -> int:
    from . import numpy_run

    print(
        f"No GPU is used ({why}): small cases on the NumPy reference, which is not made for speed."
    )
    if options.shape:
        cases = chosen(options)
    else:
        operators = options.operator
        if options.workload and not operators:
            operators = sorted({w.operator for w in chosen(options)})
        cases = [w for w in workloads.SMALL if not operators or w.operator in operators]
    rows = numpy_run.measure(cases, directions(options), min(0.5, options.limit), say)
    print(ledger.table(rows))
    if options.save:
        print("not saved: the ledger holds GPU times only")
    if options.quick:
        photograph("cpu")
    if options.plot:
        plot()
    return 1 if any(r["call_us"] is None for r in rows) else 0


def plot(rows: list[dict[str, Any]] | None = None) -> int:
    """Draw these rows, or else every ledger."""
    from .plot import draw

    ledgers = [ledger.read(file) for file in sorted(ledger.RESULTS.glob("*.jsonl"))]
    for known in ledgers if rows is None else [rows]:
        for picture in draw(known, ledger.RESULTS):
            print(f"drawn: {picture}")
    return 0


def photograph(device: str) -> None:
    from . import photo

    try:
        print(photo.main(device))
    except ImportError as failure:
        print(f"no photograph: {failure}; `pip install matplotlib` brings one and draws it")


def main(arguments: list[str] | None = None) -> int:
    p = parser()
    options = p.parse_args(arguments)
    try:
        if options.list:
            print("\n".join(w.name for w in workloads.select(options.operator, options.workload)))
            for entry in PROVIDERS.values():
                print(f"provider {entry.name}: {', '.join(entry.operators)}"
                      + (f" ({entry.missing()})" if entry.missing() else ""))  # fmt: skip
            return 0
        if options.command == "plot":
            return plot()
        if options.command == "figures":
            rows = [row for file in sorted(ledger.RESULTS.glob("*.jsonl"))
                    for row in ledger.read(file)]  # fmt: skip
            if options.operator or options.workload:
                names = {w.name for w in chosen(options)}
                rows = [row for row in rows if row["workload"] in names]
            print(ledger.figures(rows, options.run))
            return 0
        why = gpu_missing()
        if options.command == "host":
            if why:
                print(f"No GPU is used ({why}): there is no host time of a launch to measure.")
                return 0
            from .host import main as host

            named = options.workload or options.operator
            return host(chosen(options) if named else None)
        if options.command == "products":
            if why:
                print(f"No GPU is used ({why}): there is no product to time.")
                return 0
            from .products import main as products

            return products()
        return run_numpy(options, why) if why else run_gpu(options)
    except ValueError as mistake:
        p.error(str(mistake))


if __name__ == "__main__":
    sys.exit(main())
