"""F32, F16 and BF16: blocks [k 0..31][row] of the file's own numbers, zero past the last k."""

from __future__ import annotations

from typing import Any

from localllm.backends.cpu.kernel import helper
from localllm.backends.cpu.matmul.emit import Emitter, Value
from localllm.backends.cpu.matmul.layout import FloatLayout
from localllm.backends.cpu.simd import (
    f32x8,
    i16x8,
    scalar_load_f16,
    scalar_load_f32,
    scalar_load_i16,
    scalar_load_i32,
    scalar_load_u16,
    scalar_store_f32,
    scalar_store_i16,
    scalar_store_i32,
)


class F32(FloatLayout):
    name = "F32"
    block_bytes = 1024
    file_block_bytes = 128

    def weights(self, e: Emitter, block: Value, k: int) -> Value:
        return e.load(f32x8, block, 32 * k)

    @staticmethod
    @helper
    def pack_row(source: Any, block: Any, row: Any, count: Any) -> None:
        for k in range(count):
            scalar_store_i32(block, (k * 8 + row) * 4, scalar_load_i32(source, 4 * k))

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        for k in range(count):
            scalar_store_f32(out, 4 * k, scalar_load_f32(block, (k * 8 + row) * 4))


@helper
def _pack_halves(source: Any, block: Any, row: Any, count: Any) -> None:
    for k in range(count):
        scalar_store_i16(block, (k * 8 + row) * 2, scalar_load_i16(source, 2 * k))


class F16(FloatLayout):
    name = "F16"
    block_bytes = 512
    file_block_bytes = 64
    pack_row = _pack_halves

    def weights(self, e: Emitter, block: Value, k: int) -> Value:
        return e.to_f32(e.load(i16x8, block, 16 * k))

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        for k in range(count):
            scalar_store_f32(out, 4 * k, scalar_load_f16(block, (k * 8 + row) * 2))


class BF16(FloatLayout):
    """The upper half of a float32."""

    name = "BF16"
    block_bytes = 512
    file_block_bytes = 64
    pack_row = _pack_halves

    def weights(self, e: Emitter, block: Value, k: int) -> Value:
        halves = e.zero_extend(e.load(i16x8, block, 16 * k), "i32")
        return e.cast(halves << 16, f32x8)

    @staticmethod
    @helper
    def dequantize_row(block: Any, row: Any, out: Any, count: Any) -> None:
        for k in range(count):
            bits = scalar_load_u16(block, (k * 8 + row) * 2)
            scalar_store_i32(out, 4 * k, bits << 16)
