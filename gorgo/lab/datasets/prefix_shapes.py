"""Shapes of traffic by what its prompts share: groups of users, reused prefixes, retrieved documents, agents' sessions.

`*_median` and `*_sigma` are those of a log-normal distribution, lengths in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from gorgo.errors import TraceError
from gorgo.lab.traces import BLOCK_TOKENS

#: Points (share, tokens) of a distribution, both rising, the first share 0 and the last 1.
Quantiles = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsShape:
    """System prompts x users x turns: users of one group share its system prompt, conversations are their own.

    Parameters
    ----------
    seed, duration_s, rate_per_s:
        Chance, the length of the window, and the mean rate of Poisson arrivals.
    groups, users:
        System prompts, the n-th in proportion to 1/n among the users, and users of all groups.
    system_*:
        Length of a group's system prompt.
    history_*:
        Length of a conversation before its first request here; a median of 0 is none.
    turns_mean:
        Requests of a conversation (geometric); then its user begins another.
    turn_*:
        What a turn adds beside the answer to the last one.
    think_s_min:
        Least time between two requests of a user.
    answer_token_s:
        A user's next request comes so much later for each token of the answer that it goes on with.
    output_*:
        Output lengths, capped at `output_max`.
    input_max:
        No prompt is longer; a conversation that reaches it ends.
    """

    seed: int
    duration_s: float
    rate_per_s: float
    groups: int
    users: int
    system_median: float
    system_sigma: float
    history_median: float
    history_sigma: float
    turns_mean: float
    turn_median: float
    turn_sigma: float
    think_s_min: float
    output_median: float
    output_sigma: float
    output_max: int
    input_max: int
    block_tokens: int = BLOCK_TOKENS
    answer_token_s: float = 0.0

    def __post_init__(self) -> None:
        _at_least_one(groups=self.groups, users=self.users, rate_per_s=self.rate_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingShape:
    """Prefixes that return after a distance, and from one request on are all new.

    Parameters
    ----------
    seed, requests, rate_per_s:
        Chance, the number of requests, and the mean rate of Poisson arrivals.
    input_quantiles:
        Prompt lengths over new prefixes, as points [share, tokens] joined by lines.
    shared_share:
        Share of a prompt that is its prefix; the rest is its own.
    new_share:
        Share of the requests that begin a prefix; the others reuse one.
    reuse_distance:
        Mean number of distinct prefixes used between two uses of one (exponential).
    shift_at:
        From this request on, counted from 0, every earlier prefix is out of use; 0: never.
    output_*:
        Output lengths, capped at `output_max`.
    """

    seed: int
    requests: int
    rate_per_s: float
    input_quantiles: Quantiles
    shared_share: float
    new_share: float
    reuse_distance: float
    shift_at: int
    output_median: float
    output_sigma: float
    output_max: int
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        _at_least_one(requests=self.requests, rate_per_s=self.rate_per_s)
        _at_most_one(shared_share=self.shared_share, new_share=self.new_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class RagShape:
    """Prompts of a system prompt, retrieved documents and a question; the order of documents decides what is shared.

    Parameters
    ----------
    seed, duration_s, rate_per_s:
        Chance, the length of the window, and the mean rate of Poisson arrivals.
    system_tokens:
        System prompt of all requests.
    documents, document_*:
        Number of documents, and their lengths.
    popularity:
        The n-th most popular document is drawn in proportion to 1/n to this power.
    retrieved:
        Documents of a prompt, in the order of their retrieval.
    plain_share:
        Share of the requests without a document.
    question_*:
        Lengths of questions with what is known of the user.
    output_*:
        Output lengths, capped at `output_max`.
    """

    seed: int
    duration_s: float
    rate_per_s: float
    system_tokens: int
    documents: int
    document_median: float
    document_sigma: float
    popularity: float
    retrieved: int
    plain_share: float
    question_median: float
    question_sigma: float
    output_median: float
    output_sigma: float
    output_max: int
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        _at_least_one(documents=self.documents, rate_per_s=self.rate_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class HerdShape:
    """Sessions side by side behind a few shared system prompts, each with a turn per round, at an even rate.

    It is the traffic on which a policy that prices each request alone sends every session to the replica that was first
    to have the system prompt. The sessions of a round come in any order.

    Parameters
    ----------
    seed, sessions, rounds:
        Chance, sessions at any time, and turns of a session that stays throughout.
    groups:
        System prompts; the sessions are divided evenly among them.
    gap_s:
        Mean time between two requests of the trace (exponential).
    system_tokens, question_tokens, output_tokens:
        Lengths of a system prompt, of what a turn adds, and of the answer that the next turn goes on with.
    leaving_share:
        Before each round after the first every session ends with this probability, and a new one of the same group
        takes its place; 0: the sessions are the same throughout.
    """

    seed: int
    sessions: int
    rounds: int
    groups: int
    gap_s: float
    system_tokens: int
    question_tokens: int
    output_tokens: int
    leaving_share: float
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        _at_least_one(
            sessions=self.sessions, rounds=self.rounds, groups=self.groups, gap_s=self.gap_s,
            question_tokens=self.question_tokens, output_tokens=self.output_tokens,
        )  # fmt: skip
        _at_most_one(leaving_share=self.leaving_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsShape:
    """Agents' sessions that come and go: a system prompt of their group, a task, then a turn per result of a tool.

    Parameters
    ----------
    seed, duration_s:
        Chance, and when the last request may come.
    sessions_per_s, burst_mean:
        Mean rate of new sessions. They begin in bursts of this mean size (geometric), each burst within one second, the
        bursts at Poisson times; 1: every session on its own.
    one_shot_share:
        Share of the sessions with one request.
    turns_mean:
        Requests of the others, at least 2 (one more than a geometric number); then a session ends.
    groups, system_*:
        System prompts, the n-th in proportion to 1/n among the sessions, and their lengths.
    task_*:
        What a session begins with behind the system prompt: the task, and the files that belong to it.
    tool_*:
        What a turn adds beside the answer to the last one: the result of a tool.
    pause_s_min, pause_s_mean:
        Time from the end of an answer to the next request, while a tool runs: the least, and the mean of what comes on
        top (exponential).
    answer_token_s:
        A session's next request comes so much later for each token of the answer that it goes on with.
    output_*:
        Output lengths, capped at `output_max`.
    input_max:
        No prompt is longer; a session that reaches it ends.
    """

    seed: int
    duration_s: float
    sessions_per_s: float
    burst_mean: float
    one_shot_share: float
    turns_mean: float
    groups: int
    system_median: float
    system_sigma: float
    task_median: float
    task_sigma: float
    tool_median: float
    tool_sigma: float
    pause_s_min: float
    pause_s_mean: float
    answer_token_s: float
    output_median: float
    output_sigma: float
    output_max: int
    input_max: int
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        _at_least_one(
            sessions_per_s=self.sessions_per_s, groups=self.groups, output_max=self.output_max, input_max=self.input_max
        )
        _at_most_one(one_shot_share=self.one_shot_share)
        for name, least in (("burst_mean", 1), ("turns_mean", 2)):
            if getattr(self, name) < least:
                raise TraceError(f"{name} is {getattr(self, name)}; expected at least {least}")


def _at_least_one(**counts: float) -> None:
    for name, count in counts.items():
        if count == 0:
            raise TraceError(f"{name} is 0; expected more than 0")


def _at_most_one(**shares: float) -> None:
    for name, share in shares.items():
        if share > 1:
            raise TraceError(f"{name} is {share}; expected a share, at most 1")
