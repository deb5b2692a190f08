"""Context files as earlier versions wrote them: they still answer, and damaged ones are refused."""

from pathlib import Path

import pytest
import torch

from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.context.saved_context import CONTEXT_FILE
from lkv.errors import ContextFileError
from lkv.utils import tensor_file
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.context.test_saved_context import drop, set_to

FIXTURE = Path(__file__).parents[1] / "fixtures" / "saved_context_v2.kv"
ANSWER = "7 20 41 7 7 7"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The bytes of a saved context, and its model."""
    model, path = tiny_llama(), tmp_path_factory.mktemp("contexts") / "context.kv"
    compress(model, Words(), TEXT, method="knorm", retention=0.4).save(path)
    return path.read_bytes(), model


def test_a_file_of_version_0_1_still_answers():
    model = tiny_llama(dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            values = torch.arange(weight.numel(), dtype=torch.float64) * 7919 % 1009 / 1009 - 0.5
            weight.copy_(values.reshape(weight.shape))
    context = Context.load(FIXTURE, model, Words())
    text = " ".join(f"word{number}" for number in range(40))
    again = compress(model, Words(), text, method="knorm", retention=0.3)
    assert context.metadata == again.metadata and context.cache.kept_counts() == again.cache.kept_counts()
    assert context.ask("what is one ?", 6) == again.ask("what is one ?", 6) == ANSWER


def old_codes(values: torch.Tensor, bits: int, lens: list[int] | None) -> dict[str, torch.Tensor]:
    """`values` [n, d] as version 2 of the format had them: codes times a step, plus the least value of a group.

    Groups are of 32 entries of a head and one channel (`lens`: entries of each head), or of 32 channels of an entry.
    """
    width, group = values.shape[1], 32
    parts = [part.T for part in values.split(lens)] if lens is not None else [values]
    steps, least, codes = [], [], []
    for part in parts:
        groups = [piece for piece in part.split(group, 1) if piece.numel()]
        low = [piece.amin(1).to(torch.bfloat16) - piece.amin(1).abs().to(torch.bfloat16) / 64 for piece in groups]
        step = [((piece.amax(1) - bottom.float()) / (2**bits - 1) * 1.01 + 1e-6).to(torch.bfloat16)
                for piece, bottom in zip(groups, low, strict=True)]  # fmt: skip
        numbers = [((piece - bottom.float()[:, None]) / each.float()[:, None]).round().clamp(0, 2**bits - 1)
                   for piece, bottom, each in zip(groups, low, step, strict=True)]  # fmt: skip
        empty = part.new_zeros(0, part.shape[0]) if lens is not None else part.new_zeros(part.shape[0], 0)
        for found, own in ((steps, step), (least, low)):
            stacked = torch.stack(own, 0 if lens is not None else 1) if own else empty.bfloat16()
            found.append(stacked)
        flat = torch.cat(numbers, 1) if numbers else part[:, :0]
        codes.append(flat.T if lens is not None else flat)
    whole = torch.cat(codes).to(torch.uint8)
    if bits == 4:
        half = -(-width // 2)
        whole = whole[:, :half] | torch.nn.functional.pad(whole[:, half:], (0, width % 2)) << 4
    tensors = {"layout": torch.tensor([bits, group, width, 2]), "codes": whole.contiguous(), "step": torch.cat(steps),
               "least": torch.cat(least)}  # fmt: skip
    return tensors if lens is None else tensors | {"lens": torch.tensor(lens)}


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_file_of_version_2_still_answers(tmp_path, bits):
    """Written here as that version wrote it; the values are read back to a thousandth of their size."""
    model, path = tiny_llama(dtype=torch.float32, head_dim=40), tmp_path / "context.kv"
    plain = compress(model, Words(), TEXT, method="knorm", retention=0.7)
    plain.save(path)
    tensors, about = tensor_file.read(path, CONTEXT_FILE)
    expected = []
    for layer in range(3):
        lens = tensors[f"kept.{layer}"].flatten().tolist()
        sides = {side: old_codes(tensors.pop(f"{side}.{layer}"), bits, lens if side == "k" else None) for side in "kv"}
        for side, old in sides.items():
            tensors |= {f"{side}_{name}.{layer}": tensor for name, tensor in old.items()}
        expected.append((decoded(sides["k"], lens), decoded(sides["v"], None)))
    header = {name: value for name, value in about.items() if name not in ("format", "memory")} | {"bits": bits}
    tensor_file.write(path, CONTEXT_FILE._replace(version=2), tensors, header)
    again = Context.load(path, model, Words())
    assert again.metadata == plain.metadata | {"bits": bits} and again.cache.kept_counts() == plain.cache.kept_counts()
    for layer, (key, value), own in zip(again.cache.ragged_layers, expected, plain.cache.ragged_layers, strict=True):
        restored = layer.store.restore()
        for found, wanted, first in zip(restored.pack(), (key, value), own.store.pack(), strict=True):
            assert (found - wanted).norm() < 0.012 * wanted.norm()
            assert (found - first).norm() < (0.02 if bits == 8 else 0.2) * first.norm()
    first, _ = plain.predict("what is one ?", "it is so")
    found, _ = again.predict("what is one ?", "it is so")
    assert (found - first).norm() < (0.05 if bits == 8 else 0.7) * first.norm()
    again.save(tmp_path / "new.kv")  # in today's format
    assert Context.load(tmp_path / "new.kv", model, Words()).ask("what is one ?", 6) == again.ask("what is one ?", 6)


def decoded(old: dict[str, torch.Tensor], lens: list[int] | None) -> torch.Tensor:
    """What `old_codes` stand for, one value after another."""
    bits, group, width, _ = old["layout"].tolist()
    codes = old["codes"] if bits == 8 else torch.cat([old["codes"] & 15, old["codes"] >> 4], 1)[:, :width]
    found, entry, first = torch.empty(len(codes), width), 0, 0
    for count in lens if lens is not None else [1] * len(codes):
        for place in range(count):
            for channel in range(width):
                at = (first + place // group, channel) if lens is not None else (entry, channel // group)
                found[entry, channel] = codes[entry, channel] * old["step"][at].float() + old["least"][at].float()
            entry += 1
        first += -(-count // group)
    return found


OLD = {
    "group": set_to("v_layout.0", torch.tensor([8, 2**33, 8, 2])),
    "bits": set_to("k_layout.0", torch.tensor([3, 32, 8, 2])),
    "no width": set_to("v_layout.0", torch.tensor([8, 32, 0, 2])),
    "fractions": set_to("v_layout.0", torch.tensor([8.0, 32.0, 8.0, 2.0])),
    "groups of fractions": set_to("k_layout.0", lambda t: t.double()),
    "short layout": set_to("v_layout.0", torch.tensor([8, 32])),
    "codes": set_to("k_codes.1", lambda t: t[1:].clone()),
    "spans": set_to("k_lens.1", lambda t: t.flip(0) + torch.tensor([1, -1])),
    "whole steps": set_to("v_step.0", lambda t: t.int()),
    "short steps": set_to("k_step.1", lambda t: t[1:].clone()),
    "no steps": drop("v_step.2"),
    "steps that are no numbers": set_to("v_step.1", lambda t: t * torch.nan),
}


@pytest.mark.parametrize("how", [None, *OLD])
def test_a_forged_file_of_version_2_is_refused(saved, tmp_path, how):
    (content, model), path = saved, tmp_path / "context.kv"
    path.write_bytes(content)
    tensors, about = tensor_file.read(path, CONTEXT_FILE)
    for layer in range(3):
        lens = tensors[f"kept.{layer}"].flatten().tolist()
        for side in "kv":
            old = old_codes(tensors.pop(f"{side}.{layer}").float(), 8, lens if side == "k" else None)
            tensors |= {f"{side}_{name}.{layer}": tensor for name, tensor in old.items()}
    if how is not None:
        OLD[how](tensors)
    about = {name: value for name, value in about.items() if name not in ("format", "memory")} | {"bits": 8}
    tensor_file.write(path, CONTEXT_FILE._replace(version=2), tensors, about)
    if how is None:
        assert Context.load(path, model, Words()).ask("what is one ?", 3)
        return
    with pytest.raises(ContextFileError, match="does not hold a whole context"):
        Context.load(path, model, Words())
