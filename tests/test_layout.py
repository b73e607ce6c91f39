"""The tree, the package list and the wheel agree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.helpers import ROOT

MAX_FILE_BYTES = 1 << 20
LINKS = {"localllm/backends": "../backends", "localllm/models": "../models"}

IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import localllm
assert localllm.__file__.startswith(sys.argv[1]), localllm.__file__
names = ("torch_common", "cuda", "mps", "parallel")
of_torch = tuple(f"localllm.backends.{name}." for name in names)
for module in pkgutil.walk_packages(localllm.__path__, "localllm."):
    if not module.name.endswith("__main__"):
        if not module.name.startswith(of_torch):
            importlib.import_module(module.name)
        print(module.name)
assert "torch" not in sys.modules
"""


def modules_in_tree() -> set[str]:
    """Dotted names of all modules and packages, as seen through the links."""
    found = set()
    for folder, _, files in os.walk(ROOT / "localllm", followlinks=True):
        package = Path(folder).relative_to(ROOT).parts
        for file in files:
            if file == "__init__.py":
                found.add(".".join(package))
            elif file.endswith(".py"):
                found.add(".".join((*package, file.removesuffix(".py"))))
    return found


def test_the_package_list_is_complete() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        ".".join(Path(folder).relative_to(ROOT).parts)
        for folder, _, files in os.walk(ROOT / "localllm", followlinks=True)
        if any(file.endswith(".py") for file in files)
    }
    assert set(listed) == folders
    assert folders <= modules_in_tree(), "a package lacks its __init__.py"
    assert listed == sorted(listed)


@pytest.mark.parametrize(("link", "target"), LINKS.items())
def test_links_lead_to_the_top_level(link: str, target: str) -> None:
    path = ROOT / link
    assert path.is_symlink()
    assert str(path.readlink()) == target
    assert (path / "__init__.py").is_file()


def test_no_large_file_is_committed() -> None:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    assert paths
    large = [p for p in paths if p.is_file() and p.stat().st_size > MAX_FILE_BYTES]
    assert not large


def test_the_wheel_works_elsewhere(tmp_path: Path) -> None:
    source, unpacked = tmp_path / "source", tmp_path / "unpacked"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("localllm", "backends", "models"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    with zipfile.ZipFile(next(tmp_path.glob("localllm-*.whl"))) as wheel:
        wheel.extractall(unpacked)

    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, str(unpacked)],
        cwd=tmp_path,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    expected = {name for name in modules_in_tree() if not name.endswith("__main__")}
    assert {"localllm", *result.stdout.split()} == expected
    assert (unpacked / "localllm" / "py.typed").is_file()
    static = ROOT / "localllm" / "server" / "static"
    shaders = ROOT / "localllm" / "backends" / "mps" / "shaders"
    for path in (*static.rglob("*"), *shaders.glob("*.metal")):
        if path.is_file():
            assert (unpacked / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
