"""vLLM on a CPU, with small random models: `make test-vllm` runs these tests in an environment of their own."""

import os
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
# Before vLLM is imported: engines in this process, offline, on any cores.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)
# Without Triton vLLM takes its first model runner.
if find_spec("vllm") and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    from tests.vllm import triton_cpu

    triton_cpu.install()


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A Llama with its policy and engines of it."""
    from tests.vllm.lab import Lab

    return Lab(tmp_path_factory.mktemp("lab"), "Llama")
