"""Time and memory of the join of 170,000 questions with a protocol cache, and the cache's size.

    python benchmarks/protocols_join.py [--questions 170000] [--cached 170000]

The cache holds protocols of two hops as the synthesis writes them (without exploration logs, as a trainer's cache has
no need of them). The join runs in a process of its own, whose peak memory is reported with and without the imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from protocol_cache import SCHEMA_VERSION, ProtocolStore, Provenance, Record, Usage, question_id  # noqa: E402

_CHILD = """
import json, resource, sys, time
from mapd_verl.data.join import JoinPolicies, join_protocols
from mapd_verl.data.rows import question_ids
import jinja2, protocol_cache.render, protocol_cache.store
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
path, count, corpus = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rows = ({"question": f"Which currency is used in the country of city {i}?", "data_source": "nq",
         "extra_info": {"split": "train"}} for i in range(count))
imported, begin = peak(), time.perf_counter()
ids = question_ids(rows, "rows")
hashed = time.perf_counter()
join = join_protocols(path, ids, "default", JoinPolicies(corpus_hash=corpus))
joined, memory = time.perf_counter(), peak()
characters = sum(len(join.look_up(qid).text) for qid in ids[:10_000])
looked_up = time.perf_counter()
print(json.dumps({"ids_s": hashed - begin, "join_s": joined - hashed, "total_s": joined - begin,
                  "peak_mb": memory, "imports_mb": imported, "counts": join.counts,
                  "look_up_us": (looked_up - joined) / min(count, 10_000) * 1e6, "characters": characters}))
"""
CORPUS = "c" * 64


def protocol(i: int) -> dict:
    """Two hops, about 0.6 KB as JSON."""
    first = f"City {i} is a town in the district of Harbour {i % 97}, in the republic of Land {i % 193}."
    second = f"Land {i % 193} is a republic whose official currency has been the Crown {i % 193} since 1971."
    return {
        "schema_version": SCHEMA_VERSION,
        "variant": "succeeded",
        "task_type": "multi_hop",
        "reasoning_plan": [
            f"Find out in which country city {i} lies.",
            "Find the official currency of that country.",
            "State the currency by its full name.",
        ],
        "grounding_facts": [
            {"passage_id": f"city-{i}", "text": first, "start": 12, "end": 12 + len(first)},
            {"passage_id": f"land-{i % 193}", "text": second, "start": 10, "end": 10 + len(second)},
        ],
        "answer": f"Crown {i % 193}",
        "answer_grounded": True,
    }


def write_cache(path: Path, count: int) -> None:
    """Through the store's own ``put``, but for a commit on the disk after each, which nobody waits for here."""
    origin = Provenance("openai/m", "v1", CORPUS, SCHEMA_VERSION)
    with ProtocolStore(path) as store:
        store._db.execute("PRAGMA synchronous = OFF")
        for i in range(count):
            question = f"Which currency is used in the country of city {i}?"
            passed = i % 1000 != 7  # the paper: 25,584 of 25,600
            store.put(
                Record(
                    question_id(question, "nq", "train"),
                    question,
                    "nq",
                    "train",
                    "passed" if passed else "rejected",
                    origin,
                    protocol(i) if passed else None,
                    None if passed else "leak: plan step 1 names the answer",
                    Usage(6, 10_000, 2_500, 0.057, 21.0),
                )
            )


def main() -> int:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=170_000, help="questions to join")
    parser.add_argument("--cached", type=int, default=170_000, help="records in the cache")
    parser.add_argument("--cache", type=Path, help="keep the cache here and use it again (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.cache or Path(folder) / "protocols.sqlite"
        if not path.exists():
            begin = time.perf_counter()
            write_cache(path, options.cached)
            print(f"{options.cached} records written in {time.perf_counter() - begin:.1f} s", file=sys.stderr)
        child = [sys.executable, "-c", _CHILD, str(path), str(options.questions), CORPUS]
        runs = [json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
        best = min(runs, key=lambda run: run["total_s"])
        size = path.stat().st_size
    result = {"questions": options.questions, "cached": options.cached, "cache_mb": size / 2**20}
    result |= {"bytes_a_record": size / options.cached, "runs_total_s": [run["total_s"] for run in runs], **best}
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
