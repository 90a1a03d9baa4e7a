"""Markers, devices, the record of a GPU run.

Tests without a marker need no GPU. `gpu` needs CuPy and a CUDA device, `multigpu` two of them,
`torch` needs torch, `large` many gigabytes and `--large` (or `-m large`).
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

# Helper modules (kinds, oracle, ...) are imported by their bare names.
sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_addoption(parser):
    group = parser.getgroup("cupyattn")
    group.addoption("--large", action="store_true", help="run the tests marked large, too")
    group.addoption("--record", metavar="PATH", help="write the record of a GPU run")
    group.addoption("--record-as", metavar="NAME", default="",
                    help="add the counts to the present record under a name, such as multigpu")


def _device_count() -> int:
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:  # no CuPy, no driver, no device: all the same here
        return 0


def pytest_collection_modifyitems(config, items):
    marks = {item: {mark.name for mark in item.iter_markers()} for item in items}
    needs_gpu = any(names & {"gpu", "multigpu"} for names in marks.values())
    devices = _device_count() if needs_gpu else 0
    large = config.getoption("--large") or "large" in (config.getoption("markexpr") or "")
    for item, names in marks.items():
        if names & {"gpu", "multigpu"} and devices == 0:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif "multigpu" in names and devices < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))
        elif "large" in names and not large:
            item.add_marker(pytest.mark.skip(reason="large: run with --large"))


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def kind(request):
    """Arrays of NumPy (the reference runs) and of CuPy (the kernels run)."""
    import kinds

    return kinds.KINDS[request.param]


@pytest.fixture
def cupy_kind():
    """CuPy arrays; for tests that are marked gpu."""
    import kinds

    return kinds.KINDS["cupy"]


@pytest.fixture
def torch_kind():
    """Arrays of torch; for tests that are marked gpu and torch."""
    pytest.importorskip("torch")
    import kinds

    return kinds.KINDS["torch"]


@pytest.fixture(autouse=True)
def _release_memory(request):
    """Give back what a large test left in the pools."""
    yield
    if request.node.get_closest_marker("large") and "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


# --- counts, and the record ------------------------------------------------------------------

_counts: Counter[str] = Counter()
_skips: Counter[str] = Counter()
_ran_on_gpu = False


def pytest_runtest_logreport(report):
    global _ran_on_gpu
    if report.skipped:
        _counts["skipped"] += 1
        _skips[str(report.longrepr[2] if isinstance(report.longrepr, tuple)
                   else report.longrepr)] += 1
    elif report.failed:
        _counts["failed"] += 1
    elif report.when == "call":
        _counts["passed"] += 1
        _ran_on_gpu = _ran_on_gpu or "gpu" in report.keywords or "multigpu" in report.keywords


def pytest_terminal_summary(terminalreporter):
    """Say how much of a GPU run was skipped, and why."""
    if not _ran_on_gpu:
        return
    terminalreporter.section("tests on the GPU")
    terminalreporter.write_line(", ".join(f"{_counts[key]} {key}"
                                          for key in ("passed", "failed", "skipped")))
    for reason, count in _skips.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


def pytest_sessionfinish(session, exitstatus):
    path = session.config.getoption("--record")
    if not path or hasattr(session.config, "workerinput"):
        return
    if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(f"\n{path} is not written: the run did not come to its end")
        return
    import record

    counts = {key: _counts[key] for key in ("passed", "failed", "skipped")}
    record.write(Path(path), counts, session.config.getoption("--record-as"))
