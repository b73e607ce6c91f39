"""Models in Python. The reference backend serves most tests, since it needs no compiler."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm import LLM, SamplingParams
from localllm.errors import (
    ContextLengthError,
    EngineError,
    GGUFError,
    InsufficientMemoryError,
    ModelError,
    RequestError,
    UnsupportedArchitectureError,
)
from localllm.grammar import GrammarSpec
from localllm.text.tokenizer import load_tokenizer
from tests.engine.processes import PATIENCE, TINY_MODEL, engine_processes, is_gone, wait_until
from tests.helpers import SHARED, architecture_cases

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OUTSIDE = SamplingParams(logit_bias={128: 1.0})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY_MODEL, backend="reference") as llm:
        yield llm


def test_control_tokens_are_parsed_in_prompts_and_on_request(llm: LLM) -> None:
    text = _a_control_token()
    assert len(llm.tokenize(text, add_special=False, parse_special=True)) == 1
    assert len(llm.tokenize(text, add_special=False)) > 1
    (answer,) = llm.generate(text, GREEDY)
    assert answer.prompt_token_ids == llm.tokenize(text, parse_special=True)


def _a_control_token() -> str:
    tokenizer = load_tokenizer(TINY_MODEL)
    return next(
        tokenizer.token_text(i) for i in range(tokenizer.vocab_size) if tokenizer.is_control(i)
    )


def test_prompts_of_every_kind_are_answered_in_order(llm: LLM) -> None:
    ids = llm.tokenize("Hello")
    assert ids
    prompts: list[str | list[int]] = ["Hello", ids, "Bye"]
    by_text, by_ids, other = llm.generate(prompts, GREEDY)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == ids
    assert by_text.token_ids == by_ids.token_ids != other.token_ids
    assert len(by_text.token_ids) == 12
    assert by_text.finish_reason == "length"
    assert by_text.text == llm.detokenize(by_text.token_ids)
    for single in ("Hello", ids, tuple(ids), np.array(ids)):
        (one,) = llm.generate(single, GREEDY)  # type: ignore[arg-type]
        assert one.token_ids == by_text.token_ids
    assert llm.generate([]) == []


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 5)]
    assert [len(g.token_ids) for g in llm.generate(["a", "a"], params)] == [3, 5]
    with pytest.raises(RequestError, match="2 params for 1 prompts"):
        llm.generate(["a"], params)


def test_choices_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, n=3, max_tokens=12, seed=4, ignore_eos=True)
    first, again = (llm.generate("Hi", params)[0] for _ in range(2))
    assert [c.index for c in first.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in first.outputs}) == 3
    assert first.outputs == again.outputs
    unseeded = SamplingParams(temperature=1.5, n=2, max_tokens=12, ignore_eos=True)
    one, two = (llm.generate("Hi", unseeded)[0] for _ in range(2))
    assert one.outputs != two.outputs


def test_a_stop_string_ends_the_text_and_the_sequence(llm: LLM) -> None:
    (whole,) = llm.generate("Hello", GREEDY)
    stop = whole.text[4:6]
    cut = whole.text.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=(stop, "never"))
    (stopped,) = llm.generate("Hello", params)
    assert stopped.text == whole.text[:cut]
    assert stopped.finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == stop
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) < 12
    llm.generate("x", SamplingParams(max_tokens=1))
    assert llm.stats.running == 0


def test_a_stop_token_is_no_part_of_the_text(llm: LLM) -> None:
    (whole,) = llm.generate("Hello", GREEDY)
    end = whole.token_ids[5]
    at = whole.token_ids.index(end)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(end,))
    (stopped,) = llm.generate("Hello", params)
    assert stopped.token_ids == whole.token_ids[: at + 1]
    assert stopped.text == llm.detokenize(whole.token_ids[:at])
    assert (stopped.finish_reason, stopped.outputs[0].stop_reason) == ("stop", end)


def test_without_a_limit_the_context_ends_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    (generation,) = llm.generate("Hello", params)
    assert len(generation.prompt_token_ids) + len(generation.token_ids) == llm.ready.context == 256
    assert generation.finish_reason == "length"


def test_cached_tokens_are_told(llm: LLM) -> None:
    ids = [9] * 40
    llm.generate(ids, GREEDY)
    (again,) = llm.generate(ids, GREEDY)
    assert again.cached_tokens == 32


def test_logits_are_those_of_llama_cpp() -> None:
    (case,) = architecture_cases("llama-format-q4_0")
    with LLM(case.gguf, backend="reference", max_num_batched_tokens=9) as llm:
        logits = llm.logits(case.tokens().tolist())
    expected = case.logits()
    assert logits.dtype == np.float32
    assert logits.shape == expected.shape
    assert ((logits - expected) ** 2).mean() / (expected**2).mean() < 1e-6


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda llm: llm.generate([[]]), RequestError, "no tokens"),
        (lambda llm: llm.generate([[1], [500]]), RequestError, "outside 0..127"),
        (lambda llm: llm.generate([1] * 256), ContextLengthError, "256 tokens"),
        (
            lambda llm: llm.generate("a", SamplingParams(logit_bias={128: 1.0})),
            RequestError,
            "bias",
        ),
        (lambda llm: llm.logits([]), RequestError, "no tokens"),
        (lambda llm: llm.logits([1] * 257), ContextLengthError, "257 tokens"),
    ],
)
def test_a_bad_request_is_refused_and_leaves_nothing_behind(
    llm: LLM, call: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        call(llm)
    llm.generate("a", GREEDY)
    assert (llm.stats.running, llm.stats.waiting) == (0, 0)


@pytest.mark.parametrize(
    "prompts",
    [
        *([1.5], [[1.5]], [[True]], [1, "a"], [["a"]], np.array([1.0]), np.array(3)),
        *(b"abc", [b"abc"], {"prompt": "a"}, [{"a": 1}], None, 7),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="token ids") as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.param == "prompts"


@pytest.mark.parametrize("params", [{"n": 1}, [{"n": 1}], "greedy", 3, [None]])
def test_what_are_no_params_is_refused_by_name(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="must be SamplingParams") as caught:
        llm.generate(["a"], params)
    assert caught.value.param == "params"


def test_arrays_of_token_ids_are_prompts(llm: LLM) -> None:
    rows = np.array([[1, 2], [3, 4]], dtype=np.uint16)
    answers = llm.generate(rows, GREEDY)  # type: ignore[arg-type]
    assert [answer.prompt_token_ids for answer in answers] == [[1, 2], [3, 4]]


def test_several_threads_may_ask_at_once(llm: LLM) -> None:
    expected = [llm.generate(f"Text {i}", GREEDY)[0].token_ids for i in range(4)]
    found: dict[int, Sequence[int]] = {}
    threads = [
        threading.Thread(
            target=lambda i=i: found.update({i: llm.generate(f"Text {i}", GREEDY)[0].token_ids})
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == expected


def test_a_grammar_that_nothing_satisfies_is_the_requests_fault(llm: LLM) -> None:
    grammar = GrammarSpec("json_schema", '{"$ref": "#"}')
    with pytest.raises(RequestError):
        llm.generate("Hello", SamplingParams(max_tokens=5, grammar=grammar))
    assert llm.generate("Hello", SamplingParams(max_tokens=1))


def test_closed_means_closed() -> None:
    llm = LLM(TINY_MODEL, backend="reference")
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("a")


def test_faults_of_the_file_and_of_options(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(TINY_MODEL.read_bytes()[:1000])
    with pytest.raises(GGUFError):
        LLM(broken)
    with pytest.raises(ModelError):
        LLM(tmp_path / "absent.gguf")
    with pytest.raises(InsufficientMemoryError, match="256 tokens"):
        LLM(TINY_MODEL, backend="reference", kv_cache_memory="1kB")
    with pytest.raises(RequestError, match="is not a size"):
        LLM(TINY_MODEL, kv_cache_memory="much")
    with pytest.raises(RequestError, match="max_num_seqs"):
        LLM(TINY_MODEL, max_num_seqs=0)
    assert not engine_processes()


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the full set of reference models")
def test_an_unknown_architecture_is_named() -> None:
    (case,) = architecture_cases("falcon-h1-dense")
    for backend in ("reference", "cpu"):
        with pytest.raises(UnsupportedArchitectureError, match="falcon-h1"):
            LLM(case.gguf, backend=backend)


def test_the_package_imports_late() -> None:
    code = (
        "import sys, localllm, localllm.errors\n"
        "assert 'numpy' not in sys.modules and 'localllm.llm' not in sys.modules\n"
        "from localllm import LLM, SamplingParams\n"
        "assert 'numba' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        localllm.Llm  # noqa: B018


SCRIPT = f"""
from localllm import LLM, SamplingParams
llm = LLM({str(TINY_MODEL)!r}, backend="cpu", threads=1)
params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
print(llm.generate("Hello", params)[0].token_ids, flush=True)
"""
ENDLESS = """
llm.generate(["Hello"] * 2000, SamplingParams(ignore_eos=True))
"""


def run_script(
    command: Sequence[str], cwd: Path, script: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        input=script,
        capture_output=True,
        text=True,
        check=True,
        timeout=5 * PATIENCE,  # kernels may have to be compiled
    )


def test_a_script_needs_no_main_guard_and_no_close(tmp_path: Path, llm: LLM) -> None:
    """From a file and from standard input, in a folder full of misleading names."""
    for name in ("localllm.py", "numpy.py", "signal.py"):
        (tmp_path / name).write_text("raise RuntimeError('imported from the current folder')")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "script.py").write_text(SCRIPT)
    expected = llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    from_file = run_script([str(scripts / "script.py")], tmp_path)
    from_stdin = run_script(["-P", "-"], tmp_path, SCRIPT)
    for result in (from_file, from_stdin):
        assert result.stdout == f"{expected[0].token_ids}\n"
        assert result.stderr == ""


@pytest.mark.parametrize("end", ["kill", "interrupt"])
def test_the_engine_ends_with_its_parent(end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT + ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith("[")
        (engine,) = engine_processes(parent.pid)
        if end == "kill":
            parent.kill()
        else:
            parent.send_signal(signal.SIGINT)
        _, stderr = parent.communicate(timeout=PATIENCE)
    wait_until(lambda: is_gone(engine))
    if end == "interrupt":
        assert stderr.rstrip().endswith("KeyboardInterrupt")
