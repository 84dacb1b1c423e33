"""Pages and turns under arbitrary traffic: nothing is lost, nothing is shared wrongly, everything ends."""

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.serving.messages import NOTHING, Finished, Request, Sampling, Token
from shardwise.serving.pages import START, Pages, page_key
from shardwise.serving.scheduler import EngineStep, Scheduler

SIZE = 3
LONGEST = 16
"""Tokens of the longest sequence: a cache of six pages always holds one."""

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=10).map(tuple)
arrivals = st.lists(
    st.tuples(st.integers(0, 25), prompts, st.integers(0, 6), st.none() | st.integers(0, 12), st.booleans()),
    max_size=12,
)


class Machine:
    """A stand-in for all ranks: what each slot of the cache holds, in the order in which turns write."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.slots: dict[int, tuple[int, ...]] = {}
        """Slot -> all tokens up to and with the one whose key lies there."""

    def compute(self, turn: EngineStep) -> list[int]:
        size = self.scheduler.pages.size
        for chunk in turn.chunks:
            tokens, pages = chunk.sequence.tokens, chunk.sequence.pages
            for place in range(chunk.start, chunk.stop):
                self.slots[pages[place // size] * size + place % size] = tuple(tokens[: place + 1])
        for chunk in turn.chunks:
            tokens, pages = chunk.sequence.tokens, chunk.sequence.pages
            for place in range(chunk.stop):
                held = self.slots.get(pages[place // size] * size + place % size)
                assert held == tuple(tokens[: place + 1]), "attention would see another token's key"
        for row in turn.wanted:
            prompt = row.sequence.request.prompt
            assert row.target == (prompt[row.place] if row.place < len(prompt) else None)
        return [_next(row.sequence.tokens[: row.place]) if row.target is None else row.target for row in turn.wanted]


def _next(tokens: list[int]) -> int:
    return (sum(tokens) + len(tokens)) % 2


def check_pages(scheduler: Scheduler) -> None:
    """Every page is empty, idle, or has as many users as sequences hold it."""
    pages = scheduler.pages
    held = Counter(page for sequence in scheduler.running for page in sequence.pages)
    assert {page: count for page, count in enumerate(pages._users) if count} == dict(held)
    assert len(pages._empty) + len(pages._idle) + len(held) == pages.count
    assert not pages._empty & pages._idle.keys() and not held.keys() & (pages._empty | pages._idle.keys())
    assert {key: page for page, key in pages._keys.items()} == pages._known
    assert all(not sequence.pages for sequence in scheduler.waiting)


@settings(deadline=None, max_examples=150)
@given(
    arrivals, st.integers(6, 14), st.integers(1, 7), st.integers(1, 5), st.booleans(), st.integers(1, 3),
    st.integers(0, 6),
)  # fmt: skip
def test_every_request_gets_its_own_tokens(arrivals, count, chunk, batch, reuse, depth, rows) -> None:  # type: ignore[no-untyped-def]
    scheduler = Scheduler(Pages(count, SIZE, reuse), batch=batch, chunk=chunk, depth=depth, rows=rows)
    machine = Machine(scheduler)
    wanted: dict[int, tuple[tuple[int, ...], int]] = {}
    scored: dict[int, list[int]] = {}
    cancels: dict[int, list[int]] = {}
    starts: dict[int, list[Request]] = {}
    for number, (turn, prompt, most, cancelled, scores) in enumerate(arrivals, 1):
        most = most if scores and len(prompt) > 1 else max(most, 1)
        wanted[number] = prompt, most
        if scores:
            scored[number] = []
        starts.setdefault(turn, []).append(Request(number, prompt, Sampling(max_tokens=most, prompt_logprobs=scores)))
        if cancelled is not None:
            cancels.setdefault(turn + cancelled, []).append(number)
    got: dict[int, list[int]] = {number: [] for number in wanted}
    ended: dict[int, str] = {}
    under_way: deque[tuple[EngineStep, list[int]]] = deque()
    number = 0
    while scheduler.active or number <= 40 or under_way:
        answers = []
        for request in starts.get(number, []):
            scheduler.add(request)
        for each in cancels.get(number, []):
            answers += scheduler.cancel(each)
        turn = scheduler.schedule()
        singles = sum(c.stop - c.start == 1 for c in turn.chunks)
        assert len({id(c.sequence) for c in turn.chunks}) == len(turn.chunks)
        assert turn.tokens <= max(chunk, singles + 1) and len(scheduler.running) <= batch
        assert len(turn.wanted) <= scheduler.rows
        under_way.append((turn, machine.compute(turn)))
        if len(under_way) == depth:
            done, tokens = under_way.popleft()
            answers += scheduler.process_output(done, tokens, [float(row.place) for row in done.wanted])
        check_pages(scheduler)
        for answer in answers:
            assert answer.id not in ended, "an answer after the end"
            if isinstance(answer, Token) and answer.prompt:
                scored[answer.id].append(answer.token)
                assert answer.logprob == len(scored[answer.id]) and not got[answer.id]
            elif isinstance(answer, Token):
                got[answer.id].append(answer.token)
            elif isinstance(answer, Finished):
                ended[answer.id] = answer.reason
        number += 1
        assert number < 1500, "some request never ends"
        if number > 40 and not scheduler.active:
            break
    assert ended.keys() == wanted.keys()
    assert scheduler.pages.free == count
    for each, (prompt, most) in wanted.items():
        tokens = list(prompt)
        for token in got[each]:
            assert token == _next(tokens)
            tokens.append(token)
        assert len(got[each]) == most if ended[each] == "length" else ended[each] == "cancelled"
        told = tuple(scored.get(each, ()))
        assert told == prompt[1:] if each in scored and ended[each] == "length" else told == prompt[1:][: len(told)]


def test_stop_tokens_end_a_request_and_are_given_out() -> None:
    scheduler = Scheduler(Pages(8, SIZE), batch=2, chunk=8)
    scheduler.add(Request(1, (5, 6), Sampling(max_tokens=9, stop_tokens=(3,))))
    answers = scheduler.process_output(scheduler.schedule(), [4], [0.0]) + scheduler.process_output(
        scheduler.schedule(), [3], [0.0]
    )
    assert answers == [Token(1, 4, 0.0), Token(1, 3, 0.0), Finished(1, "stop")]
    assert not scheduler.active


def test_a_request_without_a_token_ends_alone() -> None:
    scheduler = Scheduler(Pages(8, SIZE), batch=2, chunk=8)
    for number in (1, 2):
        scheduler.add(Request(number, (5, number), Sampling(max_tokens=2)))
    answers = scheduler.process_output(scheduler.schedule(), [NOTHING, 4], [0.0, 0.0])
    assert [type(answer) for answer in answers] == [Finished, Token]
    assert answers[0].reason == "error" and "no numbers" in answers[0].error
    assert scheduler.process_output(scheduler.schedule(), [4], [0.0])[-1] == Finished(2, "length")
    assert not scheduler.active and scheduler.pages.free == 8


def test_equal_beginnings_are_computed_once_and_the_oldest_unused_pages_go_first() -> None:
    scheduler = Scheduler(Pages(6, SIZE), batch=2, chunk=20)

    def one(number: int, prompt: tuple[int, ...]) -> int:
        scheduler.add(Request(number, prompt, Sampling(max_tokens=1)))
        *_, end = scheduler.process_output(scheduler.schedule(), [0], [0.0])
        assert isinstance(end, Finished)
        return end.reused

    first, other = tuple(range(7)), tuple(range(20, 27))
    assert one(1, first) == 0
    assert one(2, first) == 6, "two full pages; the last token is always computed"
    assert one(3, (*first[:5], 99, 98)) == 3
    assert one(4, other) == 0
    assert one(5, tuple(range(40, 52))) == 0  # takes four pages of six: one prompt's are gone
    assert one(6, other) == 6 and one(7, first) < 6


def test_a_sequence_grows_into_pages_that_follow_each_other() -> None:
    scheduler = Scheduler(Pages(12, SIZE), batch=2, chunk=20)
    for number in (1, 2):
        scheduler.add(Request(number, (number,) * 4, Sampling(max_tokens=12)))
    while scheduler.active:
        for sequence in scheduler.running:
            assert sequence.pages == list(range(sequence.pages[0], sequence.pages[0] + len(sequence.pages)))
        turn = scheduler.schedule()
        scheduler.process_output(turn, [0] * len(turn.wanted), [0.0] * len(turn.wanted))


def test_the_stages_of_a_pipeline_always_have_something_to_do() -> None:
    scheduler, depth = Scheduler(Pages(40, SIZE), batch=8, chunk=64, depth=3), 3
    for number in range(1, 7):
        scheduler.add(Request(number, (1, 2), Sampling(max_tokens=12)))
    under_way: deque[EngineStep] = deque()
    sizes = []
    while scheduler.active:
        under_way.append(scheduler.schedule())
        sizes.append(len(under_way[-1].chunks))
        if len(under_way) == depth:
            done = under_way.popleft()
            scheduler.process_output(done, [0] * len(done.wanted), [0.0] * len(done.wanted))
    assert set(sizes[depth + 1 : -2 * depth]) == {2}, sizes


def test_chunks_of_a_long_prompt_follow_each_other_without_waiting() -> None:
    scheduler = Scheduler(Pages(40, SIZE), batch=8, chunk=5, depth=3)
    scheduler.add(Request(1, tuple(range(23)), Sampling(max_tokens=1)))
    spans = [(c.start, c.stop) for _ in range(6) for c in scheduler.schedule().chunks]
    assert spans == [(0, 5), (5, 10), (10, 15), (15, 20), (20, 23)]


def test_whole_prompts_are_never_cut() -> None:
    """However small the step, and however few rows of logits it has room for."""
    scheduler = Scheduler(Pages(40, SIZE), batch=8, chunk=5, rows=2, whole=True)
    for number, prompt in enumerate(([1, 2, 3], range(4, 27), [27, 28, 29, 30]), 1):
        scheduler.add(Request(number, tuple(prompt), Sampling(max_tokens=1, prompt_logprobs=number == 2)))
    steps = [[(c.sequence.request.id, c.start, c.stop) for c in scheduler.schedule().chunks] for _ in range(2)]
    assert steps == [[(1, 0, 3), (2, 0, 23)], [(3, 0, 4)]]


def test_keys_tell_tokens_and_what_came_before() -> None:
    assert page_key(START, [1, 2]) != page_key(START, [2, 1])
    assert page_key(page_key(START, [1]), [2]) != page_key(page_key(START, [3]), [2])
