"""On a machine with a GPU and vLLM: answers against transformers, then the times, into a folder; under 10 minutes.

    python -m dev.gpu_vllm [--model FOLDER] [--dtype bfloat16] [--out gpu-results]        (make gpu-vllm)

Each token of vLLM's answers about contexts must be as probable in transformers, after the same context, as the most
probable one, up to the rounding of the dtype. Then `experiments.vllm` compares with full contexts in the prefix cache.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lkv.hf.loading import DEFAULT, cache_folder, load_model

_TOLERANCE = {"float32": 1e-2, "bfloat16": 0.5, "float16": 0.1}  # of logits
_QUESTIONS = ("What is the text about?", "Who was a baker?", "Where is the key?")
_SECONDS = 480  # for the times


def check_answers(model: str, dtype: str) -> None:
    """Compare answers over the pages and contexts of vLLM with the same contexts in transformers."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    import torch
    from vllm import LLM, SamplingParams

    from experiments.serving import make_text
    from lkv.context.context import Context
    from lkv.integrations.vllm.requests import compress, question_prompt

    device = "cuda" if torch.cuda.is_available() else "cpu"
    own, tokenizer = load_model(model, getattr(torch, dtype), device=device)
    path = str(cache_folder() / DEFAULT) if model == DEFAULT else model  # converted now, at its first use
    with tempfile.TemporaryDirectory() as store:
        options = {"enforce_eager": device == "cpu", "gpu_memory_utilization": 0.5 if device == "cuda" else 0.2}
        settings = {"lkv": {"store": store, "memory": "10%"}}
        llm = LLM(path, dtype=dtype, max_model_len=4096, additional_config=settings, **options)
        texts = [make_text(tokenizer, 2000, seed) for seed in range(2)]
        names = [compress(llm, text) for text in texts]
        pairs = [(name, question) for name in names for question in _QUESTIONS]
        prompts: list[Any] = [question_prompt(llm, question, name) for name, question in pairs]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
        wrong = 0
        for (name, question), output in zip(pairs, outputs, strict=True):
            context = Context.load(Path(store, f"{name}.kv"), own, tokenizer)
            logits, ids = context.predict(question, output.outputs[0].text)
            gaps = logits.float().amax(1) - logits.float().gather(1, ids[:, None])[:, 0]
            wrong += int((gaps > _TOLERANCE[dtype]).sum())
            print(f"{question} {output.outputs[0].text!r}: largest gap {float(gaps.max()):.4f}", flush=True)
    if wrong:
        raise SystemExit(f"{wrong} tokens are less probable in transformers than its own by more than rounding.")
    print(f"{len(pairs)} answers are those of transformers.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT, help="a folder with safetensors; the demo model by default")
    parser.add_argument("--dtype", default="bfloat16", choices=_TOLERANCE)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="the folder of the result file")
    parser.add_argument("--answers", action="store_true", help="compare the answers alone")
    options = parser.parse_args()
    if options.answers:
        check_answers(options.model, options.dtype)
        return
    common = ["--model", options.model, "--dtype", options.dtype]
    # In a process of its own: vLLM leaves the GPU's memory at its end alone.
    subprocess.run([sys.executable, "-m", "dev.gpu_vllm", "--answers", *common], check=True)
    sizes = ["--concurrency", "1", "16", "64", "--repeats", "2", "--out", str(options.out / "vllm.json")]
    subprocess.run([sys.executable, "-m", "experiments.vllm", *common, *sizes], check=True, timeout=_SECONDS)


if __name__ == "__main__":
    main()
