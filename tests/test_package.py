"""The package as it is installed: wheel contents, import without CuPy, import time, versions."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import cupyattn

ROOT = Path(__file__).resolve().parent.parent
BLOCK = ("import sys\n"
         "class Block:\n"
         "    def find_spec(self, name, path=None, target=None):\n"
         "        if name.partition('.')[0] in ('cupy', 'torch', 'cupy_backends'):\n"
         "            raise ModuleNotFoundError(name)\n"
         "sys.meta_path.insert(0, Block())\n")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")  # a build leaves files beside its sources
    for name in ("cupyattn", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source],
                   check=True)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_wheel_holds_the_kernels(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "kernels").rglob("*.cu*"):
        assert f"cupyattn/_kernels/{path.relative_to(ROOT / 'kernels').as_posix()}" in names
    assert {"cupyattn/py.typed", "cupyattn/CHANGELOG.md"} <= names
    assert not any(name.startswith(("tests/", "bench/")) for name in names)


@pytest.mark.slow
def test_installed_wheel_runs_from_another_directory(wheel, tmp_path):
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    site = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                          check=True, capture_output=True, text=True).stdout.strip()
    zipfile.ZipFile(wheel).extractall(site)
    # The dependencies are those of the running interpreter; the package must be the wheel's.
    (Path(site) / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = ("import numpy as np, cupyattn; from cupyattn import _source, _select\n"
            "x = np.ones((1, 5, 1, 4), np.float32)\n"
            "print(cupyattn.neighborhood_attention(x, x, x, 3).sum())\n"
            "[_source.assemble(k) for t in _select.tables().values() for r in t "
            "for k in r.kernels()]\n"
            "print(cupyattn.__file__); print(_source.kernels_folder())")
    result = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True,
                            cwd=tmp_path).stdout.split("\n")
    assert float(result[0]) == 20
    assert result[1].startswith(site) and result[2].startswith(site)


def test_works_without_cupy_and_torch():
    code = BLOCK + ("import numpy as np, cupyattn\n"
                    "x = np.ones((1, 5, 1, 4), np.float32)\n"
                    "print(cupyattn.neighborhood_attention(x, x, x, 3).sum())\n"
                    "cupyattn.show_config()")
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                         cwd=ROOT).stdout
    assert out.startswith("20.0") and "not usable" in out and "NumPy arrays only" in out


def test_import_takes_under_half_a_second():
    code = BLOCK + ("import time, numpy, scipy.special, ml_dtypes\n"
                    "start = time.perf_counter(); import cupyattn\n"
                    "print(time.perf_counter() - start, 'torch' in sys.modules)")
    runs = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True,
                           text=True, cwd=ROOT).stdout.split() for _ in range(3)]
    assert min(float(seconds) for seconds, _ in runs) < 0.5
    assert all(torch == "False" for _, torch in runs)


def test_public_names_are_documented():
    for name in cupyattn.__all__:
        if name != "__version__":
            text = getattr(cupyattn, name).__doc__
            assert text and len(text) > 20, name
    for name in ("neighborhood_attention", "fused_neighborhood_attention", "rope", "rope_table",
                 "multi_token_attention", "plan", "explain", "warmup"):
        for section in ("Parameters\n", "Returns\n", "Raises\n"):
            assert section in getattr(cupyattn, name).__doc__, (name, section)
