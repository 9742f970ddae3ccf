import pytest

from mapd_verl.cpu import router
from mapd_verl.cpu.router import StickyRouter


def test_turns_of_a_trajectory_stay_and_new_ones_go_to_the_idlest():
    balance = StickyRouter({"a": 1, "b": 2})
    first, _ = balance.acquire_server("t1")
    second, handle = balance.acquire_server("t2")
    assert {first, second} == {"a", "b"} and handle == {"a": 1, "b": 2}[second]
    for _ in range(3):
        assert balance.acquire_server("t1")[0] == first
    assert balance.acquire_server("t3")[0] == second
    assert balance.get_total_inflight() == 6
    balance.release_server(first)
    assert balance.get_status()["servers"] == {first: 3, second: 2}


def test_a_removed_server_loses_its_trajectories():
    balance = StickyRouter({"a": 1, "b": 2})
    name, _ = balance.acquire_server("t")
    balance.remove_servers([name])
    balance.release_server(name)  # its request ends after the removal
    assert balance.acquire_server("t")[0] != name
    balance.remove_servers(["a", "b"])
    with pytest.raises(RuntimeError, match="No available servers"):
        balance.acquire_server("t")
    balance.add_servers({"c": 3})
    assert balance.acquire_server("t") == ("c", 3)


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(router, "MAX_REMEMBERED", 5)
    balance = StickyRouter({"a": 1})
    for index in range(50):
        balance.acquire_server(str(index))
    assert balance.clear_sticky_cache()["cleared_entries"] == 5
