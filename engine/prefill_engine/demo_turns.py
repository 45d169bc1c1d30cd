"""The turns of the demo, and what each of them must do by prefill_plan's arithmetic. Pure; for demo.py.

The trap: what a turn must find was left by those before it, node by node; `Known` keeps that, so that nothing here is a number
that was once read off a run.
"""

from dataclasses import dataclass, field

from prefill_engine.demo_nodes import NODE_NAMES
from prefill_engine.demo_prompt import NUM_MESSAGES, Prompt
from prefill_engine.demo_report import EncoderFigures, TurnReport
from prefill_engine.timeline import AttemptRecord, Completed, FirstToken, last_event, window_source
from prefill_plan.positions import PrefillPositions, Span, embedding_spans, plan_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """mode: how its KV is handed over. restarts: its node's engine is killed after the turn before. kills_kvd: of this node,
    before it. is_repeated: the prompt of the turn before once more, no message added."""

    label: str
    node: str
    mode: str
    restarts: bool = False
    kills_kvd: str = ""
    is_repeated: bool = False


TURNS = (
    Turn(label="turn 1, node A, cold", node="A", mode="pull"),
    Turn(label="turn 2, node A, one turn longer", node="A", mode="push"),
    Turn(label="turn 3, node A, its engine was killed (-9) and restarted", node="A", mode="pull", restarts=True),
    Turn(label="turn 4, moved to node B, with a screenshot", node="B", mode="store-only"),
    Turn(label="turn 5, node B, the same turn again", node="B", mode="pull", is_repeated=True),
    Turn(label="turn 6, back to node A, node B's kvd was killed (-9)", node="A", mode="pull", kills_kvd="B"),
)
assert sum(not turn.is_repeated for turn in TURNS) == NUM_MESSAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """window_from: in window_source's words. num_images: that the vision encoder must be asked for."""

    positions: PrefillPositions
    window_from: str
    num_images: int


@dataclass(slots=True, kw_only=True)
class Known:
    """What was left where so far. num_tokens: of the last prompt, whose whole blocks are in the store. snapshots: positions, by
    node. living: nodes whose kvd runs."""

    keep_tokens: int
    window_tokens: int
    num_tokens: int = 0
    snapshots: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in NODE_NAMES})
    living: set[str] = field(default_factory=lambda: set(NODE_NAMES))

    def expect(self, turn: Turn, prompt: Prompt) -> Expected:
        """What the turn must do with this prompt."""
        spans = tuple(Span(start=image.start, length=image.tokens) for image in prompt.images)
        positions = plan_positions(
            len(prompt.tokens),
            offered_hit=self.num_tokens,
            keep_tokens=self.keep_tokens,
            window_tokens=self.window_tokens,
            snapshot_held=lambda position: self._source(position, turn.node) in ("held", "pulled"),
            spans=spans,
        )
        needed = embedding_spans(
            spans,
            hit=positions.hit_tokens,
            window_tokens=self.window_tokens,
            snapshot_held=positions.replay_tokens == 0,
        )
        window_from = self._source(positions.hit_tokens, turn.node)
        return Expected(positions=positions, window_from=window_from, num_images=len(needed))

    def note(self, turn: Turn, prompt: Prompt, expected: Expected) -> None:
        """The turn has done that."""
        self.num_tokens = len(prompt.tokens)
        pulled = {expected.positions.hit_tokens} if expected.window_from == "pulled" else set()
        self.snapshots[turn.node] |= {*expected.positions.snapshots, *pulled}

    def _source(self, position: int, node: str) -> str:
        if position == 0:
            return "none"
        if position in self.snapshots[node]:
            return "held"
        others = self.living - {node}
        return "pulled" if any(position in self.snapshots[other] for other in others) else "replay"


def path_problems(record: AttemptRecord, expected: Expected, encoder: EncoderFigures) -> list[str]:
    """What engine and vision encoder did against what they must do. record: of an attempt that ended well."""
    completed = last_event(record, Completed)
    assert completed is not None, "only attempts that ended are checked"
    usage, store, handoff, positions = completed.usage, completed.store, completed.handoff, expected.positions
    pairs = (
        ("hit", usage.cached_tokens, positions.hit_tokens),
        ("window KV from", window_source(record), expected.window_from),
        ("replayed rows", usage.replayed_tokens, positions.replay_tokens),
        ("computed rows", usage.computed_tokens, positions.new_tokens),
        ("stored blocks", store.blocks_committed if store else 0, positions.end_new_block - positions.first_new_block),
        ("window snapshots", store.snapshots if store else (), positions.snapshots),
        ("hand-off", handoff.state if handoff else "", "DELIVERED"),
        ("images that the vision encoder counted", encoder.num_images, expected.num_images),
    )
    return [f"{name}: {found}, expected {wanted}" for name, found, wanted in pairs if found != wanted]


def answer_problems(turn: TurnReport, before: TurnReport) -> list[str]:
    """A repeated turn against the turn that it repeats: the same answer, and the same KV for decode."""
    one, other = last_event(turn.record, FirstToken), last_event(before.record, FirstToken)
    pairs = (
        ("first token and its log-probability", one, other),
        ("SHA-256 of what decode was handed", turn.handed_sha256, before.handed_sha256),
    )
    return [
        f"{name}: {found}, expected {wanted} as in the turn before" for name, found, wanted in pairs if found != wanted
    ]
