from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol_cache.synthesis.orchestrator import topological_levels
from protocol_cache.synthesis.state import SubTask


def ids(levels: list[list[SubTask]]) -> list[list[str]]:
    return [[task.id for task in level] for level in levels]


def test_what_is_independent_runs_side_by_side() -> None:
    tasks = [SubTask("c", "g", ("a", "b")), SubTask("a", "g"), SubTask("b", "g"), SubTask("d", "g", ("c", "old"))]
    assert ids(topological_levels(tasks, known=["old"])) == [["a", "b"], ["c"], ["d"]]


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([SubTask("a", "g", ("b",)), SubTask("b", "g", ("a",))], "circle"),
        ([SubTask("a", "g", ("a",))], "circle"),
        ([SubTask("a", "g", ("x",))], "'x', which does not exist"),
        ([SubTask("a", "g"), SubTask("a", "h")], "twice"),
        ([SubTask("old", "g")], "taken"),
    ],
)
def test_a_graph_that_cannot_run_is_refused_and_named(tasks: list[SubTask], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        topological_levels(tasks, known=["old"])


@given(st.data())
def test_every_task_runs_once_and_after_what_it_needs(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    order = data.draw(st.permutations(range(count)))
    tasks = []
    for place, number in enumerate(order):
        earlier = [f"t{n}" for n in order[:place]]
        needs = data.draw(st.lists(st.sampled_from(earlier), unique=True)) if earlier else []
        tasks.append(SubTask(f"t{number}", "g", tuple(needs)))
    levels = topological_levels(sorted(tasks, key=lambda t: t.id))
    done: set[str] = set()
    for level in levels:
        for task in level:
            assert set(task.depends_on) <= done
        done |= {task.id for task in level}
    assert sorted(i for level in ids(levels) for i in level) == sorted(t.id for t in tasks)
