"""The student's and the teacher's view of one response, and which positions face each other.

Everything about alignment is here. The student reads ``[x, y]``, the teacher ``[x + z, y]``: the same
response ids behind a longer prompt. What predicts response token ``t`` sits at position
``prompt_length + t - 1`` of its own sequence, so the two views are aligned by ``(row, t)`` and never by
absolute position.

Shapes: ``B`` rows, ``T_x`` prompt tokens, ``T`` response tokens of a row, ``N`` selected tokens. Ragged
tensors are jagged nested tensors, as verl's batches hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def ragged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of different lengths as one jagged nested tensor, ``[B, *]``."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def lengths_of(nested: torch.Tensor, name: str) -> torch.Tensor:
    """Row lengths, ``[B]`` int64.

    Raises:
        ValueError: the field isn't a jagged nested tensor (a padded layout would be misread).
    """
    if not (nested.is_nested and nested.layout == torch.jagged):
        raise ValueError(f"{name} must be a jagged nested tensor, got {type(nested).__name__} {nested.layout}")
    return nested.offsets().diff()


@dataclass(frozen=True)
class TokenSelection:
    """Response tokens picked out of a batch.

    Attributes:
        rows: row of each token, ``[N]`` int64, non-decreasing.
        steps: its position ``t`` in the response, ``[N]`` int64, ascending within a row.
    """

    rows: torch.Tensor
    steps: torch.Tensor

    def __len__(self) -> int:
        return self.rows.shape[0]

    def keep(self, mask: torch.Tensor) -> TokenSelection:
        """The tokens where ``mask`` (``[N]`` bool) is true."""
        return TokenSelection(self.rows[mask], self.steps[mask])


def select_tokens(response_mask: torch.Tensor) -> TokenSelection:
    """The policy tokens of a batch, turn by turn; observations (0) are left out.

    Args:
        response_mask: nested ``[B, T]``, 1 where the policy sampled the token.
    """
    lengths = lengths_of(response_mask, "response_mask")
    flat = response_mask.values() != 0
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=flat.device), lengths)
    steps = torch.arange(flat.shape[0], device=flat.device) - response_mask.offsets()[:-1][rows]
    return TokenSelection(rows[flat], steps[flat])


def predicting_positions(prompts: torch.Tensor, selection: TokenSelection) -> torch.Tensor:
    """Where in its sequence each selected token is predicted: ``T_x + t - 1``, ``[N]``.

    Args:
        prompts: nested ``[B, T_x]``, the prompts of this view.

    Raises:
        ValueError: a row with selected tokens has an empty prompt, so nothing predicts its first token.
    """
    positions = lengths_of(prompts, "prompts")[selection.rows] + selection.steps - 1
    if len(selection) and int(positions.min()) < 0:
        raise ValueError("an empty prompt predicts nothing: every view needs at least one prompt token")
    return positions


def packed_positions(prompts: torch.Tensor, input_ids: torch.Tensor, selection: TokenSelection) -> torch.Tensor:
    """The same positions in the rows laid end to end without padding, ``[N]``."""
    return input_ids.offsets()[:-1][selection.rows] + predicting_positions(prompts, selection)


def padded_positions(prompts: torch.Tensor, input_ids: torch.Tensor, selection: TokenSelection) -> torch.Tensor:
    """The same positions in rows padded on the right to the longest and laid end to end, ``[N]``."""
    width = int(lengths_of(input_ids, "input_ids").max())
    return width * selection.rows + predicting_positions(prompts, selection)


def take(nested: torch.Tensor, selection: TokenSelection) -> torch.Tensor:
    """A per-response-token field at the selected tokens, ``[N]``."""
    return nested.values()[nested.offsets()[:-1][selection.rows] + selection.steps]


def splice(prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A view: each response behind its prompt.

    Returns:
        ``input_ids`` and ``position_ids``, nested ``[B, T_x + T]``; positions count from 0 in each row.

    Raises:
        ValueError: numbers of rows differ.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts cannot meet {len(responses)} responses")
    rows = [torch.cat([prompt, response]) for prompt, response in zip(prompts, responses, strict=True)]
    return ragged(rows), ragged([torch.arange(len(row), device=row.device) for row in rows])


@dataclass(frozen=True)
class TeacherView:
    """The rows that have a privileged context, behind their privileged prompts.

    Attributes:
        prompts: nested ``[B', T_teacher]``.
        input_ids, position_ids: nested ``[B', T_teacher + T]``.
        rows: which row of the student's batch each is, ``[B']``.
        selection: their tokens that want a teacher, in rows of this view.
        mask: which of the student's selected tokens those are, ``[N]`` bool.
    """

    prompts: torch.Tensor
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    rows: torch.Tensor
    selection: TokenSelection
    mask: torch.Tensor


def teacher_view(
    teacher_prompts: torch.Tensor,
    responses: torch.Tensor,
    has_context: torch.Tensor,
    selection: TokenSelection,
    wanted_tokens: torch.Tensor | None = None,
) -> TeacherView | None:
    """The teacher's view of the rows with a context and a token that wants a teacher; None if there is no such row.

    Args:
        teacher_prompts: nested ``[B, T_teacher]``; rows without a context are not read.
        responses: nested ``[B, T]``, the same ids that the student reads.
        has_context: ``[B]`` bool.
        selection: the student's selected tokens.
        wanted_tokens: which of them the teacher is to judge, ``[N]`` bool; None: all.
    """
    if wanted_tokens is None:
        wanted_tokens = torch.ones_like(selection.rows, dtype=torch.bool)
    wanted = has_context.clone()
    wanted &= torch.bincount(selection.rows[wanted_tokens], minlength=len(wanted)) > 0
    rows = wanted.nonzero().squeeze(-1)
    if len(rows) == 0:
        return None
    mask = wanted[selection.rows] & wanted_tokens
    new_row = torch.cumsum(wanted, 0) - 1
    kept = selection.keep(mask)
    all_prompts, all_responses = teacher_prompts.unbind(), responses.unbind()
    prompts = [all_prompts[i] for i in rows.tolist()]
    input_ids, position_ids = splice(prompts, [all_responses[i] for i in rows.tolist()])
    return TeacherView(
        prompts=ragged(prompts),
        input_ids=input_ids,
        position_ids=position_ids,
        rows=rows,
        selection=TokenSelection(new_row[kept.rows], kept.steps),
        mask=mask,
    )


def scatter_packed(values: torch.Tensor, positions: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Per-token values at packed positions as a nested tensor shaped like ``input_ids``, 0 elsewhere.

    This is the layout in which verl's engines hand over log-probabilities: the value for response token ``t``
    stands where it is predicted. Differentiable in ``values``.
    """
    flat = values.new_zeros(input_ids.values().shape[0]).index_copy(0, positions, values)
    return torch.nested.nested_tensor_from_jagged(flat, input_ids.offsets())
