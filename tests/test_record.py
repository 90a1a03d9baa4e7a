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
    """Otherwise: run the GPU suite again with `pytest -m gpu --record tests/gpu_record.json`."""
    assert written["sources_sha256"] == record.sources_sha256()


def test_further_runs(written):
    """Runs on two GPUs or of the large problems passed too, on the same sources."""
    runs = {name: run for name, run in written.items()
            if isinstance(run, dict) and name != "sanitizer"}
    for name, run in runs.items():
        assert run["failed"] == 0 and run["passed"] > 0, name
        assert run["sources_sha256"] == record.sources_sha256(), name


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
    before = record.sources_sha256(tmp_path)
    (tmp_path / "cupyattn" / "c.py").write_text('"""Text."""\nx = 1  # one\n')
    assert record.sources_sha256(tmp_path) == before
    (tmp_path / "kernels" / "common" / "a.cuh").write_text("int a; ")
    assert record.sources_sha256(tmp_path) != before
    (tmp_path / "kernels" / "common" / "a.cuh").rename(tmp_path / "kernels" / "a.cuh")
    assert record.sources_sha256(tmp_path) != before


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


def test_write_keeps_what_belongs_to_the_sources(tmp_path, monkeypatch):
    """A further run is added by name; a new run drops what was made from other sources."""
    monkeypatch.setattr(record, "machine", lambda: {"gpu": "one"})
    path = tmp_path / "record.json"
    counts = {"passed": 3, "failed": 0, "skipped": 1}
    record.write(path, counts)
    record.write(path, {**counts, "passed": 2}, "multigpu")
    written = record.load(path)
    assert (written["passed"], written["multigpu"]["passed"]) == (3, 2)
    assert written["sanitizer"] == {} and written["gpu"] == "one"
    (tmp_path / "log").write_text(LOG)
    record.main(["--record", str(path), "--sanitizer", f"memcheck={tmp_path / 'log'}"])
    record.write(path, {**counts, "passed": 4})
    written = record.load(path)
    assert (written["passed"], written["multigpu"]["passed"]) == (4, 2)
    assert written["sanitizer"] == {"memcheck": 0}
    monkeypatch.setattr(record, "sources_sha256", lambda: "other")
    record.write(path, counts)
    assert "multigpu" not in record.load(path) and not record.load(path)["sanitizer"]
