"""The record of the last GPU run belongs to these sources, and everything in it passed."""

import ast
import json

import pytest
import record


@pytest.fixture(scope="module")
def written():
    assert record.RECORD.exists(), "no record of a GPU run; see tests/record.py"
    return record.load()


def test_all_passed(written):
    assert written["failed"] == 0
    assert written["passed"] > 0
    assert set(written) >= {"skipped", "gpu", "driver", "cupy", "nvrtc", "date"}


def test_belongs_to_these_sources(written):
    """Otherwise: run the GPU suite again, with `bash tests/gpu.sh`."""
    assert written["sources_sha256"] == record.sources_sha256()


@pytest.mark.parametrize("name", ["multigpu", "large"])
def test_further_runs(written, name):
    """Runs on two GPUs or of the large problems passed too; on which sources, the record says."""
    run = record.further_runs(written).get(name)
    if run is None:
        pytest.skip(f"the record holds no {name} run")
    assert run["failed"] == 0 and run["passed"] > 0
    older = run["sources_sha256"] != record.sources_sha256()
    assert run.get("older_sources", False) is older
    if older:
        pytest.skip(f"the {name} run of {run['date']} was on older sources, as the record says")


def test_sanitizer_found_nothing(written):
    found = written["sanitizer"]
    assert written["sanitizer_sources_sha256"] == record.sources_sha256()
    assert set(found) >= {"memcheck", "racecheck"}
    assert not any(found.values()), found


# --- the record's own code -------------------------------------------------------------------

CODE = '''
"""Module."""
import math  # a comment

class Thing:
    """Docstring."""

    size: int = 3
    """What follows an attribute."""

    def area(self, *, scale=1.0):
        """Docstring."""
        return f"a{self.size:>{scale}}b" "c" + str(None)
'''


def test_digest_ignores_sentences():
    other = CODE.replace("Docstring", "Other words").replace("  # a comment", "")
    other = other.replace("import math\n", "import math\n\n\n")
    assert record.python_digest(other) == record.python_digest(CODE)


@pytest.mark.parametrize("old, new", [
    ("size: int = 3", "size: int = 4"), ("scale=1.0", "scale=1"), ('"c"', '"d"'),
    ("import math", "import cmath"), ("None", "True"), (":>{scale}", ""), ("*, scale", "scale"),
    ("str(None)", "str()")])
def test_digest_sees_code(old, new):
    assert old in CODE
    assert record.python_digest(CODE.replace(old, new)) != record.python_digest(CODE)


def test_canonical_form_is_version_independent():
    """Fields that only some versions have, or list when empty, do not count."""
    tree = ast.parse("def f(x):\n    return f'{x}' 'b'\n")
    function = tree.body[0]
    expected = record.canonical(tree)
    function.type_params = []  # from 3.12 on
    function.decorator_list = []
    part = function.body[0].value.values
    part.insert(0, ast.Constant(""))  # how some versions split f-strings
    part[-1:] = [ast.Constant(c) for c in part[-1].value] + [ast.Constant("")]
    assert record.canonical(tree) == expected


def test_digest_is_fixed():
    """The same in every Python that runs this."""
    assert record.python_digest(CODE) == DIGEST


DIGEST = "92915ccc56415f208ef9d8720dd71c243c3ffedea406b0323e707afd07285011"


def test_sources_hash_reads_kernels_and_package(tmp_path):
    for folder, name, text in (("kernels/common", "a.cuh", "int a;"), ("kernels", "b.cu", "b"),
                               ("cupyattn", "c.py", "x = 1")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text(text)
    hashes = [record.sources_sha256(tmp_path)]
    (tmp_path / "cupyattn" / "c.py").write_text('"""Text."""\nx = 1  # one\n')
    (tmp_path / "kernels" / "README.md").write_text("how to read b.cu")
    assert record.sources_sha256(tmp_path) == hashes[0]
    (tmp_path / "kernels" / "common" / "a.cuh").write_text("int a; ")
    hashes.append(record.sources_sha256(tmp_path))
    (tmp_path / "kernels" / "common" / "a.cuh").rename(tmp_path / "kernels" / "a.cuh")
    hashes.append(record.sources_sha256(tmp_path))
    (tmp_path / "kernels" / "b.cu").write_text("c")
    hashes.append(record.sources_sha256(tmp_path))
    (tmp_path / "cupyattn" / "c.py").write_text("x = 2")
    hashes.append(record.sources_sha256(tmp_path))
    assert len(set(hashes)) == 5


LOG = "===== 5 passed, 2 deselected in 3.0s =====\n========= ERROR SUMMARY: 0 errors\n"


def test_sanitizer_logs(tmp_path):
    log, path = tmp_path / "log", tmp_path / "record.json"
    log.write_text(LOG)
    record.main(["--record", str(path), "--sanitizer", f"memcheck={log}"])
    assert json.loads(path.read_text())["sanitizer"]["memcheck"] == 0
    assert record.findings(LOG.replace("0 errors", "3 errors")) == 3
    assert record.findings(LOG.replace("ERROR SUMMARY: 0 errors",
                                       "RACECHECK SUMMARY: 2 hazards displayed")) == 2


@pytest.mark.parametrize("old, new", [
    ("5 passed", "no tests ran"), ("5 passed", "1 failed, 5 passed"), ("5 passed", "0 passed"),
    ("ERROR SUMMARY", "nothing")])
def test_sanitizer_logs_that_show_nothing(old, new):
    with pytest.raises(SystemExit):
        record.findings(LOG.replace(old, new))


def test_write_says_what_belongs_to_which_sources(tmp_path, monkeypatch):
    """A new run keeps further runs, marked when they are older, and drops older findings."""
    monkeypatch.setattr(record, "machine", lambda: {"gpu": "one"})
    monkeypatch.setattr(record, "sources_sha256", lambda: "first")
    path = tmp_path / "record.json"
    counts = {"passed": 3, "failed": 0, "skipped": 1}
    record.write(path, counts)
    record.write(path, {**counts, "passed": 2}, "multigpu")
    written = record.load(path)
    assert (written["passed"], written["multigpu"]["passed"]) == (3, 2)
    assert written["sanitizer"] == {} and written["gpu"] == "one"
    assert list(record.further_runs(written)) == ["multigpu"]
    (tmp_path / "log").write_text(LOG)
    record.main(["--record", str(path), "--sanitizer", f"memcheck={tmp_path / 'log'}"])
    record.write(path, {**counts, "passed": 4})
    written = record.load(path)
    assert (written["passed"], written["multigpu"]["passed"]) == (4, 2)
    assert written["sanitizer"] == {"memcheck": 0}
    assert "older_sources" not in written["multigpu"]

    monkeypatch.setattr(record, "sources_sha256", lambda: "second")
    record.write(path, {**counts, "passed": 5})
    record.write(path, {**counts, "passed": 6}, "large")
    written = record.load(path)
    assert not written["sanitizer"] and "sanitizer_sources_sha256" not in written
    assert written["multigpu"]["older_sources"] is True
    assert written["multigpu"]["sources_sha256"] == "first"
    assert written["large"]["sources_sha256"] == written["sources_sha256"] == "second"
    assert "older_sources" not in written["large"]

    monkeypatch.setattr(record, "sources_sha256", lambda: "first")
    record.write(path, counts)  # the sources of the run on two GPUs are back
    written = record.load(path)
    assert "older_sources" not in written["multigpu"] and written["large"]["older_sources"] is True


@pytest.mark.parametrize("run, outcome", [
    ({"sources_sha256": "now"}, "passed"),
    ({"sources_sha256": "then", "older_sources": True}, "skipped"),
    ({"sources_sha256": "then"}, "failed"),
    ({"sources_sha256": "now", "older_sources": True}, "failed"),
    ({"sources_sha256": "then", "older_sources": True, "failed": 1}, "failed"),
    ({"sources_sha256": "now", "passed": 0}, "failed"), (None, "skipped")])
def test_the_check_is_honest(monkeypatch, run, outcome):
    """It passes on the present sources only, and skips only what the record marks as older."""
    monkeypatch.setattr(record, "sources_sha256", lambda: "now")
    written = {} if run is None else {
        "large": {"passed": 3, "failed": 0, "date": "2026-01-01", **run}}
    try:
        test_further_runs(written, "large")
        seen = "passed"
    except pytest.skip.Exception as skip:
        seen = "skipped"
        assert "large run" in str(skip)
    except AssertionError:
        seen = "failed"
    assert seen == outcome
