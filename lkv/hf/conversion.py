"""Convert GGUF files to folders of safetensors: once per file, and safe with concurrent processes.

transformers reads GGUF slowly, so the dequantised weights are cached. The conversion writes to a temporary folder under
a lock and renames it at the end: an interrupted conversion is never loaded, and a second process waits for the first.
"""

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
import transformers
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lkv.errors import ModelLoadError
from lkv.hf.gguf_settings import (
    AbsentSettingError,
    UnreadPartError,
    apply_settings,
    apply_tokenizer_settings,
    check_settings,
)
from lkv.utils.extras import require
from lkv.utils.files import file_digest

if TYPE_CHECKING:
    from gguf import GGUFReader

_DONE = "conversion.json"
_MAGIC = b"GGUF"
_VERSION = 4  # of the conversion; folders of other versions are converted again
_KEEPS_PACKED = hasattr(transformers, "GgufConfig")


def is_gguf(name: str | os.PathLike[str]) -> bool:
    """Return whether `name` names a GGUF file."""
    return Path(name).suffix.lower() == ".gguf"


def gguf_digest(path: Path) -> str:
    """Return the SHA-256 of a GGUF file. Raises ModelLoadError if it is missing or not a GGUF file."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ModelLoadError(f"{path} is not a GGUF file, though its name ends so; download it again.")
        return file_digest(path)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error.strerror}); give the path of a GGUF file.") from error


def convert_once(
    target: Path, source: Callable[[], AbstractContextManager[Path]], dtype: torch.dtype | None = None
) -> None:
    """Convert the GGUF file that `source` yields to the folder `target`, unless `target` is already complete.

    By default the dtype is the one of most weights in the file, or bfloat16 for quantised weights.

    Raises ModelLoadError if the file cannot be converted or the folder cannot be written, and MissingPackageError.
    """
    if is_complete(target):
        return
    require("gguf", f"converting {target.name} from GGUF")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            if not is_complete(target):
                for leftover in target.parent.glob(f".{target.name}.tmp-*"):  # from a killed process
                    shutil.rmtree(leftover, ignore_errors=True)
                with source() as file:
                    _convert(file, target, dtype)
    except PermissionError as error:
        raise ModelLoadError(
            f"{error.filename or target.parent} cannot be written: it belongs to another user or is "
            "read-only; name a folder of your own in the environment variable LKV_CACHE."
        ) from error
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(
            f"the converted model cannot be kept in {target.parent} ({error}); make room there, or name another folder "
            "in LKV_CACHE."
        ) from error


def is_complete(folder: Path) -> bool:
    """Return whether every file of the conversion exists unchanged."""
    try:
        record = json.loads((folder / _DONE).read_text(encoding="utf-8"))
        files = record["files"] if record.get("version") == _VERSION else {}
        return bool(files) and all(_is_unchanged(folder / name, record) for name, record in files.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return False


def _is_unchanged(path: Path, record: dict[str, Any]) -> bool:
    """Return whether a file matches its record; hashes the content only if it was modified since."""
    status = path.stat()
    is_touched = status.st_mtime_ns != record["mtime_ns"]
    return status.st_size == record["size"] and not (is_touched and file_digest(path) != record["sha256"])


def _locked(target: Path) -> AbstractContextManager[Any]:
    """Return the lock of one conversion; the operating system releases it whenever the process ends."""
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print(f"another process is converting {target.name}; waiting for it ...", file=sys.stderr)
        return lock.acquire()


def _convert(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    print(f"converting {source.name} to safetensors in {target} (once) ...", file=sys.stderr)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
    try:
        model, tokenizer = _read_gguf(source, dtype)
        size = sum(weight.nbytes for weight in model.parameters())
        print(f"the converted model takes {size / 1e6:,.0f} MB of disk", file=sys.stderr)
        _without_quantization(model).save_pretrained(work)
        tokenizer.save_pretrained(work)
        stats = {path: path.stat() for path in work.iterdir()}
        files = {
            path.name: {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": file_digest(path)}
            for path, stat in stats.items()
        }
        record = {"version": _VERSION, "source": source.name, "files": files}
        (work / _DONE).write_text(json.dumps(record), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        os.rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_layers(reader: "GGUFReader") -> None:
    """Raise ValueError for a GGUF file that declares more layers than it has tensors; the rest would be random."""
    declared = [field for name, field in reader.fields.items() if name.endswith(".block_count")]
    if declared and (layers := int(declared[0].parts[-1][0])) > (tensors := len(reader.tensors)):
        raise ValueError(f"it declares {layers:,} layers, but has {tensors:,} tensors")


def _stored_dtype(reader: "GGUFReader") -> torch.dtype:
    """Return the dtype of most weights in a GGUF file; bfloat16 for quantised weights."""
    sizes: Counter[str] = Counter()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    return {"F32": torch.float32, "F16": torch.float16}.get(max(sizes, key=sizes.__getitem__), torch.bfloat16)


def _read_gguf(source: Path, dtype: torch.dtype | None) -> tuple[Any, Any]:
    from gguf import GGUFReader

    options: dict[str, Any] = {"gguf_file": source.name, "trust_remote_code": False}
    # Newer versions keep weights packed if they have kernels for them.
    plain = {"quantization_config": transformers.GgufConfig(dequantize=True)} if _KEEPS_PACKED else {}
    try:
        reader = GGUFReader(source)
        _check_layers(reader)
        architecture = reader.fields["general.architecture"].contents()
    except Exception as error:  # damaged files can raise anything
        raise ModelLoadError(
            f"{source} cannot be converted ({_reason(error)}); it is damaged or not whole: download it again."
        ) from error
    try:
        dtype = dtype or _stored_dtype(reader)
        check_settings(reader)
        config = AutoConfig.from_pretrained(source.parent, **options)
        apply_settings(config, reader)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.parent, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True,
            **options, **plain,
        )  # fmt: skip
        model, report = loaded
        for name, shape, expected in report["mismatched_keys"]:
            raise ValueError(f"{name} has the shape {list(shape)} there, not {list(expected)}")
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
        apply_tokenizer_settings(tokenizer, reader)
        if not (missing := _missing_tensors(model, set(report["missing_keys"]))):
            _check_unread(reader, model, set(report["missing_keys"]))
    except AbsentSettingError as error:
        raise ModelLoadError(
            f"{source} lacks the setting {error}, without which it cannot be converted; download it again, or give the "
            "folder or hub id of the model itself."
        ) from error
    except UnreadPartError as error:
        raise ModelLoadError(
            f"{source} holds {error}, which transformers does not read from GGUF, so that the model would compute "
            "something else; give the folder or hub id of the model itself."
        ) from error
    except Exception as error:
        raise ModelLoadError(
            f"{source} cannot be converted: transformers does not read this model of the architecture {architecture!r} "
            f"from GGUF ({_reason(error)}); give the folder or hub id of the model itself, with its safetensors."
        ) from error
    if missing:
        raise ModelLoadError(
            f"{source} lacks {len(missing)} of the model's tensors ({min(missing)}, ...); give the whole model, not "
            "one part of it."
        )
    fields = [reader.get_field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eot", "eom")]
    add_end_tokens(model, [int(field.contents()) for field in fields if field is not None])
    return model, tokenizer


def _reason(error: Exception) -> str:
    return shorten(str(error), 160) or type(error).__name__


def _missing_tensors(model: PreTrainedModel, missing: set[str]) -> set[str]:
    """Zero the missing biases and return `missing` without them.

    The model class has biases in every projection even if the file has them only in some.
    """
    if not (getattr(model.config, "attention_bias", False) or getattr(model.config, "mlp_bias", False)):
        return missing
    biases = {name for name in missing if name.endswith(".bias")}
    for name in biases:
        torch.nn.init.zeros_(model.get_parameter(name))
    return missing - biases


def _check_unread(reader: Any, model: PreTrainedModel, missing: set[str]) -> None:
    """Raise UnreadPartError for a tensor of a GGUF file that `model` lacks; compares names and sizes.

    The file has none of the tensors `missing` of the model.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = reader.get_field("general.architecture").contents()
    architectures = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(architectures[architecture], model.config.get_text_config().num_hidden_layers)
    unread = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors if not tensor.name.startswith("rope_f")}
    # Tensors that transformers merges, such as experts, have other names: compare the number of values.
    joined: dict[int, int] = {}
    for name, weight in model.state_dict().items():
        if unread.pop(names.get_name(name, (".weight", ".bias")), None) is None and name not in missing:
            joined.setdefault(weight.data_ptr(), weight.numel())
        else:
            joined[weight.data_ptr()] = 0
    if sum(unread.values()) > sum(joined.values()):
        unknown = [name for name in unread if names.get_name(name, (".weight", ".bias")) is None]
        raise UnreadPartError([*unknown, *unread][0])


def add_end_tokens(model: PreTrainedModel, ids: list[int]) -> None:
    """Add the tokens `ids` to the end-of-sequence tokens of generation."""
    own = model.generation_config.eos_token_id
    own = [] if own is None else own if isinstance(own, list) else [own]
    ends = list(dict.fromkeys([*own, *ids]))
    model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends or None


def _without_quantization(model: Any) -> Any:
    """Return the same weights in a model not marked as quantised: transformers cannot save a marked one."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain
