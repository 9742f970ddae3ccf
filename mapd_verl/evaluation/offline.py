"""Episodes on a file of questions without verl: ``python -m mapd_verl.evaluation.offline --help``."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mapd_verl.errors import UserError, exit_with, one_line_errors
from mapd_verl.evaluation.records import Record, format_table, summarise, write_records

if TYPE_CHECKING:
    from mapd_verl.agent.config import AgentConfig
    from mapd_verl.agent.episode import Generate, Search
    from mapd_verl.data.rows import QuestionRow

PRIVILEGES = ("none", "protocol", "shuffled", "answer_only")


def privileged_contexts(
    questions: Sequence[QuestionRow], privilege: str, protocols: Path | None, template: str = "compact"
) -> list[str]:
    """The text that each question's prompt gets, "" where its source has none.

    Raises:
        UserError: if the privilege needs protocols and none are given, or none belongs to a question here.
    """
    from mapd_verl.data.join import join_protocols
    from mapd_verl.privilege import Rollout, make_source

    if privilege not in PRIVILEGES:
        raise UserError(f"--privilege: want one of {list(PRIVILEGES)}, got {privilege!r}")
    rendered: Mapping[str, str] = {}
    if privilege in ("protocol", "shuffled"):
        if protocols is None:
            raise UserError(f"--privilege {privilege} needs --protocols FILE")
        rendered = join_protocols(protocols, [q.question_id for q in questions], template).texts
        if not rendered:
            raise UserError(f"{protocols}: no protocol for any of the {len(questions)} questions")
    rollouts = [
        Rollout(q.question_id, q.question_id, 0.0, protocol=rendered.get(q.question_id), answer=q.targets[0])
        for q in questions
    ]
    source = make_source(privilege, decode=lambda ids: "", success_score=1.0)
    found = [source.context(i, rollouts) for i in range(len(rollouts))]
    return [context.text if context else "" for context in found]


async def evaluate(
    questions: Sequence[QuestionRow],
    generate: Generate,
    search: Search,
    tokenizer: Any,
    config: AgentConfig,
    sampling: Mapping[str, Any],
    contexts: Sequence[str] | None = None,
    privilege: str = "none",
    concurrency: int = 64,
    max_context_tokens: int = 512,
    apply_chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Record]:
    """One episode for each question, ``concurrency`` of them at a time; records in the questions' order.

    With a seed in ``sampling`` each question gets its own, so that results do not depend on timing.
    """
    from mapd_verl.agent.episode import Tools, run_episode
    from mapd_verl.privilege import privileged_prompt_ids

    tools, gate = Tools(tokenizer, config), asyncio.Semaphore(concurrency)

    async def one(i: int, row: QuestionRow) -> Record:
        context = contexts[i] if contexts else ""
        prompt_ids = privileged_prompt_ids(
            tokenizer,
            row.messages,
            context,
            max_context_tokens=max_context_tokens,
            apply_chat_template_kwargs=apply_chat_template_kwargs,
        )
        own = dict(sampling)
        if own.get("seed") is not None:
            own["seed"] += 1000 * i  # room for the calls of one episode
        async with gate:
            episode = await run_episode(generate, search, tokenizer, prompt_ids, config, own, tools)
        return Record.from_episode(row, episode, config.reward_mode, privilege if context else "none", context)

    tasks = [asyncio.ensure_future(one(i, row)) for i, row in enumerate(questions)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:  # the first error stops the rest instead of leaving them running
            task.cancel()


def load_model(path: Path) -> tuple[Any, Any]:
    """Tokenizer and model of a Hugging Face folder, fp32, ready to generate.

    Raises:
        UserError: naming the folder.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (path / "config.json").is_file():
        raise UserError(f"{path}: not a model folder (no config.json)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot load the model: {error}") from error
    return tokenizer, model


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mapd eval", description="Run the search agent on a file of questions.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True, help="parquet or JSON lines in the Search-R1 schema")
    parser.add_argument("--retriever", action="append", required=True, help="base URL; give it again for more")
    parser.add_argument("--protocols", type=Path, help="protocol cache")
    parser.add_argument("--privilege", choices=PRIVILEGES, default="none", help="what the prompt gets besides")
    parser.add_argument("--protocol-template", default="compact")
    parser.add_argument("--max-context-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="only the first N questions")
    parser.add_argument("--max-searches", type=int, default=3)
    parser.add_argument("--max-turn-tokens", type=int, default=128)
    parser.add_argument("--max-response-tokens", type=int, default=1024)
    parser.add_argument("--max-observation-tokens", type=int, default=500)
    parser.add_argument("--max-passage-tokens", type=int, default=200)
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument("--reward-mode", choices=("compat", "strict"), default="compat")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--out", type=Path, help="JSON lines, one record a question")
    return parser.parse_args(arguments)


async def evaluate_folder(options: argparse.Namespace) -> list[Record]:
    """All of the command but its printing."""
    from mapd_verl.agent.config import AgentConfig
    from mapd_verl.agent.search import make_client
    from mapd_verl.cpu.generation import BatchedGenerator
    from mapd_verl.data.rows import read_questions

    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit: want at least 1, got {options.limit}")
    if options.max_batch < 1:
        raise UserError(f"--max-batch: want at least 1, got {options.max_batch}")
    try:
        config = AgentConfig(
            max_searches=options.max_searches,
            max_turn_tokens=options.max_turn_tokens,
            max_response_tokens=options.max_response_tokens,
            max_observation_tokens=options.max_observation_tokens,
            max_passage_tokens=options.max_passage_tokens,
            topk=options.topk,
            retriever_urls=tuple(options.retriever),
            reward_mode=options.reward_mode,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    questions = read_questions(options.data, options.limit)
    contexts = privileged_contexts(questions, options.privilege, options.protocols, options.protocol_template)
    tokenizer, model = load_model(options.model)
    sampling = {"temperature": options.temperature, "top_p": options.top_p, "seed": options.seed}
    async with make_client(config) as client:
        # One query before the first episode: a service that is down should not cost a run to notice.
        probe = await client.search(questions[0].question)
        if not probe.ok:
            raise UserError(f"retrieval service: {probe.error}: {probe.detail}")
        with BatchedGenerator(
            model,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
            max_batch=options.max_batch,
            max_length=model.config.max_position_embeddings,
            num_threads=options.threads,
        ) as generator:
            return await evaluate(
                questions,
                generator.generate,
                client.search,
                tokenizer,
                config,
                sampling,
                contexts,
                options.privilege,
                concurrency=options.max_batch,
                max_context_tokens=options.max_context_tokens,
            )


@one_line_errors("mapd eval")
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table by kind and write the records."""
    options = parse_arguments(arguments)
    started = time.monotonic()
    records = asyncio.run(evaluate_folder(options))
    summaries = summarise(records)
    print(format_table(summaries))
    flags = ", ".join(f"{name} {count}" for name, count in summaries[0].flags.items())
    print(f"flags: {flags or 'none'}; {time.monotonic() - started:.1f} s")
    if options.out:
        write_records(options.out, records)
        print(f"records: {options.out}")
    if summaries[0].em.n == 0:
        raise UserError(f"{', '.join(options.retriever)}: retrieval failed for every question, nothing was scored")
    return 0


if __name__ == "__main__":
    exit_with(main)
