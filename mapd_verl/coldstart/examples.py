"""Training examples of the cold start: token ids with a loss mask, drawn from an endless stream.

Groups (``Shares``): *plain* questions answered in the mixture of behaviours; the same under *another*
question's protocol; questions with their own *protocol* (whole or in part) or an own *rollout*, answered
well, sometimes after a mistake; and *drills* for copying, reading and comparing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mapd_verl.agent.observation import INVALID_ACTION
from mapd_verl.coldstart import behaviour as b
from mapd_verl.coldstart import context as c
from mapd_verl.coldstart.tokenizer import END
from mapd_verl.coldstart.worlds import Namer, Places, passage_of
from mapd_verl.data.geonames import text
from mapd_verl.data.geonames.facts import City, Country
from mapd_verl.data.geonames.questions import COMPARISON_RATIO, RELATION_WEIGHTS, Question, answer_of, askable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: A stretch of text and whether the policy is trained on it.
Segment = tuple[str, bool]


@dataclass(frozen=True)
class Shares:
    """Relative weight of each group of examples."""

    plain: float = 0.32
    other_protocol: float = 0.12
    own_protocol: float = 0.34
    own_rollout: float = 0.04
    copy_drill: float = 0.12
    reading_drill: float = 0.10
    compare_drill: float = 0.04

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 0 or sum(vars(self).values()) <= 0:
            raise ValueError(f"shares must not be negative nor all zero: {self}")


@dataclass(frozen=True)
class Example:
    """``input_ids`` and ``loss_mask`` (1: the token is predicted under loss), both [L]."""

    input_ids: list[int]
    loss_mask: list[int]
    group: str


class ExampleStream:
    """Endless examples, the same for the same seed."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        places: Places,
        namer: Namer,
        shares: Shares,
        mixture: b.Mixture,
        seed: int,
        relations: dict[str, int] | None = None,
    ):
        self._relations = relations or RELATION_WEIGHTS
        self._tokenizer, self._places, self._namer = tokenizer, places, namer
        self._shares, self._mixture = shares, mixture
        self._rng = random.Random(seed)

    def __iter__(self) -> Iterator[Example]:
        groups, weights = list(vars(self._shares)), list(vars(self._shares).values())
        while True:
            group = self._rng.choices(groups, weights)[0]
            yield self._encode(getattr(self, f"_{group}")(), group)

    # -- questions ------------------------------------------------------------------------------

    def question(self) -> Question:
        """One question about training or made-up cities."""
        rng = self._rng
        while True:
            relation = rng.choices(list(self._relations), list(self._relations.values()))[0]
            city = self._places.city(rng)
            wording = rng.choice(text.QUESTIONS[relation])
            if relation == "comparison":
                other = self._places.city(rng)
                small, large = sorted((city, other), key=lambda x: x.population)
                if large.population < COMPARISON_RATIO * small.population or city.display == other.display:
                    continue
                asked = wording.format(city=city.display, other=other.display)
                return Question(asked, relation, "comparison", (large.display,), city, other)
            if askable(relation, city):
                answers = (answer_of(relation, city) or "",)
                return Question(wording.format(city=city.display), relation, text.TASK_TYPES[relation], answers, city)

    # -- groups ---------------------------------------------------------------------------------

    def _plain(self) -> list[Segment]:
        question = self.question()
        return self._episode(question, "", self._plain_turns(question))

    def _other_protocol(self) -> list[Segment]:
        question, other = self.question(), self.question()
        if self._rng.random() < 0.5:  # a near miss: the same relation, so that only the city tells
            other = next(q for q in iter(self.question, None) if q.relation == question.relation)
        return self._episode(question, self._some_protocol(other), self._plain_turns(question))

    def _own_protocol(self) -> list[Segment]:
        question = self.question()
        slip = self._rng.random() < 0.4
        turns = b.recovery(question, self._places, self._rng) if slip else b.good(question)
        return self._episode(question, self._some_protocol(question), turns)

    def _own_rollout(self) -> list[Segment]:
        question = self.question()
        slip = self._rng.random() < 0.3
        turns = b.recovery(question, self._places, self._rng) if slip else b.good(question)
        return self._episode(question, c.rollout_context(b.good(question)), turns)

    def _plain_turns(self, question: Question) -> list[b.Turn]:
        return b.plain(question, self._mixture.draw(question.kind, self._rng), self._places, self._rng)

    def _some_protocol(self, question: Question) -> str:
        return c.full_protocol(question) if self._rng.random() < 0.6 else c.partial_protocol(question, self._rng)

    def _copy_drill(self) -> list[Segment]:
        rng = self._rng
        items = [
            self._namer.name(rng) if rng.random() < 0.7 else f"{int(10 ** rng.uniform(0, 8)):,}"
            for _ in range(rng.randint(2, 6))
        ]
        listed = "".join(f" {item}." for item in items)
        # Said three times over: two thirds of the tokens can be had by copying alone.
        return [(self._chat("Repeat:" + listed), False), ("\n".join([listed] * 3) + END, True)]

    def _reading_drill(self) -> list[Segment]:
        rng = self._rng
        places: list[City | Country] = []
        while len(places) < 4:
            city = self._places.city(rng)
            places.append(city.country if rng.random() < 0.45 else city)
        segments: list[Segment] = [(self._chat("Read:" + self._documents(places)), False)]
        for _ in range(8):
            place = rng.choice(places)
            relations = text.CITY_RELATIONS if isinstance(place, City) else text.COUNTRY_RELATIONS
            relation = rng.choice(relations)
            sentence = text.fact(relation, passage_of(place).split("\n", 1)[1])
            if sentence is None:
                continue
            name = place.display if isinstance(place, City) else place.name
            segments += [(f"<search> {text.query(relation, name)}</search><answer>", False)]
            segments += [(f" {text.value(sentence)}</answer>", True)]
        return segments

    def _compare_drill(self) -> list[Segment]:
        rng = self._rng
        segments: list[Segment] = [(self._chat("Compare:"), False)]
        for _ in range(8):
            first, second = (int(10 ** rng.uniform(4, 7.4)) for _ in range(2))
            if max(first, second) < COMPARISON_RATIO * min(first, second):
                continue
            names = [self._namer.word(rng) for _ in range(2)]
            told = f" {names[0]} is {first:,}. {names[1]} is {second:,}.<answer>"
            segments += [(told, False), (f" {names[0] if first > second else names[1]}</answer>", True)]
        return segments

    # -- text -----------------------------------------------------------------------------------

    def _chat(self, content: str) -> str:
        return self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )

    def _episode(self, question: Question, context: str, turns: list[b.Turn]) -> list[Segment]:
        content = question.text + (f"\n\n{context}" if context else "")
        segments: list[Segment] = [(self._chat(content), False)]
        for turn in turns:
            segments.append((turn.text, turn.trained))
            if turn.invalid:
                segments.append((INVALID_ACTION, False))
            elif turn.found:
                segments.append((self._observation(turn.found), False))
        return segments

    def _observation(self, found: tuple[City | Country, ...]) -> str:
        rng = self._rng
        topk = max(len(found), 2 if rng.random() < 0.8 else 3)
        shown: list[City | Country] = list(found)
        while len(shown) < topk:
            shown.append(self._distractor(found[0]))
        if rng.random() < 0.15:
            rng.shuffle(shown)
        return f"\n\n<information>{self._documents(shown).strip()}</information>\n\n"

    def _documents(self, places: list[City | Country]) -> str:
        made = []
        for number, place in enumerate(places, 1):
            title, body = passage_of(place).split("\n", 1)
            made.append(f"Doc {number}(Title: {title}) {body}")
        return "\n".join(made)

    def _distractor(self, place: City | Country) -> City | Country:
        """Another place, often one whose name shares a word, as BM25 would find it."""
        rng = self._rng
        city = self._places.city(rng)
        if rng.random() < 0.3:
            return city.country
        if rng.random() < 0.5:
            words = (place.display if isinstance(place, City) else place.name).split(" ")
            name = f"{rng.choice(words)} {self._namer.word(rng)}"
            return City(0, name, name, False, city.country, city.timezone, city.population)
        return city

    def _encode(self, segments: list[Segment], group: str) -> Example:
        input_ids: list[int] = []
        loss_mask: list[int] = []
        for stretch, trained in segments:
            ids = self._tokenizer.encode(stretch, add_special_tokens=False)
            input_ids += ids
            loss_mask += [int(trained)] * len(ids)
        return Example(input_ids, loss_mask, group)
