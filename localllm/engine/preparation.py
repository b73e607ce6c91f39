"""What drawing a sequence's tokens needs beyond numbers, made before it is scheduled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property

from localllm.engine.grammars import GrammarCompiler, GrammarState
from localllm.engine.messages import Submit
from localllm.engine.rare_sampling import RareSampler, is_rare
from localllm.engine.restrictions import Restriction
from localllm.engine.vocabulary import Vocabulary
from localllm.errors import EngineError, RequestError
from localllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class Aids:
    """The state of one sequence's sampling, which lives as long as it does."""

    restriction: Restriction | None = None
    sampler: RareSampler | None = None


def is_restricted(params: SamplingParams) -> bool:
    return bool(params.grammar or params.bad_words or params.min_tokens or params.thinking_budget)


def needs_aids(params: SamplingParams) -> bool:
    return is_restricted(params) or is_rare(params)


class Preparation:
    """Works in a thread of its own: a large grammar takes a while, and the steps go on meanwhile.

    The first request reads the vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiler = GrammarCompiler(vocabulary)
        self._pending: dict[str, tuple[Submit, Future[Aids]]] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._pending

    def start(self, request: Submit) -> None:
        future = self._thread.submit(self._prepare, request)
        self._pending[request.sequence_id] = (request, future)

    def cancel(self, sequence_id: str) -> bool:
        """Whether it was there."""
        return self._pending.pop(sequence_id, None) is not None

    def ready(self, patience: float) -> Iterator[tuple[Submit, Aids | Exception]]:
        """Takes out what is done: a request and its aids, or why there are none (a RequestError
        where the request is at fault).

        Waits for the first, up to `patience` seconds.
        """
        if self._pending and patience:
            futures = [future for _, future in self._pending.values()]
            wait(futures, timeout=patience, return_when=FIRST_COMPLETED)
        for sequence_id, (request, future) in list(self._pending.items()):
            if future.done():
                del self._pending[sequence_id]
                yield request, _outcome(future)

    def close(self) -> None:
        if "_thread" in vars(self):
            self._thread.shutdown(wait=True, cancel_futures=True)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="localllm-prepare")

    def _prepare(self, request: Submit) -> Aids:
        params, restriction, sampler = request.params, None, None
        if is_restricted(params):
            grammar = None
            if spec := params.grammar:
                matcher = self._compiler.matcher(spec)
                grammar = GrammarState(matcher, self._vocabulary, spec.after)
            restriction = Restriction(request, self._vocabulary, grammar)
        if is_rare(params):
            sampler = RareSampler(params, self._vocabulary)
        return Aids(restriction, sampler)


def _outcome(future: Future[Aids]) -> Aids | Exception:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, RequestError):
        return error
    return EngineError(f"preparing the request failed: {type(error).__name__}: {error}")
