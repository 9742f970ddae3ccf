"""Recipes: the shipped ones compose, and no key that nobody reads gets through."""

import dataclasses
import importlib
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from mapd_verl.agent.config import AgentConfig
from mapd_verl.config import MapdConfig
from mapd_verl.config.recipe import DATACLASS_FIELDS, check_files, find_recipe, load_recipe, unknown_keys
from mapd_verl.errors import UserError

RECIPES = Path(__file__).parents[3] / "recipes"
NAMES = sorted(str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.glob("*/*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_shipped_recipes_compose_without_unknown_keys(name):
    config = load_recipe(name)
    assert config.trainer.v1.trainer_mode == "mapd_sync"
    assert config.actor_rollout_ref.rollout.agent.default_agent_loop == "mapd_search"


@pytest.mark.parametrize("name", NAMES)
def test_shipped_recipes_say_every_key_of_the_mapd_section(name):
    """All but `agent` and the reward threshold, which no recipe should have to touch."""
    section = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["mapd"]
    schema = OmegaConf.to_container(OmegaConf.structured(MapdConfig))
    for part in ("objective", "privilege", "protocols"):
        assert set(schema[part]) - set(section[part]) <= {"success_score"}
    assert set(schema) == set(section)
    inherited = {"max_response_tokens", "max_prompt_tokens"}  # verl's data section says these
    assert {field.name for field in dataclasses.fields(AgentConfig)} - set(section["agent"]) <= inherited


@pytest.mark.parametrize("folder", ["laptop", "cluster"])
def test_grpo_differs_from_mapd_in_the_methods_row_only(folder):
    mapd, grpo = (yaml.safe_load((RECIPES / folder / f"{name}.yaml").read_text()) for name in ("mapd", "grpo"))
    for recipe in (mapd, grpo):
        for part in ("objective", "privilege", "protocols"):
            recipe["mapd"].pop(part)
        for key in ("experiment_name", "default_local_dir"):
            recipe["trainer"].pop(key)
    assert mapd == grpo


def write(tmp_path, change):
    recipe = yaml.safe_load((RECIPES / "laptop/mapd.yaml").read_text())
    change(recipe)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r["actor_rollout_ref"]["actor"]["optim"].update(lrr=1), ["optim.lrr", "optim.lr'"]),
        (lambda r: r.update(trainr={"x": 1}), ["'trainr'", "'trainer'"]),
        (lambda r: r["trainer"].update(deep={"er": 1}), ["'trainer.deep'"]),
        (lambda r: r["mapd"]["objective"].update(wieght=1), ["mapd.objective.wieght", "weight"]),
        (lambda r: r["mapd"]["agent"].update(top_k=1), ["mapd.agent.top_k", "mapd.agent.topk"]),
        (lambda r: r["mapd"]["objective"].update(name="revers_kl"), ["mapd.objective.name", "reverse_kl"]),
        (lambda r: r["mapd"]["objective"].update(weight="much"), ["mapd.objective.weight"]),
        (lambda r: r["data"].update(train_batch_size="eight"), ["data.train_batch_size", "a number"]),
        (lambda r: r["trainer"].update(val_before_train="perhaps"), ["trainer.val_before_train", "true or false"]),
    ],
)
def test_a_bad_key_or_value_in_a_recipe_is_one_line_that_names_it(tmp_path, change, words):
    with pytest.raises(UserError) as raised:
        load_recipe(write(tmp_path, change))
    line = str(raised.value)
    assert all(word in line for word in words) and "\n" not in line


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.rollout.nn=2", ["actor_rollout_ref.rollout.nn"]),
        ("+actor_rollout_ref.rollout.nn=2", ["actor_rollout_ref.rollout.nn"]),
        ("mapd.agent.max_serches=1", ["mapd.agent.max_searches"]),
        ("no equals sign", ["no equals sign"]),
        ("mapd.objective.weight=-1", ["mapd.objective.weight", "-1"]),
        ("actor_rollout_ref.actor.optim.lr=fast", ["optim.lr", "a number"]),
    ],
)
def test_a_bad_override_is_one_line_that_names_it(override, words):
    with pytest.raises(UserError) as raised:
        load_recipe("laptop/mapd", [override])
    line = str(raised.value)
    assert all(word in line for word in words) and "\n" not in line


def test_free_nodes_take_any_key():
    overrides = [
        "+actor_rollout_ref.model.override_config.sliding_window=64",
        "+ray_kwargs.ray_init.log_to_driver=false",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=1",
        "mapd.privilege.success_score=0.5",
    ]
    config = load_recipe("laptop/mapd", overrides)
    assert config.actor_rollout_ref.model.override_config.sliding_window == 64
    assert config.mapd.privilege.success_score == 0.5


def test_broken_files_are_named(tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1\nb: 2\n")
    with pytest.raises(UserError, match=r"broken\.yaml: line 2 not valid YAML"):
        load_recipe(broken)
    broken.write_text("- a\n")
    with pytest.raises(UserError, match="a recipe is a YAML mapping, this is list"):
        load_recipe(broken)
    with pytest.raises(UserError, match=r"no recipe 'laptop/nothing'.*laptop/mapd"):
        find_recipe("laptop/nothing")


def test_missing_files_are_named_with_their_key(tmp_path):
    for name in ("train.parquet", "val.parquet", "protocols.sqlite"):
        (tmp_path / name).touch()
    good = [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        f"mapd.protocols.path={tmp_path}/protocols.sqlite",
        "actor_rollout_ref.model.path=Qwen/Qwen3-1.7B",
    ]
    check_files(load_recipe("laptop/mapd", good))
    for key, value in (
        ("data.train_files", f"[{tmp_path}/train.parquet,{tmp_path}/gone.parquet]"),
        ("data.val_files", f"{tmp_path}/gone.parquet"),
        ("mapd.protocols.path", f"{tmp_path}/gone.sqlite"),
        ("mapd.protocols.corpus", f"{tmp_path}/gone.jsonl"),
        ("actor_rollout_ref.model.path", f"{tmp_path}"),
    ):
        with pytest.raises(UserError, match=f"^{key}: "):
            check_files(load_recipe("laptop/mapd", [*good, f"{key}={value}"]))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["data.train_batch_size=12"], "data.train_batch_size: 12 is no multiple"),
        (["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=48"], "actor.ppo_micro_batch_size_per_gpu: 48"),
        (
            ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=24"],
            "rollout.log_prob_micro_batch_size_per_gpu",
        ),
        (["trainer.n_gpus_per_node=3"], "on 3 ranks"),
    ],
)
def test_batch_sizes_that_do_not_divide_are_named(overrides, named):
    with pytest.raises(UserError, match=named):
        load_recipe("laptop/mapd", overrides)


def test_unknown_keys_reports_the_outermost():
    known = {"a": {"b": 1, "free": {}, "none": None}}
    tree = {"a": {"b": 2, "c": {"d": 1}, "free": {"x": 1}, "none": {"y": {"z": 1}}}, "e": {"f": 1}}
    assert list(unknown_keys(tree, known)) == ["a.c", "e"]


def test_fields_that_verls_yaml_leaves_out_are_fields_of_its_dataclasses():
    config = importlib.import_module("verl.workers.config")
    owners = {"fsdp_config": config.FSDPEngineConfig, "rollout": config.RolloutConfig, "agent": config.AgentLoopConfig}
    for section, names in DATACLASS_FIELDS.items():
        if section in owners:
            assert set(names) <= {field.name for field in dataclasses.fields(owners[section])}
    assert set(DATACLASS_FIELDS) - set(owners) == {"trainer"}  # a plain node: verl reads it with .get
