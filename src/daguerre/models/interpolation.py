"""Prompts between two prompts: points of the straight line between what a text encoder makes of either."""

from collections.abc import Sequence

import torch

from daguerre.errors import UserError
from daguerre.types import Cond, Prompt


def ends(prompts: Sequence[Prompt]) -> list[str]:
    """The text towards which each prompt goes, its own where it goes nowhere; [] where none goes anywhere."""
    if all(prompt.toward is None for prompt in prompts):
        return []
    return [prompt.text if prompt.toward is None else prompt.toward for prompt in prompts]


def between(features: Cond, prompts: Sequence[Prompt]) -> Cond:
    """The features of prompts, of those of all texts: the prompts' own [B, ...], any others, and those of their `ends`
    [B, ...]. The result lacks the last ones. Features as they are where no prompt goes anywhere.

    UserError where a network reads something of a prompt that has no values in between, such as a mask of its tokens,
    and it differs in the two.
    """
    if not ends(prompts):
        return features
    count, found = len(prompts), {}
    share_B = torch.tensor([prompt.share for prompt in prompts], dtype=torch.float32)
    for name, rows in features.items():
        first, others, last = rows[:count], rows[count:-count], rows[-count:]
        if rows.is_floating_point():
            share = share_B.to(rows).reshape(-1, *[1] * (rows.dim() - 1))
            first = torch.lerp(first, last, share)
        elif not torch.equal(first, last):
            raise UserError(
                f"interpolate_to: this model's network reads {name} with the features of a prompt. Those of the two "
                "prompts differ, and nothing lies between them: write two prompts of as many tokens, or take a model "
                "that reads all prompts in one length (Stable Diffusion, SDXL, Cascade)",
                code="unsupported",
                setting="interpolate_to",
            )
        found[name] = torch.cat([first, others])
    return found
