"""Which parts there are, and how one of them runs in a process of its own."""

from __future__ import annotations

import argparse
import os
import time
import traceback
from dataclasses import dataclass
from importlib import import_module

from gpu_checks.check import Check


@dataclass(frozen=True)
class Part:
    """Parts of one stage run side by side; whoever measures has the machine for itself."""

    module: str
    stage: int
    budget: float  # seconds
    least: float  # seconds; with fewer left it is not worth a start
    shards: int = 1  # processes that share its work
    exact: bool = False  # finds right or wrong, not fast or slow


ENVIRONMENT = "environment"

# In order of worth: what comes last is the first to be left out. Stages take all the time there is.
PARTS = {
    ENVIRONMENT: Part("environment", 0, 50, 15),
    "kernels": Part("kernels", 1, 150, 30, shards=3, exact=True),
    "conformance": Part("conformance", 1, 150, 30, shards=4, exact=True),
    "compile": Part("compile", 1, 150, 30, shards=3),
    "speed": Part("speed", 2, 120, 50),
    "fast": Part("fast", 3, 70, 40),
    "transformers": Part("peers", 4, 80, 30),
}


def run_part(name: str, args: argparse.Namespace) -> None:
    """Imports what the part needs and runs it; an error is among its findings, and goes on."""
    if args.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    check = Check(
        device="cpu" if args.rehearse else "cuda",
        rehearsal=args.rehearse,
        ends=time.monotonic() + args.seconds,
        file=args.into,
        shard=args.shard,
        shards=args.shards,
    )
    try:
        import_module(f"gpu_checks.{PARTS[name].module}").run(check)
    except Exception:
        check.put("error", traceback.format_exc())
        raise
