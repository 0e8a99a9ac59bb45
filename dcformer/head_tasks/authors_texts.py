r"""
Table 5 and Figure 6: the authors' texts of head tasks, as lm-evaluation-harness reads and scores them.

The data are 888 texts of 74 tasks. A text has eight lines, each an example of the same task, and the answers of lines 3
to 8 are in brackets:

    < Ruth has a sweater. Steven has a taxi. Ruth has a handgun. >. Ruth does not have a kind of [ vehicle ]

"Words in the bracket [] are compared", say the authors: the answer of line K + 1 is scored with the K lines before it
as examples, K from 2 to 7, which makes 5,328 answers. Each K is a task of its own here.

**What the model reads.** The brackets mark what is scored and are removed, with one of the two spaces they leave. In
the paper the answer is predicted at the word before it (section 4.3 and appendix G: from the destination token "of"),
Table 11 prints the texts without brackets, and lines 1 and 2, which are not scored, have none; with brackets left in,
the format would change between the second example and the third. All else is kept, also the line feed with which every
text begins. `brackets=True` leaves them in: the context then ends with "[".

**Where the answer begins.** The context ends with the last character before the space and the answer begins with the
space, since the GPT-NeoX tokenizer joins a space to the word after it. The tokens of context and answer are then, for
all 5,328, those of the whole text up to there, so none is merged across the boundary or changed by what follows.

**Scores.** The paper does not say how answers of several tokens (622 of 5,328, at most 5 tokens) count. All readings
are reported: `acc` (every token of the answer is the most probable one), `acc_first_token`, `token_perplexity` (over
all tokens of all answers), `answer_perplexity` (exponential of the mean negative log-likelihood of an answer), and
`first_token_perplexity`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..eval.data import SOURCES, import_datasets
from ..eval.origin import check_required, documents_hash, origin, read_published, remember
from ..eval.task_tokens import continuation_ids, encode, load_task_tokenizer
from ..eval.text_files import existing_file, jsonl_fields


if TYPE_CHECKING:
    from datasets import Dataset

AUTHORS_FILE = f"{SOURCES['synthetic'].address}/synthetic_dataset.jsonl"
SHOTS = (2, 3, 4, 5, 6, 7)

_ANSWER = re.compile(r" \[ ([^\[\]]*) \]")


def load_authors_texts(
    shots: int, data_dir: str | None = None, brackets: bool = False, data_hash: str | None = None, **settings: Any
) -> dict[str, Dataset]:
    """
    The answers of line `shots + 1` of every text.

    Args:
        shots (2 to 7): Lines before the one that is scored.
        data_dir: Folder with `synthetic/synthetic_dataset.jsonl`; the authors' repository if not given.
        brackets: Leave the brackets in the text.
        data_hash: The hash that the texts must have, or `"any"`; by default, of texts that are fetched, the known one.
        settings: The model's arguments as lm-eval passes them: `pretrained`, `tokenizer`, `revision`,
            `trust_remote_code`, `add_bos_token`.

    Returns:
        One split `test` of 888 rows, which remember their origin: `task_id`, `context`, `continuations` (the answer
        and, if it has several tokens, the text of its first), `n_tokens` (of the answer).

    Raises:
        FileNotFoundError: if the file is not there or cannot be reached.
        ValueError: if no tokenizer is named, a text has another form, or the first token of an answer is no text that
            the tokenizer would encode as that token.
    """
    if shots not in SHOTS:
        raise ValueError(f"shots must be one of {', '.join(map(str, SHOTS))}, got {shots!r}.")
    tokenizer = load_task_tokenizer(**settings)
    add_bos_token = settings.get("add_bos_token")
    if data_dir is None:
        texts, found = read_published(
            "synthetic", lambda source: (list(authors_texts(None)), source.revision), documents_hash, data_hash
        )
    else:
        texts = list(authors_texts(data_dir))
        found = origin(None, documents_hash(texts), "synthetic")
        check_required("synthetic", found["hash"], data_hash)
    rows = []
    for task, answers in _answers_of(texts, brackets):
        context, answer = answers[shots]
        ids = continuation_ids(tokenizer, context, answer, add_bos_token)
        rows.append(
            {
                "task_id": task,
                "context": context,
                "continuations": [answer] if len(ids) == 1 else [answer, _first_token(tokenizer, context, ids, answer)],
                "n_tokens": len(ids),
            }
        )
    return {"test": remember(import_datasets().Dataset.from_list(rows), found)}


def authors_answers(
    data_dir: str | None = None, brackets: bool = False
) -> Iterator[tuple[str, dict[int, tuple[str, str]]]]:
    """
    Name of the task and [`bracketed_answers`] of every text, in the order of the file.

    Raises:
        FileNotFoundError: if the file is not there or cannot be reached.
        ValueError: if a text has another form.
    """
    yield from _answers_of(authors_texts(data_dir), brackets)


def _answers_of(texts: Iterable[tuple[str, ...]], brackets: bool) -> Iterator[tuple[str, dict[int, tuple[str, str]]]]:
    for number, (task, text) in enumerate(texts, start=1):
        answers = bracketed_answers(text, brackets)
        if list(answers) != list(SHOTS):
            raise ValueError(
                f"Text {number} of the authors' texts must have one answer in brackets on each of its lines 3 to 8; "
                "use the authors' file."
            )
        yield task, answers


def bracketed_answers(text: str, brackets: bool = False) -> dict[int, tuple[str, str]]:
    """
    Find the scored answers of a text.

    Args:
        text: Lines that begin with a line feed, answers as ` [ answer ]`.
        brackets: Leave the brackets in the context; otherwise it reads as if they had never been there.

    Returns:
        Number of lines before the answer's -> `(context, answer)`, the answer with the space before it.
    """
    found, context, end = {}, "", 0
    for match in _ANSWER.finditer(text):
        context += text[end : match.start()]
        answer = " " + match[1]
        found[context.count("\n") - 1] = (context + " [" if brackets else context, answer)
        context += match[0] if brackets else answer
        end = match.end()
    return found


def score_answer(doc: dict, results: list[tuple[float, bool]]) -> dict[str, Any]:
    """
    Scores of one answer; perplexities as `(log-likelihood in nats, weight)`, to be divided after all were added up.

    Args:
        doc: A row of [`load_authors_texts`].
        results: `(log-likelihood, is most probable)` of the answer and, if it has several tokens, of its first.
    """
    log_likelihood, is_greedy = results[0]
    first_log_likelihood, first_is_greedy = results[-1]
    return {
        "acc": float(is_greedy),
        "acc_first_token": float(first_is_greedy),
        "token_perplexity": (float(log_likelihood), doc["n_tokens"]),
        # A weight of one: the same as lm-eval's `perplexity`, which would draw 100,000 bootstrap samples per task.
        "answer_perplexity": (float(log_likelihood), 1),
        "first_token_perplexity": (float(first_log_likelihood), 1),
    }


def _first_token(tokenizer, context: str, ids: list[int], answer: str) -> str:
    # lm-eval says of a continuation only whether all of it is most probable, so its first token is asked for alone.
    text = tokenizer.decode(ids[:1])
    if continuation_ids(tokenizer, context, text) != ids[:1]:
        raise ValueError(
            f"The first token of the answer {answer!r} is {text!r}, which {tokenizer.name_or_path!r} would encode as "
            f"{encode(tokenizer, text)} instead of {ids[:1]}; acc_first_token needs the GPT-NeoX tokenizer."
        )
    return text


def authors_texts(data_dir: str | None) -> Iterable[tuple[str, ...]]:
    """Name of the task and text as it stands in the file, in its order."""
    if data_dir is not None:
        file = existing_file(
            Path(data_dir) / "synthetic" / "synthetic_dataset.jsonl",
            "data/synthetic_dataset.jsonl of github.com/Caiyun-AI/DCFormer",
        )
        return jsonl_fields([file], ("task_id", "texts"))
    try:
        rows = import_datasets().load_dataset("json", data_files={"test": AUTHORS_FILE}, split="test")
    except OSError as error:
        raise FileNotFoundError(
            f"The authors' texts cannot be read from {AUTHORS_FILE} ({type(error).__name__}); check the network, or "
            "give --data-dir with a folder that holds synthetic/synthetic_dataset.jsonl."
        ) from error
    return ((row["task_id"], row["texts"]) for row in rows)
