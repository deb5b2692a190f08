"""Saved contexts: what is damaged, forged or changed later never answers, and never takes the process with it."""

import hashlib
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.context.saved_context import CONTEXT_FILE
from lkv.errors import ContextFileError
from lkv.utils import tensor_file
from lkv.utils.devices import is_out_of_memory
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words

KINDS = [{"retention": 0.4}, {"retention": 0.4, "bits": 8}, {"memory": 0.2}]


@pytest.fixture(scope="module")
def model():
    """One model for all tests of the module: none of them changes it."""
    return tiny_llama()


@pytest.fixture(scope="module")
def contexts(model, tmp_path_factory):
    """The bytes of a saved context by its options."""
    path, files = tmp_path_factory.mktemp("contexts") / "context.kv", {}
    for options in KINDS:
        compress(model, Words(), TEXT, method="knorm", **options).save(path)
        files[str(options)] = path.read_bytes()
    return files


@pytest.fixture(params=KINDS, ids=str)
def saved(request, model, contexts, tmp_path):
    """A saved context, as the model computes it and quantised, with its model."""
    path = tmp_path / "context.kv"
    path.write_bytes(contexts[str(request.param)])
    return path, model


def test_files_are_those_that_safetensors_reads(tmp_path):
    """Every dtype, empty tensors and scalars; each tensor lies at a multiple of its own size."""
    dtypes = [torch.float64, torch.uint8, torch.bfloat16, torch.int32, torch.bool, torch.float16, torch.int64]
    tensors = {f"a.{number}": torch.arange(3).to(dtype) for number, dtype in enumerate(dtypes)}
    tensors |= {"empty": torch.empty(0, 5, dtype=torch.int16), "scalar": torch.tensor(2.5), "é": torch.eye(3).T[::2]}
    path = tmp_path / "some.kv"
    tensor_file.write(path, CONTEXT_FILE, tensors, {"ü": "\ud800"})
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype and found.shape == tensor.shape and torch.equal(found, tensor)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert size % 8 == 0
    assert all(header[name]["data_offsets"][0] % tensor.itemsize == 0 for name, tensor in tensors.items())
    assert tensor_file.read(path, CONTEXT_FILE)[1] == {"format": 4, "ü": "\ud800"}


def test_what_happens_to_the_file_later_does_not_reach_a_loaded_context(saved):
    path, model = saved
    context = Context.load(path, model, Words())
    answer = context.ask("what is one ?", 6)
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        file.write(os.urandom(os.path.getsize(path) // 2))
    assert context.ask("what is one ?", 6) == answer
    os.truncate(path, 64)
    assert context.ask("what is one ?", 6) == answer


@pytest.mark.parametrize("first", range(len(KINDS)))
def test_no_changed_byte_is_taken_for_good(contexts, tmp_path, first):
    """A sample of the bytes, other ones of each kind of file: refused, or nothing that is read has changed."""
    path, whole = tmp_path / "context.kv", contexts[str(KINDS[first])]
    path.write_bytes(whole)
    header = 8 + int.from_bytes(whole[:8], "little")
    tensors, about = tensor_file.read(path, CONTEXT_FILE)
    for place in [*range(8), *range(8 + first, header, 29), *range(header + first, len(whole), 397)]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 + place % 255
        path.write_bytes(damaged)
        try:
            again, told = tensor_file.read(path, CONTEXT_FILE)
        except ContextFileError:
            continue
        assert told == about and again.keys() == tensors.keys()
        assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def forge(path, change=lambda tensors: None, without=(), **about):
    """The file with other tensors or other metadata, or `without` some of it, and a checksum that fits."""
    tensors, told = tensor_file.read(path, CONTEXT_FILE)
    change(tensors)
    header = {name: value for name, value in told.items() if name not in ("format", *without)} | about
    tensor_file.write(path, CONTEXT_FILE, tensors, header)


def set_to(name, value):
    def change(tensors):
        if name in tensors:
            tensors[name] = value(tensors[name]) if callable(value) else value

    return change


def drop(name):
    return lambda tensors: tensors.pop(name, None)


def copy_tensors(prefix, new_prefix):
    def change(tensors):
        copies = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        tensors.update({name.replace(prefix, new_prefix): tensor.clone() for name, tensor in copies.items()})

    return change


FORGED = {
    "huge counts": set_to("kept.1", lambda t: t * 0 + 40_000_000),
    "negative counts": set_to("kept.0", lambda t: t - 1000),
    "counts of other heads": set_to("kept.0", lambda t: t[:, :1].clone()),
    "counts of two rows": set_to("kept.2", lambda t: t.repeat(2, 1)),
    "counts as fractions": set_to("kept.0", lambda t: t.double()),
    "no counts": drop("kept.1"),
    "another length": set_to("length.0", lambda t: t + 1),
    "no length": drop("length.2"),
    "real tokens": set_to("real.0", lambda t: t * 0),
    "real tokens of two rows": set_to("real.1", lambda t: t.repeat(2)),
    "ids as fractions": set_to("ids", lambda t: t.double()),
    "ids as a table": set_to("ids", lambda t: t[None].clone()),
    "ids beyond the vocabulary": set_to("ids", lambda t: t + 1000),
    "negative ids": set_to("ids", lambda t: t - 100),
    "no ids": drop("ids"),
    "fewer ids": set_to("ids", lambda t: t[1:].clone()),
    "a layer too many": lambda tensors: tensors.update({"kept.3": tensors["kept.0"].clone()}),
    "a tensor of no layer": lambda tensors: tensors.update({"extra": tensors["ids"].clone()}),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_forged_file_is_refused_in_one_sentence(saved, how):
    path, model = saved
    forge(path, FORGED[how])
    with pytest.raises(ContextFileError, match=r"does not hold a whole context|has the token number"):
        Context.load(path, model, Words())


POOLS = {
    "wide": set_to("k.0", lambda t: t.repeat(1, 2)),
    "flat": set_to("v.0", lambda t: t.flatten()),
    "whole numbers": set_to("v.1", lambda t: t.long()),
    "short": set_to("k.2", lambda t: t[1:].clone()),
}
QUANTISED = {
    "other bits": set_to("tier0_bits.0", torch.tensor([5, 8])),
    "one number of bits": set_to("tier0_bits.0", torch.tensor([8])),
    "fewer bits": set_to("tier0_bits.1", torch.tensor([4, 8])),
    "fractions of bits": set_to("tier0_bits.1", torch.tensor([8.5, 8.0])),
    "no bits": drop("tier0_bits.1"),
    "a table of bits": set_to("tier0_bits.0", lambda t: t.repeat(1000, 1)),
    "negative counts of a tier": set_to("tier0_kept.0", lambda t: t - 1000),
    "other counts of a tier": set_to("tier0_kept.2", lambda t: t + 1),
    "counts that cancel": set_to("tier0_kept.2", lambda t: t + torch.tensor([[1, -1]])),
    "counts of a tier as fractions": set_to("tier0_kept.0", lambda t: t.double()),
    "counts of a tier for two rows": set_to("tier0_kept.0", lambda t: t.repeat(2, 1)),
    "no counts of a tier": drop("tier0_kept.0"),
    "counts of the others": set_to("kept_unquantized.0", lambda t: t + 1),
    "counts of the others as fractions": set_to("kept_unquantized.1", lambda t: t.double()),
    "huge counts of the others": set_to("kept_unquantized.1", lambda t: t + 2**40),
    "no counts of the others": drop("kept_unquantized.2"),
    "short codes": set_to("tier0_key_codes.1", lambda t: t[1:].clone()),
    "narrow codes": set_to("tier0_value_codes.1", lambda t: t[:, 1:].clone()),
    "signed codes": set_to("tier0_value_codes.0", lambda t: t.to(torch.int8)),
    "no codes": drop("tier0_key_codes.2"),
    "norms in float32": set_to("tier0_key_norms.0", lambda t: t.float()),
    "norms as a table": set_to("tier0_value_norms.0", lambda t: t[:, None].clone()),
    "short norms": set_to("tier0_value_norms.2", lambda t: t[1:].clone()),
    "no norms": drop("tier0_key_norms.0"),
    "a basis in float32": set_to("key_basis.0", lambda t: t.float()),
    "a basis of other heads": set_to("key_basis.0", lambda t: t[:, :, :1].clone()),
    "a narrow basis": set_to("key_basis.1", lambda t: t[..., 1:].clone()),
    "no basis": drop("key_basis.0"),
    "pools of other widths": set_to("k.1", lambda t: t.new_zeros(0, 3)),
    "pools of other lengths": set_to("v.1", lambda t: t.new_zeros(5, t.shape[1])),
    "pools of whole numbers": set_to("v.2", lambda t: t.long()),
    "no pools": drop("k.0"),
    "a tier too many": copy_tensors("tier0_", "tier2_"),
    "half a tier too many": copy_tensors("tier0_key", "tier2_key"),
}


@pytest.mark.parametrize(
    ("options", "how"), [(KINDS[0], how) for how in POOLS] + [(kind, how) for kind in KINDS[1:] for how in QUANTISED]
)
def test_pools_that_do_not_fit_are_refused(model, contexts, tmp_path, how, options):
    path = tmp_path / "context.kv"
    path.write_bytes(contexts[str(options)])
    forge(path, (QUANTISED | POOLS)[how])
    with pytest.raises(ContextFileError, match="does not hold a whole context"):
        Context.load(path, model, Words())


@pytest.mark.parametrize("moved", [3, 50, 10**6])
def test_counts_below_zero_are_refused_before_they_are_used(model, contexts, tmp_path, moved):
    """All sums are right; what they say would be written before and behind the pools."""
    path = tmp_path / "context.kv"
    path.write_bytes(contexts[str({"memory": 0.2})])

    def change(tensors):
        shift = torch.tensor([[moved, -moved]])
        tensors["kept_unquantized.1"] = tensors["kept_unquantized.1"] + shift
        tensors["tier0_kept.1"] = tensors["tier0_kept.1"] - shift

    forge(path, change)
    with pytest.raises(ContextFileError, match="its counts of unquantised entries are not whole numbers"):
        Context.load(path, model, Words())


@pytest.mark.parametrize(
    "about",
    [{"retention": "0.3"}, {"method": None}, {"model": []}, {"model": {}}, {"model": None}, {"budget_tokens": True},
     {"bits": "8"}, {"policy": 3}, {"text_sha256": None}, {"memory": 0.2}],
)  # fmt: skip
def test_forged_metadata_is_refused_in_one_sentence(saved, about):
    path, model = saved
    forge(path, **about)
    with pytest.raises(ContextFileError, match="does not hold a whole context"):
        Context.load(path, model, Words())


@pytest.mark.parametrize("field", ["retention", "policy", "text_sha256", "method", "model", "bits"])
def test_a_missing_field_is_refused_in_one_sentence(saved, policy, field):
    path, model = saved
    forge(path, without=[field])
    for compared in (None, policy):
        with pytest.raises(ContextFileError, match=f"does not hold a whole context .*{field}|under another policy"):
            Context.load(path, model, Words(), compared)


def test_a_forged_file_takes_no_memory(saved):
    path, model = saved
    forge(path, FORGED["huge counts"])
    with pytest.raises(ContextFileError), torch.profiler.profile(profile_memory=True) as profile:
        Context.load(path, model, Words())
    assert max((event.self_cpu_memory_usage for event in profile.events()), default=0) < 1_000_000


def words(*vocabulary: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of these words, numbered in this order from 3."""
    numbers = {word: number for number, word in enumerate(("<unk>", "<s>", "</s>", *vocabulary))}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


VOCABULARY = ("the", "keeper", "lit", "lamp", "boats", "never")
CHAT = "{% for m in messages %}<s> {{ m.content }} </s> {% endfor %}"


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (words(*VOCABULARY, template=CHAT), True),
        (words(*VOCABULARY, template=CHAT.replace("<s>", "<s> the")), False),
        (words(*VOCABULARY), False),
        (words("keeper", "the", *VOCABULARY[2:], template=CHAT), False),  # which are in the text
        (words(*VOCABULARY[:4], "never", "boats", template=CHAT), False),  # which are not
        (words(*VOCABULARY[:3], template=CHAT), False),
    ],
    ids=["same", "template", "no template", "words of the text", "other words", "fewer words"],
)
def test_another_tokenizer_is_refused_in_one_sentence(model, tmp_path, other, is_same):
    path = tmp_path / "context.kv"
    own = words(*VOCABULARY, template=CHAT)
    context = compress(model, own, "the keeper lit the lamp " * 9, method="knorm", retention=0.4)
    context.save(path)
    other.add_special_tokens({"pad_token": "[PAD]"})
    other.padding_side = "left"
    if is_same:
        assert Context.load(path, model, other).ask("never ?", 6) == context.ask("never ?", 6)
    else:
        with pytest.raises(ContextFileError, match=r"was saved with another tokenizer, .*; load it with that one, or"):
            Context.load(path, model, other)
    forge(path, without=["tokenizer"])  # of an earlier release
    assert Context.load(path, model, other).ids == context.ids


NO_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("pathlib.Path.read_bytes", MemoryError()), ("lkv.utils.tensor_file.load", NO_MEMORY),
        ("lkv.utils.tensor_file.load", MemoryError()), ("lkv.cache.layer.restore_store", NO_MEMORY),
        ("lkv.cache.layer.restore_store", MemoryError()),
        ("lkv.cache.layer.restore_store", torch.OutOfMemoryError("CUDA out of memory.")),
    ],
)  # fmt: skip
def test_a_lack_of_memory_is_no_damage(saved, monkeypatch, place, problem):
    path, model = saved

    def refuse(*_, **__):
        raise problem

    monkeypatch.setattr(place, refuse)
    with pytest.raises(ContextFileError) as caught:
        Context.load(path, model, Words())
    assert str(caught.value).startswith(f"{path} takes more memory than is free; free some")
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "metadata",
    [None, {}, {"lkv-context": "["}, {"lkv-context": "[" * 100_000}, {"lkv-context": "[]"}, {"lkv-context": "3"},
     {"lkv-context": "{}"}, {"lkv-context": '{"format": 1}'}, {"lkv-context": '{"format": []}'},
     {"lkv-context": '{"format": 2}'}],
)  # fmt: skip
def test_foreign_metadata_is_refused_in_one_sentence(model, tmp_path, metadata):
    path = tmp_path / "context.kv"
    path.write_bytes(save({"ids": torch.zeros(3)}, metadata))
    with pytest.raises(ContextFileError, match=r"is not a saved context|has format|was damaged"):
        Context.load(path, model, Words())


def test_the_checksum_covers_the_metadata(saved):
    path, model = saved
    data = path.read_bytes()
    assert data.count(b'method\\": \\"knorm') == 1
    path.write_bytes(data.replace(b'method\\": \\"knorm', b'method\\": \\"kn0rm'))
    with pytest.raises(ContextFileError, match="damaged or changed"):
        Context.load(path, model, Words())


@pytest.mark.parametrize("place", ["file/context.kv", "x" * 300, "folder.kv", "old.kv", "closed/context.kv"])
def test_what_cannot_be_written_is_one_sentence(model, tmp_path, place, monkeypatch):
    context = compress(model, Words(), TEXT, method="knorm", retention=0.4)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.kv").mkdir()
    context.save(tmp_path / "old.kv")
    before = (tmp_path / "old.kv").read_bytes()

    def refuse(*_):
        raise OSError(28, "No space left on device") if place == "old.kv" else PermissionError(13, "Permission denied")

    if place in ("old.kv", "closed/context.kv"):
        monkeypatch.setattr("lkv.utils.tensor_file._write_tensors", refuse)
    with pytest.raises(ContextFileError, match=r"the context cannot be written to .*nothing was changed there"):
        context.save(tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine" and (tmp_path / "old.kv").read_bytes() == before
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("path", "message"), [("", "must be a path"), (".", "is a folder; give a file"), ("/", "is a folder; give a file")]
)
def test_a_place_without_a_name_is_no_file(model, path, message):
    with pytest.raises(ContextFileError, match=message):
        compress(model, Words(), TEXT, method="knorm", retention=0.4).save(path)


def test_a_file_that_is_no_context_is_never_overwritten(model, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    context = compress(model, Words(), TEXT, method="knorm", retention=0.4)
    with pytest.raises(ContextFileError, match="is not a saved context and would be overwritten"):
        context.save(path)
    assert path.read_bytes() == b"weights"


def test_a_long_name_can_be_saved(model, tmp_path):
    path = tmp_path / ("x" * 255)
    context = compress(model, Words(), TEXT, method="knorm", retention=0.4)
    context.save(path)
    (tmp_path / "y.kv.tmp").mkdir()
    context.save(tmp_path / "y.kv")
    assert Context.load(path, model, Words()).ask("what ?", 3) == context.ask("what ?", 3)
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["lkv-context"])
    assert about["text_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
