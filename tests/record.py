"""The record of the last run on a GPU, and the hash that ties it to the sources.

tests/gpu.sh makes a whole record of one GPU. Part by part: `pytest -m gpu --record
tests/gpu_record.json` writes the record; `--record-as multigpu` (or `large`) adds the counts of a
further run to it. Each run carries the hash of the sources that it ran on. A further run asks for a
machine that is not always at hand, so that it may stay in the record when the sources have changed
since, marked `"older_sources": true`; the suite itself and the sanitizer's findings must be of the
present sources. The findings are added by

    python -m tests.record --sanitizer memcheck=memcheck.log racecheck=racecheck.log

from logs that hold the whole output of, for example,

    compute-sanitizer --tool memcheck python -m pytest -m "gpu and smoke"

(memcheck, racecheck, synccheck and initcheck). racecheck is given `-k "not smoke_hopper and not
teams"`. In the sm_90a kernels of neighborhood attention one lane arrives at a barrier in shared
memory for its warp, after `__syncwarp`, and the tool orders that lane's accesses only. In
linear_teams.cu it reports reads behind a named barrier of all warps that write and read, of other
kernels from run to run.

The hash covers every byte of the .cu and .cuh files below kernels/, and the syntax trees of
cupyattn/**/*.py without docstrings and comments: a changed sentence asks for no new run, a changed
line of code does.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"

# Where a node stands and how a literal was spelled; `ctx` follows from the place of the node.
_NO_MEANING = {"lineno", "col_offset", "end_lineno", "end_col_offset", "ctx", "kind",
               "type_comment", "type_ignores"}


def _is_string_statement(node: object) -> bool:
    return (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str))


def _joined(values: list[ast.expr]) -> list:
    """Parts of an f-string: neighbouring texts as one, empty ones left out."""
    parts: list = []
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            if parts and isinstance(parts[-1], str):
                parts[-1] += value.value
            elif value.value:
                parts.append(value.value)
        else:
            parts.append(canonical(value))
    return parts


def canonical(node: object) -> object:
    """Return a syntax tree as nested lists that do not depend on the Python version.

    Absent and empty fields are left out (versions differ in which they list), positions and
    docstrings too, and fields stand in the order of their names.
    """
    if isinstance(node, ast.JoinedStr):
        return ["JoinedStr", _joined(node.values)]
    if isinstance(node, ast.Constant):
        return ["Constant", type(node.value).__name__, repr(node.value)]
    if isinstance(node, ast.AST):
        fields = []
        for name, value in sorted(ast.iter_fields(node)):
            if name in _NO_MEANING or value is None:
                continue
            if isinstance(value, list):
                value = [v for v in value if not _is_string_statement(v)]
                if not value:
                    continue
            if name == "format_spec" and not _joined(value.values):
                continue
            fields.append([name, canonical(value)])
        return [type(node).__name__, fields]
    if isinstance(node, list):
        return [canonical(item) for item in node]
    return repr(node)


def python_digest(text: str) -> str:
    """Return the hash of a module's code."""
    return hashlib.sha256(json.dumps(canonical(ast.parse(text))).encode()).hexdigest()


def sources_sha256(root: Path = ROOT) -> str:
    """Return the hash of everything that a run on a GPU depends on."""
    total = hashlib.sha256()

    def files(folder: str, *suffixes: str):
        found = (p for p in (root / folder).rglob("*") if p.suffix in suffixes and p.is_file())
        named = ((p.relative_to(root).as_posix(), p) for p in found)
        return sorted((name, p) for name, p in named
                      if "/__pycache__/" not in name and "/." not in name)

    for name, path in files("kernels", ".cu", ".cuh"):
        total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    for name, path in files("cupyattn", ".py"):
        total.update(f"{name}\0{python_digest(path.read_text(encoding='utf-8'))}\0".encode())
    return total.hexdigest()


def machine() -> dict[str, str]:
    """Return GPU, driver, CuPy and NVRTC, as found."""
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    driver = runtime.driverGetVersion()
    return {"gpu": properties["name"].decode(),
            "driver": _driver_name() or f"CUDA {driver // 1000}.{driver % 1000 // 10}",
            "cupy": cupy.__version__,
            "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion()))}


def _driver_name() -> str:
    """Return the driver's own version where the system tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found.group(0) if found else ""


def load(path: Path = RECORD) -> dict:
    """Return the record, or an empty one."""
    return json.loads(path.read_text()) if path.exists() else {}


def further_runs(record: dict) -> dict[str, dict]:
    """Return the runs that were added by name."""
    return {name: run for name, run in record.items()
            if isinstance(run, dict) and name != "sanitizer"}


def write(path: Path, counts: dict[str, int], name: str = "") -> None:
    """Write the counts of a run: the record itself, or under `name` in the present record.

    A new record keeps the further runs, marked where they were of other sources, and the
    sanitizer's findings where they were of the same.
    """
    run = {**counts, "sources_sha256": sources_sha256(), **machine(),
           "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")}
    record = load(path)
    if name:
        record[name] = run
    else:
        now = run["sources_sha256"]
        kept = further_runs(record)
        for further in kept.values():
            further.pop("older_sources", None)
            if further["sources_sha256"] != now:
                further["older_sources"] = True
        if record.get("sanitizer_sources_sha256") == now:
            kept.update({key: record[key] for key in ("sanitizer", "sanitizer_sources_sha256")})
        record = {**run, "sanitizer": {}, **kept}
    path.write_text(json.dumps(record, indent=2) + "\n")


def findings(log: str) -> int:
    """Return the findings that a sanitizer's log reports; its tests must have run and passed."""
    passed = re.findall(r"\b(\d+) passed\b", log)
    if not passed or not int(passed[-1]) or re.search(r"\b[1-9]\d* (failed|errors?) in\b", log) \
            or re.search(r"\b[1-9]\d* failed\b", log):
        raise SystemExit("the log shows no test run that passed")
    counts = re.findall(r"ERROR SUMMARY: (\d+) error", log)
    counts += re.findall(r"RACECHECK SUMMARY: (\d+) hazard", log)
    if not counts:
        raise SystemExit("the log holds no summary of the sanitizer")
    return sum(map(int, counts))


def main(arguments: list[str] | None = None) -> None:
    """Add the sanitizer's findings to the record, or print the hash of the sources."""
    parser = argparse.ArgumentParser(description="Add sanitizer logs to the record of a GPU run; "
                                     "without any, print the hash of the sources.")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--sanitizer", nargs="+", metavar="TOOL=LOG", default=[])
    options = parser.parse_args(arguments)
    if not options.sanitizer:
        print(sources_sha256())
        return
    record = load(options.record)
    found = {}
    for entry in options.sanitizer:
        tool, _, log = entry.partition("=")
        found[tool] = findings(Path(log).read_text(errors="replace"))
    record["sanitizer"] = found
    record["sanitizer_sources_sha256"] = sources_sha256()
    options.record.write_text(json.dumps(record, indent=2) + "\n")
    print(f"sanitizer findings: {found}")


if __name__ == "__main__":
    main(sys.argv[1:])
