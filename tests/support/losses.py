"""The loss of an objective on clean samples of one image, for tests of formulas."""

from daguerre.contracts.objectives import loss_of

__all__ = ["loss_of"]
