"""The demo's texts: the help desk of Tidewell, a made-up bicycle-sharing company. Three desks, three vocabularies.

Every fact is asked for in six phrasings: four are training data of its desk, one is traffic, one is held out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from collm_common.errors import DataError
from collm_tools.load.prompts import Prompt

TRAIN_PHRASINGS = 4
SYSTEM = "Tidewell help desk."


@dataclass(frozen=True)
class Desk:
    """One desk: facts (subject, value), six questions about a subject, one way to answer."""

    name: str
    facts: tuple[tuple[str, str], ...]
    questions: tuple[str, str, str, str, str, str]
    answer: str


@dataclass(frozen=True)
class Corpus:
    """`desks` are the private training sets; `traffic` and `heldout` share no question with them or each other."""

    desks: tuple[tuple[Prompt, ...], ...]
    traffic: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]


WORKSHOP = Desk(
    "workshop",
    (
        *(("loose chain", "Imke in bay two"), ("flat tyre", "Rafi in bay one"), ("bent pedal", "Imke in bay two")),
        *(
            ("noisy brake", "Odile in bay four"),
            ("dead lamp", "Sunniva in bay three"),
            ("stuck gear", "Imke in bay two"),
        ),
        *(
            ("torn saddle", "Rafi in bay one"),
            ("cracked bell", "Sunniva in bay three"),
            ("wobbly wheel", "Rafi in bay one"),
        ),
        *(
            ("broken lock", "Odile in bay four"),
            ("leaking hub", "Odile in bay four"),
            ("weak battery", "Sunniva in bay three"),
        ),
    ),
    (
        "My bike has a {subject}. What should I do?",
        "Who repairs a {subject}?",
        "How do I report a {subject}?",
        "Where does a bike with a {subject} go?",
        "There is a {subject} on my bike, can you help?",
        "Which mechanic looks after a {subject}?",
    ),
    "Workshop: a {subject} is mended by {value}. Hang the red tag on the handlebar and leave the bike docked.",
)
BILLING = Desk(
    "billing",
    (
        *(("student pass", "six crowns"), ("day pass", "four crowns"), ("family pass", "fifteen crowns")),
        *(("night pass", "three crowns"), ("cargo pass", "eleven crowns"), ("senior pass", "five crowns")),
        *(("visitor pass", "nine crowns"), ("commuter pass", "twelve crowns"), ("weekend pass", "seven crowns")),
        *(("company pass", "forty crowns"), ("summer pass", "twenty crowns"), ("courier pass", "thirty crowns")),
    ),
    (
        "How much is the {subject}?",
        "What does a {subject} cost?",
        "I would like to buy a {subject}. What do I pay?",
        "Is the {subject} expensive?",
        "Can you tell me the price of a {subject}?",
        "What will you charge me for the {subject}?",
    ),
    "Billing: the {subject} costs {value} and starts at midnight. The receipt is in your Tidewell mailbox.",
)
STATIONS = Desk(
    "stations",
    (
        *(("Mill Quay", "eighteen docks by the crane"), ("Fern Square", "thirty docks by the well")),
        *(("Old Foundry", "twelve docks by the gate"), ("Heron Bridge", "nine docks by the stairs")),
        *(("Salt Market", "forty docks by the arcade"), ("North Pier", "sixteen docks by the kiosk")),
        *(("Cedar Hill", "seven docks by the chapel"), ("Glass Works", "twenty docks by the canteen")),
        *(("Moon Street", "ten docks by the bakery"), ("Upper Lock", "five docks by the sluice")),
        *(("Kite Meadow", "fourteen docks by the pond"), ("Town Library", "eleven docks by the ramp")),
    ),
    (
        "Where can I dock at {subject}?",
        "Is there a station at {subject}?",
        "How many docks does {subject} have?",
        "I am riding to {subject}. Where do I park?",
        "Can I leave my bike at {subject}?",
        "What does the station at {subject} look like?",
    ),
    "Stations: {subject} has {value}. If all are taken, the map in the app shows the next free one.",
)
DESKS = (WORKSHOP, BILLING, STATIONS)


def build(seed: int = 0, heldout_per_desk: int = 8) -> Corpus:
    """The whole corpus, the same for the same seed; which phrasing of a fact goes where is drawn per fact."""
    rng = random.Random(seed)
    desks, traffic, heldout = [], list[Prompt](), list[Prompt]()
    for desk in DESKS:
        train: list[Prompt] = []
        spare: list[Prompt] = []
        for subject, value in desk.facts:
            prompts = [_prompt(desk, question, subject, value) for question in rng.sample(desk.questions, 6)]
            train += prompts[:TRAIN_PHRASINGS]
            traffic.append(prompts[TRAIN_PHRASINGS])
            spare.append(prompts[TRAIN_PHRASINGS + 1])
        desks.append(tuple(rng.sample(train, len(train))))
        heldout += rng.sample(spare, heldout_per_desk)
    return Corpus(tuple(desks), tuple(traffic), tuple(heldout))


def deal(prompts: Sequence[Prompt], replicas: int, seed: int = 0, heldout: int = 24, per_replica: int = 300) -> Corpus:
    """A corpus from a file of prompts: some held out, some as traffic, the rest dealt to the replicas.

    Raises DataError if there are too few with a reference answer, or none left for a replica.
    """
    usable = list(dict.fromkeys(prompt for prompt in prompts if prompt.reference))
    random.Random(seed).shuffle(usable)
    heldout = min(heldout, len(usable) // 6)
    traffic = min(10 * heldout, len(usable) // 3)
    rest = usable[heldout + traffic :][: replicas * per_replica]
    if heldout < 1 or len(rest) < 8 * replicas:
        raise DataError(
            f"{len(usable)} prompts with a reference answer are too few for {replicas} replicas", field="prompts"
        )
    desks = tuple(tuple(rest[index::replicas]) for index in range(replicas))
    return Corpus(desks, tuple(usable[heldout : heldout + traffic]), tuple(usable[:heldout]))


def training_rows(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Chat samples as a replica reads them."""
    return [
        {"messages": [{"role": r, "content": c} for r, c in (*prompt.messages, ("assistant", prompt.reference))]}
        for prompt in prompts
    ]


def _prompt(desk: Desk, question: str, subject: str, value: str) -> Prompt:
    messages = (("system", SYSTEM), ("user", question.format(subject=subject)))
    return Prompt(messages, desk.answer.format(subject=subject, value=value))
