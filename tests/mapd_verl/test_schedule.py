import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapd_verl.config import MapdConfig
from mapd_verl.config.method import ScheduleConfig
from mapd_verl.errors import UserError
from mapd_verl.schedule import factor


def values(config, steps, total=100):
    return [round(factor(config, step, total), 6) for step in steps]


def test_constant_is_one_after_its_warm_up():
    assert values(ScheduleConfig(), (1, 50, 1000)) == [1.0, 1.0, 1.0]
    assert values(ScheduleConfig(warmup_steps=4), (1, 2, 4, 5)) == [0.25, 0.5, 1.0, 1.0]


def test_rlsds_line_to_zero_over_a_hundred_steps():
    line = ScheduleConfig("linear", steps=100)
    assert values(line, (1, 50, 100, 101, 400), total=1000) == [0.99, 0.5, 0.0, 0.0, 0.0]


def test_the_cosine_is_half_way_in_the_middle_and_ends_at_the_trainings_end():
    cosine = ScheduleConfig("cosine", warmup_steps=20, end=0.2)
    assert factor(cosine, 60, 100) == pytest.approx(0.6)
    assert factor(cosine, 100, 100) == pytest.approx(0.2)
    assert factor(cosine, 30, 100) == pytest.approx(1 + (0.2 - 1) * (1 - math.cos(math.pi / 8)) / 2)


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 50),
    st.one_of(st.none(), st.integers(1, 200)),
    st.floats(0, 3),
    st.integers(1, 300),
    st.integers(1, 300),
)
def test_the_factor_stays_between_its_ends(kind, warmup, steps, end, step, total):
    value = factor(ScheduleConfig(kind, warmup, steps, end), step, total)
    assert 0.0 <= value <= max(1.0, end) + 1e-12


@pytest.mark.parametrize(
    "section, said",
    [
        ({"schedule": {"kind": "step"}}, "mapd.schedule.kind"),
        ({"schedule": {"warmup_steps": -1}}, "mapd.schedule.warmup_steps"),
        ({"schedule": {"steps": 0}}, "mapd.schedule.steps"),
        ({"schedule": {"end": -0.1}}, "mapd.schedule.end"),
        ({"teacher": {"kind": "oracle"}}, "mapd.teacher.kind"),
        ({"teacher": {"kind": "ema", "ema_decay": 1.5}}, "mapd.teacher.ema_decay"),
        ({"teacher": {"kind": "external"}}, "mapd.teacher.path"),
        ({"teacher": {"path": "x"}}, "mapd.teacher.path"),
        ({"filter": {"task_types": ["hard"]}}, "mapd.filter.task_types"),
        ({"filter": {"actions": ["guess"]}}, "mapd.filter.actions"),
        ({"filter": {"turns": [-1]}}, "mapd.filter.turns"),
        ({"filter": {"turns": []}}, "mapd.filter.turns"),
        ({"objective": {"name": "sigmoid_gated"}}, "mapd.objective.sharpness"),
        ({"objective": {"sharpness": 5.0}}, "mapd.objective.sharpness"),
        ({"objective": {"name": "bounded_advantage", "sharpness": 0.0}}, "mapd.objective.sharpness"),
        ({"objective": {"name": "scaled_advantage"}}, "mapd.objective.ratio_clip"),
        ({"objective": {"token_clip": 0.0}}, "mapd.objective.token_clip"),
    ],
)
def test_a_bad_value_of_the_methods_row_names_its_key(section, said):
    with pytest.raises(UserError, match=said):
        MapdConfig.from_mapping(section)
