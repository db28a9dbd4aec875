"""Training of a network: Adam over shuffled batches, with weight decay, a falling rate and clipped gradients.

The order of operations is that of PyTorch's `Adam`, `clip_grad_norm_` and `ExponentialLR`: the gradient is clipped,
then the decay is added to it, and the rate falls after each epoch.

References
----------
D. P. Kingma, J. Ba: Adam, a method for stochastic optimization, 2015.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from gorgo.core.record import record
from gorgo.learning.models.network import AnyFloats, Derivative, Perceptron

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8


@record
class Descent:
    """Settings of one training.

    Parameters
    ----------
    epochs:
        Passes over all rows.
    batch:
        Rows per step.
    rate, gamma:
        Adam's step size, and its factor per epoch.
    decay:
        Weight decay: this share of a parameter is added to its gradient.
    clip:
        Largest Euclidean norm of the whole gradient of a step.
    linear_from:
        Size of an error from which on it counts in proportion and not by its square (Huber's loss).
    dropout:
        Share of activations set to 0, for each of the first hidden layers.
    """

    epochs: int = 20
    batch: int = 256
    rate: float = 3e-4
    gamma: float = 0.95
    decay: float = 1e-5
    clip: float = 1.0
    linear_from: float = inf
    dropout: tuple[float, ...] = (0.1, 0.1)


class Adam:
    """State of the optimizer: exponential means of gradients and of their squares.

    Parameters
    ----------
    parameters:
        Changed in place by each step.
    """

    def __init__(self, parameters: AnyFloats, *, decay: float = 0.0) -> None:
        self._parameters = parameters
        self._decay = decay
        self._mean = np.zeros_like(parameters)
        self._square = np.zeros_like(parameters)
        self._steps = 0

    def step(self, gradient: AnyFloats, rate: float) -> None:
        """Move the parameters against a gradient; the gradient's own values are overwritten."""
        self._steps += 1
        gradient += self._decay * self._parameters
        self._mean *= _BETA1
        self._mean += (1.0 - _BETA1) * gradient
        gradient *= gradient
        self._square *= _BETA2
        self._square += (1.0 - _BETA2) * gradient
        scale = np.sqrt(self._square / (1.0 - _BETA2**self._steps))
        scale += _EPSILON
        self._parameters -= rate / (1.0 - _BETA1**self._steps) * self._mean / scale


def descend(
    network: Perceptron,
    table: NDArray[np.float32],
    reward: NDArray[np.float32],
    censored: NDArray[np.bool_],
    *,
    rng: np.random.Generator,
    settings: Descent,
) -> None:
    """Fit the network's output to the rewards by mean squared error, or by Huber's loss, in place.

    A censored reward is an upper bound: an output at or below it has no error.
    """
    optimizer = Adam(network.parameters, decay=settings.decay)
    rate = settings.rate
    for _ in range(settings.epochs):
        order = rng.permutation(len(table))
        for start in range(0, len(order), settings.batch):
            rows = order[start : start + settings.batch]
            masks = _masks(network, len(rows), rng, settings.dropout)
            gradient = network.gradient(table[rows], _loss(reward[rows], censored[rows], settings.linear_from), masks)
            clip_norm(gradient, settings.clip)
            optimizer.step(gradient, rate)
        rate *= settings.gamma


def one_sided(error: AnyFloats, censored: NDArray[np.bool_]) -> AnyFloats:
    """Return output minus reward, and 0 for a censored row whose output is below its bound.

    >>> one_sided(np.array([-2.0, -2.0, 2.0]), np.array([False, True, True]))
    array([-2.,  0.,  2.])
    """
    return np.where(censored & (error < 0.0), error.dtype.type(0.0), error)


def last_layer_gradients(
    network: Perceptron, table: NDArray[np.float32], reward: NDArray[np.float32], censored: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return, per row, the last hidden activations and a 1, times the signed error of the output.

    That is half the gradient of the row's squared error by the weights and the bias of the last layer.
    """
    hidden = network.last_hidden(table)
    weights, bias = network.layers[-1]
    error = one_sided((hidden @ weights + bias)[:, 0] - reward, censored)
    result: NDArray[np.float32] = np.column_stack([hidden, np.ones(len(table), np.float32)]) * error[:, None]
    return result


def clip_norm(gradient: AnyFloats, limit: float) -> None:
    """Scale a gradient down, in place, to a Euclidean norm of at most `limit`."""
    norm = float(np.sqrt(np.dot(gradient, gradient)))
    if norm > limit:
        gradient *= limit / norm


def _loss(reward: AnyFloats, censored: NDArray[np.bool_], linear_from: float) -> Derivative:
    def derivative(outputs: AnyFloats) -> AnyFloats:
        error = one_sided(outputs - reward, censored)
        if linear_from < inf:
            np.clip(error, -linear_from, linear_from, out=error)
        return error * outputs.dtype.type(2.0 / len(reward))

    return derivative


def _masks(
    network: Perceptron, rows: int, rng: np.random.Generator, dropout: tuple[float, ...]
) -> list[AnyFloats | None]:
    """Return factors that keep the expected activation: 0, or the inverse of the share that stays."""
    masks: list[AnyFloats | None] = []
    for share, width in zip(dropout, network.sizes[1:], strict=False):
        stays = rng.random((rows, width), dtype=np.float32) >= share
        masks.append(stays * np.float32(1.0 / (1.0 - share)) if share else None)
    return masks
