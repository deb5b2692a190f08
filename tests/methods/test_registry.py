"""The registry of methods: names, plugins, and what it can say without torch."""

import subprocess
import sys

import pytest

from lkv.cli.main import main
from lkv.errors import LkvError
from lkv.methods import registry
from lkv.methods.budgets import FixedBudget
from lkv.methods.registry import (
    METHODS,
    find_method,
    methods,
    parse_method,
    register_budget,
    register_method,
    register_selector,
)
from lkv.methods.selectors import Knorm, Selector
from tests.requests import resolve_method


def test_methods_are_iterated_while_a_plugin_adds_its_own(own_registry, monkeypatch):
    class Plugin:
        name, value = "mine", "package:register"

        def load(self):
            return lambda: registry.register_method("mine", lambda inputs: Knorm(), description="small keys")

    registry._load_plugins.cache_clear()
    monkeypatch.setattr(registry, "entry_points", lambda group: [Plugin()])
    seen = [name for name in methods() if not parse_method(name).needs_policy]
    assert "mine" in seen and "snapkv" in seen and "lkv" not in seen
    assert resolve_method("uniform+mine@x", retention=0.5).name == "uniform+mine@x"
    registry._load_plugins.cache_clear()


def test_one_decorated_class_adds_a_selector_and_one_a_budget(own_registry):
    @register_selector("first-keys", label="First keys", description="large first keys", index=3)
    class FirstKeys(Selector):
        reads_queries = True

        def __init__(self, index):
            self.index = index

        def scores(self, layer, prompt):
            return prompt.key[..., self.index]

    @register_budget("half", label="Half", description="half of the target")
    class Half(FixedBudget):
        required_inputs = ("target", "layers")

        def __init__(self, target, layers):
            self.target, self.layers = target, layers

        def ratios(self, layer, heads, tokens):
            return [self.target.share(tokens) / 2] * heads

    spec = parse_method("half+first-keys")
    assert spec.label == "First keys, Half budgets" and spec.needs == (registry.QUERIES,)
    with pytest.raises(LkvError, match="the method needs 'layers', which is missing; pass the model"):
        resolve_method("half+first-keys")
    assert resolve_method("uniform+first-keys").selector.index == 3
    with pytest.raises(LkvError, match="the name 'half' is taken"):
        register_budget("half", label="", description="")(Half)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("snapkv", "snapkv"),
        ("uniform+snapkv", "snapkv"),
        ("lkv-h+lkv-t+compensation@mine", "lkv+compensation"),
        ("duo+keydiff", "duo+keydiff"),
    ],
)
def test_names_of_one_method_have_one_canonical_name(name, canonical):
    spec = parse_method(name)
    assert (spec.name, spec.canonical) == (name, canonical)
    assert spec.label == parse_method(canonical).label + (" (mine)" if "@" in name else "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "there is no") for name in ("", "+", "snapkv+", "nobody's", "+compensation", "no+compensation")),
        ("lkv+compensation+compensation", "there is no"), (None, "the method is None"), (3, "the method is 3; give"),
        ("ada", r"'ada' is a budget: write ada\+SELECTOR"), ("lkv@a+b", r"write METHOD\+compensation@NAME"),
        ("ada+critical-snapkv", "'critical-snapkv' ranks the tokens of each head separately"),
        ("ada+snap", r"there is no selector 'snap' for 'ada\+snap'; use one of .*snapkv"),
        ("full", "'full' keeps everything: use transformers' DynamicCache"),
        ("zzzzzz", "^there is no method 'zzzzzz'; `lkv methods` lists them all.$"),
        ("lkv@mine+compensation", r"write METHOD\+compensation@NAME"),
    ],
)  # fmt: skip
def test_names_of_no_method(name, message):
    assert find_method(name) is None
    with pytest.raises(LkvError, match=message):
        parse_method(name)


def test_typing_errors_load_no_torch():
    program = """
import sys
from lkv.cli.main import main
from lkv.errors import LkvError
from lkv.methods.registry import parse_method
for name, message in ("snapvk", "did you mean 'snapkv'"), ("ada", "'ada' is a budget: write ada+SELECTOR"):
    try:
        parse_method(name)
    except LkvError as error:
        assert message in str(error), error
    else:
        raise AssertionError(name)
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_the_list_names_methods_components_and_variants(capsys):
    assert main(["methods"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in (*METHODS, *registry.budgets(), *registry.selectors()))
    pairs = {(b, s) for b in registry.budgets() for s in registry.selectors() if not registry.find_method(f"{b}+{s}")}
    assert pairs == {
        (b, s) for b in ("ada", "global", "water-filling") for s in ("critical-expected", "critical-snapkv")
    }
    assert "compete (ada, global, water-filling) with those that rank each head by itself (critical-" in " ".join(
        listed.split()
    )
    descriptions = {name: spec.description for name, spec in METHODS.items()}
    assert all("with the exact budget" in descriptions[name] for name in ("pyramidkv", "duo"))
    assert "epsilon 0.01, as kvpress" in descriptions["adakv-expected-e2"] and "kvpress" not in descriptions["snapkv"]


def test_every_named_method_has_its_own_combination():
    assert len({(spec.budget, spec.selector) for spec in METHODS.values()}) == len(METHODS)


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("SnapKV", "'snapkv'"), ("SnapKVPress", "'snapkv'"), ("expected_attention", "'expected'"),
        ("ExpectedAttentionPress", "'expected'"), ("observed_attention", "'observed-attention'"),
        ("adakv", "'adakv-snapkv'"), ("adakv_expected_attention_e2", "'adakv-expected-e2'"),
        ("duo_attention", "'duo'"), ("StreamingLLMPress", "'streaming-llm'"),
        ("LKV-compensation", "'lkv+compensation'"),
    ],
)  # fmt: skip
def test_names_of_kvpress_and_capitals_get_the_one_method_that_is_meant(name, similar):
    with pytest.raises(LkvError) as error:
        parse_method(name)
    assert str(error.value) == f"there is no method {name!r}; did you mean {similar}? `lkv methods` lists them all."


def test_a_name_is_given_once_and_a_part_must_be_known(own_registry):
    with pytest.raises(LkvError, match="'snapkv' is taken"):
        register_method("snapkv", "knorm")
    with pytest.raises(LkvError, match=r"'my\+own' contains '\+' or '@'"):
        register_method("my+own", "knorm")
    with pytest.raises(LkvError, match="there is no selector 'nothing'"):
        register_method("mine", "nothing")
    with pytest.raises(LkvError, match="there is no selector 'nothing'"):
        register_method("mine", "nothing", lambda inputs: None)  # which leaves no budget behind
    assert "mine" not in registry.budgets()
    register_method("mine", "knorm", "pyramid", paper="Somebody 2026")
    description = parse_method("mine").description
    assert description.startswith("lower layers keep more") and "Somebody 2026" in description


def test_a_plugin_that_fails_is_named(monkeypatch):
    class Broken:
        name, value = "broken", "package:register"

        def load(self):
            raise RuntimeError("out of order")

    class Sound:
        name, value, calls = "sound", "other:register", 0

        def load(self):
            Sound.calls += 1

    monkeypatch.setattr(registry, "entry_points", lambda group: [Sound(), Broken()])
    registry._load_plugins.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(LkvError, match=r"'broken' \(package:register\) could not register its methods: out"):
                parse_method("lkv")
        assert Sound.calls == 1
    finally:
        registry._load_plugins.cache_clear()


def test_needs_that_nothing_is_are_refused():
    with pytest.raises(LkvError, match=r"needs has 'POLICY'; give constants of lkv.methods.registry, among POLICY"):
        registry.register_method("of-no-use", "knorm", needs=("POLICY",))
    assert "of-no-use" not in registry.METHODS
