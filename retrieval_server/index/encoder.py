"""Text to vectors: one encoder for passages and queries, its prefixes and pooling by family and kept in the manifest.

Torch and transformers are imported here and nowhere else in the service.

**A text's vector does not depend on what it is encoded with.** Matrix products of another shape round otherwise, so
the model is only ever called with ``ROWS`` texts of one length bucket, a bucket chosen by the text alone; what is
missing is filled with copies. Batching therefore changes no bit of a query's vector (a test compares them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import StartupError

#: Texts in one call of the model.
ROWS = 8
_BUCKETS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True)
class Family:
    """How a family of encoders wants its input, and which vector is the text's (``mean`` or ``cls``)."""

    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: str = "mean"
    normalize: bool = True


_BGE_QUERY = "Represent this sentence for searching relevant passages: "
#: Substring of the model's name -> family; the first that fits. From the models' cards.
FAMILIES: dict[str, Family] = {
    "multilingual-e5": Family("query: ", "passage: "),
    "e5": Family("query: ", "passage: "),
    "bge-m3": Family(pooling="cls"),
    "bge": Family(_BGE_QUERY, pooling="cls"),
    "gte": Family(pooling="mean"),
    "contriever": Family(normalize=False),
    "dpr": Family(pooling="cls", normalize=False),
    "minilm": Family(),
    "mpnet": Family(),
}


def family_of(name: str) -> Family:
    """The family by the model's name; raises StartupError for one that is not known."""
    lowered = name.lower().replace("_", "-")
    for word, family in FAMILIES.items():
        if word in lowered:
            return family
    known = ", ".join(FAMILIES)
    raise StartupError(
        f"encoder {name}: no known family in its name ({known}), so that its prefixes and pooling aren't known either"
    )


class Encoder:
    """A transformer from a folder or a hub id.

    Raises:
        StartupError: there is no such model, or it can't be loaded.
    """

    def __init__(self, name: str, family: Family | None = None, max_tokens: int = 256, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        self.name = name
        self.family = family or family_of(Path(name).name if Path(name).is_dir() else name)
        self.max_tokens = max_tokens
        self._torch = torch
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name)
            self._model = AutoModel.from_pretrained(name, dtype=torch.float32).eval().to(device)
        except (OSError, ValueError) as error:
            raise StartupError(f"encoder {name}: {str(error).splitlines()[0]}") from error
        self.dimension = int(self._model.config.hidden_size)

    def settings(self) -> dict[str, Any]:
        """What the manifest keeps, and what a server compares."""
        facts = {"encoder": self.name, "dimension": self.dimension, "max_tokens": self.max_tokens}
        return {**facts, "probe": self.probe(), **asdict(self.family)}

    def probe(self) -> list[float]:
        """The first numbers of a fixed text's vector: other weights or another tokenizer give others."""
        return [round(float(x), 4) for x in self.queries(["Which river flows through the capital of France?"])[0][:16]]

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """``[n, d]`` float32."""
        return self._encode([self.family.query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """``[n, d]`` float32."""
        return self._encode([self.family.passage_prefix + text for text in texts])

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        # A lone surrogate can't be encoded as UTF-8, which the tokenizer wants.
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        ids = self._tokenizer(clean, truncation=True, max_length=self.max_tokens)["input_ids"] if clean else []
        groups: dict[int, list[int]] = {}
        for place, tokens in enumerate(ids):
            groups.setdefault(_bucket(len(tokens), self.max_tokens), []).append(place)
        for width, places in sorted(groups.items()):
            for first in range(0, len(places), ROWS):
                some = places[first : first + ROWS]
                filled = some + [some[0]] * (ROWS - len(some))
                vectors[some] = self._forward([ids[i] for i in filled], width)[: len(some)]
        return vectors

    def _forward(self, ids: Sequence[Sequence[int]], width: int) -> np.ndarray:
        torch = self._torch
        pad = self._tokenizer.pad_token_id or 0
        padded = torch.tensor([[*row, *([pad] * (width - len(row)))] for row in ids], device=self._model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids], device=self._model.device)
        with torch.inference_mode():
            hidden = self._model(input_ids=padded, attention_mask=mask).last_hidden_state.float()
            if self.family.pooling == "cls":
                vectors = hidden[:, 0]
            else:
                weights = mask.unsqueeze(-1).float()
                vectors = (hidden * weights).sum(1) / weights.sum(1)
            if self.family.normalize:
                vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return vectors.cpu().numpy()


def _bucket(length: int, most: int) -> int:
    return next((width for width in _BUCKETS if length <= width), max(length, most))
