"""verl's dataset joined with a real protocol cache."""

from __future__ import annotations

import pickle

import pytest

from mapd_verl.errors import UserError
from protocol_cache import SCHEMA_VERSION, ProtocolStore, Provenance, Record, question_id
from protocol_cache.reviews import Review, protocol_digest, put_reviews

PROTOCOL = {
    "schema_version": SCHEMA_VERSION,
    "variant": "succeeded",
    "task_type": "single_hop",
    "reasoning_plan": ["Find the country of Paris."],
    "grounding_facts": [{"passage_id": "city-1", "text": "The city of Paris lies in France.", "start": 8, "end": 41}],
    "answer": "France",
    "answer_grounded": True,
}
TEXT = "Task: single_hop\nPlan: 1. Find the country of Paris.\nFacts: The city of Paris lies in France.\nAnswer: France"


def record(qid, status="passed", version=SCHEMA_VERSION):
    return Record(
        qid,
        "In which country does Paris lie?",
        "geonames",
        "train",
        status,
        Provenance("rules", "1", "hash", version),
        protocol=PROTOCOL if status == "passed" else None,
        reason=None if status == "passed" else "gate: leak",
    )


@pytest.fixture
def cache(tmp_path):
    path = tmp_path / "protocols.sqlite"
    with ProtocolStore(path) as store:
        store.put(record("q0"))
        store.put(record("q1", "rejected"))
        store.put(record("q2", "failed"))
    return path


@pytest.fixture
def train(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": "geonames",
            "prompt": [{"role": "user", "content": f"In which country does Paris lie? {i}"}],
            "question": f"In which country does Paris lie? {i}",
            "reward_model": {"style": "rule", "ground_truth": {"target": ["France"]}},
            "extra_info": {"split": "train", "index": i, "kind": "single_hop"},
            "question_id": f"q{i}",
            "agent_name": "mapd_search",
        }
        for i in range(4)
    ]
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def make(chat_tokenizer, tmp_path):
    """A dataset of ``files`` in a recipe whose training files are ``train_files``."""
    return lambda *arguments, **data: _make(chat_tokenizer, tmp_path, *arguments, **data)


def _make(tokenizer, tmp_path, files, train_files, cache=None, policies=None, **data):
    pytest.importorskip("verl")
    from omegaconf import OmegaConf

    from mapd_verl.data.dataset import ProtocolDataset

    config = OmegaConf.create(
        {
            "data": {
                "train_files": str(train_files),
                "cache_dir": str(tmp_path / "cache"),
                "max_prompt_length": 100,
                "filter_overlong_prompts": False,
                **data,
            },
            "mapd": {"protocols": {"path": str(cache) if cache else None, **(policies or {})}},
        }
    )
    return ProtocolDataset(data_files=str(files), tokenizer=tokenizer, config=config.data)


def test_rows_carry_their_protocol(make, train, cache, tmp_path, caplog):
    dataset = make(train, train, cache)
    assert [dataset[i]["protocol"] for i in range(4)] == [TEXT, "", "", ""]
    assert [dataset[i]["question_id"] for i in range(4)] == ["q0", "q1", "q2", "q3"]
    assert dataset[0]["raw_prompt"] == [{"role": "user", "content": "In which country does Paris lie? 0"}]
    assert "1 of 4 questions have a protocol" in caplog.text
    # The queue's own columns would be overwritten by a row's.
    assert not {"teacher_prompt_ids", "has_protocol", "turn_ids", "action_ids"} & set(dataset[0])


def test_it_survives_the_trip_to_a_loader_process_and_a_resume(make, train, cache, tmp_path):
    dataset = make(train, train, cache)
    copy = pickle.loads(pickle.dumps(dataset))
    copy.resume_dataset_state()
    assert copy[0]["protocol"] == TEXT


def test_skip_drops_and_error_refuses(make, train, cache, tmp_path):
    # q0 passed, q1 was rejected, q2 failed, q3 is not in the cache.
    assert [r["question_id"] for r in make(train, train, cache, {"missing": "skip"})] == ["q0", "q1"]
    assert [r["question_id"] for r in make(train, train, cache, {"rejected": "skip"})] == ["q0", "q2", "q3"]
    assert [r["question_id"] for r in make(train, train, cache, {"missing": "skip", "rejected": "skip"})] == ["q0"]
    with pytest.raises(UserError, match=r"1 questions are missing and mapd\.protocols\.missing=error; the first is q3"):
        make(train, train, cache, {"missing": "error"})
    with pytest.raises(UserError, match=r"mapd\.protocols\.missing"):
        make(train, train, cache, {"missing": "ignore"})


def test_a_reviewed_and_a_stale_protocol_follow_their_policies(make, train, cache, tmp_path):
    put_reviews(cache, [Review("q0", protocol_digest(PROTOCOL), "bad", "wrong city")])
    with ProtocolStore(cache) as store:
        store.put(record("q3"))
    dataset = make(train, train, cache)
    assert [r["protocol_state"] for r in dataset] == ["reviewed_bad", "rejected", "failed", "joined"]
    assert [r["protocol"] for r in dataset] == ["", "", "", TEXT]
    assert [r["protocol"] for r in make(train, train, cache, {"reviewed_bad": "keep"})] == [TEXT, "", "", TEXT]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("another")
    with pytest.raises(UserError, match=r"2 questions are stale_corpus \(corpus hash, the recipe's is ae448ac8"):
        make(train, train, cache, {"corpus": str(corpus)})
    with pytest.raises(UserError, match=r"corpus\.gone: no such file"):
        make(train, train, cache, {"corpus": str(tmp_path / "corpus.gone")})


def test_skip_finds_ids_that_have_no_column(make, train, tmp_path):
    import pyarrow.parquet as pq

    table = pq.read_table(train).drop_columns(["question_id"])
    pq.write_table(table, train)
    questions = table["question"].to_pylist()
    path = tmp_path / "made.sqlite"
    with ProtocolStore(path) as store:
        store.put(record(question_id(questions[2], "geonames", "train")))
    dataset = make(train, train, path, {"missing": "skip"})
    assert [row["question"] for row in dataset] == [questions[2]] and dataset[0]["protocol"] == TEXT


def test_validation_files_are_never_joined(make, train, cache, tmp_path):
    dataset = make(train, tmp_path / "other.parquet", cache, {"missing": "error"})
    assert dataset.join is None and dataset[0]["protocol"] == ""


def test_no_cache_is_no_protocols(make, train, tmp_path):
    assert make(train, train)[0]["protocol"] == ""


def test_a_foreign_cache_is_refused(make, train, tmp_path):
    path = tmp_path / "foreign.sqlite"
    with ProtocolStore(path) as store:
        store.put(record("another"))
    with pytest.raises(UserError, match="no protocol for any of the 4 questions"):
        make(train, train, path)


def test_long_prompt_and_bad_row_are_named_at_load(make, train, tmp_path):
    with pytest.raises(
        UserError, match=r"train\.parquet: row 1: the prompt has \d+ tokens, above data\.max_prompt_length=5"
    ):
        make(train, train, max_prompt_length=5)
    assert len(make(train, train, max_prompt_length=5, filter_overlong_prompts=True)) == 0
