"""Which instruction set the kernels of this process are compiled for.

Kernels are written once over SIMD vectors; the few operations that have no good portable form
(see `simd.dot` and `simd.convert`) look here, while they are compiled, for the lowering to use.
The choice is made once, before the first kernel compiles, and is part of the kernel cache's key.

- `avx2`: x86-64 with AVX2, FMA and F16C.
- `vnni`: the same, with the four-way dot product of AVX-VNNI or AVX-512 VNNI.
- `avx512`: that dot product, and 16 lanes where many columns are multiplied.
- `i8mm`: Arm with NEON, and a four-way dot product of unsigned weights (usdot).
- `dotprod`: the same, where it takes signed weights alone (sdot).
- `scalar`: plain LLVM operations only, which run on any machine that LLVM knows.

All of them give the same bits.
"""

from __future__ import annotations

from functools import lru_cache

from llvmlite import binding as llvm
from numba import config

from localllm.errors import LocalLLMError, RequestError

ISAS = (
    "avx512",
    "vnni",
    "avx2",
    "i8mm",
    "dotprod",
    "scalar",
)  # the first that the CPU has is `auto`

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_VNNI512 = _AVX2 | {"avx512vl", "avx512vnni"}

_DOTPROD = frozenset({"neon", "dotprod"})

# LLVM's names of the features that each needs; where there are several sets, one is enough.
_NEEDS = {
    "avx512": (_VNNI512 | {"avx512f", "avx512bw"},),
    "vnni": (_AVX2 | {"avxvnni"}, _VNNI512),
    "avx2": (_AVX2,),
    "i8mm": (_DOTPROD | {"i8mm"},),
    "dotprod": (_DOTPROD,),
    "scalar": (frozenset[str](),),
}

_current: str | None = None


def use(isa: str) -> str:
    """Sets the instruction set (`auto`, or one of `ISAS`) and returns the one that it names.

    Raises LocalLLMError when the CPU lacks it, or when kernels of this process already use
    another one.
    """
    global _current
    chosen = resolve(isa)
    if _current not in (None, chosen):
        raise LocalLLMError(
            f"kernels of this process already use isa {_current}, it cannot change to {chosen}"
        )
    _current = chosen
    return chosen


def current() -> str:
    """The instruction set in use; the best one of this CPU unless `use` chose another."""
    return _current or use("auto")


def is_x86() -> bool:
    """Whether kernels may use AVX2's instructions."""
    return current() in ("avx512", "vnni", "avx2")


def is_neon() -> bool:
    """Whether kernels may use NEON's."""
    return current() in ("i8mm", "dotprod")


def resolve(isa: str) -> str:
    """The name in `ISAS` that `isa` stands for on this CPU."""
    features = cpu_features()
    if isa == "auto":
        return next(name for name in ISAS if not _missing(name, features))
    if isa not in ISAS:
        raise RequestError(f"unknown isa {isa!r}: choose auto, {', '.join(ISAS)}", param="isa")
    if missing := _missing(isa, features):
        raise LocalLLMError(f"isa {isa} needs {' and '.join(missing)}, which this CPU lacks")
    return isa


def cpu_features() -> frozenset[str]:
    """LLVM's names of the features that Numba compiles for: the host's, unless overridden."""
    if config.CPU_FEATURES is not None:
        wanted = (f.strip() for f in config.CPU_FEATURES.split(","))
        return frozenset(f[1:] for f in wanted if f.startswith("+"))
    triple = llvm.get_process_triple()
    if triple.startswith(("aarch64", "arm64")):
        return arm_features(triple, config.CPU_NAME or llvm.get_host_cpu_name())
    if not triple.startswith(("x86_64", "amd64")):
        return frozenset()
    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


@lru_cache
def arm_features(triple: str, cpu: str) -> frozenset[str]:
    """Which of NEON's dot products LLVM uses for a processor of that name.

    LLVM does not list them among the host's features, but knows them by its name; what it makes
    of plain products tells.
    """
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu)
    signed, mixed = (
        machine.emit_assembly(llvm.parse_assembly(_SUM_OF_PRODUCTS.format(extend=extend)))
        for extend in ("sext", "zext")
    )
    found = {"neon"}
    if "sdot" in signed:
        found.add("dotprod")
    if "usdot" in mixed:
        found.add("i8mm")
    return frozenset(found)


_SUM_OF_PRODUCTS = """
declare <4 x i32> @llvm.vector.partial.reduce.add.v4i32.v16i32(<4 x i32>, <16 x i32>)

define <4 x i32> @dot(<4 x i32> %total, <16 x i8> %x, <16 x i8> %y) {{
  %a = {extend} <16 x i8> %x to <16 x i32>
  %b = sext <16 x i8> %y to <16 x i32>
  %products = mul <16 x i32> %a, %b
  %sum = call <4 x i32> @llvm.vector.partial.reduce.add.v4i32.v16i32(
    <4 x i32> %total, <16 x i32> %products)
  ret <4 x i32> %sum
}}
"""


def _missing(isa: str, features: frozenset[str]) -> list[str]:
    return min((sorted(needs - features) for needs in _NEEDS[isa]), key=len)
