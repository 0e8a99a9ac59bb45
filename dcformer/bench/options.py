"""The options of the command, in words: those of `dcformer bench` and of `python -m dcformer.bench` are the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path


COMMANDS = {
    "attention": "the operator, forward and backward, against attention without composition and the authors' form",
    "decode": "tokens per second of decoding, as in Tables 6 and 10 of the paper",
    "train": "tokens per second of training, as in Tables 6 and 10 of the paper",
    "model": "the overhead of parameters and operations, as in Table 2 of the paper, and a forward pass",
}
HELP = {
    "what": "What to measure: " + "; ".join(f"{name} ({about})" for name, about in COMMANDS.items()) + ".",
    "device": "The device to measure, such as cuda, cuda:1 or cpu; a GPU if there is one unless given.",
    "dtype": "Number type of operands and parameters; bfloat16 on a GPU and float32 on a CPU unless given.",
    "quick": "Take tiny sizes, which show in seconds that everything runs, but not how fast it is.",
    "seconds": "Begin nothing new after so many seconds, and list what was not measured.",
    "json": "The file to write all figures to; a file named by the device unless given, in benchmarks/results if there "
    "is such a folder.",
    "plot": "The picture to draw, a .png, .svg or .pdf file; beside the JSON file unless given.",
    "compile": "Include what needs torch.compile; on a GPU that is so unless given, on a CPU it takes minutes.",
    "explain": "Print which form of attention is chosen for a shape, and why, instead of measuring anything.",
    "heads": "Query heads of the shape that is explained.",
    "key_value_heads": "Key and value heads of the shape that is explained; as many as query heads unless given.",
    "channels": "Channels of a head, of the shape that is explained.",
    "queries": "Number of queries of the shape that is explained.",
    "keys": "Number of keys of the shape that is explained; as many as queries unless given.",
    "window": "Sliding window of the shape that is explained; all keys unless given.",
    "gradient": "Explain the choice for training, which needs gradients.",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """
    What the command was asked for; what each option means stands in `HELP`.

    Raises:
        ValueError: if one of them has a value that makes no sense.
    """

    what: str | None = None
    device: str | None = None
    dtype: str | None = None
    quick: bool = False
    seconds: float = 300.0
    json: Path | None = None
    plot: Path | None = None
    compile: bool | None = None
    explain: bool = False
    heads: int = 32
    key_value_heads: int | None = None
    channels: int = 128
    queries: int = 4096
    keys: int | None = None
    window: int | None = None
    gradient: bool = False

    def __post_init__(self) -> None:
        if self.explain and self.what is not None:
            raise ValueError(f"--explain measures nothing; leave out {self.what!r}, or --explain.")
        if not self.explain and self.what not in COMMANDS:
            given = "nothing" if self.what is None else repr(self.what)
            raise ValueError(f"Say what to measure, one of {', '.join(COMMANDS)}, or give --explain; got {given}.")
        if not self.seconds > 0:
            raise ValueError(f"--seconds must be above 0, got {self.seconds:g}.")
        for name in ("heads", "key_value_heads", "channels", "queries", "keys", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
        if self.key_value_heads is not None and self.heads % self.key_value_heads != 0:
            raise ValueError(f"--key-value-heads must divide the {self.heads} heads, got {self.key_value_heads}.")
        if self.plot is not None and self.plot.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot must end in .png, .svg or .pdf, got {str(self.plot)!r}.")
