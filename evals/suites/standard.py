"""lm-eval's own tasks that need the hub. What they need is asked for first: lm-eval would try for 23 s a task."""

from __future__ import annotations

import importlib.util
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.errors import MissingError

_FETCH = (
    "run the suite once with --limit 1 where the hub can be reached, bring the folder HF_HOME (~/.cache/huggingface) "
    "here and set HF_HUB_OFFLINE=1; arithmetic, reasoning and safety-net need no hub"
)


class HubTask(msgspec.Struct, frozen=True):
    """Where lm-eval keeps it, its data set on the hub, and the packages that lm-eval does not bring."""

    folder: str
    dataset: str
    config: str | None = None
    packages: tuple[str, ...] = ()


TASKS = {
    "gsm8k": HubTask("gsm8k", "openai/gsm8k", "main"),
    "hendrycks_math500": HubTask("hendrycks_math", "HuggingFaceH4/MATH-500", "default"),
    "ifeval": HubTask("ifeval", "google/IFEval", packages=("langdetect", "immutabledict", "nltk")),
    "mmlu_pro": HubTask("mmlu_pro", "TIGER-Lab/MMLU-Pro"),
    # As chat models are asked.
    "humaneval_instruct": HubTask("humaneval", "openai/openai_humaneval"),
}


def folders(names: Sequence[str]) -> tuple[Path, ...]:
    """Of their task files: reading all that lm-eval brings takes 4.5 s."""
    (package,) = importlib.util.find_spec("lm_eval").submodule_search_locations  # type: ignore[union-attr]
    return tuple(Path(package) / "tasks" / TASKS[name].folder for name in names)


def require(names: Sequence[str]) -> None:
    """Those of `names` that are TASKS can be loaded. Others are not looked at.

    Raises:
        MissingError: the hub cannot be reached, or with HF_HUB_OFFLINE=1 a data set is not in the cache; a package is
            missing.
    """
    wanted = [TASKS[name] for name in names if name in TASKS]
    if wanted:
        _require_data(wanted)
    packages = [package for task in wanted for package in task.packages if not importlib.util.find_spec(package)]
    if packages:
        raise MissingError(f"ifeval needs the packages {', '.join(packages)}",
                           remedy="pip install 'lm-eval[ifeval]==0.4.13', or ask for the other tasks by name")


def _require_data(wanted: Sequence[HubTask]) -> None:
    from huggingface_hub import constants

    names = ", ".join(task.dataset for task in wanted)
    if constants.HF_HUB_OFFLINE:
        missing = [f"{task.dataset} ({error})" for task in wanted if (error := _not_cached(task))]
        if missing:
            raise MissingError(f"HF_HUB_OFFLINE is set, and the cache lacks {', '.join(missing)}", remedy=_FETCH)
        return
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=1.0).close()
    except urllib.error.HTTPError as error:
        error.close()  # it was reached: what it says of its front page does not matter
    except OSError as error:
        raise MissingError(f"{names} must come from {constants.ENDPOINT}, which cannot be reached: {error}",
                           remedy=_FETCH) from error


def _not_cached(task: HubTask) -> str:
    """Why it cannot be loaded without the hub; empty if it can."""
    from datasets import load_dataset_builder

    try:
        load_dataset_builder(task.dataset, task.config)
    except (OSError, ValueError) as error:
        return str(error)
    return ""
