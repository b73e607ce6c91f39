"""`scripts/make_random_model`: other programs load the files too, but here ours has to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from localllm import LLM, SamplingParams
from localllm.gguf import GGUFFile, TensorType
from tests.helpers import ROOT

SCRIPT = ROOT / "scripts" / "make_random_model"
MIXES = ("Q2_K", "Q3_K_S", "Q4_K_M", "Q8_0", "Q4_0", "IQ4_NL", "IQ4_XS")
VOCAB = 512  # of the shape `tiny`


def make(out: Path, mix: str, *options: str) -> Path:
    command = [sys.executable, str(SCRIPT), "tiny", mix, str(out), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return out


@pytest.mark.parametrize("mix", MIXES)
def test_a_model_that_computes_sound_numbers(tmp_path: Path, mix: str) -> None:
    with LLM(make(tmp_path / "tiny.gguf", mix), backend="reference", ctx_size=256) as llm:
        tokens = llm.tokenize("a ba\n")
        assert llm.detokenize(tokens).strip() == "a ba"
        logits = llm.logits(tokens)
        assert logits.shape == (len(tokens), VOCAB)
        assert 0.3 < logits.std() < 3  # as of a matrix that keeps the size of its input
        (answer,) = llm.generate(tokens, SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(answer.token_ids) == 4


def test_weights_spread_by_the_root_of_their_length(tmp_path: Path) -> None:
    for mix in MIXES:
        with GGUFFile.open(make(tmp_path / f"{mix}.gguf", mix)) as file:
            for name, tensor in file.tensors.items():
                weights = tensor.dequantize()
                if "norm" in name:
                    assert (weights == 1).all()
                else:
                    expected = 1 if name == "token_embd.weight" else weights.shape[-1] ** -0.5
                    assert weights.std() == pytest.approx(expected, rel=0.1), (mix, name)
                    assert abs(weights.mean()) < 0.1 * expected, (mix, name)


def test_the_mix_of_formats(tmp_path: Path) -> None:
    with GGUFFile.open(make(tmp_path / "mix.gguf", "Q4_K_M")) as file:
        types = {name: tensor.type for name, tensor in file.tensors.items()}
    assert types["output.weight"] is TensorType.Q6_K
    assert types["blk.0.ffn_down.weight"] is TensorType.Q4_K
    assert types["blk.1.ffn_down.weight"] is TensorType.Q6_K
    assert types["blk.1.attn_v.weight"] is TensorType.Q6_K
    assert types["blk.1.attn_k.weight"] is TensorType.Q4_K


def test_a_seed_gives_the_same_file_and_vocabulary_is_an_option(tmp_path: Path) -> None:
    first, again = (make(tmp_path / name, "Q4_0") for name in ("first.gguf", "again.gguf"))
    assert first.read_bytes() == again.read_bytes()
    other = make(tmp_path / "other.gguf", "Q4_0", "--seed", "1", "--vocab", "900")
    with GGUFFile.open(other) as file:
        assert file.tensors["output.weight"].shape[0] == 900
        names = file.get_strings("tokenizer.ggml.tokens")
        assert len(set(names)) == 900
        with GGUFFile.open(first) as small:
            a, b = (f.tensors["blk.0.attn_q.weight"].raw() for f in (file, small))
            assert not np.array_equal(a, b)
