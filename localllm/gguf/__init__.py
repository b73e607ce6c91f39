"""Reading GGUF model files."""

from localllm.gguf.blocks import TensorType
from localllm.gguf.file import GGUFFile
from localllm.gguf.tensor import Tensor
from localllm.gguf.values import Metadata, Value

__all__ = ["GGUFFile", "Metadata", "Tensor", "TensorType", "Value"]
