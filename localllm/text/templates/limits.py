"""What one rendering of a template may use up."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any, TypeAlias

from jinja2.exceptions import TemplateRuntimeError

MAX_SIZE = 16_000_000
"""The most characters in a text, or in all texts within a value."""

_MAX_COPIED = 16 * MAX_SIZE
_MAX_STEPS = 1_000_000
_MAX_SECONDS = 5.0
_STEPS_PER_CLOCK_READING = 1024
# Trying a template out takes a dozen renderings, none of more than a few messages.
_TRIAL_SHARE = 20

Container: TypeAlias = list[Any] | tuple[Any, ...] | dict[Any, Any]


class LimitError(TemplateRuntimeError):
    """A template wants more time or memory than any prompt needs."""


class Budget:
    """Counts down while a template runs.

    Templates have no unbounded loop, but nested loops, recursive macros and values that double
    at each step do the same. So steps of loops and calls are counted, and the characters of all
    text that is made; both stand for time and memory on any machine, the clock for the rest.
    """

    def __init__(self, share: int = 1) -> None:
        """`share`: a trial gets that part of what a rendering gets."""
        self._steps = _MAX_STEPS // share
        self._copied = _MAX_COPIED // share
        self._seconds = _MAX_SECONDS / share
        self._deadline = time.monotonic() + self._seconds
        self._next_clock_reading = self._steps

    def step(self, count: int = 1) -> None:
        """One round of a loop, one call, one element looked at."""
        self._steps -= count
        if self._steps > self._next_clock_reading:
            return
        self._next_clock_reading = self._steps - _STEPS_PER_CLOCK_READING
        if self._steps < 0:
            raise LimitError("the template takes too many steps")
        if time.monotonic() > self._deadline:
            raise LimitError(f"the template takes more than {self._seconds} seconds")

    def make(self, size: int) -> None:
        """Call before making a value of `size` characters or elements."""
        self._copied -= size
        if size > MAX_SIZE or self._copied < 0:
            raise LimitError(f"the template makes text of more than {MAX_SIZE} characters")


_current: ContextVar[Budget] = ContextVar("budget")


def start_budget(*, trial: bool = False) -> None:
    """Gives the current thread (or task) a fresh budget."""
    _current.set(Budget(_TRIAL_SHARE if trial else 1))


def budget() -> Budget:
    return _current.get()


def size_of(value: object) -> int:
    """Characters and elements in `value`; LimitError where it holds too many.

    A list that holds another twice counts it twice, as printing it would. Each element is a step.
    """
    if isinstance(value, str):
        size = len(value)
    elif isinstance(value, list | tuple | dict):
        size = _size_of_container(value)
    else:
        return 1
    if size > MAX_SIZE:
        raise LimitError(f"a value in the template holds more than {MAX_SIZE} characters")
    return size


def _size_of_container(value: Container) -> int:
    size, pending, step = 0, [value], budget().step
    while pending:
        container = pending.pop()
        size += 1 + len(container)
        step(1 + len(container))
        elements = (
            [*container.keys(), *container.values()] if isinstance(container, dict) else container
        )
        for element in elements:
            if isinstance(element, str):
                size += len(element)
            elif isinstance(element, list | tuple | dict):
                pending.append(element)
    return size


def checked(value: Any) -> Any:
    """`value`, if it is not too large. What a template keeps goes through this."""
    size_of(value)
    return value
