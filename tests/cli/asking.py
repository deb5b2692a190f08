"""What `lkv ask` is asked in the tests, and the answers that the library itself gives."""

from lkv.context.compression import compress
from lkv.hf.loading import load_model

TEXT = "The lamp of the lighthouse was lit at dusk. " * 12


def read(folder, **amount):
    """The model, and the text as the library itself reads it, in a tenth of the memory by default."""
    model, tokenizer = load_model(str(folder / "model"))
    return model, compress(model, tokenizer, TEXT, method="knorm", **(amount or {"memory": 0.1}))


def answer(folder, question: str, **amount) -> str:
    return read(folder, **amount)[1].ask(question, 4)
