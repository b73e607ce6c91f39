"""Loads damaged models, each in a process of its own, and reports what did not end well.

    python -m tests.gguf.load_damaged SCRATCH SEED COUNT BASE.gguf...

Every child has a time limit, and may take ten times the file's size plus 50 MB beyond what the
interpreter with its libraries takes. Prints one line for each failure, then `loaded N refused N`.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import struct
import sys
import traceback
from pathlib import Path

import gguf
import sentencepiece
import tokenizers

from localllm.errors import ModelError
from localllm.gguf import GGUFFile
from localllm.models import build_program, trained_context
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer import load_tokenizer
from tests.gguf.build import SCALARS, text

LIBRARIES = (gguf, sentencepiece, tokenizers)  # imported here, so as not to count for a file
SECONDS = 60
LOADED, REFUSED, FAILED = 0, 1, 2
WILD = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**61, 2**63 - 1, 2**63, 2**64 - 1]


class Damage:
    """Ways to spoil one model, mostly in the part that says what the rest is."""

    def __init__(self, base: Path) -> None:
        self.content = base.read_bytes()
        with GGUFFile.open(base) as file:
            keys, tensors = list(file.metadata), list(file.tensors)
            data = sum(tensor.n_bytes for tensor in file.tensors.values())
        self.header = len(self.content) - data
        self.counts = [8, 16]  # of tensors and of keys
        self.numbers: list[tuple[int, int]] = []  # place and size of numbers that mean something
        for key in keys:
            after = self._after(key)
            value_type = int.from_bytes(self.content[after : after + 4], "little")
            if value_type in SCALARS:
                self.numbers.append((after + 4, struct.calcsize(SCALARS[value_type])))
            else:
                self.counts += [after + 4, after + 8]
        for tensor in tensors:
            after = self._after(tensor)
            self.counts.append(after)
            self.numbers += [(after + 4, 8), (after + 12, 8), (after + 20, 4)]

    def make(self, rng: random.Random) -> tuple[str, bytes]:
        return rng.choice([self.truncate, self.flip, self.overwrite])(rng)

    def truncate(self, rng: random.Random) -> tuple[str, bytes]:
        length = self._place(rng)
        return f"cut to {length}", self.content[:length]

    def flip(self, rng: random.Random) -> tuple[str, bytes]:
        spoiled = bytearray(self.content)
        places = [self._place(rng) for _ in range(rng.choice([1, 1, 2, 16]))]
        for place in places:
            spoiled[place] ^= 1 << rng.randrange(8)
        return f"bits flipped at {places}", bytes(spoiled)

    def overwrite(self, rng: random.Random) -> tuple[str, bytes]:
        spoiled = bytearray(self.content)
        place, size = rng.choice(self.numbers)
        if rng.random() < 0.3:
            place, size = rng.choice(self.counts), rng.choice([4, 8])
        value = rng.choice([*WILD, rng.randrange(256), rng.randrange(self.header)])
        spoiled[place : place + size] = value.to_bytes(8, "little")[:size]
        return f"{size} bytes of {value} at {place}", bytes(spoiled)

    def _after(self, name: str) -> int:
        """Where the description of a key or tensor goes on after its name."""
        encoded = text(name)
        return self.content.index(encoded) + len(encoded)

    def _place(self, rng: random.Random) -> int:
        return rng.randrange(self.header if rng.random() < 0.8 else len(self.content))


def load(path: Path) -> None:
    """All that a model load reads, short of a backend's own layout."""
    with GGUFFile.open(path) as file:
        for key in file.metadata:
            _ = file.metadata[key]
        ChatTemplate.load(file, load_tokenizer(file))
        if file.tensors:
            program = build_program(file, trained_context(file))
            for name in program.weights():
                file.tensors[name].dequantize()


def run_child(path: Path, limit: int) -> int:
    signal.alarm(SECONDS)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit, used + limit))
    try:
        load(path)
    except ModelError as error:
        return FAILED if "\n" in str(error) else REFUSED
    except BaseException:
        traceback.print_exc(limit=-4)
        return FAILED
    return LOADED


def resident(child: int) -> tuple[int, int]:
    """Exit status and largest resident size, in bytes, of a child."""
    _, status, usage = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024


def main(scratch: Path, seed: int, count: int, bases: list[Path]) -> None:
    damages = [(base, Damage(base)) for base in bases]
    child = os.fork()
    if not child:
        os._exit(0)
    interpreter = resident(child)[1]
    ends = {LOADED: 0, REFUSED: 0}
    for number in range(seed, seed + count):
        rng = random.Random(number)
        base, damage = rng.choice(damages)
        what, content = damage.make(rng)
        path = scratch / "damaged.gguf"
        path.write_bytes(content)
        limit = 10 * len(content) + 50_000_000
        child = os.fork()
        if not child:
            os._exit(run_child(path, limit))
        code, size = resident(child)
        if code not in ends or size > interpreter + limit:
            print(f"seed {number}, {base.name} {what}: ended with {code}, {size >> 20} MiB")
        else:
            ends[code] += 1
    print(f"loaded {ends[LOADED]} refused {ends[REFUSED]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), [Path(p) for p in sys.argv[4:]])
