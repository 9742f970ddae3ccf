"""Ranking given documents for a query with a cross-encoder; imports torch and transformers when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import StartupError

#: Pairs in one call of the model.
_BATCH = 32


class CrossEncoder:
    """A sequence-classification model with one output: the pair's score.

    Raises:
        StartupError: no such model, or it has another number of outputs.
    """

    def __init__(self, name: str, max_tokens: int = 512, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._torch = torch
        self.name = name
        self.max_tokens = max_tokens
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name)
            self._model = AutoModelForSequenceClassification.from_pretrained(name, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise StartupError(f"reranker {name}: {str(error).splitlines()[0]}") from error
        if self._model.config.num_labels != 1:
            raise StartupError(f"reranker {name}: has {self._model.config.num_labels} outputs, a cross-encoder has one")
        self._model = self._model.eval().to(device)

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        """One score a document; each query is scored against its own documents only."""
        found: list[float] = []
        for first in range(0, len(documents), _BATCH):
            some = list(documents[first : first + _BATCH])
            inputs: Any = self._tokenizer(
                [query] * len(some),
                some,
                truncation=True,
                max_length=self.max_tokens,
                padding=True,
                return_tensors="pt",
            ).to(self._model.device)
            with self._torch.inference_mode():
                found += self._model(**inputs).logits.squeeze(-1).float().tolist()
        return found

    def rank(self, query: str, documents: Sequence[str]) -> list[tuple[int, float]]:
        """Places and scores, best first, equal scores in the given order."""
        scores = self.scores(query, documents)
        return sorted(enumerate(scores), key=lambda pair: (-pair[1], pair[0]))
