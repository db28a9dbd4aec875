"""Settings of a Router that may be replaced while it runs: policy, shadow, weights, limits, and a log of outcomes.

A setting takes effect with the next event and moves no request that is in flight.
"""

from __future__ import annotations

from collections.abc import Callable

from gorgo.core.admission import AdmissionController
from gorgo.core.dispatch.dispatcher import Dispatcher
from gorgo.core.dispatch.in_flight import InFlightTable
from gorgo.core.limits import RouterLimits
from gorgo.core.policy.interface import IndexKind, Policy, required_index, validate_shadow
from gorgo.core.policy.weights import Weights
from gorgo.core.prefix.index import PrefixIndex
from gorgo.core.prefix.kv_feeds import KvFeeds
from gorgo.core.training.learning import Learning, OutcomeRecorder, find_learner


class RouterSettings:
    """What decides, and within which bounds. The values in force are where they are used: this hands them out.

    Parameters
    ----------
    dispatcher, learning, table, index, feeds, admission:
        The Router's.
    limits:
        In force at the start.
    apply_limits:
        Hands other limits to every part that has one.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        learning: Learning,
        table: InFlightTable,
        index: PrefixIndex,
        feeds: KvFeeds,
        admission: AdmissionController,
        *,
        limits: RouterLimits,
        apply_limits: Callable[[RouterLimits], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._learning = learning
        self._table = table
        self._index = index
        self._feeds = feeds
        self._admission = admission
        self._apply_limits = apply_limits
        self.limits = limits
        #: Whether weights are frozen: no model is trained or adopted meanwhile.
        self.frozen = False
        self._count_progress()

    @property
    def policy(self) -> Policy:
        """The policy that chooses."""
        return self._dispatcher.policy

    @property
    def weights(self) -> Weights:
        """The weights of the next decision."""
        return self._dispatcher.weights

    @property
    def shadow(self) -> Policy | None:
        """The policy that scores decisions and makes none."""
        return self._dispatcher.shadow

    def set_weights(self, weights: Weights, *, now: float) -> None:
        """Use `weights` from the next decision on. The caller has checked and versioned them (`Weights.changed`)."""
        assert set(weights) == {spec.name for spec in self.policy.weight_specs}
        self._dispatcher.weights = weights

    def set_policy(self, policy: Policy, weights: Weights, *, now: float) -> None:
        """Route by another policy from the next decision on; requests in flight are not moved.

        Raises `ConfigError` if it and the shadow policy read different prefix indexes or both learn, and changes
        nothing. A policy that learns starts without a model.
        """
        kind = required_index(policy, self.shadow)
        self._learning.set_policies(policy, self.shadow)
        self._count_progress()
        self._dispatcher.policy = policy
        self.set_weights(weights, now=now)
        self._use_index(kind)
        self._admission.needs_drain = True

    def validate_policy(self, policy: Policy) -> None:
        """Raise `ConfigError` if `policy` cannot route beside the shadow policy in force."""
        required_index(policy, self.shadow)
        find_learner(policy, self.shadow)

    def set_shadow(self, policy: Policy | None, *, now: float) -> None:
        """Score decisions by another shadow policy, or by none. Raises as the Router's constructor does."""
        if policy is not None:
            validate_shadow(self.policy, policy)
        self._learning.set_policies(self.policy, policy)
        self._count_progress()
        self._dispatcher.set_shadow(policy)
        self._use_index(required_index(self.policy, policy))

    def record_outcomes(self, recorder: OutcomeRecorder | None) -> None:
        """Pass each attempt that is dispatched from now on to a log when it ends, or none."""
        self._learning.recorder = recorder
        self._count_progress()

    def set_limits(self, limits: RouterLimits, *, now: float) -> None:
        """Replace the limits; the number of retained decisions and samples stays."""
        self.limits = limits
        self._apply_limits(limits)

    def _use_index(self, kind: IndexKind) -> None:
        self._index.bounded = kind != "published"
        self._feeds.used = kind == "events"

    def _count_progress(self) -> None:
        self._table.count_progress(self._learning.reads_progress)
