"""What CONTRIBUTING.md and docs/methods.md say of methods of one's own works as written."""

import re
import sys
import tomllib
from pathlib import Path

import torch

from experiments.report.figures import method_styles
from experiments.report.names import method_label
from lkv.cache.ragged_cache import RaggedCache
from lkv.cli.main import main
from lkv.methods import registry
from lkv.methods.registry import parse_method
from tests.conftest import tiny_llama

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"


def test_the_selector_of_the_page_works_everywhere(own_registry, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
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
    assert re.search(r"^ *large-values +.*values of large norm", capsys.readouterr().out, re.MULTILINE)


def test_files_named_on_the_page_are_there():
    root, text = PAGE.parent, PAGE.read_text(encoding="utf-8")
    packages = "cache|kernels|methods|policy|training|evaluation|integrations"
    names = re.findall(r"`((?:lkv|tests|docs|experiments)/[\w/]+(?:\.py|\.md|/))`", text)
    names += [f"lkv/{name}" for name in re.findall(rf"`((?:{packages})/[\w/]*(?:\.py)?)`", text)]
    assert len(names) > 40
    assert not [name for name in names if name != "experiments/NAME.py" and not (root / name).exists()]
