"""Rows of a dataset of the Hugging Face Hub, or of its local cache when the Hub cannot be reached."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_like.data.files import Record
from areal_like.data.rows import Asker

_DEFAULT_NAME = {"openai/gsm8k": "main", "open-r1/DAPO-Math-17k-Processed": "all"}
"""Configurations of datasets that have several and no default."""
_TIMEOUT = 10.0  # seconds until the Hub counts as unreachable; `datasets` by itself retries for 23


def read_hub(path: str, name: str | None, split: str, asker: Asker) -> Iterator[Record]:
    """All records of a split, through `datasets`.

    Raises:
        DataError: no such dataset, configuration or split; or offline and not in the cache.
    """
    import datasets

    name = name or _DEFAULT_NAME.get(path)
    offline = _unreachable(path, asker)
    try:
        with _offline() if offline else contextlib.nullcontext():
            loaded = datasets.load_dataset(path, name, split=split)
    except ValueError as error:
        raise asker.error(
            "AL560", f"{path}: {error}", "set name and split to ones that the dataset has", key="split"
        ) from error
    except (OSError, RuntimeError) as error:
        why = offline or str(error)
        raise asker.error(
            "AL560",
            f"the dataset {path} is not in the cache and cannot be fetched: {why}",
            "without a network, set path to a local file or folder (.parquet, .jsonl, .json, .csv with the columns "
            "question and answer), or to a task that is generated on the spot",
            alternatives=("reasoning_gym/chain_sum", "reasoning_gym/gsm_symbolic"),
        ) from error
    where = Path(path)
    for number, record in enumerate(loaded, 1):
        yield where, number, dict(record)


def _unreachable(path: str, asker: Asker) -> str | None:
    """Why the Hub does not answer, or None when it does. One request, no repetition."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        huggingface_hub.HfApi().dataset_info(path, timeout=_TIMEOUT)
    except HFValidationError as error:
        raise asker.error(
            "AL560", f"{path!r} is neither a local file or folder nor a name on the Hub", "names look like openai/gsm8k"
        ) from error
    except RepositoryNotFoundError as error:
        raise asker.error(
            "AL560",
            f"the Hub has no dataset {path!r}, or it is private",
            "check the name, or log in with `hf auth login`",
        ) from error
    except HfHubHTTPError as error:
        return f"the Hub answered {error.response.status_code}" if error.response is not None else str(error)
    except Exception as error:  # whatever the HTTP library calls a missing network: it has changed between versions
        return f"no connection to the Hub ({type(error).__name__})"
    return None


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Let `datasets` look into its cache without asking the network first."""
    import datasets
    import huggingface_hub

    places: list[tuple[Any, bool]] = [
        (module, module.HF_HUB_OFFLINE) for module in (datasets.config, huggingface_hub.constants)
    ]
    try:
        for module, _ in places:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, before in places:
            module.HF_HUB_OFFLINE = before
