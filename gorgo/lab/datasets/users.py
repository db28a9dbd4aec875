"""The generators of users and of shared prefixes.

Owns the rows of windows of users, of reused prefixes, of groups behind shared system prompts, of retrieved documents,
and of agents' sessions. Leaves their parameters to the shapes.

Theory of operation of a window of users: half an hour out of a service that was there before and goes on afterwards.
What a window's table says of all its requests must come out the same for every seed, though a few users send much of
the traffic. So totals are not left to chance, only who has which part of them:

- How many requests a user sends are the quantiles of a log-normal distribution, dealt to the users in any order.
- Some users ask unrelated questions behind one long prompt of their own, the others hold conversations, one after the
  other. Users are taken in any order and made one or the other so that the share of requests stays as wanted.
- A conversation (or such a user) is given a length from the quantiles of prompt lengths over requests: they are laid
  end to end in any order, each as wide as it has requests, and the middle of each says which quantile is its own.
  Whatever the order, the lengths over all requests have the wanted distribution. The size of a turn is taken from the
  same place, but runs through its own distribution many times on the way, so that the two are independent.
- A conversation's prompt grows around that length, turn by turn; what lies before its first turn here is its history.
- A user's requests follow each other with pauses, from a uniform instant on and around the end of the window to its
  beginning: so as many users are active at the start as at the end.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import NormalDist

from gorgo.core.prompt.parse import bounded
from gorgo.lab.datasets.prefix_shapes import AgentsShape, GroupsShape, HerdShape, Quantiles, RagShape, SharingShape
from gorgo.lab.datasets.shape import RandomDraws, UsersShape
from gorgo.lab.datasets.synthetic import MadeRow, TextName

#: A conversation's system prompt is cut to this part of its mean length, so that short ones are not system alone.
SYSTEM_PART_MAX = 0.6
#: A turn adds at least so many tokens on average: a short question and a short answer.
TURN_TOKENS_MIN = 24
#: How often the sizes of turns run from smallest to largest while lengths do once: each length sees them all.
TURN_LAPS = 37
#: The extreme sizes of turns are those at this share and the rest.
TAIL = 0.005
#: Spread (sigma) around their mean of the turns of one conversation, and of unrelated questions of one user.
TURN_NOISE = 0.5
#: Pauses of one user vary by so much (sigma) around their pace.
PAUSE_NOISE = 0.8
#: A user's requests take at most this part of the window; what is left is the pause between their end and beginning.
BUSY_PART_MAX = 0.97


def user_rows(shape: UsersShape) -> Iterator[MadeRow]:
    """The requests, user by user, each user's in the order of time."""
    return _Window(shape).rows()


@dataclass(slots=True)
class _SampledUser:
    number: int
    requests: int
    one_shot: bool
    system: TextName
    system_tokens: int


@dataclass(slots=True)
class _Part:
    """Consecutive requests of one user: a conversation, or all requests of a user without one."""

    user: _SampledUser
    number: int
    requests: int
    #: Mean length of its prompts, tokens.
    level: float = 0.0
    #: What a turn adds, tokens.
    per_turn: float = 0.0


@dataclass(frozen=True, slots=True)
class _Prompt:
    shared_tokens: int
    own: TextName
    input_tokens: int
    output_tokens: int
    turn: int


class _Window:
    def __init__(self, shape: UsersShape) -> None:
        self._shape = shape
        self._draws = RandomDraws(shape.seed)
        self._texts = 0

    def rows(self) -> Iterator[MadeRow]:
        parts = {user.number: list(self._parts(user)) for user in self._users()}
        self._give_levels([part for of_user in parts.values() for part in of_user])
        phase = 2 * math.pi * self._draws.uniform()
        for of_user in parts.values():
            user = of_user[0].user
            prompts = (prompt for part in of_user for prompt in self._prompts(part))
            for time_s, prompt in zip(self._times(user.requests, phase), prompts, strict=True):
                yield _row(user, time_s, prompt)

    # -- users and their requests

    def _users(self) -> Iterator[_SampledUser]:
        shape = self._shape
        total = one_shot_total = 0
        for number, requests in enumerate(self._draws.shuffled(_request_counts(shape))):
            total += requests
            one_shot = one_shot_total + requests / 2 < shape.one_shot_share * total
            one_shot_total += requests if one_shot else 0
            yield self._user(number, requests, one_shot)

    def _user(self, number: int, requests: int, one_shot: bool) -> _SampledUser:
        shape, draws = self._shape, self._draws
        application, shares = draws.rank(shape.applications), draws.uniform() < shape.application_share
        own_tokens = round(draws.log_normal(shape.system_median, shape.system_sigma))
        if shares and not one_shot:
            tokens = shape.application_tokens * (shape.applications + application) // shape.applications
            return _SampledUser(number, requests, one_shot, ("application", application), tokens)
        return _SampledUser(number, requests, one_shot, ("user", number), own_tokens)

    def _parts(self, user: _SampledUser) -> Iterator[_Part]:
        left = user.requests
        while left:
            wanted = left if user.one_shot else self._draws.geometric(self._shape.conversation_requests)
            yield _Part(user, self._text(), min(left, wanted))
            left -= min(left, wanted)

    def _give_levels(self, parts: list[_Part]) -> None:
        shape, before, shift = self._shape, 0, self._draws.uniform()
        for part in self._draws.shuffled(parts):
            position = (before + part.requests / 2) / shape.requests
            part.level = quantile(shape.input_quantiles, position)
            other = min(max((shift + TURN_LAPS * position) % 1, TAIL), 1 - TAIL)
            part.per_turn = shape.turn_median * math.exp(shape.turn_sigma * NormalDist().inv_cdf(other))
            before += part.requests

    def _text(self) -> int:
        self._texts += 1
        return self._texts

    # -- prompts

    def _prompts(self, part: _Part) -> Iterator[_Prompt]:
        return self._one_shots(part) if part.user.one_shot else self._turns(part)

    def _one_shots(self, part: _Part) -> Iterator[_Prompt]:
        """Yield prompts of the user's own long beginning and a new part."""
        shape, draws = self._shape, self._draws
        own_median = part.level * shape.one_shot_own * math.exp(-(TURN_NOISE**2) / 2)
        shared = round(part.level * (1 - shape.one_shot_own))
        for _ in range(part.requests):
            new_tokens = max(1, round(draws.log_normal(own_median, TURN_NOISE)))
            answer = shape.answer_share * draws.log_normal(shape.turn_median, shape.turn_sigma)
            yield self._prompt(shared, self._text(), shared + new_tokens, answer, turn=1)

    def _turns(self, part: _Part) -> Iterator[_Prompt]:
        """Yield a conversation; some turns are repeated word for word."""
        shape, draws = self._shape, self._draws
        again = [False, *(draws.uniform() < shape.retry_budget_ratio for _ in range(part.requests - 1))]
        half_span = (len(again) - sum(again) - 1) / 2
        shared = round(min(part.user.system_tokens, SYSTEM_PART_MAX * part.level))
        per_turn, own_tokens = _start(part, part.level - shared, shape.input_max - shared, half_span)
        turn, added = max(1, round(own_tokens / per_turn)), 0.0
        for is_again in again:
            if not is_again:
                own_tokens, turn = own_tokens + added, turn + (added > 0)
            added = draws.log_normal(per_turn * math.exp(-(TURN_NOISE**2) / 2), TURN_NOISE)
            yield self._prompt(shared, part.number, shared + round(own_tokens), shape.answer_share * added, turn=turn)

    def _prompt(self, shared: int, text: int, input_tokens: int, answer: float, *, turn: int) -> _Prompt:
        shape = self._shape
        output = max(1, min(shape.output_max, round(answer)))
        return _Prompt(shared, ("text", text), min(shape.input_max, input_tokens), output, turn)

    # -- when

    def _times(self, count: int, phase: float) -> list[float]:
        shape, draws = self._shape, self._draws
        pace = draws.log_normal(shape.pause_s_median, shape.pause_sigma)
        pauses = [shape.pause_s_min + draws.log_normal(pace, PAUSE_NOISE) for _ in range(count - 1)]
        squeeze = min(1.0, BUSY_PART_MAX * shape.duration_s / sum(pauses)) if pauses else 1.0
        start = draws.uniform() * shape.duration_s
        return sorted(self._swung((start + squeeze * t) % shape.duration_s, phase) for t in accumulate([0.0, *pauses]))

    def _swung(self, time_s: float, phase: float) -> float:
        """The same instant where the load rises and falls by about `swing`, `waves` times in the window."""
        angle = 2 * math.pi * self._shape.waves / self._shape.duration_s
        swing = self._shape.swing / angle if angle else 0.0
        return time_s + swing * (math.sin(angle * time_s + phase) - math.sin(phase))


def quantile(quantiles: Quantiles, share: float) -> float:
    """The length below which so large a share lies; straight lines between the given points."""
    for (low, low_tokens), (high, high_tokens) in pairwise(quantiles):
        if share <= high:
            return low_tokens + (high_tokens - low_tokens) * (share - low) / (high - low)
    return quantiles[-1][1]


def _start(part: _Part, own_mean: float, own_max: float, half_span: float) -> tuple[float, float]:
    """Tokens that a turn adds, and those behind the system prompt at the first turn here."""
    per_turn = max(TURN_TOKENS_MIN, min(part.per_turn, own_mean / (half_span + 1)))
    middle = min(own_mean, own_max - per_turn * half_span)
    return per_turn, max(per_turn, middle - per_turn * half_span)


def _request_counts(shape: UsersShape) -> list[int]:
    """Return at least 1 each, `requests` in all; requests beyond the first are log-normal."""
    places = [(number + 0.5) / shape.users for number in range(shape.users)]
    sizes = [math.exp(shape.requests_sigma * NormalDist().inv_cdf(share)) for share in places]
    rest = (shape.requests - shape.users) / sum(sizes)
    ends = [round(rest * size) for size in accumulate(sizes)]
    return [1 + end - before for before, end in zip([0, *ends], ends, strict=False)]


def _row(user: _SampledUser, time_s: float, prompt: _Prompt) -> MadeRow:
    return MadeRow(
        timestamp_ms=int(1000 * time_s),
        shared=user.system,
        shared_tokens=prompt.shared_tokens,
        own=prompt.own,
        input_tokens=prompt.input_tokens,
        output_tokens=prompt.output_tokens,
        user=f"user-{user.number}",
        turn=prompt.turn,
    )


# The generator of reused prefixes: how much is shared, how far apart, and until when.


#: Prefixes that may return; the one used longest ago is dropped.
RECENT_MAX = 4096
#: Own parts of the prompts of one prefix vary by so much (sigma).
OWN_NOISE = 0.3
#: Multiples of the golden ratio fill the unit interval evenly: few prefixes have the lengths of the whole shape.
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class _Prefix:
    number: int
    tokens: int
    #: Mean length of what follows it.
    own_tokens: float


def sharing_rows(shape: SharingShape) -> Iterator[MadeRow]:
    """The requests in the order of time."""
    draws, recent, begun, now_s = RandomDraws(shape.seed), list[_Prefix](), 0, 0.0
    first = draws.uniform()
    for number in range(shape.requests):
        now_s += draws.exponential(1 / shape.rate_per_s)
        if number == shape.shift_at:
            recent.clear()
        if not recent or draws.uniform() < shape.new_share:
            begun += 1
            prefix = _new(shape, begun, (first + begun * GOLDEN) % 1)
        else:
            prefix = recent.pop(-1 - min(int(draws.exponential(shape.reuse_distance)), len(recent) - 1))
        recent.append(prefix)
        del recent[:-RECENT_MAX]
        yield _shared_row(shape, draws, prefix, number, now_s)


def _new(shape: SharingShape, number: int, share: float) -> _Prefix:
    tokens = quantile(shape.input_quantiles, share)
    return _Prefix(number, round(tokens * shape.shared_share), tokens * (1 - shape.shared_share))


def _shared_row(shape: SharingShape, draws: RandomDraws, prefix: _Prefix, number: int, now_s: float) -> MadeRow:
    own_tokens = max(1, round(draws.log_normal(prefix.own_tokens, OWN_NOISE)))
    output = draws.log_normal(shape.output_median, shape.output_sigma)
    return MadeRow(
        timestamp_ms=int(1000 * now_s),
        shared=("prefix", prefix.number),
        shared_tokens=prefix.tokens,
        own=("own", number),
        input_tokens=prefix.tokens + own_tokens,
        output_tokens=max(1, min(shape.output_max, round(output))),
    )


# The generator of groups: users behind shared system prompts, each in conversations of their own.


@dataclass(slots=True)
class _GroupUser:
    number: int
    group: int
    ready_s: float = 0.0
    conversation: int = 0
    #: Requests of the conversation that are still to come.
    turns_left: int = 0
    turn: int = 0
    own_tokens: float = 0.0
    #: Ends of the messages so far, in tokens of the conversation.
    ends: list[int] = field(default_factory=list)


def group_rows(shape: GroupsShape) -> Iterator[MadeRow]:
    """The requests in the order of time."""
    return _GroupTraffic(shape).generate()


class _GroupTraffic:
    def __init__(self, shape: GroupsShape) -> None:
        self._shape = shape
        self._draws = draws = RandomDraws(shape.seed)
        self._systems = [round(draws.log_normal(shape.system_median, shape.system_sigma)) for _ in range(shape.groups)]
        self._users = [_GroupUser(number, draws.rank(shape.groups)) for number in range(shape.users)]
        self._conversations = 0

    def generate(self) -> Iterator[MadeRow]:
        now_s = 0.0
        while True:
            now_s += self._draws.exponential(1 / self._shape.rate_per_s)
            if now_s >= self._shape.duration_s:
                return
            yield self._request(self._next_user(now_s), now_s)

    def _next_user(self, now_s: float) -> _GroupUser:
        """Return a user drawn at random, or the next one whose pause is over; the first drawn if none's is."""
        first = self._draws.below(len(self._users))
        places = (first + step for step in range(len(self._users)))
        ready = (self._users[index % len(self._users)] for index in places)
        return next((user for user in ready if user.ready_s <= now_s), self._users[first])

    def _request(self, user: _GroupUser, now_s: float) -> MadeRow:
        shape, draws, system_tokens = self._shape, self._draws, self._systems[user.group]
        if not user.turns_left or system_tokens + user.own_tokens >= shape.input_max:
            self._begin(user, system_tokens)
        user.own_tokens += max(1.0, draws.log_normal(shape.turn_median, shape.turn_sigma))
        user.turn += 1
        user.turns_left -= 1
        output = max(1, min(shape.output_max, round(draws.log_normal(shape.output_median, shape.output_sigma))))
        user.ready_s = now_s + shape.think_s_min + output * shape.answer_token_s
        input_tokens = min(shape.input_max, system_tokens + max(1, round(user.own_tokens)))
        user.ends.append(input_tokens)
        made = MadeRow(
            timestamp_ms=int(1000 * now_s),
            shared=("group", user.group),
            shared_tokens=min(system_tokens, shape.input_max - 1),
            own=("conversation", user.conversation),
            input_tokens=input_tokens,
            output_tokens=output,
            user=f"user-{user.number}",
            turn=user.turn,
            boundaries=tuple(bounded(user.ends)),
        )
        user.own_tokens += output
        user.ends.append(input_tokens + output)
        return made

    def _begin(self, user: _GroupUser, system_tokens: int) -> None:
        shape, draws = self._shape, self._draws
        self._conversations += 1
        user.conversation = self._conversations
        user.turns_left, user.turn = draws.geometric(shape.turns_mean), 0
        user.own_tokens = draws.log_normal(shape.history_median, shape.history_sigma) if shape.history_median else 0.0
        history = round(user.own_tokens)
        user.ends = [system_tokens, system_tokens + history] if history else [system_tokens]


# The generator of retrieval-augmented prompts: one system prompt, documents by popularity, a question.


def rag_rows(shape: RagShape) -> Iterator[MadeRow]:
    """The requests in the order of time."""
    draws, now_s, number = RandomDraws(shape.seed), 0.0, 0
    lengths = [
        max(1, round(draws.log_normal(shape.document_median, shape.document_sigma))) for _ in range(shape.documents)
    ]
    shares = list(accumulate((rank + 1) ** -shape.popularity for rank in range(shape.documents)))
    while True:
        now_s += draws.exponential(1 / shape.rate_per_s)
        if now_s >= shape.duration_s:
            return
        number += 1
        retrieved = 0 if draws.uniform() < shape.plain_share else shape.retrieved
        documents = _drawn(draws, shares, retrieved)
        parts: tuple[tuple[TextName, int], ...] = tuple((("document", one), lengths[one]) for one in documents)
        question = max(1, round(draws.log_normal(shape.question_median, shape.question_sigma)))
        output = draws.log_normal(shape.output_median, shape.output_sigma)
        yield MadeRow(
            timestamp_ms=int(1000 * now_s),
            shared=("system", 0),
            shared_tokens=shape.system_tokens,
            parts=parts,
            own=("question", number),
            input_tokens=shape.system_tokens + sum(tokens for _, tokens in parts) + question,
            output_tokens=max(1, min(shape.output_max, round(output))),
        )


def _drawn(draws: RandomDraws, shares: list[float], count: int) -> list[int]:
    """Return distinct documents in the order of their draws."""
    drawn: dict[int, None] = {}
    while len(drawn) < min(count, len(shares)):
        drawn[min(bisect_right(shares, draws.uniform() * shares[-1]), len(shares) - 1)] = None
    return list(drawn)


# The generator of herds: as many sessions at any time, a turn of each per round, at an even rate.


def herd_rows(shape: HerdShape) -> Iterator[MadeRow]:
    """The requests in the order of time."""
    draws, now_s, begun = RandomDraws(shape.seed), 0.0, shape.sessions
    #: The session in each place, and how many turns it has had.
    sessions, turns = list(range(shape.sessions)), [0] * shape.sessions
    for number in range(shape.rounds):
        for session in draws.shuffled(range(shape.sessions)):
            if number and draws.uniform() < shape.leaving_share:
                sessions[session], turns[session], begun = begun, 0, begun + 1
            now_s += draws.exponential(shape.gap_s)
            turns[session] += 1
            answered = (turns[session] - 1) * shape.output_tokens
            yield MadeRow(
                timestamp_ms=int(1000 * now_s),
                shared=("group", session % shape.groups),
                shared_tokens=shape.system_tokens,
                own=("session", sessions[session]),
                input_tokens=shape.system_tokens + turns[session] * shape.question_tokens + answered,
                output_tokens=shape.output_tokens,
                user=f"session-{sessions[session]}",
                turn=turns[session],
            )


# The generator of agents' sessions: they begin in bursts, take turns while tools run, and end.


#: Sessions of one burst begin within this time, s.
BURST_S = 1.0


def agent_rows(shape: AgentsShape) -> Iterator[MadeRow]:
    """The requests, session by session."""
    draws, burst_s, number = RandomDraws(shape.seed), 0.0, 0
    systems = [max(1, round(draws.log_normal(shape.system_median, shape.system_sigma))) for _ in range(shape.groups)]
    while True:
        burst_s += draws.exponential(shape.burst_mean / shape.sessions_per_s)
        if burst_s >= shape.duration_s:
            return
        for _ in range(draws.geometric(shape.burst_mean)):
            number += 1
            group = draws.rank(shape.groups)
            yield from _session(shape, draws, number, burst_s + BURST_S * draws.uniform(), group, systems[group])


def _session(
    shape: AgentsShape, draws: RandomDraws, number: int, now_s: float, group: int, system_tokens: int
) -> Iterator[MadeRow]:
    """Yield the requests of a session until it ends, reaches the longest prompt, or the trace ends."""
    turns = 1 if draws.uniform() < shape.one_shot_share else 1 + draws.geometric(shape.turns_mean - 1)
    system_tokens = min(system_tokens, shape.input_max - 1)
    input_tokens, ends = system_tokens, [system_tokens]
    added = draws.log_normal(shape.task_median, shape.task_sigma)
    for turn in range(1, turns + 1):
        if now_s >= shape.duration_s or input_tokens >= shape.input_max:
            return
        input_tokens = min(shape.input_max, input_tokens + max(1, round(added)))
        output = max(1, min(shape.output_max, round(draws.log_normal(shape.output_median, shape.output_sigma))))
        ends.append(input_tokens)
        yield MadeRow(
            timestamp_ms=int(1000 * now_s),
            shared=("group", group),
            shared_tokens=system_tokens,
            own=("session", number),
            input_tokens=input_tokens,
            output_tokens=output,
            user=f"session-{number}",
            turn=turn,
            boundaries=tuple(bounded(ends)),
        )
        input_tokens += output
        ends.append(input_tokens)
        now_s += output * shape.answer_token_s + shape.pause_s_min + draws.exponential(shape.pause_s_mean)
        added = draws.log_normal(shape.tool_median, shape.tool_sigma)
