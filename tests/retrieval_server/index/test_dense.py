"""Dense, hybrid and reranking with small real transformers made here (no weights are to be had), and real faiss."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from retrieval_server.errors import StartupError
from retrieval_server.index import memory
from retrieval_server.index.build import BuildOptions, DenseOptions, build
from retrieval_server.index.command import main as command
from retrieval_server.index.dense import to_gpus
from retrieval_server.index.encoder import Encoder, Family, family_of
from retrieval_server.index.hybrid import fuse
from retrieval_server.index.manifest import IndexFault, Manifest
from retrieval_server.index.open import Index
from retrieval_server.rerank import CrossEncoder

faiss = pytest.importorskip("faiss")
WORDS = [f"w{i}" for i in range(200)]
FACTORIES = ["Flat", "HNSW16", "IVF8,Flat", "SQfp16", "IVF4,PQ8"]


def tokenizer() -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate([*special, "query", "passage", ":", *WORDS])}, "[UNK]")
    )
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]")


def config(hidden: int = 32) -> BertConfig:
    return BertConfig(
        vocab_size=len(WORDS) + 7,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=1,
        initializer_range=0.5,
    )


def model(folder: Path, hidden: int = 32, kind: type = BertModel) -> str:
    torch.manual_seed(hidden)
    kind(config(hidden)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    g = np.random.default_rng(0)
    texts = [" ".join(g.choice(WORDS, g.integers(3, 30))) for _ in range(300)]
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"id": str(i), "contents": f'"T{i}"\n{t}'}) + "\n" for i, t in enumerate(texts))
    )
    encoder = model(folder / "tiny-e5")
    made = {}
    for factory in FACTORIES:
        index = folder / factory.replace(",", "-")
        backends = ("bm25", "dense") if factory == "Flat" else ("dense",)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("retrieval_server.index.dense_build._CHUNK", 64)
            build(
                BuildOptions(str(corpus), str(index), backends, dense=DenseOptions(encoder, factory)),
                _Bar,
                lambda _: None,
            )
        made[factory] = index
    queries = [" ".join(g.choice(WORDS, g.integers(1, 20))) for _ in range(24)]
    return SimpleNamespace(corpus=corpus, texts=texts, encoder=encoder, index=made, queries=queries, folder=folder)


class _Bar:
    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self):
        return lambda n: None

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_batch_gives_each_query_what_it_gets_alone_bit_for_bit(world, factory):
    backend = Index(world.index[factory], "dense").backend
    depths = [1 + i % 5 for i in range(len(world.queries))]
    alone = [backend.search_batch([query], [k])[0] for query, k in zip(world.queries, depths, strict=True)]
    assert backend.search_batch(world.queries, depths) == alone
    assert backend.search_batch(world.queries[::-1], depths[::-1]) == alone[::-1]
    assert all(len(hits) == k for hits, k in zip(alone, depths, strict=True))


def test_flat_finds_what_a_plain_product_of_vectors_finds(world):
    index = Index(world.index["Flat"], "dense")
    encoder = Encoder(world.encoder)
    passages = encoder.passages([index.rows.contents(row) for row in range(len(index.rows))]).astype(np.float64)
    for query in world.queries[:8]:
        scores = passages @ encoder.queries([query])[0].astype(np.float64)
        hits = index.backend.search_batch([query], [5])[0]
        assert [row for row, _ in hits] == np.argsort(-scores)[:5].tolist()
        assert [score for _, score in hits] == pytest.approx(np.sort(scores)[::-1][:5], rel=1e-5)
    assert index.info()["pooling"] == "mean" and index.info()["query_prefix"] == "query: "
    assert len(index.backend.search_batch(["w1"], [10_000])[0]) == 300


def test_vectors_are_what_transformers_itself_makes_of_prefixed_text(world):
    from transformers import AutoModel, AutoTokenizer

    encoder, plain, words = Encoder(world.encoder), AutoModel.from_pretrained(world.encoder).eval(), "w3 w5 w7"
    tokens = AutoTokenizer.from_pretrained(world.encoder)("query: " + words, return_tensors="pt")
    with torch.no_grad():
        hidden = plain(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state[0]
    mean = torch.nn.functional.normalize(hidden.mean(0), dim=-1)
    np.testing.assert_allclose(encoder.queries([words])[0], mean.numpy(), rtol=1e-4, atol=1e-6)
    cls = Encoder(world.encoder, Family("query: ", pooling="cls", normalize=False)).queries([words])[0]
    np.testing.assert_allclose(cls, hidden[0].numpy(), rtol=1e-4, atol=1e-5)
    assert encoder.queries(["\ud800 w1", "", "\0"]).shape == (3, 32)


@pytest.mark.parametrize(
    ("name", "query", "passage", "pooling"),
    [
        ("intfloat/e5-base-v2", "query: ", "passage: ", "mean"),
        ("intfloat/multilingual-e5-small", "query: ", "passage: ", "mean"),
        ("BAAI/bge-small-en-v1.5", "Represent this sentence for searching relevant passages: ", "", "cls"),
        ("sentence-transformers/all-MiniLM-L6-v2", "", "", "mean"),
        ("thenlper/gte-base", "", "", "mean"),
    ],
)
def test_families(name, query, passage, pooling):
    family = family_of(name)
    assert (family.query_prefix, family.passage_prefix, family.pooling) == (query, passage, pooling)


def test_an_unknown_family_or_encoder_is_one_line():
    with pytest.raises(StartupError, match="no known family"):
        family_of("someone/mystery")
    with pytest.raises(StartupError, match=r"encoder \./nowhere-e5"):
        Encoder("./nowhere-e5")


def test_an_encoder_of_another_width_is_refused(world, tmp_path):
    with pytest.raises(IndexFault, match=r"made of 32-dimensional vectors, the encoder .* makes 48"):
        Index(world.index["Flat"], "dense", encoder=model(tmp_path / "wide-e5", 48))


def test_another_encoder_of_the_same_width_is_refused(world, tmp_path):
    torch.manual_seed(99)
    BertModel(config()).save_pretrained(tmp_path / "other-e5")
    tokenizer().save_pretrained(tmp_path / "other-e5")
    with pytest.raises(IndexFault, match="is not the one that made it"):
        Index(world.index["Flat"], "dense", encoder=str(tmp_path / "other-e5"))


def test_an_index_of_distances_is_not_taken_over(world, tmp_path, capsys):
    index = faiss.IndexFlatL2(32)
    index.add(np.zeros((300, 32), np.float32))
    faiss.write_index(index, str(tmp_path / "l2.index"))
    arguments = ["import", "--corpus", str(world.corpus), "--faiss-index", str(tmp_path / "l2.index")]
    assert command([*arguments, "--encoder", world.encoder, "--index", str(tmp_path / "taken")]) == 2
    assert "not inner products" in capsys.readouterr().err


def test_a_killed_encoding_goes_on_where_it_was(world, tmp_path, monkeypatch):
    monkeypatch.setattr("retrieval_server.index.dense_build._CHUNK", 64)
    real, seen = Encoder.passages, []

    def failing(self, texts):
        seen.append(len(texts))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(self, texts)

    options = BuildOptions(str(world.corpus), str(tmp_path / "index"), ("dense",), dense=DenseOptions(world.encoder))
    monkeypatch.setattr(Encoder, "passages", failing)
    with pytest.raises(KeyboardInterrupt):
        build(options, _Bar, lambda _: None)
    build(options, _Bar, lambda _: None)
    assert seen == [64, 64, 64, 64, 64, 44], "two chunks were kept, the third was done again"
    expected = Manifest.read(world.index["Flat"]).files["dense/index.faiss"].sha256
    assert Manifest.read(tmp_path / "index").files["dense/index.faiss"].sha256 == expected


def test_search_r1s_index_is_taken_over_with_its_corpus(world, tmp_path, capsys):
    source = world.index["Flat"] / "dense/index.faiss"
    arguments = ["import", "--corpus", str(world.corpus), "--faiss-index", str(source), "--encoder", world.encoder]
    assert command([*arguments, "--index", str(tmp_path / "taken")]) == 0
    taken = Index(tmp_path / "taken", thorough=True).backend
    assert taken.search_batch(world.queries, [3] * 24) == Index(world.index["Flat"], "dense").backend.search_batch(
        world.queries, [3] * 24
    )
    short = tmp_path / "short.jsonl"
    short.write_text("".join(world.corpus.read_text().splitlines(keepends=True)[:-1]))
    arguments[2] = str(short)
    assert command([*arguments, "--index", str(tmp_path / "refused")]) == 2
    assert "holds 300 vectors" in capsys.readouterr().err
    arguments[2], arguments[6] = str(world.corpus), model(tmp_path / "wide-e5", 48)
    assert command([*arguments, "--index", str(tmp_path / "refused")]) == 2
    assert "32-dimensional vectors, the encoder" in capsys.readouterr().err


def test_hybrid_is_reciprocal_rank_fusion_of_both(world):
    hybrid = Index(world.index["Flat"])
    bm25, dense = (Index(world.index["Flat"], name).backend for name in ("bm25", "dense"))
    assert hybrid.name == "hybrid"
    for query in world.queries[:5]:
        expected = fuse([b.search_batch([query], [50])[0] for b in (bm25, dense)], 5)
        assert hybrid.backend.search_batch([query], [5])[0] == expected
    assert fuse([[(1, 9.0), (2, 8.0)], [(2, 0.1), (3, 0.05)]], 3) == [
        (2, 1 / 62 + 1 / 61),
        (1, 1 / 61),
        (3, 1 / 62),
    ]


def test_vectors_that_will_not_fit_are_refused_with_numbers_and_what_would(world):
    manifest = Manifest.read(world.index["Flat"])
    manifest.backends["dense"] |= {"passages": 21_015_324, "dimension": 768}
    manifest.files["dense/index.faiss"].bytes = 4 * 21_015_324 * 768
    with pytest.raises(IndexFault) as refusal:
        memory.require(manifest, world.folder, free=40 << 30)
    text = str(refusal.value)
    assert "the vectors take 60.1 GiB, 40.0 GiB are free" in text
    assert "SQfp16 30.1 GiB" in text and "PQ96" in text and "bm25" in text and "Flat" not in text
    memory.require(manifest, world.folder, free=80 << 30)
    assert memory.available() > 0


def test_the_gpu_path_shards_in_fp16_and_says_what_is_missing(world):
    index = faiss.read_index(str(world.index["Flat"] / "dense/index.faiss"))
    if not hasattr(faiss, "GpuMultipleClonerOptions"):
        with pytest.raises(IndexFault, match="--gpu needs faiss with GPU support"):
            to_gpus(index)
    calls = []
    fake = SimpleNamespace(
        GpuMultipleClonerOptions=SimpleNamespace, index_cpu_to_all_gpus=lambda i, co: calls.append((i, co)) or i
    )
    assert to_gpus(index, fake) is index
    assert calls[0][1].useFloat16 is True and calls[0][1].shard is True


def test_a_cross_encoder_scores_each_query_against_its_own_documents(tmp_path):
    name = model(tmp_path / "cross", kind=BertForSequenceClassification)
    reranker = CrossEncoder(name)
    documents = [" ".join(WORDS[i : i + 5]) for i in range(40)]
    ranked = reranker.rank("w1 w2", documents)
    assert [score for _, score in ranked] == sorted((score for _, score in ranked), reverse=True)
    assert sorted(place for place, _ in ranked) == list(range(40))
    alone = {place: reranker.scores("w1 w2", [documents[place]])[0] for place in (0, 7, 39)}
    for place, score in ranked:
        if place in alone:
            assert score == pytest.approx(alone[place], rel=1e-4)
    with pytest.raises(StartupError, match=r"reranker .*nowhere"):
        CrossEncoder(str(tmp_path / "nowhere"))
