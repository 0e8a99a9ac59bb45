"""Tests over training seeds: paired t tests and Holm's correction."""

import random

import pytest

from dcformer.head_tasks.intervals import (
    compare_seeds,
    further_seed_interval,
    further_share_interval,
    holm,
    seed_interval,
)


special, stats = pytest.importorskip("scipy.special"), pytest.importorskip("scipy.stats")


def test_holm_of_a_known_example():
    # By hand: 4 * 0.005, 3 * 0.01, 2 * 0.03, and 0.04, raised to the one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_comparisons_are_paired_t_tests_of_the_seeds_that_both_have():
    values = {
        "plain": {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0},
        "better": {0: 1.5, 1: 2.7, 2: 3.4, 3: 4.6, 7: 9.0},
        "noisy": {0: 2.0, 1: 1.0, 2: 3.5, 3: 4.0},
    }
    better, noisy = compare_seeds(values)
    assert (better.first, better.second, better.seeds) == ("better", "plain", 4)
    expected = stats.ttest_rel([values["better"][seed] for seed in range(4)], [1.0, 2.0, 3.0, 4.0])
    assert better.p == pytest.approx(expected.pvalue) and better.corrected_p == pytest.approx(2 * expected.pvalue)
    assert (better.difference, better.half_width) == pytest.approx(seed_interval([0.5, 0.7, 0.4, 0.6]))
    low, high = expected.confidence_interval(0.975)
    assert better.simultaneous_half_width == pytest.approx((high - low) / 2)
    assert better.is_apart and not noisy.is_apart and noisy.corrected_p == pytest.approx(noisy.p)
    (alone,) = compare_seeds(values, [("noisy", "better")])
    assert alone.corrected_p == alone.p and alone.simultaneous_half_width == pytest.approx(alone.half_width)


def test_of_variants_without_a_difference_some_seem_apart_until_corrected():
    rng = random.Random(0)
    apart = corrected = 0
    for _ in range(30):
        found = compare_seeds({name: {seed: rng.gauss(0, 1) for seed in range(4)} for name in range(9)})
        apart += any(each.p <= 0.05 for each in found)
        corrected += any(each.is_apart for each in found)
    # About a third of the experiments; 5 % of them with the correction, of which more than 5 of 30 has p < 0.02.
    assert apart >= 5 and corrected <= 5


def test_a_further_seed_falls_where_it_is_expected_in_most_experiments():
    low, high = further_seed_interval([1.0, 2.0, 3.0, 4.0])
    error = stats.tstd([1.0, 2.0, 3.0, 4.0]) * (1 + 1 / 4) ** 0.5
    assert (low, high) == pytest.approx(stats.t.interval(0.95, 3, loc=2.5, scale=error))
    rng, inside = random.Random(0), 0
    for _ in range(400):
        low, high = further_seed_interval([rng.gauss(0, 1) for _ in range(4)])
        inside += low <= rng.gauss(0, 1) <= high
    assert 0.92 <= inside / 400 <= 0.98  # two standard errors are 2.2 points
    with pytest.raises(ValueError, match="There are 1 values; what a further seed gives needs those of two"):
        further_seed_interval([1.0])


def test_the_share_of_a_further_seed_is_expected_on_logits():
    shares = [0.99, 0.97, 0.90, 0.985]
    low, high = further_share_interval(shares, 1000)
    logits = special.logit(shares)
    error = stats.tstd(logits) * (1 + 1 / 4) ** 0.5
    assert (low, high) == pytest.approx(special.expit(stats.t.interval(0.95, 3, loc=logits.mean(), scale=error)))
    # Those of few right answers mirror those of few wrong ones, and both ends stay within.
    assert further_share_interval([1 - share for share in shares], 1000) == pytest.approx((1 - high, 1 - low))
    assert 0 < further_share_interval([1.0, 0.9, 0.0], 10)[0] < 0.5
    normal = further_seed_interval(shares)
    assert low < normal[0] and high < 1 < normal[1]
    assert further_share_interval([1.0, 1.0], 10) == pytest.approx((0.95, 0.95))


def test_equal_differences_and_errors():
    (same,) = compare_seeds({"a": {0: 1.0, 1: 2.0}, "b": {0: 1.0, 1: 2.0}})
    assert same.p == 1.0 and not same.is_apart
    # The differences are equal but for the last bit, as those of shares of 1,000 answers may be.
    for count in (2, 4):
        above = {"a": {seed: 0.953 + seed / 100 for seed in range(count)}}
        above["b"] = {seed: value + 0.014 for seed, value in above["a"].items()}
        (found,) = compare_seeds(above)
        assert found.p == 2 / 2**count and not found.is_apart
    with pytest.raises(ValueError, match="'b' and 'a' have 1 seeds in common; a comparison needs two"):
        compare_seeds({"a": {0: 1.0, 1: 2.0}, "b": {1: 2.0}})
    with pytest.raises(ValueError, match="give at least two variants"):
        compare_seeds({"a": {0: 1.0}})
