"""The vLLM versions that the docs name have what the plugin uses: names, parameters, fields and the order of a pass."""

import json
from pathlib import Path

import pytest
import vllm

from lkv.integrations.vllm.worker import _STATE_METHODS
from tests.vllm.signatures import CALLS, FILE, NEEDED, read_signatures

RECORDED = json.loads(FILE.read_text())
INSTALLED = "installed"


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.33.0", INSTALLED])
def test_a_version_has_what_the_plugin_needs(version):
    found = read_signatures(Path(vllm.__file__).parent) if version == INSTALLED else RECORDED[version]
    for name, fields in NEEDED.items():
        assert name in found, name
        assert not set(fields) - set(found[name]), name
    state = "v1/worker/gpu/model_states/interface:ModelState"
    for method, fields in _STATE_METHODS.items():
        # Those of the plugin's own class are given by place.
        assert tuple(found[f"{state}.{method}"][: len(fields)]) == fields
    for backend in ("cpu_attn:CPUAttentionBackendImpl", "flash_attn:FlashAttentionImpl"):
        name = f"v1/attention/backends/{backend}.forward"
        assert tuple(found[name][:7]) == NEEDED[name]
    calls = found[CALLS]
    assert calls.index("preprocess_state") < calls.index("prepare_attn") < calls.index("prepare_inputs")


def test_the_record_is_that_of_the_installed_version():
    assert RECORDED[vllm.__version__.partition("+")[0]] == read_signatures(Path(vllm.__file__).parent)


def test_a_missing_name_is_found(tmp_path):
    for name in NEEDED | {CALLS: ()}:
        module = tmp_path / f"{name.partition(':')[0]}.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text("")
    (tmp_path / "v1/outputs.py").write_text("class ModelRunnerOutput:\n    sampled_token_ids: list\n    other: int\n")
    assert read_signatures(tmp_path) == {"v1/outputs:ModelRunnerOutput": ["sampled_token_ids"]}
