"""The running float32 sums of a tile, [column][row vector]."""

from __future__ import annotations

from typing import Protocol

from localllm.backends.cpu.matmul.emit import Emitter, Value
from localllm.backends.cpu.simd import Vector


class Sums(Protocol):
    def get(self, column: int, vector: int) -> Value: ...

    def set(self, column: int, vector: int, value: Value) -> None: ...

    def close(self) -> None:
        """Leaves the sums in memory."""


class MemorySums:
    """For large tiles, which need all registers for a block's own sums."""

    def __init__(self, e: Emitter, address: Value, kind: Vector, vectors: int) -> None:
        self.e, self.address, self.kind, self.vectors = e, address, kind, vectors

    def get(self, column: int, vector: int) -> Value:
        return self.e.load(self.kind, self.address, self._at(column, vector))

    def set(self, column: int, vector: int, value: Value) -> None:
        self.e.store(value, self.address, self._at(column, vector))

    def close(self) -> None:
        pass

    def _at(self, column: int, vector: int) -> int:
        return (column * self.vectors + vector) * self.kind.n * 4


class RegisterSums:
    """For small tiles, where a way through memory in each block would cost more than the rest."""

    def __init__(self, memory: MemorySums, columns: int) -> None:
        self.memory = memory
        self.variables = [
            [memory.e.variable(memory.get(column, vector)) for vector in range(memory.vectors)]
            for column in range(columns)
        ]

    def get(self, column: int, vector: int) -> Value:
        return self.variables[column][vector].get()

    def set(self, column: int, vector: int, value: Value) -> None:
        self.variables[column][vector].set(value)

    def close(self) -> None:
        for column, variables in enumerate(self.variables):
            for vector, variable in enumerate(variables):
                self.memory.set(column, vector, variable.get())
