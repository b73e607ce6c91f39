"""The oracle: plain numpy in float32, slow and obvious. Other backends are tested against it."""

from localllm.backends.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
