import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapd_verl import views

ids = st.lists(st.integers(0, 99), max_size=7)
rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, 99), min_size=1, max_size=6),  # prompt
        st.lists(st.tuples(st.integers(0, 99), st.integers(0, 1)), min_size=1, max_size=9),  # response and mask
        ids,  # what the teacher's prompt has in front
        st.booleans(),  # whether there is a context
    ),
    min_size=1,
    max_size=5,
)


def nested(values):
    return views.ragged([torch.tensor(v, dtype=torch.int64) for v in values])


def batch_of(drawn):
    prompts = nested([p for p, _, _, _ in drawn])
    responses = nested([[t for t, _ in r] for _, r, _, _ in drawn])
    mask = nested([[m for _, m in r] for _, r, _, _ in drawn])
    input_ids, position_ids = views.splice(prompts.unbind(), responses.unbind())
    return prompts, responses, mask, input_ids, position_ids


@settings(max_examples=80, deadline=None)
@given(rows)
def test_selection_names_each_policy_token_and_no_other(drawn):
    _, responses, mask, _, _ = batch_of(drawn)
    selection = views.select_tokens(mask)
    expected = [(i, t) for i, (_, r, _, _) in enumerate(drawn) for t, (_, m) in enumerate(r) if m]
    assert list(zip(selection.rows.tolist(), selection.steps.tolist(), strict=True)) == expected
    assert views.take(responses, selection).tolist() == [drawn[i][1][t][0] for i, t in expected]


@settings(max_examples=80, deadline=None)
@given(rows)
def test_packed_and_padded_positions_point_before_the_same_token(drawn):
    """What stands one place after the predicting position is the selected response token, in both layouts."""
    prompts, responses, mask, input_ids, _ = batch_of(drawn)
    selection = views.select_tokens(mask)
    tokens = views.take(responses, selection)
    packed = views.packed_positions(prompts, input_ids, selection)
    assert torch.equal(input_ids.values()[packed + 1], tokens)
    padded = views.padded_positions(prompts, input_ids, selection)
    assert torch.equal(input_ids.to_padded_tensor(-1).reshape(-1)[padded + 1], tokens)


@settings(max_examples=80, deadline=None)
@given(rows)
def test_both_views_predict_the_same_tokens(drawn):
    """Splice and slice: the teacher's longer prompt moves positions, never which token is compared with which."""
    _, responses, mask, _, _ = batch_of(drawn)
    teacher_prompts = nested([extra + p for p, _, extra, _ in drawn])
    has_context = torch.tensor([c for _, _, _, c in drawn])
    selection = views.select_tokens(mask)
    view = views.teacher_view(teacher_prompts, responses, has_context, selection)
    wanted = [i for i, (_, r, _, c) in enumerate(drawn) if c and any(m for _, m in r)]
    if not wanted:
        assert view is None
        return
    assert view.rows.tolist() == wanted
    for row, i in zip(view.input_ids.unbind(), wanted, strict=True):
        prompt, response, extra, _ = drawn[i]
        assert row.tolist() == extra + prompt + [t for t, _ in response]
    for row in view.position_ids.unbind():
        assert row.tolist() == list(range(len(row)))
    student_tokens = views.take(responses, selection)[view.mask]
    packed = views.packed_positions(view.prompts, view.input_ids, view.selection)
    assert torch.equal(view.input_ids.values()[packed + 1], student_tokens)
    padded = views.padded_positions(view.prompts, view.input_ids, view.selection)
    assert torch.equal(view.input_ids.to_padded_tensor(-1).reshape(-1)[padded + 1], student_tokens)
    # Position by position, in the response's own count.
    assert torch.equal(view.rows[view.selection.rows], selection.rows[view.mask])
    assert torch.equal(view.selection.steps, selection.steps[view.mask])


@settings(max_examples=50, deadline=None)
@given(rows)
def test_an_empty_context_gives_the_student_its_own_view(drawn):
    prompts, responses, mask, input_ids, position_ids = batch_of(drawn)
    selection = views.select_tokens(mask)
    view = views.teacher_view(prompts, responses, torch.ones(len(drawn), dtype=torch.bool), selection)
    if view is None:
        assert len(selection) == 0
        return
    for i, row in enumerate(view.rows.tolist()):
        assert torch.equal(view.input_ids.unbind()[i], input_ids.unbind()[row])
        assert torch.equal(view.position_ids.unbind()[i], position_ids.unbind()[row])
    assert bool(view.mask.all())


@settings(max_examples=50, deadline=None)
@given(rows)
def test_scattered_values_come_back_through_verls_slice(drawn):
    """The layout is the one that verl's ``no_padding_2_padding`` reads: response token t in column t."""
    prompts, _, mask, input_ids, _ = batch_of(drawn)
    selection = views.select_tokens(mask)
    values = torch.arange(1.0, len(selection) + 1, requires_grad=True)
    spread = views.scatter_packed(values, views.packed_positions(prompts, input_ids, selection), input_ids)
    ends = input_ids.offsets()[1:].tolist()
    for i, (end, (_, response, _, _)) in enumerate(zip(ends, drawn, strict=True)):
        column = spread.values()[end - len(response) - 1 : end - 1]
        expected = torch.zeros(len(response))
        mine = selection.rows == i
        expected[selection.steps[mine]] = values.detach()[mine]
        assert torch.equal(column.detach(), expected)
    spread.values().sum().backward()
    assert torch.equal(values.grad, torch.ones_like(values))


def test_a_padded_field_is_refused():
    with pytest.raises(ValueError, match="response_mask must be a jagged nested tensor"):
        views.select_tokens(torch.ones(2, 3))


def test_an_empty_prompt_is_refused():
    prompts = torch.nested.nested_tensor_from_jagged(torch.tensor([5, 6]), torch.tensor([0, 0, 2]))
    selection = views.select_tokens(nested([[1], [1]]))
    with pytest.raises(ValueError, match="empty prompt"):
        views.predicting_positions(prompts, selection)


def test_views_of_different_batches_are_refused():
    with pytest.raises(ValueError, match="2 prompts cannot meet 1 responses"):
        views.splice(nested([[1], [2]]).unbind(), nested([[3]]).unbind())
