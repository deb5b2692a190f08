"""Python runs this at the start of each process of a server whose PYTHONPATH has this folder (`servers.py`)."""

import sys
from importlib.abc import MetaPathFinder


class Imports(MetaPathFinder):
    """Does what `triton_cpu.install` does, as soon as a process imports vLLM and its second runner."""

    def find_spec(self, name, path=None, target=None):
        """Called before a module is imported; finds none."""
        if name == "vllm":
            from tests.vllm.triton_cpu import add_backend

            add_backend()
        elif name == "vllm.v1.worker.gpu.model_runner":
            from tests.vllm.triton_cpu import register_kernels

            sys.meta_path.remove(self)
            register_kernels()
            print("this process takes the second model runner", file=sys.stderr, flush=True)


sys.meta_path.insert(0, Imports())
