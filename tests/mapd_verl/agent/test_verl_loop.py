"""The agent loop on verl's own base class, with the batched generator and the retrieval sidecar for real."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch

from mapd_verl.agent.observation import OPEN

pytest.importorskip("verl")

TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
ROW = {
    "prompt": [{"role": "user", "content": "In which country does Paris lie?"}],
    "raw_prompt": [{"role": "user", "content": "In which country does Paris lie?"}],
    "question": "In which country does Paris lie?",
    "question_id": "q1",
    "data_source": "geonames",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["France"]}},
    "extra_info": {"split": "train", "index": 0, "kind": "single_hop"},
    "index": 0,
    "uid": "u",
    "global_steps": 3,
    "session_id": 0,
}
PROTOCOL = "Task: single_hop\nPlan: 1. Find the country of Paris.\nAnswer: France"


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory):
    pytest.importorskip("bm25s")
    from retrieval_server.launch import start_sidecar

    from .conftest import LINES

    folder = tmp_path_factory.mktemp("world")
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": str(i), "contents": c}) + "\n" for i, c in enumerate(LINES[:3])))
    with start_sidecar(corpus) as server:
        yield server.url


class Manager:
    """verl's server manager: wraps a policy as verl's rollout servers answer."""

    def __init__(self, policy, log_probs=True):
        self.policy, self.log_probs, self.requests = policy, log_probs, []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        from mapd_verl.verl_seams import TokenOutput

        self.requests.append((request_id, dict(sampling_params)))
        out = await self.policy(
            prompt_ids=prompt_ids,
            max_tokens=sampling_params["max_tokens"],
            stop_token_ids=sampling_params.get("stop_token_ids", ()),
        )
        return TokenOutput(
            token_ids=list(out.token_ids),
            log_probs=list(out.log_probs) if self.log_probs else None,
            stop_reason="completed",
            num_preempted=1,
            extra_fields={"min_global_steps": 3, "max_global_steps": 3},
        )


def make_loop(tokenizer, manager, url, engine="mapd_cpu", **overrides):
    from omegaconf import OmegaConf

    from mapd_verl.agent.verl_loop import SearchAgentLoop

    tokenizer.chat_template = TEMPLATE
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"name": engine, "prompt_length": 64, "response_length": 400}},
            "data": {},
            "mapd": {
                "agent": {"retriever_urls": [url], "max_turn_tokens": 80, "topk": 2, "retriever_attempts": 1}
                | overrides.pop("agent", {})
            },
        }
    )
    OmegaConf.update(config, "actor_rollout_ref.rollout", overrides, merge=True)
    return SearchAgentLoop(
        trainer_config=SimpleNamespace(config=config),
        server_manager=manager,
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=None,
        data_config=SimpleNamespace(config=config.data),
        hf_model_type="qwen3",
    )


def run(tokenizer, texts, url, row=ROW, script=None, log_probs=True, **overrides):
    from .conftest import Script

    manager = Manager(Script(tokenizer, texts), log_probs)

    async def go():
        loop = make_loop(tokenizer, manager, url, **overrides)
        return await loop.run({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}, **row)

    return asyncio.run(go()), manager


GOOD = ("<think> Look.</think><search> country of Paris</search>", "<think> Ok.</think><answer> France</answer>")


def test_fields_that_reach_the_queue(tagged, sidecar):
    output, manager = run(tagged, GOOD, sidecar, {**ROW, "protocol": PROTOCOL})
    fields = output.as_dict()
    length = len(fields["responses"])
    for name in ("responses", "response_mask", "turn_ids", "action_ids"):
        assert fields[name].dtype == torch.int64 and fields[name].shape == (length,)
    assert fields["rollout_log_probs"].shape == (length,)
    assert set(fields["turn_ids"][fields["response_mask"] == 0].tolist()) == {-1}
    student = "<|im_start|>user\nIn which country does Paris lie?<|im_end|>\n<|im_start|>assistant\n"
    assert tagged.decode(fields["prompts"]) == student
    assert tagged.decode(fields["teacher_prompt_ids"]) == student.replace("lie?", f"lie?\n\n{PROTOCOL}")
    assert fields["has_protocol"].tolist() == [1]
    # The reward stands on the last token, which the policy sampled.
    assert fields["rm_scores"].tolist() == [0.0] * (length - 1) + [1.0] and fields["response_mask"][-1] == 1
    assert f"{OPEN}Doc 1(Title:" in tagged.decode(fields["responses"])
    assert fields["num_turns"] == 4 and output.metrics.num_preempted == 2 and output.metrics.tool_calls > 0
    assert fields["extra_fields"]["min_global_steps"] == fields["extra_fields"]["max_global_steps"] == 3
    # One request id a trajectory, so that the turns share a prefix cache.
    assert len({request_id for request_id, _ in manager.requests}) == 1


def test_no_protocol_is_the_students_prompt(tagged, sidecar):
    for row in (ROW, {**ROW, "protocol": ""}):
        fields = run(tagged, GOOD, sidecar, row)[0].as_dict()
        assert fields["teacher_prompt_ids"].tolist() == fields["prompts"].tolist()
        assert fields["has_protocol"].tolist() == [0]


def test_report_of_a_trajectory(tagged, sidecar):
    from mapd_verl.agent.metrics import agent_metrics

    info = run(tagged, GOOD, sidecar)[0].extra_fields["reward_extra_info"]
    assert (info["question_id"], info["kind"], info["prediction"], info["status"]) == (
        "q1",
        "single_hop",
        "France",
        "answered",
    )
    assert (info["acc"], info["searches"], info["turns"], info["valid_turns"]) == (1.0, 1, 2, 2)
    # verl averages whatever is no text: nothing else may be left.
    assert all(isinstance(value, str | int | float) for value in info.values())
    assert [s["role"] for s in json.loads(info["segments"])] == ["policy", "observation", "policy"]
    wrong = run(tagged, ("<answer> Rome</answer>",), sidecar)[0].extra_fields["reward_extra_info"]
    metrics = agent_metrics([info, wrong])
    assert (metrics["agent/acc"], metrics["agent/searches"], metrics["agent/answered"]) == (0.5, 0.5, 1.0)
    assert agent_metrics([]) == {}


def test_verl_accepts_the_report(tagged, sidecar):
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    infos = [run(tagged, t, sidecar)[0].extra_fields["reward_extra_info"] for t in (GOOD, ("<answer> Rome</answer>",))]
    columns = {key: [info[key] for info in infos] for key in infos[0]}
    found = process_validation_metrics(["geonames"] * 2, ["a", "b"], columns)
    assert found["geonames"]["acc"]["mean@1"] == 0.5 and "prediction" not in found["geonames"]


def test_failed_retrieval_leaves_the_trajectory_out(tagged, caplog):
    output, _ = run(tagged, GOOD, "http://127.0.0.1:9")
    assert output == [] and "q1" in caplog.text and "127.0.0.1:9" in caplog.text


def test_gold_answers_are_no_prompt(tagged, sidecar):
    """The gold answer reaches neither prompt nor teacher prompt by itself."""
    fields = run(tagged, GOOD, sidecar, {**ROW, "reward_model": {"ground_truth": {"target": ["Zanzibar"]}}})[
        0
    ].as_dict()
    assert "Zanzibar" not in tagged.decode(fields["prompts"]) + tagged.decode(fields["teacher_prompt_ids"])
    assert fields["rm_scores"].sum() == 0.0


def test_long_prompt_is_refused(tagged, sidecar):
    from mapd_verl.errors import UserError

    with pytest.raises(UserError, match="max_prompt_tokens=8"):
        run(tagged, GOOD, sidecar, prompt_length=8)


def test_response_length_is_verls(tagged, sidecar):
    output, _ = run(tagged, GOOD, sidecar, response_length=40)
    assert len(output.response_ids) <= 40


def test_no_log_probs_from_the_engine_are_none(tagged, sidecar):
    output, _ = run(tagged, GOOD, sidecar, log_probs=False)
    assert output.response_logprobs is None


@pytest.mark.parametrize(("engine", "key"), [("vllm", "include_stop_str_in_output"), ("sglang", "no_stop_trim")])
def test_engines_stop_at_texts_where_tags_are_several_tokens(untagged, sidecar, engine, key):
    _, manager = run(untagged, GOOD, sidecar, engine=engine)
    assert manager.requests[0][1]["stop"] == ["</search>", "</answer>"] and manager.requests[0][1][key] is True


def test_service_is_checked_before_a_run(sidecar):
    from mapd_verl.agent.config import AgentConfig
    from mapd_verl.agent.search import check_service
    from mapd_verl.errors import UserError

    check_service(AgentConfig(retriever_urls=(sidecar,)))
    with pytest.raises(UserError, match=r"retrieval service: unreachable: http://127\.0\.0\.1:9"):
        check_service(AgentConfig(retriever_urls=(sidecar, "http://127.0.0.1:9"), retriever_attempts=1))
    with pytest.raises(UserError, match="no retrieval service named"):
        check_service(AgentConfig())


def test_registered_under_its_name():
    import mapd_verl.agent.verl_loop  # noqa: F401
    from mapd_verl.verl_seams import AGENT_LOOPS

    assert AGENT_LOOPS["mapd_search"]["_target_"] == "mapd_verl.agent.verl_loop.SearchAgentLoop"
