"""A conversation with a model: what `localllm chat` shows, without the terminal."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from localllm.cli.background import Background
from localllm.config import EngineConfig
from localllm.engine.client import AsyncEngineClient
from localllm.errors import EngineError
from localllm.sampling_params import SamplingParams
from localllm.server.generation import Generation, plan_job
from localllm.server.ports import EngineLike
from localllm.server.served_model import ServedModel, load_served_model


class Conversation:
    """Remembers what was said. Its methods block, while the engine's client goes on in `loop`."""

    def __init__(
        self,
        loop: Background,
        engine: EngineLike,
        model: ServedModel,
        params: SamplingParams,
        system: str | None = None,
    ) -> None:
        self.model_id = model.id
        self._loop = loop
        self._engine = engine
        self._model = model
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system else []
        self._said: list[dict[str, Any]] = []

    def clear(self) -> None:
        self._said = []

    def answer(self, message: str) -> Iterator[str]:
        """Pieces of the answer as they come. Interrupted, it remembers what was said so far; of an
        error nothing."""
        question = {"role": "user", "content": message}
        generation = self._generation([*self._opening, *self._said, question])
        text = ""
        try:
            for delta in self._loop.iterate(generation.deltas()):
                text += delta.text
                if delta.text:
                    yield delta.text
        except Exception:
            text = ""
            raise
        finally:
            if text:
                self._said += [question, {"role": "assistant", "content": text}]

    def _generation(self, messages: list[dict[str, Any]]) -> Generation:
        if (ready := self._engine.ready) is None:
            raise EngineError("The engine is not running")
        seed = secrets.randbits(64) if self._params.seed is None else self._params.seed
        params = replace(self._params, seed=seed)
        prompt = self._model.template.encode(messages)
        job = plan_job(prompt, params, ready.context, "messages")
        request_id = f"chat-{secrets.token_hex(8)}"
        return Generation(self._engine, self._model.tokenizer, request_id, [job])


@contextmanager
def open_conversation(
    config: EngineConfig, params: SamplingParams, system: str | None = None
) -> Iterator[Conversation]:
    """Loads the model; ends the engine when the context ends."""
    with Background() as loop:
        model = load_served_model(config.model)
        engine = AsyncEngineClient(config)
        try:
            loop.run(engine.start())
            yield Conversation(loop, engine, model, params, system)
        finally:
            loop.run(engine.close())
