"""Messages to prompt tokens and sampled tokens to text. Sampled tokens are never encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from engine.errors import DataError, MissingError
from engine.types import Int32, Task


class Chat:
    """The model's tokenizer and chat template. Prompts are at most `max_prompt_tokens` long."""

    def __init__(self, folder: Path, max_prompt_tokens: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._max_prompt_tokens = max_prompt_tokens
        if self._tokenizer.chat_template is None:
            raise MissingError(
                f"{folder}: the tokenizer has no chat template", remedy="use an instruction-tuned model's folder"
            )

    def encode(self, task: Task) -> Int32:
        """The prompt, int32[T], ending where the assistant's turn begins. The template alone adds special tokens.

        Raises:
            DataError: it is longer than `max_prompt_tokens`.
        """
        ids = self._tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in task.messages],
            add_generation_prompt=True,
            return_dict=False,
        )
        if len(ids) > self._max_prompt_tokens:
            raise DataError(
                f"task {task.task_id}: its prompt has {len(ids)} tokens, {self._max_prompt_tokens} fit",
                remedy="raise generate.max_model_len, or lower generate.max_new_tokens",
            )
        return np.asarray(ids, np.int32)

    def decode(self, token_ids: Int32) -> str:
        """Text of sampled tokens without special tokens."""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)

    def decode_all(self, token_ids: Int32) -> str:
        """Text with special tokens shown, as the model sees it."""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)

    def cut_at_stop(self, token_ids: Int32, stops: Sequence[str]) -> int | None:
        """Length of the shortest prefix whose text holds a stop string, or None: also one that spans segments."""

        def holds(count: int) -> bool:
            text = self.decode(token_ids[:count])
            return any(stop in text for stop in stops)

        if not stops or not holds(len(token_ids)):
            return None
        low, high = 1, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        return low

