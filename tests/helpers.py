"""What tests share, beside the fixtures: reference data by name, from the tree and from outside.

`tests/fixtures` holds a choice small enough to commit. The full set lies in the folder that
$LOCALLLM_SHARED names, by default `shared` beside the repository; where it is absent the suite
runs on the choice alone. Import as `from tests.helpers import ...`.
"""

from __future__ import annotations

import atexit
import lzma
import os
import shutil
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
SHARED = Path(os.environ.get("LOCALLLM_SHARED", ROOT.parent / "shared"))

_FIRST_SHARD = "-00001-of-"
_TEXT_SEPARATOR = "\n__ggml_vocab_test__\n"


@dataclass(frozen=True)
class ArchitectureCase:
    """A tiny random model and the logits that llama.cpp computes for it."""

    name: str
    gguf: Path  # the first shard where there are several
    npz: Path

    def tokens(self) -> npt.NDArray[np.int32]:
        with np.load(self.npz) as data:
            tokens: npt.NDArray[np.int32] = data["tokens"]
        return tokens

    def logits(self) -> npt.NDArray[np.float32]:
        """[tokens, vocabulary]"""
        with np.load(self.npz) as data:
            logits: npt.NDArray[np.float32] = data["logits"]
        return logits


@dataclass(frozen=True)
class TokenizerCase:
    """A vocabulary with texts and the ids that llama.cpp gives them, without special tokens."""

    name: str
    packed: Path  # .gguf or .gguf.xz
    vectors: Path  # with .inp and .out appended

    @property
    def gguf(self) -> Path:
        return _unpacked(self.packed)

    def texts(self) -> list[str]:
        content = self.vectors.with_name(self.vectors.name + ".inp").read_bytes().decode()
        return content.removesuffix(_TEXT_SEPARATOR).split(_TEXT_SEPARATOR)

    def ids(self) -> list[list[int]]:
        content = self.vectors.with_name(self.vectors.name + ".out").read_text()
        return [[int(number) for number in line.split()] for line in content.splitlines()]


def data_dirs(kind: str) -> list[Path]:
    """The folders of one kind of reference data that exist, the tree's own first."""
    candidates = [FIXTURES / kind, SHARED / "conformance" / kind]
    return [folder for folder in candidates if folder.is_dir()]


def architecture_cases(*patterns: str) -> list[ArchitectureCase]:
    """Cases whose name matches one of the shell patterns (all without any), sorted by name."""
    cases: dict[str, ArchitectureCase] = {}
    for folder in data_dirs("architectures"):
        for npz in folder.glob("*.npz"):
            whole = npz.with_suffix(".gguf")
            first = next(folder.glob(f"{npz.stem}{_FIRST_SHARD}*.gguf"), whole)
            cases.setdefault(npz.stem, ArchitectureCase(npz.stem, first, npz))
    return [cases[name] for name in sorted(cases) if _matches(name, patterns)]


def tokenizer_cases(*patterns: str) -> list[TokenizerCase]:
    cases: dict[str, TokenizerCase] = {}
    for folder in data_dirs("tokenizers"):
        for out in folder.glob("*.gguf.out"):
            vectors = out.with_suffix("")
            packed = vectors if vectors.exists() else vectors.with_name(vectors.name + ".xz")
            name = vectors.stem.removeprefix("ggml-vocab-")
            cases.setdefault(name, TokenizerCase(name, packed, vectors))
    return [cases[name] for name in sorted(cases) if _matches(name, patterns)]


def chat_templates(*patterns: str) -> list[Path]:
    files: dict[str, Path] = {}
    for folder in data_dirs("chat_templates"):
        for path in folder.glob("*.jinja"):
            files.setdefault(path.stem, path)
    return [files[name] for name in sorted(files) if _matches(name, patterns)]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatch(name, pattern) for pattern in patterns)


@cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="localllm-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _unpacked(path: Path) -> Path:
    if path.suffix != ".xz":
        return path
    target = _scratch() / path.stem
    with lzma.open(path) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out)
    return target
