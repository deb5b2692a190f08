"""`lkv serve --engine vllm`: the command that starts vLLM's server."""

import json

import pytest
from vllm.utils.cpu_resource_utils import MemoryNodeInfo

from lkv.cli.serve import Serve
from lkv.errors import LkvError
from lkv.integrations.vllm.command import server_command

DEFAULTS = {name: field.default for name, field in Serve.model_fields.items()}


def test_options_become_those_of_vllm(tmp_path):
    options = DEFAULTS | {
        "model": str(tmp_path), "name": "tiny", "store": "s3://bucket", "retention": 0.2, "dtype": "float32",
        "vllm_args": "--max-model-len 512 --chat-template 'a b'",
    }  # fmt: skip
    arguments, environment = server_command(options, "sesame")
    assert arguments[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert arguments[-4:] == ["--max-model-len", "512", "--chat-template", "a b"]
    given = dict(zip(arguments[3:-4:2], arguments[4:-4:2], strict=True))
    assert given["--shutdown-timeout"] == "30"
    assert given["--model"] == str(tmp_path) and given["--served-model-name"] == "tiny"
    settings = json.loads(given["--additional-config"])["lkv"]
    assert (settings["store"], settings["retention"], settings["method"]) == ("s3://bucket", 0.2, "lkv")
    assert environment["VLLM_API_KEY"] == "sesame" and "sesame" not in " ".join(arguments)


@pytest.mark.parametrize(
    ("vllm_args", "free", "share"),
    [
        ("", 18, ["0.39"]), ("", 0.1, ["0.01"]), ("--enforce-eager", 23, ["0.5"]),
        ("--gpu-memory-utilization 0.7", 18, ["0.7"]), ("--kv_cache_memory_bytes=4G", 18, []),
    ],
)  # fmt: skip
def test_on_a_cpu_vllm_gets_half_of_the_free_memory(monkeypatch, tmp_path, vllm_args, free, share):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    memory = MemoryNodeInfo(total_memory=23 * 2**30, available_memory=int(free * 2**30))
    monkeypatch.setattr("vllm.utils.cpu_resource_utils.get_memory_node_info", lambda node: memory)
    options = DEFAULTS | {"model": str(tmp_path), "vllm_args": vllm_args}
    arguments, _ = server_command(options, None)
    places = [place for place, word in enumerate(arguments) if word == "--gpu-memory-utilization"]
    assert [arguments[place + 1] for place in places] == share
    assert arguments[len(arguments) - len(vllm_args.split()) :] == vllm_args.split()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"model": "some/model.gguf"}, r"vLLM does not read some/model\.gguf"),
        ({"vllm_args": "--enforce-eager --host=0.0.0.0"}, "--vllm-args holds --host"),
        ({"vllm_args": "--additional_config '{}'"}, "--vllm-args holds --additional-config"),
        ({"vllm_args": "--chat-template 'a b"}, "--vllm-args cannot be split into words .No closing quotation"),
    ],
)
def test_options_that_do_not_go_with_vllm_are_named(options, match):
    with pytest.raises(LkvError, match=match):
        server_command(DEFAULTS | options, None)
