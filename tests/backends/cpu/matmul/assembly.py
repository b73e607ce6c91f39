"""The machine code of a tile, for processors that need not be this one."""

from __future__ import annotations

import llvmlite.ir as ir
import pytest
from llvmlite import binding as llvm

from localllm.backends.cpu import target
from localllm.backends.cpu.matmul.emit import Emitter, Value
from localllm.backends.cpu.matmul.formats import LAYOUTS
from localllm.backends.cpu.matmul.shape import tile_shape
from localllm.backends.cpu.matmul.tiles import TileWriter


def tile_assembly(
    monkeypatch: pytest.MonkeyPatch, isa: str, triple: str, features: str, name: str, columns: int
) -> str:
    """Of a packed tile for few columns (1 to 4), or the widest unpacked one (0 columns)."""
    monkeypatch.setattr(target, "_current", isa)
    layout = LAYOUTS[name]
    shape = None if columns else tile_shape(layout)
    module = ir.Module("tile")
    arguments = [ir.IntType(64)] * 5
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), "tile")
    b = ir.IRBuilder(function.append_basic_block())
    writer = TileWriter(layout, columns or tile_shape(layout).columns[0], shape)
    writer(Emitter(None, b), *(Value(b, argument) for argument in function.args))
    b.ret_void()
    return _compile(str(module), triple, features)


def _compile(source: str, triple: str, features: str) -> str:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        machine = llvm.Target.from_triple(triple).create_target_machine(features=features, opt=3)
    except RuntimeError as error:
        pytest.skip(f"llvmlite here was built without {triple}: {error}")
    module = llvm.parse_assembly(source)
    module.triple = triple
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return str(machine.emit_assembly(module))
