"""Loading a recipe: compose it on verl's defaults, refuse what nobody would read, name what is missing.

Hydra merges a recipe's keys into verl's config without asking whether verl knows them, so a misspelt
key trains with the default and nobody notices. :func:`load_recipe` compares every key of the recipe and
of the command line with verl's composed config and the ``mapd`` schema first.

verl itself is not imported (that takes ten seconds); only its YAML files are read.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mapd_verl.agent.config import AgentConfig
from mapd_verl.config.schema import MapdConfig
from mapd_verl.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

#: Nodes whose keys are passed on to something else (ray.init, a transformers config, an engine), or whose
#: keys verl reads from its dataclasses without naming them in its YAML.
FREE_FORM = (
    "ray_kwargs.ray_init",
    "data.custom_cls",
    "actor_rollout_ref.rollout.custom",
    "actor_rollout_ref.rollout.engine_kwargs",
)

#: Fields of verl 0.9.1's dataclasses that its YAML leaves out: last key of the path -> dataclass section.
DATACLASS_FIELDS = {
    "fsdp_config": ("mixed_precision",),
    "rollout": (
        "custom",
        "server",
        "prometheus",
        "enable_sleep_mode",
        "checkpoint_manager_class",
        "repetition_penalty",
    ),
    "agent": ("agent_loop_manager_class",),
    "trainer": ("wandb_proxy",),
}

_MISSING = object()


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """The composed config of a recipe with Hydra overrides on top.

    Args:
        path: a recipe YAML whose ``defaults`` start from verl's ``ppo_trainer``.
        overrides: Hydra overrides (``key=value``, ``+key=value``, ``~key``).

    Raises:
        UserError: no such recipe, broken YAML, an unknown key (with the nearest known one), a value that
            the ``mapd`` schema refuses, or an override that Hydra can't parse.
    """
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    path = find_recipe(path)
    recipe = _read_yaml(path)
    try:
        known = _known_keys(recipe)
        body = {key: value for key, value in recipe.items() if key not in ("hydra", "defaults")}
        for key in unknown_keys(body, known):
            raise UserError(f"{path}: unknown key '{key}'{_nearest(key, known)}")
        _check_overrides(overrides, known)
        config = _compose(path.parent, path.stem, normalise_overrides(overrides))
        _check_types(path, OmegaConf.to_container(config, resolve=False), known)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
        raise UserError(f"{path}: {str(cause).strip().splitlines()[0]}") from error
    MapdConfig.from_mapping(config.get("mapd"))
    check_batches(config)
    return config


def find_recipe(path: str | Path) -> Path:
    """The recipe's file: the path as given, or ``recipes/PATH[.yaml]`` of a source checkout.

    Raises:
        UserError: no such file; the line lists the recipes that ship.
    """
    shipped = Path(__file__).resolve().parents[2] / "recipes"
    for candidate in (Path(path), shipped / path, shipped / f"{path}.yaml"):
        if candidate.is_file():
            return candidate.resolve()
    names = ", ".join(sorted(str(p.relative_to(shipped).with_suffix("")) for p in shipped.glob("*/*.yaml")))
    raise UserError(f"no recipe '{path}' (shipped: {names or 'none'})")


def normalise_overrides(overrides: Sequence[str]) -> list[str]:
    """Overrides of the ``mapd`` section as ``++key=value``: a key that the recipe leaves out may still be set."""
    return [f"++{text}" if text.startswith("mapd.") else text for text in overrides]


def check_files(config: DictConfig) -> None:
    """Every file the config names exists, before Ray starts.

    Raises:
        UserError: naming the config key and the missing file.
    """
    from omegaconf import OmegaConf

    for key in ("data.train_files", "data.val_files", "mapd.protocols.path", "mapd.protocols.corpus"):
        value = OmegaConf.select(config, key)
        for name in [value] if isinstance(value, str) else list(value or []):
            if key.endswith("corpus") and name.startswith("sha256:"):
                continue
            if not Path(name).expanduser().exists():
                raise UserError(f"{key}: no such file: {name}")
    check_model(config)


def check_batches(config: DictConfig) -> None:
    """Batch sizes divide as verl needs them; its own complaint comes after the first rollouts and names no key.

    Raises:
        UserError: naming the two keys whose values don't go together.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if actor.use_dynamic_bsz:
        return
    questions, mini = int(config.data.train_batch_size), int(actor.ppo_mini_batch_size)
    if questions % mini:
        raise UserError(f"data.train_batch_size: {questions} is no multiple of actor.ppo_mini_batch_size {mini}")
    ranks = int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)
    sizes = [("actor.ppo_micro_batch_size_per_gpu", mini, actor.ppo_micro_batch_size_per_gpu)]
    sizes.append(("rollout.log_prob_micro_batch_size_per_gpu", questions, rollout.log_prob_micro_batch_size_per_gpu))
    if actor.use_kl_loss:
        ref = config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
        sizes.append(("ref.log_prob_micro_batch_size_per_gpu", questions, ref))
    for key, of, micro in sizes:
        rows, rest = divmod(of * int(rollout.n), ranks)
        if rest or (micro is not None and rows % int(micro)):
            raise UserError(
                f"actor_rollout_ref.{key}: {micro} does not divide the {of} questions x {rollout.n} rollouts "
                f"of a batch on {ranks} rank{'s' if ranks > 1 else ''}"
            )


def check_model(config: DictConfig) -> None:
    """The model is a hub id or a folder that holds one.

    Raises:
        UserError: naming the folder.
    """
    from omegaconf import OmegaConf

    model = OmegaConf.select(config, "actor_rollout_ref.model.path")
    # "Qwen/Qwen3-1.7B" is a hub id; anything with more or no slashes, or a leading dot, is a folder.
    hub_id = isinstance(model, str) and model.count("/") == 1 and model[0] not in "./~"
    if not model or (not hub_id and not (Path(model).expanduser() / "config.json").is_file()):
        raise UserError(f"actor_rollout_ref.model.path: no model folder (with config.json) at {model}")


def unknown_keys(tree: dict[str, Any], known: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of ``tree`` that ``known`` lacks, free-form nodes excepted, outermost first."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if not _is_known(path, known):
            yield path
        elif isinstance(value, dict) and not _is_free_form(path, known):
            yield from unknown_keys(value, known, f"{path}.")


def _lookup(path: str, tree: dict[str, Any]) -> Any:
    node: Any = tree
    for part in path.split("."):
        if not isinstance(node, dict) or part not in node:
            return _MISSING
        node = node[part]
    return node


def _is_free_form(path: str, known: dict[str, Any]) -> bool:
    """Keys below ``path`` are not ours to judge: it is listed, or verl's default is empty ({} or null)."""
    parts = path.split(".")
    for length in range(1, len(parts) + 1):
        head = ".".join(parts[:length])
        if head in FREE_FORM or parts[length - 1] in DATACLASS_FIELDS.get(parts[length - 2] if length > 1 else "", ()):
            return True
        if _lookup(head, known) in (None, {}):
            return True
    return False


def _is_known(path: str, known: dict[str, Any]) -> bool:
    if _lookup(path, known) is not _MISSING:
        return True
    parent, _, last = path.rpartition(".")
    if last in DATACLASS_FIELDS.get(parent.rpartition(".")[2], ()):
        return True
    return bool(parent) and _is_free_form(parent, known)


def _nearest(key: str, known: dict[str, Any]) -> str:
    """``; did you mean 'x.y'?`` from the known keys at the same place, else from all of them."""
    parent, _, last = key.rpartition(".")
    siblings = _lookup(parent, known) if parent else known
    if isinstance(siblings, dict):
        found = difflib.get_close_matches(last, [str(s) for s in siblings], n=1)
        if found:
            return f"; did you mean '{parent + '.' if parent else ''}{found[0]}'?"
    everything = list(_leaves(known))
    same_name = [k for k in everything if k.rpartition(".")[2] == last]
    found = difflib.get_close_matches(key, same_name or everything, n=1, cutoff=0.3 if same_name else 0.6)
    return f"; did you mean '{found[0]}'?" if found else ""


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")


def _check_types(path: Path, tree: Any, known: dict[str, Any]) -> None:
    """Where verl's default is a number or a switch, words are refused; Hydra would pass them on."""
    for key in _leaves(tree):
        value, default = _lookup(key, tree), _lookup(key, known)
        wanted = {bool: "true or false", int: "a number", float: "a number"}.get(type(default))
        if wanted and isinstance(value, str | list | dict) and "${" not in str(value):
            raise UserError(f"{path}: {key} must be {wanted}, not {value!r}")


def _check_overrides(overrides: Sequence[str], known: dict[str, Any]) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            raise UserError(f"override '{text}': not of the form key=value") from error
        key = override.key_or_group
        if key.startswith("hydra.") or "@" in override.get_key_element() or key in _config_groups():
            continue  # Hydra itself refuses an unknown option of these
        if not _is_known(key, known):
            raise UserError(f"override '{text}': unknown key '{key}'{_nearest(key, known)}")


def _config_groups() -> set[str]:
    return {path.name for path in verl_config_dir().iterdir() if path.is_dir()}


def verl_config_dir() -> Path:
    """verl's folder of YAML files, found without importing verl.

    Raises:
        UserError: verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise UserError("verl is not installed: pip install 'mapd-verl[cpu]' (or [gpu])")
    return Path(spec.origin).parent / "trainer/config"


def _known_keys(recipe: dict[str, Any]) -> dict[str, Any]:
    """The tree of keys that verl (with the recipe's own ``defaults``) and our schema define."""
    defaults = [entry for entry in recipe.get("defaults") or [] if entry != "_self_"] or ["ppo_trainer"]
    return _known_keys_of(json.dumps(defaults))


@functools.lru_cache(maxsize=8)
def _known_keys_of(defaults: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "base.yaml").write_text(yaml.safe_dump({"defaults": json.loads(defaults)}))
        base = OmegaConf.to_container(_compose(Path(folder), "base", ()), resolve=False)
    assert isinstance(base, dict)
    known = {str(key): value for key, value in base.items()}
    known["mapd"] = OmegaConf.to_container(OmegaConf.structured(MapdConfig), resolve=False)
    known["mapd"]["agent"] = dataclasses.asdict(AgentConfig())
    return known


def _compose(folder: Path, name: str, overrides: Sequence[str]) -> DictConfig:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(folder.resolve()), version_base=None):
        return compose(name, overrides=[*overrides, f"hydra.searchpath=[file://{verl_config_dir()}]"])


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}:{where} not valid YAML: {getattr(error, 'problem', error)}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: a recipe is a YAML mapping, this is {type(loaded).__name__}")
    return loaded
