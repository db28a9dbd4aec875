"""A multilayer perceptron with one output: its passes, its training, and the model that predicts TTFT by it.

Owns the network (`Perceptron`), the optimizer (`Adam`, `descend`), and the network of Lodestar (`MlpModel`). The
paragraph below is the theory of `Perceptron`.

Theory of operation. All weights and biases are views of one flat vector, and so is their gradient: the optimizer
works on whole vectors. ReLU follows each hidden layer. Dropout multiplies a hidden layer's activations by a mask that
the caller draws, so a prediction, which has no mask, is the network without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.record import record
from gorgo.core.training.learning import TargetKind, TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.learning.base import FittedModel, Scaler, capped_ttft_s, decode, encode, facts

#: Of either precision.
AnyFloats = NDArray[np.floating[Any]]
#: Outputs of a batch -> derivative of the loss by each output.
Derivative = Callable[[AnyFloats], AnyFloats]

_BIAS = 0.01


class Perceptron:
    """Fully connected layers with ReLU between them.

    Parameters
    ----------
    sizes:
        Width of the input and of each hidden layer; the output has width 1.
    parameters:
        Flat vector of `parameter_count(sizes)` values; its dtype is that of all arithmetic. Not copied.
    """

    def __init__(self, sizes: Sequence[int], parameters: AnyFloats) -> None:
        self.sizes = tuple(sizes)
        self.parameters = parameters
        self.layers = tuple(_layers(self.sizes, parameters))

    @classmethod
    def xavier(cls, sizes: Sequence[int], rng: np.random.Generator) -> Perceptron:
        """Return a network of float32 with Xavier-uniform weights and small positive biases."""
        network = cls(sizes, np.empty(parameter_count(sizes), dtype=np.float32))
        for weights, bias in network.layers:
            limit = np.sqrt(6.0 / sum(weights.shape))
            weights[:] = rng.uniform(-limit, limit, weights.shape)
            bias[:] = _BIAS
        return network

    def outputs(self, table: AnyFloats) -> AnyFloats:
        """Return the output of each row."""
        weights, bias = self.layers[-1]
        result: AnyFloats = (self.last_hidden(table) @ weights + bias)[:, 0]
        return result

    def last_hidden(self, table: AnyFloats) -> AnyFloats:
        """Return the activations of the last hidden layer, a row per row of the table."""
        for weights, bias in self.layers[:-1]:
            table = table @ weights
            table += bias
            np.maximum(table, 0.0, out=table)
        return table

    def gradient(self, table: AnyFloats, derivative: Derivative, masks: Sequence[AnyFloats | None] = ()) -> AnyFloats:
        """Return the gradient of the loss of a batch, as a vector like `parameters`.

        Parameters
        ----------
        derivative:
            Derivative of the loss by each output.
        masks:
            Dropout of the first hidden layers: factors of their activations, or None.
        """
        inputs = [table]
        for number, (weights, bias) in enumerate(self.layers[:-1]):
            hidden = inputs[-1] @ weights
            hidden += bias
            np.maximum(hidden, 0.0, out=hidden)
            mask = masks[number] if number < len(masks) else None
            if mask is not None:
                hidden *= mask
            inputs.append(hidden)
        weights, bias = self.layers[-1]
        return self._backward(inputs, derivative((inputs[-1] @ weights + bias)[:, 0])[:, None], masks)

    def _backward(self, inputs: list[AnyFloats], error: AnyFloats, masks: Sequence[AnyFloats | None]) -> AnyFloats:
        """Return the gradient by the chain rule, from the last layer to the first."""
        result = Perceptron(self.sizes, np.empty_like(self.parameters))
        for number in reversed(range(len(self.layers))):
            weight_gradient, bias_gradient = result.layers[number]
            np.matmul(inputs[number].T, error, out=weight_gradient)
            np.sum(error, axis=0, out=bias_gradient)
            if number:
                error = error @ self.layers[number][0].T
                # A unit that ReLU or the mask set to 0 passes nothing on.
                error *= inputs[number] > 0
                mask = masks[number - 1] if number - 1 < len(masks) else None
                if mask is not None:
                    error *= mask
        return result.parameters


def parameter_count(sizes: Sequence[int]) -> int:
    """Return the number of weights and biases.

    >>> parameter_count((20, 128, 128, 128))
    35841
    """
    return sum(fan_in * fan_out + fan_out for fan_in, fan_out in pairwise((*sizes, 1)))


def _layers(sizes: tuple[int, ...], parameters: AnyFloats) -> Iterator[tuple[AnyFloats, AnyFloats]]:
    """Weights and biases of each layer, as views of the flat vector."""
    start = 0
    for fan_in, fan_out in pairwise((*sizes, 1)):
        middle = start + fan_in * fan_out
        yield parameters[start:middle].reshape(fan_in, fan_out), parameters[middle : middle + fan_out]
        start = middle + fan_out


# Training of a network: Adam over shuffled batches, with weight decay, a falling rate and clipped gradients.
#
# The order of operations is that of PyTorch's `Adam`, `clip_grad_norm_` and `ExponentialLR`: the gradient is clipped,
# then the decay is added to it, and the rate falls after each epoch.
#
# References
# ----------
# D. P. Kingma, J. Ba: Adam, a method for stochastic optimization, 2015.


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


# The network of Lodestar: minus the TTFT of a replica's row by a multilayer perceptron.
#
# References
# ----------
# Lodestar: online learned routing of LLM requests, algorithm 4 and its appendix. Weights start anew in each round.


HIDDEN = (128, 128, 128)


@dataclass(frozen=True, slots=True, eq=False)
class MlpModel(FittedModel):
    """A fitted network; its output is the reward, minus the TTFT or its logarithm.

    Parameters
    ----------
    network, scaler:
        Parameters, and statistics of the features.
    target:
        As in `TrainingSpec`.
    """

    network: Perceptron
    scaler: Scaler
    target: TargetKind = "seconds"
    kind: str = field(default="mlp", init=False)

    def ttft_s(self, table: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return minus the reward of each row, in one pass; below 0 where the network extrapolates so."""
        return decode(-self.network.outputs(self.scaler.apply(table)).astype(np.float64), self.target)

    def tpot_s(self, table: NDArray[np.float32]) -> None:
        """Return `None`: Lodestar predicts no time per token."""

    def gradients(self, rows: TrainingRows, cap_s: float) -> NDArray[np.float32]:
        """Return the gradient of each row's squared error by the last layer's parameters, up to a factor of 2."""
        reward = _rewards(rows, cap_s, self.target)
        return last_layer_gradients(self.network, self.scaler.apply(rows.features), reward, rows.censored)

    def arrays(self) -> tuple[dict[str, NDArray[Any]], Mapping[str, Any]]:
        """Return parameters and statistics; the header has the hidden widths."""
        arrays: dict[str, NDArray[Any]] = {
            "parameters": self.network.parameters,
            "mean": self.scaler.mean,
            "inverse": self.scaler.inverse,
        }
        return arrays, {"hidden": list(self.network.sizes[1:]), "target": self.target}


def fit_mlp(rows: TrainingRows, spec: TrainingSpec, *, rng: np.random.Generator, version: int) -> MlpModel:
    """Return a network trained from random weights on all rows."""
    scaler = Scaler.of(rows.features)
    network = Perceptron.xavier((len(rows.names), *HIDDEN), rng)
    reward = _rewards(rows, spec.target_cap_s, spec.target)
    settings = Descent(epochs=spec.epochs)
    descend(network, scaler.apply(rows.features), reward, rows.censored, rng=rng, settings=settings)
    return MlpModel(**facts(rows, version), network=network, scaler=scaler, target=spec.target)


def _rewards(rows: TrainingRows, cap_s: float, target: TargetKind) -> NDArray[np.float32]:
    return -encode(capped_ttft_s(rows, cap_s), target).astype(np.float32)
