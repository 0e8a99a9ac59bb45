"""The rules that read no question, against figures of independent code and cases solved by hand."""

import pytest

from dcformer.head_tasks import BLIND_CHOICE, LONE_NAME, ODD_ONE_OUT, TASK_KINDS, held_out_questions, reference_answers


@pytest.mark.parametrize(
    ("line", "answer", "number", "thirds"),  # the chance of blind choice, the lone name, the odd one out
    [
        ("< Ruth has tea. Mark has a fox. Ruth has a kiwi. >. Ruth does not have a kind of", "animal", 0, (1, 3, 3)),
        ("< Ruth has tea. Paul has a fox. Mark has a kiwi. >. Ruth has a kind of", "drink", 2, (1, 1, 1)),
        ("< Ruth has tea. Paul has a fox. Mark has tea. >. Who does not have tea?", "Paul", 12, (1, 1, 3)),
        ("< Ruth has a fox. Paul has tea. Mark has beer. >. Who does not have a kind of drink?", "Ruth", 4, (1, 1, 3)),
        ("There are a duck, a duck, tea. Which is different? A kind of", "drink", 59, (1, 3, 3)),
        ("There are a duck, a cow, tea. Which is not animal? The", "tea", 74, (1, 1, 3)),
        ("There are Washington, D.C, Paris, Paris. Which is different?", "Washington, D.C", 61, (1, 3, 3)),
        ("There are safe, safe, ugly. Which is different? The opposite of", "beautiful", 69, (1, 3, 3)),
        # An adjective with two opposites costs a further guess.
        ("There are ugly, ugly, happy. Which is different? The opposite of", "sad", 69, (0.5, 1.5, 1.5)),
        ("There are spring, spring, summer. Which is different? The season just after", "spring", 73, (1, 3, 3)),
    ],
    ids=["other_person", "same_person", "thing", "class", "list", "class_of_list", "stop", "opposite", "two", "before"],
)  # fmt: skip
def test_rules_on_single_questions(line, answer, number, thirds):
    question = {"context": line, "answer": f" {answer}", "transformation": TASK_KINDS[f"task{number}"].transformation}
    assert [3 * chance for chance in reference_answers(question).values()] == pytest.approx(thirds)


def test_means_over_the_held_out_questions():
    rows = [question | reference_answers(question) for question in held_out_questions(150)]

    def mean(rule, **about):
        chosen = [row[rule] for row in rows if about.items() <= row.items()]
        return sum(chosen) / len(chosen)

    assert mean(BLIND_CHOICE) == pytest.approx(1 / 3, abs=0.01)
    assert mean(LONE_NAME) == pytest.approx(0.617, abs=0.015)
    assert mean(LONE_NAME, pattern="different-city") == 1
    assert mean(LONE_NAME, pattern="same-class") == pytest.approx(1 / 3)
    assert mean(ODD_ONE_OUT, subject="lists") > 0.99


def test_a_line_of_another_form_is_refused():
    with pytest.raises(ValueError, match="Paris is nice"):
        reference_answers({"context": "Paris is", "answer": " nice", "transformation": "copy"})
