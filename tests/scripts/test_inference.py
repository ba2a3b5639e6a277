"""The statistics of the results are those of their definitions, written here once more."""

import math
import statistics

import pytest
from scipy import optimize, stats
from studies import inference

OURS = [1.86, 1.83, 1.90, 1.85, 1.79, 1.88]
THEIRS = [1.89, 1.85, 1.91, 1.90, 1.83, 1.89]
GAINS = [theirs - ours for ours, theirs in zip(OURS, THEIRS)]


# ---- the paired t-test ---------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.9, 0.95])
def test_a_gain_is_that_of_scipys_paired_test(level):
    found = inference.paired(GAINS, level)
    test = stats.ttest_rel(THEIRS, OURS)
    interval = test.confidence_interval(level)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert found.p == pytest.approx(test.pvalue, rel=1e-9)


def test_a_gain_is_that_of_the_formula():
    half = stats.t.ppf(0.975, 5) * statistics.stdev(GAINS) / math.sqrt(6)
    mean = statistics.fmean(GAINS)
    found = inference.paired(GAINS)
    assert (found.mean, found.low, found.high) == pytest.approx((mean, mean - half, mean + half))
    assert found.count == 6


@pytest.mark.parametrize("gains", [[0.1, 0.2], [0.1, 0.1, 0.1]], ids=["two seeds", "no spread"])
def test_without_a_spread_there_is_no_interval(gains):
    found = inference.paired(gains)
    assert found.mean == pytest.approx(statistics.fmean(gains))
    assert math.isnan(found.low) and math.isnan(found.high) and math.isnan(found.p)


def test_without_a_seed_there_is_no_gain():
    found = inference.paired({})
    assert found.count == 0
    assert math.isnan(found.mean)


def test_an_estimate_in_another_unit_keeps_its_p():
    found = inference.paired(GAINS).scaled(100)
    assert found.mean == pytest.approx(100 * statistics.fmean(GAINS))
    assert found.p == inference.paired(GAINS).p


# ---- Holm ----------------------------------------------------------------------------------------


def test_holm_on_an_example_by_hand():
    """The smallest of four p counts four times, the next three times, and so on.

    None is smaller than the one before it.
    """
    assert inference.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_holm_rejects_as_the_stepwise_procedure_does():
    p_values = [0.001, 0.012, 0.013, 0.03, 0.2]
    rejected = []
    for step, p in enumerate(sorted(p_values)):
        if p > 0.05 / (len(p_values) - step):
            break
        rejected.append(p)
    adjusted = inference.holm(p_values)
    held = [p for p, holm in zip(p_values, adjusted) if holm <= 0.05]
    assert held == rejected == [0.001, 0.012, 0.013]


def test_a_test_without_a_p_counts_in_holms_family_and_changes_no_other():
    *others, without = inference.holm([0.01, 0.04, 0.03, math.nan])
    assert others == pytest.approx(inference.holm([0.01, 0.04, 0.03, 1.0])[:3])
    assert math.isnan(without)


# ---- random effects ------------------------------------------------------------------------------


def test_settings_of_one_precision_give_the_plain_t_interval_of_their_means():
    """With equal errors the weights are equal, and tau^2 is what the variance has beyond them.

    Hartung and Knapp's interval is then that of t.
    """
    gains = [0.2, 1.0, 1.4, 3.8]
    found = inference.random_effects(gains, [0.5] * 4)
    half = stats.t.ppf(0.975, 3) * statistics.stdev(gains) / 2
    assert found.mean == pytest.approx(1.6)
    assert (found.low, found.high) == pytest.approx((1.6 - half, 1.6 + half), rel=1e-4)
    assert found.tau**2 == pytest.approx(statistics.variance(gains) - 0.25, rel=1e-4)


def test_paule_and_mandels_tau_makes_the_residuals_as_large_as_their_degrees_of_freedom():
    gains = [0.2, 1.0, 1.4, 3.8, 2.5]
    errors = [0.1, 0.5, 0.3, 0.6, 1.2]

    def weighted(tau2):
        weights = [1 / (error**2 + tau2) for error in errors]
        mean = sum(w * gain for w, gain in zip(weights, gains)) / sum(weights)
        return weights, mean, sum(w * (gain - mean) ** 2 for w, gain in zip(weights, gains))

    tau2 = optimize.brentq(lambda tau2: weighted(tau2)[2] - 4, 0, 100)
    weights, mean, residuals = weighted(tau2)
    error = math.sqrt(residuals / 4 / sum(weights))  # Hartung and Knapp

    found = inference.random_effects(gains, errors)
    assert found.tau == pytest.approx(math.sqrt(tau2), rel=1e-3)
    assert found.mean == pytest.approx(mean, rel=1e-3)
    assert found.high - found.mean == pytest.approx(stats.t.ppf(0.975, 4) * error, rel=1e-3)
    # Higgins, Thompson and Spiegelhalter's, which is the same where the residuals are as large as
    # their degrees of freedom
    half_of_new = stats.t.ppf(0.975, 3) * math.sqrt(tau2 + 1 / sum(weights))
    assert found.new_high - found.mean == pytest.approx(half_of_new, rel=1e-3)


@pytest.mark.parametrize("method", ["iterated", "chi2"])
def test_settings_that_agree_have_no_spread_and_the_weights_of_their_errors_alone(method):
    """DerSimonian and Laird's tau^2 would be below 0 here, and some of its weights, too."""
    gains = [1.0, 1.05, 0.95, 1.02]
    errors = [0.5, 0.9, 0.52, 1.5]
    weights = [1 / error**2 for error in errors]
    mean = statistics.fmean(gains, weights)
    variance = statistics.fmean([(gain - mean) ** 2 for gain in gains], weights) / 3
    half = stats.t.ppf(0.975, 3) * math.sqrt(variance)  # Hartung and Knapp

    found = inference.random_effects(gains, errors, method)
    assert found.tau == 0
    assert mean == pytest.approx(0.988, abs=5e-4)
    assert found.mean == pytest.approx(mean)
    assert (found.low, found.high) == pytest.approx((mean - half, mean + half))


def test_the_intervals_of_settings_that_agree_on_an_example_by_hand():
    """The weights are 1, 1 and 1/4, so the mean is 1.125 / 2.25 = 0.5.

    The residuals, 1/4 + 1/4 + 0, are fewer than 2, so tau is 0, and Hartung and Knapp's variance of
    the mean is (0.5 / 2) / 2.25 = 1/9. By 1 / 2.25, which is that of Higgins, Thompson and
    Spiegelhalter, the interval of a new setting would be twice as long. t at 97.5 % is 4.3027 for
    2 degrees of freedom and 12.7062 for 1.
    """
    found = inference.random_effects([0.0, 1.0, 0.5], [1.0, 1.0, 2.0])
    assert (found.mean, found.tau) == pytest.approx((0.5, 0))
    assert (found.low, found.high) == pytest.approx((0.5 - 4.3027 / 3, 0.5 + 4.3027 / 3), abs=1e-4)
    ends_of_new = (found.new_low, found.new_high)
    assert ends_of_new == pytest.approx((0.5 - 12.7062 / 3, 0.5 + 12.7062 / 3), abs=1e-4)


# ---- ratios --------------------------------------------------------------------------------------

OTHERS = dict(enumerate([0.012, 0.016, 0.008, 0.013, 0.011, 0.014]))  # by seed


def test_fiellers_interval_ends_where_the_paired_test_has_5_percent():
    found = inference.ratio(dict(enumerate(GAINS)), OTHERS)
    assert found.mean == pytest.approx(statistics.fmean(GAINS) / statistics.fmean(OTHERS.values()))
    for end in (found.low, found.high):
        test = stats.ttest_rel(GAINS, [end * other for other in OTHERS.values()])
        assert test.pvalue == pytest.approx(0.05)


def test_a_ratio_is_of_the_seeds_that_both_have():
    gains = dict(enumerate(GAINS))
    lacking = {seed: gain for seed, gain in reversed(gains.items()) if seed != 2}
    without = {seed: other for seed, other in OTHERS.items() if seed != 2}
    assert inference.ratio(lacking, OTHERS) == inference.ratio(lacking, without)
    assert inference.ratio(gains, without) == inference.ratio(lacking, without)


def test_a_ratio_to_what_may_be_0_is_refused():
    others = dict(enumerate([0.1, -0.1, 0.2, -0.2, 0.1, -0.05]))
    with pytest.raises(ValueError, match="the divisor is not distinguished from 0"):
        inference.ratio(dict(enumerate(GAINS)), others)
