"""Where the documents of each task are published, what may stand in for that, and the hashes that documents must have.

A hash is of the documents, not of files, so it is the same whatever the file format. See
[`dcformer.eval.origin.documents_hash`] for what is hashed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Source:
    """
    A place where a task's data are published.

    Attributes:
        path (`str`): Data set on the Hub, or another name if there is an address.
        name (`str`, *optional*): Configuration of the data set.
        revision (`str`, *optional*): Git revision that is always read; `None` for the newest.
        address (`str`, *optional*): Where the files lie, if not on the Hub.
        files: Split -> name of its file and the file's SHA-256, `None` if that is not known; empty for a data set that
            the library `datasets` reads.
    """

    path: str
    name: str | None = None
    revision: str | None = None
    address: str | None = None
    files: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.path if self.name is None else f"{self.path} ({self.name})"


AUTHORS_TEXTS_REVISION = "f908c732040aa446c909e14b08427cab713d832d"
LOGIQA_REVISION = "ff6c4cbca47627b3ac2da94a29fa28204a167b41"
# Every data set on the Hub that is a script has its rows there as files, made by the Hub.
_ROWS_OF_SCRIPTS = "refs/convert/parquet"

# By the name of a folder below `data_dir`.
SOURCES = {
    "lambada_openai": Source("EleutherAI/lambada_openai", "default"),
    "piqa": Source("baber/piqa"),
    "winogrande": Source("allenai/winogrande", "winogrande_xl"),
    "arc_easy": Source("allenai/ai2_arc", "ARC-Easy"),
    "arc_challenge": Source("allenai/ai2_arc", "ARC-Challenge"),
    "sciq": Source("allenai/sciq"),
    # On the Hub it is a script, which datasets >= 4 refuses; these are the authors' files that the script reads.
    "logiqa": Source(
        "lgw863/LogiQA-dataset",
        revision=LOGIQA_REVISION,
        address=f"https://raw.githubusercontent.com/lgw863/LogiQA-dataset/{LOGIQA_REVISION}",
        files={
            "train": ("Train.txt", "7d5bb1f58278e33b395744cd2ad8d7600faa0b3c4d615c659a44ec1181d759fa"),
            "test": ("Test.txt", "359acb78c37802208f7fde9e2f6574b8526527c63d6a336f90a53f1932cb4701"),
        },
    ),
    "boolq": Source("aps/super_glue", "boolq"),
    "hellaswag": Source("Rowan/hellaswag"),
    "race_middle": Source("ehovy/race", "middle"),
    "race_high": Source("ehovy/race", "high"),
    "synthetic": Source(
        "Caiyun-AI/DCFormer",
        revision=AUTHORS_TEXTS_REVISION,
        address=f"https://raw.githubusercontent.com/Caiyun-AI/DCFormer/{AUTHORS_TEXTS_REVISION}/data",
    ),
    # The Pile itself is no longer published. This is its own file, by the checksum that the harness had for it.
    "pile": Source(
        "mit-han-lab/pile-val-backup",
        revision="2f5e46ae6a69cf0dce4b12f78241c408936ca0e4",
        files={"validation": ("val.jsonl.zst", "264c875d8bbd355d8daa9d032b75fd8fb91606218bb84dd1155b203fcd5fab92")},
    ),
    # 350,023 examples drawn by others from the Flan Collection; the whole collection has hundreds of gigabytes.
    "flan": Source("itay1itzhak/flan_2022_350k"),
    "wikitext2": Source("Salesforce/wikitext", "wikitext-2-raw-v1"),
}

# Asked in this order if the source cannot be reached or has other documents; taken only with the hash that is known.
FALLBACKS = {
    # The file that the data set on the Hub was made of.
    "lambada_openai": (
        Source(
            "gpt-2/data of OpenAI",
            address="https://openaipublic.blob.core.windows.net/gpt-2/data",
            files={"test": ("lambada_test.jsonl", None)},
        ),
    ),
    "piqa": (Source("ybisk/piqa", "plain_text", revision=_ROWS_OF_SCRIPTS),),
    "logiqa": (Source("EleutherAI/logiqa", "logiqa", revision=_ROWS_OF_SCRIPTS),),
    "hellaswag": (
        Source(
            "rowanz/hellaswag",
            address="https://raw.githubusercontent.com/rowanz/hellaswag/master/data",
            files={"train": ("hellaswag_train.jsonl", None), "validation": ("hellaswag_val.jsonl", None)},
        ),
    ),
    "pile": (
        Source("EleutherAI/pile_val_test", files={"validation": ("val.jsonl", None)}),
        Source("monology/pile-test-val", files={"validation": ("val.jsonl.zst", None)}),
    ),
}

# Of the documents that are scored; of the authors' texts and WikiText-2 before any is left out. There is none of SciQ's
# test split, the Pile and Flan: no copy was at hand that it could be computed from.
DOCUMENT_HASHES = {
    "lambada_openai": "sha256:616012ef6a46007dadbffb48d660bc10b15c7278e52a4670655c906ee7c2a707",
    "piqa": "sha256:049348c2b78c9618ded9ae09d26c31746bc552e1179a05790184ba85f4b295b3",
    "winogrande": "sha256:1d245e406458fcdc268f48004844273bfb56e4efd9be8262314be80929a4a182",
    "arc_easy": "sha256:df85d314110fe7cf508b6758ef7d30693217302a3e36f9798246a803a4a61182",
    "arc_challenge": "sha256:fcb12d1a3b5995647fd32780d1624c1bcd5d58875765cb4277ef7e5b0901952b",
    "logiqa": "sha256:36405d9f1d4d0c29738dd391785a4f5f6e7c8536a3a8c836ac4035ca09bd4af4",
    "boolq": "sha256:acb67404eba02cbf022c5f788b4af7edef2eda245d2358a8a1442603ed6f9ae7",
    "hellaswag": "sha256:cb9a90df1f21aa13f8181f300af7a82fc48df583144054816d0138e34bb1dabf",
    "race_middle": "sha256:30764a97c2d79d94292d2cbdf12ceef3d9c96d859973f03cf4d301a202ead38a",
    "race_high": "sha256:f388ded960eb3b40be2b2954f10084b28f67e547be1f488c820980395c055327",
    "synthetic": "sha256:2be9204c4a537a7c7092c24840c4c96fe3f677a2ced2c6992fcf0694aa7c0e5d",
    "wikitext2": "sha256:febc31677600b469b041de8936b8213e27f4a73e3985aa2e63e549df007b578e",
}


def sources_of(column: str) -> tuple[Source, ...]:
    """The source of a folder's data and its fallbacks, in the order in which they are asked."""
    return (SOURCES[column], *FALLBACKS.get(column, ()))
