"""The ``mapd`` section of a recipe: dataclasses, validated when they are loaded.

A method is a row of a table (privileged context, teacher, signal, where it enters); ``privilege`` and
``objective`` together are that row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mapd_verl.agent.config import AgentConfig
from mapd_verl.config.estimators import ESTIMATORS, SAMPLED_NAMES, TOPK_OF, refusal
from mapd_verl.config.method import FilterConfig, ScheduleConfig, TeacherConfig
from mapd_verl.config.safety import NanGuardConfig, WatchConfig
from mapd_verl.data.join import POLICIES, REVIEWED_POLICIES, JoinPolicies, corpus_hash
from mapd_verl.errors import UserError

#: Names of ``mapd_verl.objectives`` and of ``mapd_verl.privilege``; spelled out so that reading a recipe
#: needs no torch. A test keeps them equal to the registries.
OBJECTIVE_NAMES = (
    "none",
    "reverse_kl",
    "forward_kl",
    "jsd",
    "sigmoid_gated",
    "bounded_advantage",
    "scaled_advantage",
    "teacher_advantage",
    "teacher_reward",
)
SOURCE_NAMES = ("none", "protocol", "own_rollout", "empty", "shuffled", "answer_only")
FORWARDS = ("lean", "stock")


@dataclass
class EstimatorConfig:
    """How ``l_t`` is computed. Bad values raise ``ValueError`` naming the key."""

    name: str = "full"
    """``full`` compares whole distributions; ``topk`` the ``k`` most likely tokens and the tail in one bucket;
    ``sampled`` the sampled token's log-probabilities. All run through the same head pass: ``full`` costs no more."""

    k: int | None = None
    """Only for ``topk``, which needs it. SDPO takes 100, OPCD 256, HDPO 64."""

    of: str | None = None
    """Only for ``topk``, which needs it: whose most likely tokens, ``student``, ``teacher`` or ``union``."""

    sample: str | None = None
    """Only for ``sampled``, which needs it: ``score``, ``k1_weighted``, ``k2`` or ``k3_weighted`` (Skill-SD's)."""

    def __post_init__(self) -> None:
        if self.name not in ESTIMATORS:
            raise ValueError(
                f"mapd.objective.estimator.name: unknown {self.name!r}, choose from {', '.join(ESTIMATORS)}"
            )
        for key, owner in (("k", "topk"), ("of", "topk"), ("sample", "sampled")):
            if (getattr(self, key) is not None) != (self.name == owner):
                raise ValueError(
                    f"mapd.objective.estimator.{key}: {owner} needs it and no other takes it, "
                    f"got {getattr(self, key)} for {self.name}"
                )
        if self.k is not None and self.k < 1:
            raise ValueError(f"mapd.objective.estimator.k: must be at least 1, got {self.k}")
        if self.of is not None and self.of not in TOPK_OF:
            raise ValueError(f"mapd.objective.estimator.of: unknown {self.of!r}, choose from {', '.join(TOPK_OF)}")
        if self.sample is not None and self.sample not in SAMPLED_NAMES:
            raise ValueError(f"mapd.objective.estimator.sample: {refusal(self.sample)}")


@dataclass
class ObjectiveConfig:
    """What is added to GRPO. Bad values raise ``ValueError`` naming the key."""

    name: str = "reverse_kl"
    """``none`` is GRPO, ``reverse_kl`` is MAPD (and GRPO+OPSD); ``forward_kl`` and ``jsd`` are its siblings. On the
    sampled token: ``sigmoid_gated`` (SDAR), ``bounded_advantage`` (EviSD), ``scaled_advantage`` (RLSD),
    ``teacher_advantage`` (Thinking Machines), ``teacher_reward`` (DGPO)."""

    weight: float = 0.05
    """Lambda of ``L_GRPO + lambda * L_OPSD``; 0 is GRPO exactly and skips the teacher forward. The paper
    tries 0.01, 0.05 and 0.1 and finds 0.05 best."""

    beta: float | None = None
    """Only for ``jsd``: the teacher's weight in the mixture. By OPSD's convention 0 is ``forward_kl``, 1
    ``reverse_kl``."""

    sharpness: float | None = None
    """Only for ``sigmoid_gated`` (SDAR's gate has 5) and ``bounded_advantage`` (EviSD's tau is 5)."""

    ratio_clip: float | None = None
    """Only for ``scaled_advantage``: RLSD's e is 0.2."""

    token_clip: float | None = None
    """Nats above which a token's loss is cut, and with it its gradient; null cuts nothing (the paper's MAPD)."""

    clip: float | None = None
    """Upper bound of each vocabulary entry's summand, nats; null leaves them (as the paper). OPSD's later versions
    take 0.05."""

    estimator: EstimatorConfig = field(default_factory=EstimatorConfig)

    chunk_tokens: int = 256
    """Tokens whose logits exist at once, in every forward with ``mapd.forward: lean``: two buffers of this many rows
    of the vocabulary. Changes memory and speed, never values."""

    def __post_init__(self) -> None:
        if self.name not in OBJECTIVE_NAMES:
            raise ValueError(f"mapd.objective.name: unknown {self.name!r}, choose from {', '.join(OBJECTIVE_NAMES)}")
        if not 0.0 <= self.weight < float("inf"):
            raise ValueError(f"mapd.objective.weight: must be a finite number >= 0, got {self.weight}")
        if (self.beta is not None) != (self.name == "jsd"):
            raise ValueError(
                f"mapd.objective.beta: jsd needs it and no other takes it, got {self.beta} for {self.name}"
            )
        if self.beta is not None and not 0.0 <= self.beta <= 1.0:
            raise ValueError(f"mapd.objective.beta: must lie between 0 and 1, got {self.beta}")
        if self.clip is not None and not 0.0 < self.clip < float("inf"):
            raise ValueError(f"mapd.objective.clip: must be a positive number of nats or null, got {self.clip}")
        if self.estimator.name == "sampled" and self.name not in ("none", "reverse_kl"):
            raise ValueError(f"mapd.objective.estimator.name: sampled estimates reverse_kl only, not {self.name}")
        if self.estimator.name == "sampled" and self.clip is not None:
            raise ValueError("mapd.objective.clip: sampled has no summand per vocabulary entry to clip")
        for key, users in (
            ("sharpness", ("sigmoid_gated", "bounded_advantage")),
            ("ratio_clip", ("scaled_advantage",)),
        ):
            value = getattr(self, key)
            if (value is not None) != (self.name in users):
                raise ValueError(
                    f"mapd.objective.{key}: {' and '.join(users)} need it and no other takes it, "
                    f"got {value} for {self.name}"
                )
            if value is not None and not 0.0 < value < float("inf"):
                raise ValueError(f"mapd.objective.{key}: must be a finite number > 0, got {value}")
        if self.token_clip is not None and not 0.0 < self.token_clip < float("inf"):
            raise ValueError(f"mapd.objective.token_clip: must be null or a finite number > 0, got {self.token_clip}")
        if self.chunk_tokens < 1:
            raise ValueError(f"mapd.objective.chunk_tokens: must be at least 1, got {self.chunk_tokens}")


@dataclass
class PrivilegeConfig:
    """What the teacher reads and the student does not. Bad values raise ``ValueError`` naming the key."""

    context: str = "protocol"
    """``protocol``, ``own_rollout``, or a control: ``none``, ``empty``, ``shuffled``, ``answer_only``."""

    fallback: str = "own_rollout"
    """The source asked when the first has nothing for a sample; ``none`` leaves it without a term."""

    template: str = "\n\n{context}"
    """How the context joins the end of the last user message. Must hold ``{context}`` once."""

    max_context_tokens: int = 512
    """A longer protocol loses whole facts, then plan steps, from their ends; any other context loses its end. The
    question is never cut."""

    success_score: float = 1.0
    """The reward from which a rollout counts as successful (exact match gives 0 or 1)."""

    def __post_init__(self) -> None:
        for key in ("context", "fallback"):
            if getattr(self, key) not in SOURCE_NAMES:
                raise ValueError(
                    f"mapd.privilege.{key}: unknown {getattr(self, key)!r}, choose from {', '.join(SOURCE_NAMES)}"
                )
        if self.template.count("{context}") != 1:
            raise ValueError(f"mapd.privilege.template: must hold {{context}} exactly once, got {self.template!r}")
        if self.max_context_tokens < 1:
            raise ValueError(f"mapd.privilege.max_context_tokens: must be at least 1, got {self.max_context_tokens}")


@dataclass
class ProtocolsConfig:
    """Where protocols come from and how they read in a prompt."""

    path: str | None = None
    """The protocol cache (SQLite); null trains without protocols."""

    template: str = "compact"
    """A template of ``protocol_cache``, by name or as the path of a ``.j2`` file."""

    missing: str = "fallback"
    """A training question that is not in the cache, or whose synthesis failed: ``fallback`` leaves it to
    ``privilege.fallback``, ``skip`` drops it, ``error`` refuses to start."""

    rejected: str = "fallback"
    """The same for one whose every candidate the gate refused, or whose protocol a person withdrew."""

    stale: str = "error"
    """The same for a protocol of another schema version or over another corpus: most often a wrong file, so that
    the default refuses to start."""

    reviewed_bad: str = "fallback"
    """The same for a protocol that a person marked as bad (``mapd protocols view``); ``keep`` uses it all the same."""

    corpus: str | None = None
    """What the protocols' corpus hash is compared with: a corpus file, hashed at the start, or ``sha256:`` and its
    hash; null compares no corpus."""

    def __post_init__(self) -> None:
        for key, choices in (
            ("missing", POLICIES),
            ("rejected", POLICIES),
            ("stale", POLICIES),
            ("reviewed_bad", REVIEWED_POLICIES),
        ):
            if getattr(self, key) not in choices:
                raise ValueError(f"mapd.protocols.{key}: choose from {', '.join(choices)}, got {getattr(self, key)!r}")

    def policies(self) -> JoinPolicies:
        """As the join wants them; hashes the corpus file where one is named."""
        return JoinPolicies(self.missing, self.rejected, self.stale, self.reviewed_bad, corpus_hash(self.corpus))


@dataclass
class MapdConfig:
    """The whole section. Bad values raise ``ValueError`` naming the key."""

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    privilege: PrivilegeConfig = field(default_factory=PrivilegeConfig)
    protocols: ProtocolsConfig = field(default_factory=ProtocolsConfig)
    agent: dict[str, Any] = field(default_factory=dict)
    """Keys of :class:`mapd_verl.agent.config.AgentConfig`."""

    forward: str = "lean"
    """``lean`` leaves out of every forward what no loss reads: logits of prompts and observations, masks of
    padding, most of the padding itself. ``stock`` is verl's own forward. Same losses up to rounding."""

    watch: WatchConfig = field(default_factory=WatchConfig)
    nan_guard: NanGuardConfig = field(default_factory=NanGuardConfig)

    poll_interval: float = 0.05
    """Seconds between two looks at the rollouts that still run (verl's own 2 s is most of a small step)."""

    def __post_init__(self) -> None:
        if self.forward not in FORWARDS:
            raise ValueError(f"mapd.forward: choose from {', '.join(FORWARDS)}, got {self.forward!r}")
        if self.poll_interval <= 0:
            raise ValueError(f"mapd.poll_interval: must be a positive number of seconds, got {self.poll_interval}")
        AgentConfig.from_mapping(self.agent)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any] | None) -> MapdConfig:
        """The section as it stands in a recipe (plain or OmegaConf containers); None is all defaults.

        Raises:
            UserError: one line naming the key, for anything unknown, of a wrong type or out of range.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            section: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), mapping or {}))
            return section
        except OmegaConfBaseException as error:
            key = f"mapd.{error.full_key}: " if error.full_key else "mapd: "
            raise UserError(key + str(error).splitlines()[0]) from error
        except ValueError as error:
            raise UserError(str(error)) from error
