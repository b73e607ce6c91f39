"""SentencePiece vocabularies, rebuilt as the library's own model from the file's tokens."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from sentencepiece import SentencePieceProcessor

from localllm.errors import TokenizerError
from localllm.text.models import spaced_text_bytes
from localllm.text.vocabulary import TokenType, Vocabulary

_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"


class Algorithm(IntEnum):
    """`TrainerSpec.ModelType` of SentencePiece's model format."""

    UNIGRAM = 1
    BPE = 2


class _Piece(IntEnum):
    """`SentencePiece.Type` of SentencePiece's model format."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class SpaceRules:
    """What happens to spaces: one put before each text, runs of them made one."""

    add_prefix: bool
    remove_extra: bool = False


class SentencePieceModel:
    """Score-based merges (`BPE`) or the most likely segmentation (`UNIGRAM`)."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        algorithm: Algorithm,
        unknown_id: int | None,
        spaces: SpaceRules,
        charsmap: bytes = b"",
    ) -> None:
        if vocabulary.scores is None:
            raise TokenizerError("tokenizer.ggml.scores is missing")
        if charsmap:
            check_charsmap(charsmap)
        self._unknown_id = unknown_id
        model = _model(vocabulary, algorithm, unknown_id, spaces, charsmap)
        self._size = len(vocabulary)
        try:
            self._processor = SentencePieceProcessor(model_proto=model)
        except Exception as error:
            raise TokenizerError(f"tokenizer.ggml.tokens: {error}") from error

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text, out_type=int)
        if self._unknown_id is None:
            return [token for token in ids if token < self._size]
        return ids

    def text_bytes(self, token: str) -> bytes:
        return spaced_text_bytes(token)


def _model(
    vocabulary: Vocabulary,
    algorithm: Algorithm,
    unknown_id: int | None,
    spaces: SpaceRules,
    charsmap: bytes,
) -> bytes:
    """A serialized `ModelProto`."""
    assert vocabulary.scores is not None
    byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)}
    has_bytes = byte_tokens <= set(vocabulary.tokens)
    types = _piece_types(vocabulary, unknown_id, byte_tokens if has_bytes else set())
    pieces = [
        _piece(text, score, kind)
        for text, score, kind in zip(
            vocabulary.tokens, vocabulary.scores.tolist(), types, strict=True
        )
    ]
    if unknown_id is None:  # the library needs one; `encode` drops it
        pieces.append(_piece("<no token>" * 4, 0.0, _Piece.UNKNOWN))
    trainer = _number(3, algorithm) + _number(35, has_bytes)
    normalizer = (
        _bytes(1, b"identity")
        + _bytes(2, charsmap)
        + _number(3, spaces.add_prefix)
        + _number(4, spaces.remove_extra)
        + _number(5, True)
    )
    return b"".join(pieces) + _bytes(2, trainer) + _bytes(3, normalizer)


def _piece_types(
    vocabulary: Vocabulary, unknown_id: int | None, byte_tokens: set[str]
) -> bytearray:
    """Special tokens are cut out of the text beforehand: here they may match nothing."""
    types = bytearray(vocabulary.types)
    for index, kind in enumerate(types):
        if vocabulary.tokens[index] in byte_tokens:
            types[index] = _Piece.BYTE
        elif kind not in (TokenType.NORMAL, TokenType.UNUSED):
            types[index] = _Piece.CONTROL
    if unknown_id is not None:
        types[unknown_id] = _Piece.UNKNOWN
    return types


def _piece(text: str, score: float, kind: int) -> bytes:
    data = text.encode()
    size = _varint(len(data))
    # Fields: 1 the text, 2 a float, 3 the type. 7 bytes for the last two.
    return b"".join(
        (
            b"\x0a",
            _varint(1 + len(size) + len(data) + 7),
            b"\x0a",
            size,
            data,
            struct.pack("<BfBB", 0x15, score, 0x18, kind),
        )
    )


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    return bytes((value & 0x7F | 0x80,)) + _varint(value >> 7)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def check_charsmap(charsmap: bytes) -> None:
    """Refuses a normalization table that the library would read beyond its ends.

    The table is a length in bytes, a double-array trie of 32-bit units and the replacements, each
    ended by a zero byte. From a unit at `i`, whose bits give an offset, characters lead to units
    anywhere in the block of 256 around `i ^ offset`; units with the top bit set are no nodes but
    positions of replacements.
    """
    size = int.from_bytes(charsmap[:4], "little")
    if not 0 < size < len(charsmap) - 4 or size % 1024 or charsmap[-1]:
        raise TokenizerError(f"{_CHARSMAP}: the lengths do not fit")
    units = np.frombuffer(charsmap, "<u4", size // 4, 4).astype(np.int64)
    leaves = units >> 31 == 1
    offsets = units >> 10 << ((units & 0x200) >> 6)
    targets = np.arange(len(units)) ^ offsets
    if (targets[~leaves] >= len(units)).any():
        raise TokenizerError(f"{_CHARSMAP}: the trie leads outside of itself")
    if (_positions(units[leaves]) >= len(charsmap) - 4 - size).any():
        raise TokenizerError(f"{_CHARSMAP}: a replacement lies outside of the table")


def _positions(leaves: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return leaves & 0x7FFFFFFF
