"""Tensor parallelism on two CPU ranks: each attends with its own heads, and rank 0 compresses all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lkv.context.compression import compress

_SCRIPT = """
import json, os, sys

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":  # also in the processes of the ranks
    from tests.vllm import triton_cpu

    triton_cpu.install()
from vllm import LLM, SamplingParams
from lkv.integrations.vllm.requests import compress

def main():
    job = json.loads(sys.argv[1])
    llm = LLM(job["model"], dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=8,
              tensor_parallel_size=2, additional_config={"lkv": job["settings"]})
    names = [compress(llm, text) for text in job["texts"]] + [compress(llm, job["texts"][0], memory="20%")]
    params = [SamplingParams(temperature=0, max_tokens=12, extra_args={"lkv_context": name}) for name in names]
    outputs = llm.generate([{"prompt_token_ids": job["ids"]}] * len(names), params, use_tqdm=False)
    residents = [worker["resident"] for worker in llm.collective_rpc("lkv_statistics")]
    add_request = llm.llm_engine.engine_core.add_request

    def lose_context(request):  # after its check
        os.remove(f"{job['settings']['store']}/{names[0]}.kv")
        llm.collective_rpc("lkv_release", args=(names[0],))
        add_request(request)

    llm.llm_engine.engine_core.add_request = lose_context
    (lost,) = llm.generate([{"prompt_token_ids": job["ids"]}], params[0], use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    print("RESULT", json.dumps([names, answers, residents, lost.outputs[0].finish_reason]))

if __name__ == "__main__":
    main()
"""


def test_two_ranks_answer_as_one(lab, tmp_path):
    lab.close_shared()
    script, texts = tmp_path / "ranks.py", [lab.text(40), lab.text(41, 120)]
    script.write_text(_SCRIPT)
    ids = lab.tokenizer("how many?")["input_ids"]
    job = {"model": str(lab.folder), "settings": lab.settings, "texts": texts, "ids": ids}
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])])
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(job)], env=environment, capture_output=True, text=True, timeout=500
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    names, answers, residents, reason = json.loads(lines[0].removeprefix("RESULT"))
    assert reason == "error"
    contexts = [lab.context(text) for text in texts]
    contexts.append(compress(lab.model, lab.tokenizer, texts[0], memory=0.2, policy=lab.policy))
    assert answers == [lab.answer(context, ids, 12) for context in contexts]
    for name, context in zip(names, contexts, strict=True):
        about = json.loads((lab.store / f"{name}.json").read_text())
        assert about["realised_retention"] == round(context.realised_retention(), 6)
        # Each rank holds the entries of its own heads.
        shares = [resident[name] / about["nbytes"] for resident in residents]
        assert all(0 < share < 1 for share in shares) and sum(shares) == pytest.approx(1, abs=1e-3), shares
