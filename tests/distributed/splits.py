"""Five updates of a tiny network on four processes, on every mesh, beside the same on one: run by test_apply.py.

python splits.py KIND RANK RENDEZVOUS_FILE OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import UNet2DConditionModel
from known_networks import BLOCKS, HEADS, placed_children
from tiny_models import SDXL_UNET, TINY_UNET
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from transformers import CLIPTextConfig, CLIPTextModel

from daguerre.distributed import collectives, parallelize
from daguerre.distributed.mesh import Mesh

ONE = {"data": 1, "fsdp": 1, "tensor": 1}
MESHES = [(4, 1, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2)]
BATCH = 8
EPS = 1e-6
"""Keeps gradients that are zero but for rounding (of attention's key biases) from being magnified to whole steps."""
STEPS = 5


class Both(nn.Module):
    """A UNet and the text encoder that conditions it, both trained."""

    def __init__(self, numbers: dict[str, Any], width: int) -> None:
        super().__init__()
        self.unet = UNet2DConditionModel(**{"cross_attention_dim": width} | numbers).double()
        config = CLIPTextConfig(
            vocab_size=64, hidden_size=width, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=8, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        self.text_encoder = CLIPTextModel(config).double()

    def forward(self, x: Tensor, t: Tensor, ids: Tensor, added: dict[str, Tensor] | None) -> Tensor:
        text = self.text_encoder(ids).last_hidden_state
        return self.unet(x, t, text, added_cond_kwargs=added, return_dict=False)[0]


def build(kind: str) -> Both:
    torch.manual_seed(0)
    if kind == "sd":
        return Both(dict(TINY_UNET), 48)
    return Both(dict(SDXL_UNET), SDXL_UNET["cross_attention_dim"])


def inputs(kind: str, step: int) -> list[Any]:
    made = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 4, 8, 8, generator=made, dtype=torch.float64)
    t = torch.rand(BATCH, generator=made, dtype=torch.float64) * 999
    ids = torch.randint(2, 64, (BATCH, 8), generator=made)
    if kind == "sd":
        return [x, t, ids, None]
    sizes, width = SDXL_UNET["addition_time_embed_dim"], SDXL_UNET["projection_class_embeddings_input_dim"]
    pooled = torch.randn(BATCH, width - 6 * sizes, generator=made, dtype=torch.float64)
    return [x, t, ids, {"text_embeds": pooled, "time_ids": torch.randint(0, 64, (BATCH, 6), generator=made).double()}]


def cut(value: Any, part: slice) -> Any:
    if isinstance(value, dict):
        return {name: cut(inner, part) for name, inner in value.items()}
    return None if value is None else value[part]


def train(net: Both, kind: str, mesh: Mesh, rank: int) -> tuple[list[float], parallelize.Split | None]:
    """Losses and gradient norms of five updates with two micro-batches each; the net is moved."""
    placed = placed_children(net, mesh).placed
    devices = parallelize.device_mesh(mesh, "cpu")
    split = parallelize.apply(net, mesh, placed, devices, BLOCKS, HEADS)
    reducer = None
    if mesh.degree("fsdp") == 1 and mesh.degree("data") > 1:
        reducer = collectives.Reducer(list(net.parameters()), devices["data"].get_group())
    parameters = list(net.parameters())
    parts = parallelize.own_parts(parameters)
    optimizer = torch.optim.AdamW(parts, lr=1e-4, eps=EPS)
    numbers = []
    for step in range(STEPS):
        given = inputs(kind, step)
        own = BATCH // mesh.batch_ranks
        first = mesh.batch_rank(rank) * own
        total = torch.zeros((), dtype=torch.float64)
        halves = [slice(first, first + own // 2), slice(first + own // 2, first + own)]
        for i, part in enumerate(halves):
            last = i == len(halves) - 1
            parallelize.sync_gradients(net, last)
            if reducer is not None:
                reducer.now = last
            loss = net(*(cut(value, part) for value in given)).square().mean((1, 2, 3)).sum() / BATCH
            loss.backward()
            total += loss.detach()
        if reducer is not None:
            reducer.finish()
        for axis in ("data", "fsdp"):
            dist.all_reduce(total, group=devices[axis].get_group())
        norm = collectives.squared_norm(by_split(parameters), devices).sqrt()
        parallelize.hand_over(parameters, parts)
        clip_grads_with_norm_([p for p in parts if p.grad is not None], 0.05, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        numbers += [total.item(), norm.item()]
    return numbers, split


def by_split(parameters: list[nn.Parameter]) -> dict[frozenset[str], list[Tensor]]:
    kinds: dict[frozenset[str], list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            kinds.setdefault(collectives.split_over(p), []).append(parallelize.local(p.grad))
    return kinds


def compared(kind: str, shape: tuple[int, int, int], rank: int) -> dict[str, float]:
    """The largest relative difference of losses, norms and weights to one process."""
    mesh = Mesh(ONE, dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))
    alone, together = build(kind), build(kind)
    expected = plain(alone, kind)
    numbers, split = train(together, kind, mesh, rank) if rank < mesh.devices else (expected, None)
    found = {"numbers": max(abs(a - b) / abs(b) for a, b in zip(numbers, expected, strict=True)), "weights": 0.0}
    if split is not None:
        reference = dict(alone.named_parameters())
        for name, p in together.named_parameters():
            ours = split.own_order(name, parallelize.whole(p.detach()))
            theirs = reference[name].detach()
            found["weights"] = max(
                found["weights"], ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3)).item()
            )
    return found


def plain(net: Both, kind: str) -> list[float]:
    """The same updates on one device, by torch's own parts."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, eps=EPS)
    numbers = []
    for step in range(STEPS):
        loss = net(*inputs(kind, step)).square().mean((1, 2, 3)).sum() / BATCH
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        numbers += [loss.item(), norm.item()]
    return numbers


def main(kind: str, rank: int, rendezvous: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=4)
    found = {f"{kind} {shape}": compared(kind, shape, rank) for shape in MESHES}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
