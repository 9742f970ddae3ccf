"""Run folders are read leniently but never wrongly; the page is whole, escaped and self-contained."""

from __future__ import annotations

import json
import re
import struct
from html.parser import HTMLParser

import pytest

from mapd_verl.errors import UserError
from mapd_verl.evaluation.curves import draw_curves, moving_mean
from mapd_verl.evaluation.records import read_records
from mapd_verl.evaluation.report import before_and_after, compare_arms, main
from mapd_verl.evaluation.runs import find_runs, load_run
from mapd_verl.evaluation.trajectories import choose, show_trajectories, split_parts

from .run_folder import episode_record, make_experiment, make_run


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    return make_experiment(tmp_path_factory.mktemp("experiment"))


def test_folders_are_found(experiment):
    names = ["grpo-seed0", "mapd-seed0", "mapd-seed1"]
    assert [p.name for p in find_runs([experiment])] == names
    assert [p.name for p in find_runs([experiment / "mapd-seed0", experiment])] == ["mapd-seed0", names[0], names[2]]
    with pytest.raises(UserError, match="nowhere: no such folder"):
        find_runs([experiment / "nowhere"])
    with pytest.raises(UserError, match="no run here"):
        find_runs([experiment / "mapd-seed0/hydra"])


def test_a_run_comes_back(tmp_path):
    written = make_run(tmp_path / "mapd-seed3", seed=3)
    run = load_run(tmp_path / "mapd-seed3")
    assert run.metrics == {s: pytest.approx(v) for s, v in written.items()}  # the torn line's step is in the next file
    assert list(run.validation) == [0, 10, 20] and len(run.validation[20]) == 60
    assert run.arm == "mapd" and run.rollout_steps() == list(range(1, 21))
    first = run.validation[0][0]
    assert (first.question_id, first.kind, first.targets) == ("val0", "single_hop", ("Land0",))
    assert [s["role"] for s in first.segments] == ["policy", "observation", "policy"]
    assert run.before == [] and len(run.after) == 60 and run.protocols is None
    assert run.series("none/such", "agent/acc")[0] == list(range(1, 21)) and run.series("none/such") == ([], [])


def test_tensorboard_gives_the_same_figures(tmp_path):
    pytest.importorskip("tensorboard")
    written = make_run(tmp_path / "run", tensorboard=True)
    assert load_run(tmp_path / "run").metrics == {s: pytest.approx(v, rel=1e-6) for s, v in written.items()}


def test_a_stock_dump_needs_no_columns_of_ours(tmp_path):
    (tmp_path / "validation").mkdir()
    line = {
        "input": "user\nWho?",
        "output": "<answer> Ann</answer>",
        "gts": {"target": ["Ann"]},
        "score": 1.0,
        "uid": "u",
    }
    (tmp_path / "validation/5.jsonl").write_text(json.dumps(line) + "\n")
    (record,) = load_run(tmp_path).validation[5]
    assert (record.em, record.targets, record.kind) == (1.0, ("Ann",), "unknown")
    (tmp_path / "validation/5.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(UserError, match=r"5\.jsonl: line 1: not a line of verl's dump"):
        load_run(tmp_path)


def test_a_broken_line_before_the_last_is_named(tmp_path):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/000.jsonl").write_text('{"step": 1, "da\n{"step": 2, "data": {}}\n')
    with pytest.raises(UserError, match=r"000\.jsonl: line 1: not JSON"):
        load_run(tmp_path)


def test_not_a_number_is_no_point(tmp_path):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/000.jsonl").write_text('{"step": 1, "data": {"a": null, "b": "x", "c": 2, "d": true}}\n')
    assert load_run(tmp_path).metrics == {1: {"c": 2.0}}


def test_before_and_after_is_paired_by_question(experiment):
    run = load_run(experiment / "mapd-seed0")
    table = before_and_after(run)
    before = {r.question_id: r.em for r in read_records(experiment / "before.jsonl")}
    total = table.changes[0]
    assert (total.kind, total.after.em.n) == ("all", 60)
    assert total.gain.mean == pytest.approx(sum(r.em - before[r.question_id] for r in run.after) / 60)
    assert total.gain.low < total.gain.mean < total.gain.high and total.p < 0.01
    assert [c.kind for c in table.changes] == ["all", "comparison", "multi_hop", "single_hop"]


def test_validation_stands_in_for_held_out_questions(tmp_path):
    make_run(tmp_path / "run")
    (tmp_path / "run/after.jsonl").unlink()
    assert "validation questions, step 0 and step 20" in before_and_after(load_run(tmp_path / "run")).what
    (tmp_path / "run/validation/10.jsonl").unlink()
    (tmp_path / "run/validation/20.jsonl").unlink()
    assert before_and_after(load_run(tmp_path / "run")) is None


def test_arms_are_means_over_seeds(experiment):
    tables = [before_and_after(load_run(p)) for p in find_runs([experiment])]
    grpo, mapd = compare_arms(tables)
    assert (grpo.arm, len(grpo.after), mapd.arm, len(mapd.after)) == ("grpo", 1, "mapd", 2)
    assert mapd.mean.mean == pytest.approx(sum(mapd.after) / 2) and grpo.mean.low != grpo.mean.low  # one seed: NaN


def test_curves_are_pictures_of_what_was_logged(experiment, tmp_path):
    curves = {c.name: c for c in draw_curves([load_run(p) for p in find_runs([experiment])])}
    assert set(curves) == {"em", "searches", "length", "kl", "sources", "tags"}
    for curve in curves.values():
        assert set(curve.png) == {"light", "dark"} and curve.png["light"] != curve.png["dark"]
        width, height = struct.unpack(">II", curve.png["light"][16:24])
        assert curve.png["light"].startswith(b"\x89PNG") and width > 700 and height > 400
    # GRPO has no privileged context: no empty panel is drawn for it.
    assert "sources" not in {c.name for c in draw_curves([load_run(experiment / "grpo-seed0")])}
    # Deterministic: the same figures give the same bytes.
    assert draw_curves([load_run(experiment / "grpo-seed0")]) == draw_curves([load_run(experiment / "grpo-seed0")])


def test_moving_mean():
    assert moving_mean([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5] and moving_mean([]) == []


def test_trajectories_are_spread_over_kinds_and_outcomes():
    records = [episode_record(i, right=i % 7 == 0) for i in range(60)]
    chosen = choose(records + records, 10)
    assert len({r.question_id for r in chosen}) == 10
    assert {(r.kind, r.em) for r in chosen} == {(r.kind, r.em) for r in records}
    assert len(choose(records, 100)) == 60


def test_parts_join_to_the_trajectory():
    record = episode_record(1, True, searches=2)
    parts = split_parts(record)
    assert "".join(p.text for p in parts) == "".join(s["text"] for s in record.segments)
    assert [p.kind for p in parts] == ["think", "search", "observation"] * 2 + ["think", "answer"]


def test_trajectories_show_their_protocols(experiment):
    shown = show_trajectories(load_run(experiment / "mapd-seed0"), 10)
    assert len(shown) == 10 and all(s.origin == "training, step 20" for s in shown)
    for s in shown:
        number = int(s.record.question_id.removeprefix("train"))
        assert (f"Find the country of Town{number}." in s.protocol) == (number % 2 == 0)
        assert s.source in ("protocol", "own_rollout")


class Page(HTMLParser):
    """Collects tags, links and text; fails on an element left open."""

    VOID = frozenset({"meta", "img", "source", "br"})

    def __init__(self, html):
        super().__init__()
        self.links, self.tags, self.text, self.open = [], [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "poster", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)


def test_page(experiment, tmp_path, capsys):
    out = tmp_path / "new" / "report.html"
    assert main(["--runs", str(experiment), "--out", str(out)]) == 0
    assert "6 pictures" in capsys.readouterr().out
    html = out.read_text()
    page = Page(html)
    assert page.links and all(link.startswith("data:image/png;base64,") for link in page.links)
    assert "script" not in page.tags and "link" not in page.tags and "@import" not in html
    assert not re.search(r"url\(", html)
    text = " ".join(page.text)
    # What the policy wrote is text, never markup.
    assert "Nowhere <b>&" in text and "b" not in page.tags
    assert page.tags.count("details") == 10 and "10 trajectories of mapd-seed0" in text
    assert "prefers-color-scheme: dark" in html
    assert sorted(p.name for p in (out.parent / "curves").iterdir()) == [
        f"{name}.png" for name in ("em", "kl", "length", "searches", "sources", "tags")
    ]
    after = sum(r.em for r in read_records(experiment / "mapd-seed0/after.jsonl")) / 60
    assert f"{100 * after:.1f}" in text


def test_page_of_bare_metrics(tmp_path):
    (tmp_path / "run/metrics").mkdir(parents=True)
    (tmp_path / "run/metrics/000.jsonl").write_text('{"step": 1, "data": {"critic/score/mean": 0.5}}\n')
    assert main(["--runs", str(tmp_path / "run"), "--out", str(tmp_path / "r.html")]) == 0
    assert "There are not two evaluations" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(("arguments", "said"), [([], "nowhere: no such folder"), (["--trajectories", "-1"], "--traj")])
def test_bad_input(tmp_path, capsys, arguments, said):
    assert main(["--runs", "nowhere", "--out", str(tmp_path / "r.html"), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_empty_run_is_refused(tmp_path, capsys):
    (tmp_path / "run/rollouts").mkdir(parents=True)
    assert main(["--runs", str(tmp_path / "run"), "--out", str(tmp_path / "r.html")]) == 2
    assert "no metrics and no evaluations" in capsys.readouterr().err and not (tmp_path / "r.html").exists()
