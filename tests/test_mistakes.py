"""What a user can get wrong, in Python and on the command line: one sentence each, never a traceback."""

import json
import resource
import shutil
from contextlib import contextmanager

import pytest
import torch

from experiments.journal import open_journal
from experiments.result_file import write_results
from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.errors import CacheError, DataError, LkvError, PolicyMismatchError, RetentionError
from lkv.evaluation.longbench import load_examples
from lkv.evaluation.sample_journal import SampleJournal
from lkv.hf.loading import DEFAULT
from lkv.policy.lookup import load_policy
from tests.commands import main
from tests.conftest import save_model
from tests.context.test_compression import TEXT, Words
from tests.requests import resolve_method
from tests.results import many, write


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "model")


def refused(capsys, arguments) -> str:
    """The one sentence that a command ends with."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lkv: ")]
    assert len(error) == 1
    return error[0]


PATTERN = [[0.5, 0.5]] * 3
# Keyword arguments of compress, and the essential words of the error.
COMPRESS = [
    ({"method": 0.15}, "method is 0.15; pass a name"),
    ({"method": None}, "method is None"),
    ({"retension": 0.3}, "compress has no option retension"),
    ({"compression_ratio": 0.85}, "instead of compression_ratio=0.85 give retention=0.15"),
    ({"method": "full", "retention": 0.3}, "'full' keeps everything, not 0.3"),
    ({"method": "knorm", "pattern": PATTERN}, "'knorm' does not use a pattern"),
    ({"method": "kvzip", "pattern": PATTERN}, "'kvzip' does not use a pattern"),
    ({"method": "knorm", "retention": "0.15"}, "retention is '0.15'"),
    ({"method": "knorm", "retention": True}, "retention is True"),
    ({"method": "knorm", "memory": 0.1, "retention": 0.2}, "memory says how much to keep"),
    ({"method": "knorm", "memory": 0.1, "bits": 4}, "memory says how much to keep"),
    ({"method": "full", "memory": 0.1}, "'full' keeps everything; leave memory out"),
    ({"method": "knorm", "memory": "9 B"}, "at memory 9 bytes nothing of it would be kept"),
    ({"method": "lkv", "policy": "nowhere"}, "there is no policy folder 'nowhere'"),
    ({"method": "lkv"}, "there is no policy for this model"),
    *(
        ({"method": "knorm", name: value}, f"{name} is {value!r}")
        for name, value in [
            ("budget_tokens", True), ("budget_tokens", 9.0), ("slack", 1.5), ("slack", "4"), ("chunk", 7.5),
            ("chunk", True), ("bits", "8"), ("bits", 2), ("memory", True), ("memory", "x"), ("memory", 0),
            ("memory", "5TB"), ("memory", 2.0),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), COMPRESS, ids=lambda value: str(value)[:40])
def test_compress_names_what_is_wrong(model, options, message):
    with pytest.raises(LkvError) as error:
        compress(model, Words(), TEXT, **options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", [None, 3, b"text", "", "half a \ud800 character"])
def test_what_is_no_text_is_named(model, text):
    with pytest.raises(LkvError, match="the text is"):
        compress(model, Words(), text, method="knorm")
    context = compress(model, Words(), TEXT, method="knorm")
    for ask in (context.ask, lambda question: context.predict(question, "yes")):
        with pytest.raises(LkvError, match="the question is"):
            ask(text)


CACHES = [
    *(({"method": "knorm", "prompt_tokens": wrong}, CacheError, "prompt_tokens is") for wrong in (1.5, "9", True, 0)),
    ({"method": 3}, CacheError, "method is 3"),
    ({"method": "knorm", "retention": "0.15"}, RetentionError, "retention is '0.15'"),
    ({}, PolicyMismatchError, "there is no policy for this model"),
    (
        {"method": resolve_method("knorm", retention=0.5), "pattern": PATTERN},
        LkvError,
        "'knorm' does not use a pattern",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), CACHES, ids=range(len(CACHES)))
def test_caches_name_what_is_wrong(model, options, error, message):
    with pytest.raises(error, match=message):
        RaggedCache(model, **options)


def test_what_a_filled_cache_refuses(model):
    cache = RaggedCache(model, method="knorm", retention=0.5)
    model(torch.full((1, 40), 9), past_key_values=cache, use_cache=True)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(CacheError, match="repeats is"):
            cache.batch_repeat_interleave(wrong)
    with pytest.raises(CacheError, match=r"torch\.float64, but the model now computes in torch\.float32"):
        model.float()(torch.full((1, 3), 9), past_key_values=cache, use_cache=True)


def test_policies_by_name(model, policy, tmp_path):
    policy.save_pretrained(tmp_path / "run" / "policy")
    assert load_policy(tmp_path / "run").digest() == load_policy(str(tmp_path / "run" / "policy")).digest()
    assert load_policy(DEFAULT).spec.architecture == "LlamaForCausalLM"
    by_name = compress(model, Words(), TEXT, retention=0.4, policy=str(tmp_path / "run"))
    assert by_name.metadata == compress(model, Words(), TEXT, retention=0.4, policy=policy).metadata


@pytest.mark.parametrize("name", ["own er/x", "a/b/c", "nowhere", "/", "x\ud800/y", "\0"])
def test_names_that_are_no_policy_are_named(name):
    with pytest.raises(LkvError):
        load_policy(name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "MODEL"], "looks like a model, not like a policy"),
        (["inspect", "bok.txt"], "there is no file or folder 'bok.txt'"),
        (["inspect", "--question", "who?"], "without a text (none was given) does not read --question; give a file"),
        (["inspect", "--method", "knorm", "--against", "tova"], "does not read --method, --against; give a file"),
        (["inspect", DEFAULT, "--max-new-tokens", "3"], f"({DEFAULT!r} is not a text file) does not read"),
        (["inspect", DEFAULT, "--policy", DEFAULT], f"{DEFAULT!r} and --policy both name a policy; leave one"),
        (["inspect", "TEXT", "--against", "tova"], "a page without --question does not read --against; leave"),
        (["inspect", "TEXT", "--policy", DEFAULT, "--method", "knorm"], "'knorm' takes no --policy; leave it out"),
        (["ask", "TEXT", "who?", "--policy", DEFAULT, "--method", "snapkv"], "'snapkv' takes no --policy; leave it"),
        (["profile", "--memory", "0.1", "--out", "x.json"], "does not read --memory; use --memory-limit, or add --dry"),
        (["profile", "--dry-run", "--out", "x.json", "--seed", "1"], "--dry-run does not read --seed, --out; leave"),
        (["report", "--profile", "x.json", "--table", "sweep", "--retention", "0.1"], "read --table, --retention;"),
        (["report", "--training", "x", "--weights", "--methods", "lkv"], "does not read --methods, --weights; leave"),
        (["report", "--profile", "x", "--weights"], "without --figure does not read --weights; name the figure's file"),
        (["report", "x.jsonl", "--weights"], "a table of scores does not read --weights; leave"),
        (["inspect", "--model", "MODEL"], "there is no policy for this model (LlamaForCausalLM"),
        (["inspect", DEFAULT, "--model", "MODEL"], f"but '{DEFAULT}' is given too; leave one"),
        (["inspect", "--policy-revision", "v1"], "--policy-revision without --policy"),
        (["ask", "book.txt", "who?", "--no-strict"], "--no-strict without --policy"),
        (["eval", "ruler", "--no-strict", "--policy-revision", "v1", "--out", "x"], "revision without --policy"),
        (["profile", "--policy-revision", "v1", "--out", "x.json"], "--policy-revision without --policy"),
        (["eval", "longbench", "--haystack", "x", "--lengths", "9", "--seed", "1", "--out", "x"],
         "longbench does not read --haystack, --seed; leave"),
        (["eval", "ruler", "--methods", "snapkv", "full", "--policy", DEFAULT, "--out", "x"],
         "'snapkv' and 'full' take no --policy; leave it out"),
        (["eval", "ruler", "--methods", "knorm", "--pattern", "TEXT", "--out", "x"], "duo does not read --pattern;"),
        (["eval", "ruler", "--methods", "knorm", "--pattern-by", "kvpress", "--out", "x"], "not read --pattern-by;"),
        (["eval", "ruler", "--methods", "duo", "--pattern", "TSV", "--pattern-by", "kvpress", "--out", "x"],
         "--pattern with a .tsv file does not read --pattern-by; leave"),
        (["inspect", "owner/policy", "--revision", "v1"], "a policy does not read --revision; use --policy-revision"),
        (["inspect", "--revision", "v1"], "a policy does not read --revision; use --policy-revision, or give --model"),
        (["profile", "--policy", DEFAULT, "--methods", "full", "snapkv", "--out", "x.json"],
         "'full' and 'snapkv' take no --policy; leave it out"),
        (["profile", "--config", "llama-3.1-8b", "--revision", "v1", "--out", "x.json"], "does not read --revision;"),
        (["profile", "--config", "llama-3.1-8b", "--revision", "v1", "--dry-run"], "does not read --revision; leave"),
        (["report", "x.jsonl", "--table", "ablation", "--against", "lkv"], "ablation does not read --against; leave"),
        (["data", "build", "--words", "9", "--share", "0.2", "--out", "x"], "does not read --words, --share; leave"),
        (["policies", "--model", "no/such/model"], "no model could be loaded from 'no/such/model'"),
        (["serve", "--no-strict"], "--no-strict without --policy"),
        (["serve", "--method", "duo"], "'duo' needs a pattern of retrieval heads, which this command does not take"),
        (["serve", "--method", "snapvk"], "there is no method 'snapvk'"),
    ],
)  # fmt: skip
def test_what_would_be_dropped_is_refused(model_folder, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (text := tmp_path / "text.txt").write_text("words " * 50)
    (heads := tmp_path / "heads.tsv").write_text("0.5\t0.5")
    files = {"MODEL": model_folder, "TEXT": text, "TSV": heads}
    assert message in refused(capsys, [files.get(word, word) for word in words])


CHANGED_CONFIGS = {
    "other sizes": {"hidden_size": 64},
    "unknown rope": {"rope_parameters": {"rope_type": "spiral"}},
    "remote code": {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own", "AutoConfig": "own.C"}},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("damage", ["truncated", "pickled", "no tokenizer", *CHANGED_CONFIGS])
def test_models_that_cannot_be_loaded_are_named(model_folder, tmp_path, capsys, damage):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    weights, config = folder / "model.safetensors", folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | CHANGED_CONFIGS.get(damage, {})))
    (folder / "own.py").write_text("raise SystemExit('executed')")
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "pickled":
        weights.unlink()
        torch.save({}, folder / "pytorch_model.bin")
    elif damage == "no tokenizer":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink(missing_ok=True)
    (tmp_path / "text.txt").write_text("words " * 50)
    ask = ["ask", tmp_path / "text.txt", "why?", "--model", folder, "--method", "knorm"]
    message = refused(capsys, ask)
    assert "no model could be loaded from" in message
    assert ("it has code of its own, which LKV never runs; give a model whose" in message) == (damage == "remote code")


def test_an_embedded_model_that_cannot_be_written_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("words " * 50)
    monkeypatch.setenv("LKV_CACHE", str(tmp_path / "text.txt"))
    assert "name another folder in LKV_CACHE" in refused(capsys, ["ask", tmp_path / "text.txt", "why?"])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("out", ["mine/out", "x" * 300 + ".json", "folder"])
def test_results_that_cannot_be_written_are_named(tmp_path, capsys, out):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "folder").mkdir()
    path = tmp_path / out
    with pytest.raises(LkvError, match="cannot be written to"):
        write_results(path, "name", [], 0)
    files = write(tmp_path / "a.jsonl", many())
    assert "cannot be written to" in refused(capsys, ["report", files, "--out", path])
    picture = path / "below.png" if out == "mine/out" else path.with_suffix(".png") if "x" in out else None
    if picture:
        assert "cannot be written to" in refused(capsys, ["report", files, "--figure", picture])
    with pytest.raises(LkvError), open_journal(path, {}):
        pass
    with pytest.raises(LkvError):
        SampleJournal(path, {})
    assert "no/such" not in refused(capsys, ["eval", "ruler", "--model", "no/such", "--out", path])
    assert (tmp_path / "mine").read_text() == "mine" and not list(tmp_path.rglob("*.tmp"))


HEADER = {"methods": ["lkv"], "retentions": [0.15], "policies": {"lkv": "a"}}
NO_LINES = ['{"key": []}', '{"key": {}}', "[" * 100_000, '{"key": 3}', "[]", "\ud800"]
OTHER_ROWS = [3, None, {}, "lkv", [3], [{}], [{"method": "lkv"}]]
JOURNALS = [
    *(("{}", line, "is not a JSON object|is neither a header nor a sample|is not text") for line in NO_LINES),
    *(
        ("{}", json.dumps({"key": "a", name: rows}), "the sample 'a' of .* has rows of another kind")
        for name in ("rows", "skipped")
        for rows in OTHER_ROWS
    ),
    *(
        (json.dumps(HEADER | change), "", f"samples of other settings .{next(iter(change))}")
        for change in ({"methods": 3}, {"retentions": None}, {"policies": ["lkv"]}, {"seed": 1, "methods": [["lkv"]]})
    ),
    ("{}", '{"key": "a", "answer": 1e999}', "hold numbers that JSON does not have"),
]


@pytest.mark.parametrize(("header", "line", "message"), JOURNALS, ids=range(len(JOURNALS)))
def test_damaged_journals_are_named(tmp_path, header, line, message):
    path = tmp_path / "out.jsonl"
    path.write_bytes(f"{header}\n{line}\n".encode(errors="surrogatepass"))
    with pytest.raises(DataError, match=message):
        SampleJournal(path, HEADER if line == "" else {})
    if line in NO_LINES and line != '{"key": 3}':
        with pytest.raises(LkvError), open_journal(path, {}):
            pass


def test_half_characters_in_an_answer_are_kept(tmp_path):
    journal = SampleJournal(tmp_path / "out.jsonl", {})
    journal.add({"key": "a", "answer": "é\ud800"})
    journal.add({"key": "b", "answer": "é"})
    assert SampleJournal(tmp_path / "out.jsonl", {}).done["a"]["answer"] == "é\ud800"
    assert "é" in (tmp_path / "out.jsonl").read_text()


def test_benchmark_files_that_hold_no_text_are_named(tmp_path):
    (tmp_path / "hotpotqa.jsonl").write_text("[" * 100_000)
    with pytest.raises(LkvError, match=r"line 1: not a JSON object"):
        load_examples("hotpotqa", tmp_path)


@pytest.mark.parametrize(
    ("header", "change"),
    [({"versions": None}, {}), ({"versions": [1]}, {}), ({"methods": 3}, {}), ({}, {"length": 1e400}),
     ({}, {"rows": 3}), ({}, {"rows": [[]]}), ({}, {"number": "x"})],
)  # fmt: skip
def test_result_files_that_are_none_are_named(tmp_path, capsys, header, change):
    lines = many()
    refused(capsys, ["report", write(tmp_path / "a.jsonl", [lines[0] | change, *lines[1:]], **header)])
    (tmp_path / "profile.json").write_text("[" * 100_000)
    refused(capsys, ["report", "--profile", tmp_path / "profile.json"])


@pytest.mark.parametrize("field", ["score", "realised", "retention", "kl"])
def test_numbers_without_end_are_named(tmp_path, capsys, field):
    lines = many()
    lines[0]["rows"][0][field] = 12345.678
    path = write(tmp_path / "a.jsonl", lines)
    text = path.read_text()
    for number in ("1" + "0" * 400, "Infinity", "NaN"):
        path.write_text(text.replace("12345.678", number))
        refused(capsys, ["report", path])


@contextmanager
def files_of_at_most(size: int):
    """As a full disk: the system itself takes no file beyond `size` bytes in the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_the_disk_has_no_room_for_leaves_the_old_file(model, policy, tmp_path, capsys):
    results, table = write(tmp_path / "a.jsonl", many()), tmp_path / "table.md"
    context, saved = compress(model, Words(), TEXT, method="knorm", retention=0.4), tmp_path / "context.kv"
    context.save(saved)
    policy.save_pretrained(tmp_path / "policy")
    table.write_text("mine")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    bigger = compress(model, Words(), TEXT, method="knorm", retention=0.9)
    with files_of_at_most(500):
        assert f"cannot be written to {table} (File too large)" in refused(capsys, ["report", results, "--out", table])
        for work in (
            lambda: bigger.save(saved),
            lambda: policy.save_pretrained(tmp_path / "policy"),
            lambda: write_results(tmp_path / "out.json", "rows", [{"value": "x" * 600}], 0),
        ):
            with pytest.raises(LkvError, match=r"cannot be written to .* \(File too large\)"):
                work()
        with pytest.raises(LkvError, match="takes no more samples"):
            SampleJournal(tmp_path / "out.jsonl", {}).add({"key": "a", "text": "x" * 600})
    assert {path: path.read_bytes() for path in files} == files and not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_missing_accelerate_is_named_before_anything_is_loaded(monkeypatch, tmp_path, capsys, command):
    monkeypatch.setattr("lkv.utils.extras.find_spec", lambda name: None if name == "accelerate" else 1)
    rest = ["--data", tmp_path] if command == "train" else ["ruler"]
    said = refused(capsys, [command, *rest, "--model", "no/such", "--out", tmp_path / "out"])
    assert "needs accelerate, which is not installed; run `pip install " in said
    assert not (tmp_path / "out").exists()


HAYSTACKS = {"an empty file": b"", "an empty folder": None, "zip": b"PK\x03\x04" + bytes(100), "JSON": b"{}"}


@pytest.mark.parametrize("how", HAYSTACKS)
def test_haystacks_without_text_are_named(model_folder, tmp_path, capsys, how):
    path, content = tmp_path / ("haystack.json" if how == "JSON" else "haystack"), HAYSTACKS[how]
    path.mkdir() if content is None else path.write_bytes(content)
    command = ["eval", "ruler", "--tasks", "niah_single_2", "--data", tmp_path, "--haystack", path, "--samples", "1"]
    command += ["--methods", "knorm", "--model", model_folder, "--lengths", "400", "--out", tmp_path / "out.jsonl"]
    expected = {"zip": "cannot be read as text (it holds NUL characters", "JSON": "field 'text' is missing"}
    assert expected.get(how, "has no text to hide needles in") in refused(capsys, command)
