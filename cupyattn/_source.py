"""From a `Kernel` to the one text that is compiled: local includes in line, a generated end.

CuPy's disk cache hashes the text it is given and not the files that the text includes, so every
byte must be in the text. ``#line`` marks keep compiler errors pointing at the real files.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from ._params import STRUCTS
from ._program import Kernel

_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"\s*$')


@functools.cache
def kernels_folder() -> Path:
    """Return the folder of the CUDA sources: inside an installed package, or beside it."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_kernels", package.parent / "kernels"):
        if (folder / "common").is_dir():
            return folder
    raise FileNotFoundError(f"no kernel sources in {package / '_kernels'} "
                            f"or {package.parent / 'kernels'}; reinstall cupyattn")


@functools.cache
def _expanded(name: str, folder: Path) -> str:
    lines: list[str] = []
    _expand(name, folder, (), set(), lines)
    return "\n".join(lines) + "\n"


def _expand(name: str, folder: Path, chain: tuple[str, ...], done: set[str],
            lines: list[str]) -> None:
    if name in chain:
        raise ValueError("include cycle: " + " -> ".join((*chain, name)))
    if name in done:
        return
    done.add(name)
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{' -> '.join((*chain, name))}: no such file in {folder}")
    lines.append(f'#line 1 "kernels/{name}"')
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        include = _INCLUDE.match(line)
        if include:
            _expand(include[1], folder, (*chain, name), done, lines)
            lines.append(f'#line {number + 1} "kernels/{name}"')
        elif line.strip() != "#pragma once":
            lines.append(line)
        else:
            lines.append("")  # each file is put in once; NVRTC warns of the pragma in a main file


def _struct_checks(name: str) -> list[str]:
    dtype = STRUCTS[name]
    lines = [f'static_assert(sizeof({name}) == {dtype.itemsize}, "{name}: size differs '
             f'from _params.py");']
    assert dtype.fields is not None
    nested = set()
    for field, (sub, offset, *_) in dtype.fields.items():
        lines.append(f'static_assert(__INTADDR__(&((({name}*)0)->{field})) == {offset}, '
                     f'"{name}.{field}: offset differs from _params.py");')
        nested |= {other for other, known in STRUCTS.items() if sub.base == known}
    for other in sorted(nested):
        lines = _struct_checks(other) + lines
    return lines


# Every kernel may be launched before the work ahead of it in its stream is done, and waits for that
# before it touches memory (see `_launch.Launch`), but for its own shared memory and prefetches to
# L2 (`Kernel.early`).
# Both lines do nothing in other launches.
_WAIT = """\
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
"""


def assemble(kernel: Kernel, folder: Path | None = None) -> str:
    """Return the whole text of one kernel: its file, its headers, its `Config`, its entry."""
    body = _expanded(kernel.source, folder or kernels_folder())
    config = "\n".join("  " + line for line in kernel.config)
    checks = "\n".join(_struct_checks(kernel.params))
    bounds = (kernel.threads if kernel.blocks == 1 and kernel.target is None
              else f"{kernel.threads}, {kernel.blocks}")  # setmaxnreg asks for both
    early = f"  {kernel.early}<Config>(p);\n" if kernel.early else ""
    return (f'{body}#line 1 "generated for {kernel.name}"\n'
            "struct Config {\n"
            f"  static constexpr int kThreads = {kernel.threads};\n{config}\n"
            "};\n"
            f"{checks}\n"
            f'extern "C" __global__ void __launch_bounds__({bounds})\n'
            f"{kernel.name}(const __grid_constant__ {kernel.params} p) {{\n{early}{_WAIT}"
            f"  {kernel.function}<Config>(p);\n}}\n")
