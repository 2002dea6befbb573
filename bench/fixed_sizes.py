"""The coordinator against fixed (B, b), live: joint completion time and Q-goodput while a job trains under load.

    python bench/fixed_sizes.py --data ../shared/data --out docs/results

The stack, the three clients and their texts are those of bench/adaptation.py, the model is the small one of
bench/small_model.py, so that a job has many rounds in a minute. Joint completion time is how long it takes from the
start of the job until a published version is as good as the target on everybody's held-out samples.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.adaptation import Course, run, texts
from bench.small_model import teach
from bench.texts import read
from collm_common.types import BatchSizes
from collm_tools.load.runner import plan
from collm_tools.load.traffic import poisson

PAIRS = (None, BatchSizes(4, 16), BatchSizes(8, 12), BatchSizes(12, 8), BatchSizes(16, 4))
LARGEST = 16
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def model(options: argparse.Namespace) -> Path:
    """The small model, with a chat template."""
    questions = [record.messages[0][1] for records in read(options.data).values() for record in records]
    folder: Path = options.cache_dir / "taught"
    _, tokenizer = teach(questions, options.base_steps, folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def sizes(pair: BatchSizes | None) -> dict[str, str]:
    """Settings of the coordinator, and as large a batch for the engine as any pair asks for."""
    env = {"COLLM_COORDINATOR_MAX_TRAIN_BATCH": str(LARGEST), "COLLM_REPLICA_MAX_BATCH": str(LARGEST)}
    if pair is not None:
        env["COLLM_COORDINATOR_FIXED"] = json.dumps({"train": pair.train, "infer": pair.infer})
    return env


def completion_s(course: Course, target: float) -> float | None:
    """From the start of the job to the first version that is good enough; None if none was."""
    if course.job_s is None:
        return None
    pairs = zip(course.published_s, course.published_losses, strict=True)
    return next((at - course.job_s[0] for at, loss in pairs if loss is not None and loss <= target), None)


def row(pair: BatchSizes | None, course: Course, target: float) -> str:
    """One line of the table."""
    name = "coordinator" if pair is None else f"({pair.train}, {pair.infer})"
    took = completion_s(course, target)
    least = min((loss for loss in course.published_losses if loss is not None), default=None)
    reached, best = "-" if took is None else f"{took:.0f} s", "-" if least is None else f"{least:.3f}"
    return (
        f"| {name} | {reached} | {course.q_goodput or 0:.1f} | {course.attainment:.0%} | {course.rounds} | {best} "
        f"| {course.machine_load:.1f} |"
    )


def main() -> None:
    """Every pair; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k, mbpp and self-instruct")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache/models"))
    parser.add_argument("--base-steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=60.0, help="of load, for every pair")
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--target", type=float, default=6.0, help="nats; the bare model has 6.7")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--snapshot-steps", type=int, default=5)
    parser.add_argument("--chars", type=int, default=300)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.model = str(model(options).resolve())
    corpus = texts(options)
    offers = plan(
        poisson(options.rate, options.seconds, options.seed), corpus.traffic, options.max_tokens, options.seed
    )
    lines = [
        f"| (B, b) | to {options.target:g} nats | Q-goodput | in time | rounds | best held-out | load of the machine |",
        "|---" * 7 + "|",
    ]
    for pair in PAIRS:
        course = asyncio.run(run("sharing", options, corpus, offers, sizes(pair)))
        lines.append(row(pair, course, options.target))
        print(lines[-1], flush=True)
    print("\n".join(lines))
    if options.out:
        (options.out / "fixed_sizes_tables.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
