"""The baseline of ``retrieval_load.py``: the kind of server that search-agent projects copy from each other.

One request at a time behind a lock, a FastAPI endpoint with a pydantic model and dicts for answers, bm25s' own search
for BM25 (its numba backend, scoring every passage), the encoder called for each request and faiss' own search for
dense. It reads the same corpus and the same index as the server it is compared with.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


class BM25:
    """bm25s over the index's postings: its score matrix is ours, column by column."""

    def __init__(self, folder: Path) -> None:
        import bm25s
        import numpy as np

        from retrieval_server.index.vocabulary import Vocabulary

        words = Vocabulary(folder / "bm25")
        arrays = [np.load(folder / "bm25" / f"{name}.npy") for name in ("impacts", "rows", "indptr")]
        self._retriever = bm25s.BM25(method="lucene", backend="numba")
        self._retriever.scores = dict(zip(("data", "indices", "indptr"), arrays, strict=True))
        self._retriever.scores["num_docs"] = len(np.load(folder / "starts.npy"))
        self._retriever.vocab_dict = {words._token(i).decode("utf-8", "surrogatepass"): i for i in range(len(words))}
        self._retriever.unique_token_ids_set = set(self._retriever.vocab_dict.values())
        self._retriever.nonoccurrence_array = None
        self._retriever.activate_numba_scorer()

    def search(self, query: str, topk: int) -> tuple[list[int], list[float]]:
        from retrieval_server.tokenizer import tokenize

        rows, scores = self._retriever.retrieve([tokenize(query)], k=topk, show_progress=False, n_threads=1)
        return rows[0].tolist(), scores[0].tolist()


class Dense:
    """The encoder as ``transformers`` runs it for one text, then faiss."""

    def __init__(self, folder: Path) -> None:
        import faiss
        import torch
        from transformers import AutoModel, AutoTokenizer

        settings = json.loads((folder / "manifest.json").read_text())["backends"]["dense"]
        self._torch = torch
        self._prefix, self._most = settings["query_prefix"], settings["max_tokens"]
        self._tokenizer = AutoTokenizer.from_pretrained(settings["encoder"])
        self._model = AutoModel.from_pretrained(settings["encoder"]).eval()
        self._index = faiss.read_index(str(folder / settings["file"]))

    def search(self, query: str, topk: int) -> tuple[list[int], list[float]]:
        torch = self._torch
        with torch.no_grad():
            inputs = self._tokenizer(
                [self._prefix + query], truncation=True, max_length=self._most, padding=True, return_tensors="pt"
            )
            hidden = self._model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(-1).float()
            vector = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        scores, rows = self._index.search(vector.numpy(), topk)
        return rows[0].tolist(), scores[0].tolist()


def main() -> None:
    """Serve on a loopback port until killed."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    parser = argparse.ArgumentParser()
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--backend", choices=["bm25", "dense"], required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    corpus = json.loads((arguments.index / "manifest.json").read_text())["corpus"]["path"]
    with (arguments.index / corpus).open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    retriever = {"bm25": BM25, "dense": Dense}[arguments.backend](arguments.index)
    retriever.search("warm up", 3)
    lock = threading.Lock()
    app = FastAPI()

    class Request(BaseModel):
        queries: list[str]
        topk: int | None = None
        return_scores: bool = False

    @app.post("/retrieve")
    def retrieve(request: Request) -> dict[str, Any]:
        result = []
        with lock:
            for query in request.queries:
                found, scores = retriever.search(query, request.topk or 3)
                result.append([{"document": rows[r], "score": s} for r, s in zip(found, scores, strict=True)])
        return {"result": result}

    @app.get("/readyz")
    def ready() -> dict[str, str]:
        return {"status": "ready"}

    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
