"""Checks of tensors that all kernels share: invalid ones raise and are never read."""

import torch
from torch import Tensor


def check_tensor(name: str, x: Tensor, ndim: int) -> None:
    """Raise ValueError unless `x` is a dense tensor of `ndim` dimensions with a storage. Takes well under 1 us."""
    if x.ndim == ndim and x.layout is torch.strided and not x.is_neg() and x.data_ptr():
        return
    if x.ndim != ndim:
        raise ValueError(f"Expected {name} with {ndim} dimensions but got shape {list(x.shape)}.")
    if x.layout is not torch.strided:
        raise ValueError(f"Expected {name} to be a dense tensor but got layout {x.layout}: call .to_dense().")
    if x.is_neg():
        raise ValueError(f"{name} is a lazily negated view, which kernels cannot read: call .resolve_neg() first.")
    if x.numel():
        raise ValueError(
            f"{name} {list(x.shape)} on {x.device} has no storage: it is on 'meta', or its memory was freed."
        )


def check_storages(**tensors: Tensor) -> None:
    """Raise ValueError if part of a tensor lies outside of its storage, which may have been freed or shrunk.

    PyTorch's own operators do not check this. It takes about 1 us a tensor, so compiled backends check it themselves.
    """
    for name, x in tensors.items():
        if x.layout is not torch.strided:
            raise ValueError(f"Expected {name} to be a dense tensor but got layout {x.layout}: call .to_dense().")
        extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        available = x.untyped_storage().nbytes()
        if extent and (x.storage_offset() + extent) * x.itemsize > available:
            raise ValueError(
                f"The storage of {name} {list(x.shape)} has only {available} bytes: it was freed or shrunk."
            )


def check_devices(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors are on the device of the first."""
    first, like = next(iter(tensors.items()))
    for name, x in tensors.items():
        if x.device != like.device:
            raise ValueError(f"{name} is on {x.device}, but {first} is on {like.device}.")


def import_problem(name: str, error: Exception) -> str:
    """Return why the backend `name` cannot be imported, in one sentence.

    `error` is the exception of its import: a broken or incompatible package must not disable the other backends.
    """
    if isinstance(error, ImportError):
        return f"{error.name or name} cannot be imported ({error})."
    return f"{name} cannot be imported ({type(error).__name__}: {error})."
