r"""
Head tasks (section 4.3): generated questions, and the authors' 888 texts of Table 5 and Figure 6, for lm-eval.

A text of the authors has eight lines, each an example of one task, and the answers of lines 3 to 8 are in brackets:

    < Ruth has a sweater. Steven has a taxi. Ruth has a handgun. >. Ruth does not have a kind of [ vehicle ]

The answer of line K + 1 is scored with the K lines before it as examples, K from 2 to 7: 5,328 answers. Each K is a
separate task here.

**What the model reads.** The brackets are removed, with one of the two spaces they leave, as in the paper's Table 11;
all else is kept, also the line feed with which every text begins.

**Where the answer begins.** With the space before it, since the GPT-NeoX tokenizer joins a space to the word after it.

**Scores.** The paper does not say how answers of several tokens count (622 of 5,328), so all readings are reported:
`acc` and `token_perplexity` of all tokens, `answer_perplexity` per answer, `acc_first_token` and
`first_token_perplexity`, which are left out where a tokenizer encodes the text of the first token alone as other ids.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..head_tasks import TASK_KINDS, held_out_questions
from . import task_data
from .perplexity import continuation_ids, task_tokenizer
from .task_data import SOURCES, import_extra


HELD_OUT_DOCUMENTS = 1000
# Fields of a question that its sample keeps, for the report's breakdown.
FIELDS = ("document", "shots", "subject", "pattern", "transformation", "task")
_ANSWER = re.compile(r" \[ ([^\[\]]*) \]")


def load_held_out(windows: int | None = None, **settings: Any) -> dict[str, Any]:
    """Questions of 1,000 generated texts, or of `windows` (`--limit`); no training text has the same facts."""
    questions = held_out_questions(documents=windows or HELD_OUT_DOCUMENTS)
    n_unscored = 0 if windows is None else max(0, HELD_OUT_DOCUMENTS - windows) * len(questions) // windows
    digest = task_data.documents_hash(((row["context"], row["answer"]) for row in questions), is_ordered=True)
    return _as_test(questions, n_unscored, settings, {"source": "generated", "hash": digest, "as_known": None})


def load_authors_texts(
    shots: int, data_dir: str | None = None, windows: int | None = None, data_hash: str | None = None, **settings: Any
) -> dict[str, Any]:
    """The answers of line `shots + 1` (2 to 7) of every text, or of `windows` texts (`--limit`) spread over all."""
    texts = list(authors_texts(data_dir))
    origin = task_data.checked_origin("synthetic", texts, data_dir, data_hash)
    questions = []
    for document in task_data.spread_indices(len(texts), windows):
        task, text = texts[document]
        answers, kind = bracketed_answers(text), TASK_KINDS[task]
        if list(answers) != [2, 3, 4, 5, 6, 7]:
            raise ValueError(f"Text {document + 1} must have one answer in brackets on each of its lines 3 to 8.")
        context, answer = answers[shots]
        names = {name: getattr(kind, name) for name in ("subject", "pattern", "transformation")}
        question = {"context": context, "answer": answer, "document": document, "shots": shots, "task": task, **names}
        questions.append(question)
    return _as_test(questions, len(texts) - len(questions), settings, origin)


def _as_test(
    questions: Sequence[Mapping], n_unscored: int, settings: dict[str, Any], origin: dict[str, Any]
) -> dict[str, Any]:
    tokenizer, rows = task_tokenizer(**settings), []
    for question in questions:
        ids = continuation_ids(tokenizer, question["context"], question["answer"], **settings)
        # lm-eval reports only whether a whole continuation is greedy, so its first token is scored separately.
        first = question["answer"] if len(ids) == 1 else tokenizer.decode(ids[:1])
        rows.append(
            {
                **{name: question[name] for name in ("context", *FIELDS)},
                "continuations": list(dict.fromkeys((question["answer"], first))),
                "n_tokens": len(ids),
                "n_unscored": n_unscored,
                "has_first_token": len(ids) == 1 or continuation_ids(tokenizer, question["context"], first) == ids[:1],
            }
        )
    if not all(row["has_first_token"] for row in rows):
        rows = [{**row, "continuations": row["continuations"][:1], "has_first_token": False} for row in rows]
    return {"test": import_extra("datasets").Dataset.from_list(rows), "origin": origin}


def score_answer(doc: dict, results: list[tuple[float, bool]]) -> dict[str, Any]:
    """Scores of an answer; the last result is of its first token. Perplexities are `(log-likelihood, weight)`."""
    log_likelihood, is_greedy = results[0]
    scores: dict[str, Any] = {
        "acc": float(is_greedy),
        "token_perplexity": (float(log_likelihood), doc["n_tokens"]),
        # With weight 1 this equals lm-eval's `perplexity`, which would take 100,000 bootstrap samples per task.
        "answer_perplexity": (float(log_likelihood), 1),
    }
    if doc["has_first_token"]:
        first_log_likelihood, first_is_greedy = results[-1]
        scores["acc_first_token"] = float(first_is_greedy)
        scores["first_token_perplexity"] = (float(first_log_likelihood), 1)
    return scores


def authors_texts(data_dir: str | None) -> Iterable[tuple[str, ...]]:
    """Name of the task and text of the authors' file, in its order."""
    given = data_dir and task_data.data_files(Path(data_dir, "synthetic"), "synthetic_dataset.jsonl")
    return task_data.jsonl_fields(given or [task_data.fetch(str(SOURCES["synthetic"].address))], ("task_id", "texts"))


def bracketed_answers(text: str) -> dict[int, tuple[str, str]]:
    """Number of lines before a bracketed answer -> `(context, answer)`, the answer with the space before it."""
    answers, context, end = {}, "", 0
    for match in _ANSWER.finditer(text):
        context, answer = context + text[end : match.start()], f" {match[1]}"
        answers[context.count("\n") - 1] = (context, answer)
        context, end = context + answer, match.end()
    return answers
