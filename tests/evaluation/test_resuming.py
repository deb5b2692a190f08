"""Evaluations that are interrupted, extended or shared by processes, and files that they refuse."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.report.results_frame import read_results
from lkv.errors import DataError
from lkv.methods.selectors import Knorm
from lkv.policy.policy import Policy
from tests.conftest import tiny_llama
from tests.fake_suite import make_examples, run, score, without_seconds


def test_a_run_resumes_and_takes_more_examples(model, policy, tmp_path):
    examples, out = make_examples(3), tmp_path / "x.jsonl"
    _, whole = run(model, policy, tmp_path / "whole.jsonl", examples)
    _, first = run(model, policy, out, examples[:2])
    torn = out.read_text() + '{"key": "alpha-128-1", "task": "al'
    out.write_text(torn)
    header, lines = run(model, policy, out, examples)
    assert without_seconds(lines) == without_seconds(whole)
    # What was there was not measured again, and a smaller run loses nothing.
    assert lines[:2] == first and header["planned"] == [line["key"] for line in lines]
    assert run(model, policy, out, examples[:1]) == (header, lines)


def test_a_policy_of_the_hub_may_be_added_to_a_run_without_one(model, policy, tmp_path):
    examples, out = make_examples(1), tmp_path / "x.jsonl"
    run(model, None, out, examples, methods=("snapkv",))
    policy.commit = "c" * 40
    header, lines = run(model, policy, out, examples)
    assert header["policy_revision"] == policy.commit
    assert [row["method"] for row in lines[0]["rows"]] == ["full", "snapkv", "lkv"]


def test_other_settings_texts_and_damage_are_refused(model, policy, tmp_path):
    examples, out = make_examples(2), tmp_path / "x.jsonl"
    run(model, policy, out, examples)
    before = out.read_text()
    for arguments, options, message in (
        ((model, policy, out, examples), {"seed": 4}, r"settings \(seed 0 instead of 4\)"),
        ((model, Policy(policy.spec), out, examples), {}, r"settings \(policy "),
        ((tiny_llama(7), None, out, examples, ("snapkv",)), {}, r"settings \(fingerprint "),
    ):
        with pytest.raises(DataError, match=message):
            run(*arguments, **options)
    assert out.read_text() == before
    lines = before.splitlines(keepends=True)
    planned = json.dumps(json.loads(lines[0])["planned"])
    for text, message in (
        (lines[0] + lines[1][:40] + "\n" + lines[2], r"x\.jsonl, line 2 is not a JSON object"),
        (before.replace(planned, '"all"'), r'settings \(planned "all" instead of \["alpha-128-0", '),
        ("\xff\xfe\n", "is not text"),
    ):
        out.write_text(text, encoding="latin-1")
        with pytest.raises(DataError, match=message):
            run(model, policy, out, examples)


def test_a_refused_run_leaves_the_file_as_it_was(model, policy, tmp_path):
    examples, out = make_examples(1), tmp_path / "x.jsonl"
    run(model, None, out, examples, methods=("snapkv",))
    before = out.read_text()
    other = Policy(policy.spec)
    for changed, options, message in (
        (make_examples(2, tokens=95), {}, "sample 'alpha-128-0' of another text"),
        (make_examples(2, metric="qa_f1"), {}, "sample 'alpha-128-0' with another metric or prompt"),
        (make_examples(2, stop_at_newline=True), {}, "'alpha-128-0' with another metric or prompt"),
        (make_examples(2), {"score": lambda example, answer: 0.0}, r"settings \(score "),
    ):
        with pytest.raises(DataError, match=message):
            run(model, other, out, changed, **options)
        assert out.read_text() == before
    # The policy of the refused runs is not in the way of the right one.
    header, lines = run(model, policy, out, examples)
    assert header["policy"] == policy.digest()
    assert [row["method"] for row in lines[0]["rows"]] == ["full", "snapkv", "lkv"]


def test_only_added_methods_and_retentions_are_measured(model, policy, tmp_path, monkeypatch):
    examples, out = make_examples(2), tmp_path / "x.jsonl"
    whole = run(model, policy, tmp_path / "whole.jsonl", examples, ["knorm", "snapkv", "lkv"], [0.3, 0.2])[1]
    # Without a policy first: one that comes later does not make it another run.
    run(model, None, out, examples, ["knorm"], [0.3])
    before = [json.loads(line) for line in out.read_text().splitlines()][1:]
    scored, right = [], Knorm.scores
    monkeypatch.setattr(Knorm, "scores", lambda *given: scored.append(1) or right(*given))
    header, lines = run(model, policy, out, examples, ["knorm", "snapkv", "lkv"], [0.3])
    assert not scored and header["methods"] == ["knorm", "snapkv", "lkv"] and header["policy"] == policy.digest()
    for line, old in zip(lines, before, strict=True):
        assert line["rows"][: len(old["rows"])] == old["rows"]
    header, lines = run(model, policy, out, examples, ["lkv", "snapkv", "knorm"], [0.2])
    assert scored and header["retentions"] == [0.3, 0.2]
    for line, wanted in zip(lines, whole, strict=True):
        found = {(row["method"], row["retention"]): row for row in line["rows"]}
        assert found == {(row["method"], row["retention"]): row for row in wanted["rows"]}
        assert len(found) == len(line["rows"]) == 7
    assert run(model, policy, out, examples, ["knorm"], [0.3]) == (header, lines)


def test_a_run_interrupted_while_it_adds_methods_resumes(model, policy, tmp_path):
    examples, out = make_examples(2), tmp_path / "x.jsonl"
    _, first = run(model, policy, out, examples, ["knorm"])
    _, both = run(model, policy, tmp_path / "both.jsonl", examples, ["knorm", "snapkv"])
    with out.open("a") as file:
        file.write(json.dumps(both[0]) + "\n" + json.dumps(both[1])[:50])
    assert read_results([out]).frame.groupby("key", sort=False).size().tolist() == [3, *[2] * (len(first) - 1)]
    _, lines = run(model, policy, out, examples, ["knorm", "snapkv"])
    assert [line["rows"] for line in lines] == [line["rows"] for line in both]


def test_a_run_interrupted_while_it_adds_samples_is_noted(model, tmp_path):
    """Whatever was planned before, and whatever is run in between."""
    examples, out, scored = make_examples(3), tmp_path / "x.jsonl", []

    @functools.wraps(score)  # the same score, by its name in the file
    def interrupted(example, answer):
        scored.append(answer)
        if len(scored) > 2:  # the full cache's answer and Knorm's to the first sample
            raise KeyboardInterrupt
        return score(example, answer)

    run(model, None, out, examples, ["knorm"])
    longer = make_examples(2, length=256)
    with pytest.raises(KeyboardInterrupt):
        run(model, None, out, longer, ["knorm"], score=interrupted)
    assert read_results([out]).notes[0].startswith(f"UNFINISHED: {out} holds 7 of 10 samples")
    run(model, None, out, examples, ["knorm"])
    assert read_results([out]).notes[0].startswith(f"UNFINISHED: {out} holds 7 of 10 samples")
    run(model, None, out, longer, ["knorm"])
    assert not any("UNFINISHED" in note for note in read_results([out]).notes)


HOLDER = """
import sys, time
from pathlib import Path
from lkv.utils.journal import lock_journal

with lock_journal(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_file_that_another_process_writes_to_is_refused(model, policy, tmp_path):
    out = tmp_path / "x.jsonl"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(out)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "locked\n"
            with pytest.raises(DataError, match=r"another evaluation is writing to .*x\.jsonl; wait for it to finish"):
                run(model, policy, out, make_examples(1))
            assert not out.exists()
        finally:
            process.kill()
    assert len(run(model, policy, out, make_examples(1))[1]) == 2  # the system releases the lock of a killed process


SECONDS = 300  # starting Python with transformers takes a minute on a busy machine
WORKER = """
import functools, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
from lkv.policy.policy import Policy
from tests.fake_suite import make_examples, run, score

torch.set_num_threads(1)
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64).eval()
scored = set()

@functools.wraps(score)
def counted(example, answer):
    scored.add((example.task, example.number))
    return score(example, answer)

policy = Policy.from_pretrained(folder / "policy")
run(model, policy, folder / "out.jsonl", make_examples(4), score=counted)
(folder / f"scored{rank}").write_text(str(len(scored)))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_share_the_samples_and_merge_the_parts_of_three(model, policy, tmp_path):
    model.save_pretrained(tmp_path / "model")
    policy.save_pretrained(tmp_path / "policy")
    header, whole = run(model, Policy.from_pretrained(tmp_path / "policy"), tmp_path / "whole.jsonl", make_examples(4))
    # Three processes were interrupted here: one had two samples, one half a line, one nothing.
    for rank, text in enumerate([[whole[0], whole[3]], []]):
        lines = "".join(json.dumps(row) + "\n" for row in [header, *text])
        (tmp_path / f"out.part{rank}.jsonl").write_text(lines + ('{"key": "be' if rank else ""))
    env = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes = []
    for rank in range(2):
        command = [sys.executable, "-c", WORKER, str(tmp_path), str(rank)]
        own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (tmp_path / f"log{rank}").open("w") as log:
            root = Path(__file__).parents[2]
            processes.append(subprocess.Popen(command, cwd=root, env=own, stdout=log, stderr=log))
    try:
        codes = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join((tmp_path / f"log{rank}").read_text() for rank in range(2))
    found, *lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found == header and without_seconds(lines) == without_seconds(whole)
    assert (lines[0], lines[3]) == (whole[0], whole[3])
    assert [(tmp_path / f"scored{rank}").read_text() for rank in range(2)] == ["3", "3"]
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.jsonl"]
