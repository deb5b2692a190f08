"""`lkv serve --engine vllm`: the command that starts vLLM's server."""

import json
from importlib import import_module

import pytest
from vllm.utils.cpu_resource_utils import MemoryNodeInfo

from lkv.errors import LkvError
from lkv.integrations.vllm.command import server_command
from lkv.integrations.vllm.http import split_name
from lkv.serving.settings import ServiceSettings


def command(model, dtype=None, key=None, **settings):
    return server_command(ServiceSettings(**settings), model, None, dtype, key)


def test_options_become_those_of_vllm(tmp_path):
    vllm_args = "--max-model-len 512 --chat-template 'a b'"
    arguments, environment = command(
        str(tmp_path), "float32", "sesame", name="tiny", store="s3://bucket", retention=0.2, vllm_args=vllm_args
    )
    assert arguments[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert arguments[-4:] == ["--max-model-len", "512", "--chat-template", "a b"]
    given = dict(zip(arguments[3:-4:2], arguments[4:-4:2], strict=True))
    assert given["--shutdown-timeout"] == "30"
    assert given["--model"] == str(tmp_path) and given["--served-model-name"] == "tiny"
    settings = json.loads(given["--additional-config"])["lkv"]
    assert settings == {"store": "s3://bucket", "retention": 0.2}
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
    arguments, _ = command(str(tmp_path), vllm_args=vllm_args)
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
        command(**{"model": None, **options})


@pytest.mark.parametrize("model", [".", "{folder}/"])
def test_a_folder_is_served_under_its_own_name(model, tmp_path, monkeypatch):
    (folder := tmp_path / "tiny").mkdir()
    monkeypatch.chdir(folder)
    arguments, _ = command(model.format(folder=folder))
    assert arguments[arguments.index("--served-model-name") + 1] == "tiny"


@pytest.mark.parametrize("schema", ["chat_completion:ChatCompletionRequest", "completion:CompletionRequest"])
def test_no_field_of_vllm_resembles_the_field_of_a_context(schema):
    module, _, name = schema.partition(":")
    fields = getattr(import_module(f"vllm.entrypoints.openai.{module}.protocol"), name).model_fields
    split_name(dict.fromkeys(fields), [])
