"""The collapse alarm and the best checkpoint's bookkeeping, on plain numbers and files."""

import json
import math

import pytest

from mapd_verl.best import BestCheckpoint
from mapd_verl.config import MapdConfig
from mapd_verl.config.safety import WatchConfig
from mapd_verl.errors import UserError
from mapd_verl.watch import CollapseWatch, validation_score

HEALTHY = {"agent/truncated": 0.0, "agent/valid_turns": 0.9, "agent/searches": 1.5, "agent/policy_tokens": 100.0}


def rules(watch, **metrics):
    return [alarm.rule for alarm in watch.observe(HEALTHY | {k.replace("__", "/"): v for k, v in metrics.items()})]


def test_a_healthy_run_is_left_alone():
    watch = CollapseWatch(WatchConfig())
    assert all(watch.observe(HEALTHY) == [] for _ in range(50))
    assert watch.unwatched(HEALTHY) == ["max_reference_kl"]


@pytest.mark.parametrize(
    "metric, value, rule",
    [
        ("agent__truncated", 0.6, "max_truncated"),
        ("agent__valid_turns", 0.1, "min_valid_turns"),
        ("agent__searches", 0.0, "min_searches"),
        ("actor__kl_loss", 5.0, "max_reference_kl"),
        ("agent__searches", math.nan, "min_searches"),
        ("agent__truncated", math.nan, "max_truncated"),
    ],
)
def test_each_rule_speaks_after_its_patience_and_not_before(metric, value, rule):
    watch = CollapseWatch(WatchConfig(patience=3))
    assert [rules(watch, **{metric: value}) for _ in range(4)] == [[], [], [rule], [rule]]
    assert rules(watch, actor__kl_loss=0.1) == [], "one good step ends the alarm"
    assert rules(watch, **{metric: value}) == []


def test_shrinking_answers_are_measured_against_the_runs_own_start():
    watch = CollapseWatch(WatchConfig(patience=1, baseline_steps=2, min_length_share=0.4))
    assert [rules(watch, agent__policy_tokens=n) for n in (90.0, 110.0, 41.0)] == [[], [], []]
    (alarm,) = watch.observe(HEALTHY | {"agent/policy_tokens": 39.0})
    assert alarm.rule == "min_length_share" and "39" in alarm.text and "40" in alarm.text


def test_a_resumed_watch_goes_on_where_it_was():
    config = WatchConfig(patience=2, baseline_steps=1)
    first, second = CollapseWatch(config), CollapseWatch(config)
    rules(first)
    assert rules(first, agent__policy_tokens=10.0) == []
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert rules(second, agent__policy_tokens=10.0) == ["min_length_share"]


def test_null_and_off_switch_rules_off():
    assert rules(CollapseWatch(WatchConfig(patience=1, min_searches=None)), agent__searches=0.0) == []
    assert rules(CollapseWatch(WatchConfig(patience=1, action="off")), agent__searches=0.0) == []


@pytest.mark.parametrize(
    "section, said",
    [
        ({"watch": {"action": "panic"}}, "mapd.watch.action"),
        ({"watch": {"patience": 0}}, "mapd.watch.patience"),
        ({"watch": {"max_truncated": 1.5}}, "mapd.watch.max_truncated"),
        ({"watch": {"max_reference_kl": -1}}, "mapd.watch.max_reference_kl"),
        ({"watch": {"action": "stop"}}, "mapd.watch.keep_best"),
        ({"nan_guard": {"action": "warn"}}, "mapd.nan_guard.action"),
        ({"nan_guard": {"max_dumps": -1}}, "mapd.nan_guard.max_dumps"),
    ],
)
def test_a_bad_value_names_its_key(section, said):
    with pytest.raises(UserError, match=said):
        MapdConfig.from_mapping(section)


def test_the_validation_score_prefers_accuracy_and_averages_sources():
    metrics = {
        "val-core/nq/acc/mean@1": 0.25,
        "val-core/nq/reward/mean@1": 0.9,
        "val-core/hotpot/reward/mean@1": 0.75,
        "val-aux/nq/f1/mean@1": 0.1,
    }
    assert validation_score(metrics) == pytest.approx(0.5)
    assert validation_score({"val-aux/nq/f1/mean@1": 0.1}) is None


def save_text(text):
    def save(folder):
        folder.mkdir(parents=True)
        (folder / "model").write_text(text)

    return save


def test_the_best_is_kept_and_replaced_by_a_better_one_only(tmp_path):
    best = BestCheckpoint(tmp_path, resumed=False)
    assert best.path is None
    assert best.offer(2, 0.5, save_text("two"))
    assert not best.offer(4, 0.5, save_text("four"))
    assert not best.offer(5, math.nan, save_text("nan"))
    assert best.offer(6, 0.6, save_text("six"))
    assert [p.name for p in tmp_path.iterdir()] == ["best"]
    assert (best.path / "model").read_text() == "six" and best.path.name == "global_step_6"
    again = BestCheckpoint(tmp_path, resumed=True)
    assert (again.score, again.step) == (0.6, 6)
    assert BestCheckpoint(tmp_path, resumed=False).score is None


def test_a_save_that_fails_leaves_the_old_best(tmp_path):
    best = BestCheckpoint(tmp_path, resumed=False)
    best.offer(1, 0.1, save_text("one"))

    def broken(folder):
        folder.mkdir(parents=True)
        raise OSError("disk full")

    with pytest.raises(OSError):
        best.offer(2, 0.2, broken)
    assert (BestCheckpoint(tmp_path, resumed=True).path / "model").read_text() == "one"


def test_a_death_between_the_two_renames_loses_nothing(tmp_path):
    best = BestCheckpoint(tmp_path, resumed=False)
    best.offer(1, 0.1, save_text("one"))
    (tmp_path / "best").rename(tmp_path / "best.new")
    assert (BestCheckpoint(tmp_path, resumed=True).path / "model").read_text() == "one"
