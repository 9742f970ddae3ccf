"""verl's dataset with each row checked at load and joined with its protocol by question id.

Named by a recipe as ``data.custom_cls.{path: pkg://mapd_verl.data.dataset, name: ProtocolDataset}``. Rows gain
``question_id``, ``protocol`` (the rendered text, "" where there is none), ``task_type`` and ``protocol_state`` (one of
``data.join.STATES``); the agent loop makes the teacher's prompt of the text, the controls (``shuffled``) hand it to
another question, and the trainer counts the states.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from mapd_verl.config.schema import MapdConfig
from mapd_verl.data.join import Budget, Join, Joined, join_protocols
from mapd_verl.data.rows import id_columns, iter_questions, question_ids, read_row
from mapd_verl.errors import UserError
from mapd_verl.verl_seams import RLHFDataset

logger = logging.getLogger(__name__)


class ProtocolDataset(RLHFDataset):
    """Adds ``question_id``, ``protocol``, ``task_type`` and ``protocol_state`` to verl's rows.

    Only training files are joined: nothing privileged comes near a validation question.

    Raises:
        UserError: one line naming the file and the row, for a row that cannot be trained on, a prompt longer than
            ``data.max_prompt_length`` (unless ``data.filter_overlong_prompts`` drops it), or a cache that cannot
            be read or holds nothing for these questions.
    """

    dataframe: Any  # a datasets.Dataset, set by verl
    join: Join | None = None
    """What the join found; None for validation files and where no cache is named."""

    def _read_files_and_tokenize(self) -> None:
        ids = [qid for path in self.data_files for qid in self._checked(path)]
        super()._read_files_and_tokenize()
        protocols = _mapd_config(self.config).protocols
        if protocols.path is None or not self._is_training():
            return
        join = join_protocols(protocols.path, ids, protocols.template, protocols.policies())
        self.join = join
        logger.warning("%s: %s; by policy: %s", protocols.path, join, join.actions())
        if not join.texts:
            raise UserError(
                f"{protocols.path}: no protocol for any of the {len(ids)} questions of {self._names()} ({join})"
            )
        if join.actions()["skip"]:
            ids = question_ids(self.dataframe.select_columns(id_columns(self.dataframe.column_names)), self._names())
            self.dataframe = self.dataframe.select([i for i, qid in enumerate(ids) if join.action(qid) != "skip"])

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = super().__getitem__(item)
        row["question_id"] = read_row(row, f"{self._names()}: row {item + 1}").question_id
        joined = self.join.look_up(row["question_id"], self._budget()) if self.join else Joined("", "", "")
        row["protocol"], row["task_type"], row["protocol_state"] = joined.text, joined.task_type, joined.state
        return row

    def _budget(self) -> Budget:
        """What the teacher's prompt leaves a protocol, so that :func:`truncate_context` has nothing to cut."""
        return Budget(
            _mapd_config(self.config).privilege.max_context_tokens,
            lambda text: len(self.tokenizer.encode(text, add_special_tokens=False)),
        )

    def _checked(self, path: str) -> Iterator[str]:
        """The id of each row, once the row is found fit for training."""
        from mapd_verl.privilege import privileged_prompt_ids

        for number, question in enumerate(iter_questions(path), 1):
            if not self.filter_overlong_prompts:
                kwargs = self.apply_chat_template_kwargs
                prompt = privileged_prompt_ids(
                    self.tokenizer, question.messages, None, apply_chat_template_kwargs=kwargs
                )
                if len(prompt) > self.max_prompt_length:
                    raise UserError(
                        f"{path}: row {number}: the prompt has {len(prompt)} tokens, "
                        f"above data.max_prompt_length={self.max_prompt_length}"
                    )
            yield question.question_id

    def _is_training(self) -> bool:
        train = self.config.get("train_files") or []
        train = [train] if isinstance(train, str) else list(train)
        return all(str(path) in map(str, train) for path in self.original_data_files)

    def _names(self) -> str:
        return ", ".join(map(str, self.original_data_files))


def _mapd_config(data_config: Any) -> MapdConfig:
    """The ``mapd`` section beside this ``data`` section in the recipe; all defaults where there is none."""
    from omegaconf import OmegaConf

    # An interpolation looks from the root of the tree that the node hangs in; a plain `select` would look below it.
    section = OmegaConf.create({"mapd": "${oc.select:mapd,null}"}, parent=data_config).mapd
    return MapdConfig.from_mapping(section)
