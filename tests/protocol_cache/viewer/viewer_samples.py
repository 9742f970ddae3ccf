"""Caches for the viewer: an ordinary one, and one that a hostile corpus and teacher had a hand in."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from protocol_samples import EVIDENCE, SUCCEEDED, record

from protocol_cache import ProtocolStore
from protocol_cache.store import Candidate

#: What must appear as text, wherever a teacher or a corpus puts it.
HOSTILE = (
    "</textarea></title><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
    '<a href="javascript:alert(1)">x</a> {{ 7*7 }} \' " &amp;'
)
FACT_1, FACT_2 = "The city of X lies in Y.", "lies in Y. Its time zone"
CONTENTS = '"X"\nThe city of X lies in Y. Its time zone is T.'


def log(text: str = "") -> dict[str, Any]:
    """A log with every kind of event, ``text`` in all its free fields."""
    task = {"id": f"s1{text}", "goal": f"Find the country of X.{text}", "depends_on": []}
    then = {"id": "s2", "goal": f"Find its currency.{text}", "depends_on": [f"s1{text}"]}
    search = {"event": "search", "subtask": f"s1{text}", "query": f"country of X{text}"}
    return {
        "task_type": "multi_hop",
        "events": [
            {"event": "decompose", "task_type": "multi_hop", "levels": [[task], [then]]},
            search | {"passage_ids": ["city-1", f"other{text}", "not kept"]},
            {"event": "finding", "subtask": "s1", "finding": f"X lies in Y.{text}", "supported": not text},
            {"event": "synthesize", "status": "answer", "answer": f"Z{text}"},
            {"event": "check", "answer": f"Z{text}", "matches": True},
            {"event": "repair", "kind": f"search{text}", "suspect_subtasks": [f"s1{text}"]},
            {"event": f"of a later version{text}", "detail": text},
            {"event": "search"},
        ],
        "findings": [],
        "passages": [
            {"id": f"other{text}", "contents": f"Nothing.{text}"},
            {"id": "city-1", "contents": CONTENTS + text},
        ],
    }


def protocol(text: str = "") -> dict[str, Any]:
    """Two facts that overlap in one passage, and one whose passage was not kept."""
    made = copy.deepcopy(SUCCEEDED)
    made["reasoning_plan"] = [f"Find the country of X.{text}"]
    spans = [(FACT_1, CONTENTS.index(FACT_1)), (FACT_2, CONTENTS.index(FACT_2))]
    made["grounding_facts"] = [
        {"passage_id": "city-1", "text": fact, "start": start, "end": start + len(fact)} for fact, start in spans
    ] + [{"passage_id": f"gone{text}", "text": f"Its currency is Z.{text}", "start": 0, "end": 18 + len(text)}]
    made["answer"] = f"Z{text}"
    return made


def write_cache(path: Path, ordinary: int = 120) -> Path:
    """``ordinary`` records of every status and variant, and one question, ``hostile``, full of markup."""
    with ProtocolStore(path) as store:
        store._db.execute("PRAGMA synchronous = OFF")
        for i in range(ordinary):
            made = (protocol(), EVIDENCE, None)[i % 3]
            r = record(f"q{i:05}", made, question=f"Where does city {i} lie?", created_at=float(i))
            refused = Candidate({"task_type": "multi_hop"}, False, "leak", "leak: plan step 1 names the answer")
            passed = [Candidate(made, True)] if made else []
            store.put(r, [refused, *passed] if i % 2 or not made else passed, log())
        made = protocol(HOSTILE)
        r = record(f"hostile{HOSTILE}", made, question=f"Hostile? {HOSTILE}", source=f"s{HOSTILE}")
        store.put(
            r, [Candidate({"x": HOSTILE}, False, "leak", f"leak: {HOSTILE}"), Candidate(made, True)], log(HOSTILE)
        )
    return path
