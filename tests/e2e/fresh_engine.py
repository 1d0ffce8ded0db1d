"""Run as a script: what engines freshly loaded from each checkpoint say. Plain vLLM, none of our generator."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(prompts_file: Path, output: Path, folders: list[str]) -> None:
    from vllm import LLM, SamplingParams

    prompts = json.loads(prompts_file.read_text())
    answers = []
    for folder in folders:
        engine = LLM(model=folder, dtype="float32", generation_config="vllm", logprobs_mode="processed_logprobs",
                     max_model_len=2048, kv_cache_memory_bytes=1 << 27, enforce_eager=True, block_size=32,
                     enable_chunked_prefill=False, max_num_batched_tokens=8192, disable_log_stats=True)
        params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0, ignore_eos=True, detokenize=False)
        results = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        answers.append([_answer(result.outputs[0]) for result in results])
        del engine
    output.write_text(json.dumps(answers))


def _answer(completion: object) -> dict[str, list[float]]:
    tokens = list(completion.token_ids)
    values = [entry[token].logprob for token, entry in zip(tokens, completion.logprobs, strict=True)]
    return {"tokens": tokens, "logprobs": values}


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
