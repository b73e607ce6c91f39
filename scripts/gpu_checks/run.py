"""Runs the parts, stage after stage, and keeps the whole result on disk all the while."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from gpu_checks.check import NOT_MEASURED, Json, write_json
from gpu_checks.parts import ENVIRONMENT, PARTS

RESERVE = 10.0  # seconds at the end that no part gets
GRACE = 3.0  # seconds after its time in which a part may still stop by itself
POLL = 0.05
REWRITE = 2.0  # seconds between one state of the file and the next
NO_GPU = "no GPU to run on: nothing was measured, and nothing is claimed"


@dataclass(frozen=True)
class Settings:
    script: Path
    rehearsal: bool
    seconds: float
    parts: list[str]
    out: Path | None


@dataclass
class Entry:
    """What has become of a part; its shares' findings lie side by side."""

    state: str = "done"  # or running, failed, out of time, skipped
    seconds: float = 0.0
    found: dict[str, Json] = field(default_factory=dict)


@dataclass
class Job:
    """A process that does a part, or a share of one."""

    part: str
    file: Path
    process: subprocess.Popen[bytes]
    began: float
    ends: float

    def ended(self) -> str | None:
        """In which state, or None while it runs; kills it when its time is over."""
        code = self.process.poll()
        if code is not None:
            return "done" if code == 0 else "failed"
        if time.monotonic() > self.ends + GRACE:
            self.stop()
            return "out of time"
        return None

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def found(self) -> dict[str, Json]:
        return json.loads(self.file.read_text()) if self.file.exists() else {}


class Run:
    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.began = time.monotonic()
        self.entries: dict[str, Entry] = {}
        self.running: list[Job] = []
        self.written = self.began

    def stage(self, names: list[str]) -> None:
        """Runs the parts side by side, as far as there are cores, and waits for them."""
        cores = os.cpu_count() or 1
        shares = {name: max(1, min(PARTS[name].shards, cores // 4)) for name in names}
        waiting = [(name, shard, n) for name, n in shares.items() for shard in range(n)]
        with ExitStack() as stack:
            while waiting or self.running:
                while waiting and len(self.running) < max(1, cores - 2):
                    for job in self._started(*waiting.pop(0)):
                        stack.callback(job.stop)
                        self.running.append(job)
                for job in self.running.copy():
                    if (state := job.ended()) is not None:
                        self.running.remove(job)
                        _take(self.entries, job, state)
                        self.write()
                if self.settings.out and time.monotonic() - self.written > REWRITE:
                    self.write()
                time.sleep(POLL)

    def _started(self, name: str, shard: int, shards: int) -> Iterator[Job]:
        """The job, unless too little time is left for it."""
        part, now = PARTS[name], time.monotonic()
        left = self.began + self.settings.seconds - RESERVE - now
        if left < part.least:
            self.entries.setdefault(name, Entry("skipped: no time was left"))
            return
        file = self.folder / (f"{name}-{shard}.json" if shards > 1 else f"{name}.json")
        seconds = left if self.settings.rehearsal else min(left, part.budget)
        command = [sys.executable, str(self.settings.script), "--parts", name, "--into", str(file)]
        command += ["--seconds", str(seconds), "--shard", str(shard), "--shards", str(shards)]
        command += ["--rehearse"] if self.settings.rehearsal else []
        print(f"{name}, share {shard + 1} of {shards}: {seconds:.0f} s", file=sys.stderr)
        process = subprocess.Popen(command, stdout=sys.stderr)
        yield Job(name, file, process, now, now + seconds)

    def gpu(self) -> Json:
        entry = self.entries.get(ENVIRONMENT, Entry())
        return entry.found.get("gpu")

    def document(self) -> dict[str, Json]:
        entries = deepcopy(self.entries)
        for job in self.running:
            _take(entries, job, "running")
        parts = {name: vars(entry) for name, entry in entries.items()}
        document: dict[str, Json] = {"gpu": self.gpu(), "rehearsal": self.settings.rehearsal}
        if self.settings.rehearsal:
            document["note"] = NOT_MEASURED
        elif self.gpu() is None:
            document["note"] = NO_GPU
        document["seconds"] = time.monotonic() - self.began
        document["goals"] = goals(parts)
        document["parts"] = parts
        return document

    def write(self) -> None:
        """What is known so far, from parts that still run too."""
        self.written = time.monotonic()
        document = self.document()
        if self.settings.out is None:
            print(json.dumps(document), flush=True)
        else:
            write_json(self.settings.out, document)

    def exit_code(self) -> int:
        failed = any(entry.state == "failed" for entry in self.entries.values())
        exact = {name: vars(e) for name, e in self.entries.items() if PARTS[name].exact}
        return int(failed or bool(goals(exact)["missed"]))


def _take(entries: dict[str, Entry], job: Job, state: str) -> None:
    """Adds to a part's entry what a process has found."""
    entry = entries.setdefault(job.part, Entry())
    if state != "done":
        entry.state = state
    entry.seconds = max(entry.seconds, time.monotonic() - job.began)
    entry.found |= job.found()


def run_all(settings: Settings) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes are ended
    names = [name for name in PARTS if name in (ENVIRONMENT, *settings.parts)]
    with tempfile.TemporaryDirectory() as folder:
        run = Run(settings, Path(folder))
        for _, stage in groupby(names, lambda name: PARTS[name].stage):
            run.stage(list(stage))
            run.write()
            if run.gpu() is None and not settings.rehearsal:
                return 0
        return run.exit_code()


def nothing_claimed(out: Path | None, why: str) -> int:
    """The result of a machine that cannot even be asked for its GPU."""
    print(f"gpu_check: {why}", file=sys.stderr)
    document: dict[str, Json] = {"gpu": None, "note": f"{why}; {NO_GPU}"}
    if out is None:
        print(json.dumps(document))
    else:
        write_json(out, document)
    return 0


def goals(found: Json) -> dict[str, list[str]]:
    """Where in the findings a goal is met, missed, or not measured."""
    sorted_out: dict[str, list[str]] = {"met": [], "missed": [], "not measured": []}
    for path, met in _goals(found, ""):
        key = "not measured" if met is None else "met" if met else "missed"
        sorted_out[key].append(path)
    return sorted_out


def _goals(found: Json, path: str) -> Iterator[tuple[str, Json]]:
    if isinstance(found, Mapping) and "met" in found:
        yield path, found["met"]
    elif isinstance(found, Mapping):
        for name, value in found.items():
            below = path if name == "found" else f"{path} / {name}" if path else name
            yield from _goals(value, below)
