"""The packages of Headway and their files at every depth; pyproject.toml alone declares them.

python -m tests.architecture.tree     prints each file with the first sentence of its docstring
"""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("launcher", "commands", "config_wizard")


def declared_packages() -> list[str]:
    """Return the packages that pyproject.toml lists (Python 3.10 has no tomllib)."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r"^packages = (\[.*?\])", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    packages: list[str] = ast.literal_eval(found[1])
    return packages


def folder_of(package: str) -> Path:
    """Return the real folder of a package, not the link to it below headway/."""
    parts = package.split(".")
    return ROOT.joinpath(*(parts[1:] if len(parts) > 1 and parts[1] in LINKS else parts))


def product_files() -> dict[str, Path]:
    """Return every module of the declared packages by its dotted name."""
    files = {}
    for package in declared_packages():
        for path in sorted(folder_of(package).glob("*.py")):
            files[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return files


def tracked_files() -> list[str]:
    """Return what git tracks, or would track, below the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    names = [name for name in listed.stdout.decode().split("\0") if name]
    return [name for name in names if (ROOT / name).exists()]


def tracked_product_files() -> set[Path]:
    """Return the tracked Python files that have to be in a package."""
    tops = ("headway/", *(f"{link}/" for link in LINKS))
    return {
        ROOT / name for name in tracked_files() if name.startswith(tops) and name.endswith(".py")
    }


def imported_modules(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules that a file imports, anywhere in it; ours as keys of `modules`."""
    found = set()
    for module, names in _imports(path):
        submodules = names & modules.keys()
        found |= submodules
        if len(submodules) < len(names) or not names:
            found.add(module)
    return found


@cache
def _imports(path: Path) -> list[tuple[str, set[str]]]:
    """Return the modules that a file names in its imports, each with the full names it takes."""
    found: list[tuple[str, set[str]]] = []
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []  # for type checkers alone
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, set()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path}, line {node.lineno}: a relative import"
            found.append((node.module, {f"{node.module}.{alias.name}" for alias in node.names}))
    return found


def listing() -> str:
    """Return a line for every file, with what its docstring says first."""
    lines: dict[Path, list[str]] = {}
    for path in sorted(product_files().values()):
        if path.stem != "__init__":
            docstring = ast.get_docstring(ast.parse(path.read_text()))
            assert docstring, f"{path} has no docstring"
            said = " ".join(docstring.split("\n\n")[0].split())
            lines.setdefault(path.parent, []).append(f"  {path.name}: {said}\n")
    return "".join(
        "".join([f"{folder.relative_to(ROOT)}/\n", *those]) for folder, those in lines.items()
    )


if __name__ == "__main__":
    print(listing(), end="")
