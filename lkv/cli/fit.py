"""lkv fit: a policy for any model in minutes."""

from pathlib import Path

from lkv.cli.command import option
from lkv.cli.options import GPU_DEVICE, Dtype, RunOptions


class Fit(RunOptions):
    """Make a policy for a model in minutes."""

    model: str | None = option(
        "folder, GGUF file or Hub id of the model (default: embedded SmolLM2-135M)",
        positional=True,
        nargs="?",
        metavar="[MODEL]",
    )
    data: Path | None = option(
        "folder of your documents: .txt, .md, code, .jsonl, .html, .pdf; texts that come with Python and LKV are added"
    )
    against: tuple[Path, ...] = option(
        "files that you will evaluate on: documents that overlap with them are left out", (), metavar="FILE"
    )
    minutes: float = option("how long it may take", 10.0, gt=0)
    out: Path | None = option("folder for the policy (default: in the cache, where it is found for this model)")
    dtype: Dtype | None = option("dtype of the model (default: the faster one of float32 and bfloat16)")
    device: str | None = GPU_DEVICE

    def run(self) -> None:
        """Load the model and fit a policy, or continue where an earlier call was interrupted."""
        import torch

        from lkv.hf.loading import load_model
        from lkv.training import fitting
        from lkv.training.datasets import open_texts
        from lkv.utils.devices import faster_dtype, find_device, torch_dtype
        from lkv.utils.progress import ProgressBar

        started = fitting.clock()
        device = find_device(self.device) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        texts = open_texts((), self.data, self.against)  # reports invalid texts before the model is loaded
        dtype = torch_dtype(self.dtype) or faster_dtype(device)
        with ProgressBar.without_total(f"loading {self.model_name}"):
            model, tokenizer = load_model(self.model_name, dtype, self.revision, device)
        fitting.fit_to(texts, model, tokenizer, self.minutes, self.out, self.model_name, started)
