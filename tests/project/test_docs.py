"""What the pages show works as written: every code block of README and docs that can run is run, on a tiny model.

A block behind a comment `<!-- not run: why -->` is not; `<!-- needs: package -->` leaves it out where that is missing.
Blocks of one page share their names, as a reader's session would. Blocks followed by a `text` block are also run with
the demo model, and their output is compared.
"""

import contextlib
import importlib.util
import io
import json
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import lkv.hf.loading
import lkv.policy.shipped
from experiments.report.figures import method_styles
from experiments.report.names import method_label
from lkv.cache.ragged_cache import RaggedCache
from lkv.cli.main import COMMANDS
from lkv.hf.attention import patch_attention
from lkv.hf.conversion import _DONE, _VERSION
from lkv.methods import registry
from lkv.methods.registry import METHODS, budgets, parse_method, selectors
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from tests.commands import PROGRAMS, main, parse_arguments
from tests.conftest import save_model, tiny_llama

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MORE_PAGES = [
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md")),
    *(ROOT / "experiments" / f"{folder}README.md" for folder in ("", "runs/", "results/small/")),
]
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>not run|needs): (?P<reason>[^>]*?) -->\n)?```(?P<kind>python|sh)\n(?P<code>.*?)```"
    r"(?:\n\n```text\n(?P<shown>.*?)```)?",
    re.DOTALL,
)
_TIMES = re.compile(r"in [\d.]+ s \([\d,]+ tokens/s\)")
_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a: {% endif %}"
)


def name_of(page: Path) -> str:
    """The page's name in the names of tests."""
    return str(page.relative_to(ROOT))


def found_blocks(page: Path) -> list[re.Match]:
    """The blocks of a page that are not marked as not run, nor need a package that is missing."""
    found = _BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [
        block
        for block in found
        if block["mark"] is None
        or (block["mark"] == "needs" and importlib.util.find_spec(block["reason"].strip()) is not None)
    ]


def blocks(page: Path, language: str) -> list[str]:
    """The code of a page that is to be run here."""
    return [block["code"] for block in found_blocks(page) if block["kind"] == language]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A folder such as a reader has: a text, and the demo model and its policy, tiny."""
    path = tmp_path_factory.mktemp("reader")
    model_folder = save_model(path / "cache" / lkv.hf.loading.DEFAULT, max_position_embeddings=4096)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(model_folder)
    status = {file.name: file.stat() for file in model_folder.iterdir()}
    files = {name: {"size": own.st_size, "mtime_ns": own.st_mtime_ns, "sha256": ""} for name, own in status.items()}
    (model_folder / _DONE).write_text(json.dumps({"version": _VERSION, "files": files}))
    (path / "HuggingFaceTB").mkdir()
    (path / "HuggingFaceTB" / "SmolLM2-135M-Instruct").symlink_to(model_folder)
    model, _ = lkv.hf.loading.load_model(str(model_folder), torch.float32)
    torch.manual_seed(1)
    policy = Policy(patch_attention(model).spec, {"trained_tokens": 4096}, ScorerInputs(key="unrotated"))
    policy.save_pretrained(path / "policies" / lkv.hf.loading.DEFAULT)
    (path / "examples").mkdir()
    for name in ("README.md", "examples/lighthouse.txt"):
        (path / name).write_text("The harbour of Old Quay was built by Ada Brooks in the year of the great storm. " * 8)
    return path


@pytest.fixture
def session(reader, own_registry, monkeypatch):
    """As if the reader's shell were open in that folder; what a page registers goes when its test ends."""
    monkeypatch.chdir(reader)
    monkeypatch.setenv("LKV_CACHE", str(reader / "cache"))
    monkeypatch.setattr(lkv.policy.shipped, "_POLICIES", reader / "policies")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
@pytest.mark.filterwarnings("ignore:unclosed file")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_python_runs_as_it_stands(page, session):
    names: dict = {}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), names)


def commands(page: Path) -> list[list[str]]:
    lines = [line for code in blocks(page, "sh") for line in code.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("lkv ")]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_commands_run_as_they_stand(page, session, capsys, monkeypatch):
    for words in commands(page):
        assert words[0] != "serve", "a server does not end: mark the block as not run"
        assert main(words) == 0, f"lkv {shlex.join(words)}: {capsys.readouterr().err}"


def test_messages_that_fail_are_those_of_the_code():
    """Of every message in the table of troubles, what is not a name or number stands in the code."""
    code = "\n".join(
        path.read_text() for part in ("lkv", "experiments") for path in sorted((ROOT / part).rglob("*.py"))
    )
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # texts over several lines
    page = (ROOT / "docs" / "reference.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    parts = [re.split(r"\.\.\.|'[^']*'|\b\d[\d.,]*\b|[()\[\]]", message) for message in messages]
    fixed = [part.strip(" :;,") for message in parts for part in message]
    assert len(messages) > 15 and [part for part in fixed if part not in code] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_that_is_shown_has_its_options(page, capsys):
    for block in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        kind, code = block["kind"], block["code"]
        # Commands of others may go over several lines.
        for line in (line for line in code.splitlines() if kind == "sh" and "lkv " in line):
            words = shlex.split(line, comments=True)
            if "lkv" in words and words[-1] != "...":
                given = words[words.index("lkv") + 1 :]
                if given and given[0] in COMMANDS:
                    parse_arguments(given)  # ends the test where argparse finds a mistake
        for line in (line for line in code.splitlines() if kind == "sh"):
            if program := re.match(rf"python -m experiments\.({'|'.join(PROGRAMS)}) ", line):
                parse_arguments([program[1], *shlex.split(line[program.end() :], comments=True)])


def test_the_notebook_runs_and_shows_what_it_says(reader, session, capsys, monkeypatch):
    """Its cells in this process, which has imported everything; the next test has a kernel for them."""
    pytest.importorskip("nbclient")
    import nbformat
    from IPython.core.inputtransformer2 import TransformerManager

    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code), "commit it without outputs"
    monkeypatch.chdir(reader / "examples")
    names: dict = {}
    for number, cell in enumerate(code):
        exec(compile(TransformerManager().transform_cell(cell.source), f"cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert re.search(r"tokens: \d+\.\d of \d+\.\d MB", printed) and "snapkv" in printed


@pytest.mark.slow
def test_the_notebook_finds_what_its_text_says(tmp_path):
    """With the demo model: the number, and the name also from the saved context."""
    pytest.importorskip("nbclient")
    import nbformat
    from nbclient import NotebookClient

    (tmp_path / "lighthouse.txt").write_bytes((ROOT / "examples" / "lighthouse.txt").read_bytes())
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    assert printed.count("is 5308.") == 4 and printed.count("Ingrid Solberg") == 2
    assert "1703 tokens: 3.9 of 78.5 MB" in printed


def test_every_method_is_named_and_no_file_that_is_not_there():
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for name in (*METHODS, *budgets(), *selectors()):
        assert f"`{name}`" in text, f"docs/methods.md does not name {name}"
    packages = "cache|kernels|methods|policy|training|evaluation|integrations"
    for page in [*PAGES, *MORE_PAGES]:
        text = page.read_text(encoding="utf-8")
        paths = re.findall(r"`((?:lkv|tests|examples|dev|experiments)/[\w/]+(?:\.\w+)?/?)`", text)
        if page.name == "CONTRIBUTING.md":
            paths += [f"lkv/{path}" for path in re.findall(rf"`((?:{packages})/[\w/]*(?:\.py)?)`", text)]
        for path in set(paths) - {"experiments/NAME.py", "experiments/results/NAME.json"}:
            assert (ROOT / path).exists(), f"{page.name} names {path}, which is not there"


@pytest.mark.parametrize("page", [*PAGES, *MORE_PAGES], ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {slug(title) for title in titles}, f"{page.name}: no section {target}"


def slug(title: str) -> str:
    """The anchor that forges and mkdocs make of a title."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def test_the_selector_of_the_page_works_everywhere(own_registry, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(code, {})
    assert method_label("lkv-h+large-values") == "Large values, LKV-H budgets"
    assert method_styles(["uniform+large-values"])
    assert "values of large norm" not in parse_method("snapkv").description
    assert parse_method("pyramid+large-values").budget == "pyramid"
    assert main(["methods"]) == 0
    model = tiny_llama()
    cache = RaggedCache(model, retention=0.5, method="uniform+large-values")
    model(torch.arange(3, 23)[None], past_key_values=cache, use_cache=True)
    assert cache.realised_retention() == 0.5


@pytest.mark.parametrize("amount", [{"memory": 0.1}, {"memory": 0.15}, {"retention": 0.2}, {"retention": 0.4}])
def test_the_budget_of_the_methods_page_follows_its_target(own_registry, amount):
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.search(r"`my_methods.py`:\n\n```python\n(.*?)```", page, re.DOTALL)[1], names)
    names["register"]()
    model = tiny_llama(num_hidden_layers=4)
    ids = torch.randint(3, 67, (1, 500), generator=torch.Generator().manual_seed(0))
    own, uniform = (RaggedCache(model, method=name, **amount) for name in ("lower-layers", "uniform+large-values"))
    for cache in (own, uniform):
        model(ids, past_key_values=cache, use_cache=True)
    assert own.nbytes() == pytest.approx(uniform.nbytes(), rel=0.02)
    lower, upper = (sum(own.kept_counts()[layer]) for layer in (0, 3))
    assert lower == pytest.approx(3 * upper, rel=0.03)


def test_the_package_of_the_methods_page_is_found(tmp_path, own_registry, monkeypatch, capsys):
    """Its files as they are shown, installed as pip would: the command line lists the method."""
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    code, config = (
        re.search(rf"```{kind}\n(.*?)```", page[page.index("`my_methods.py`:") :], re.DOTALL)[1]
        for kind in ("python", "toml")
    )
    project = tomllib.loads(config)
    (module,) = project["tool"]["setuptools"]["py-modules"]
    (tmp_path / f"{module}.py").write_text(code)
    info = tmp_path / "my_methods-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['project']['name']}\nVersion: 0.1\n")
    points = project["project"]["entry-points"]["lkv.methods"]
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[lkv.methods]", *lines, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    registry._load_plugins.cache_clear()
    try:
        assert main(["methods"]) == 0
    finally:
        registry._load_plugins.cache_clear()
        sys.modules.pop(module, None)
    listed = capsys.readouterr().out
    assert re.search(r"^ *large-values +.*values of large norm", listed, re.MULTILINE)
    assert re.search(r"^ *lower-layers +.*lower layers keep three times as much", listed, re.MULTILINE)


def printed(block: re.Match, names: dict) -> str:
    """What a block prints; `lkv` commands to stderr too."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if block["kind"] == "python":
            exec(compile(block["code"], "page", "exec"), names)
            return out.getvalue()
        with contextlib.redirect_stderr(out):
            for line in block["code"].splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["lkv"]:
                    assert main(words[1:]) == 0, out.getvalue()
    return out.getvalue()


def without_times(text: str) -> str:
    """The lines without times, progress (on a terminal a bar, which goes) and empty lines."""
    lines = [
        line for line in text.splitlines() if line.strip() and not line.startswith(("Loading weights", "[reading"))
    ]
    return "\n".join(_TIMES.sub("in ...", line) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block["shown"] for block in found_blocks(page))], ids=name_of
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_pages_show_what_is_printed(page, tmp_path, monkeypatch, own_registry):
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "lighthouse.txt", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    found, names = found_blocks(page), dict[str, Any]()
    last = max(number for number, block in enumerate(found) if block["shown"])
    for block in found[: last + 1]:
        if block["kind"] == "python" or block["shown"]:
            output = printed(block, names)
            assert not block["shown"] or without_times(output) == without_times(block["shown"]), block["code"]
