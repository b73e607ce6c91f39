"""What a JSON body can carry and nothing behind it takes."""

from __future__ import annotations

import json

import pytest
from pydantic import Field

from localllm.errors import RequestError
from localllm.server.protocol.base import RequestBody, sound


class Body(RequestBody):
    text: str
    extra: dict[str, object] = Field(default_factory=dict)


def test_halves_of_surrogate_pairs_become_replacement_characters_everywhere() -> None:
    half, whole = r'"\ud800"', r'"\ud83d\ude00"'
    sent = json.loads(f'{{"text": {half}, "extra": {{{half}: [{whole}, {half}]}}}}')
    body = Body.model_validate(sent)
    assert body.text == "\ufffd"
    assert body.extra == {"\ufffd": ["\U0001f600", "\ufffd"]}


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity"])
def test_numbers_that_are_not_finite_are_refused_at_any_depth(number: str) -> None:
    sent = json.loads(f'{{"text": "a", "extra": {{"minimum": [{number}]}}}}')
    with pytest.raises(RequestError, match=r"^extra\.minimum\[0\] must be a finite number"):
        Body.model_validate(sent)


def test_what_is_nested_too_deeply_is_refused() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(RequestError, match="nested too deeply"):
        Body.model_validate({"text": "a", "extra": {"deep": nested}})


def test_what_is_sound_stays_as_it_is() -> None:
    value = {"a": [1, 2.5, None, True, "\u00e9\U0001f600"], "b": {"c": "d"}}
    assert sound(value) == value
