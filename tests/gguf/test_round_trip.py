"""Whatever is written is read back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.gguf import GGUFFile
from tests.gguf import build

INTEGERS = {
    build.U8: (0, 2**8 - 1),
    build.I8: (-(2**7), 2**7 - 1),
    build.U16: (0, 2**16 - 1),
    build.I16: (-(2**15), 2**15 - 1),
    build.U32: (0, 2**32 - 1),
    build.I32: (-(2**31), 2**31 - 1),
    build.U64: (0, 2**64 - 1),
    build.I64: (-(2**63), 2**63 - 1),
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]))

# (value type, value) pairs; arrays are (ARRAY, (element type, values)).
Typed = tuple[int, Any]


def scalars() -> st.SearchStrategy[Typed]:
    integers = [
        st.tuples(st.just(kind), st.integers(low, high)) for kind, (low, high) in INTEGERS.items()
    ]
    return st.one_of(
        *integers,
        st.tuples(st.just(build.F32), st.floats(width=32, allow_nan=False)),
        st.tuples(st.just(build.F64), st.floats(allow_nan=False)),
        st.tuples(st.just(build.BOOL), st.booleans()),
        st.tuples(st.just(build.STRING), TEXT),
    )


def arrays(elements: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    same_type = st.lists(elements, max_size=6).map(
        lambda items: [item for item in items if item[0] == items[0][0]]
    )
    return same_type.map(
        lambda items: (
            build.ARRAY,
            (items[0][0] if items else build.U8, [value for _, value in items]),
        )
    )


VALUES = st.recursive(scalars(), arrays, max_leaves=12)


def encode(value_type: int, value: Any) -> bytes:
    if value_type == build.STRING:
        return build.text(value)
    if value_type == build.ARRAY:
        element_type, elements = value
        return build.array(element_type, [encode(element_type, element) for element in elements])
    return build.number(value_type, value)


def plain(value_type: int, value: Any) -> Any:
    if value_type == build.ARRAY:
        element_type, elements = value
        return [plain(element_type, element) for element in elements]
    return value


def as_lists(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [as_lists(element) for element in value] if isinstance(value, list) else value


@settings(max_examples=150, deadline=None)
@given(
    keys=st.dictionaries(TEXT.map("any.{}".format), VALUES, max_size=6),
    shapes=st.dictionaries(
        TEXT, st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), max_size=4
    ),
    version=st.sampled_from([2, 3]),
)
def test_round_trip(
    keys: dict[str, Typed], shapes: dict[str, tuple[int, ...]], version: int
) -> None:
    infos, data, expected = [], b"", {}
    for seed, (name, shape) in enumerate(shapes.items()):
        values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        infos.append(build.TensorInfo(name, shape[::-1], offset=len(data)))
        data += values.tobytes()
        data += b"\0" * (-len(data) % 32)
        expected[name] = values
    encoded = [build.key(name, kind, encode(kind, value)) for name, (kind, value) in keys.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(build.gguf(encoded, infos, data, version=version))
        with GGUFFile.open(path) as file:
            assert list(file.metadata) == list(keys)
            for name, (kind, value) in keys.items():
                assert as_lists(file.metadata[name]) == plain(kind, value)
            assert list(file.tensors) == list(shapes)
            for name, values in expected.items():
                assert np.array_equal(file.tensors[name].dequantize(), values)
