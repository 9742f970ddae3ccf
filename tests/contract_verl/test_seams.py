"""What we rely on in the installed verl: names, signatures, and that each workaround is still needed."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import textwrap

import pytest

from mapd_verl import verl_seams
from mapd_verl.verl_seams import SEAMS, UnsupportedVerlError


@pytest.mark.parametrize("name", SEAMS)
def test_the_name_exists(name):
    assert getattr(verl_seams, name) is not None


def test_a_name_outside_the_table_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'PPOTrianer'"):
        verl_seams.PPOTrianer  # noqa: B018


def test_a_name_that_verl_lost_is_told(monkeypatch):
    monkeypatch.setitem(SEAMS, "Gone", "verl.protocol:NoSuchThing")
    with pytest.raises(UnsupportedVerlError, match=r"verl has no verl\.protocol:NoSuchThing \(needed as Gone\)"):
        verl_seams.Gone  # noqa: B018


@pytest.mark.parametrize("version", ["0.8.1", "0.10.0", "1.0.0"])
def test_another_series_is_refused(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(UnsupportedVerlError, match=version):
        verl_seams.check_version()


def test_a_missing_verl_is_told(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UnsupportedVerlError, match="pip install"):
        verl_seams.check_version()


#: Subclass of ours -> the verl class whose methods it overrides.
SUBCLASSES = {
    "mapd_verl.cpu.platform:HostPlatform": "PlatformBase",
    "mapd_verl.cpu.engine:CPUFSDPEngineWithLMHead": "FSDPEngineWithLMHead",
    "mapd_verl.cpu.rollout:CPURolloutReplica": "RolloutReplica",
    "mapd_verl.cpu.rollout:CPUServerAdapter": "BaseRollout",
    "mapd_verl.trainer:MapdTrainer": "PPOTrainerSync",
    "mapd_verl.worker:MapdTrainingWorker": "TrainingWorker",
    "mapd_verl.worker:MapdActorRolloutRefWorker": "ActorRolloutRefWorker",
    "mapd_verl.agent.verl_loop:SearchAgentLoop": "AgentLoopBase",
    "mapd_verl.data.dataset:ProtocolDataset": "RLHFDataset",
}


def load(path: str):
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def overrides() -> list[tuple[str, str, str]]:
    found = []
    for path, base in SUBCLASSES.items():
        for name, member in vars(load(path)).items():
            if inspect.isfunction(member) and hasattr(getattr(verl_seams, base), name):
                found.append((path, base, name))
    return found


@pytest.mark.parametrize(("path", "base", "name"), overrides())
def test_an_override_can_be_called_as_verl_calls_the_original(path, base, name):
    ours = inspect.signature(vars(load(path))[name]).parameters
    theirs = inspect.signature(inspect.unwrap(getattr(getattr(verl_seams, base), name))).parameters
    takes_keywords = any(p.kind is p.VAR_KEYWORD for p in ours.values())
    for parameter in theirs.values():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            assert parameter.name in ours or takes_keywords, f"{path}.{name} lacks {parameter.name}"
    for parameter in ours.values():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            assert parameter.name in theirs or parameter.default is not parameter.empty, parameter.name
    assert inspect.iscoroutinefunction(vars(load(path))[name]) == inspect.iscoroutinefunction(
        inspect.unwrap(getattr(getattr(verl_seams, base), name))
    )


@pytest.mark.parametrize("path", SUBCLASSES)
def test_no_abstract_method_is_left(path):
    assert not getattr(load(path), "__abstractmethods__", None)


def test_the_platform_can_be_made():
    from mapd_verl.cpu.platform import platform_class

    platform = platform_class()()
    assert isinstance(platform, verl_seams.PlatformBase) and platform.is_available()
    assert not platform.is_platform_available() and not platform.is_platform_available(use_smi_check=True)


def test_run_ppo_only_asks_its_runner_class_for_what_ours_has():
    source = textwrap.dedent(inspect.getsource(verl_seams.run_ppo))
    attributes = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    used = {text for text in attributes if text.startswith(("task_runner_class.", "runner.")) and "(" not in text}
    assert used == {"task_runner_class.options", "task_runner_class.remote", "runner.run", "runner.run.remote"}
    assert list(inspect.signature(verl_seams.run_ppo).parameters) == ["config", "task_runner_class"]
    runner = verl_seams.unwrap_actor_class(verl_seams.TaskRunnerV1)
    assert list(inspect.signature(runner.run).parameters)[:2] == ["self", "config"]  # Ray adds its own behind


def test_the_server_has_every_method_that_the_replica_calls():
    from mapd_verl.cpu.server import CPURolloutServer

    tree = ast.parse(textwrap.dedent(inspect.getsource(verl_seams.RolloutReplica)))
    called = {
        node.func.value.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "remote"
        and isinstance(node.func.value, ast.Attribute)
        and ast.unparse(node.func.value.value) == "server"
    }
    assert {"wake_up", "sleep", "clear_kv_cache"} <= called
    for name in called:
        assert inspect.iscoroutinefunction(getattr(CPURolloutServer, name)), name


def test_the_client_calls_generate_with_arguments_that_the_server_takes():
    from mapd_verl.cpu.server import CPURolloutServer

    source = textwrap.dedent(inspect.getsource(load("verl.workers.rollout.llm_server:LLMServerClient").generate))
    call = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "server.generate.remote"
    )
    named = {keyword.arg for keyword in call.keywords if keyword.arg}
    assert named == set(inspect.signature(CPURolloutServer.generate).parameters) - {"self"}


def test_the_router_follows_verls_protocol():
    from mapd_verl.cpu.router import StickyRouter

    protocol = load("verl.workers.rollout.router:RequestLoadBalancer")
    for name, member in vars(protocol).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            ours = inspect.signature(getattr(StickyRouter, name)).parameters
            # `extra` holds only the fields that require_acquire_fields names: none.
            theirs = [p for p in inspect.signature(member).parameters if p != "extra"]
            assert list(ours) == theirs, name


def test_output_arrives_as_verls_token_output():
    import ray.cloudpickle as pickle

    from mapd_verl.cpu.server import WireOutput

    out = pickle.loads(pickle.dumps(WireOutput([3, 4], [-0.5, -1.0], "completed", {"global_steps": 2})))
    assert type(out) is verl_seams.TokenOutput
    assert (out.token_ids, out.log_probs, out.stop_reason) == ([3, 4], [-0.5, -1.0], "completed")
    assert out.extra_fields == {"global_steps": 2}


# When one of these fails, verl has mended the thing: drop our workaround.


def test_still_needed_the_poll_interval_is_fixed_at_two_seconds():
    assert inspect.signature(verl_seams.ReplayBuffer.__init__).parameters["poll_interval"].default == 2.0
    source = inspect.getsource(importlib.import_module("verl.trainer.ppo.v1.trainer_base"))
    assert "poll_interval" not in source
    assert "self.poll_interval" in inspect.getsource(verl_seams.ReplayBuffer._wait_for_next_poll)


def test_still_needed_the_trainer_mode_is_compared_with_sync():
    source = inspect.getsource(importlib.import_module("verl.trainer.ppo.v1.trainer_base"))
    assert 'trainer_mode == "sync"' in source or 'trainer_mode != "sync"' in source


def test_still_needed_torch_refuses_verls_backend_on_the_cpu():
    from torch.distributed.distributed_c10d import Backend, BackendConfig

    with pytest.raises(ValueError, match="Duplicate"):
        BackendConfig(Backend("cpu:gloo,cpu:gloo"))
    source = inspect.getsource(inspect.unwrap(verl_seams.distributed.initialize_global_process_group_ray))
    assert 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"' in source


def test_still_needed_a_reference_model_is_pinned():
    source = inspect.getsource(verl_seams.FSDPEngineWithLMHead._build_fsdp_module)
    assert "self.engine_config.forward_only" in source and "CPUOffloadPolicy(pin_memory=True)" in source


def test_still_needed_there_is_no_register_for_rollout_adapters():
    module = importlib.import_module("verl.workers.rollout.base")
    assert [name for name in vars(module) if "regist" in name.lower()] == ["_ROLLOUT_REGISTRY"]


def test_still_needed_a_failing_plugin_is_logged_at_debug_only():
    import verl

    assert '.debug("Failed to load plugin' in inspect.getsource(verl)
