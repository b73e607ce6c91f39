"""Measuring an engine's speed the way its users feel it: through the client, sampler included."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

from localllm.backends.base import BLOCK_TOKENS
from localllm.engine.messages import Submit
from localllm.errors import EngineError
from localllm.sampling_params import SamplingParams
from localllm.server.ports import EngineLike

_STEP_TOKENS = 512
_LATE_STEPS = 4  # that may pass between the first and the last of several submissions


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prefill: one prompt of `prompt_tokens`. Decode: `batch` sequences that already have `depth`
    tokens each (at least one), `gen_tokens` more for each of them."""

    prompt_tokens: int
    gen_tokens: int
    depth: int = 0
    batch: int = 1

    @property
    def step_tokens(self) -> int:
        """The engine's token budget, with room for prompts beside the tokens of all sequences."""
        return max(_STEP_TOKENS, 2 * self.batch)

    @property
    def decode_prompt(self) -> int:
        return max(self.depth, 1)

    @property
    def decode_length(self) -> int:
        """Tokens to generate so that all run until the last to start has `gen_tokens` behind its
        first: the others go on while its prompt is read."""
        prompt_steps = -(-self.batch * self.decode_prompt // (self.step_tokens - self.batch))
        return prompt_steps + _LATE_STEPS + 1 + self.gen_tokens

    @property
    def context(self) -> int:
        """Room for the longest sequence, in whole KV blocks: the engine's default pool holds this
        much for each of `batch` sequences."""
        longest = max(self.prompt_tokens + 1, self.decode_prompt + self.decode_length)
        return (longest // BLOCK_TOKENS + 1) * BLOCK_TOKENS


class Meter:
    """Runs workloads on an engine without prefix cache, one at a time."""

    def __init__(self, engine: EngineLike, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self._submitted = 0

    async def prefill(self, work: Workload) -> float:
        """Prompt tokens per second, up to the first generated token."""
        began = time.perf_counter()
        times = await self._token_times(work.prompt_tokens, 1)
        return work.prompt_tokens / (times[0] - began)

    async def decode(self, work: Workload) -> float:
        """Generated tokens per second of all sequences together, while all of them run."""
        preempted = self._engine.stats.preemptions
        sequences = await asyncio.gather(
            *(self._token_times(work.decode_prompt, work.decode_length) for _ in range(work.batch))
        )
        last = max(sequences, key=lambda times: times[0])
        began, ended = last[0], last[work.gen_tokens]
        if self._engine.stats.preemptions > preempted:
            raise EngineError(f"{work.batch} sequences did not run at once: too little KV memory")
        if min(times[-1] for times in sequences) < ended:
            raise EngineError(
                f"{work.batch} sequences did not run at once: the first ended too early "
                f"({work.gen_tokens} tokens to write are too few, or KV memory is too little)"
            )
        return work.batch * work.gen_tokens / (ended - began)

    async def _token_times(self, prompt_tokens: int, max_tokens: int) -> list[float]:
        """When each token of a greedy answer to a random prompt came."""
        self._submitted += 1
        submit = Submit(
            sequence_id=f"bench-{self._submitted}",
            prompt=tuple(self._random.randrange(self._vocab_size) for _ in range(prompt_tokens)),
            params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0),
            eos_ids=frozenset(),
        )
        times: list[float] = []
        async for news in self._engine.submit(submit):
            if news.finish_reason not in (None, "length"):
                raise news.failure()
            times += [time.perf_counter()] * len(news.tokens)
        return times
