"""A training that is stopped, resumed or started over damaged files: nothing is lost, and one sentence says why."""

import io
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lkv.errors import TrainingError, TrainingStoppedError
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import read_prompt
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.training.checkpoint import (
    CHECKPOINT,
    CHECKPOINT_KIND,
    initialize_from,
    lock_folder,
    read_checkpoint,
    save_checkpoint,
)
from lkv.training.config import TrainingConfig
from lkv.training.warm_start import CALIBRATION_SAMPLES
from lkv.utils import tensor_file
from tests.commands import main
from tests.conftest import tiny_llama
from tests.training.test_training import CONFIG, sample, train_for, trainer

LATE = replace(CONFIG, checkpoint_every=100)


pytestmark = pytest.mark.usefixtures("interruptible")


def interrupting(call: int):
    """Samples, with Ctrl-C pressed when one is asked for the `call`th time."""
    calls = []

    def samples(number):
        calls.append(number)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return sample(number)

    return samples


@pytest.mark.parametrize("step", [0, 3])
def test_the_first_interrupt_saves_and_the_next_run_goes_on(tmp_path, capsys, step):
    whole, policy = trainer(tmp_path / "whole", LATE)
    whole.run()
    with pytest.raises(
        TrainingStoppedError, match=rf"after step {step + 1} of 6, .*; run the same command to continue"
    ):
        # Each step reads 2 samples, after those of the calibration.
        trainer(tmp_path / "parts", LATE, interrupting(CALIBRATION_SAMPLES + 2 * step + 1))[0].run()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed, again = trainer(tmp_path / "parts", LATE)
    capsys.readouterr()
    resumed.run()
    assert "continuing from step " in capsys.readouterr().err
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in policy.state_dict().items())


def test_the_second_interrupt_stops_at_once(tmp_path):
    def samples(number):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return sample(number)

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, LATE, samples)[0].run()


def test_training_in_a_thread_takes_no_signals(tmp_path):
    thread = threading.Thread(target=trainer(tmp_path, LATE)[0].run)
    thread.start()
    thread.join()
    assert read_checkpoint(tmp_path).step == 6


def test_damaged_curves_are_noticed_before_the_first_step(tmp_path):
    asked = []
    for text in ("no json\n", "[1]\n", '{"no": "step"}\n', '{"step": "1"}\n', "[" * 100_000, b"\xff\xfe"):
        (tmp_path / "curve.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(TrainingError, match=r"curve\.jsonl is not a training curve .*; delete it"):
            trainer(tmp_path, samples=asked.append)[0].run()
    assert not asked


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    """The folder of a run that was killed after two steps."""
    folder = tmp_path_factory.mktemp("killed")
    train_for(trainer(folder)[0], 2)
    return folder


@pytest.fixture
def run_folder(tmp_path, killed_run):
    """A copy of that folder."""
    return Path(shutil.copytree(killed_run, tmp_path / "run"))


def change_checkpoint(folder, change=lambda tensors: tensors, **about):
    """Write the checkpoint in `folder` again, with other tensors or another header."""
    path = folder / CHECKPOINT
    tensors, header = tensor_file.read(path, CHECKPOINT_KIND)
    tensor_file.write(path, CHECKPOINT_KIND, change(tensors), header | about)


def test_settings_that_differ_are_named(run_folder):
    with pytest.raises(TrainingError, match=r"other settings \(lr 0\.001 instead of 5\.0, seed 0 instead of 3\)"):
        trainer(run_folder, replace(CONFIG, lr=5.0, seed=3))[0].run()


@pytest.mark.parametrize(
    "about", [{"step": "x"}, {"step": -1}, {"config": 3}, {"card": []}, {"model": {}}, {"model": None}]
)
def test_checkpoints_that_are_none_are_named(run_folder, about):
    change_checkpoint(run_folder, **about)
    with pytest.raises(TrainingError, match=r"cannot be read .*; give the folder of a training run"):
        trainer(run_folder)[0].run()
    (run_folder / CHECKPOINT).unlink()
    with pytest.raises(TrainingError, match=r"there is no file .*; give the folder of a training run"):
        read_checkpoint(run_folder)
    (run_folder / CHECKPOINT).mkdir()
    with pytest.raises(TrainingError, match="cannot be read"):
        trainer(run_folder)[0].run()


@pytest.mark.parametrize(
    ("key", "change"),
    [
        *((key, change) for key in ("step", "exp_avg", "exp_avg_sq")
          for change in (lambda x: x.flatten()[:0], lambda x: x.long(), lambda x: x[None], lambda x: None)),
        ("step", lambda x: x * 0 - 1), ("exp_avg_sq", lambda x: x * 0 - 1),
    ],
)  # fmt: skip
def test_an_optimizer_of_other_parameters_is_named(run_folder, key, change):
    def change_one(tensors):
        name = next(name for name in tensors if name.startswith(f"optimizer.{key}."))
        changed = change(tensors.pop(name))
        return tensors | ({} if changed is None else {name: changed})

    change_checkpoint(run_folder, change_one)
    with pytest.raises(TrainingError, match="has no state of these parameters; give another folder"):
        trainer(run_folder)[0].run()


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["policy.", "optimizer."])
def test_a_checkpoint_of_numbers_that_are_none_is_named(run_folder, kind, number):
    change_checkpoint(run_folder, lambda tensors: {n: x + number * n.startswith(kind) for n, x in tensors.items()})
    with pytest.raises(TrainingError, match=r"cannot be read \(it contains NaN or infinite values\)"):
        trainer(run_folder)[0].run()


def test_a_gradient_without_end_stops_before_the_weights_change(run_folder, monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.inf))
    run, policy = trainer(run_folder)
    with pytest.raises(TrainingError, match="the loss is finite, but not its gradient at step 2; training stopped"):
        run.run()
    kept = read_checkpoint(run_folder).tensors
    assert all(torch.equal(x, kept[f"policy.{name}"]) for name, x in policy.state_dict().items())


def test_a_checkpoint_cut_short_while_in_use_does_no_harm(run_folder):
    """A memory-mapped file that loses its end ends the process with SIGBUS at the next read."""
    checkpoint = read_checkpoint(run_folder)
    expected = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    os.truncate(checkpoint.path, 100)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in checkpoint.tensors.items())
    with pytest.raises(TrainingError, match="give the folder of a training run"):
        read_checkpoint(run_folder)


def test_a_second_training_in_a_folder_is_refused(tmp_path):
    errors = []

    def second():
        try:
            trainer(tmp_path)[0].run()
        except TrainingError as error:
            errors.append(str(error))

    thread = threading.Thread(target=second)
    with lock_folder(tmp_path), lock_folder(tmp_path):  # one process may lock it twice
        thread.start()
        thread.join()
    assert errors == [f"another training is running in {tmp_path}; wait until it ends, or give another folder."]
    trainer(tmp_path, replace(CONFIG, steps=1))[0].run()


def test_a_checkpoint_without_its_parameters_is_named(run_folder):
    change_checkpoint(run_folder, lambda tensors: {name: x for name, x in tensors.items() if "bias" not in name})
    run, policy = trainer(run_folder)
    with pytest.raises(TrainingError, match="does not hold the parameters of a policy"):
        run.run()
    with pytest.raises(TrainingError, match="does not hold the parameters of a policy"):
        initialize_from(policy, run_folder)
    Policy(policy.spec, inputs=ScorerInputs("unrotated")).save_pretrained(run_folder)
    with pytest.raises(TrainingError, match="does not hold the parameters of a policy with these inputs"):
        initialize_from(policy, run_folder)


@pytest.mark.parametrize("finished", [True, False])
def test_a_policy_goes_on_at_other_lengths(tmp_path, finished):
    """Beyond the last knot the terms are flat, so that a longer training begins with the same scores."""
    model, settings = tiny_llama(dtype=torch.float32), replace(CONFIG, key="unrotated", position=True)
    spec = patch_attention(model).spec
    prompt = read_prompt(model, torch.randint(3, 60, (1, 40), generator=torch.Generator().manual_seed(3)))[0]

    def scores(policy):
        return policy.tokens(prompt, 0)

    def made(tokens):
        return Policy(spec, inputs=replace(settings, max_tokens=tokens, min_tokens=2).inputs)

    short = made(16)
    for table in (short.tokens.start, short.tokens.end):
        torch.nn.init.normal_(table)
    if finished:
        short.save_pretrained(tmp_path)
    else:
        save_checkpoint(tmp_path, 3, settings, short, torch.optim.AdamW(short.parameters()))
    longer, shorter = made(64), made(8)
    initialize_from(longer, tmp_path)
    initialize_from(shorter, tmp_path)
    assert longer.inputs.knots == 7
    torch.testing.assert_close(scores(longer), scores(short))
    torch.testing.assert_close(shorter.tokens.end, short.tokens.end[..., :4])


@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/nowhere"])
def test_a_folder_that_takes_nothing_is_named_before_anything_is_loaded(tmp_path, capsys, place):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "data").mkdir()
    out = {"a file": tmp_path / "mine", "below a file": tmp_path / "mine" / "out"}.get(place, place)
    assert main(["train", "--data", str(tmp_path / "data"), "--out", str(out), "--model", "no/such"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lkv: the training cannot be written to ") and len(error.splitlines()) == 1
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_full_disk_leaves_the_last_checkpoint(run_folder, monkeypatch):
    before = (run_folder / CHECKPOINT).read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lkv.utils.files.os.replace", full)
        with pytest.raises(TrainingError, match=r"cannot be written .*No space left on device"):
            trainer(run_folder)[0].run()
    assert (run_folder / CHECKPOINT).read_bytes() == before and not list(run_folder.glob("*.tmp"))


@pytest.mark.parametrize(
    "change",
    [{"lr": math.nan}, {"lr": -1.0}, {"lr": 0.0}, {"lr": math.inf}, {"tau_start": 0.0}, {"tau_end": math.nan},
     {"seed": 2**70}, {"seed": -1}, {"continuations": 100_000}, {"steps": 0}, {"batch": 2.5}, {"steps": True},
     {"retention_end": 1.5}, {"warmup": -1}, {"min_tokens": 900, "max_tokens": 100},
     {"hidden_norm": "median"}, {"lr": "1e-3"}, {"beta": -0.1}],
)  # fmt: skip
def test_settings_outside_their_range_are_named(change):
    with pytest.raises(TrainingError, match=next(iter(change))):
        TrainingConfig(**change)


def test_an_interrupted_command_prints_no_traceback(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lkv.cli.methods.Methods.run", interrupt)
    assert main(["methods"]) == 130
    assert capsys.readouterr().err == "lkv: interrupted\n"


@pytest.mark.parametrize("words", [["policies"], ["--help"]])
def test_a_reader_that_leaves_early_sees_no_traceback(words):
    """As `lkv policies | head -1`, with a head that has left before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, "-m", "lkv", *words], stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)
    assert done.stderr == "" and done.returncode in (0, 141)


@pytest.mark.parametrize(("place", "code"), [("/dev/full", 2), ("&-", 0)])
def test_an_output_that_takes_nothing_is_one_sentence(place, code):
    command = ["sh", "-c", f'"$0" -m lkv policies >{place}', sys.executable]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert done.returncode == code
    assert done.stderr.startswith("lkv: the system refuses to read or write ([Errno 28]") if code else done.stderr == ""


def test_a_standard_input_that_is_closed_holds_no_text(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["ask", "-", "Who?"]) == 2
    assert capsys.readouterr().err.startswith("lkv: standard input has no text")
    sys.stdin.close()


def test_answers_beyond_the_terminals_characters_are_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr("lkv.cli.main.parse_arguments", lambda *_: SimpleNamespace(run=lambda: print("Brücke")))
    assert main([]) == 0
    assert stream.buffer.getvalue() == b"Br\\xfccke\n"
