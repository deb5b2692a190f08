"""What contexts inside vLLM refuse, each in one sentence, and the engine goes on."""

import copy
import json
import resource
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.sampling_params import BeamSearchParams

from lkv.context.compression import compress as compress_with_transformers
from lkv.context.context import Context
from lkv.errors import LkvError, StoreError
from lkv.integrations.vllm import adapter
from lkv.integrations.vllm import worker as worker_hooks
from lkv.integrations.vllm.contexts import VllmContexts, unsupported_reason
from lkv.integrations.vllm.requests import compress
from lkv.integrations.vllm.worker import install_runners
from lkv.policy.policy import Policy
from lkv.serving.inputs import CompressionSettings
from lkv.serving.store import ContextStore
from lkv.serving.stored_context import StoredContext
from tests.vllm.lab import RETENTION, Lab, ask, asked, forget


def refused(llm, error, match, ids, extra, **options):
    """The request is refused with that message, and the engine answers the next one."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 4, "extra_args": extra} | options)
    with pytest.raises(error, match=match):
        llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    assert len(ask(llm, [5, 6, 7], None, 2)) == 2


def test_bad_input_is_refused_and_the_engine_lives(lab):
    llm, ids = lab.shared, [5, 6, 7]
    name = compress(llm, lab.text(11))
    with pytest.raises(VLLMValidationError, match="cache_salt is 'lkv_other'; write 'lkv_context:ID' to ask"):
        llm.generate({"prompt_token_ids": ids, "cache_salt": "lkv_other"}, asked(None, 4), use_tqdm=False)
    refused(llm, VLLMNotFoundError, "no context 'none'", ids, {"lkv_context": "none"})
    refused(llm, VLLMValidationError, "give the id of a context", ids, {"lkv_context": 3})
    refused(llm, VLLMValidationError, "one of them", ids, {"lkv_context": name, "lkv_compress": "x"})
    refused(llm, VLLMValidationError, "has the key 'lkv_contxt', which is not known", ids, {"lkv_contxt": name})
    refused(llm, VLLMValidationError, "lkv_compress: ", ids, {"lkv_compress": "x"}, max_tokens=1)
    forged = {"id": name, "retention": 0.4, "sha256": "0" * 64, "name": ""}
    refused(llm, VLLMValidationError, "alone", ids, {"lkv_compress": json.dumps(forged)}, max_tokens=1)
    refused(llm, VLLMValidationError, "max_tokens=1", ids, {"lkv_compress": "{}"})
    tokens = lab.context(lab.text(11)).tokens
    most = 2048 + 1 - tokens - 1000
    refused(llm, VLLMValidationError, f"at most {most} new", [5] * 1000, {"lkv_context": name}, max_tokens=most + 1)
    with pytest.raises(Exception, match="nothing of it would be kept"):
        compress(llm, "ab", retention=0.01)
    with pytest.raises(Exception, match="reads at most 2048"):
        compress(llm, lab.text(12, 2048))
    (lab.store / f"{name}.kv").rename(lab.store / "away")
    name2 = compress(llm, lab.text(13))
    data = bytearray((lab.store / f"{name2}.kv").read_bytes())
    data[-1] ^= 1
    (lab.store / f"{name2}.kv").write_bytes(data)
    refused(llm, VLLMValidationError, "damaged", ids, {"lkv_context": name2})
    # A damaged context is made anew.
    assert compress(llm, lab.text(13)) == name2
    assert ask(llm, ids, name2) == lab.answer(lab.context(lab.text(13)), ids, 16)


def test_a_description_of_another_length_is_refused(lab):
    """Positions beyond the model's would be read from memory that is not the model's."""
    llm, ids, text = lab.shared, [5, 6, 7], lab.text(21)
    name = compress(llm, text)
    path = lab.store / f"{name}.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {"tokens": -(10**6)}))
    refused(llm, VLLMValidationError, "is not the one described", ids, {"lkv_context": name})
    path.write_text(json.dumps(about))
    # The file itself is replaced after a request was checked: by a longer one.
    lab.context(lab.text(22, 1500)).save(lab.store / "longer")
    llm.llm_engine.add_request("replaced", {"prompt_token_ids": ids}, asked(name, 600))
    (lab.store / "longer").replace(lab.store / f"{name}.kv")
    forget(llm)
    assert [ended_with(output) for output in finish(llm)] == [("error", [])]
    assert len(ask(llm, ids, None, 4)) == 4


def test_contexts_of_another_model_and_policy_are_refused(lab, tmp_path):
    llm, ids = lab.shared, [5, 6, 7]
    name = compress(llm, lab.text(14))
    other = Lab(tmp_path, "Qwen3")
    other.context(lab.text(14)).save(lab.store / f"{name}.kv")
    refused(llm, VLLMValidationError, "saved by a model with", ids, {"lkv_context": name})
    torch.manual_seed(9)
    lab_policy, lab.policy = lab.policy, type(lab.policy)(lab.policy.spec)
    lab.context(lab.text(14)).save(lab.store / f"{name}.kv")
    lab.policy = lab_policy
    refused(llm, VLLMValidationError, "another policy", ids, {"lkv_context": name})


def put(lab, number, context):
    """Store a context of `lkv.compress`, as `lkv serve` does; returns its id."""
    name = f"{context.metadata['text_sha256'][:32]}-{number:016x}"
    settings = CompressionSettings("lkv", RETENTION, lab.policy.digest(), "", "")
    ContextStore(str(lab.store), lab.model, lab.tokenizer, lab.policy.digest(), 0).put(
        StoredContext.describe(name, "", context, settings), context
    )
    return name


def test_a_question_longer_than_the_positions_is_refused(lab):
    context = lab.context(lab.text(23, 1500))
    name = put(lab, 1, context)
    fitting = [5] * (2048 - context.tokens)
    assert ask(lab.shared, fitting, name, 1) == lab.answer(context, fitting, 1)
    refused(lab.shared, VLLMValidationError, "shorten the question", [*fitting, 5], {"lkv_context": name}, max_tokens=1)
    search = BeamSearchParams(beam_width=2, max_tokens=3)
    with pytest.raises(VLLMValidationError, match="shorten the question"):
        lab.shared.beam_search([{"prompt_token_ids": fitting, "cache_salt": f"lkv_context:{name}"}], search)
    assert len(ask(lab.shared, [5, 6, 7], name, 4)) == 4


def test_a_context_of_another_dtype_is_read_in_the_models(lab):
    model = copy.deepcopy(lab.model).bfloat16()
    context = compress_with_transformers(model, lab.tokenizer, lab.text(24), retention=RETENTION, policy=lab.policy)
    name = put(lab, 2, context)
    read = Context.load(lab.store / f"{name}.kv", lab.model, lab.tokenizer)
    assert ask(lab.shared, [5, 6, 7], name) == lab.answer(read, [5, 6, 7], 16)


def test_a_full_store_is_reported(lab):
    put(lab, 3, lab.context(lab.text(25)))
    with lab.engine({"max_store": 0.0001}) as llm, pytest.raises(Exception, match="the store is full"):
        compress(llm, lab.text(15, 400))


def test_a_full_disk_is_reported(lab):
    llm = lab.shared
    name, files = compress(llm, lab.text(15)), sorted(lab.store.iterdir())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # the system takes no larger file
    try:
        with pytest.raises(StoreError, match=r"cannot be written \(File too large\); free some space"):
            compress(llm, lab.text(16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(lab.store.iterdir()) == files
    assert ask(llm, [5, 6, 7], name, 4) == lab.answer(lab.context(lab.text(15)), [5, 6, 7], 4)
    assert ask(llm, [5, 6, 7], compress(llm, lab.text(16))) == lab.answer(lab.context(lab.text(16)), [5, 6, 7], 16)


def finish(llm):
    """The outputs of all requests, once they have ended."""
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += [output for output in llm.llm_engine.step() if output.finished]
    return outputs


def ended_with(output):
    """Why a request ended, and its answer."""
    return output.outputs[0].finish_reason, list(output.outputs[0].token_ids)


def test_a_context_that_is_lost_while_a_request_waits_leaves_no_pages(lab):
    """Pages computed without it would be found by the next question about it, whose answer would look right."""
    llm, text = lab.shared, lab.text(17)
    name, context = compress(llm, text), lab.context(text)
    ids, other = lab.tokenizer(lab.text(18, 300))["input_ids"], lab.tokenizer(lab.text(19, 20))["input_ids"]
    right = lab.answer(context, ids[:130], 4)
    assert ask(llm, ids[:130], name, 4) == right  # its pages are right, and stay
    for number, prompt, about in (("lost", ids, name), ("first", ids[:280], name), ("none", ids, None)):
        llm.llm_engine.add_request(number, {"prompt_token_ids": prompt}, asked(about, 4))
    files = [lab.store / f"{name}.{suffix}" for suffix in ("json", "kv")]
    for file in files:
        file.rename(file.with_suffix(".away" + file.suffix))
    forget(llm)
    ended = {output.request_id: ended_with(output) for output in finish(llm)}
    assert ended == {"lost": ("error", []), "first": ("error", []), "none": ("length", lab.answer(None, ids, 4))}
    for file in files:
        file.with_suffix(".away" + file.suffix).rename(file)
    for question in (ids, ids[:130] + other):
        (output,) = llm.generate({"prompt_token_ids": question}, asked(name, 8), use_tqdm=False)
        assert output.num_cached_tokens == 128
        assert ended_with(output) == ("length", lab.answer(context, question, 8))
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 3}}, "draft"),
        ({"enable_lora": True}, "LoRA"),
    ],
)
def test_what_does_not_go_with_contexts_is_refused(lab, options, match):
    with pytest.raises(LkvError, match=match):
        VllmContexts(lab.config(**options), torch.device("cpu"), 0)


@pytest.mark.parametrize(
    ("part", "name", "value", "match"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline and context parallelism"),
        ("parallel_config", "decode_context_parallel_size", 2, "pipeline and context parallelism"),
        ("parallel_config", "enable_dbo", True, "micro-batches"),
        ("parallel_config", "_api_process_count", 2, "start vLLM with --api-server-count 1"),
        ("model_config", "hf_overrides", {"rope_parameters": {"rope_theta": 5.0}}, "configuration is overridden"),
        ("model_config", "hf_overrides", lambda config: config, "configuration is overridden"),
        ("model_config", "hf_config_path", "elsewhere", "configuration is overridden"),
        ("cache_config", "cache_dtype", "fp8", "KV cache is quantised"),
        ("cache_config", "sliding_window", 4096, "sliding-window layers"),
        ("scheduler_config", "scheduler_cls", "my.Scheduler", "a scheduler of its own"),
    ],
)
def test_what_contexts_do_not_follow_is_refused(lab, part, name, value, match):
    config = lab.config()
    assert unsupported_reason(config) is None
    setattr(getattr(config, part), name, value)
    assert match in unsupported_reason(config)


def test_longrope_beyond_its_change_is_refused(lab):
    """vLLM then takes the long factors at all positions."""
    config = lab.config()
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 1024}
    config.model_config.hf_text_config.rope_parameters = rope
    assert unsupported_reason(config) is None
    # Context, question and answer together end there: the context was rotated for a shorter text.
    assert VllmContexts(config, torch.device("cpu"), 0).max_positions == 1024
    rope["original_max_position_embeddings"] = 1023
    assert "start vLLM with --max-model-len 1023 or less" in unsupported_reason(config)


def test_memory_of_contexts_is_taken_from_that_of_pages(lab):
    config = lab.config({"contexts_memory": 3.0})
    worker = SimpleNamespace(vllm_config=config)
    for size, extra, left in (
        (None, config.additional_config, 7),
        (2**30, config.additional_config, 10),
        (None, {}, 10),
    ):
        config.cache_config.kv_cache_memory_bytes, config.additional_config = size, extra
        assert worker_hooks._determine_available_memory(lambda _: 10 * 2**20, worker) == left * 2**20


def test_a_policy_of_another_model_is_refused(lab, tmp_path):
    Policy(replace(lab.policy.spec, layers=2)).save_pretrained(tmp_path)
    with pytest.raises(LkvError, match="layers"):
        VllmContexts(lab.config({"policy": str(tmp_path)}), torch.device("cpu"), 0)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"method": "snapkv", "policy": None}, "reads queries"),
        ({"method": "knorm"}, "takes no lkv.policy"),
        ({"method": "full"}, "only compressed"),
        ({"retentoin": 0.1}, "retentoin"),
        ({"policy": "/nowhere"}, "no policy folder"),
    ],
)
def test_settings_that_do_not_fit_are_named(lab, settings, match):
    with pytest.raises(LkvError, match=match):
        VllmContexts(lab.config(settings), torch.device("cpu"), 0)


def test_a_request_is_refused_where_contexts_cannot_be_used(lab):
    with lab.engine({"method": "snapkv", "policy": None}) as llm:
        refused(llm, VLLMValidationError, "reads queries", [5, 6, 7], {"lkv_context": "any"})


def test_a_vllm_that_does_not_fit_is_left_alone(monkeypatch):
    from vllm.v1.engine.input_processor import InputProcessor

    monkeypatch.setattr(InputProcessor, "process_inputs", lambda self, other: None)
    lines = []
    monkeypatch.setattr(adapter._LOG, "warning", lambda line, *args: lines.append(line % args))
    adapter.register()
    assert len(lines) == 1 and "Unsupported vLLM version" in lines[0] and "has no parameter" in lines[0]
    assert not hasattr(InputProcessor.process_inputs, "_lkv_hooked")


def test_a_runner_that_does_not_fit_is_named(monkeypatch):
    """Else a pass would run without the context."""
    from vllm.v1.worker.gpu.model_states.interface import ModelState

    monkeypatch.setattr(ModelState, "prepare_inputs", lambda self, batch: {})
    with pytest.raises(AttributeError, match=r"ModelState\.prepare_inputs has no parameter "):
        install_runners()
