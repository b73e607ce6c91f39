from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gguf import build
from tests.helpers import ROOT, architecture_cases, chat_templates, tokenizer_cases

MODELS = [case.gguf for case in architecture_cases("llama-format-q4_k_s", "llama-format-q2_k")]
VOCABULARIES = [case.gguf for case in tokenizer_cases("llama-spm", "bert-bge")]


def with_template(model: Path, folder: Path) -> Path:
    """The model with a chat template as its first key."""
    content = model.read_bytes()
    template = chat_templates("Qwen-Qwen2.5-7B-Instruct")[0].read_text()
    key = build.key("tokenizer.chat_template", build.STRING, build.text(template))
    spaces = " " * (-len(key) % 32)  # tensor data keep their alignment
    key = build.key("tokenizer.chat_template", build.STRING, build.text(template + spaces))
    (n_keys,) = struct.unpack_from("<Q", content, 16)
    path = folder / f"{model.stem}-template.gguf"
    path.write_bytes(content[:16] + struct.pack("<Q", n_keys + 1) + key + content[24:])
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="measures memory as Linux tells it")
@pytest.mark.parametrize("seed", [0, 250])
def test_damaged_files_load_or_are_refused(tmp_path: Path, seed: int) -> None:
    """None crashes, hangs, raises anything but a ModelError or takes memory beyond its size."""
    bases = [*MODELS, with_template(MODELS[0], tmp_path), *VOCABULARIES]
    module = ["-m", "tests.gguf.load_damaged"]
    arguments = [str(tmp_path), str(seed), "250", *map(str, bases)]
    result = subprocess.run(
        [sys.executable, *module, *arguments],
        cwd=ROOT,
        # One thread: a fork takes no others along.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
        check=True,
    )
    ends = re.fullmatch(r"loaded (\d+) refused (\d+)\n", result.stdout)
    assert ends, result.stdout
    loaded, refused = int(ends[1]), int(ends[2])
    assert loaded + refused == 250
    assert loaded > 20
    assert refused > 20
