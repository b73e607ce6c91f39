"""What every request body shares: strict types, and a plain word about fields nobody honours."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, model_validator

from localllm.errors import RequestError
from localllm.text.valid_unicode import valid_unicode

MAX_TOKEN_IDS = 1 << 20
MAX_MESSAGES = 1 << 15

_MOST_NAMES_IN_HEADER = 20


def sound(value: Any, where: str = "") -> Any:
    """The value with valid Unicode throughout; RequestError for a number that is not finite."""
    if isinstance(value, str):
        return valid_unicode(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{where} must be a finite number", param=where)
    if isinstance(value, dict):
        inside = f"{where}." if where else ""
        return {sound(name): sound(part, f"{inside}{name}") for name, part in value.items()}
    if isinstance(value, list):
        return [
            part if type(part) is int else sound(part, f"{where}[{at}]")  # ids come by the million
            for at, part in enumerate(value)
        ]
    return value


def not_supported(name: str, instead: str = "") -> RequestError:
    """For a field that asks for what this server cannot do."""
    message = f"{name} is not supported by this server"
    if instead:
        message += f": {instead}"
    return RequestError(message, param=name, code="unsupported_parameter")


class RequestBody(BaseModel):
    """A JSON body. Fields that the model does not declare are kept, to be refused or named.

    Halves of surrogate pairs, which JSON can carry and nothing behind takes, become U+FFFD; numbers
    beyond float64 are refused.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _sound(cls, body: Any) -> Any:
        try:
            return sound(body)
        except RecursionError:
            raise RequestError("The body is nested too deeply") from None

    not_honoured: ClassVar[Mapping[str, Collection[Any]]] = {}
    """Fields that are known but do nothing here, each with the values that ask for nothing."""
    instead: ClassVar[Mapping[str, str]] = {}
    """What to send in the place of some of these."""

    def refuse_not_honoured(self) -> None:
        """RequestError naming the first field that asks for what cannot be done."""
        for name, neutral in self.not_honoured.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in neutral:
                raise not_supported(name, self.instead.get(name, ""))

    def ignored_header(self) -> dict[str, str]:
        """The response header that names the fields nobody here knows; empty without any."""
        names = [name for name in self.model_extra or {} if name not in self.not_honoured]
        if not names:
            return {}
        shown = [quote(name[:64], safe="") or '""' for name in names[:_MOST_NAMES_IN_HEADER]]
        return {"x-localllm-ignored": ", ".join(shown)}
