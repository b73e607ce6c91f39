"""How numba turns kernels into object code for the disk, optimizing each kernel once and whole.

Numba optimizes every helper to the end, makes machine code of it and loads that into the process,
then does the same for each caller with the helper's code inside. Nobody calls a helper by itself:
here it stays plain LLVM code until the kernel above it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import binding as llvm
from numba.core.codegen import CPUCodeLibrary, JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

_OPTIMIZATION = 2  # level 3 takes a tenth longer; tiles unrolled by hand gain nothing from it


@contextmanager
def to_object_code() -> Iterator[None]:
    """Within it numba compiles for the disk cache; nothing that it returns can be called."""
    context = cpu_target.target_context
    codegen = context.codegen()
    with global_compiler_lock:
        rtsys.initialize(context)  # numba's own runtime is code that runs
        codegen._library_class = ObjectCodeLibrary
        codegen.set_env = lambda _name, _env: None  # of code that is not loaded
        try:
            yield
        finally:
            del codegen._library_class, codegen.set_env


class ObjectCodeLibrary(JITCodeLibrary):
    """A function's LLVM code, with references to the libraries of those that it calls."""

    _shared_module: Any

    def finalize(self) -> None:
        self._raise_if_finalized()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:  # noqa: ARG002
        return 0

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager(opt=_OPTIMIZATION)
        passes.run(self._final_module, builder)

    def serialize_using_object_code(self) -> tuple[str, str, tuple[bytes, bytes]]:
        """What `_unserialize` takes: the object code, and a module that names its symbols."""
        self._final_module = self._whole_module()
        self._optimize_final_module()
        self._finalize_dynamic_globals()
        self._final_module.verify()
        self._verify_declare_only_symbols()
        content = self._codegen._tm.emit_object(self._final_module)
        return self.name, "object", (content, self._final_module.as_bitcode())

    def _get_module_for_linking(self) -> Any:
        """For a library of numba's own kind, whose function calls this one."""
        if self._shared_module is None:
            self._shared_module = _shared(self._whole_module())
        return self._shared_module

    def _whole_module(self) -> Any:
        """This library's code and, linked into it once each, that of all those below."""
        whole = self._final_module.clone()
        for library in self._all_below({}):
            self._reload_init.update(library._reload_init)
            if isinstance(library, ObjectCodeLibrary):
                whole.link_in(_shared(library._final_module))
            else:
                whole.link_in(library._get_module_for_linking(), preserve=True)
        return whole

    def _all_below(self, found: dict[CPUCodeLibrary, None]) -> dict[CPUCodeLibrary, None]:
        for library in self._linking_libraries:
            if library not in found:
                found[library] = None
                if isinstance(library, ObjectCodeLibrary):
                    library._all_below(found)
        return found


def _shared(module: Any) -> Any:
    """A copy whose functions may be dropped where nobody calls them."""
    copy = module.clone()
    for function in copy.functions:
        if not function.is_declaration and function.linkage == llvm.Linkage.external:
            function.linkage = llvm.Linkage.linkonce_odr
    return copy
