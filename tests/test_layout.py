"""The shape of the repository: what must not be a package, what belongs together, what a simulated run imports."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
FIGURES = sorted(path.stem for path in ROOT.glob("conf/experiment/fig_*.yaml"))


def _committed() -> list[Path]:
    """Every file git tracks or would track."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: cannot tell which files belong to the project")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def _run(arguments: list[str], environment: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Run Python and return what it printed; fails with both streams."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("folder", ["kernels", "conf", "experiments", "notebooks", "results", "tests"])
def test_is_a_plain_folder(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_file_names_a_path_of_one_machine() -> None:
    forbidden = [f"/{folder}/" for folder in ("work", "root", "home", "Users")]
    found = []
    for path in _committed():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {word}" for word in forbidden if word in text]
    assert not found


def test_every_figure_has_its_experiment_its_module_and_its_script() -> None:
    assert FIGURES
    assert sorted(path.stem for path in ROOT.glob("kvbench/figures/fig_*.py")) == FIGURES
    assert sorted(path.stem for path in ROOT.glob("experiments/fig_*.py")) == FIGURES


def _expanded(name: str) -> list[str]:
    """``a.{b, c}`` -> ``a.b``, ``a.c``."""
    found = re.fullmatch(r"([\w.]*)\{(.*)\}", name)
    return [found[1] + part.strip() for part in found[2].split(",")] if found else [name]


def test_every_module_has_its_line() -> None:
    table = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8").partition("## Modules")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [each for cell in cells for name in re.findall(r"`([^`]+)`", cell) for each in _expanded(name)]
    package = ROOT / "kvbench"
    modules = {".".join(path.relative_to(package).with_suffix("").parts) for path in package.rglob("[!_]*.py")}
    assert not [module for module in modules if not any(fnmatch(module, name) for name in named)]
    assert not [name for name in named if not any(fnmatch(module, name) for module in modules)]
    assert len(named) == len(set(named))


CORE = (
    "core", "clock", "engine", "reservation", "ledger", "records", "allocators/*", "schedulers/*", "runners/base",
    "runners/simulated",
)  # fmt: skip
MAX_CORE_LINES = 3400


def test_the_core_stays_small() -> None:
    """What a request passes through on the virtual clock can be read in an afternoon."""
    found = {name: list(ROOT.glob(f"kvbench/{name}.py")) for name in CORE}
    assert all(found.values())
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for paths in found.values() for path in paths}
    assert sum(lines.values()) <= MAX_CORE_LINES


def test_every_allocator_has_its_yaml() -> None:
    in_python = set()
    for path in ROOT.glob("kvbench/allocators/*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef) or any(ast.unparse(base) == "Protocol" for base in node.bases):
                continue
            if any(isinstance(part, ast.FunctionDef) and part.name == "can_allocate" for part in node.body):
                in_python.add(f"kvbench.allocators.{path.stem}.{node.name}")
    in_yaml = {
        yaml.safe_load(path.read_text(encoding="utf-8"))["_target_"] for path in ROOT.glob("conf/allocator/*.yaml")
    }
    assert in_python
    assert in_yaml == in_python | {None}  # a user's own


def test_the_stepping_code_does_not_import_pandas() -> None:
    modules = ["engine", "ledger", "records", "schedulers.iteration_level", "schedulers.request_level"]
    allocators = {path.stem for path in ROOT.glob("conf/allocator/*.yaml")} - {"own"}
    modules += ["runners.simulated", *(f"allocators.{name}" for name in sorted(allocators))]
    imports = "; ".join(f"import kvbench.{module}" for module in modules)
    loaded = _run(["-c", f"{imports}; import sys; print(*sys.modules)"]).split()
    assert "kvbench.engine" in loaded
    assert not {"pandas", "torch", "transformers", "hydra"} & set(loaded)


def test_a_simulated_run_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """Stand-ins note who is imported, so this also speaks where neither is installed, and for worker processes."""
    noted = tmp_path / "imported"
    for name in ("torch", "transformers"):
        package = tmp_path / "path" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"open({str(noted)!r}, 'a').write({name!r} + '\\n')\n")
    _run(
        ["-m", "kvbench", "+experiment=smoke", f"results_dir={tmp_path / 'results'}"],
        {"PYTHONPATH": str(tmp_path / "path")},
    )
    assert list(tmp_path.glob("results/**/summary.csv"))
    assert not noted.exists(), noted.read_text()


def test_an_installed_kvbench_brings_its_kernels_but_no_package_called_kernels(tmp_path: Path) -> None:
    code = "import kvbench, kvbench_kernels; from importlib.util import find_spec; print(find_spec('kernels'))"
    assert str(ROOT) not in _run(["-c", code], cwd=tmp_path)


def test_documents_link_to_files_that_exist() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("kernels/*.md")]
    links = [
        (document, target)
        for document in documents
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8"))
    ]
    assert links
    assert not [f"{document.name}: {target}" for document, target in links if not (document.parent / target).exists()]
