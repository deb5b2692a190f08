"""Speculative decoding with n-grams changes no answer, with both model runners.

Each engine is in a process of its own: vLLM imports numba for it, and starts no second engine where that is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lkv.utils.prompts import encode_question

DRAFTS = 3
_SCRIPT = """
import json, os, sys

if os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1":
    from tests.vllm import triton_cpu

    for name in ("combine_sampled_and_draft_tokens", "get_num_sampled_and_rejected", "post_update"):
        del triton_cpu._KERNELS["input_batch"][f"_{name}_kernel"]  # these here know no drafts; vLLM's own do
    triton_cpu.install()
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from lkv.integrations.vllm.requests import compress

def main():
    job = json.loads(sys.argv[1])
    llm = LLM(job["model"], dtype="float32", enforce_eager=True, max_model_len=2048, max_num_seqs=8,
              additional_config={"lkv": job["settings"]}, speculative_config=job["speculation"],
              disable_log_stats=False)
    names = [compress(llm, text) for text in job["texts"]] + [None]

    def answer(pairs, tokens):
        extras = [None if name is None else {"lkv_context": name} for name, _ in pairs]
        params = [SamplingParams(temperature=0, max_tokens=tokens, extra_args=extra) for extra in extras]
        outputs = llm.generate([{"prompt_token_ids": ids} for _, ids in pairs], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    answers = answer([(name, ids) for name in names for ids in job["questions"]], job["tokens"])
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    last = answer([(names[0], job["last"])], job["free"])
    try:
        answer([(names[0], job["last"])], job["free"] + 1)
        refused = ""
    except VLLMValidationError as error:
        refused = str(error)
    print("RESULT", json.dumps([answers, last[0], refused, counts]))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("runner", ["0", "1"])
def test_drafts_are_accepted_and_rejected_without_changing_answers(lab, tmp_path, runner):
    lab.close_shared()
    script, texts = tmp_path / "drafts.py", [lab.text(21), lab.text(22, 90)]
    script.write_text(_SCRIPT)
    contexts = [*map(lab.context, texts), None]
    questions = [encode_question(lab.tokenizer, lab.text(seed, 20)) for seed in range(3)]
    tokens, free = 48, 24
    # A question that leaves 24 tokens, and positions for the drafts behind the last of them.
    last = questions[0] * 200
    last = last[: lab.model.config.max_position_embeddings + 1 - contexts[0].tokens - DRAFTS - free]
    job = {
        "model": str(lab.folder),
        "settings": lab.settings,
        "texts": texts,
        "questions": questions,
        "tokens": tokens,
        "last": last,
        "free": free,
        "speculation": {
            "method": "ngram",
            "num_speculative_tokens": DRAFTS,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        },
    }
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])])
    # Numba and OpenMP must have equally many threads, which they have where no variable is set.
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "VLLM_USE_V2_MODEL_RUNNER": runner}
    environment = {**os.environ, **threads, "PYTHONPATH": path}
    if runner == "0":
        for name in ("TRITON_INTERPRET", "TORCHDYNAMO_DISABLE"):
            environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(job)], env=environment, capture_output=True, text=True, timeout=500
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    answers, at_the_end, refused, counts = json.loads(lines[0].removeprefix("RESULT"))
    assert answers == [lab.answer(context, ids, tokens) for context in contexts for ids in questions]
    assert at_the_end == lab.answer(contexts[0], last, free)
    assert f"ask for at most {free} new tokens" in refused
    assert 0 < counts["vllm:spec_decode_num_accepted_tokens"] < counts["vllm:spec_decode_num_draft_tokens"], counts
