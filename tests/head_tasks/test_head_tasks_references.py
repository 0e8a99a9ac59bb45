"""The rules that read no question, against figures of independent code and cases solved by hand."""

import pytest

from dcformer.head_tasks import BLIND_CHOICE, LONE_NAME, ODD_ONE_OUT, TASK_KINDS, held_out_questions, reference_answers


def scores_of(line: str, answer: str, task: str) -> tuple[float, float, float]:
    """Probability of a right answer by blind choice, by the lone name, by the odd one out."""
    question = {"context": line, "answer": f" {answer}", "transformation": TASK_KINDS[task].transformation}
    return tuple(reference_answers(question).values())


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


def test_means_over_the_held_out_questions():
    rows = [question | reference_answers(question) for question in held_out_questions(150)]

    def mean(rule, **about):
        chosen = [row[rule] for row in rows if about.items() <= row.items()]
        return sum(chosen) / len(chosen)

    assert mean(BLIND_CHOICE) == pytest.approx(1 / 3, abs=0.01)
    assert mean(LONE_NAME) == pytest.approx(0.617, abs=0.015)
    assert mean(LONE_NAME, pattern="different-city") == 1 and mean(LONE_NAME, pattern="same-class") == THIRD
    assert mean(ODD_ONE_OUT, subject="lists") > 0.99


def test_a_line_of_another_form_is_refused():
    with pytest.raises(ValueError, match="Paris is nice"):
        reference_answers({"context": "Paris is", "answer": " nice", "transformation": "copy"})
