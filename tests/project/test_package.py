"""What is built is whole: the wheel carries its data and types, the sdist what its tests need."""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import lkv
from dev import check_install, release
from lkv.policy.policy import Policy
from lkv.policy.shipped import shipped_policies
from tests.commands import parse_arguments

ROOT = Path(__file__).parents[2]
ADDRESS = "https://example.org/owner/lkv"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist of a release, built from a copy: building writes beside the sources."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("built")
    source = release.copied(folder / "source")
    release.prepare(source, ADDRESS, lkv.__version__)
    release.build(source, folder)
    return folder


def test_the_wheel_has_its_data_its_types_and_nothing_else(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        files = set(wheel.namelist())
        (info,) = (name for name in files if name.endswith("METADATA"))
        about = Parser().parsestr(wheel.read(info).decode())
    assert {
        "lkv/py.typed",
        "lkv/evaluation/longbench.json",
        "lkv/evaluation/ruler.json",
        "lkv/training/data/public_datasets.json",
        "lkv/training/data/texts.json",
    } <= files
    assert {
        f"lkv/policy/checkpoints/smollm2-135m-instruct/{name}" for name in ("config.json", "policy.safetensors")
    } <= files
    assert all(name.startswith(("lkv/", "lkv_cache-")) for name in files)
    assert about["Version"] == lkv.__version__ == "".join(re.findall(r"lkv_cache-([^-]+)-", path.name))
    assert f"Source, {ADDRESS}" in about.get_all("Project-URL")


def test_commands_of_the_check_of_extras_are_there(capsys):
    commands = [command for features in check_install.FEATURES.values() for command in features]
    own = [command[1:] for command in commands if command[0] == "lkv" and command[1:] != ["--version"]]
    programs = [command[2:] for command in commands if command[2:3] == ["experiments.data"]]
    assert len(own) > 8 and programs
    for words in [*own, *([words[0].partition(".")[2], *words[1:]] for words in programs)]:
        parse_arguments(words)  # ends the test where argparse finds a mistake


def test_links_of_a_release_lead_to_its_tag_and_its_files_are_there(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        (info,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
        page = Parser().parsestr(wheel.read(info).decode()).get_payload()
    targets = re.findall(r"\]\(([^)]+)\)", page)
    own = [target for target in targets if target.startswith(ADDRESS)]
    assert own and all(target.startswith(("https://", "#")) for target in targets)
    for target in own:
        kind, tag, file = target.removeprefix(f"{ADDRESS}/").split("/", 2)
        assert kind in ("blob", "raw") and tag == f"v{lkv.__version__}"
        assert (ROOT / file.split("#")[0]).exists(), f"the README links to {file}, which is not there"
    text = "![a](x/p.png) and [b](y.md#z), [c](https://d) and [e](#f)"
    assert release.absolute(text, ADDRESS, "v1") == (
        f"![a]({ADDRESS}/raw/v1/x/p.png) and [b]({ADDRESS}/blob/v1/y.md#z), [c](https://d) and [e](#f)"
    )


def test_a_release_has_what_the_hub_shows_with_the_project_s_address(tmp_path):
    release.collect(ROOT, ADDRESS, tmp_path)
    release.write_sums(tmp_path, "abc")
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(shipped_policies()) >= 3
    assert {"space/app.py", "space/lighthouse.txt", "custom_generate/README.md", "quickstart.ipynb"} <= files
    for shipped in shipped_policies():
        name = shipped.name
        assert {f"policies/{name}/{file}" for file in ("config.json", "policy.safetensors", "README.md")} <= files
        card = ModelCard.load(tmp_path / "policies" / name / "README.md")
        assert card.data.library_name == "lkv" and f"lkv-policies/{name}" in card.text
        assert Policy.from_pretrained(tmp_path / "policies" / name).spec == shipped.spec
    for path in (tmp_path / "quickstart.ipynb", tmp_path / "space" / "requirements.txt"):
        assert "OWNER/NAME" not in path.read_text() and f"git+{ADDRESS}" in path.read_text()
    first, *lines = (tmp_path / "SHA256SUMS").read_text().splitlines()
    assert first == "# revision abc" and {line.split("  ")[1] for line in lines} == files - {"SHA256SUMS"}
    shown = hashlib.sha256((tmp_path / "space" / "app.py").read_bytes()).hexdigest()
    assert f"{shown}  space/app.py" in lines


def test_the_changelog_starts_with_the_version():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest and newest[1] == lkv.__version__


@pytest.mark.slow
def test_tests_of_the_sdist_run_from_the_sdist(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        sdist.extractall(built / "unpacked", filter="data")
    (root,) = (built / "unpacked").iterdir()
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    for words in (
        ["--collect-only"],
        [
            "tests/kernels/test_soft_topk.py",
            "tests/policy/test_policy.py",
            "tests/experiments/report/test_tables.py",
        ],
    ):
        done = subprocess.run([*pytest_, *words], cwd=root, env=env, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    printed = subprocess.run(
        [sys.executable, "-c", "import lkv; print(lkv.__file__)"], cwd=root, env=env, capture_output=True, text=True
    )
    assert str(root) in printed.stdout
