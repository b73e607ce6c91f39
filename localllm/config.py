"""All configuration, in one typed place. The CLI and `LLM` fill it; nothing else reads flags."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from localllm.errors import RequestError

MOST_THREADS = 256  # where there are fewer cores
DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "q8_0")
LEAST_CTX_SIZE = 16  # tokens: one block of the KV cache
_COUNTS = (
    "threads",
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine process needs to know.

    `None` means: decided at load from the machine and the model (see ARCHITECTURE.md).
    """

    model: Path
    backend: str = "auto"  # auto | cpu | torch | reference
    device: str = "auto"  # one of DEVICES
    dtype: str = "auto"  # one of DTYPES: what torch multiplies in and keeps keys and values in
    threads: int | None = None
    isa: str = "auto"  # instruction set of the CPU kernels: auto, or one of `target.ISAS`
    ctx_size: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    kv_cache_memory: int | None = None  # bytes
    kv_cache_dtype: str = "auto"  # one of KV_CACHE_DTYPES; auto: as `dtype` says
    gpu_memory_utilization: float = 0.9  # of a GPU's own memory: the rest stays free
    fast: bool = False  # CUDA: the bits of an answer may depend on the batch
    prefix_cache: bool = True
    tensor_parallel_size: int = 1  # ranks that divide each layer
    pipeline_parallel_size: int = 1  # stages of layers, one after another

    def __post_init__(self) -> None:
        self._check_backend()
        for name in _COUNTS:
            value = getattr(self, name)
            if value is None and name == "threads":
                continue
            if not isinstance(value, int) or value < 1:
                raise RequestError(f"{name} must be at least 1, not {value!r}", param=name)
        self._check_ranks()
        if not 0 < self.gpu_memory_utilization <= 1:
            raise RequestError(
                "gpu_memory_utilization must be more than 0 and at most 1, not "
                f"{self.gpu_memory_utilization}",
                param="gpu_memory_utilization",
            )
        if self.threads is not None and self.threads > (
            most := max(MOST_THREADS, os.cpu_count() or 1)
        ):
            raise RequestError(
                f"threads must be at most {most}, not {self.threads}", param="threads"
            )
        if self.ctx_size is not None and self.ctx_size < LEAST_CTX_SIZE:
            raise RequestError(
                f"ctx_size must be at least {LEAST_CTX_SIZE}, not {self.ctx_size}", param="ctx_size"
            )

    @property
    def ranks(self) -> int:
        """Processes that compute together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def _check_backend(self) -> None:
        for name, known in (
            ("device", DEVICES),
            ("dtype", DTYPES),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
        ):
            if (value := getattr(self, name)) not in known:
                raise RequestError(
                    f"unknown {name} {value!r}; there are {', '.join(known)}", param=name
                )
        if self.backend in ("cpu", "reference") and self.device not in ("auto", "cpu"):
            raise RequestError(
                f"the {self.backend} backend does not compute on {self.device}", param="device"
            )
        on_torch = self.backend == "torch" or self.device in ("cuda", "mps")
        if self.dtype != "auto" and not on_torch:
            raise RequestError("dtype is an option of the torch backend", param="dtype")
        if self.fast and (
            self.backend in ("cpu", "reference") or self.device not in ("auto", "cuda")
        ):
            raise RequestError("fast is an option of the device cuda", param="fast")

    def _check_ranks(self) -> None:
        if self.ranks == 1:
            return
        param = (
            "tensor_parallel_size" if self.tensor_parallel_size > 1 else "pipeline_parallel_size"
        )
        if self.backend in ("cpu", "reference"):
            raise RequestError(
                f"the {self.backend} backend computes on one rank alone; the torch backend divides "
                f"a model among {self.ranks}",
                param=param,
            )
        if self.device == "mps":
            raise RequestError("Apple's GPUs compute on one rank alone", param=param)


def config_hash(config: EngineConfig) -> str:
    """Tells engines apart that are set up differently; the model's folder does not count."""
    settings = sorted({**vars(config), "model": config.model.name}.items())
    return sha256(repr(settings).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Where the HTTP process listens, to whom, and how much it bears.

    Times are in seconds; `None` is no limit.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None  # see server/auth.py
    insecure: bool = False  # listen beyond this machine without a key
    cors_origins: tuple[str, ...] = ()  # beside those of this machine; "*" is any
    allowed_hosts: tuple[str, ...] = ()  # names in Host beside those of this machine; "*" is any
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    max_queue: int = 128  # requests that wait while others are answered
    queue_timeout: float | None = 300.0
    request_timeout: float | None = 3600.0
    max_body_size: int = 16 * 2**20  # bytes
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.max_queue < 0:
            raise RequestError(
                f"max_queue must be 0 or more, not {self.max_queue}", param="max_queue"
            )
        for name in ("queue_timeout", "request_timeout", "max_body_size"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise RequestError(f"{name} must be more than 0, not {value}", param=name)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise RequestError("ssl_certfile and ssl_keyfile go together", param="ssl_keyfile")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What `localllm serve` needs to know."""

    engine: EngineConfig
    http: HttpConfig = field(default_factory=HttpConfig)
    alias: str | None = None


@dataclass(frozen=True)
class Paths:
    """Where localllm keeps what it can make or fetch again."""

    cache: Path = field(default_factory=lambda: _user_cache())

    @property
    def models(self) -> Path:
        return self.cache / "models"

    @property
    def kernels(self) -> Path:
        return self.cache / "kernels"


def _user_cache() -> Path:
    if override := os.environ.get("LOCALLLM_CACHE"):
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "localllm"


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)


def parse_size(size: str | int, param: str) -> int:
    """Bytes of "48MB", "2GiB", "1.5G" or 1000000: decimal with a B, binary with iB or alone.

    Raises RequestError naming `param`.
    """
    match = _SIZE.fullmatch(str(size).strip())
    if match is None:
        raise RequestError(f"{size!r} is not a size such as 48MB, 2GiB or 1000000", param=param)
    number, prefix, suffix = match.groups()
    base = 1000 if (suffix or "").lower() == "b" else 1024
    return int(float(number) * base ** " kmgt".index(prefix.lower() or " "))
