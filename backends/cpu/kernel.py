"""Kernels: Python functions compiled to native code on first use, called through an address.

    @kernel
    def scale(args: int, tid: int, n: int) -> None: ...

A kernel gets the address of its argument block (int64 words), its thread's number and the number
of threads. Any number of the threads, one at least, call it at once (one that comes late skips an
op that the others have finished), so all work must be claimed; `tid` selects scratch memory only:

    rows = row_count(args, arg_i64(args, 6))
    row = claim(args, 4)
    while row < rows:
        ...  # rows row..min(row + 4, rows)
        row = claim(args, 4)

A float32 argument occupies the low half of its word. See the header's words below.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

from llvmlite import ir
from numba import njit, types
from numba.core.bytecode import FunctionIdentity
from numba.core.ccallback import CFunc
from numba.core.registry import CPUDispatcher
from numba.extending import intrinsic

from localllm.backends.cpu import cache
from localllm.backends.cpu.codegen import to_object_code

KernelFunction: TypeAlias = Callable[[int, int, int], None]
Constant: TypeAlias = str | int | float | bool
_P = ParamSpec("_P")
_F = TypeVar("_F", bound=Callable[..., Any])

_SIGNATURE = types.void(types.intp, types.intp, types.intp)

# No ZeroDivisionError checks: divisions follow IEEE. Never fastmath: order is part of the result.
_OPTIONS = {"error_model": "numpy"}

# Numba numbers functions from 1 in each process and puts the number into their symbols. Kernels
# from disk were made by many processes, and of two symbols of one name the linker keeps the first:
# a closure would run as another one of its factory.
FunctionIdentity._unique_ids = itertools.count(secrets.randbits(56))

# Words of the step header.
H_TOKENS, H_SEQS, H_LOGIT_ROWS = 0, 1, 2
H_IDS, H_POSITIONS, H_QUERY_START, H_SEQ_LENS, H_LOGIT_ROW_IDS = 3, 4, 5, 6, 7
H_SLOTS, H_BLOCK_TABLES, H_TABLE_BLOCKS, H_THREADS, H_SAMPLING = 8, 9, 10, 11, 12
HEADER_WORDS = 32

# Row kinds of a value, as a word in argument blocks.
ROWS_TOKENS, ROWS_LOGITS = 0, 1

CACHE_LINE = 64


@dataclass(frozen=True)
class Origin:
    """Where a kernel comes from: a name in a module, or a call of a factory there."""

    module: str
    qualname: str
    arguments: tuple[Constant, ...] | None = None

    def key(self) -> str:
        """A file name, unique among all kernels."""
        parts = [self.module.removeprefix("localllm.backends.cpu."), self.qualname]
        parts += [str(a) for a in self.arguments or ()]
        return "-".join(parts).replace("/", "_")

    def to_json(self) -> str:
        return json.dumps([self.module, self.qualname, self.arguments])


def find(origin_json: str) -> Kernel | Native:
    """What `Origin.to_json` describes; another process can compile it by that."""
    module, qualname, arguments = json.loads(origin_json)
    found = getattr(importlib.import_module(module), qualname)
    return cast("Kernel | Native", found if arguments is None else found(*arguments))


class Kernel:
    """A function (args, tid, nthreads) whose native code is made, or read from disk, when used."""

    def __init__(self, function: KernelFunction) -> None:
        self.function = function
        self._origin: Origin | None = None
        if "<locals>" not in function.__qualname__:
            self._origin = Origin(function.__module__, function.__qualname__)
        self._compiled: Any = None

    @property
    def origin(self) -> Origin:
        if self._origin is None:
            raise TypeError(f"{self.function.__qualname__} must come from a @kernel_factory")
        return self._origin

    @property
    def name(self) -> str:
        return self.origin.key()

    @property
    def address(self) -> int:
        """Address of the native code `void(int64, int64, int64)`."""
        self.compile()
        return int(self._compiled.address)

    def compile(self) -> None:
        """Makes the native code, or reads it from disk, unless that is done."""
        if self._compiled is None:
            if not self.is_ready():
                with to_object_code():
                    self._read_or_compile()
            self._compiled = self._read_or_compile()

    def _read_or_compile(self) -> Any:
        compiled: Any = CFunc(self.function, (_SIGNATURE.args, types.void), {}, dict(_OPTIONS))
        compiled._cache = self._cache()
        compiled.compile()
        return compiled

    def is_ready(self) -> bool:
        """Whether `compile` has only to read, at most."""
        return self._compiled is not None or self._cache().exists()

    def _cache(self) -> cache.DiskCache:
        return cache.DiskCache(cache.directory(), self.name)

    def __repr__(self) -> str:
        return f"<Kernel {self.function.__qualname__}>"


def kernel(function: KernelFunction) -> Kernel:
    """Decorator for a kernel of a module, or for one inside a `kernel_factory`."""
    return Kernel(function)


def kernel_factory(make: Callable[_P, Kernel]) -> Callable[_P, Kernel]:
    """Decorator for a module's function that returns a kernel specialised for its arguments.

    Arguments are positional strings or numbers; equal arguments give the same kernel.
    """
    made: dict[tuple[Any, ...], Kernel] = {}

    @functools.wraps(make)
    def find(*args: _P.args, **kwargs: _P.kwargs) -> Kernel:
        if kwargs:
            raise TypeError(f"{make.__qualname__} takes positional arguments only")
        key = cast("tuple[Constant, ...]", args)
        if key not in made:
            new = make(*args, **kwargs)
            new._origin = Origin(make.__module__, make.__qualname__, key)
            made[key] = new
        return made[key]

    return find


class _Helper(CPUDispatcher):
    """Called from Python it runs as Python: compiled helpers have no entry from there."""

    def __call__(self, *args: Any) -> Any:
        return self.py_func(*args)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """A 0 that a loop starts with is an int64 like those that follow, and no type of its own.

        Else the function, and all that it calls, would be compiled once more for it.
        """
        plain = {name: types.unliteral(kind) for name, kind in kws.items()}
        return super().get_call_template(tuple(map(types.unliteral, args)), plain)


def helper(function: _F) -> _F:
    """Decorator for a function that kernels call; it is inlined or linked into each of them."""
    dispatcher = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function)
    dispatcher.__class__ = _Helper
    return cast(_F, dispatcher)


def inlined(function: _F) -> _F:
    """Like `helper`, for a function with one caller, which it joins before compilation.

    A helper's machine code is made once for itself and again with every caller above it: in a deep
    chain of calls that counts.
    """
    return cast(_F, njit(inline="always", **_OPTIONS)(function))


class Native:
    """A nogil function of one signature that Python calls; compiled on first use, kept on disk."""

    def __init__(self, function: Callable[..., Any], signature: Any) -> None:
        self._function = function
        self._signature = signature
        self._dispatcher: Any = None
        self.origin = Origin(function.__module__, function.__qualname__)
        functools.update_wrapper(self, function)

    def compile(self) -> Any:
        """Makes the native code unless that is done; returns what `__call__` calls."""
        if self._dispatcher is None:
            if not self.is_ready():
                with to_object_code():
                    self._read_or_compile()
            self._dispatcher = self._read_or_compile()
        return self._dispatcher

    def _read_or_compile(self) -> Any:
        dispatcher: Any = njit(nogil=True, **_OPTIONS)(self._function)
        dispatcher._cache = self._cache()
        dispatcher.compile(self._signature)
        dispatcher.disable_compile()
        return dispatcher

    def is_ready(self) -> bool:
        """Whether `compile` has only to read, at most."""
        return self._dispatcher is not None or self._cache().exists()

    def __call__(self, *args: Any) -> Any:
        return (self._dispatcher or self.compile())(*args)

    def _cache(self) -> cache.DiskCache:
        return cache.DiskCache(cache.directory(), self.origin.key())


def native(signature: Any) -> Callable[[Callable[..., Any]], Native]:
    """Decorator for an entry point from Python, such as `@native(types.void(types.intp))`.

    It must not be called from other compiled code (make a `helper` of the common part).
    """
    return lambda function: Native(function, signature)


def _word(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    """Pointer to word `index` (of 8 bytes) at address `base`, as a pointer to `kind`."""
    words = builder.inttoptr(base, ir.IntType(64).as_pointer())
    return builder.bitcast(builder.gep(words, [index]), kind.as_pointer())


@intrinsic
def arg_i64(_typing: Any, args: Any, index: Any) -> Any:
    """Word `index` of the argument block (or header) at address `args`."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        at = context.cast(builder, values[1], sig.args[1], types.int64)
        return builder.load(_word(builder, values[0], at, ir.IntType(64)))

    return types.int64(types.intp, index), generate


@intrinsic
def arg_f32(_typing: Any, args: Any, index: Any) -> Any:
    """The float32 in the low half of word `index`."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        at = context.cast(builder, values[1], sig.args[1], types.int64)
        bits = builder.load(_word(builder, values[0], at, ir.IntType(64)))
        return builder.bitcast(builder.trunc(bits, ir.IntType(32)), ir.FloatType())

    return types.float32(types.intp, index), generate


@intrinsic
def header(_typing: Any, args: Any) -> Any:
    """Address of the step header; read its words with `arg_i64(header(args), H_...)`."""

    def generate(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        return builder.load(builder.inttoptr(values[0], ir.IntType(64).as_pointer()))

    return types.intp(types.intp), generate


@intrinsic
def claim(_typing: Any, args: Any, chunk: Any) -> Any:
    """Takes the next `chunk` items of this op; returns the first (past the end: nothing left)."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        i64 = ir.IntType(64)
        one = ir.Constant(i64, 1)
        counter = builder.load(_word(builder, values[0], one, i64))
        count = context.cast(builder, values[1], sig.args[1], types.int64)
        return builder.atomic_rmw(
            "add", builder.inttoptr(counter, i64.as_pointer()), count, "monotonic"
        )

    return types.int64(types.intp, chunk), generate


@intrinsic
def call_kernel(_typing: Any, code: Any, args: Any, tid: Any, nthreads: Any) -> Any:
    """Calls a kernel's native code at address `code`."""

    def generate(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 3)
        builder.call(builder.inttoptr(values[0], function.as_pointer()), list(values[1:]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


@helper
def row_count(args: int, kind: int) -> int:
    """Rows of an operand of row kind `kind` in this step: T or R."""
    if kind == ROWS_LOGITS:
        return arg_i64(header(args), H_LOGIT_ROWS)
    return arg_i64(header(args), H_TOKENS)
