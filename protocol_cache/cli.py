"""The command line, one function per command."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mapd_verl.errors import UserError, one_line_errors
from protocol_cache.schema import SCHEMA_VERSION
from protocol_cache.store import ProtocolStore, Provenance

if TYPE_CHECKING:
    from protocol_cache.prompts import Prompts
    from protocol_cache.synthesis.run import Plan, Tally
    from protocol_cache.synthesis.state import Limits

PROGRAM = "protocol_cache"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def _at_least(least: int) -> Any:
    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    read.__name__ = "whole number"
    return read


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m protocol_cache", description="Make and read MAPD protocols.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    make = commands.add_parser("synthesize", help="answer questions with a team of agents and keep their protocols")
    make.add_argument("--questions", required=True, help="Search-R1 .parquet or .jsonl")
    make.add_argument("--out", required=True, help="the cache, an SQLite file; a second run goes on where it stopped")
    make.add_argument("--retriever", required=True, action="append", metavar="URL", help="repeat for several")
    make.add_argument("--model", required=True, help="LiteLLM's name, as in openai/NAME or anthropic/NAME")
    make.add_argument("--api-base", help="URL of an OpenAI-compatible server (default: the provider's own)")
    make.add_argument("--api-key-env", help="environment variable with the key (default: LiteLLM's for the provider)")
    make.add_argument("--concurrency", type=_at_least(1), default=16, help="questions, and model requests, at once")
    make.add_argument("--limit", type=_at_least(1), help="only the first so many rows")
    make.add_argument("--topk", type=_at_least(1), default=3, help="passages a search")
    make.add_argument("--max-repairs", type=_at_least(0), default=2, help="repairs after a wrong answer")
    make.add_argument("--max-rounds", type=_at_least(1), default=2, help="rounds of decomposition between two checks")
    make.add_argument("--max-queries", type=_at_least(1), default=3, help="searches of one searcher")
    make.add_argument("--max-subtasks", type=_at_least(1), default=4, help="sub-tasks of one decomposition")
    make.add_argument("--timeout", type=float, default=120.0, help="seconds for one model request")
    make.add_argument("--max-tokens", type=_at_least(16), default=2048, help="tokens of one reply")
    make.add_argument("--temperature", type=float, default=0.0)
    make.add_argument(
        "--price", type=float, nargs=2, metavar=("IN", "OUT"), help="dollars a million tokens, for unlisted models"
    )
    make.add_argument("--prompts", default="v1", help="a shipped version, or a folder with the same file names")
    make.add_argument("--corpus", help="the corpus file behind the retriever; its SHA-256 is kept as provenance")
    make.add_argument("--retry-rejected", action="store_true", help="try questions again that the gate rejected")
    make.set_defaults(run=_synthesize)

    stats = commands.add_parser("stats", help="what a cache holds, what it cost, what the gate refused")
    stats.add_argument("store")
    stats.add_argument("--json", action="store_true")
    stats.set_defaults(run=_stats)

    show = commands.add_parser("show", help="one question: protocol, rendered text, verdicts, log")
    show.add_argument("store")
    show.add_argument("question_id", help="an id or its beginning")
    show.add_argument("--template", default="default", help="a shipped template or a .j2 file")
    show.add_argument("--log", action="store_true", help="the exploration log too")
    show.set_defaults(run=_show)
    return parser


@one_line_errors(PROGRAM)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; exit code 2 and one line for bad input, 130 for Ctrl-C."""
    options = _parser().parse_args(arguments)
    return options.run(options)


def _synthesize(options: argparse.Namespace) -> int:
    from protocol_cache.prompts import Prompts
    from protocol_cache.synthesis.questions import read_questions
    from protocol_cache.synthesis.run import plan_run
    from protocol_cache.synthesis.state import Limits

    if options.timeout <= 0:
        raise UserError(f"--timeout: must be above 0 seconds, got {options.timeout}")
    questions = read_questions(options.questions, options.limit)
    limits = Limits(
        subtasks=options.max_subtasks,
        rounds=options.max_rounds,
        queries=options.max_queries,
        repairs=options.max_repairs,
        topk=options.topk,
    )
    try:
        prompts = Prompts(options.prompts)
    except ValueError as error:
        raise UserError(str(error)) from error
    provenance = Provenance(options.model, prompts.version, _corpus_hash(options.corpus), SCHEMA_VERSION)
    # SIGTERM ends a run like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ProtocolStore(options.out) as store:
        plan = plan_run(questions, store, provenance, ("rejected",) if options.retry_rejected else ())
        finished = f", {plan.finished} were finished already" if plan.finished else ""
        if plan.stale:
            print(f"{PROGRAM}: note: {plan.stale} records are of another corpus or schema, made anew", file=sys.stderr)
        if not plan.todo:
            print(f"{options.out}: nothing to do{finished}")
            return 0
        try:
            tally = asyncio.run(_run(options, plan, store, prompts, limits, provenance))
        except KeyboardInterrupt:
            print(f"\n{options.out}: {len(store)} questions are kept; the same command goes on", file=sys.stderr)
            raise
    rate = tally.done / tally.seconds
    rejected = f"{tally.outcomes['rejected']} rejected"
    seconds = f"{tally.seconds:.1f} s ({rate:.1f}/s)"
    print(f"{options.out}: {tally.done} questions in {seconds}: {_progress(tally)}, {rejected}{finished}")
    for reason, count in tally.reasons.most_common(5):
        print(f"  {count} x {reason}")
    if tally.outcomes["failed"] == tally.done:
        raise UserError(f"all {tally.done} questions failed, most often: {tally.reasons.most_common(1)[0][0]}")
    return 0


async def _run(
    options: argparse.Namespace,
    plan: Plan,
    store: ProtocolStore,
    prompts: Prompts,
    limits: Limits,
    provenance: Provenance,
) -> Tally:
    from tqdm import tqdm

    from protocol_cache.synthesis.llm import Teacher, TeacherConfig
    from protocol_cache.synthesis.pipeline import Team
    from protocol_cache.synthesis.run import check_retriever, check_teacher, synthesize
    from retrieval_server.client import RetrievalClient

    try:
        retriever = RetrievalClient(options.retriever, topk=limits.topk)
    except ValueError as error:
        raise UserError(f"--retriever: {error}") from error
    config = TeacherConfig(
        model=options.model,
        api_base=options.api_base,
        api_key_env=options.api_key_env,
        timeout=options.timeout,
        concurrency=options.concurrency,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        prices=tuple(options.price) if options.price else None,
    )
    async with retriever:
        await check_retriever(retriever)
        await check_teacher(config)
        teacher = Teacher(config, prompts)
        interactive = sys.stderr.isatty()
        bar = tqdm(
            total=len(plan.todo),
            unit="q",
            desc="synthesize",
            mininterval=0.5 if interactive else 15.0,
            dynamic_ncols=interactive,
        )

        def show(tally: Tally) -> None:
            bar.set_postfix_str(_progress(tally), refresh=False)
            bar.update()

        team = Team(teacher, retriever, limits)
        try:
            with bar:
                return await synthesize(plan.todo, store, team, provenance, options.concurrency, show)
        finally:
            await teacher.close()


def _progress(tally: Tally) -> str:
    passed = tally.outcomes["passed"] / tally.done if tally.done else 0.0
    cost = "price unknown" if tally.cost_usd is None else f"${tally.cost_usd:.2f}"
    text = f"{passed:.1%} passed, {tally.calls / max(1, tally.done):.1f} calls/q, {cost}"
    return text + (f", {tally.outcomes['failed']} failed" if tally.outcomes["failed"] else "")


def _corpus_hash(path: str | None) -> str:
    """SHA-256 of the corpus file, or "unknown" where none was named."""
    import hashlib

    from protocol_cache.synthesis.run import UNKNOWN_CORPUS

    if path is None:
        print(f"{PROGRAM}: note: without --corpus the cache can't say which corpus it belongs to", file=sys.stderr)
        return UNKNOWN_CORPUS
    if not Path(path).is_file():
        raise UserError(f"--corpus {path}: no such file")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stats(options: argparse.Namespace) -> int:
    with ProtocolStore(options.store, readonly=True) as store:
        stats = store.stats()
    if options.json:
        print(json.dumps(stats, indent=1, ensure_ascii=False))
        return 0
    records = stats["records"]
    cost = "unknown" if stats["cost_usd"] is None else f"${stats['cost_usd']:.2f}"
    if stats["cost_usd"] is not None and stats["records_without_cost"]:
        cost += f" (and {stats['records_without_cost']} records without a known price)"
    print(f"{records} questions: {_counts(stats['status'])}")
    print(f"variants: {_counts(stats['variant'])}")
    print(f"candidates: {stats['candidates']}, refused by {_counts(stats['failed_checks'])}")
    if records:
        tokens = (stats["prompt_tokens"] + stats["completion_tokens"]) / records
        print(f"calls: {stats['calls']} ({stats['calls'] / records:.1f} a question), {tokens:,.0f} tokens a question")
    print(f"cost: {cost}")
    for reason, count in list(stats["failures"].items())[:10]:
        print(f"failed: {count} x {reason}")
    for origin in stats["provenance"]:
        print(
            f"{origin['records']} made by {origin['teacher_model']}, prompts {origin['prompt_version']}, "
            f"schema {origin['schema_version']}, corpus {origin['corpus_hash'][:12]}"
        )
    return 0


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _show(options: argparse.Namespace) -> int:
    from protocol_cache.render import render

    with ProtocolStore(options.store, readonly=True) as store:
        matches = [qid for qid in store.statuses() if qid.startswith(options.question_id)]
        if len(matches) != 1:
            raise UserError(f"{options.store}: {len(matches)} questions with an id that begins {options.question_id!r}")
        record = store.get(matches[0])
        assert record is not None
        candidates, log = store.candidates(record.question_id), store.log(record.question_id)
    print(f"{record.question_id}  {record.source}/{record.split}  {record.status}\n{record.question}\n")
    if record.protocol:
        try:
            print(render(record.protocol, options.template))
        except ValueError as error:
            raise UserError(str(error)) from error
        print(f"\n{json.dumps(record.protocol, indent=1, ensure_ascii=False)}")
    else:
        print(f"no protocol: {record.reason}")
    for number, candidate in enumerate(candidates, start=1):
        print(f"candidate {number}: {'passed' if candidate.passed else candidate.reason}")
    usage = record.usage
    print(f"{usage.calls} calls, {usage.prompt_tokens} + {usage.completion_tokens} tokens, {usage.seconds:.1f} s")
    if options.log:
        print(json.dumps(log, indent=1, ensure_ascii=False))
    return 0
