"""Grammars and log-probabilities with whole models: tiny random ones on both backends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localllm import LLM, SamplingParams
from localllm.errors import RequestError
from localllm.grammar import GrammarSpec
from localllm.llm import Completion
from tests.helpers import FIXTURES
from tests.text.test_grammar_check import ASCII, refusal, schemas

TINY = FIXTURES / "architectures" / "llama-format-q4_1.gguf"
PROMPT = "Tell me"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Computes in this process."""
    with LLM(TINY, backend="reference", ctx_size=256) as llm:
        yield llm


def json_schema(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def check(answer: Completion, schema: Any) -> None:
    """An output that has ended is valid; one that was cut says so."""
    if answer.finish_reason == "stop":
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    schema=schemas(ASCII),
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 1.0, 3.0]),
    choices=st.integers(1, 3),
)
def test_what_ends_is_valid(
    llm: LLM, schema: dict[str, Any], seed: int, temperature: float, choices: int
) -> None:
    assert refusal(schema) is None
    params = SamplingParams(
        temperature=temperature,
        seed=seed,
        n=choices,
        max_tokens=120,
        grammar=json_schema(schema),
    )
    (answer,) = llm.generate(PROMPT, params)
    for choice in answer.outputs:
        check(choice, schema)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_most_answers_end_and_all_of_them_are_valid(backend: str) -> None:
    with LLM(TINY, backend=backend, ctx_size=256, threads=1) as llm:
        params = SamplingParams(seed=1, n=12, max_tokens=200, grammar=json_schema(PERSON))
        (answer,) = llm.generate(PROMPT, params)
        ended = [choice for choice in answer.outputs if choice.finish_reason == "stop"]
        assert len(ended) >= 6
        for choice in ended:
            check(choice, PERSON)
        (cut,) = llm.generate(
            PROMPT, SamplingParams(max_tokens=5, seed=1, grammar=json_schema(PERSON))
        )
        assert (cut.finish_reason, len(cut.token_ids)) == ("length", 5)


def test_the_same_under_load_and_beside_free_sequences() -> None:
    kinds = [
        SamplingParams(seed=3, max_tokens=40, grammar=json_schema(PERSON), logprobs=2),
        SamplingParams(seed=4, max_tokens=40, logprobs=1, prompt_logprobs=1),
        SamplingParams(seed=5, max_tokens=30, grammar=GrammarSpec("regex", "([a-z]+ ){5}")),
        SamplingParams(temperature=0.0, max_tokens=40, bad_words=("e", "th"), logprobs=0),
        SamplingParams(seed=6, max_tokens=40, mirostat=2),
    ]
    prompts = [f"{PROMPT} {'more ' * i}" for i in range(len(kinds))]
    with LLM(TINY, ctx_size=256, threads=1) as llm:
        alone = [
            llm.generate(prompt, params)[0] for prompt, params in zip(prompts, kinds, strict=True)
        ]
        together = llm.generate(prompts * 2, kinds * 2)
    with LLM(TINY, ctx_size=256, threads=2, max_num_batched_tokens=16, max_num_seqs=3) as llm:
        cramped = llm.generate(prompts * 2, kinds * 2)
    for answers in (together, cramped):
        for i, answer in enumerate(answers):
            expected = alone[i % len(kinds)]
            assert answer.outputs == expected.outputs
            assert answer.prompt_logprobs == expected.prompt_logprobs
    assert not re.search("e|th", alone[3].text)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logprobs_are_those_of_the_logits(backend: str) -> None:
    with LLM(TINY, backend=backend, ctx_size=256, threads=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=2)
        (answer,) = llm.generate(PROMPT * 4, params)
        tokens = [*answer.prompt_token_ids, *answer.token_ids]
        logits = llm.logits(tokens[:-1]).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    told = [*(answer.prompt_logprobs or ()), *(answer.outputs[0].logprobs or ())]
    assert [one.token for one in told] == tokens[1:]
    for one, row in zip(told, expected, strict=True):
        assert one.logprob == pytest.approx(row[one.token], abs=2e-5)
    for one in answer.outputs[0].logprobs or ():
        assert one.logprob == max(logprob for _, logprob in one.top)  # exactly: greedy


def test_fault_14_a_full_context_ends_with_length(llm: LLM) -> None:
    """No shifting: what the window holds is all there is, with and without a grammar."""
    prompt = [5] * 200
    for grammar in (None, GrammarSpec("regex", "[a-z]{1000}")):
        params = SamplingParams(seed=1, ignore_eos=True, grammar=grammar)
        (answer,) = llm.generate([prompt], params)
        assert answer.finish_reason == "length"
        assert len(prompt) + len(answer.token_ids) == 256


def test_a_grammar_that_cannot_be_is_the_callers_error(llm: LLM) -> None:
    with pytest.raises(RequestError, match="unclosed group"):
        llm.generate(PROMPT, SamplingParams(grammar=GrammarSpec("regex", "(")))
    assert llm.generate(PROMPT, SamplingParams(max_tokens=2, seed=1))[0].token_ids


def test_what_the_vocabulary_cannot_spell_is_an_error(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no tokens of this model"):
        llm.generate(PROMPT, SamplingParams(grammar=GrammarSpec("choice", '["日本"]')))
