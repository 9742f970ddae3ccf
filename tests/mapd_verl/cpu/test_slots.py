"""The slot table against a plain model of it: a slot's cache rows are marked with the token they belong to."""

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mapd_verl.cpu.slots import WORTH_WAITING, SlotTable

CAPACITY = 48
prompts = st.lists(st.integers(1, 2), min_size=2, max_size=CAPACITY - 8)


class Table(RuleBasedStateMachine):
    """Cache rows hold a fingerprint of the whole prefix up to them, as real keys and values depend on it."""

    @initialize()
    def start(self):
        self.table = SlotTable(torch.zeros(2, 2, 4, CAPACITY, 1, 1))
        self.requests: list[list[int]] = []

    def write(self, slot: int, tokens: list[int], begin: int) -> None:
        for at in range(begin, len(tokens)):
            self.table.cache[:, :, slot, at] = fingerprint(tokens[: at + 1])

    @precondition(lambda self: len(self.requests) < 4)
    @rule(prompt=prompts)
    def join(self, prompt):
        placed = self.table.place(prompt)
        assert placed is not None and placed.slot == len(self.requests)
        assert 0 <= placed.cached < len(prompt)
        self.write(placed.slot, prompt, placed.cached)
        self.table.prefilled()
        self.requests.append(list(prompt))

    @precondition(lambda self: len(self.requests) < 4 and any(len(r) > 3 for r in self.requests))
    @rule(data=st.data())
    def join_an_extension(self, data):
        base = data.draw(st.sampled_from([r for r in self.requests if len(r) > 3]))
        before = self.table.shared_prefix(np.array(base[:-1])).max()
        placed = self.table.place(base)
        assert placed.cached == before  # whatever had to be evicted for it, the best holder was used
        self.write(placed.slot, base, placed.cached)
        self.table.prefilled()
        self.requests.append(list(base))

    @precondition(lambda self: self.requests and all(len(r) < CAPACITY for r in self.requests))
    @rule(data=st.data())
    def decode(self, data):
        new = np.array([data.draw(st.integers(1, 2)) for _ in self.requests])
        for slot, token in enumerate(new):
            self.requests[slot].append(int(token))
            self.write(slot, self.requests[slot], len(self.requests[slot]) - 1)
        self.table.append(new)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data):
        slot = data.draw(st.integers(0, len(self.requests) - 1))
        last = self.table.finish(slot)
        self.requests[slot] = self.requests[last]
        self.requests.pop()

    def kept(self) -> list[int]:
        table = self.table
        return [s for s in range(table.active, table.slots) if table.length[s] > 3 and not table.stale[s]]

    @precondition(lambda self: self.kept())
    @rule(data=st.data())
    def join_a_prompt_that_a_finished_slot_holds(self, data):
        table = self.table
        slot = data.draw(st.sampled_from(self.kept()))
        count = data.draw(st.integers(3, int(table.length[slot])))
        prompt = [*table.tokens[slot, :count].tolist(), 3]
        placed = table.place(prompt)
        assert placed.cached >= count  # the best holder is never evicted for it
        self.write(placed.slot, prompt, placed.cached)
        table.prefilled()
        self.requests.append(prompt)

    @rule()
    def new_weights(self):
        self.table.invalidate()

    @invariant()
    def every_slot_holds_the_keys_of_its_tokens(self):
        table = self.table
        assert table.active == len(self.requests)
        for slot in range(table.slots):
            tokens = table.tokens[slot, : table.length[slot]].tolist()
            if slot < table.active:
                assert tokens == self.requests[slot]
            for at in range(len(tokens)):
                assert bool((table.cache[:, :, slot, at] == fingerprint(tokens[: at + 1])).all())


def fingerprint(tokens: list[int]) -> float:
    return float(hash(tuple(tokens)) % 1_000_003)


Table.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestTable = Table.TestCase


def new_table(slots: int = 4) -> SlotTable:
    return SlotTable(torch.zeros(1, 2, slots, CAPACITY, 1, 1))


def test_the_next_turn_extends_its_slot_in_place():
    table = new_table()
    first = table.place([1, 2, 3, 4])
    table.prefilled()
    table.append(np.array([5]))
    table.finish(first.slot)
    assert table.place([1, 2, 3, 4, 5, 6, 7]).cached == 5


def test_a_batch_mate_of_the_same_prompt_waits_for_its_keys():
    table = new_table()
    prompt = list(range(1, WORTH_WAITING + 3))
    assert table.place(prompt).cached == 0
    assert table.place(prompt) is None
    assert table.active == 1
    table.prefilled()
    assert table.place(prompt).cached == len(prompt) - 1


def test_new_weights_forget_everything_that_could_be_reused():
    table = new_table()
    prompt = list(range(1, 20))
    table.place(prompt)
    table.prefilled()
    table.place([7, 7])
    table.prefilled()
    table.finish(1)
    table.invalidate()
    assert table.shared_prefix(np.array(prompt)).max() == 0
    assert table.place(prompt).cached == 0


def test_a_request_that_outlives_new_weights_leaves_nothing_to_reuse():
    table = new_table()
    prompt = list(range(1, 20))
    table.place(prompt)
    table.prefilled()
    table.invalidate()
    table.finish(0)
    assert table.place(prompt).cached == 0
