"""From the file's rows to the packed layout, and back to float32 for embedding rows."""

from __future__ import annotations

from localllm.backends.cpu.kernel import (
    H_IDS,
    H_TOKENS,
    Kernel,
    arg_i64,
    claim,
    header,
    kernel,
    kernel_factory,
)
from localllm.backends.cpu.matmul.formats import LAYOUTS
from localllm.backends.cpu.simd import (
    scalar_load_i32,
    scalar_store_f32,
    scalar_store_i64,
)


@kernel_factory
def packer(name: str) -> Kernel:
    """Args: 0 raw*, 1 bytes of a row, 2 rows, 3 cols, 4 packed*, 5 first row block, 6 last.

    Has no header and no counter: each caller packs row blocks of its own.
    """
    layout = LAYOUTS[name]
    block, block_bytes, file_bytes = layout.block, layout.block_bytes, layout.file_block_bytes
    pack_row = layout.pack_row

    @kernel
    def pack(args: int, tid: int, n: int) -> None:
        raw, row_bytes = arg_i64(args, 0), arg_i64(args, 1)
        rows, cols, packed = arg_i64(args, 2), arg_i64(args, 3), arg_i64(args, 4)
        blocks = (cols + block - 1) // block
        for row_block in range(arg_i64(args, 5), arg_i64(args, 6)):
            out = packed + row_block * blocks * block_bytes
            first = 8 * row_block
            for offset in range(0, blocks * block_bytes, 8):
                scalar_store_i64(out, offset, 0)
            for index in range(blocks):
                source = raw + first * row_bytes + index * file_bytes
                count = min(block, cols - index * block)
                for row in range(min(8, rows - first)):
                    pack_row(source + row * row_bytes, out + index * block_bytes, row, count)

    return pack


@kernel_factory
def embedder(name: str) -> Kernel:
    """Writes each token's row of a packed matrix; see `lower_linear.EmbedArgs`."""
    layout = LAYOUTS[name]
    block, block_bytes = layout.block, layout.block_bytes
    dequantize_row = layout.dequantize_row

    @kernel
    def embed(args: int, tid: int, n: int) -> None:
        out, stride, packed = arg_i64(args, 2), arg_i64(args, 3), arg_i64(args, 4)
        rows, cols = arg_i64(args, 5), arg_i64(args, 6)
        tokens, ids = arg_i64(header(args), H_TOKENS), arg_i64(header(args), H_IDS)
        blocks = (cols + block - 1) // block
        token = claim(args, 1)
        while token < tokens:
            row, to = int(scalar_load_i32(ids, 4 * token)), out + token * stride * 4
            if 0 <= row < rows:
                at = packed + row // 8 * blocks * block_bytes
                for index in range(blocks):
                    count = min(block, cols - index * block)
                    dequantize_row(at + index * block_bytes, row % 8, to + index * block * 4, count)
            else:
                for k in range(cols):
                    scalar_store_f32(to, 4 * k, 0.0)
            token = claim(args, 1)

    return embed
