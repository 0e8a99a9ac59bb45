"""Prompts of RACE as in the harness of 2023 (lm-eval 0.3), and as in lm-eval 0.4.13.

The published scores of Pythia, which the paper repeats and the control compares with, were made with that harness. Of
the other columns only SciQ and LAMBADA differ, in templates; all templates are in the YAML files in `tasks/`.
"""

_LETTERS = "ABCD"
_BLANK = " _  ."


def race_context(document: dict, keeps_words: bool = False) -> str:
    """
    The article, all questions but the last with their answers, and the last question alone.

    A question that ends in a blank was meant to be completed by its answer, but the harness kept the blank and dropped
    the question, until version 3.0 of its task, which is younger than the paper; `keeps_words` does as that version.
    """
    *solved, asked = document["problems"]
    text = f"Article: {document['article']}\n\n"
    for problem in solved:
        question = problem["question"]
        answer = problem["options"][_LETTERS.index(problem["answer"])]
        if question.endswith(" " + _BLANK):
            text += f"{question.removesuffix(_BLANK) if keeps_words else _BLANK}{answer}\n"
        else:
            text += f"Question: {question}\nAnswer: {answer}\n"
    return text + asked["question"]


def race_context_lm_eval_0_4_13(document: dict) -> str:
    return race_context(document, keeps_words=True)


def race_choices(document: dict) -> list[str]:
    return document["problems"][-1]["options"]


def race_answer(document: dict) -> int:
    return _LETTERS.index(document["problems"][-1]["answer"])
