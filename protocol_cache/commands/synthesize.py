"""``synthesize``: a team of agents answers questions and fills a cache."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import signal
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mapd_verl.errors import UserError
from protocol_cache.commands import PROGRAM
from protocol_cache.commands.numbers import at_least, positive
from protocol_cache.grounding import NORMALIZATIONS
from protocol_cache.schema import SCHEMA_VERSION
from protocol_cache.store import ProtocolStore, Provenance

if TYPE_CHECKING:
    from protocol_cache.prompts import Prompts
    from protocol_cache.synthesis.run import Plan, Tally
    from protocol_cache.synthesis.state import Limits


#: The budget ended the run; everything finished is kept.
EXIT_BUDGET = 3


def add(commands: Any) -> None:
    """Its parser."""
    make = commands.add_parser("synthesize", help="answer questions with a team of agents and keep their protocols")
    make.add_argument("--questions", required=True, help="Search-R1 .parquet or .jsonl")
    make.add_argument("--out", required=True, help="the cache, an SQLite file; a second run goes on where it stopped")
    make.add_argument("--retriever", required=True, action="append", metavar="URL", help="repeat for several")
    make.add_argument("--model", required=True, help="LiteLLM's name, as in openai/NAME or anthropic/NAME")
    make.add_argument("--api-base", help="URL of an OpenAI-compatible server (default: the provider's own)")
    make.add_argument("--api-key-env", help="environment variable with the key (default: LiteLLM's for the provider)")
    make.add_argument("--concurrency", type=at_least(1), default=16, help="questions, and model requests, at once")
    make.add_argument("--limit", type=at_least(1), help="only the first so many rows")
    make.add_argument("--topk", type=at_least(1), default=3, help="passages a search")
    make.add_argument("--max-repairs", type=at_least(0), default=2, help="repairs after a wrong answer")
    make.add_argument("--max-rounds", type=at_least(1), default=2, help="rounds of decomposition between two checks")
    make.add_argument("--max-queries", type=at_least(1), default=3, help="searches of one searcher")
    make.add_argument("--max-subtasks", type=at_least(1), default=4, help="sub-tasks of one decomposition")
    make.add_argument("--timeout", type=float, default=120.0, help="seconds for one model request")
    make.add_argument("--max-tokens", type=at_least(16), default=2048, help="tokens of one reply")
    make.add_argument("--temperature", type=float, default=0.0)
    make.add_argument(
        "--price", type=float, nargs=2, metavar=("IN", "OUT"), help="dollars a million tokens, for unlisted models"
    )
    make.add_argument(
        "--schema-mode",
        action=argparse.BooleanOptionalAction,
        help="ask the provider for replies of the JSON schema (default: where LiteLLM knows that it can)",
    )
    make.add_argument("--budget-usd", type=positive, help="stop (exit code 3) before all calls together cost more")
    make.add_argument("--budget-tokens", type=at_least(1), help="likewise, prompt and completion tokens")
    make.add_argument("--budget-calls", type=at_least(1), help="likewise, model calls")
    make.add_argument("--rpm", type=positive, help="requests a minute that the provider allows")
    make.add_argument("--tpm", type=positive, help="tokens a minute that the provider allows")
    make.add_argument(
        "--dry-run", type=at_least(2), metavar="N", help="work on N questions drawn at random and price the whole job"
    )
    make.add_argument(
        "--normalize", choices=NORMALIZATIONS, default="none", help="how a fact may differ from its passage"
    )
    make.add_argument("--prompts", default="v1", help="a shipped version, or a folder with the same file names")
    make.add_argument("--corpus", help="the corpus file behind the retriever; its SHA-256 is kept as provenance")
    make.add_argument("--retry-rejected", action="store_true", help="try questions again that the gate rejected")
    make.set_defaults(run=_synthesize)


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
        whole = len(plan.todo)
        if options.dry_run:
            chosen = random.Random(0).sample(plan.todo, min(options.dry_run, whole))
            plan = replace(plan, todo=chosen)
        try:
            tally = asyncio.run(_run(options, plan, store, prompts, limits, provenance))
        except KeyboardInterrupt:
            print(f"\n{options.out}: {len(store)} questions are kept; the same command goes on", file=sys.stderr)
            raise
        if options.dry_run:
            _price(options, store, [question.question_id for question, _ in plan.todo], whole)
    rate = tally.done / max(tally.seconds, 1e-9)
    rejected = f"{tally.outcomes['rejected']} rejected"
    seconds = f"{tally.seconds:.1f} s ({rate:.1f}/s)"
    print(f"{options.out}: {tally.done} questions in {seconds}: {_progress(tally)}, {rejected}{finished}")
    for reason, count in tally.reasons.most_common(5):
        print(f"  {count} x {reason}")
    if tally.stopped is not None:
        print(f"{PROGRAM}: stopped: {tally.stopped}; the same command goes on with a larger budget", file=sys.stderr)
        return EXIT_BUDGET
    if tally.done and tally.outcomes["failed"] == tally.done:
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

    from protocol_cache.calls import Budget, CallLog
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
        schema_mode=options.schema_mode,
        rpm=options.rpm,
        tpm=options.tpm,
        prices=tuple(options.price) if options.price else None,
    )
    async with retriever:
        await check_retriever(retriever)
        await check_teacher(config)
        calls = CallLog(options.out, Budget(options.budget_usd, options.budget_tokens, options.budget_calls))
        teacher = Teacher(config, prompts, calls)
        interactive = sys.stderr.isatty()
        bar = tqdm(
            total=len(plan.todo),
            unit="q",
            desc="synthesize",
            mininterval=0.5 if interactive else 15.0,
            dynamic_ncols=interactive,
        )

        def show(tally: Tally) -> None:
            bar.set_postfix_str(_progress(tally, len(plan.todo)), refresh=False)
            bar.update()

        team = Team(teacher, retriever, limits, options.normalize)
        try:
            with bar:
                return await synthesize(plan.todo, store, team, provenance, options.concurrency, show)
        finally:
            await teacher.close()
            calls.close()


def _price(options: argparse.Namespace, store: ProtocolStore, sample: list[str], whole: int) -> None:
    """What the whole job would cost by the sample, with a 95% interval (normal, of the mean)."""
    usages = [record.usage for record in store.get_many(sample).values()]
    if len(usages) < 2:
        print(f"{options.out}: too few questions ended to price the job")
        return
    for name, values in (
        ("dollars", [u.cost_usd for u in usages]),
        ("calls", [float(u.calls) for u in usages]),
        ("tokens", [float(u.prompt_tokens + u.completion_tokens) for u in usages]),
    ):
        known = [value for value in values if value is not None]
        if len(known) < 2:
            print(f"  {name}: not known (give --price)")
            continue
        mean = statistics.fmean(known)
        half = 1.96 * statistics.stdev(known) / math.sqrt(len(known))
        shown = "{:,.2f}" if name == "dollars" else "{:,.0f}"
        total, low, high = (shown.format(whole * max(0.0, x)) for x in (mean, mean - half, mean + half))
        print(f"  {whole} questions by {len(known)} of them: {total} {name} [{low}, {high}]")


def _progress(tally: Tally, whole: int | None = None) -> str:
    passed = tally.outcomes["passed"] / tally.done if tally.done else 0.0
    cost = "price unknown" if tally.cost_usd is None else f"${tally.cost_usd:.2f}"
    if whole and tally.done and tally.cost_usd is not None:
        cost += f" of about ${tally.cost_usd / tally.done * whole:.2f}"
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
