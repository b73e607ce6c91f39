"""Lowering of rotary positions, attention and sampling."""

from __future__ import annotations

from localllm.backends.cpu.builder import FLOAT_BYTES, Builder, Operand
from localllm.backends.cpu.kernels import attention, kv, rope, rope_kv, sampling
from localllm.backends.cpu.plan import Buffer, Region, whole
from localllm.backends.program import Attention, Rope, RopeTable

_ANGLE = 32  # elements whose work a sine and a cosine make up


def lower_rope(build: Builder, op: Rope) -> None:
    out, x = build.operand(op.out), build.operand(op.x)
    table, pairs = _rope_table(build, op.table), len(op.table.inv_freq)
    build.call(
        rope.rope,
        lambda: rope.RopeArgs(
            x=x.address,
            x_stride=x.stride,
            out=out.address,
            out_stride=out.stride,
            heads=x.width // op.head_dim,
            head_dim=op.head_dim,
            pairs=pairs,
            interleaved=op.table.interleaved,
            table=table.address,
        ),
        reads=[x.region, whole(table)],
        writes=[out.region],
        work=x.width,
    )


def _rope_table(build: Builder, table: RopeTable) -> Buffer:
    """The step's cosines and sines of a table, computed where they are first needed."""
    if found := build.rope_tables.get(table):
        return found
    pairs = len(table.inv_freq)
    buffer = Buffer(build.limits.tokens * rope.table_floats(pairs) * FLOAT_BYTES)
    inv_freq = build.constant(table.inv_freq)
    build.call(
        rope.rope_table,
        lambda: rope.RopeTableArgs(
            inv_freq, pairs, float(table.scale), table.interleaved, buffer.address
        ),
        writes=[whole(buffer)],
        work=_ANGLE * pairs,
    )
    build.rope_tables[table] = buffer
    return buffer


def lower_attention(build: Builder, op: Attention) -> None:
    """Stores the step's keys and values, then attends; both take turns on the layer's cache."""
    out, q = build.operand(op.out), build.operand(op.q)
    layer = build.program.kv_groups[op.group].layers[op.layer]
    heads = q.width // op.head_dim
    cached = Region(build.cache_turns[op.group], op.layer, op.layer + 1)
    if op.out in build.fusions.rotations:
        _rope_and_store(build, op, *build.fusions.rotations[op.out], cached)
    else:
        _store(build, op, cached)
    build.need_scratch(attention.scratch_bytes(heads, layer.kv_heads, op.head_dim, op.value_dim))
    parts = build.attention_parts
    parts_bytes = attention.parts_bytes(
        build.threads, build.limits.context, heads, layer.kv_heads, op.value_dim
    )
    parts.n_bytes = max(parts.n_bytes, parts_bytes)
    sinks, tiles = build.weights.vector(op.sinks)[0], attention.tile_kernels()
    build.call(
        attention.attend,
        lambda: attention.AttendArgs(
            q=q.address,
            q_stride=q.stride,
            out=out.address,
            out_stride=out.stride,
            heads=heads,
            **_cache_words(build, op),
            scale=float(op.scale),
            window=op.window or 0,
            softcap=float(op.softcap or 0.0),
            sinks=sinks,
            scratch=build.scratch_address,
            scratch_bytes=build.scratch_bytes,
            parts=parts.address,
            parts_bytes=parts.n_bytes,
            **{name: kernel.address for name, kernel in tiles.items()},
        ),
        reads=[q.region, cached],
        writes=[out.region, whole(parts)],
        callees=list(tiles.values()),
    )


def _cache_words(build: Builder, op: Attention) -> dict[str, int]:
    """What every kernel on the paged cache is told of an op's layer. Once the caches are set."""
    group = build.program.kv_groups[op.group]
    layer = group.layers[op.layer]
    return {
        "cache": build.caches[op.group].layer_address(op.layer),
        "block_bytes": kv.group_block_bytes(group),
        "head_bytes": kv.head_bytes(layer),
        "group": op.group,
        "kv_heads": layer.kv_heads,
        "key_dim": op.head_dim,
        "value_dim": op.value_dim,
    }


def _store_words(build: Builder, op: Attention, k: Operand, v: Operand) -> dict[str, int]:
    return {
        "k": k.address,
        "k_stride": k.stride,
        "v": v.address,
        "v_stride": v.stride,
        **_cache_words(build, op),
    }


def _store(build: Builder, op: Attention, cached: Region) -> None:
    k, v = build.operand(op.k), build.operand(op.v)
    build.call(
        kv.kv_store,
        lambda: kv.StoreArgs(**_store_words(build, op, k, v)),
        reads=[k.region, v.region],
        writes=[cached],
        work=k.width + v.width,
    )


def _rope_and_store(
    build: Builder, op: Attention, q_rope: Rope, k_rope: Rope, cached: Region
) -> None:
    q, out, k, v = map(build.operand, (q_rope.x, q_rope.out, k_rope.x, op.v))
    table, pairs = _rope_table(build, q_rope.table), len(q_rope.table.inv_freq)
    build.need_scratch(k.width * FLOAT_BYTES)
    build.call(
        rope_kv.rope_and_store,
        lambda: rope_kv.RopeStoreArgs(
            q=q.address,
            q_stride=q.stride,
            out=out.address,
            out_stride=out.stride,
            heads=q.width // op.head_dim,
            pairs=pairs,
            interleaved=q_rope.table.interleaved,
            table=table.address,
            **_store_words(build, op, k, v),
            scratch=build.scratch_address,
            scratch_bytes=build.scratch_bytes,
        ),
        reads=[q.region, k.region, v.region, whole(table)],
        writes=[out.region, cached],
        work=q.width + k.width + v.width,
    )


def lower_sampling(build: Builder, logits: Operand) -> Buffer:
    """Draws a token for each row; returns the buffer of int32 tokens [R]."""
    tokens, maxima = Buffer(build.limits.logit_rows * 4), build.maxima
    build.need_scratch(sampling.scratch_bytes(logits.width))
    build.call(
        sampling.sample,
        lambda: sampling.SampleArgs(
            logits=logits.address,
            logits_stride=logits.stride,
            vocab=logits.width,
            tokens=tokens.address,
            scratch=build.scratch_address,
            scratch_bytes=build.scratch_bytes,
            maxima=maxima.address if maxima else 0,
        ),
        reads=[logits.region, *([whole(maxima)] if maxima else [])],
        writes=[whole(tokens)],
    )
    return tokens
