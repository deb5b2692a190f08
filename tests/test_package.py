"""What is built is whole: the wheel carries its data and types, the sdist what its tests need."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import lkv
from lkv.errors import MissingPackageError
from lkv.extras import EXTRAS, require

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".*", "*.egg-info", "__pycache__", "runs-local", "demo-output", "build", "dist")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist, built from a copy: building writes beside the sources."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*LEFT_OUT))
    for kind in ("build_sdist", "build_wheel"):
        command = [sys.executable, "-c", BUILD, kind, str(folder)]
        subprocess.run(command, cwd=folder / "source", check=True, capture_output=True, timeout=300)
    return folder


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=;\[ ]", requirement)[0] for requirement in requirements}


def test_the_wheel_has_its_data_its_types_and_nothing_else(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        files = set(wheel.namelist())
        (info,) = (name for name in files if name.endswith("METADATA"))
        about = Parser().parsestr(wheel.read(info).decode())
    assert {"lkv/py.typed", "lkv/report/published.json", "lkv/evals/longbench.json"} <= files
    assert {f"lkv/policies/smollm2-135m-instruct/{name}" for name in ("config.json", "policy.safetensors")} <= files
    assert all(name.startswith(("lkv/", "lkv_cache-")) for name in files)
    assert about["Version"] == lkv.__version__ == "".join(re.findall(r"lkv_cache-([^-]+)-", path.name))
    assert set(EXTRAS) <= set(about.get_all("Provides-Extra"))


def test_extras_name_the_packages_that_pyproject_installs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        assert names(extras[extra]) == set(packages), extra


def test_one_sentence_names_all_that_is_missing(monkeypatch):
    for name in ("accelerate", "rouge", "wonderwords"):
        monkeypatch.setitem(sys.modules, name, None)
    expected = (
        "RULER needs accelerate, wonderwords and rouge, which are not installed; run `pip install 'lkv-cache[evals]'`."
    )
    with pytest.raises(MissingPackageError, match=f"^{re.escape(expected)}$"):
        require("evals", "RULER")


def test_the_changelog_knows_the_version():
    assert f"## {lkv.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_tests_of_the_sdist_run_from_the_sdist(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        sdist.extractall(built / "unpacked", filter="data")
    (root,) = (built / "unpacked").iterdir()
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    for words in (["--collect-only"], ["tests/test_soft_topk.py", "tests/test_policy.py", "tests/test_report.py"]):
        done = subprocess.run([*pytest_, *words], cwd=root, env=env, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert (
            f"{root}"
            in subprocess.run(
                [sys.executable, "-c", "import lkv; print(lkv.__file__)"],
                cwd=root,
                env=env,
                capture_output=True,
                text=True,
            ).stdout
        )
