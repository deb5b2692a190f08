"""Everything that a release publishes, built from a copy with the project's addresses:

* the sdist and the wheel, whose README has absolute links;
* `space/`, `custom_generate/` and `policies/NAME/`, a repository of the Hub each, and the notebook;
* `SHA256SUMS` of all of it, headed by the revision.

    python dev/release.py REPOSITORY_URL [OUT]        (make release REPOSITORY=https://...)

A page that shows the README elsewhere (an index) cannot follow links relative to the repository.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LEFT_OUT = (".*", "*.egg-info", "__pycache__", "runs-local", "demo-output", "build", "dist", "site")
_DESCRIPTION = "DESCRIPTION.md"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")
_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def absolute(text: str, repository: str, revision: str) -> str:
    """Markdown with every relative link made one to `repository` at `revision`; pictures to the file itself."""

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found[1] else "blob"
        return f"{found[1]}[{found[2]}]({repository}/{kind}/{revision}/{found[3].removeprefix('./')})"

    return _LINK.sub(link, text)


def urls(repository: str, revision: str) -> str:
    """The table of addresses for pyproject.toml."""
    files = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
    lines = [f'{name} = "{repository}/blob/{revision}/{path}"' for name, path in files.items()]
    return "\n".join(["[project.urls]", f'Source = "{repository}"', f'Issues = "{repository}/issues"', *lines]) + "\n"


def prepare(source: Path, repository: str, version: str) -> None:
    """Write addresses, and a description with absolute links, into the copy `source`; its README stays as it is."""
    text, project = (source / "README.md").read_text("utf-8"), source / "pyproject.toml"
    (source / _DESCRIPTION).write_text(absolute(text, repository, f"v{version}"), "utf-8")
    settings = project.read_text("utf-8").replace('readme = "README.md"', f'readme = "{_DESCRIPTION}"')
    project.write_text(f"{settings}\n{urls(repository, f'v{version}')}", "utf-8")


def copied(source: Path) -> Path:
    """The repository's files in the new folder `source`."""
    return Path(shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*_LEFT_OUT)))


def build(source: Path, out: Path) -> list[str]:
    """Build both from `source` into `out`; returns their names."""
    out.mkdir(parents=True, exist_ok=True)
    steps = [
        subprocess.run([sys.executable, "-c", _BUILD, kind, str(out.resolve())], cwd=source, check=True, text=True,
                       stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for kind in ("build_sdist", "build_wheel")
    ]  # fmt: skip
    return [run.stdout.split()[-1] for run in steps]


def collect(source: Path, repository: str, out: Path) -> None:
    """Write the repositories of the Hub and the notebook into `out`, with the address of the project."""
    from lkv.policy.hub import model_card
    from lkv.policy.policy import Policy
    from lkv.policy.shipped import shipped_policies

    examples = source / "examples"
    for name in ("space", "custom_generate"):
        shutil.copytree(examples / name, out / name, dirs_exist_ok=True)
    shutil.copy(examples / "lighthouse.txt", out / "space")
    shutil.copy(examples / "quickstart.ipynb", out)
    for shipped in shipped_policies():
        policy, folder = Policy.from_pretrained(shipped.folder), out / "policies" / shipped.name
        policy.save_pretrained(folder, half=True)
        model_card(policy, f"lkv-policies/{shipped.name}").save(folder / "README.md")
    place = repository.removeprefix("https://github.com/")
    for path in (out / "space" / "requirements.txt", out / "quickstart.ipynb"):
        text = path.read_text("utf-8")
        path.write_text(text.replace("https://github.com/OWNER/NAME", repository).replace("OWNER/NAME", place), "utf-8")


def write_sums(out: Path, revision: str) -> None:
    """Write the SHA-256 of every file in `out`, as `sha256sum --check` reads them."""
    paths = sorted(path for path in out.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(out).as_posix()}" for path in paths]
    (out / "SHA256SUMS").write_text("\n".join([f"# revision {revision}", *lines]) + "\n", "utf-8")


def main() -> None:
    if len(sys.argv) < 2 or not sys.argv[1].startswith("https://"):
        sys.exit("give the repository's address: python dev/release.py https://HOST/OWNER/NAME [OUT]")
    repository, out = sys.argv[1].rstrip("/"), Path(sys.argv[2] if sys.argv[2:] else "dist")
    version = re.findall(r'__version__ = "(.+)"', (ROOT / "lkv" / "version.py").read_text("utf-8"))[0]
    with tempfile.TemporaryDirectory() as folder:
        source = copied(Path(folder) / "source")
        prepare(source, repository, version)
        build(source, out)
        collect(source, repository, out)
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    write_sums(out, revision or "unknown")
    print("\n".join(sorted(str(path) for path in out.iterdir())))


if __name__ == "__main__":
    main()
