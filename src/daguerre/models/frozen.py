"""Networks in evaluation mode: within a context, or for good where adapters add something to a frozen one."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

_DROPOUT = "lora_dropout"
"""peft's name of what drops inputs of an addition."""


@contextmanager
def in_evaluation(net: nn.Module) -> Iterator[None]:
    """Within the context the net is in evaluation mode; afterwards, also after an error, as it was before."""
    was_training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(was_training)


def keep_evaluating(network: Any) -> None:
    """Keeps a network in evaluation mode for good. `train` reaches the dropout of additions alone, and layers of
    transformers, which ask by it whether they compute their activations again."""

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        for name, module in self.named_modules():
            follows = _DROPOUT in name or isinstance(module, GradientCheckpointingLayer)
            module.training = mode and follows
        return self

    network.train = MethodType(train, network)
    network.train(False)
