"""How the suites that reasoning_gym makes are scored. lm-eval's default filter keeps the first sample alone; `every`
keeps all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from engine.reward.answer import extract, same_answer


def every(samples: Sequence[Sequence[str]], documents: Sequence[Any]) -> Sequence[Sequence[str]]:
    """lm-eval's custom filter that filters nothing."""
    return samples


def numbers(document: dict[str, str], results: Sequence[Sequence[str]]) -> dict[str, float]:
    """pass@1 over a question's samples, and pass@n for n of them: the last number counts."""
    (samples,) = results
    right = sum(_right(text, document["answer"]) for text in samples)
    return {f"pass@{k}": pass_at_k(len(samples), right, k) for k in dict.fromkeys((1, len(samples)))}


def tagged(document: dict[str, str], results: Sequence[Sequence[str]]) -> dict[str, float]:
    """Exact match of what stands between answer tags, whatever the case, the article and the last full stop."""
    ((text,),) = results
    found = extract(text, "tag")
    return {"acc": float(found is not None and same_answer(_plain(found), _plain(document["answer"])))}


def pass_at_k(count: int, right: int, k: int) -> float:
    """The chance that one of k of the samples, drawn without replacement, is right: 1 - C(n-c, k) / C(n, k), unbiased
    (Chen et al., arXiv 2107.03374)."""
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def _right(text: str, answer: str) -> bool:
    found = extract(text, "last_number")
    return found is not None and same_answer(found, answer)


def _plain(answer: str) -> str:
    return answer.strip().rstrip(".").lower().replace(" an ", " a ")
