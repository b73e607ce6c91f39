"""Tiles compiled for processors that need not be this one use their dot product instruction."""

from __future__ import annotations

import re

import pytest

from tests.backends.cpu.matmul.assembly import tile_assembly

_ARM, _X86 = "aarch64-linux-gnu", "x86_64-linux-gnu"
_AVX2 = "+avx2,+fma,+f16c"
_VNNI512 = f"{_AVX2},+avx512vl,+avx512vnni"

# isa, triple, features, the instruction for few columns and for many
TARGETS = {
    "i8mm": ("i8mm", _ARM, "+neon,+dotprod,+i8mm", r"usdot\tv\d+\.4s", r"usdot\tv\d+\.4s"),
    "dotprod": ("dotprod", _ARM, "+neon,+dotprod", r"\tsdot\tv\d+\.4s", r"\tsdot\tv\d+\.4s"),
    "avxvnni": (
        "vnni",
        _X86,
        f"{_AVX2},+avxvnni",
        r"{vex}\s+vpdpbusd\s.*%ymm\d+$",
        r"{vex}\s+vpdpbusd\s.*%ymm\d+$",
    ),
    "avx512vnni, 256 bits": (
        "vnni",
        _X86,
        _VNNI512,
        r"\tvpdpbusd\s.*%ymm\d+$",
        r"\tvpdpbusd\s.*%ymm\d+$",
    ),
    "avx512vnni": (
        "avx512",
        _X86,
        f"{_VNNI512},+avx512f,+avx512bw",
        r"\tvpdpbusd\s.*%ymm\d+$",
        r"\tvpdpbusd\s.*%zmm\d+$",
    ),
}
FORMATS = ("Q4_K", "Q8_0", "IQ4_XS", "MXFP4")

# Bytes one by one, or multiplied outside of vectors.
_SCALAR = re.compile(
    r"\b(ldrs?b|[us]mov|movs?zb[lwq]|movsb[lwq]|v?pextrb|imull|smaddl|mul\tw\d+)\b"
)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("machine", TARGETS)
@pytest.mark.parametrize("columns", [1, 3, 0])
def test_all_products_are_of_the_dot_instruction(
    monkeypatch: pytest.MonkeyPatch, machine: str, name: str, columns: int
) -> None:
    isa, triple, features, few, many = TARGETS[machine]
    code = tile_assembly(monkeypatch, isa, triple, features, name, columns)
    dots = re.findall(few if columns else many, code, re.MULTILINE)
    groups = 16 if name in ("Q4_K", "IQ4_XS") and columns else 8  # that are unrolled
    registers = 2 if triple == _ARM else 1  # that a group of eight rows fills
    if columns:
        assert len(dots) == groups * registers * columns
    else:  # two vectors of rows, and so many columns
        assert len(dots) == groups * registers * 2 * (3 if triple == _ARM else 6)
    assert not _SCALAR.search(code), _SCALAR.findall(code)


def test_a_table_is_looked_up_by_a_shuffle(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, shuffle in (
        ("i8mm", r"\ttbl\tv"),
        ("dotprod", r"\ttbl\tv"),
        ("avxvnni", "vpshufb"),
    ):
        isa, triple, features, *_ = TARGETS[machine]
        code = tile_assembly(monkeypatch, isa, triple, features, "IQ4_NL", 1)
        assert len(re.findall(shuffle, code)) >= 8, machine
