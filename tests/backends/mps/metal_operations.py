"""What torch's own list says of operations and Metal."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest


@cache
def entries() -> dict[str, Any]:
    """`native_functions.yaml` as torch brings it, by "aten::name.overload"."""
    torchgen = pytest.importorskip("torchgen", reason="this torch brings no torchgen")
    yaml = pytest.importorskip("yaml")
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    if not path.exists():
        pytest.skip("this torch does not bring its list of functions")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    listed = yaml.load(path.read_text(encoding="utf-8"), loader)
    return {"aten::" + entry["func"].split("(")[0]: entry for entry in listed}


def kernels(name: str) -> set[str]:
    """The dispatch keys that an operation has kernels for."""
    entry = entries()[name]
    if (delegate := entry.get("structured_delegate")) is not None:
        return kernels("aten::" + delegate)
    keys = entry.get("dispatch", {"CompositeImplicitAutograd": ""})
    return {key.strip() for joined in keys for key in joined.split(",")}
