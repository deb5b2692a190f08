"""The structure: data flows one way, and transformers' internals are known in two files."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "lkv"
# A file imports only from those above it.
ORDER = [
    "errors", "files", "version", "config", "extras", "documents", "sampling", "methods.catalogue", "fingerprint",
    "shipped", "journal", "results", "statistics", "shapes", "prompts", "tensor_file", "context_file", "policy_file",
    "devices", "ops", "host", "prefill", "policy", "methods.budget", "methods.selection", "methods.refit",
    "methods.kvzip", "methods.build", "cache.quantization", "cache.ranking", "cache.tail", "cache.spans",
    "cache.quantized_spans", "cache.plan", "cache.rows", "cache.entries", "cache.eviction", "cache.unread",
    "cache.layer", "conversion",
    "models", "hub", "doctor", "cache.ids", "cache.windows", "cache.checks", "cache.ragged", "cache.shared", "answers",
    "saved_context", "context", "chat", "inspection", "training.data", "training.cost", "training.student",
    "training.distillation", "training.calibration", "training.warm_start", "training.schedule", "training.losses",
    "training.interruption", "training.checkpoint", "training.trainer", "training.placing", "training.pipeline",
    "evals", "profiling", "report", "integrations", "serving", "commands",
]  # fmt: skip


def imports(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


def files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py" and path != ROOT / "__main__.py")


def place_of(module: str) -> str:
    """What of ORDER a module below lkv belongs to: itself or its package."""
    parts = module.split(".")
    return next((name for n in (2, 1) if (name := ".".join(parts[:n])) in ORDER), module)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_every_file_has_its_place():
    assert {place_of(module_of(path)) for path in files()} == set(ORDER)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_upwards_only(path):
    place = place_of(module_of(path))
    for module in imports(path):
        if module.startswith("lkv."):
            other = place_of(module.removeprefix("lkv."))
            assert other == place or ORDER.index(other) < ORDER.index(place), f"{path.name} imports {module}"


def test_internals_of_transformers_stay_in_the_seam():
    public = {"transformers"}
    for path in files():
        inside = {module for module in imports(path) if module.split(".")[0] == "transformers"} - public
        assert not inside or path.parent.name == "host", f"{path.name} imports {inside}"


def test_other_libraries_of_eviction_stay_in_the_integrations():
    for path in files():
        known = {module.split(".")[0] for module in imports(path)}
        assert "kvpress" not in known or path.relative_to(ROOT).parts[0] == "integrations"


def test_backends_do_not_import_each_other():
    for path in ROOT.glob("ops/*/*.py"):
        if path.name not in ("api.py", "__init__.py"):
            package, backend = f"lkv.ops.{path.parent.name}", path.stem.partition("_")[0]
            allowed = {"lkv", "lkv.devices", f"{package}.codes", f"{package}.partial"}
            # A backend of several files names them all after itself.
            allowed |= {f"{package}.{part.stem}" for part in path.parent.glob(f"{backend}_*.py")}
            assert not [module for module in imports(path) if module.startswith("lkv") and module not in allowed]


def test_configuration_figures_results_and_report_need_no_torch():
    light = "config documents errors extras files fingerprint journal results shipped statistics version".split()
    for path in [
        *(ROOT / f"{name}.py" for name in light),
        *ROOT.glob("report/*.py"),
    ]:
        assert not {module.split(".")[0] for module in imports(path)} & {"torch", "transformers"}
