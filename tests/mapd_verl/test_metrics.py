import pytest

from mapd_verl.metrics import fold_raw_sums, mean_min_max, source_shares


def test_sums_become_means_of_tokens_and_seconds_a_total():
    raw = {
        "sum/all": 6.0,
        "tokens/all": 30.0,
        "sum/turn_0": 4.0,
        "tokens/turn_0": 10.0,
        "sum/turn_1": 0.0,
        "tokens/turn_1": 0.0,
        "policy_tokens": 40.0,
        "above/0.1": 3.0,
        "signal/log_ratio/mean": 15.0,
        "signal/log_ratio/square": 30.0,
        "signal/log_ratio/above_5": 6.0,
        "signal/entropy/teacher": 60.0,
        "teacher_seconds": 0.5,
        "divergence_seconds": 0.25,
    }
    metrics = {f"actor/distillation/raw/{k}": v for k, v in raw.items()} | {
        "actor/distillation/loss": 0.15,
        "actor/loss": 1.0,
    }
    fold_raw_sums(metrics, updates=4)
    assert metrics == {
        "actor/loss": 1.0,
        "distillation/loss": 0.15,
        "distillation/kl": pytest.approx(0.2),
        "distillation/kl/turn_0": pytest.approx(0.4),
        "distillation/token_share": 0.75,
        "distillation/kl_above/0.1": pytest.approx(0.1),
        "distillation/log_ratio/mean": 0.5,
        "distillation/log_ratio/std": pytest.approx(0.75**0.5),
        "distillation/log_ratio/above_5": 0.2,
        "distillation/entropy/teacher": 2.0,
        "timing_s/teacher_forward": 2.0,
        "timing_s/divergence": 1.0,
    }


def test_without_distillation_nothing_is_added():
    metrics = {"actor/loss": 1.0}
    fold_raw_sums(metrics, updates=1)
    assert metrics == {"actor/loss": 1.0}


def test_shares_count_rollouts_and_name_the_configured_sources_at_zero():
    shares = source_shares(["protocol", "protocol", "none", "empty"], {"protocol", "own_rollout", "none"})
    assert shares == {
        "mapd/source/none": 0.25,
        "mapd/source/protocol": 0.5,
        "mapd/source/own_rollout": 0.0,
        "mapd/source/empty": 0.25,
    }
    assert set(source_shares([], {"none"}).values()) == {0.0}


def test_no_values_no_entries():
    assert mean_min_max("x", []) == {}
    assert mean_min_max("x", [1.0, 3.0]) == {"x/mean": 2.0, "x/min": 1.0, "x/max": 3.0}
