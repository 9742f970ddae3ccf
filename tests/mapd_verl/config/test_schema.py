import pytest

from mapd_verl.config import MapdConfig
from mapd_verl.errors import UserError


def test_nothing_is_the_papers_setting():
    config = MapdConfig.from_mapping(None)
    assert (config.objective.name, config.objective.weight) == ("reverse_kl", 0.05)
    assert (config.privilege.context, config.privilege.fallback) == ("protocol", "own_rollout")


def test_values_are_taken_and_integers_stand_for_floats():
    config = MapdConfig.from_mapping({"objective": {"weight": 0}, "privilege": {"context": "shuffled"}})
    assert config.objective.weight == 0.0 and config.privilege.context == "shuffled"
    assert config.privilege.template == "\n\n{context}"


@pytest.mark.parametrize(
    "section, said",
    [
        ({"objectiv": {}}, "mapd.objectiv"),
        ({"objective": {"lambda": 0.1}}, "mapd.objective.lambda"),
        ({"objective": {"name": "kl"}}, "mapd.objective.name: unknown 'kl'"),
        ({"objective": {"weight": -0.1}}, "mapd.objective.weight"),
        ({"objective": {"weight": float("nan")}}, "mapd.objective.weight"),
        ({"objective": {"weight": "much"}}, "mapd.objective.weight"),
        ({"objective": {"beta": 0.5}}, "mapd.objective.beta"),
        ({"objective": {"name": "jsd"}}, "mapd.objective.beta"),
        ({"objective": {"name": "jsd", "beta": 1.5}}, "mapd.objective.beta"),
        ({"objective": {"clip": 0}}, "mapd.objective.clip"),
        ({"objective": {"clip": 0.05, "estimator": {"name": "sampled", "sample": "k2"}}}, "mapd.objective.clip"),
        ({"objective": {"estimator": {"name": "top"}}}, "mapd.objective.estimator.name: unknown 'top'"),
        ({"objective": {"estimator": {"name": "topk", "of": "student"}}}, "mapd.objective.estimator.k: topk needs it"),
        ({"objective": {"estimator": {"name": "topk", "k": 5}}}, "mapd.objective.estimator.of"),
        ({"objective": {"estimator": {"name": "topk", "k": 0, "of": "union"}}}, "mapd.objective.estimator.k: must"),
        ({"objective": {"estimator": {"name": "topk", "k": 5, "of": "both"}}}, "mapd.objective.estimator.of: unknown"),
        ({"objective": {"estimator": {"k": 5}}}, "mapd.objective.estimator.k"),
        ({"objective": {"estimator": {"name": "sampled"}}}, "mapd.objective.estimator.sample"),
        ({"objective": {"estimator": {"name": "sampled", "sample": "k1"}}}, "it trains nothing"),
        ({"objective": {"estimator": {"name": "sampled", "sample": "k9"}}}, "unknown sampled estimator 'k9'"),
        (
            {"objective": {"name": "forward_kl", "estimator": {"name": "sampled", "sample": "k2"}}},
            "sampled estimates reverse_kl only",
        ),
        ({"objective": {"chunk_tokens": 0}}, "mapd.objective.chunk_tokens"),
        ({"privilege": {"context": "oracle"}}, "mapd.privilege.context: unknown 'oracle'"),
        ({"privilege": {"fallback": "oracle"}}, "mapd.privilege.fallback"),
        ({"privilege": {"template": "no place"}}, "mapd.privilege.template"),
        ({"privilege": {"max_context_tokens": 0}}, "mapd.privilege.max_context_tokens"),
        ({"forward": "fast"}, "mapd.forward"),
        ({"poll_interval": 0}, "mapd.poll_interval"),
        ({"protocols": {"missing": "maybe"}}, "mapd.protocols.missing"),
        ({"agent": {"topk": 0}}, "topk"),
    ],
)
def test_a_bad_value_is_one_line_that_names_its_key(section, said):
    with pytest.raises(UserError) as error:
        MapdConfig.from_mapping(section)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
