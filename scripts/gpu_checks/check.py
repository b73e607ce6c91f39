"""What a part of the check is given, and where it puts what it finds."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

NOT_MEASURED = "a rehearsal measures nothing"


@dataclass
class Check:
    """One part's run. Findings are on disk as soon as they are put."""

    device: str  # "cuda", or "cpu" for a rehearsal under Triton's interpreter
    rehearsal: bool
    ends: float  # by time.monotonic()
    file: Path
    shard: int = 0
    shards: int = 1
    found: dict[str, Json] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """The interpreter computes wrong products of bfloat16."""
        return "float32" if self.rehearsal else "bfloat16"

    def left(self) -> float:
        """Seconds until the part has to be done."""
        return self.ends - time.monotonic()

    def put(self, name: str, value: Json) -> None:
        self.found[name] = value
        write_json(self.file, self.found)

    def found_by(self, part: str) -> dict[str, Json]:
        """What an earlier part, of one process, has found."""
        file = self.file.with_name(f"{part}.json")
        return json.loads(file.read_text()) if file.exists() else {}

    def of_environment(self, name: str) -> float:
        """A rate that the machine reaches; NaN where it was not measured."""
        rate = self.found_by("environment").get(name)
        return rate if isinstance(rate, float) else math.nan

    def measured(self, value: float) -> float | None:
        """What a clock says, which in a rehearsal is nothing."""
        return None if self.rehearsal or math.isnan(value) else value

    def at_least(self, value: float, floor: float, aim: float | None = None) -> Json:
        """A measured figure beside its goal, compared as it is and never rounded."""
        measured = self.measured(value)
        goal: dict[str, Json] = {"value": measured, "goal": f">= {floor:g}"}
        goal["met"] = None if measured is None else measured >= floor
        if aim is not None:
            goal["aim"] = f">= {aim:g}"
            goal["aim_met"] = None if measured is None else measured >= aim
        return goal

    def below(self, value: float, limit: float) -> Json:
        measured = self.measured(value)
        met = None if measured is None else measured < limit
        return {"value": measured, "goal": f"< {limit:g}", "met": met}


def identical(equal: bool) -> Json:
    return {"value": equal, "goal": "the same bits", "met": equal}


def holds(value: float, limit: float) -> Json:
    """An error beside its limit. No clock is asked, so it counts in a rehearsal too."""
    shown = value if math.isfinite(value) else str(value)  # JSON has no NaN
    return {"value": shown, "goal": f"< {limit:g}", "met": value < limit}


def write_json(path: Path, value: Json) -> None:
    """In one piece: who reads it, or whoever kills the writer, never sees a half."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(draft, path)
