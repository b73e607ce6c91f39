"""From the engine's news to text, where no HTTP is involved."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from localllm.engine.messages import SequenceNews, Submit
from localllm.errors import ContextLengthError, EngineError, RequestError
from localllm.sampling_params import SamplingParams
from localllm.server.generation import Delta, Generation, Job, plan_job
from localllm.server.served_model import ServedModel
from tests.server.fakes import FakeEngine

pytestmark = pytest.mark.anyio


class Scripted(FakeEngine):
    """Sends the same news for every sequence."""

    def __init__(self, model: ServedModel, *news: SequenceNews) -> None:
        super().__init__(model.tokenizer, "")
        self.news = news

    async def submit(self, request: Submit) -> AsyncGenerator[SequenceNews, None]:
        self.submitted.append(request)
        for news in self.news:
            yield news


def generation(engine: FakeEngine, model: ServedModel, **params: object) -> Generation:
    job = Job((1, 2, 3), SamplingParams(**params))  # type: ignore[arg-type]
    return Generation(engine, model.tokenizer, "id", [job])


async def deltas(generation: Generation) -> list[Delta]:
    return [delta async for delta in generation.deltas()]


async def test_tokens_behind_a_stop_string_in_the_same_news_count_for_nothing(
    gpt2: ServedModel,
) -> None:
    ids = tuple(gpt2.tokenizer.encode("one two three four"))
    engine = Scripted(gpt2, SequenceNews("id-0", ids))
    request = generation(engine, gpt2, stop=(" two",))
    assert await deltas(request) == [Delta(0, "one", ids[:2], "stop")]
    assert request.usage.completion_tokens == 2
    assert engine.cancelled == ["id-0"]


async def test_what_was_held_back_is_shown_at_the_end(gpt2: ServedModel) -> None:
    ids = tuple(gpt2.tokenizer.encode("one two"))
    engine = Scripted(gpt2, SequenceNews("id-0", ids, finish_reason="length"))
    (delta,) = await deltas(generation(engine, gpt2, stop=(" two three",)))
    assert (delta.text, delta.finish_reason) == ("one two", "length")
    assert engine.cancelled == []


async def test_bytes_that_never_became_a_character(gpt2: ServedModel) -> None:
    ids = tuple(gpt2.tokenizer.encode("👩"))
    assert len(ids) > 1
    engine = Scripted(gpt2, SequenceNews("id-0", ids[:-1], finish_reason="length"))
    (delta,) = await deltas(generation(engine, gpt2))
    assert delta.text == "\ufffd"


@pytest.mark.parametrize("reason", ["error", "cancelled"])
async def test_an_error_of_the_engine_is_raised(gpt2: ServedModel, reason: str) -> None:
    news = SequenceNews("id-0", finish_reason=reason, error="numbers ran out")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="numbers ran out"):
        await deltas(generation(Scripted(gpt2, news), gpt2))


async def test_news_that_just_end_are_an_error(gpt2: ServedModel) -> None:
    with pytest.raises(EngineError):
        await deltas(generation(Scripted(gpt2, SequenceNews("id-0", (5,))), gpt2))


async def test_cached_tokens_count_once_per_prompt(gpt2: ServedModel) -> None:
    news = SequenceNews("x", (5,), finish_reason="length", cached_tokens=2)
    engine = Scripted(gpt2, news)
    params = SamplingParams(n=3)
    jobs = [Job((1, 2, 3), params), Job((4, 5), params)]
    request = Generation(engine, gpt2.tokenizer, "id", jobs)
    assert len(await request.answers()) == 6
    assert request.usage.cached_tokens == 4
    assert request.usage.prompt_tokens == 5
    assert request.usage.completion_tokens == 6
    assert len({submit.sequence_id for submit in engine.submitted}) == 6


def test_planning() -> None:
    params = SamplingParams(max_tokens=50)
    assert plan_job([1] * 10, params, 100, "prompt").params.max_tokens == 50
    assert plan_job([1] * 60, params, 100, "prompt").params.max_tokens == 40
    assert plan_job([1] * 99, SamplingParams(), 100, "prompt").params.max_tokens == 1
    with pytest.raises(ContextLengthError, match="exceeds the context window of 100") as error:
        plan_job([1] * 100, params, 100, "prompt")
    assert error.value.param == "prompt"
    with pytest.raises(RequestError):
        plan_job([], params, 100, "prompt")
