"""What is built is whole: the wheel carries its data and types, the sdist what its tests need."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import lkv
from dev import release
from lkv.errors import MissingPackageError
from lkv.utils.extras import install_command, require

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
        "lkv/training/data/texts.json",
    } <= files
    assert {
        f"lkv/policy/checkpoints/smollm2-135m-instruct/{name}" for name in ("config.json", "policy.safetensors")
    } <= files
    assert all(name.startswith(("lkv/", "lkv_cache-")) for name in files)
    assert about["Version"] == lkv.__version__ == "".join(re.findall(r"lkv_cache-([^-]+)-", path.name))
    assert f"Source, {ADDRESS}" in about.get_all("Project-URL")


def test_one_sentence_names_all_that_is_missing(monkeypatch):
    for name in ("accelerate", "rouge", "wonderwords"):
        monkeypatch.setitem(sys.modules, name, None)
    expected = (
        "RULER needs accelerate, wonderwords and rouge, which are not installed; run `pip install -e '.[evals]'`."
    )
    with pytest.raises(MissingPackageError, match=f"^{re.escape(expected)}$"):
        require("evals", "RULER")


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (None, "lkv-cache[serve]"),  # from a package index
        ({"url": "{folder}/my%20lkv", "dir_info": {}}, "{path}/my lkv[serve]"),
        (
            {"url": "{folder}/lkv_cache-0-py3-none-any.whl", "archive_info": {}},
            "{path}/lkv_cache-0-py3-none-any.whl[serve]",
        ),
        ({"url": "{folder}", "dir_info": {}}, ".[serve]"),  # the working directory
        ({"url": "{folder}/removed", "dir_info": {}}, ".[serve]"),
        (
            {"url": "https://example.org/lkv", "vcs_info": {"vcs": "git", "commit_id": "0"}},
            "lkv-cache[serve] @ git+https://example.org/lkv",
        ),
        ({"url": "https://example.org/lkv.zip", "archive_info": {}}, "lkv-cache[serve] @ https://example.org/lkv.zip"),
    ],
)
def test_extras_are_installed_from_where_lkv_comes(tmp_path, monkeypatch, origin, requirement):
    info = tmp_path / "site" / "lkv_cache-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lkv-cache\nVersion: 0\n")
    if origin:
        url = origin["url"].format(folder=tmp_path.as_uri())
        (info / "direct_url.json").write_text(json.dumps(origin | {"url": url}))
    (tmp_path / "my lkv").mkdir()
    (tmp_path / "lkv_cache-0-py3-none-any.whl").touch()
    monkeypatch.syspath_prepend(info.parent)
    monkeypatch.setattr("lkv.utils.extras.__file__", str(info.parent / "lkv" / "utils" / "extras.py"))
    monkeypatch.chdir(tmp_path)
    assert install_command("serve") == f"pip install '{requirement.format(path=tmp_path)}'"


def test_extras_of_a_checkout_are_installed_from_it(tmp_path, monkeypatch):
    assert install_command("serve") == "pip install -e '.[serve]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("serve") == f"pip install -e '{ROOT}[serve]'"


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
