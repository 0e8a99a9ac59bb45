"""Reference lines of the head tasks against what independent code measured, and against cases by hand."""

import math

import pytest

from dcformer.head_tasks import generate_documents
from dcformer.head_tasks.references import BLIND_CHOICE, LONE_NAME, ODD_ONE_OUT, reference_scores, reference_summaries
from dcformer.head_tasks.suite import authors_documents


def scores_of(line: str, answer: str, task: str) -> tuple[float, float, float]:
    """Probability of a right answer by blind choice, by the lone name, by the odd one out."""
    text = f"{line} {answer}\n"
    scores = reference_scores([{"text": text, "task": task, "answers": [[len(line), len(text) - 1]]}])
    blind = scores[BLIND_CHOICE][0]
    assert blind["log_likelihood"] == pytest.approx(math.log(blind["correct"]))
    return tuple(scores[name][0]["correct"] for name in (BLIND_CHOICE, LONE_NAME, ODD_ONE_OUT))


THIRD = pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("line", "answer", "task", "expected"),
    [
        ("< Ruth has tea. Mark has a fox. Ruth has a kiwi. >. Ruth does not have a kind of", "animal", "task0", (1, 1)),
        ("< Ruth has tea. Paul has a fox. Mark has a kiwi. >. Ruth has a kind of", "drink", "task2", (1 / 3, 1 / 3)),
        ("< Ruth has tea. Paul has a fox. Mark has tea. >. Who does not have tea?", "Paul", "task12", (1 / 3, 1)),
        ("< Ruth has tea. Paul has a fox. Mark has a cow. >. Who does not have a kind of animal?", "Ruth", "task4",
         (1 / 3, 1)),
        ("There are a duck, a duck, tea. Which is different? A kind of", "drink", "task59", (1, 1)),
        ("There are a duck, a cow, tea. Which is not animal? The", "tea", "task74", (1 / 3, 1)),
        ("There are Washington, D.C, Paris, Paris. Which is different?", "Washington, D.C", "task61", (1, 1)),
        ("There are safe, safe, ugly. Which is different? The opposite of", "beautiful", "task69", (1, 1)),
        ("There are spring, spring, summer. Which is different? The season just after", "spring", "task73", (1, 1)),
    ],
    ids=["other_person", "same_person", "thing", "class", "list", "class_of_list", "stop_inside", "opposite", "before"],
)  # fmt: skip
def test_rules_on_single_questions(line, answer, task, expected):
    blind, *rules = scores_of(line, answer, task)
    assert blind == THIRD and rules == pytest.approx(expected)


def test_an_adjective_with_two_opposites_costs_a_further_guess():
    blind, name, _ = scores_of("There are ugly, ugly, happy. Which is different? The opposite of", "sad", "task69")
    assert blind == pytest.approx(1 / 6) and name == 0.5


def test_generated_documents():
    found = reference_summaries(generate_documents(150, 1234, "test", lines=(8, 8)))
    assert math.log(found[BLIND_CHOICE]["perplexity"]) == pytest.approx(1.101, abs=0.004)
    per_token = math.log(found[BLIND_CHOICE]["token_perplexity"])
    # One to three tokens an answer, 1.07 on average.
    assert per_token == pytest.approx(1.03, abs=0.02) and found[LONE_NAME]["perplexity"] is None
    assert found[LONE_NAME]["accuracy"] == pytest.approx(0.617, abs=0.015)
    patterns = {name: group["accuracy"] for name, group in found[LONE_NAME]["by_pattern"].items()}
    assert patterns["different-city"] == 1 and patterns["same-class"] == THIRD
    assert patterns["the-other-object"] == pytest.approx(0.78, abs=0.05)
    assert found[ODD_ONE_OUT]["by_subject"]["lists"]["accuracy"] > 0.99
    assert found[LONE_NAME]["by_subject"]["persons"]["by_shots"]["0"]["accuracy"] == pytest.approx(0.5, abs=0.01)


def test_the_authors_texts(data_dir):
    found = reference_summaries(authors_documents(data_dir))
    assert found[BLIND_CHOICE]["accuracy"] == pytest.approx(1 / 3, abs=1e-3)
    # 62.2 % by independent code, which takes either opposite of an adjective that has two.
    assert found[LONE_NAME]["accuracy"] == pytest.approx(0.622, abs=0.003)
    assert found[BLIND_CHOICE]["answers"] == 5328


def test_a_line_of_another_form_is_refused():
    with pytest.raises(ValueError, match="is no line of the head tasks"):
        reference_scores([{"text": "Paris is nice", "task": "task0", "answers": [[8, 13]]}])
