"""Prompts of Table 4 that differ between lm-eval 0.4.13 and the harness of 2023 (lm-eval 0.3).

The published scores of Pythia, which the paper repeats and the control compares with, were made with that harness.
PIQA, WinoGrande, ARC, LogiQA, BoolQ and HellaSwag have the same words in both, so their YAML files in `tasks/` use
lm-eval's functions and templates. A prompt function takes a document, which is one row of the data.
"""

_LETTERS = "ABCD"
_RACE_BLANK = " _  ."


def lambada_context(document: dict) -> str:
    return document["text"].rpartition(" ")[0]


def lambada_last_word(document: dict) -> str:
    """The last word of a text of LAMBADA with the space before it, since lm-eval adds none to what it scores."""
    return " " + document["text"].rpartition(" ")[2]


def sciq_context(document: dict) -> str:
    """The text, if there is one, and the question; without a text the question is the first line."""
    return sciq_context_lm_eval_0_4_13(document).strip()


def sciq_context_lm_eval_0_4_13(document: dict) -> str:
    """A question without a text has an empty line before it."""
    return f"{document['support'].lstrip()}\nQuestion: {document['question']}\nAnswer:"


def race_context(document: dict) -> str:
    """
    The article, all questions but the last with their answers, and the last question alone.

    A question that ends in a blank was meant to be completed by its answer, but the harness kept the blank and dropped
    the question, until version 3.0 of its task, which is younger than the paper.
    """
    return _race_context(document, keeps_words=False)


def race_context_lm_eval_0_4_13(document: dict) -> str:
    """The context of [`race_context`], in which answers replace the blanks that end solved questions."""
    return _race_context(document, keeps_words=True)


def _race_context(document: dict, keeps_words: bool) -> str:
    *solved, asked = document["problems"]
    text = f"Article: {document['article']}\n\n"
    for problem in solved:
        question = problem["question"]
        answer = problem["options"][_LETTERS.index(problem["answer"])]
        if question.endswith(" " + _RACE_BLANK):
            text += f"{question.removesuffix(_RACE_BLANK) if keeps_words else _RACE_BLANK}{answer}\n"
        else:
            text += f"Question: {question}\nAnswer: {answer}\n"
    return text + asked["question"]


def race_choices(document: dict) -> list[str]:
    return document["problems"][-1]["options"]


def race_answer(document: dict) -> int:
    return _LETTERS.index(document["problems"][-1]["answer"])
