"""A multilayer perceptron with one output: forward pass, gradient, parameters as one vector.

Theory of operation. All weights and biases are views of one flat vector, and so is their gradient: the optimizer
works on whole vectors. ReLU follows each hidden layer. Dropout multiplies a hidden layer's activations by a mask that
the caller draws, so a prediction, which has no mask, is the network without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
