"""The stages of a run, each a function from the run's folder and services to files.

Where a stage is a program of its own (synthesis, training, evaluation) it runs as one, so that its
memory is given back and its output has a log.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mapd_verl import launch, processes
from mapd_verl.errors import UserError
from mapd_verl.quickstart.state import RunState, fingerprint

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mapd_verl.quickstart.options import Options

_SOURCE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Arm:
    """One training run: a recipe and a seed."""

    name: str
    recipe: str
    seed: int

    @property
    def label(self) -> str:
        """Name of its folder."""
        return f"{self.name}-seed{self.seed}"


@dataclass(frozen=True)
class Layout:
    """Where a run keeps what."""

    run: Path

    @property
    def data(self) -> Path:
        """Corpus and questions."""
        return self.run / "data"

    @property
    def protocols(self) -> Path:
        """The protocol cache."""
        return self.run / "protocols.sqlite"

    @property
    def before(self) -> Path:
        """Records of the untrained student."""
        return self.run / "before.jsonl"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.run / "report.html"

    def logs(self, name: str) -> Path:
        """The log of a stage."""
        return self.run / "logs" / f"{name}.log"

    def folder(self, arm: Arm) -> Path:
        """Checkpoints, metrics and rollouts of an arm."""
        return self.run / arm.label

    def after(self, arm: Arm) -> Path:
        """Records of the trained student."""
        return self.folder(arm) / "after.jsonl"


class Stages:
    """The stages of one run; every method leaves its entry in ``state.json``."""

    def __init__(self, options: Options, state: RunState) -> None:
        self.options = options
        self.state = state
        self.layout = Layout(options.run)

    def world(self, config: DictConfig) -> dict[str, Any]:
        """Corpus and questions: as many training questions as the training will draw."""
        from mapd_verl.data.geonames.build import WorldConfig, build_world

        steps = self.options.steps or int(config.trainer.total_training_steps)
        world = WorldConfig(
            train=max(2, steps) * int(config.data.train_batch_size),
            val=max(1, int(config.data.val_max_samples)) if config.data.val_max_samples > 0 else 200,
            test=self.options.test_questions,
        )
        inputs = fingerprint(vars(world), _SOURCE / "data/geonames")
        outputs = tuple(self.layout.data / f"{name}.parquet" for name in ("train", "val", "test"))
        return self.state.stage("world", inputs, outputs, lambda: build_world(self.layout.data, world))

    def protocols(self, retriever: str) -> dict[str, Any]:
        """Protocols for the training questions, by the rule-based teacher behind a local HTTP server."""
        questions = self.layout.data / "train.parquet"
        package = _SOURCE.parent / "protocol_cache"
        inputs = fingerprint(questions, self.layout.data / "corpus.jsonl", package, _SOURCE / "data/geonames")

        def work() -> dict[str, Any]:
            from mapd_verl.data.geonames.teacher import MODEL, start_teacher

            with service(start_teacher, log=self.layout.logs("teacher")) as teacher:
                command = [sys.executable, "-m", "protocol_cache", "synthesize", "--questions", str(questions)]
                command += ["--out", str(self.layout.protocols), "--retriever", retriever]
                command += ["--corpus", str(self.layout.data / "corpus.jsonl")]
                command += ["--model", f"openai/{MODEL}", "--api-base", f"{teacher}/v1"]
                processes.run(command, self.layout.logs("protocols"), what="synthesis")
            return self.protocol_counts()

        return self.state.stage("protocols", inputs, (self.layout.protocols,), work)

    def protocol_counts(self) -> dict[str, Any]:
        """The cache's own account of itself."""
        from protocol_cache.store import ProtocolStore

        with ProtocolStore(self.layout.protocols, readonly=True) as store:
            stats = store.stats()
        return dict(stats) if isinstance(stats, dict) else dict(vars(stats))

    def evaluate(self, name: str, model: Path, config: DictConfig, retriever: str, out: Path) -> dict[str, Any]:
        """Held-out questions answered by ``model``, greedily; records to ``out``."""
        questions = self.layout.data / "test.parquet"
        agent = config.mapd.agent
        budgets = ["--max-response-tokens", str(config.data.max_response_length)]
        for key in ("max_searches", "max_turn_tokens", "max_observation_tokens", "max_passage_tokens", "topk"):
            budgets += [f"--{key.replace('_', '-')}", str(agent[key])]
        command = [sys.executable, "-m", "mapd_verl.evaluation.offline", "--model", str(model), *budgets]
        command += ["--data", str(questions), "--retriever", retriever, "--out", str(out)]
        inputs = fingerprint(model, questions, budgets, _SOURCE / "agent", _SOURCE / "evaluation")

        def work() -> None:
            env = launch.environment(config)
            processes.run(command, self.layout.logs(name), env, what=f"evaluation '{name}'")

        return self.state.stage(name, inputs, (out,), work)

    def overrides(self, arm: Arm, retriever: str) -> list[str]:
        """The recipe's keys that this run decides."""
        layout, folder = self.layout, self.layout.folder(arm)
        overrides = [
            f"data.train_files={layout.data / 'train.parquet'}",
            f"data.val_files={layout.data / 'val.parquet'}",
            f"mapd.agent.retriever_urls=['{retriever}']",
            f"trainer.default_local_dir={folder}",
            f"trainer.experiment_name={arm.label}",
            f"data.seed={arm.seed}",
            f"actor_rollout_ref.actor.fsdp_config.seed={arm.seed}",
            f"actor_rollout_ref.rollout.seed={arm.seed}",
        ]
        if arm.name != "grpo":
            overrides.append(f"mapd.protocols.path={layout.protocols}")
            overrides.append(f"mapd.protocols.corpus={layout.data / 'corpus.jsonl'}")
        if self.options.steps is not None:
            overrides.append(f"trainer.total_training_steps={self.options.steps}")
        return [*overrides, *self.options.overrides]

    def train(self, arm: Arm, retriever: str, protocols: str) -> dict[str, Any]:
        """One arm trained; the result names the checkpoint folder that ``transformers`` loads."""
        folder = self.layout.folder(arm)
        # The sidecar's port changes from run to run and decides nothing.
        decisive = [text for text in self.overrides(arm, retriever) if "retriever_urls" not in text]
        config, _, _ = launch.prepare(arm.recipe, self.overrides(arm, retriever))
        model = Path(config.actor_rollout_ref.model.path)
        recipe = launch.find_recipe(arm.recipe)
        sources = [p for p in sorted(_SOURCE.iterdir()) if p.name not in ("quickstart", "evaluation", "__pycache__")]
        inputs = fingerprint(
            decisive,
            recipe,
            model,
            self.layout.data / "train.parquet",
            protocols if arm.name != "grpo" else "",
            *sources,
        )
        self._drop_other_attempt(folder, inputs)

        def work() -> dict[str, Any]:
            progress = Progress(folder, int(config.trainer.total_training_steps))
            log = self.layout.logs(f"train-{arm.label}")
            launch.train(arm.recipe, self.overrides(arm, retriever), log, progress)
            return {"checkpoint": str(checkpoint(folder))}

        return self.state.stage(f"train-{arm.label}", inputs, (), work)

    def report(self, arms: Sequence[Arm]) -> dict[str, Any]:
        """One HTML page over the arms, its curves as PNG beside it."""
        out = self.layout.report
        folders = [self.layout.folder(arm) for arm in arms]
        command = [sys.executable, "-m", "mapd_verl.evaluation.report", "--runs", *map(str, folders), "--out", str(out)]
        files = [self.layout.before, *(self.layout.after(arm) for arm in arms), *(f / "metrics" for f in folders)]
        inputs = fingerprint(command[1:], *files, _SOURCE / "evaluation")
        work = partial(processes.run, command, self.layout.logs("report"), what="report")
        return self.state.stage("report", inputs, (out,), work)

    @staticmethod
    def _drop_other_attempt(folder: Path, inputs: str) -> None:
        """An unfinished attempt is taken up by the trainer if its inputs were the same, else removed."""
        note = folder / "inputs"
        if folder.exists() and (not note.exists() or note.read_text() != inputs):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        note.write_text(inputs)


def checkpoint(folder: Path) -> Path:
    """The newest Hugging Face folder below a trainer's ``default_local_dir``.

    Raises:
        UserError: the training left none.
    """
    found = sorted(folder.glob("global_step_*/actor/huggingface"), key=lambda p: int(p.parts[-3].rpartition("_")[2]))
    if not found or not list(found[-1].glob("*.safetensors")):
        raise UserError(f"{folder}: the training ended without a checkpoint in Hugging Face format")
    return found[-1]


@contextlib.contextmanager
def service(start: Callable[..., Any], *arguments: Any, log: Path) -> Iterator[str]:
    """The URL of a child server (the retrieval sidecar, the teacher) while it runs.

    Raises:
        UserError: it did not start.
    """
    from retrieval_server.errors import StartupError

    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        server = start(*arguments, log=log)
    except StartupError as error:
        raise UserError(str(error)) from error
    with server:
        yield server.url


class Progress:
    """Prints a line for every fifth step and every validation that the metrics of ``folder`` show."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        # What an earlier attempt left was printed by it.
        self._seen = set(metrics(folder))

    def __call__(self) -> None:
        for step, row in metrics(self._folder).items():
            if step in self._seen:
                continue
            self._seen.add(step)
            held_out = next((value for key, value in row.items() if key.startswith("val-core/")), None)
            if step % 5 and held_out is None:
                continue
            shown = {"held-out EM": held_out, "EM": row.get("agent/acc"), "searches": row.get("agent/searches")}
            shown |= {"tokens": row.get("agent/response_tokens"), "s/step": row.get("timing_s/step")}
            text = ", ".join(f"{name} {value:.2f}" for name, value in shown.items() if value is not None)
            print(f"  step {step}/{self._steps}: {text}", flush=True)


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Step -> metrics of an arm, over all its attempts; a later attempt's value wins."""
    steps: dict[int, dict[str, float]] = {}
    for file in sorted((folder / "metrics").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the line that an interruption tore
            steps.setdefault(int(row["step"]), {}).update(row["data"])
    return dict(sorted(steps.items()))
